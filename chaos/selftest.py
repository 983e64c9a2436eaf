"""`make chaos-selftest`: break the engine on purpose; every way must be caught, and an honest one
must pass. What is not caught is a weakness of the rig."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from chaos.edit import Edit, Outdated
from chaos.report import Report
from chaos.round import Round
from chaos.run import FAILURES
from chaos.sabotage import LOADS, SABOTAGES
from demo.display import say
from demo.flights import ROOT
from demo.processes import bake
from demo.running import only_one_in, until_interrupted

SEEDS = (1, 2, 3)
"""A sabotage must be caught with one of them; the honest engine is tried with the first."""
ENGINE = Path("src", "onceward")
SHOWN = 3
"""Findings of a round that are written out."""


@dataclass(frozen=True)
class Outcome:
    """What became of one engine under one load."""

    engine: str
    load: str
    found: str
    is_right: bool


class SelfTest:
    """Runs the rounds, one after the other."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder = folder
        self._console = console

    async def run(self, words: Sequence[str]) -> bool:
        """Run the rounds whose names hold one of the words; return whether the rig is right."""
        chosen = [s for s in SABOTAGES if not words or any(word in s.name for word in words)]
        outcomes = []
        for name in dict.fromkeys(sabotage.load for sabotage in chosen):
            report = await self._round(name, (), SEEDS[0])
            outcomes.append(Outcome("honest", name, found(report), report.holds))
            for sabotage in (one for one in chosen if one.load == name):
                say(self._console, "sabotage", sabotage.name)
                for seed in SEEDS:
                    report = await self._round(name, sabotage.edits, seed)
                    if not report.is_right:
                        break
                outcomes.append(Outcome(sabotage.name, name, found(report), not report.is_right))
        show(outcomes, self._console)
        return all(outcome.is_right for outcome in outcomes)

    async def _round(self, load: str, edits: Sequence[Edit], seed: int) -> Report:
        say(self._console, "round", f"{'sabotaged' if edits else 'honest'}, {load}, seed {seed}")
        project = await bake(self._folder, self._folder / "bake.txt")
        for edit in edits:
            edit.apply(project / ENGINE)
        plan = LOADS[load].plan(seed)
        report = await Round(plan, project, self._folder, self._console).run()
        (self._folder / "report.json").write_text(report.as_json())
        say(self._console, "verdict", found(report))
        for text in [*(str(one["text"]) for one in report.findings), *report.stuck][:SHOWN]:
            say(self._console, "", escape(text))
        return report


def found(report: Report) -> str:
    """Return how much of what a round has found."""
    if report.is_right:
        return "holds" if report.holds else f"no verdict: {', '.join(report.unmet)}"
    counts = {
        "lost": report.lost,
        "doubled": report.doubled,
        "reordered": report.reordered,
        "misjudged": report.misjudged,
        "stuck": len(report.stuck),
    }
    numbers = ", ".join(f"{number:,} {what}" for what, number in counts.items() if number)
    return numbers or "not all was applied"


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Write the table."""
    table = Table(box=None, padding=(0, 1))
    for column in ("", "engine", "load", "verdict"):
        table.add_column(column, overflow="fold")
    for one in outcomes:
        mark = "[green]right[/]" if one.is_right else "[bold red]WRONG[/]"
        table.add_row(mark, one.engine, one.load, one.found)
    console.print()
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the self-test; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chaos.selftest", description=__doc__)
    parser.add_argument("words", nargs="*", help="only sabotages whose names hold one of these")
    parser.add_argument(
        "--into", type=Path, default=ROOT / "build" / "chaos-selftest", metavar="DIR"
    )
    chosen = parser.parse_args(arguments)
    folder, console = chosen.into.resolve(), Console(highlight=False)
    try:
        with only_one_in(folder):
            work = SelfTest(folder, console).run(chosen.words)
            return asyncio.run(until_interrupted(work, console))
    except (*FAILURES, Outdated) as failure:
        say(console, "[red]failed[/]", escape(str(failure) or repr(failure)))
        return 1


if __name__ == "__main__":
    sys.exit(main())
