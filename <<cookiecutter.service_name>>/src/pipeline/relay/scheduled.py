"""Scheduled events: kept in a table of their own, and moved into the outbox when they are due.

One relay at a time moves them, so that two of one key keep the order in which they are due. A move
is a transaction: neither a kill nor a jump of the clock loses an event or publishes it twice.
"""

from dataclasses import dataclass
from datetime import datetime
from time import monotonic

import asyncpg

from pipeline.apply import audit
from pipeline.apply.audit import Change
from pipeline.handlers.staging import CANCEL, COLUMNS
from pipeline.servers.database import IDLE_LIMIT

MOVE_LOCK = 0x1B0C8
"""Advisory lock: one relay moves scheduled events at a time."""

_AT_ONCE = 1_000
_LOOK_SECONDS = 1.0
"""Time between two checks for due events."""

# Reads the first row only, by the index, whatever the planner estimates.
_IS_DUE = "SELECT min(due_at) <= now() FROM pipeline.scheduled"

_LOCK = f"SELECT pg_try_advisory_xact_lock($1) AS is_ours, {IDLE_LIMIT}"

# A row that is being cancelled or replaced is locked; it is left for the next move.
_MOVE = f"""
WITH due AS (
    DELETE FROM pipeline.scheduled
     WHERE name IN (SELECT name FROM pipeline.scheduled
                     WHERE due_at <= now()
                     ORDER BY due_at, scheduled_at, name LIMIT $1
                       FOR UPDATE SKIP LOCKED)
    RETURNING *)
INSERT INTO pipeline.outbox ({COLUMNS}, release)
SELECT {COLUMNS}, release FROM due ORDER BY due_at, scheduled_at, name
"""

_COUNT = """
SELECT (SELECT count(*) FROM (SELECT FROM pipeline.scheduled LIMIT $1) AS few) AS count,
       (SELECT min(due_at) FROM pipeline.scheduled) AS next_due
"""

_LIST = """
SELECT name, due_at, scheduled_at, topic, convert_from(key, 'UTF8') AS key, type, event_id,
       COALESCE(datalength, octet_length(payload)) AS size
  FROM pipeline.scheduled
 ORDER BY due_at, name LIMIT $1
"""


class Scheduled:
    """Moves scheduled events that are due into the outbox."""

    def __init__(self) -> None:
        self._look_at = 0.0

    @property
    def is_time(self) -> bool:
        """Whether to check again for due events."""
        return monotonic() >= self._look_at

    async def move(self, connection: asyncpg.Connection) -> bool:
        """Move events that are due, up to a limit; returns whether there were any."""
        self._look_at = monotonic() + _LOOK_SECONDS
        moved = 0
        if await connection.fetchval(_IS_DUE):
            # A statement of its own after the lock, so that it sees what the last holder has moved.
            async with connection.transaction():
                if await connection.fetchval(_LOCK, MOVE_LOCK):
                    moved = int((await connection.execute(_MOVE, _AT_ONCE)).split()[-1])
        if moved == _AT_ONCE:
            self._look_at = 0.0
        return moved > 0


@dataclass(frozen=True)
class Waiting:
    """A scheduled event that is not published yet."""

    name: str
    due_at: datetime
    scheduled_at: datetime
    topic: str
    key: str | None
    type: str
    event_id: str
    size: int
    """Size of the payload, in bytes."""


async def waiting(connection: asyncpg.Connection, limit: int) -> list[Waiting]:
    """Return scheduled events, the next to be due first."""
    return [Waiting(**row) for row in await connection.fetch(_LIST, limit)]


async def count(connection: asyncpg.Connection, most: int) -> tuple[int, datetime | None]:
    """Return how many events are scheduled, up to a number, and when the first is due."""
    found, next_due = await connection.fetchrow(_COUNT, most)
    return found, next_due


async def cancel(
    connection: asyncpg.Connection, names: list[str], *, operator: str, why: str | None = None
) -> list[str]:
    """Cancel scheduled events; returns the names of those that were still waiting."""
    async with audit.changing(connection, Change(operator, "cancel", why)) as subjects:
        cancelled = sorted([row["name"] for row in await connection.fetch(CANCEL, names)])
        subjects.extend(f"scheduled event {name}" for name in cancelled)
    return cancelled
