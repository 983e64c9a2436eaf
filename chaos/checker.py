"""The checker, a process of its own: follows the output, and holds everything together at the end.

It goes to the servers directly, and asks the service nothing.
"""

import argparse
import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import asyncpg  # type: ignore[import-untyped]

from chaos.talk import say, words
from demo import feed, witness
from demo.evidence import Evidence, Record
from demo.flights import Scan
from demo.ledger import Verdict, audit
from demo.witness import Witness

POSITIONS = "SELECT partition, next_offset FROM pipeline.position WHERE topic = $1"
STAGED = "SELECT count(DISTINCT event_id) FROM pipeline.outbox"
LOOK_EVERY = 0.5
FINDINGS = 50
"""So many are told; all of them are counted."""


@dataclass(frozen=True)
class Backlog:
    """What the service has still to do."""

    unread: dict[int, int]
    """Records behind the position, of every partition that has some."""
    unpublished: int
    """Events in the outbox that the output does not show; known when nothing is unread."""

    def __str__(self) -> str:
        """Say what is left, or nothing."""
        left = [f"partition {p}: {n} records unread" for p, n in sorted(self.unread.items())]
        if self.unpublished:
            left.append(f"{self.unpublished} events of the outbox unpublished")
        return "; ".join(left)


class Checker:
    """Looks from outside."""

    def __init__(self, kafka: str, database: str) -> None:
        self._kafka = kafka
        self._database = database
        self._witness = Witness(lambda: None)
        self._began = time.monotonic()

    async def follow(self) -> None:
        """Follow the output, and tell how far it is."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._witness.watch(self._kafka))
            group.create_task(self._tell())

    async def _tell(self) -> None:
        while True:
            say(applied=self._witness.moves)
            await asyncio.sleep(LOOK_EVERY)

    async def drain(self, patience: float, quiet: float) -> str:
        """Wait until nothing is left to do, and nothing more comes for a while.

        Returns what is left when for so long nothing has moved; nothing if all is done.
        """
        before: object = None
        moved = time.monotonic()
        while left := str(backlog := await self._backlog()):
            if (now := (backlog, len(self._witness.events))) != before:
                before, moved = now, time.monotonic()
            if time.monotonic() - moved > patience:
                return left
            await asyncio.sleep(LOOK_EVERY)
        await self._witness.until_quiet(quiet)
        return ""

    async def _backlog(self) -> Backlog:
        async with witness.reading(self._kafka, feed.TOPIC) as consumer:
            ends = await consumer.end_offsets(consumer.assignment())
        connection = await asyncpg.connect(self._database)
        try:
            positions = {row[0]: row[1] for row in await connection.fetch(POSITIONS, feed.TOPIC)}
            unread = {
                partition.partition: end - positions.get(partition.partition, 0)
                for partition, end in ends.items()
            }
            unread = {partition: number for partition, number in unread.items() if number}
            staged = 0 if unread else await connection.fetchval(STAGED)
        finally:
            await connection.close()
        return Backlog(unread, 0 if unread else staged - len(self._witness.events))

    async def gather(self) -> Evidence:
        """Read everything that can be known."""
        parcels, markers = await witness.read_tables(self._database)
        given = await witness.read_topic(self._kafka, feed.TOPIC)
        output = await witness.read_topic(self._kafka)
        seconds = self._witness.latest - self._began
        evidence = of_the_input(given)
        return replace(evidence, markers=markers, parcels=parcels, output=output, seconds=seconds)


def of_the_input(records: Sequence[Record]) -> Evidence:
    """Return what the input topic tells: it alone knows in which order the scans arrived."""
    first: dict[tuple[str, int], Scan] = {}
    partitions: defaultdict[str, set[int]] = defaultdict(set)
    for record in records:
        scan = Scan.read(record.value or b"")
        first.setdefault((scan.scanner, scan.number), scan)
        partitions[scan.parcel_id].add(record.partition)
    return Evidence(
        sent=list(first.values()),
        duplicates=len(records) - len(first),
        markers=[],
        parcels=[],
        output=[],
        seconds=0.0,
        unordered=frozenset(parcel for parcel, where in partitions.items() if len(where) > 1),
    )


async def main() -> None:
    """Follow; when told to `drain`, wait for the end; when told to `audit`, give the verdict."""
    parser = argparse.ArgumentParser(prog="python -m chaos.checker", description=__doc__)
    parser.add_argument("--kafka", required=True)
    parser.add_argument("--database", required=True)
    parser.add_argument("--patience", type=float, required=True)
    parser.add_argument("--quiet", type=float, required=True)
    chosen = parser.parse_args()
    checker = Checker(chosen.kafka, chosen.database)
    async with asyncio.TaskGroup() as group:
        following = group.create_task(checker.follow())
        async for word in words():
            if word == "drain":
                say(left=await checker.drain(chosen.patience, chosen.quiet))
            elif word == "audit":
                following.cancel()
                tell(audit(await checker.gather()))
                return


def tell(verdict: Verdict) -> None:
    """Tell the rig the verdict."""
    say(
        ledger=asdict(verdict.ledger),
        repeats=verdict.repeats,
        found=len(verdict.findings),
        findings=[asdict(finding) for finding in verdict.findings[:FINDINGS]],
    )


if __name__ == "__main__":
    asyncio.run(main())
