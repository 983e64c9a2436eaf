"""Dead letters of the outbound backlog: what a person sees of them and does with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import asyncpg

_DEAD = """
SELECT id, event_id, source, type, topic, key, payload, sequence, created_at, parked_at, died_at,
       attempts, reason, error, traceparent
  FROM pipeline.outbox_unsent
 WHERE died_at IS NOT NULL AND discarded_at IS NULL AND id > $1
   AND ($2::text IS NULL OR topic = $2) AND ($3::text IS NULL OR event_id = $3)
 ORDER BY id
 LIMIT $4
"""

_BY_SHARD = """
SELECT shard, array_agg(id) AS ids FROM pipeline.outbox_unsent WHERE id = ANY ($1) GROUP BY shard
"""

# Its owner sets nothing aside meanwhile. One shard at a time, or two might wait in a circle.
_HOLD_SHARD = "SELECT FROM pipeline.outbox_cursor WHERE shard = $1 FOR UPDATE"

# Each joins those of its key that wait.
_REDRIVE = """
UPDATE pipeline.outbox_unsent AS unsent
   SET died_at = NULL, parked_at = clock_timestamp(), attempts = 0, reason = NULL, error = NULL,
       queue = redriven.queue
  FROM (SELECT dead.id, COALESCE((array_agg(waiting.queue))[1], dead.queue) AS queue
          FROM pipeline.outbox_unsent AS dead
          LEFT JOIN pipeline.outbox_unsent AS waiting
            ON waiting.topic = dead.topic AND waiting.key = dead.key AND waiting.died_at IS NULL
         WHERE dead.id = ANY ($1) AND dead.died_at IS NOT NULL AND dead.discarded_at IS NULL
         GROUP BY dead.id) AS redriven
 WHERE unsent.id = redriven.id
RETURNING unsent.id
"""

_DISCARD = """
UPDATE pipeline.outbox_unsent
   SET discarded_at = clock_timestamp(), discarded_by = $2, discarded_for = $3
 WHERE id = ANY ($1) AND died_at IS NOT NULL AND discarded_at IS NULL
RETURNING id
"""


@dataclass(frozen=True)
class DeadEvent:
    """An event that was committed and that Kafka did not take."""

    id: int
    """Its place in the outbox."""
    event_id: str
    source: str
    type: str
    topic: str
    key: bytes | None
    payload: bytes | None
    sequence: int | None
    created_at: datetime
    parked_at: datetime
    """Since when it has waited, until it died."""
    died_at: datetime
    attempts: int
    """How often it was refused; 0 where its topic was."""
    reason: str
    error: str
    traceparent: str | None


async def dead(
    connection: asyncpg.Connection,
    *,
    topic: str | None = None,
    event_id: str | None = None,
    after: int = 0,
    limit: int = 1_000,
) -> list[DeadEvent]:
    """Return dead events in the order of their ids, the next page after an id."""
    rows = await connection.fetch(_DEAD, after, topic, event_id, limit)
    return [DeadEvent(**row) for row in rows]


async def redrive(connection: asyncpg.Connection, ids: Sequence[int]) -> list[int]:
    """Let the relay try dead events again, in order, with a fresh budget; returns which were dead.

    The relay that owns them notices within a third of its lease.
    """
    redriven: list[int] = []
    for shard in await connection.fetch(_BY_SHARD, ids):
        async with connection.transaction():
            await connection.execute(_HOLD_SHARD, shard["shard"])
            redriven += [row["id"] for row in await connection.fetch(_REDRIVE, shard["ids"])]
    return redriven


async def discard(
    connection: asyncpg.Connection, ids: Sequence[int], *, by: str, reason: str
) -> list[int]:
    """Give dead events up; their rows stay and tell who did so and why. Returns which were dead."""
    return [row["id"] for row in await connection.fetch(_DISCARD, ids, by, reason)]
