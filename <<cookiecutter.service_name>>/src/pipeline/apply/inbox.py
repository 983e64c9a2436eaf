"""The inbox: where a partition goes on, and which events have already taken effect.

Everything here runs on the connection of a consume transaction, in the order of `docs/protocol.md`,
but for `register`, `start_at`, `position`, `seek`, `rotate` and `forget`, which are transactions of
their own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import NamedTuple, Self
from uuid import UUID

import asyncpg
import sqlalchemy as sa
from aiokafka import ConsumerRecord
from sqlalchemy.ext.asyncio import AsyncConnection

from pipeline.events.message import Message
from pipeline.events.payload import HASH_VERSION
from pipeline.settings import Settings

from .filters import Filters
from .item import Item, Known

GENERATION_LOCK = 0x1B0C5
"""Advisory lock: shared by every consume transaction, exclusive while a generation is closed."""


_LAST_MILLISECOND = 253_402_300_799_000
"""The end of the year 9999. Producers may send any number as a time."""


class PositionMoved(Exception):
    """The position is not where the batch was fetched from: another owner, or a commit unseen."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Whose position: one topic partition as one consumer group reads it."""

    group: str
    topic: str
    partition: int


class Anchor(NamedTuple):
    """The last record before a position: by it a topic is recognised."""

    offset: int
    time: datetime
    hash: bytes

    @classmethod
    def of(cls, record: ConsumerRecord) -> Self:
        """Describe a record as it lies in its partition."""
        digest = blake2b(f"{record.timestamp}".encode(), digest_size=16)
        for part in (record.key, record.value):
            digest.update(b"-" if part is None else b"%d:%b" % (len(part), part))
        return cls(record.offset, time_of(record.timestamp), digest.digest())


def time_of(milliseconds: int) -> datetime:
    """Return the time of a record; what is no time of a calendar becomes the nearest one."""
    return datetime.fromtimestamp(min(max(0, milliseconds), _LAST_MILLISECOND) / 1e3, UTC)


class StoredPosition(NamedTuple):
    """Where a partition goes on; without an anchor if nothing was read from it yet."""

    next_offset: int
    anchor: Anchor | None


@dataclass(frozen=True, slots=True)
class Generations:
    """Which generation takes new markers, and the oldest that is still remembered."""

    current: int
    oldest: int
    since: datetime | None
    """What happened before is not remembered; None: nothing was forgotten yet."""
    opening: UUID
    """Names the rotation that opened the current one: no other has this name."""

    def forgot(self, message: Message) -> bool:
        """Whether the message may have taken effect so long ago that its marker was forgotten.

        By its times: not so at a consumer that `remembers_all`.
        """
        if self.since is None:
            return False
        milliseconds = self.since.timestamp() * 1000
        return 0 <= message.timestamp < milliseconds or (
            message.time is not None and message.time < self.since
        )


_LIMITS = """
       set_config('idle_in_transaction_session_timeout', {transaction_timeout}, true),
       set_config('lock_timeout', {lock_timeout}, true),
       set_config('pipeline.handler', {handler}, true)"""
_TRANSACTION_TIMEOUT = """,
       set_config('transaction_timeout', {transaction_timeout}, true)"""
_LOCK = """,
       pg_advisory_xact_lock_shared(:lock)
"""
_VALUES = {name: f":{name}" for name in ("transaction_timeout", "lock_timeout", "handler")}

_BEGIN = sa.text(f"SELECT {_LIMITS.format(**_VALUES)}{_LOCK}")
_BEGIN_WITH_TRANSACTION_TIMEOUT = sa.text(
    f"SELECT {(_LIMITS + _TRANSACTION_TIMEOUT).format(**_VALUES)}{_LOCK}"
)

_MOVE_POSITION = """
WITH moved AS (
    UPDATE pipeline.position
       SET next_offset = $5,
           anchor_offset = COALESCE($6, anchor_offset),
           anchor_time = COALESCE($7, anchor_time),
           anchor_hash = COALESCE($8, anchor_hash),
           starts = $9,
           moved_at = clock_timestamp()
     WHERE consumer_group = $1 AND topic = $2 AND partition = $3 AND next_offset = $4
    RETURNING 1
)
SELECT current, oldest, since, opening, EXISTS (SELECT FROM moved) AS ours
  FROM pipeline.inbox_generation
"""

_REGISTER = """
INSERT INTO pipeline.inbox_consumer (consumer, generation)
SELECT new.consumer, current
  FROM unnest($1::text[]) AS new (consumer), pipeline.inbox_generation
    ON CONFLICT DO NOTHING
"""

_REMEMBERS_ALL = """
SELECT consumer FROM pipeline.inbox_consumer WHERE consumer = ANY ($1) AND generation >= $2
"""

_COUNT_DUPLICATES = """
UPDATE pipeline.position SET duplicates = duplicates + $4
 WHERE consumer_group = $1 AND topic = $2 AND partition = $3
"""

# In all of them what no filter rules out, and everything in those without a filter.
_FIND_IN_CLOSED_GENERATIONS = """
SELECT key, hash, hash_version, result::text AS result
  FROM pipeline.inbox
 WHERE generation >= $1 AND generation < $2 AND key = ANY ($3)
 UNION ALL
SELECT key, hash, hash_version, result::text
  FROM pipeline.inbox
 WHERE generation >= $4 AND generation < $5 AND key = ANY ($6)
"""

# Rows, not columns: asyncpg looks at every element of an array, and at a row as one.
_MARK = """
INSERT INTO pipeline.inbox
       (generation, key, hash, hash_version, consumer, source, id, type,
        topic, partition, "offset", traceparent)
SELECT $1, key, hash, $2, consumer, source, id, type, topic, partition, "offset", traceparent
  FROM unnest($3::pipeline.new_marker[])
    ON CONFLICT DO NOTHING
RETURNING key
"""

_FIND_IN_CURRENT_GENERATION = """
SELECT key, hash, hash_version, result::text AS result
  FROM pipeline.inbox
 WHERE generation = $1 AND key = ANY ($2)
"""

_KEEP_RESULTS = """
UPDATE pipeline.inbox AS marker
   SET result = returned.result::json
  FROM unnest($2::bytea[], $3::text[]) AS returned (key, result)
 WHERE marker.generation = $1 AND marker.key = returned.key
"""

_UNMARK = "DELETE FROM pipeline.inbox WHERE generation = $1 AND key = ANY ($2)"

_COUNT_START = """
UPDATE pipeline.position SET starts = starts + 1
 WHERE consumer_group = $1 AND topic = $2 AND partition = $3 AND next_offset = $4
RETURNING starts
"""

_FORGIVE_START = """
UPDATE pipeline.position SET starts = GREATEST(starts - 1, 0)
 WHERE consumer_group = $1 AND topic = $2 AND partition = $3 AND next_offset = $4
"""

_POSITION = """
SELECT next_offset, anchor_offset, anchor_time, anchor_hash
  FROM pipeline.position
 WHERE consumer_group = $1 AND topic = $2 AND partition = $3
"""

_START_AT = """
INSERT INTO pipeline.position (consumer_group, topic, partition, next_offset)
VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING
"""

_SEEK = """
INSERT INTO pipeline.position (consumer_group, topic, partition, next_offset)
VALUES ($1, $2, $3, $4)
    ON CONFLICT (consumer_group, topic, partition) DO UPDATE
   SET next_offset = excluded.next_offset, anchor_offset = NULL, anchor_time = NULL,
       anchor_hash = NULL, starts = 0, moved_at = clock_timestamp()
"""

_REWIND = """
UPDATE pipeline.position
   SET next_offset = $4, anchor_offset = NULL, anchor_time = NULL, anchor_hash = NULL, starts = 0,
       moved_at = clock_timestamp()
 WHERE consumer_group = $1 AND topic = $2 AND partition = $3 AND next_offset > $4
"""

_LOCK_GENERATION = "SELECT set_config('lock_timeout', $2, true), pg_advisory_xact_lock($1)"

_CLOSE_GENERATION = """
WITH opened AS (
    UPDATE pipeline.inbox_generation
       SET current = current + 1, opened_at = clock_timestamp(), opening = gen_random_uuid()
     WHERE current = $1 AND EXISTS (
           SELECT FROM pg_inherits WHERE inhparent = 'pipeline.inbox'::regclass
              AND inhrelid = to_regclass('pipeline.inbox_g' || ($1 + 1)))
    RETURNING opened_at
)
INSERT INTO pipeline.inbox_closed (generation, closed_at) SELECT $1, opened_at FROM opened
    ON CONFLICT (generation) DO UPDATE SET closed_at = excluded.closed_at
RETURNING generation
"""

# Those that were closed long ago. A record may carry a time ahead of ours: what is younger than the
# margin took effect later, by any clock that is not further ahead, and is remembered.
_FORGET = """
WITH forgotten AS (
    DELETE FROM pipeline.inbox_closed
     WHERE generation <= (SELECT max(generation) FROM pipeline.inbox_closed WHERE closed_at < $1)
    RETURNING generation, closed_at
)
UPDATE pipeline.inbox_generation
   SET oldest = last + 1, since = GREATEST(since, closed_at + $2::interval)
  FROM (SELECT max(generation) AS last, max(closed_at) AS closed_at FROM forgotten) AS forgotten
 WHERE oldest <= last AND last < current
RETURNING last
"""


def limits(settings: Settings, *, handler: str = "") -> dict[str, str]:
    """Return what bounds a transaction, as `begin` takes it.

    `handler` is the value of the setting `pipeline.handler`, see `door`.
    """
    transaction, lock = (
        f"{round(seconds * 1000)}ms"
        for seconds in (settings.transaction_timeout, settings.lock_timeout)
    )
    return {"transaction_timeout": transaction, "lock_timeout": lock, "handler": handler}


def limiting(connection: AsyncConnection, limits: Mapping[str, str]) -> str:
    """Return the statement that sets the limits anew, after they were reset."""
    bounded = _is_bounded(connection)
    values = {name: f"'{value}'" for name, value in limits.items()}
    return f"SELECT {(_LIMITS + _TRANSACTION_TIMEOUT * bounded).format(**values)}"


async def begin(connection: AsyncConnection, limits: Mapping[str, str]) -> None:
    """Bound the transaction and hold off rotation. Must be its first statement, alone.

    The lock is granted after the statement's snapshot was taken, so what it guards is read by the
    next one.
    """
    statement = _BEGIN_WITH_TRANSACTION_TIMEOUT if _is_bounded(connection) else _BEGIN
    await connection.execute(statement, {"lock": GENERATION_LOCK, **limits})


def _is_bounded(connection: AsyncConnection) -> bool:
    """Whether the server knows transaction_timeout, which came with PostgreSQL 17."""
    return (connection.dialect.server_version_info or (0,)) >= (17,)


async def move_position(
    connection: asyncpg.Connection,
    slot: Slot,
    *,
    fetched_from: int,
    next_offset: int,
    anchor: Anchor | None,
    starts: int,
) -> Generations:
    """Move the position over the batch; raises `PositionMoved` if it is not where we think.

    Without a new anchor, over a gap in the offsets, the old one stays. `starts` is what the next
    position is suspected of: 0, or more while records are tried one by one.
    """
    place = slot.group, slot.topic, slot.partition
    last = anchor or (None, None, None)
    row = await connection.fetchrow(
        _MOVE_POSITION, *place, fetched_from, next_offset, *last, starts
    )
    if row is None or not row["ours"]:
        raise PositionMoved(f"{slot.topic}/{slot.partition} is not at {fetched_from}")
    return Generations(row["current"], row["oldest"], row["since"], row["opening"])


async def register(connection: asyncpg.Connection, consumers: Iterable[str]) -> None:
    """Store the generation in which each consumer begins; one that has begun keeps its own.

    Before it applies anything: then all its markers are in that generation or in later ones, also
    where the current one is closed meanwhile.
    """
    await connection.execute(_REGISTER, sorted(consumers))


async def remembers_all(
    connection: asyncpg.Connection, generations: Generations, consumers: Iterable[str]
) -> set[str]:
    """Return the consumers of which no marker was ever forgotten: they have begun since.

    What they have no marker of they have not applied, however old it is. A consumer that was not
    registered is none of them.
    """
    rows = await connection.fetch(_REMEMBERS_ALL, sorted(consumers), generations.oldest)
    return {row["consumer"] for row in rows}


async def count_duplicates(connection: asyncpg.Connection, slot: Slot, number: int) -> None:
    """Remember how many messages came to the partition again, for people who ask."""
    await connection.execute(_COUNT_DUPLICATES, slot.group, slot.topic, slot.partition, number)


async def mark(
    connection: asyncpg.Connection,
    generations: Generations,
    items: Sequence[Item],
    filters: Filters,
) -> dict[bytes, Known]:
    """Remember the messages; returns what was remembered of some of them before, by key."""
    first: dict[bytes, Item] = {}
    for item in items:
        first.setdefault(item.key, item)
    known: dict[bytes, Known] = {}
    if generations.oldest < generations.current:
        known = await _find_closed(connection, generations, list(first), filters)
    # Sorted, so that two batches with the same keys wait for each other and never in a circle.
    new = [first[key] for key in sorted(key for key in first if key not in known)]
    inserted = await _insert(connection, generations.current, new) if new else set()
    if raced := [item.key for item in new if item.key not in inserted]:
        known |= _by_key(
            await connection.fetch(_FIND_IN_CURRENT_GENERATION, generations.current, raced)
        )
    return known


async def _find_closed(
    connection: asyncpg.Connection,
    generations: Generations,
    keys: Sequence[bytes],
    filters: Filters,
) -> dict[bytes, Known]:
    closed = range(generations.oldest, generations.current)
    suspects, bare = filters.sift(closed, generations.opening, keys)
    if not suspects and not bare:
        return {}
    return _by_key(
        await connection.fetch(
            _FIND_IN_CLOSED_GENERATIONS,
            closed.start,
            closed.stop,
            suspects,
            bare.start,
            bare.stop,
            keys if bare else [],
        )
    )


async def unmark(
    connection: asyncpg.Connection, generations: Generations, keys: Sequence[bytes]
) -> None:
    """Forget messages that this transaction has marked: they are in the backlog instead."""
    await connection.execute(_UNMARK, generations.current, keys)


async def keep_results(
    connection: asyncpg.Connection, generations: Generations, results: Mapping[bytes, str]
) -> None:
    """Keep what handlers returned, as JSON, beside the markers inserted by this transaction.

    A statement of its own: a marker is inserted before its handler is called, so that whoever has
    the same message waits there.
    """
    await connection.execute(
        _KEEP_RESULTS, generations.current, list(results), list(results.values())
    )


async def _insert(
    connection: asyncpg.Connection, generation: int, items: Sequence[Item]
) -> set[bytes]:
    new = [
        (
            item.key,
            item.message.hash,
            item.consumer,
            item.message.source,
            item.message.id,
            item.message.type,
            item.message.topic,
            item.message.partition,
            item.message.offset,
            item.message.traceparent,
        )
        for item in items
    ]
    return {row["key"] for row in await connection.fetch(_MARK, generation, HASH_VERSION, new)}


def _by_key(rows: Iterable[asyncpg.Record]) -> dict[bytes, Known]:
    return {row["key"]: Known(row["hash"], row["hash_version"], row["result"]) for row in rows}


async def position(connection: asyncpg.Connection, slot: Slot) -> StoredPosition | None:
    """Return where the partition goes on, or None if it was never read."""
    row = await connection.fetchrow(_POSITION, slot.group, slot.topic, slot.partition)
    if row is None:
        return None
    next_offset, offset, time, hash = row
    return StoredPosition(next_offset, None if offset is None else Anchor(offset, time, hash))


async def start_at(connection: asyncpg.Connection, slot: Slot, offset: int) -> None:
    """Store where a partition begins; keeps the position if another process was first."""
    await connection.execute(_START_AT, slot.group, slot.topic, slot.partition, offset)


async def count_start(connection: asyncpg.Connection, slot: Slot, position: int) -> int:
    """Count that a process begins to work at the position; returns how many have, without end.

    In a transaction of its own: a record that kills the process leaves no other trace.
    """
    return (
        await connection.fetchval(_COUNT_START, slot.group, slot.topic, slot.partition, position)
        or 0
    )


async def forgive_start(connection: asyncpg.Connection, slot: Slot, position: int) -> None:
    """Take back a start that has ended in order."""
    await connection.execute(_FORGIVE_START, slot.group, slot.topic, slot.partition, position)


async def seek(connection: asyncpg.Connection, slot: Slot, offset: int) -> None:
    """Let the partition go on from another offset, by a person's decision.

    A batch that is under way does not find the position where it was, and is rolled back.
    """
    await connection.execute(_SEEK, slot.group, slot.topic, slot.partition, offset)


async def rewind(connection: asyncpg.Connection, slot: Slot, offset: int) -> None:
    """Let the partition go back to an offset, unless somebody has let it go back further."""
    await connection.execute(_REWIND, slot.group, slot.topic, slot.partition, offset)


async def rotate(connection: asyncpg.Connection, *, current: int, wait: float = 0.1) -> bool:
    """Close the current generation; returns False if it is not `current` or has no successor.

    Waits for the consume transactions that run, and lets none begin meanwhile: so for `wait`
    seconds at most, then `asyncpg.LockNotAvailableError` says that it should be tried again.
    """
    async with connection.transaction():
        await _lock_generation(connection, wait)
        return await connection.fetchval(_CLOSE_GENERATION, current) is not None


async def forget(
    connection: asyncpg.Connection, *, before: datetime, margin: timedelta, wait: float = 0.1
) -> int | None:
    """Let no transaction look any more into generations that were closed before a time.

    Returns the last of them, None if there is none. `margin` is how far clocks of producers may be
    ahead. Waits as `rotate` does: a transaction that runs may be looking into them.
    """
    async with connection.transaction():
        await _lock_generation(connection, wait)
        forgotten: int | None = await connection.fetchval(_FORGET, before, margin)
        return forgotten


async def _lock_generation(connection: asyncpg.Connection, wait: float) -> None:
    await connection.execute(_LOCK_GENERATION, GENERATION_LOCK, f"{round(wait * 1_000)}ms")
