"""`make chaos`: feed a service known scans, break everything on a schedule, check the ledger."""

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

import asyncpg  # type: ignore[import-untyped]
from aiokafka.errors import KafkaError  # type: ignore[import-untyped]
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from chaos import copies, payments, schedule
from chaos import plan as plans
from chaos.plan import Plan
from chaos.poison import WAYS
from chaos.report import Report
from chaos.round import CONSUMERS, EXTRA, RELAYS, Round
from chaos.schedule import KINDS, Fault
from chaos.system import ADDRESSES, SETTINGS, System
from demo.display import say
from demo.flights import DataUnavailable
from demo.processes import NAME, ProcessFailed, bake, last_lines
from demo.running import AlreadyRuns, add_into, only_one_in, short, until_interrupted

FAILURES = (
    AlreadyRuns,
    DataUnavailable,
    ProcessFailed,
    KafkaError,
    asyncpg.PostgresError,
    OSError,
)
MEMBERS = (*CONSUMERS, *RELAYS, *EXTRA, *copies.MEMBERS, *payments.MEMBERS)
WRONG = ("lost", "doubled", "reordered", "misjudged", "stuck")
FARTHEST = 0.1
"""Share of the scans after which none comes again, in a round in which they are forgotten."""
SHOWN = 10
"""Findings that are written out."""


async def chaos(plan: Plan, folder: Path, console: Console) -> bool:
    """Run a round on a freshly baked service; return whether the ledger holds."""
    report_file = folder / "report.json"
    report_file.unlink(missing_ok=True)
    kinds = Counter(fault.kind for fault in plan.schedule)
    say(console, "scans", f"{plan.events:,} in {plan.seconds:,.0f} s, seed {plan.seed}")
    say(console, "faults", ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) or "none")
    project = await bake(folder, folder / "bake.txt")
    report = await Round(plan, project, folder, console).run()
    report_file.write_text(report.as_json())
    show(report, console)
    if report.stuck:
        for name in MEMBERS:
            console.print(last_lines(folder / f"{name}.log"), soft_wrap=True, markup=False)
    say(console, "report", short(report_file))
    return report.holds


def show(report: Report, console: Console) -> None:
    """Write the ledger, and what is wrong."""
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column(justify="right", style="bold", min_width=12)
    table.add_column(justify="right", min_width=9)
    table.add_column(style="dim")
    for name, count, meaning in (
        ("sent", report.sent, f"scans, and {report.duplicates:,} copies of them"),
        ("applied", report.applied, "the least that tables, inbox and output show"),
        ("dead", report.dead, "dead letters"),
        ("parked", report.parked, "that wait behind one of them"),
        ("published", report.published, f"events, and {report.repeats:,} repeats of them"),
        ("lost", report.lost, "without their full effect"),
        ("doubled", report.doubled, "with more than their effect"),
        ("reordered", report.reordered, "out of the order of their parcel"),
        ("misjudged", report.misjudged, "that became something else, or attempts for nothing"),
        ("stuck", len(report.stuck), "that did not go on by themselves"),
        *((name, count, "") for name, count in report.errands.items() if count),
        *((name, count, "of the payments") for name, count in report.payments.items()),
        *((name, count, "migrations of releases") for name, count in report.migrations.items()),
        ("faults", sum(report.faults.values()), "carried out"),
        *(("applied/s", round(rate), phase) for phase, rate in report.rates.items()),
        ("seconds", round(report.seconds), "from the first scan to the last event"),
    ):
        wrong = count and name in WRONG
        table.add_row(name, f"[bold red]{count:,}[/]" if wrong else f"{count:,}", meaning)
    console.print()
    console.print(table)
    console.print()
    if report.recovery:
        console.print(_recovery(report))
        console.print()
    for text in report.stuck:
        say(console, "stuck", escape(text))
    for kind in report.unmet:
        say(console, "no verdict", f"{kind}: none took effect while a scan was under way")
    for finding in report.findings[:SHOWN]:
        say(console, str(finding["kind"]), escape(str(finding["text"])))


def _recovery(report: Report) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("recovered from", justify="right", min_width=12)
    for column in ("next event after", "at most", "all of them after", "at most"):
        table.add_column(column, justify="right")
    for kind, seconds in report.recovery.items():
        table.add_row(kind, *(f"{one:,.1f} s" for one in seconds.values()))
    return table


def settings_of(environment: MutableMapping[str, str]) -> Mapping[str, str]:
    """Take the service's settings out of the environment; return those that the rig leaves open."""
    ours = {name: environment.pop(name) for name in [*environment] if name.startswith("PIPELINE_")}
    return {name: ours[name] for name in ours.keys() - {*SETTINGS, *ADDRESSES}}


def planned(arguments: argparse.Namespace, settings: Mapping[str, str]) -> Plan:
    """Return the round that the command line asks for; with `settings`, if it is a new one.

    Raises `ValueError` for one it can't be.
    """
    if arguments.replay:
        return plans.from_json(json.loads(arguments.replay.read_text("utf-8")))
    kinds = [kind for kind in KINDS if kind in arguments.faults.split(",")]
    for name, asked, known in (
        ("faults", arguments.faults, KINDS),
        ("poisons", arguments.poisons, sorted({one.kind for one in WAYS})),
    ):
        if unknown := set(asked.split(",")) - {*known, ""}:
            raise ValueError(f"no such {name}: {', '.join(unknown)}; there are {', '.join(known)}")
    faults = schedule.make(
        arguments.seed, arguments.seconds, consumers=CONSUMERS, relays=RELAYS, kinds=kinds
    )
    commands = round(arguments.payments * arguments.events)
    if commands:
        faults += schedule.beside(
            arguments.seed, arguments.seconds, members=payments.MEMBERS, kinds=kinds
        )
    return Plan(
        arguments.events,
        arguments.seconds,
        arguments.seed,
        faults,
        payments=commands,
        within=within(arguments.events, faults),
        poison=arguments.poison,
        kinds=tuple(filter(None, arguments.poisons.split(","))),
        settings=settings,
    )


def within(events: int, faults: Sequence[Fault]) -> int:
    """Return how many records later a scan may come again: not for ever, where any is forgotten."""
    forgets = any(fault.kind == "rotation" for fault in faults)
    return max(1, round(FARTHEST * events)) if forgets else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a round with the options of the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chaos.run", description=__doc__)
    parser.add_argument("--events", type=int, default=200_000, metavar="N", help="scans to send")
    parser.add_argument("--seconds", type=float, default=600, metavar="S", help="time to send them")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of schedule and feed")
    parser.add_argument(
        "--poison", type=float, default=0.01, metavar="SHARE", help="of the scans (%(default)s)"
    )
    parser.add_argument(
        "--poisons",
        default="",
        metavar="KINDS",
        help="what is wrong with the poisoned scans, separated by commas; by default anything but"
        " crashes",
    )
    parser.add_argument(
        "--payments",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="commands of the payments example, a second service, for each scan (%(default)s)",
    )
    parser.add_argument(
        "--faults",
        default=",".join(KINDS),
        metavar="KINDS",
        help="separated by commas; by default all of them: %(default)s",
    )
    parser.add_argument(
        "--replay", type=Path, metavar="REPORT", help="run the round again that this report is of"
    )
    add_into(parser, "chaos")
    parser.add_argument(
        "--stop", action="store_true", help="stop what a killed round has left running, and end"
    )
    chosen = parser.parse_args(arguments)
    shares = chosen.poison, chosen.payments
    if chosen.events < 1 or chosen.seconds <= 0 or not all(0 <= one <= 1 for one in shares):
        parser.error(
            "--events is at least 1, --seconds more than 0, --poison and --payments from 0 to 1"
        )
    try:
        plan = planned(chosen, settings_of(os.environ))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    folder, console = chosen.into.resolve(), Console(highlight=False)
    try:
        with only_one_in(folder):
            if chosen.stop:
                asyncio.run(System(folder / NAME, folder).clear())
                return 0
            return asyncio.run(until_interrupted(chaos(plan, folder, console), console))
    except FAILURES as failure:
        for each in (failure.__context__, failure):
            if isinstance(each, FAILURES):
                say(console, "[red]failed[/]", escape(str(each) or repr(each)))
        return 1


if __name__ == "__main__":
    sys.exit(main())
