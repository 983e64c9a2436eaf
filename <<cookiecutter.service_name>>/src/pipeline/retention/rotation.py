"""Closes and forgets generations of the inbox, under a lock that excludes consume transactions."""

from datetime import datetime, timedelta

import asyncpg

from pipeline.apply.inbox import GENERATION_LOCK

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


async def close_generation(
    connection: asyncpg.Connection, *, current: int, wait: float = 0.1
) -> bool:
    """Close the current generation; return False if it is not `current` or has no successor.

    Waits for the consume transactions that run, and new ones wait behind it: so for `wait` seconds
    at most. Raises `asyncpg.LockNotAvailableError` then, and can be called again.
    """
    async with connection.transaction():
        await _lock_generation(connection, wait)
        return await connection.fetchval(_CLOSE_GENERATION, current) is not None


async def forget_generations(
    connection: asyncpg.Connection, *, before: datetime, margin: timedelta, wait: float = 0.1
) -> int | None:
    """Forget the generations that were closed before a time: no later transaction reads them.

    Returns the number of the last of them, None if there is none. `margin` is how far
    clocks of producers may be ahead. Waits as `close_generation` does: a running transaction may be
    reading them.
    """
    async with connection.transaction():
        await _lock_generation(connection, wait)
        forgotten: int | None = await connection.fetchval(_FORGET, before, margin)
        return forgotten


async def _lock_generation(connection: asyncpg.Connection, wait: float) -> None:
    await connection.execute(_LOCK_GENERATION, GENERATION_LOCK, f"{round(wait * 1_000)}ms")
