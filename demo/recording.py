"""`python -m demo.recording`: run `make demo` in a terminal and draw its output as an animated SVG.

The picture needs no script and no player. It begins with its end, the ledger. Without animation, or
where a reader prefers none, it shows nothing else.
"""

import argparse
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.etree.ElementTree import Element, SubElement, tostring

from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME, TerminalTheme
from rich.text import Text

from demo.flights import ROOT

THEME = TerminalTheme(
    SVG_EXPORT_THEME.background_color,
    SVG_EXPORT_THEME.foreground_color,
    [  # Rich's red, blue and magenta are too dark for text.
        *((75, 78, 85), (236, 122, 126), (152, 168, 75), (208, 179, 68)),
        *((120, 164, 206), (196, 156, 204), (104, 160, 179), (197, 200, 198)),
    ],
)
PICTURE = ROOT / "docs" / "images" / "demo.svg"
COMMAND = ("make", "demo")
COLUMNS = 96
TICK = 0.25
"""Seconds of the recording between two states that are drawn."""
HOLD = 0.3
"""Share of the picture's time in which its end stands still."""
FIRST = 2.0
"""Seconds for which the picture shows its end before it begins."""
CELL, LINE, SIZE = 8.4, 19.0, 14
LEFT, TOP, BOTTOM = 16.0, 48.0, 14.0


class Output(NamedTuple):
    """What was written to the terminal, and when."""

    seconds: float
    text: str


@dataclass
class Shown:
    """A line of the terminal, from one moment to another; to the end without an end."""

    row: int
    line: Text
    begin: float
    end: float | None = None


def record(command: Sequence[str], columns: int) -> Iterator[Output]:
    """Run a command in a terminal of its own; raises `CalledProcessError` if it fails."""
    ours, its = pty.openpty()
    environment = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "40"}
    began = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=its,
        stderr=its,
    ) as process:
        os.close(its)
        try:
            while data := os.read(ours, 65_536):
                yield Output(time.monotonic() - began, data.decode())
        except OSError:  # Linux reports EIO when the last process has closed the terminal
            pass
        finally:
            os.close(ours)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def lines_shown(outputs: Sequence[Output]) -> list[Shown]:
    """Return which line stood in which row, and when.

    Understands what `rich` writes: colours, and a last line that is written anew.
    """
    rows: dict[int, Shown] = {}
    found: list[Shown] = []
    written, drawn = "", -TICK
    for output in outputs:
        written += output.text.replace("\r\n", "\n")
        seconds = output.seconds
        if seconds - drawn < TICK and output is not outputs[-1]:
            continue
        drawn, decoder = seconds, AnsiDecoder()
        for row, raw in enumerate(written.split("\n")):
            line = decoder.decode_line(raw)
            before = rows.get(row)
            if before and before.line.markup == line.markup:
                continue
            if before:
                before.end = seconds
            rows[row] = Shown(row, line, seconds)
            found.append(rows[row])
    return [one for one in found if one.line.plain.strip()]


def draw(shown: Sequence[Shown], *, title: str, seconds: float) -> str:
    """Draw the lines as an SVG that repeats a recording of so many seconds, as fast as it was."""
    width = 2 * LEFT + COLUMNS * CELL
    height = TOP + LINE * (max(one.row for one in shown) + 1) + BOTTOM
    whole = seconds / (1 - HOLD)
    timing = f"{whole:.1f}s step-end {FIRST - whole:.1f}s infinite"  # a part of the end comes first
    root = Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {width:g} {height:g}",
            "width": f"{width:g}",
            "role": "img",
            "font-family": "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace",
            "font-size": str(SIZE),
            "fill": THEME.foreground_color.hex,
        },
    )
    SubElement(root, "title").text = title
    style = SubElement(root, "style")
    frame = {"width": f"{width:g}", "height": f"{height:g}", "rx": "8"}
    SubElement(root, "rect", frame | {"fill": THEME.background_color.hex})
    for place, colour in enumerate(("#ff5f57", "#febc2e", "#28c840")):
        dot = {"cx": f"{22 + 20 * place}", "cy": "20", "r": "6", "fill": colour}
        SubElement(root, "circle", dot)
    middle = {"x": f"{width / 2:g}", "y": "25", "text-anchor": "middle", "opacity": "0.7"}
    SubElement(root, "text", middle).text = title
    rules = []
    for number, one in enumerate(shown):
        element = _line(root, one)
        element.set("class", f"l{number}")
        steps = ["0%{visibility:hidden}", f"{one.begin / whole:.2%}{{visibility:visible}}"]
        if one.end is not None:
            element.set("visibility", "hidden")
            steps.append(f"{one.end / whole:.2%}{{visibility:hidden}}")
        rules.append(f"@keyframes l{number}{{{''.join(steps)}}}")
        rules.append(f".l{number}{{animation:l{number} {timing}}}")
    rules.append("@media (prefers-reduced-motion:reduce){text{animation:none!important}}")
    style.text = "\n".join(["", *rules, ""])
    for each in root:  # no white space inside a line: it would show
        each.tail = "\n"
    return tostring(root, encoding="unicode") + "\n"


def _line(root: Element, one: Shown) -> Element:
    """Add a line; the length of its text keeps the columns in place, whatever the font."""
    place = {"x": f"{LEFT:g}", "y": f"{TOP + LINE * one.row + SIZE:g}", "xml:space": "preserve"}
    line = one.line.copy()
    line.rstrip()
    length = {"textLength": f"{len(line) * CELL:.1f}"}
    element = SubElement(root, "text", place | length)
    for segment in Segment.simplify(line.render(Console(width=COLUMNS, color_system="truecolor"))):
        if segment.text:
            SubElement(element, "tspan", _attributes(segment.style)).text = segment.text
    return element


def _attributes(style: Style | None) -> dict[str, str]:
    found = {}
    if style and style.bold:
        found["font-weight"] = "bold"
    if style and style.dim:
        found["opacity"] = "0.6"
    if style and style.color and not style.color.is_default:
        found["fill"] = style.color.get_truecolor(THEME).hex
    return found


def main() -> int:
    """Record the demo and write the picture; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m demo.recording", description=__doc__)
    parser.add_argument("--picture", type=Path, default=PICTURE, metavar="FILE")
    parser.add_argument(
        "--seconds", type=float, default=18.0, metavar="S", help="how long the recording is to last"
    )
    options = parser.parse_args()
    outputs = [Output(0.0, f"$ {' '.join(COMMAND)}\n")]
    for output in record(COMMAND, COLUMNS):
        print(output.text, end="", flush=True)
        # Paths as they are written in the repository's folder.
        outputs.append(output._replace(text=output.text.replace(f"{ROOT}/", "")))
    took = outputs[-1].seconds
    scale = options.seconds / took
    shown = lines_shown([Output(seconds * scale, text) for seconds, text in outputs])
    title = f"{' '.join(COMMAND)}: {took:.0f} seconds, shown in {options.seconds:.0f}"
    options.picture.write_text(draw(shown, title=title, seconds=options.seconds), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
