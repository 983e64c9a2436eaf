"""Positions: where each partition goes on, moved by the consume transaction itself."""

from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from typing import NamedTuple, Self

import asyncpg
from aiokafka import ConsumerRecord

from pipeline.apply.inbox import Generations, SourceLost

_LAST_MILLISECOND = 253_402_300_799_000
"""The end of the year 9999. Producers may send any number as a time."""


class PositionMoved(SourceLost):
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


_COUNT_DUPLICATES = """
UPDATE pipeline.position SET duplicates = duplicates + $4
 WHERE consumer_group = $1 AND topic = $2 AND partition = $3
"""


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


async def count_duplicates(connection: asyncpg.Connection, slot: Slot, number: int) -> None:
    """Remember how many messages came to the partition again, for people who ask."""
    await connection.execute(_COUNT_DUPLICATES, slot.group, slot.topic, slot.partition, number)


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
