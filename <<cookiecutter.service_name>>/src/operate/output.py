"""Output of commands: JSON for programs; tables, fields and sentences for people."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

import typer
from pydantic_core import to_json
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.redaction import redact

Content = dict[Literal["text", "hex"], str] | None
"""Bytes, as `text` if they are UTF-8, else as `hex`."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that a terminal interprets, other than tab and end of line."""
_UNBOUNDED = 100_000
"""Width of a file or a pipe, so that each row is one line for `grep` and `awk`."""
_STYLES = {"wrong": "bold red", "warning": "yellow", "ok": "green"}
"""Styles on a terminal of cells that hold only one of these words."""


def print_json(*values: object) -> None:
    """Write each value as a line of JSON."""
    for one in values:
        typer.echo(to_json(one))


def print_table(
    names: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = ()
) -> None:
    """Write rows under the names of their columns; the columns in `right` are aligned right.

    No cell is cut off: on a narrow terminal cells are folded, those of the first column, which
    identify the rows, last. Without rows nothing is written.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, name in enumerate(names):
        table.add_column(
            name,
            justify="right" if name in right else "left",
            overflow="fold",
            no_wrap=number == 0,
        )
    for row in rows:
        table.add_row(*(Text(one_line(cell), _STYLES.get(cell, "")) for cell in row))
    if table.rows:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = _UNBOUNDED
        with console.capture() as captured:
            console.print(table)
        for line in captured.get().splitlines():
            typer.echo(line.rstrip(), color=console.is_terminal)


def print_fields(fields: Mapping[str, object], *texts: str) -> None:
    """Write a line for each field that is not None, and then longer texts."""
    known = {name: value for name, value in fields.items() if value is not None}
    width = max(map(len, known))
    lines = [one_line(f"{name:<{width}}  {format_value(value)}") for name, value in known.items()]
    typer.echo("\n".join([*lines, *(f"\n{harmless(text)}" for text in texts)]))


def one_line(text: str) -> str:
    """Return text as one line without characters that a terminal interprets."""
    return harmless(text.replace("\n", "\\n"))


def harmless(text: str) -> str:
    """Return text with the characters that a terminal interprets escaped."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def format_time(time: datetime) -> str:
    """Return a time in UTC, to the second."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"


def format_span(seconds: float) -> str:
    """Return a time in its largest unit."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{max(0.0, seconds):,.0f} s"


def content_of(data: bytes | None) -> Content:
    """Return bytes as text or in hex, without secrets."""
    if data is None:
        return None
    try:
        return {"text": redact(data.decode())}
    except UnicodeDecodeError:
        return {"hex": redact(data.decode("latin-1")).encode("latin-1").hex()}


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
