"""Output of commands: JSON for programs; tables, fields and sentences for people."""

import os
import re
import signal
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal

import typer
from pydantic_core import to_json
from rich.console import Console
from rich.table import Table
from rich.text import Text

from onceward.redaction import harmless, redact, redact_known

from .errors import OutputFailed

Content = dict[Literal["text", "hex"], str] | None
"""Bytes, as `text` if they are UTF-8, else as `hex`."""

_STYLES = {"wrong": "bold red", "warning": "yellow", "ok": "green"}
"""Styles on a terminal of cells that hold only one of these words."""


@contextmanager
def standard_streams() -> Iterator[None]:
    """Open closed standard streams as the null device; drop what can't be written, at the end."""
    # Files would get the numbers of closed streams, and uvloop aborts when it closes such a file.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # Python would try it again, and change the exit code
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl+C end a wait for standard input, in which the event loop would only note it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def write(data: str | bytes = "", *, err: bool = False, end: str = "\n") -> None:
    """Write a text with its invisible characters escaped, or bytes as they are.

    Raises `OutputFailed`, but not of standard error.
    """
    try:
        whole = data if isinstance(data, bytes) else f"{harmless(data)}{end}"
        typer.echo(whole, err=err, nl=False)
    except OSError as error:
        if not err:
            raise OutputFailed(error) from error


def print_json(*values: object) -> None:
    """Write each value as a line of JSON."""
    for one in values:
        write(json_line(one))


def json_line(value: object) -> bytes:
    """Return a value as a line of JSON, with its invisible characters escaped."""
    return f"{harmless(to_json(value).decode())}\n".encode()


def table(
    names: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Collection[str] = (),
    has_header: bool = True,
) -> Iterator[str | bytes]:
    """Yield, for `write`, rows under the names of their columns; those in `right` align right.

    No cell is cut off: on a narrow terminal cells are folded, those of the first column last, and
    elsewhere each row is a line, for `grep` and `awk`. Without rows nothing is written.
    """
    cells = [[one_line(cell) for cell in row] for row in rows]
    console = Console(highlight=False)
    if cells and not console.is_terminal:
        lines = [names, *cells] if has_header else cells
        sides = [">" if name in right else "<" for name in names]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            each = zip(line, sides, widths, strict=True)
            yield "  ".join(f"{cell:{side}{width}}" for cell, side, width in each).rstrip()
    elif cells:
        grid = Table(*names, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        grid.show_header, grid.columns[0].no_wrap = has_header, True
        for column, name in zip(grid.columns, names, strict=True):
            column.justify, column.overflow = "right" if name in right else "left", "fold"
        for row in cells:
            grid.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
        with console.capture() as captured:
            console.print(grid)
        yield re.sub(" +$", "", captured.get(), flags=re.MULTILINE).encode()


def print_fields(fields: Mapping[str, object], *texts: str) -> None:
    """Write a line for each field that is not None, and then longer texts."""
    known = {name: value for name, value in fields.items() if value is not None}
    width = max(map(len, known))
    lines = [one_line(f"{name:<{width}}  {format_value(value)}") for name, value in known.items()]
    write("\n".join([*lines, *(f"\n{text}" for text in texts)]))


def one_line(text: str) -> str:
    """Return a text as one line, with invisible characters escaped as in JSON."""
    return harmless(text.replace("\n", "\\n"))


def format_time(time: datetime) -> str:
    """Return a time in UTC, to the second."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"


def format_span(seconds: float) -> str:
    """Return a time in its largest unit."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{max(0.0, seconds):,.0f} s"


def content_of(data: bytes | None, *, shows_fields: bool = False) -> Content:
    """Return bytes as text or in hex, without secrets.

    With `shows_fields` the fields are shown that a model marks as personal or secret.
    """
    hide = redact_known if shows_fields else redact
    if data is None:
        return None
    try:
        return {"text": hide(data.decode())}
    except UnicodeDecodeError:
        return {"hex": hide(data.decode("latin-1")).encode("latin-1").hex()}


def format_value(value: object) -> str:
    """Return a value as text for people: times to the second, bytes as text or in hex."""
    match value:
        case None | "":
            return "-"
        case datetime():
            return format_time(value)
        case bool():
            return "yes" if value else "no"
        case {"hex": digits}:
            return f"0x{digits}"
        case {"text": text}:
            return str(text)
        case _:
            return str(value)
