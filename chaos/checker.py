"""The checker, a process of its own: follows the output, and holds everything together at the end.

It goes to the servers directly, and asks the service nothing.
"""

import argparse
import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import asyncpg  # type: ignore[import-untyped]
from aiokafka import ConsumerRecord  # type: ignore[import-untyped]

from chaos.fates import Books, Call, Identity, Judgement, Stored, judge
from chaos.poison import CONSUMERS, TALLY, Given, understand
from chaos.recovery import Ended, Recovery, measure, undisturbed
from chaos.talk import say, words
from demo import feed, witness
from demo.evidence import Evidence, Illegible, read
from demo.ledger import Verdict, audit
from demo.witness import CONSUMER, Witness

POSITIONS = "SELECT partition, next_offset FROM pipeline.position WHERE topic = $1"
# Behind a dead letter that holds its key, messages wait for a person.
WAITING = """
SELECT count(*) FROM pipeline.backlog AS b
 WHERE died_at IS NULL AND NOT EXISTS (
       SELECT FROM pipeline.backlog AS before
        WHERE before.order_key = b.order_key AND before.holds
          AND (before.partition, before."offset") < (b.partition, b."offset"))
"""
STAGED = "SELECT count(DISTINCT event_id) FROM pipeline.outbox"
MARKERS = "SELECT source, id FROM pipeline.inbox WHERE consumer = $1"
BACKLOG = """
SELECT consumer, partition, "offset", record_key, source, id, reason, attempts, holds,
       died_at IS NOT NULL AS is_dead
  FROM pipeline.backlog
"""
TALLIED = f"""
SELECT '/scanners/' || scanner AS source, number::text AS id, parcel_id FROM {TALLY} ORDER BY n
"""
INTERRUPTING = ("kill", "pause", "partition", "halfopen", "rebalance")
"""Faults after which a worker may find that its lane has gone to another."""
WRONG = ("lost", "doubled", "reordered", "misjudged")
LOOK_EVERY = 0.5
FINDINGS = 50
"""So many are told; all of them are counted."""


@dataclass(frozen=True)
class Backlog:
    """What the service has still to do."""

    unread: dict[int, int]
    """Records behind the position, of every partition that has some."""
    waiting: int
    """Messages in the backlog that no dead letter holds; known when nothing is unread."""
    unpublished: int
    """Events in the outbox that the output does not show; known when nothing waits either."""

    def __str__(self) -> str:
        """Say what is left, or nothing."""
        left = [f"partition {p}: {n} records unread" for p, n in sorted(self.unread.items())]
        if self.waiting:
            left.append(f"{self.waiting} messages of the backlog waiting")
        if self.unpublished:
            left.append(f"{self.unpublished} events of the outbox unpublished")
        return "; ".join(left)


class Checker:
    """Looks from outside."""

    def __init__(self, kafka: str, database: str, calls: Path) -> None:
        self._kafka = kafka
        self._database = database
        self._calls = calls
        self._witness = Follower()
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
            waiting = 0 if unread else await connection.fetchval(WAITING)
            is_over = not (unread or waiting)
            staged = await connection.fetchval(STAGED) if is_over else 0
        finally:
            await connection.close()
        return Backlog(unread, waiting, staged - len(self._witness.events) if is_over else 0)

    async def gather(self) -> tuple[Evidence, Books]:
        """Read everything that can be known."""
        parcels, _ = await witness.read_tables(self._database)
        given = understood(await witness.read_records(self._kafka, feed.TOPIC))
        output = await witness.read_topic(self._kafka)
        books = replace(await self._books(), given=given)
        evidence = Evidence(
            sent=[],
            duplicates=0,
            markers=books.markers[CONSUMER],
            parcels=parcels,
            output=output,
            seconds=self._witness.latest - self._began,
            unordered=unordered(given),
        )
        return evidence, books

    async def _books(self) -> Books:
        connection = await asyncpg.connect(self._database)
        try:
            markers = {
                name: [tuple(row) for row in await connection.fetch(MARKERS, name)]
                for name in CONSUMERS
            }
            backlog = [_stored(row) for row in await connection.fetch(BACKLOG)]
            tallied = [
                ((row["source"], row["id"]), row["parcel_id"])
                for row in await connection.fetch(TALLIED)
            ]
        finally:
            await connection.close()
        calls = [Call(*json.loads(line)) for line in self._calls.read_text().splitlines()]
        return Books((), markers, backlog, tallied, calls)

    def recovered(
        self, ended: Sequence[Ended], evidence: Evidence, books: Books
    ) -> Mapping[str, Recovery]:
        """Return how long it took after faults until what had been sent was published."""
        sent = undisturbed(books.given)
        published: list[tuple[float, float]] = []
        for record in evidence.output:
            with suppress(Illegible):
                event = read(record)
                scan = f"/scanners/{event.effect.scanner}", str(event.effect.number)
                if scan in sent and event.id in self._witness.seen:
                    published.append((sent[scan], self._witness.seen[event.id]))
        return measure(ended, published)


class Follower(Witness):
    """A witness that remembers when it saw an event first."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.seen: dict[str, float] = {}
        """Seconds since 1970, by id."""

    def _see(self, headers: dict[str, bytes]) -> None:
        super()._see(headers)
        self.seen.setdefault(headers.get("ce_id", b"").decode(), time.time())


def understood(records: Sequence[ConsumerRecord]) -> list[Given]:
    """Return what the input topic tells: it alone knows in which order the scans arrived."""
    return [
        understand(
            (record.partition, record.offset),
            record.timestamp / 1000,
            record.key,
            record.value,
            dict(record.headers),
        )
        for record in records
    ]


def unordered(given: Sequence[Given]) -> frozenset[str]:
    """Return the parcels whose scans lie in several partitions."""
    partitions: defaultdict[str, set[int]] = defaultdict(set)
    for one in given:
        partitions[one.key.decode()].add(one.place[0])
    return frozenset(parcel for parcel, where in partitions.items() if len(where) > 1)


def complete(evidence: Evidence, books: Books, applied: Sequence[Identity]) -> Evidence:
    """Add what must have been applied, in the order of the input."""
    first: dict[Identity, Given] = {}
    for one in books.given:
        first.setdefault(one.identity, one)
    return replace(evidence, sent=[scan for one in applied if (scan := first[one].scan)])


def _stored(row: asyncpg.Record) -> Stored:
    return Stored(
        consumer=row["consumer"],
        place=(row["partition"], row["offset"]),
        key=row["record_key"],
        identity=(row["source"], row["id"]) if row["consumer"] else None,
        reason=row["reason"],
        attempts=row["attempts"],
        is_dead=row["is_dead"],
        holds=row["holds"],
    )


async def main() -> None:
    """Follow; when told to `drain`, wait for the end; when told to `audit`, give the verdict.

    Behind `audit` stands what the rig has broken: each fault and when it was over.
    """
    parser = argparse.ArgumentParser(prog="python -m chaos.checker", description=__doc__)
    parser.add_argument("--kafka", required=True)
    parser.add_argument("--database", required=True)
    parser.add_argument("--calls", type=Path, required=True)
    parser.add_argument("--patience", type=float, required=True)
    parser.add_argument("--quiet", type=float, required=True)
    parser.add_argument("--after-death", required=True)
    chosen = parser.parse_args()
    checker = Checker(chosen.kafka, chosen.database, chosen.calls)
    async with asyncio.TaskGroup() as group:
        following = group.create_task(checker.follow())
        async for line in words():
            word, _, rest = line.partition(" ")
            if word == "drain":
                say(left=await checker.drain(chosen.patience, chosen.quiet))
            elif word == "audit":
                following.cancel()
                ended = [Ended(*one) for one in json.loads(rest)]
                evidence, books = await checker.gather()
                books = replace(
                    books,
                    holds=chosen.after_death == "hold",
                    interruptions=sum(one.kind in INTERRUPTING for one in ended),
                )
                judgement = judge(books)
                evidence = complete(evidence, books, judgement.applied[CONSUMER])
                recovered = checker.recovered(ended, evidence, books)
                tell(audit(evidence), judgement, recovered)
                return


def tell(verdict: Verdict, judgement: Judgement, recovered: Mapping[str, Recovery]) -> None:
    """Tell the rig the verdict."""
    kinds = Counter[str](finding.kind for finding in judgement.findings)
    ledger = asdict(verdict.ledger)
    findings = [asdict(one) for one in verdict.findings]
    findings += [one._asdict() for one in judgement.findings]
    say(
        ledger={
            **ledger,
            **{kind: ledger.get(kind, 0) + kinds[kind] for kind in WRONG},
            "sent": judgement.sent,
            "duplicates": judgement.duplicates,
        },
        counts=judgement.counts,
        dead=judgement.dead,
        repeats=verdict.repeats,
        recovery={kind: one._asdict() for kind, one in recovered.items()},
        findings=findings[:FINDINGS],
    )


if __name__ == "__main__":
    asyncio.run(main())
