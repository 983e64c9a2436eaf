"""`make bench`: this service beside what else one could have written, measured in turn."""

import argparse
import asyncio
import json
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import asyncpg  # type: ignore[import-untyped]
from aiokafka.errors import KafkaError  # type: ignore[import-untyped]
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import kept, machine
from benchmarks.bench import EVENTS, FEWEST, Bench, Options
from benchmarks.check import CheckFailed
from benchmarks.interpreter import Interpreter, chosen
from benchmarks.marks import Mark
from benchmarks.measures import MEASURES
from benchmarks.rig import Rig
from benchmarks.tables import Report
from demo.display import say
from demo.flights import DataUnavailable
from demo.processes import NAME, ProcessFailed, Stack, bake
from demo.running import AlreadyRuns, add_into, only_one_in, short, until_interrupted

WHERE = {
    "process": "PostgreSQL and Kafka, processes of this run",
    "compose": "PostgreSQL and Kafka, containers of this run",
    "elsewhere": "[yellow]those that the environment names[/]: what runs there is disturbed",
}
"""What is said of the servers."""

FAILURES = (
    AlreadyRuns,
    CheckFailed,
    DataUnavailable,
    ProcessFailed,
    KafkaError,
    asyncpg.PostgresError,
    OSError,
)


async def benchmark(
    measures: Sequence[str],
    options: Options,
    folder: Path,
    console: Console,
    interpreter: Interpreter,
) -> Bench:
    """Take the measures on a freshly baked service; what is found is written as it comes."""
    clear(folder)
    source = machine.source()  # before anything of it is baked
    # What clients have to say of servers and topics that come and go.
    logging.basicConfig(filename=folder / "clients.txt", force=True)
    await bake(folder, folder / "bake.txt")
    bench = Bench(rig_in(folder), options, console)
    colour = "" if interpreter.is_optimised else "[yellow]"
    say(console, "python", f"{colour}{interpreter}")
    bench.rig.interpreter = interpreter
    bench.rig.python = await bench.rig.environment(interpreter)
    async with bench.rig.started():
        facts = source | await machine.facts(bench.rig.stack, bench.rig.project)
        facts["python"] = str(interpreter)
        say(console, "servers", WHERE[str(facts["servers"])])
        try:
            for name in measures:
                await MEASURES[name](bench)
                await bench.rig.remove_inputs()
                kept.write(report_of(bench, facts), folder)
        finally:
            kept.write(report_of(bench, facts), folder)
    return bench


def rig_in(folder: Path) -> Rig:
    """Return the rig that lies in a folder."""
    return Rig(folder / NAME, folder, Stack(folder / NAME, folder / "stack"))


def clear(folder: Path) -> None:
    """Delete what an earlier run has told."""
    for old in [folder / "report.json", *folder.glob("*.svg"), *folder.glob("*.txt")]:
        old.unlink(missing_ok=True)


def report_of(bench: Bench, facts: Mapping[str, object]) -> Report:
    """Return what was measured so far, and what is to be known of it."""
    source = {"commit": facts["commit"], "on": f"{datetime.now(UTC):%Y-%m-%d}"}
    measured = {
        run.measure: source
        | {"python": bench.book.interpreters.get(run.measure, facts.get("python"))}
        for run in bench.book.runs
    }
    return {
        "machine": facts,
        "options": as_json(bench.options),
        "measured": measured,
        **bench.book.as_json(),
    }


def as_json(options: Options) -> dict[str, object]:
    """Return the options as a report holds them."""
    return asdict(options) | {"contestants": sorted(options.contestants)}


def show(marks: Sequence[Mark], console: Console) -> None:
    """Write the table of the marks."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("mark")
    for column in ("median", "least", "most", "reference"):
        table.add_column(column, justify="right")
    table.add_column("goal")
    table.add_column("met")
    for mark in marks:
        told = ["", "", ""]
        if mark.value is not None:
            told = [f"{one:,.3g}" for one in (mark.value, min(mark.values), max(mark.values))]
        told.append(f"{median(mark.reference):,.1f}" if mark.reference else "")
        met = "[green]yes[/]" if mark.is_met else "[red]no[/]" if mark.values else mark.reason
        table.add_row(mark.goal.name, *told, mark.goal.text, met)
    console.print()
    console.print(table)
    console.print()


async def bench(
    measures: Sequence[str],
    options: Options,
    folder: Path,
    console: Console,
    interpreter: Interpreter,
    *,
    keep_plots: bool,
) -> bool:
    """Measure and tell; a mark that is missed is told and fails nothing."""
    done = await benchmark(measures, options, folder, console, interpreter)
    show(done.book.marks, console)
    if options.events < EVENTS / 2:
        short_runs = (
            f"runs of {options.events:,} scans: marks of fewer than {EVENTS // 2:,} say little"
        )
        say(console, "[yellow]short[/]", short_runs)
    if keep_plots:
        kept.keep(json.loads((folder / "report.json").read_text("utf-8")))
        say(console, "plots", short(kept.PLOTS))
    say(console, "report", short(folder / "report.json"))
    return True


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    defaults = Options()
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument(
        "--events", type=int, default=defaults.events, metavar="N", help="scans of a run"
    )
    parser.add_argument(
        "--rounds", type=int, default=defaults.rounds, metavar="N", help="that count"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=defaults.minutes,
        metavar="M",
        help="how long the memory is watched",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=defaults.seconds,
        metavar="S",
        help="how long latencies are measured",
    )
    parser.add_argument(
        "--cold", action="store_true", help="without the runs that come before to warm up"
    )
    parser.add_argument(
        "--only",
        default=",".join(MEASURES),
        metavar="MEASURES",
        help="separated by commas; by default all of them: %(default)s",
    )
    parser.add_argument(
        "--contestants", default="", metavar="NAMES", help="only these, separated by semicolons"
    )
    parser.add_argument(
        "--again",
        type=float,
        default=defaults.again,
        metavar="SHARE",
        help="of a measure's time, for runs that were disturbed to be run once more (%(default)s)",
    )
    parser.add_argument(
        "--keep-plots",
        action="store_true",
        help="put what is measured into docs/performance; it must be committed",
    )
    parser.add_argument(
        "--python",
        metavar="COMMAND",
        help="runs what is measured; by default the first that was built with optimisation",
    )
    add_into(parser, "bench")
    parser.add_argument(
        "--stop", action="store_true", help="stop what a killed run has left running, and end"
    )
    return parser


def _options(given: argparse.Namespace) -> Options:
    """Return the options of the command line."""
    wanted = frozenset(name.strip() for name in given.contestants.split(";") if name.strip())
    return Options(
        events=given.events,
        rounds=given.rounds,
        minutes=given.minutes,
        seconds=given.seconds,
        warm_up=not given.cold,
        contestants=wanted,
        again=given.again,
    )


def _require(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End with an error if the options cannot be."""
    if given.events < FEWEST:
        parser.error(f"--events is at least {FEWEST:,}, not {given.events:,}")
    if given.rounds < 1:
        parser.error(f"--rounds is at least 1, not {given.rounds}")
    for name in ("minutes", "seconds"):
        if not 0 < getattr(given, name) < math.inf:
            parser.error(f"--{name} is more than 0, not {getattr(given, name)}")
    if given.keep_plots and machine.source()["dirty"]:
        parser.error("--keep-plots: commit first, so that the plots can say what they are of")
    if given.keep_plots and (named := [name for name in machine.ADDRESSES if name in os.environ]):
        parser.error(f"--keep-plots: on servers of its own alone; unset {' and '.join(named)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with the options of the command line; return the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    measures = [name for name in MEASURES if name in given.only.split(",")]
    unknown = set(given.only.split(",")) - {*MEASURES, ""}
    if unknown or not measures:
        no_such = ", ".join(sorted(unknown)) or "none named"
        parser.error(f"no such measures: {no_such}; there are {', '.join(MEASURES)}")
    _require(given, parser)
    try:
        interpreter = chosen(given.python)
    except ProcessFailed as failure:
        parser.error(f"--python: {failure}")
    if given.keep_plots and not interpreter.is_optimised:
        parser.error(f"--keep-plots: {interpreter}; name another, make bench PYTHON=<its command>")
    options = _options(given)
    hindrance = kept.hindrance(measures, as_json(options)) if given.keep_plots else None
    if hindrance:
        parser.error(f"--keep-plots: {hindrance}")
    folder, console = given.into.resolve(), Console(highlight=False)
    try:
        with only_one_in(folder):
            if given.stop:
                asyncio.run(rig_in(folder).clear())
                return 0
            work = bench(
                measures, options, folder, console, interpreter, keep_plots=given.keep_plots
            )
            return asyncio.run(until_interrupted(work, console))
    except FAILURES as failure:
        # Cleaning up after a failure may fail as well; the first one tells more.
        first = None if failure.__suppress_context__ else failure.__context__
        for each in (first, failure):
            if isinstance(each, FAILURES):
                say(console, "[red]failed[/]", escape(str(each) or repr(each)))
        return 1


if __name__ == "__main__":
    sys.exit(main())
