"""Positions: the next offset of each partition, moved by the consume transaction itself.

The statement that moves a position, or holds a lane, also reads the generations of the inbox.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, Self

import asyncpg
from aiokafka import ConsumerRecord

from onceward.errors import SourceLost
from onceward.events.message import time_of

from . import statements
from .item import record_digest

_NO_ANCHOR = (None, None, None)


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

    def __iter__(self) -> Iterator[Any]:
        """Yield what statements take."""
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


async def move_positions(connection: asyncpg.Connection, moves: Sequence[Move]) -> Generations:
    """Move the positions of different partitions of a group over their batches.

    Raises `PositionMoved` if one of them is not where its batch was fetched from. Of two processes
    that have read the same records, the one that commits first moves it.
    """
    # Sorted, so that two processes with the same partitions wait for each other without a deadlock.
    rows = sorted(
        (*one.slot, one.fetched_from, one.next_offset, *(one.anchor or _NO_ANCHOR)) for one in moves
    )
    [group, *_], *columns = map(list, zip(*rows, strict=True))
    *generations, number = await connection.fetchrow(statements.MOVE_POSITIONS, group, *columns)
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
    await connection.execute(
        statements.COUNT_DUPLICATES, group, topics, partitions, [*numbers.values()]
    )


async def position(connection: asyncpg.Connection, slot: Slot) -> StoredPosition | None:
    """Return the stored position, or None if there is none."""
    row = await connection.fetchrow(statements.READ_POSITION, *slot)
    if row is None:
        return None
    next_offset, offset, time, hash = row
    return StoredPosition(next_offset, None if offset is None else Anchor(offset, time, hash))


async def start_at(connection: asyncpg.Connection, slot: Slot, offset: int) -> None:
    """Store the first position of a partition; one that is stored already stays."""
    await connection.execute(statements.INSERT_POSITION, *slot, offset)


async def count_start(connection: asyncpg.Connection, slot: Slot, position: int) -> int:
    """Count a start at the position; returns the number of starts without a regular end.

    A transaction of its own: a record that kills the process leaves no other trace.
    """
    return await connection.fetchval(statements.COUNT_START, *slot, position) or 0


async def forgive_start(connection: asyncpg.Connection, slot: Slot, position: int) -> None:
    """Undo `count_start` after a regular end."""
    await connection.execute(statements.FORGIVE_START, *slot, position)
