"""Handing what a release has applied to a correction: which messages, and in which steps.

A message is stored as a row of the backlog, see `onceward/operators/corrections.py`. One that the
correction has applied, or that waits for it, is not stored again: so what was interrupted is begun
anew, and passes what is done.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import monotonic

import asyncpg
from aiokafka import TopicPartition
from pydantic_core import from_json

from onceward import Applied, AppliedEvent, Tombstone
from onceward.apply import backlog, batch
from onceward.apply.item import Item
from onceward.apply.statements import KEPT
from onceward.cli.dead import CHUNK, SECONDS
from onceward.cli.errors import Refused
from onceward.cli.inbox_commands import events_of
from onceward.events.message import marker_key
from onceward.events.payload import HASH_VERSION
from onceward.operators import audit, corrections, dead_rows
from onceward.operators.audit import Change
from onceward.retry import lanes
from onceward.servers import topics
from onceward.servers.topics import Topics
from onceward.service import Service
from onceward.settings import Settings

from . import released
from .records import Records, Unreadable, reading
from .released import Wanted

RATE = 100
"""Messages that are handed in a second, unless it is said."""
_AT_ONCE = 100
"""Messages of a transaction, whose records are in memory."""
_FULL_SECONDS = 1.0

_DONE = f"""
SELECT key FROM pipeline.inbox WHERE {KEPT} AND key = ANY ($1)
UNION ALL SELECT key FROM pipeline.backlog WHERE key = ANY ($1)
"""

_IS_REGISTERED = "SELECT EXISTS (SELECT FROM pipeline.inbox_consumer WHERE consumer = $1)"

_BEGIN = """
SELECT set_config('lock_timeout', $1, true),
       set_config('idle_in_transaction_session_timeout', $1, true),
       set_config('pipeline.release', $2, true)
"""

_LEFT = """
SELECT count(*) FILTER (WHERE died_at IS NULL) AS waiting,
       count(*) FILTER (WHERE died_at IS NOT NULL AND discarded_at IS NULL) AS dead
  FROM pipeline.backlog WHERE consumer = $1
"""

_LANES = """
SELECT DISTINCT lane FROM pipeline.backlog WHERE consumer = $1 AND died_at IS NULL ORDER BY lane
"""

_CANCEL = f"""
DELETE FROM pipeline.backlog
 WHERE key IN (SELECT key FROM pipeline.backlog
                WHERE lane = $1 AND consumer = $2 AND died_at IS NULL LIMIT {CHUNK})
RETURNING order_key
"""


@dataclass
class Group:
    """Messages of a topic and type that a correction takes."""

    topic: str
    type: str
    found: int = 0
    done: int = 0
    """Those that were handed before."""
    gone: int = 0
    """Those not handed whose records Kafka does not have any more."""
    oldest: datetime | None = None
    newest: datetime | None = None

    @property
    def left(self) -> int:
        """How many can be handed."""
        return self.found - self.done - self.gone


@dataclass
class Progress:
    """How far the handing has come."""

    handed: int = 0
    gone: int = 0
    """Messages whose records are not in Kafka, or are others."""
    unreadable: int = 0
    """Messages whose records are in batches that can't be read."""
    batches: Sequence[str] = ()
    """Those batches, of the last transaction: where and why."""
    to: datetime | None = None
    """When the last of them was applied."""


class Correcting:
    """Hands what a release has applied to one correction."""

    def __init__(
        self, connection: asyncpg.Connection, service: Service, settings: Settings, name: str
    ) -> None:
        """Raise `Refused` if the service has no correction of this name."""
        self._connection = connection
        self._service = service
        self._handlers = service.handlers
        self._settings = settings
        self._name = name
        self._its = [one for one in self._handlers if one.corrects and one.consumer == name]
        if not self._its:
            known = ", ".join(sorted(self._handlers.corrections)) or "none: see handlers.correct"
            raise Refused(f"the service has no correction {name!r}; it has {known}")
        self._recalls = name in self._handlers.recalling

    async def wanted(self, release: str, since: timedelta | None = None) -> Wanted:
        """Return which markers are meant, as of now: none of a transaction that may be running.

        Raises `Refused` for the release of this process, which has the correction.
        """
        if release == self._settings.release:
            raise Refused(f"{release} is the release of this process: name the one to correct")
        types: list[str] | None = None
        if not self._recalls and all(one.event is not Tombstone for one in self._its):
            types = []
            for one in self._its:
                types += [one.event.__event_type__, *one.event.__event_upcasters__]
        now: datetime = await self._connection.fetchval("SELECT clock_timestamp()")
        return Wanted(
            release=release,
            consumer=self._its[0].corrects,
            types=types,
            topics=sorted({one.topic for one in self._its}),
            since=None if since is None else now - since,
            until=now - timedelta(seconds=2 * self._settings.transaction_timeout),
        )

    async def plan(self, wanted: Wanted) -> list[Group]:
        """Count what would be handed, by topic and type. It changes nothing."""
        described = await self._describe()
        groups: dict[tuple[str, str], Group] = {}
        async for rows in released.markers(self._connection, wanted):
            new = {row["key"] for row in await self._new(rows)}
            for row in rows:
                kind = row["topic"], row["type"]
                group = groups.setdefault(kind, Group(*kind))
                group.found += 1
                group.done += row["key"] not in new
                group.gone += row["key"] in new and not self._has(described, row)
                group.oldest = group.oldest or row["created_at"]
                group.newest = row["created_at"]
        return [*groups.values()]

    async def begin(self, wanted: Wanted, *, who: str, why: str) -> None:
        """Note who hands them, and why.

        Raises `Refused` if no process has the correction: its rows would hold their keys for ever.
        """
        if not await self._connection.fetchval(_IS_REGISTERED, self._name):
            raise Refused(f"no process has had {self._name!r} yet: deploy it, then run this again")
        change = Change(who, "correct", f"release {wanted.release}: {why}")
        await audit.note(self._connection, change, f"consumer {self._name}")

    async def hand(self, wanted: Wanted, rate: int) -> AsyncGenerator[Progress, None]:
        """Hand the messages that are left, so many in a second; yields after each transaction.

        It waits while workers are behind. Raises `KafkaError`, and `StoreUnavailable` of a codec.
        """
        progress, described = Progress(), await self._describe()
        size = min(rate, _AT_ONCE)
        source: AbstractAsyncContextManager[Records | None] = (
            nullcontext() if self._recalls else reading(self._settings)
        )
        async with source as records:
            faults = [] if records is None else records.unreadable
            async for rows in released.markers(self._connection, wanted):
                new = await self._new(rows)
                for start in range(0, len(new), size):
                    some = new[start : start + size]
                    began = monotonic()
                    await self._wait_for_workers()
                    faults.clear()
                    items = [one async for one in self._items(some, records, described)]
                    progress.handed += await self._store(items)
                    unreadable = _unreadable(faults, some)
                    progress.unreadable += unreadable
                    progress.gone += len(some) - len(items) - unreadable
                    progress.batches = [*map(str, faults)]
                    progress.to = some[-1]["created_at"]
                    yield progress
                    await asyncio.sleep(max(0.0, began + len(some) / rate - monotonic()))

    async def left(self) -> tuple[int, int]:
        """Return how many messages wait for the correction, and how many are dead letters."""
        row = await self._connection.fetchrow(_LEFT, self._name, timeout=SECONDS)
        return row["waiting"], row["dead"]

    async def cancel(self, *, who: str, why: str) -> int:
        """Delete what waits for the correction, so that its keys go on; return how many.

        They can be handed again. What a worker is handling meanwhile is corrected all the same.
        """
        change = Change(who, "cancel", why)
        await audit.note(self._connection, change, f"consumer {self._name}")
        number = 0
        for (lane,) in await self._connection.fetch(_LANES, self._name, timeout=SECONDS):
            deleted = CHUNK
            while deleted == CHUNK:
                async with self._connection.transaction():
                    # As long as a lease lasts, for which a worker may hold the lane.
                    await self._limit(self._settings.backlog_lease)
                    await dead_rows.lock_lane(self._connection, lane)
                    rows = await self._connection.fetch(_CANCEL, lane, self._name)
                    keys = {row["order_key"] for row in rows}
                    await lanes.schedule_heads(self._connection, [lane], keys)
                deleted = len(rows)
                number += deleted
        return number

    async def _limit(self, seconds: float) -> None:
        limit = f"{round(seconds * 1000)}ms"
        await self._connection.execute(_BEGIN, limit, self._settings.release)

    async def _describe(self) -> Topics:
        """Return the topics whose records are read."""
        if self._recalls:
            return Topics()
        return await topics.describe(self._settings, {one.topic for one in self._its})

    async def _new(self, rows: released.Rows) -> Sequence[asyncpg.Record]:
        """Return the markers whose messages were not handed yet."""
        keys = [marker_key(self._name, row["source"], row["id"]) for row in rows]
        done = {row["key"] for row in await self._connection.fetch(_DONE, keys)}
        return [row for key, row in zip(keys, rows, strict=True) if key not in done]

    def _has(self, described: Topics, row: asyncpg.Record) -> bool:
        """Whether the brokers have the offset of a message, or it is not needed."""
        if self._recalls:
            return True
        topic, number = described.get(row["topic"]), row["partition"]
        if topic is None or number not in topic.end:
            return False
        at: int = row["offset"]
        return topic.first[number] <= at < topic.stable[number]

    async def _items(
        self, rows: Iterable[asyncpg.Record], records: Records | None, described: Topics
    ) -> AsyncIterator[Item]:
        """Yield what is handed for these markers: the record of each, or what is remembered."""
        if records is None:
            for row in rows:
                if (item := await self._recalled(row)) is not None:
                    yield item
            return
        by_partition: dict[TopicPartition, dict[int, asyncpg.Record]] = {}
        for row in rows:
            if self._has(described, row):
                partition = TopicPartition(row["topic"], row["partition"])
                by_partition.setdefault(partition, {})[row["offset"]] = row
        for partition, by_offset in by_partition.items():
            found = [record async for record in records.at(partition, by_offset)]
            for unavailable in (await batch.prepare(self._handlers, found)).values():
                raise unavailable
            for record in found:
                row = by_offset[record.offset]
                item = corrections.item_of(self._handlers, self._name, record, _hash(row))
                # A topic that was created anew has other records at the same offsets.
                identity = item and (item.message.source, item.message.id)
                if item is not None and identity == (row["source"], row["id"]):
                    yield item

    async def _recalled(self, row: asyncpg.Record) -> Item | None:
        """Return what is remembered of a message, as an item."""
        published = await events_of(self._connection, row["key"], row["hash"], row["xid"])
        key: bytes | None = row["record_key"]
        was = Applied(
            consumer=row["consumer"],
            source=row["source"],
            id=row["id"],
            type=row["type"],
            topic=row["topic"],
            partition=row["partition"],
            offset=row["offset"],
            key=None if key is None else key.decode(errors="backslashreplace"),
            release=row["release"],
            at=row["created_at"],
            result=None if row["result"] is None else from_json(row["result"]),
            events=[
                AppliedEvent(
                    id=one["event_id"],
                    topic=one["topic"],
                    type=one["type"],
                    key=one["key"],
                    sequence=one["sequence"],
                )
                for one in published
            ],
        )
        record = corrections.record_of(was, key)
        return corrections.item_of(self._handlers, self._name, record, _hash(row))

    async def _wait_for_workers(self) -> None:
        while True:
            if not await backlog.is_full(self._connection, [self._name]):
                return
            await asyncio.sleep(_FULL_SECONDS)

    async def _store(self, items: Sequence[Item]) -> int:
        """Store a row for each message, and return how many are new."""
        timeout, encryption = self._settings.transaction_timeout, self._service.encryption
        async with self._connection.transaction():
            await self._limit(timeout)
            stored = await corrections.hand(self._connection, items, timeout, encryption)
        return len(stored)


def _unreadable(faults: Sequence[Unreadable], rows: Iterable[asyncpg.Record]) -> int:
    """Return how many of the markers' records are in batches that could not be read."""
    return sum(
        any(
            one.partition == (row["topic"], row["partition"])
            and one.start <= row["offset"] < one.beyond
            for one in faults
        )
        for row in rows
    )


def _hash(row: asyncpg.Record) -> bytes | None:
    """Return the hash of a message's payload; None if it is not known, or of another version."""
    return (row["hash"] or None) if row["hash_version"] == HASH_VERSION else None
