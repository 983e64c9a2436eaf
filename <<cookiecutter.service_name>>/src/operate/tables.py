"""Tables for a person, and text that a terminal only shows."""

import re
from collections.abc import Collection, Iterable, Sequence

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal would obey, and a payload may hold; tab and end of line are harmless."""
_UNBOUNDED = 100_000
"""Columns of what is no terminal: a row stays on its line there, for `grep` and `awk`."""
_STYLES = {"wrong": "bold red", "warning": "yellow", "ok": "green"}
"""How a cell with nothing but such a word looks on a terminal."""


def tell_table(
    names: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = ()
) -> None:
    """Write rows under the names of their columns; `right` names those whose text ends alike.

    A cell is shown as a line, and nothing is cut off: on a terminal that is too narrow it goes on
    below. The first column, by which a person names a row, goes on last. No row, no table.
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
        with console.capture() as told:
            console.print(table)
        for line in told.get().splitlines():
            typer.echo(line.rstrip(), color=console.is_terminal)


def one_line(text: str) -> str:
    """Return text as a line that a terminal only shows."""
    return harmless(text.replace("\n", "\\n"))


def harmless(text: str) -> str:
    """Return text that a terminal only shows."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
