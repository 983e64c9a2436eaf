"""What the demo shows: a bar in a terminal or a line now and then elsewhere, then the ledger."""

import time
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from demo.ledger import Verdict

EVERY = 5.0
"""Seconds between two plain lines."""
SHOWN = 10
"""Findings that are written out."""


class Display:
    """Progress of the traffic."""

    def __init__(self, console: Console, scans: int) -> None:
        self._console = console
        self._scans = scans
        self._bar = Progress(
            TextColumn(" "),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=scans, state="")
        self._shown = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, *, sent: int, applied: int, seconds: float) -> None:
        """Show how far it is."""
        rate = applied / seconds if seconds else 0.0
        state = f"{applied:,} applied of {sent:,} sent, {rate:,.0f}/s"
        self._bar.update(self._task, completed=applied, state=state, refresh=True)
        if not self._console.is_terminal and time.monotonic() - self._shown >= EVERY:
            self._shown = time.monotonic()
            self.note(state)

    def note(self, text: str) -> None:
        """Write a line, above the bar if there is one."""
        share = self._bar.tasks[0].completed / self._scans
        say(self._console, f"{share:.0%}", text)


def say(console: Console, what: str, text: str) -> None:
    """Write one line about what happens."""
    console.print(f"[bold]{what:>12}[/]  {text}", soft_wrap=True)


def show(console: Console, verdict: Verdict) -> None:
    """Write the ledger, and what is wrong."""
    ledger = verdict.ledger
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column(justify="right", style="bold", min_width=12)
    table.add_column(justify="right", min_width=9)
    table.add_column(style="dim")
    alike = "alike in tables, inbox and output"
    least = "the least that tables, inbox and output show"
    repeated = f"; {verdict.repeats:,} repeated after a kill, same id" if verdict.repeats else ""
    for name, value, meaning in (
        ("sent", f"{ledger.sent:,}", "scans"),
        ("duplicates", f"{ledger.duplicates:,}", "of them sent a second time"),
        ("applied", f"{ledger.applied:,}", alike if ledger.applied == ledger.sent else least),
        ("published", f"{ledger.published:,}", f"events{repeated}"),
        ("lost", _must_be_none(ledger.lost), "without their full effect"),
        ("doubled", _must_be_none(ledger.doubled), "with more than their effect"),
        ("reordered", _must_be_none(ledger.reordered), "out of the order of their parcel"),
        ("seconds", f"{ledger.seconds:,.1f}", "from the first scan to the last event"),
        ("rate", f"{ledger.rate:,.0f}", "scans a second, kills and restarts included"),
    ):
        table.add_row(name, value, meaning)
    console.print()
    console.print(table)
    console.print()
    for finding in verdict.findings[:SHOWN]:
        say(console, finding.kind, escape(finding.text))
    if len(verdict.findings) > SHOWN:
        say(console, "", f"... and {len(verdict.findings) - SHOWN:,} more")


def _must_be_none(count: int) -> str:
    return f"[bold {'red' if count else 'green'}]{count:,}[/]"
