"""`make demo`: bake a service, send it real traffic, kill it on the way, check what came out."""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import asyncpg  # type: ignore[import-untyped]
from aiokafka.errors import KafkaError  # type: ignore[import-untyped]
from rich.console import Console
from rich.markup import escape

from demo import feed, flights, witness
from demo.display import Display, say, show
from demo.evidence import Evidence
from demo.feed import FeedFailed
from demo.flights import DataUnavailable, Scan
from demo.ledger import Verdict, audit
from demo.processes import NAME, ProcessFailed, Service, Stack, bake, client, end_holder, last_lines
from demo.running import AlreadyRuns, add_into, only_one_in, short, until_interrupted
from demo.traffic import PATIENCE, Outcome, Traffic


class DemoFailed(Exception):
    """The demo cannot go on."""


FAILURES = (
    AlreadyRuns,
    DataUnavailable,
    DemoFailed,
    FeedFailed,
    ProcessFailed,
    KafkaError,
    asyncpg.PostgresError,
    OSError,
)


@dataclass(frozen=True)
class Options:
    """What can be chosen."""

    events: int
    kills: int
    seed: int
    keep: bool
    into: Path


class Demo:
    """One run: what it has started, and where it keeps things."""

    def __init__(self, options: Options, console: Console) -> None:
        self.options = options
        self.console = console
        self.folder = options.into
        self.project = self.folder / NAME
        self.report = self.folder / "report.json"
        self.log = self.folder / "service.log"
        self.setup_log = self.folder / "setup.log"
        self.stack = Stack(self.project, self.folder / "stack")
        self.service: Service | None = None

    async def run(self) -> bool:
        """Run it all; return whether the ledger holds.

        Leaves no process behind however it ends, unless it got to the ledger and is to keep them.
        """
        for old in (self.report, self.log, self.setup_log):
            old.unlink(missing_ok=True)
        scans = await self._read()
        await self._bake()
        await self.stack.remove(self.setup_log)  # the data of an earlier run
        keep = False
        try:
            service = await self._start()
            outcome = await self._send(service, scans)
            obstacle = await service.obstacle() if outcome.missing else ""
            if not self.options.keep and not await service.stop():
                self._say("service", "[yellow]did not end by itself when it was asked to[/]")
            verdict = await self._check(outcome)
            keep = self.options.keep
        finally:
            if not keep:
                await self._stop()
        if keep:
            self._tell_where_to_look(service)
        if outcome.missing:
            raise DemoFailed(
                f"no new event came for {PATIENCE:.0f} s, {outcome.missing:,} are missing;"
                f" the service says: {obstacle or 'ready'}"
            )
        return verdict.ledger.holds

    async def _read(self) -> list[Scan]:
        year = flights.scans()
        scans = await asyncio.to_thread(lambda: list(islice(year, self.options.events)))
        parcels, end = len({scan.parcel_id for scan in scans}), scans[-1].time
        self._say("scans", f"{len(scans):,} of {parcels:,} parcels, until {end}")
        return scans

    async def _bake(self) -> None:
        self._say("bake", f"{short(self.project)}")
        end_holder(self.folder / "service.pid")
        await bake(self.folder, self.setup_log)

    async def _start(self) -> Service:
        self._say("servers", "PostgreSQL and Kafka")
        await self.stack.up()
        self.service = Service(
            self.project, self.stack.addresses, self.log, self.folder / "service.pid"
        )
        await self.service.prepare(self.setup_log)
        rows = await witness.read_tables(self.stack.database)
        topics = [await witness.size(self.stack.kafka, t) for t in (feed.TOPIC, witness.TOPIC)]
        if any([*rows, *topics]):
            raise DemoFailed("these servers hold data of an earlier run; the demo needs empty ones")
        began = time.monotonic()
        await self.service.start()
        await self.service.ready()
        self._say("service", f"ready after {time.monotonic() - began:.1f} s")
        return self.service

    async def _send(self, service: Service, scans: Sequence[Scan]) -> Outcome:
        kills, seed = self.options.kills, self.options.seed
        with Display(self.console, len(scans)) as display:
            traffic = Traffic(scans, kills=kills, seed=seed, service=service, display=display)
            return await traffic.run(self.stack.kafka)

    async def _check(self, outcome: Outcome) -> Verdict:
        parcels, markers = await witness.read_tables(self.stack.database)
        evidence = Evidence(
            sent=outcome.sent,
            duplicates=outcome.duplicates,
            markers=markers,
            parcels=parcels,
            output=await witness.read_topic(self.stack.kafka),
            seconds=outcome.seconds,
        )
        verdict = await asyncio.to_thread(audit, evidence)
        self.report.write_text(verdict.ledger.as_json())
        show(self.console, verdict)
        self._say("report", short(self.report))
        return verdict

    async def stop_what_was_kept(self) -> None:
        """End service and servers of an earlier demo; harmless when there are none."""
        end_holder(self.folder / "service.pid")
        if self.project.exists():
            await self.stack.down()

    async def _stop(self) -> None:
        try:
            if self.service:
                await self.service.stop()
        finally:
            await self.stack.down()

    def _tell_where_to_look(self, service: Service) -> None:
        stop = " ".join(short(word) for word in [*self.stack.command, "down"])
        look = {
            "Kafka": f"{self.stack.kafka}, topics {feed.TOPIC} and {witness.TOPIC}",
            "PostgreSQL": f"{short(client('psql'))} {self.stack.database}",
            "health": f"http://127.0.0.1:{service.port}/health/ready, and /metrics",
            "logs": f"{short(self.log)}, {short(self.folder / 'stack')}/*.log",
            "to stop it": f"kill {service.pid}; {stop}",
        }
        for what, where in look.items():
            self._say(what, escape(where))

    def _say(self, what: str, text: str) -> None:
        say(self.console, what, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo with the options of the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m demo.run", description=__doc__)
    parser.add_argument("--events", type=int, default=100_000, metavar="N", help="scans to send")
    parser.add_argument("--kills", type=int, default=2, metavar="N", help="how often to kill -9")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="which are sent twice")
    parser.add_argument(
        "--keep",
        action="store_true",
        default=bool(os.environ.get("KEEP")),
        help="leave service and servers running at the end (also KEEP=1)",
    )
    add_into(parser, "demo")
    parser.add_argument(
        "--stop", action="store_true", help="stop what an earlier demo has left running, and end"
    )
    chosen = parser.parse_args(arguments)
    options = Options(
        events=chosen.events,
        kills=chosen.kills,
        seed=chosen.seed,
        keep=chosen.keep,
        into=chosen.into.resolve(),
    )
    if options.events < 1 or options.kills < 0:
        parser.error("--events must be at least 1, --kills at least 0")
    console = Console(highlight=False)
    demo = Demo(options, console)
    if chosen.stop:
        asyncio.run(demo.stop_what_was_kept())
        return 0
    try:
        with only_one_in(options.into):
            return asyncio.run(until_interrupted(demo.run(), console))
    except FAILURES as failure:
        # Cleaning up after a failure may fail as well; the first one tells more.
        for each in (failure.__context__, failure):
            if isinstance(each, FAILURES):
                say(console, "[red]failed[/]", escape(str(each) or repr(each)))
        if demo.service and demo.log.exists():
            console.print(last_lines(demo.log), soft_wrap=True, markup=False)
        return 1


if __name__ == "__main__":
    sys.exit(main())
