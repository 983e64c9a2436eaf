"""What a terminal shows becomes a picture that moves."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from xml.etree import ElementTree

import pytest
from rich.console import Console

from demo.display import Display
from demo.recording import FIRST, PICTURE, Output, draw, lines_shown, record


def shown(*outputs: tuple[float, str]) -> list[tuple[int, str, float, float | None]]:
    """Return row, text, begin and end of every line."""
    found = lines_shown([Output(*one) for one in outputs])
    return [(one.row, one.line.plain, one.begin, one.end) for one in found]


def test_a_line_that_is_written_anew_ends_when_the_next_one_begins() -> None:
    found = shown((0, "a\r\n"), (1, "10 %"), (2, "\r\x1b[2K20 %"), (3, "\r\n"))

    assert found == [(0, "a", 0, None), (1, "10 %", 1, 2), (1, "20 %", 2, None)]


def test_what_changes_faster_than_a_picture_is_left_out() -> None:
    found = shown((0, "1 %"), (0.1, "\r\x1b[2K2 %"), (0.2, "\r\x1b[2K3 %"), (0.3, "\r\x1b[2K4 %"))

    assert [(text, end) for _, text, _, end in found] == [("1 %", 0.3), ("4 %", None)]


def test_the_bar_of_the_demo_stays_in_its_line() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80, color_system="truecolor")
    with Display(console, 10) as display:
        display.update(sent=5, applied=5, seconds=1.0)
        display.note("killed")
        display.update(sent=10, applied=10, seconds=2.0)

    last = [text for _, text, _, end in shown((0, written.getvalue())) if end is None]

    assert [text.split()[-1] for text in last] == ["killed", "5/s"]


def test_the_picture_without_animation_is_the_end() -> None:
    lines = lines_shown([Output(0, "\x1b[1;31mone\x1b[0m <&>"), Output(1, "\r\x1b[2Ktwo")])

    root = ElementTree.fromstring(draw(lines, title="a title", seconds=1.0))

    _, *texts = root.iter("{http://www.w3.org/2000/svg}text")
    assert ["".join(one.itertext()) for one in texts] == ["one <&>", "two"]
    assert [one.get("visibility") for one in texts] == ["hidden", None]
    [first, *_] = texts[0]
    assert (first.text, first.get("font-weight")) == ("one", "bold")
    assert "fill" in first.attrib


def of_recording() -> str:
    """A recording of 18 seconds, whose last line comes at the end."""
    lines = lines_shown([Output(0, "one\n"), Output(18, "two")])
    return draw(lines, title="a title", seconds=18.0)


@pytest.mark.parametrize("picture", [of_recording, lambda: PICTURE.read_text("utf-8")])
def test_the_picture_begins_with_its_end(picture: Callable[[], str]) -> None:
    svg = picture()
    times = re.findall(r"animation:l\d+ ([\d.]+)s step-end (-[\d.]+)s infinite", svg)
    [(whole, delay)] = set(times)
    begin = 100 * -float(delay) / float(whole)

    assert len(times) == svg.count("@keyframes") > 0
    assert float(whole) + float(delay) == pytest.approx(FIRST)
    assert max(map(float, re.findall(r"([\d.]+)%\{", svg))) < begin < 100


@pytest.fixture
def terminals() -> None:
    """Skip the test where there are none, as in a container without devpts."""
    try:
        for end in os.openpty():
            os.close(end)
    except OSError as error:
        pytest.skip(f"a terminal can't be opened here: {error}")


@pytest.mark.usefixtures("terminals")
def test_a_command_runs_in_a_terminal() -> None:
    code = "import os, sys; print(sys.stdout.isatty(), os.get_terminal_size)"

    outputs = list(record([sys.executable, "-c", code], 92))

    assert "".join(one.text for one in outputs).startswith("True")
    with pytest.raises(subprocess.CalledProcessError):
        list(record([sys.executable, "-c", "raise SystemExit(3)"], 92))
