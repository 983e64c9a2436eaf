"""Positions: the next offset of each partition, moved by the consume transaction itself.

The statement that moves a position, or holds a lane, also reads the generations of the inbox.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Self

import asyncpg
from aiokafka import ConsumerRecord

from pipeline.events.message import FIRST_MILLISECOND, time_of

from . import audit
from .audit import Change
from .item import record_digest

_NO_ANCHOR = (None, None, None)


class SourceLost(Exception):
    """Another process owns the source of these messages: the transaction is rolled back."""


class Generations(NamedTuple):
    """The generation of the inbox that takes new markers, and the oldest one that is kept."""

    current: int
    oldest: int
    since: datetime | None
    """Markers from before this time may be deleted; None: none was deleted yet."""


class PositionMoved(SourceLost):
    """The position differs from the batch's start: another process has moved it, or an earlier
    commit whose result was lost."""


@dataclass(frozen=True)
class Slot:
    """Key of a position: a topic partition as a consumer group reads it."""

    group: str
    topic: str
    partition: int

    def __iter__(self) -> Iterator[str | int]:
        return iter((self.group, self.topic, self.partition))


class Anchor(NamedTuple):
    """The last record before a position: it shows whether the topic still holds what was read."""

    offset: int
    time: datetime
    hash: bytes

    @classmethod
    def of(cls, record: ConsumerRecord) -> Self:
        """Return the anchor that a record is."""
        digest = record_digest(f"{record.timestamp}", record)
        return cls(record.offset, time_of(record.timestamp), digest)


class Move(NamedTuple):
    """A batch's change of the position of its partition."""

    slot: Slot
    fetched_from: int
    next_offset: int
    anchor: Anchor | None
    """None over a gap in the offsets: the old anchor stays."""


class StoredPosition(NamedTuple):
    """The position of a partition; without an anchor if no record was read from it yet."""

    next_offset: int
    anchor: Anchor | None


_MOVE_POSITIONS = """
WITH moved AS (
    UPDATE pipeline.position AS position
       SET next_offset = move.next_offset,
           anchor_offset = COALESCE(move.anchor_offset, position.anchor_offset),
           anchor_time = COALESCE(move.anchor_time, position.anchor_time),
           anchor_hash = COALESCE(move.anchor_hash, position.anchor_hash),
           starts = 0,
           moved_at = clock_timestamp()
      FROM unnest($2::text[], $3::int[], $4::bigint[], $5::bigint[], $6::bigint[],
                  $7::timestamptz[], $8::bytea[])
           AS move (topic, partition, fetched_from, next_offset, anchor_offset, anchor_time,
                    anchor_hash)
     WHERE position.consumer_group = $1
       AND position.topic = move.topic
       AND position.partition = move.partition
       AND position.next_offset = move.fetched_from
    RETURNING 1
)
SELECT current, oldest, since, moved.number
  FROM (SELECT count(*) AS number FROM moved) AS moved, pipeline.inbox_generation
"""

_COUNT_DUPLICATES = """
UPDATE pipeline.position AS position
   SET duplicates = duplicates + found.number
  FROM unnest($2::text[], $3::int[], $4::bigint[]) AS found (topic, partition, number)
 WHERE position.consumer_group = $1
   AND position.topic = found.topic
   AND position.partition = found.partition
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

_OF_GROUP = f"""
SELECT topic, partition, next_offset AS position, moved_at, duplicates,
       CASE WHEN anchor_time >= to_timestamp({FIRST_MILLISECOND} / 1000) THEN anchor_time
       END AS written_at
  FROM pipeline.position
 WHERE consumer_group = $1 ORDER BY topic, partition
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


async def move_positions(connection: asyncpg.Connection, moves: Sequence[Move]) -> Generations:
    """Move the positions of different partitions of a group over their batches.

    Raises `PositionMoved` if one of them is not where its batch was fetched from.
    """
    # Sorted, so that two processes with the same partitions wait for each other without a deadlock.
    rows = sorted(
        (*one.slot, one.fetched_from, one.next_offset, *(one.anchor or _NO_ANCHOR)) for one in moves
    )
    [group, *_], *columns = map(list, zip(*rows, strict=True))
    *generations, number = await connection.fetchrow(_MOVE_POSITIONS, group, *columns)
    if number < len(moves):
        places = (
            f"{one.slot.topic}/{one.slot.partition} is not at {one.fetched_from}" for one in moves
        )
        raise PositionMoved(", or ".join(places))
    return Generations(*generations)


async def count_duplicates(
    connection: asyncpg.Connection, group: str, numbers: Mapping[tuple[str, int], int]
) -> None:
    """Add to the counts of duplicates, by topic and partition; only reports read them."""
    topics, partitions = map(list, zip(*numbers, strict=True))
    await connection.execute(_COUNT_DUPLICATES, group, topics, partitions, [*numbers.values()])


async def position(connection: asyncpg.Connection, slot: Slot) -> StoredPosition | None:
    """Return the stored position, or None if there is none."""
    row = await connection.fetchrow(_POSITION, *slot)
    if row is None:
        return None
    next_offset, offset, time, hash = row
    return StoredPosition(next_offset, None if offset is None else Anchor(offset, time, hash))


async def of_group(connection: asyncpg.Connection, group: str) -> list[asyncpg.Record]:
    """Return each position, with its last move and record, and its number of duplicates."""
    rows: list[asyncpg.Record] = await connection.fetch(_OF_GROUP, group)
    return rows


async def start_at(connection: asyncpg.Connection, slot: Slot, offset: int) -> None:
    """Store the first position of a partition; one that is stored already stays."""
    await connection.execute(_START_AT, *slot, offset)


async def count_start(connection: asyncpg.Connection, slot: Slot, position: int) -> int:
    """Count a start at the position; returns the number of starts without a regular end.

    A transaction of its own: a record that kills the process leaves no other trace.
    """
    return await connection.fetchval(_COUNT_START, *slot, position) or 0


async def forgive_start(connection: asyncpg.Connection, slot: Slot, position: int) -> None:
    """Undo `count_start` after a regular end."""
    await connection.execute(_FORGIVE_START, *slot, position)


async def seek(connection: asyncpg.Connection, slot: Slot, offset: int, change: Change) -> None:
    """Set the position of a partition, for an operator's command; the audit has it.

    A batch that is under way raises `PositionMoved` and is rolled back.
    """
    async with audit.changing(connection, change) as subjects:
        await connection.execute(_SEEK, *slot, offset)
        subjects.append(_goes(slot, offset))


async def rewind(connection: asyncpg.Connection, slot: Slot, offset: int, change: Change) -> None:
    """Set the position of a partition back to an offset, unless it is before that already.

    The audit has it.
    """
    async with audit.changing(connection, change) as subjects:
        await connection.execute(_REWIND, *slot, offset)
        subjects.append(_goes(slot, offset))


def _goes(slot: Slot, offset: int) -> str:
    return f"{slot.topic}/{slot.partition} to {offset}"
