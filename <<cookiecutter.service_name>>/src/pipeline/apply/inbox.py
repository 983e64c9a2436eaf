"""The inbox: markers of the messages that have already taken effect.

All functions run in a consume transaction, in the order of `docs/protocol.md`, except `register`,
which runs in a transaction of its own. Positions are in `positions.py`; generations are closed and
deleted in `retention/generations.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Self
from uuid import UUID

import asyncpg

from pipeline.events.message import Message
from pipeline.events.payload import HASH_VERSION

from .filters import Filters
from .item import Item, Known

GENERATION_LOCK = 0x1B0C5
"""Advisory lock: shared by every consume transaction, exclusive while a generation is closed."""


class SourceLost(Exception):
    """Another process owns the source of these messages: the transaction is rolled back."""


@dataclass(frozen=True, slots=True)
class Generations:
    """The generation that takes new markers, and the oldest one that is kept."""

    current: int
    oldest: int
    since: datetime | None
    """Markers from before this time may be deleted; None: none was deleted yet."""
    opening: UUID
    """Unique id of the rotation that opened the current generation."""

    @classmethod
    def of(cls, row: asyncpg.Record) -> Self:
        """Return the generations of a row of `inbox_generation`."""
        return cls(row["current"], row["oldest"], row["since"], row["opening"])

    def forgot(self, message: Message) -> bool:
        """Whether the message is so old that its marker may have been deleted.

        By the times of record and event. It does not apply to consumers that `remembers_all`
        returns.
        """
        if self.since is None:
            return False
        milliseconds = self.since.timestamp() * 1000
        return 0 <= message.timestamp < milliseconds or (
            message.time is not None and message.time < self.since
        )


_REGISTER = """
INSERT INTO pipeline.inbox_consumer (consumer, generation)
SELECT new.consumer, current
  FROM unnest($1::text[]) AS new (consumer), pipeline.inbox_generation
    ON CONFLICT DO NOTHING
"""

_REMEMBERS_ALL = """
SELECT consumer FROM pipeline.inbox_consumer WHERE consumer = ANY ($1) AND generation >= $2
"""


# First the keys that a filter may have, in all closed generations; then all keys, in generations
# without a filter.
_FIND_IN_CLOSED_GENERATIONS = """
SELECT key, hash, hash_version
  FROM pipeline.inbox
 WHERE generation >= $1 AND generation < $2 AND key = ANY ($3)
 UNION ALL
SELECT key, hash, hash_version
  FROM pipeline.inbox
 WHERE generation >= $4 AND generation < $5 AND key = ANY ($6)
"""

# An array of rows, not one of each column: asyncpg encodes each element of an array by itself, and
# a row at once.
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
SELECT key, hash, hash_version
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


async def register(connection: asyncpg.Connection, consumers: Iterable[str]) -> None:
    """Store the generation in which each consumer begins; a registered one keeps its own.

    Call it before a consumer applies anything: then all its markers are in that generation or in
    later ones, also if the current one is closed meanwhile.
    """
    await connection.execute(_REGISTER, sorted(consumers))


async def remembers_all(
    connection: asyncpg.Connection, generations: Generations, consumers: Iterable[str]
) -> set[str]:
    """Return the consumers of which no marker was deleted: they have begun since.

    A message without a marker was not applied by them, however old it is. Consumers that are not
    registered are not returned.
    """
    rows = await connection.fetch(_REMEMBERS_ALL, sorted(consumers), generations.oldest)
    return {row["consumer"] for row in rows}


async def mark(
    connection: asyncpg.Connection,
    generations: Generations,
    items: Sequence[Item],
    filters: Filters,
) -> dict[bytes, Known]:
    """Insert markers of the messages; returns the markers that existed before, by key."""
    first: dict[bytes, Item] = {}
    for item in items:
        first.setdefault(item.key, item)
    known: dict[bytes, Known] = {}
    if generations.oldest < generations.current:
        known = await _find_closed(connection, generations, list(first), filters)
    # Sorted, so that two transactions with the same keys wait for each other without a deadlock.
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
    """Delete markers that this transaction has inserted: the messages are in the backlog."""
    await connection.execute(_UNMARK, generations.current, keys)


async def keep_results(
    connection: asyncpg.Connection, generations: Generations, results: Mapping[bytes, str]
) -> None:
    """Store the results of handlers, as JSON, in the markers that this transaction has inserted.

    A statement of its own: a marker is inserted before its handler is called, so that a transaction
    with the same message waits there.
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
    return {row["key"]: Known(row["hash"], row["hash_version"]) for row in rows}
