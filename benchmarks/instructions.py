"""`make instructions`: counts what a message of the worked examples takes, beside the record.

Instructions depend on the interpreter's build, so the record has those of several builds.
"""

import argparse
import asyncio
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import load, payments
from benchmarks.interpreter import chosen
from benchmarks.kept import MEASURING
from benchmarks.load import Load
from benchmarks.payments import Payments
from benchmarks.rig import OURS, OURS_SQL, Contestant, Rig
from benchmarks.run import FAILURES, clear, rig_in
from benchmarks.tables import with_table
from demo.display import say
from demo.flights import ROOT
from demo.processes import ProcessFailed, bake
from demo.running import add_into, only_one_in, until_interrupted

RECORD = ROOT / "benchmarks" / "instructions.json"
PINS = ROOT / "<<cookiecutter.service_name>>" / "requirements" / "base.txt"
TOLERANCE = 0.03
"""Share by which instructions may differ from the record."""
ATTEMPTS = 3
RENEW = "`make instructions RENEW=1` records these; commit benchmarks/instructions.json."

Entry = dict[str, Any]
"""What the record holds of a build: the hash of its pinned packages, and the counts of each kind,
by the names of `UNITS`."""
UNITS = {
    "instructions": "instructions a message",
    "round_trips": "round trips a batch",
    "statements": "statements a message",
}

_SETTINGS = {
    "PYTHONHASHSEED": "0",
    # Nothing may expire while valgrind runs.
    "PIPELINE_LOCK_TIMEOUT": "3600",
    "PIPELINE_TRANSACTION_TIMEOUT": "7200",
    "PIPELINE_KAFKA_SESSION_TIMEOUT": "10800",
    "PIPELINE_BACKLOG_LEASE": "10800",
}


@dataclass(frozen=True)
class Kind:
    """A way of handling messages."""

    contestant: Contestant
    batch: int
    """Messages of a transaction."""
    warm_up: int
    counted: int

    def load(self) -> Load | Payments:
        """Return the messages, with those of a last batch."""
        count = self.warm_up + self.counted + self.batch
        if self.contestant.service == payments.SERVICE:
            return payments.authorizations(count)
        return load.make(1_000, count)


_OF_PAYMENTS = 200, 200, 600
KINDS = {
    "orm": Kind(OURS, 500, 1_000, 4_000),
    "sql": Kind(OURS_SQL, 500, 1_000, 4_000),
    "alone": Kind(OURS, 1, 100, 300),
    "payments": Kind(payments.OURS, *_OF_PAYMENTS),
    **{
        f"payments without {' and '.join(parts)}": Kind(
            payments.without(payments.OURS, *parts), *_OF_PAYMENTS
        )
        for parts in (("CHECK",), ("entries",), ("entries", "CHECK"))
    },
}


async def count(rig: Rig, kinds: Mapping[str, Kind] = KINDS) -> tuple[str, Entry]:
    """Count what a message of each kind takes, on servers that run; return the build as well.

    Raises `CheckFailed` if the work was not done.
    """
    _, wire = await _undisturbed(rig, kinds)
    with TemporaryDirectory(dir=rig.folder) as folder:
        build, instructions = await _undisturbed(rig, kinds, folder)
    counts = {name: instructions[name] | wire[name] for name in kinds}
    return build, {"pins": hashlib.sha256(PINS.read_bytes()).hexdigest()[:12], "counts": counts}


async def _undisturbed(
    rig: Rig, kinds: Mapping[str, Kind], *arguments: str
) -> tuple[str, dict[str, dict[str, float]]]:
    """Run each kind until no client warns of a server, which a busy machine may keep from work.

    Raises `ProcessFailed` after some attempts.
    """
    found: dict[str, dict[str, float]] = {}
    left = dict(kinds)
    for _ in range(ATTEMPTS):
        build, done = await _run(rig, left, *arguments)
        warnings = {name: one.pop("warnings") for name, one in done.items()}
        found |= {name: one for name, one in done.items() if not warnings[name]}
        left = {name: kinds[name] for name in warnings if warnings[name]}
        if not left:
            return build, found
    texts = "; ".join(f"{name}: {warnings[name][0]}" for name in left)
    raise ProcessFailed(f"servers failed in all of {ATTEMPTS} attempts ({texts})")


async def _run(
    rig: Rig, kinds: Mapping[str, Kind], *arguments: str
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Run a job of each kind in `counted`, and check what it has done."""
    async with AsyncExitStack() as stack:
        jobs, sites = [], []
        for kind in kinds.values():
            load_, who = kind.load(), kind.contestant
            who = replace(who, settings={**who.settings, **_SETTINGS})
            input_ = await stack.enter_async_context(rig.fresh_topic(1))
            async with rig.producer() as producer:
                await load.fill(producer, input_, load_.records())
            site = await stack.enter_async_context(rig.site(who, input_))
            if isinstance(load_, Payments):
                await payments.prepare(rig, site, load_)
            sites.append((site, load_))
            jobs.append(
                {
                    "environment": rig.variables(site),
                    "module": who.module,
                    "source": str(rig.folder / who.service / "src"),
                    "batch": kind.batch,
                    "warm_up": kind.warm_up,
                    "counted": kind.counted,
                }
            )
        counted = replace(OURS, module="benchmarks.counted", settings=_SETTINGS)
        process = rig.process(replace(site, contestant=counted))
        said = json.loads((await process.ask(json.dumps(jobs), *arguments)).splitlines()[-1])
        for site, load_ in sites:
            if isinstance(load_, Payments):
                await payments.check(rig, site, load_)
            else:
                await rig.check(site, load_)
    return said["build"], dict(zip(kinds, said["jobs"], strict=True))


def faults(recorded: Entry, found: Entry) -> Iterator[str]:
    """Yield how entries of the record differ by more than is tolerated."""
    for kind, counts in found["counts"].items():
        before = recorded["counts"].get(kind)
        if before is None:
            yield f"{kind} has no record. {RENEW}"
            continue
        for name, unit in UNITS.items():
            change = counts[name] / before[name] - 1
            if abs(change) <= (TOLERANCE if name == "instructions" else 0):
                continue
            text = f"{kind}: {_number(counts[name])} {unit}, recorded are {_number(before[name])}"
            if change < 0:
                yield f"{text} ({change:+.1%}): cheaper, which a later change could undo. {RENEW}"
                continue
            pins = "" if found["pins"] == recorded["pins"] else " (its pinned packages differ)"
            yield (
                f"{text} ({change:+.1%}): each message costs more than before{pins}."
                f" Find the change; if it is worth its cost, say so in its commit. {RENEW}"
            )


def missing(build: str, found: Entry) -> str:
    """Return what to say if the record lacks this build."""
    return (
        f"benchmarks/instructions.json has no record of {build}, so nothing can be compared. On a"
        f" commit that is known to be good, {RENEW} Or add what was counted now:\n"
        + json.dumps({build: found}, indent=2)
    )


def load_record() -> dict[str, Entry]:
    """Return the record: by build, an entry."""
    record: dict[str, Entry] = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    return record


def renew(build: str, found: Entry) -> None:
    """Write what was found into the record, and the record into the page."""
    record = dict(sorted({**load_record(), build: found}.items()))
    RECORD.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    MEASURING.write_text(page(record), "utf-8")


def page(record: Mapping[str, Entry]) -> str:
    """Return the page with the table of a record."""
    rows = [
        (kind, name, *(_number(counts[unit]) for unit in UNITS))
        for kind in KINDS
        for name, one in record.items()
        if (counts := one["counts"].get(kind))
    ]
    return with_table(MEASURING.read_text("utf-8"), "| kind ", rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.4g}"


def show(build: str, found: Entry, recorded: Entry | None, console: Console) -> None:
    """Print what was found beside the record."""
    table = Table("kind", "", "counted", "recorded", "change", box=None, title=build)
    for kind, counts in found["counts"].items():
        before = (recorded or {"counts": {}})["counts"].get(kind, {})
        for name, unit in UNITS.items():
            old = before.get(name)
            change = ("", "") if old is None else (_number(old), f"{counts[name] / old - 1:+.2%}")
            table.add_row(kind, unit, _number(counts[name]), *change)
    console.print(table)


async def rig_with_service(folder: Path) -> Rig:
    """Generate the services into a folder, with an interpreter built with optimisation."""
    clear(folder)
    await bake(folder, folder / "bake.txt")
    await payments.generate(folder)
    rig = rig_in(folder)
    rig.python = await rig.environment(chosen(None))
    return rig


async def compare(folder: Path, console: Console, *, is_renewed: bool) -> bool:
    """Count and compare, or renew the record; return whether nothing differs."""
    rig = await rig_with_service(folder)
    async with rig.started():
        build, found = await count(rig)
    recorded = load_record().get(build)
    show(build, found, recorded, console)
    if is_renewed:
        renew(build, found)
        return True
    wrong = list(faults(recorded, found)) if recorded else [missing(build, found)]
    for fault in wrong:
        say(console, "[red]differs[/]" if recorded else "[red]no record[/]", escape(fault))
    return not wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Count with the options of the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="make instructions", description=__doc__)
    parser.add_argument("--renew", action="store_true", help="write what is counted to the record")
    add_into(parser, "instructions")
    chosen = parser.parse_args(arguments)
    folder, console = chosen.into.resolve(), Console(highlight=False)
    try:
        with only_one_in(folder):
            work = compare(folder, console, is_renewed=chosen.renew)
            return asyncio.run(until_interrupted(work, console))
    except FAILURES as failure:
        say(console, "[red]failed[/]", escape(str(failure) or repr(failure)))
        return 1


if __name__ == "__main__":
    sys.exit(main())
