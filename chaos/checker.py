"""The checker, a process of its own: follows the output, and holds everything together at the end.

It goes to the servers directly, and asks the service nothing.
"""

import argparse
import asyncio
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, date, datetime, timedelta
from datetime import time as time_of_day
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
from aiokafka import ConsumerRecord  # type: ignore[import-untyped]

from chaos import errands, payments
from chaos.backlog import Backlog, look
from chaos.errands import REMINDERS, Done, Errand, Reminder, Request
from chaos.fates import Books, Call, Finding, Identity, Judgement, Stored, judge
from chaos.payments import Auditor
from chaos.poison import CONSUMERS, TALLY, Given, understand
from chaos.recovery import Ended, Recovery, first_sent, measure, met, undisturbed
from chaos.system import AWAY
from chaos.talk import say, words
from demo import feed, witness
from demo.evidence import Evidence, Illegible, Record, read
from demo.ledger import Verdict, audit
from demo.witness import CONSUMER, Witness

# What is forgotten was kept by the rig, see `chaos.memory`.
MARKERS = """
SELECT source, id
  FROM (SELECT generation, consumer, source, id FROM pipeline.inbox
         UNION
        SELECT generation, consumer, source, id FROM rig.marker) AS marker
 WHERE consumer = $1
"""
SCHEDULED = "SELECT name, due_at < clock_timestamp() + interval '1 day' FROM pipeline.scheduled"
VERSIONS = "SELECT parcel_id, scans FROM rig.version"
TRANSACTIONS = f"SELECT xid::text FROM {TALLY}"
UNWATCHED = "SELECT parcel_id, scans FROM rig.unwatched"
# By the names that the service gives them.
PARTITIONS = """
SELECT (SELECT began FROM rig.clock) AS began, clock_timestamp() AS now,
       (SELECT oldest FROM pipeline.inbox_generation) AS oldest,
       array_agg(substr(relname, 9)::date) FILTER (WHERE relname LIKE 'outbox_p%') AS days,
       array_agg(substr(relname, 8)::integer) FILTER (WHERE relname LIKE 'inbox_g%') AS generations
  FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
 WHERE nspname = 'pipeline' AND relkind = 'r' AND relname ~ '^(outbox_p|inbox_g)[0-9]+$'
"""
BACKLOG = """
SELECT consumer, partition, "offset", record_key, source, id, reason, attempts, holds,
       died_at IS NOT NULL AS is_dead
  FROM pipeline.backlog
"""
TALLIED = f"""
SELECT '/scanners/' || scanner AS source, number::text AS id, parcel_id FROM {TALLY} ORDER BY n
"""
LANE_LOST = re.compile(r"backlog lane (\d+) was taken over")
RACED = re.compile(r"failed \(attempt .*parcel_pkey")
"""Two partitions have the first scans of a parcel, and both insert its row: the later one fails."""
OF_CALLS = 64
"""The first of the lanes in which no scans wait, but calls."""
WRONG = ("lost", "doubled", "reordered", "misjudged")
OUTBOX_AGE = timedelta(hours=26)
"""From the beginning of a day until it is old enough to be dropped."""
LOOK_EVERY = 0.5
UNKNOWN = "unknown, as a server is away"
FINDINGS = 50
"""So many are told; all of them are counted."""


class Checker:
    """Looks from outside."""

    def __init__(
        self,
        kafka: str,
        database: str,
        calls: Path,
        requests: Path,
        work: Sequence[str],
        auditor: Auditor | None,
    ) -> None:
        """`auditor` looks at the payments, if there are any."""
        self._kafka = kafka
        self._database = database
        self._calls = calls
        self._requests = requests
        self._work = work
        self._witness = Follower()
        self._reminded = Follower()
        self._paid = Follower()
        self._auditor = auditor
        self._began = time.monotonic()

    async def follow(self) -> None:
        """Follow the output, and tell how far it is."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._witness.watch(self._kafka))
            group.create_task(self._reminded.watch(self._kafka, REMINDERS))
            if self._auditor:
                group.create_task(self._paid.watch(self._kafka, payments.EVENTS))
            group.create_task(self._tell())

    async def _tell(self) -> None:
        while True:
            say(applied=self._witness.moves)
            await asyncio.sleep(LOOK_EVERY)

    async def settle(self, patience: float) -> str:
        """Wait until every message that was sent is applied or dead, while others still come.

        Returns what is left when for so long nothing has moved; nothing if all are.
        """
        return await self._wait(self._unapplied, patience)

    async def drain(self, patience: float, quiet: float) -> str:
        """Wait until nothing is left to do, and nothing more comes for a while.

        Returns what is left when for so long nothing has moved; nothing if all is done.
        """
        left = await self._wait(self._left, patience)
        if not left:
            await asyncio.gather(*(one.until_quiet(quiet) for one in (self._witness, self._paid)))
        return left

    async def _wait(self, look: Callable[[], Awaitable[str]], patience: float) -> str:
        """Look until nothing is left, or for so long nothing has moved; return what is left."""
        before: tuple[str, int] = "", 0
        moved = time.monotonic()
        while left := await self._known(look):
            now = before[0] if left == UNKNOWN else left, len(self._seen() | self._paid.events)
            if now != before:
                before, moved = now, time.monotonic()
            if time.monotonic() - moved > patience:
                return left
            await asyncio.sleep(LOOK_EVERY)
        return ""

    async def _known(self, look: Callable[[], Awaitable[str]]) -> str:
        """Look; return `UNKNOWN` while a server is away, which messages may crash."""
        try:
            return await look()
        except AWAY:
            return UNKNOWN

    async def _left(self) -> str:
        """Return what is left to do."""
        left = [await self._backlog()]
        if self._auditor:
            left.append(await self._auditor.look(self._paid.events))
        return "; ".join(filter(None, map(str, left)))

    async def _unapplied(self) -> str:
        """Return what is unread, or waits in the backlog."""
        left = await self._backlog()
        return str(Backlog(left.unread, left.waiting, 0))

    async def _backlog(self) -> Backlog:
        connection = await asyncpg.connect(self._database)
        try:
            left = await look(self._kafka, connection, feed.TOPIC, self._seen())
            if left.unread or left.waiting:
                return left
            due = sum(is_due for _, is_due in await connection.fetch(SCHEDULED))
            unneeded = kept(await connection.fetchrow(PARTITIONS))
        finally:
            await connection.close()
        return replace(left, scheduled=due, kept=unneeded)

    def _seen(self) -> set[str]:
        return self._witness.events | self._reminded.events

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

    async def errands(self, output: Sequence[Record]) -> tuple[Done, Mapping[str, int]]:
        """Read what is known about the errands, and what has become of days and generations."""
        moves: dict[Errand, datetime] = {}
        for record in output:
            with suppress(Illegible):
                event = read(record)
                if event.scans is not None:
                    moves.setdefault(Errand(event.parcel_id, event.scans), _time(record))
        lines = self._requests.read_text().splitlines()
        requests = [Request(*json.loads(line)) for line in lines]
        records = await witness.read_topic(self._kafka, REMINDERS)
        connection = await asyncpg.connect(self._database)
        try:
            waiting = [name for name, _ in await connection.fetch(SCHEDULED)]
            versions = [Errand(*row) for row in await connection.fetch(VERSIONS)]
            transactions = [xid for (xid,) in await connection.fetch(TRANSACTIONS)]
            unwatched = [Errand(*row) for row in await connection.fetch(UNWATCHED)]
            partitions = await connection.fetchrow(PARTITIONS)
        finally:
            await connection.close()
        reminders = [_reminder(record) for record in records]
        over = (partitions["now"].date() - partitions["began"]).days
        kept = sum(day < partitions["now"].date() for day in partitions["days"])
        counts = {
            "calls": len({one.id for one in requests}),
            "requests": len(requests),
            "reminders": len({one.errand for one in reminders}),
            "versions": len(versions),
            "days dropped": over - kept,
            "generations forgotten": partitions["oldest"] - 1,
        }
        every = [*versions, *unwatched]
        done = Done(self._work, moves, requests, reminders, waiting, every, transactions)
        return done, counts

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

    def published(
        self, sent: Mapping[Identity, float], evidence: Evidence
    ) -> list[tuple[float, float]]:
        """Return when each of these scans was sent, and when its event was seen."""
        published: list[tuple[float, float]] = []
        for record in evidence.output:
            with suppress(Illegible):
                event = read(record)
                scan = f"/scanners/{event.effect.scanner}", str(event.effect.number)
                if scan in sent and event.id in self._witness.seen:
                    published.append((sent[scan], self._witness.seen[event.id]))
        return published


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


def kept(partitions: Mapping[str, Any]) -> int:
    """Count the days and generations that should be gone."""
    began = partitions["now"] - OUTBOX_AGE
    days = [day for day in partitions["days"] if _midnight(day) < began]
    forgotten = [one for one in partitions["generations"] if one < partitions["oldest"]]
    return len(days) + len(forgotten)


def _midnight(day: date) -> datetime:
    return datetime.combine(day, time_of_day(), UTC)


def lanes_lost(logs: Path) -> int:
    """Count how often a worker says that the lane of scans that it worked at was another's."""
    texts = (log.read_text("utf-8") for log in logs.glob("consume-*.log"))
    lost = [lane for text in texts for lane in LANE_LOST.findall(text)]
    return sum(int(lane) < OF_CALLS for lane in lost)


def races_lost(logs: Path) -> int:
    """Count how often a scan failed because another partition had inserted its parcel meanwhile."""
    return sum(len(RACED.findall(log.read_text("utf-8"))) for log in logs.glob("consume-*.log"))


def _time(record: Record) -> datetime:
    return datetime.fromisoformat(record.headers["ce_time"].decode())


def _reminder(record: Record) -> Reminder:
    headers = record.headers
    errand = Errand(**json.loads(record.value or b""))
    return Reminder(errand, headers["ce_id"].decode(), _time(record), record)


def _stored(row: asyncpg.Record) -> Stored:
    return Stored(
        consumer=row["consumer"],
        place=(row["partition"], row["offset"]),
        key=row["record_key"],
        identity=None if row["id"] is None else (row["source"], row["id"]),
        reason=row["reason"],
        attempts=row["attempts"],
        is_dead=row["is_dead"],
        holds=row["holds"],
    )


async def main() -> None:
    """Follow; when told to `settle` or to `drain`, wait; when told to `audit`, give the verdict.

    Behind `audit` stands what the rig has broken: each fault and when it was over.
    """
    parser = argparse.ArgumentParser(prog="python -m chaos.checker", description=__doc__)
    parser.add_argument("--kafka", required=True)
    parser.add_argument("--database", required=True)
    parser.add_argument("--calls", type=Path, required=True)
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--patience", type=float, required=True)
    parser.add_argument("--quiet", type=float, required=True)
    parser.add_argument("--after-death", required=True)
    parser.add_argument("--payments", type=int, required=True)
    parser.add_argument("--payments-database", required=True)
    parser.add_argument("--seed", type=int, required=True)
    chosen = parser.parse_args()
    work = chosen.work.split(",")
    auditor = None
    if chosen.payments:
        auditor = Auditor(chosen.kafka, chosen.payments_database, chosen.payments, chosen.seed)
    checker = Checker(chosen.kafka, chosen.database, chosen.calls, chosen.requests, work, auditor)
    async with asyncio.TaskGroup() as group:
        following = group.create_task(checker.follow())
        async for line in words():
            word, _, rest = line.partition(" ")
            if word == "settle":
                say(unsettled=await checker.settle(chosen.patience))
            elif word == "drain":
                say(left=await checker.drain(chosen.patience, chosen.quiet))
            elif word == "audit":
                following.cancel()
                ended = [Ended(*one) for one in json.loads(rest)]
                evidence, books = await checker.gather()
                unsaid = sum(one.unsaid for one in ended)
                books = replace(
                    books,
                    holds=chosen.after_death == "hold",
                    interruptions=unsaid + lanes_lost(chosen.logs) + races_lost(chosen.logs),
                )
                done, counts = await checker.errands(evidence.output)
                done = replace(done, late=sum(one.under_way for one in ended))
                judgement = judge(books)
                evidence = complete(evidence, books, judgement.applied[CONSUMER])
                every = checker.published(first_sent(books.given), evidence)
                say(met=met(ended, every))
                recovered = measure(ended, checker.published(undisturbed(books.given), evidence))
                more = errands.judge(done)
                if auditor:
                    found, paid = await auditor.judge()
                    more += found
                    say(payments=paid)
                tell(audit(evidence), judgement, more, counts, recovered)
                return


def tell(
    verdict: Verdict,
    judgement: Judgement,
    further: Sequence[Finding],
    counts: Mapping[str, int],
    recovered: Mapping[str, Recovery],
) -> None:
    """Tell the rig the verdict."""
    more = [*judgement.findings, *further]
    kinds = Counter[str](finding.kind for finding in more)
    ledger = asdict(verdict.ledger)
    findings = [asdict(one) for one in verdict.findings]
    findings += [one._asdict() for one in more]
    say(
        ledger={
            **ledger,
            **{kind: ledger.get(kind, 0) + kinds[kind] for kind in WRONG},
            "sent": judgement.sent,
            "duplicates": judgement.duplicates,
        },
        counts=judgement.counts,
        errands=counts,
        dead=judgement.dead,
        repeats=verdict.repeats,
        recovery={kind: one._asdict() for kind, one in recovered.items()},
        findings=findings[:FINDINGS],
    )


if __name__ == "__main__":
    asyncio.run(main())
