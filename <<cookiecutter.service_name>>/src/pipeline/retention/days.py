"""Days of the outbox: closed when they are over, dropped when all their events are published."""

from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta

import asyncpg

from pipeline.schema import SHARDS
from pipeline.settings import CLOCK_MARGIN, Settings

from . import partitions
from .partitions import Partition, PartitionStatus, State

PATTERN = "outbox_p[0-9]{8}"
DAY = timedelta(days=1)

_DETACHED = (
    "it was not detached by retention, and relays skip the events that they do not see: move it"
    " away, or attach it again and run `service adopt`"
)

# Its own transaction id, and not the snapshot's xmax, which is that of the latest *completed* one
# plus one: a running transaction above it may have rows in the partition already.
_CLOSE_DAYS = """
INSERT INTO pipeline.outbox_closed (day) SELECT unnest($1::date[]) ON CONFLICT DO NOTHING
"""

_CLOSED_DAYS = "SELECT day, xid, is_published, not_archived FROM pipeline.outbox_closed"

# Those that are dropped; and those that are not over, as after a jump of the clock.
_REOPEN_DAYS = """
DELETE FROM pipeline.outbox_closed
 WHERE (day + 1)::timestamp AT TIME ZONE 'UTC' + $1::interval > clock_timestamp()
    OR to_regclass('pipeline.outbox_p' || to_char(day, 'YYYYMMDD')) IS NULL
"""

_PUBLISHED = "UPDATE pipeline.outbox_closed SET is_published = true WHERE day = $1"

# A day may be locked for long, as by VACUUM FULL.
_WAIT_SHORTLY = """
SELECT set_config('lock_timeout', '2s', true), set_config('statement_timeout', '10s', true)
"""

# Waits for a reset, which takes the relays' progress back, and a reset waits for it.
_LOCK_PROGRESS = "LOCK TABLE pipeline.outbox_cursor IN ACCESS SHARE MODE"

_NEWEST = "SELECT xid FROM pipeline.{name} ORDER BY xid DESC LIMIT 1"

_UNFINISHED = """
SELECT count(*) AS shards,
       array_agg(shard ORDER BY shard) FILTER (WHERE is_unfinished) AS unfinished,
       bool_or(lease_until IS NULL OR lease_until < clock_timestamp())
           FILTER (WHERE is_unfinished) AS is_without_relay
  FROM (SELECT shard, lease_until,
               pg_snapshot_xmin(seen) < $1 OR pg_snapshot_xmin(seen) <= $2 AS is_unfinished
          FROM pipeline.outbox_cursor) AS cursor
"""

# In any database of the cluster, as snapshots hold the transactions of all. One that began after
# the oldest progress holds nothing back. What a role may not see of others is null here.
_OLDEST_WRITER = """
WITH running AS (
    SELECT format('process %s of %s in %s', pid,
                  COALESCE(NULLIF(application_name, ''), usename, '?'), datname) AS writer,
           xact_start AS since, backend_xid AS xid
      FROM pg_stat_activity WHERE pid <> pg_backend_pid()
     UNION ALL
    SELECT format('the prepared transaction %s in %s', gid, database), prepared, transaction
      FROM pg_prepared_xacts)
SELECT writer, since FROM running
 WHERE age(xid) >= (SELECT max(age(pg_snapshot_xmin(seen)::xid)) FROM pipeline.outbox_cursor)
 ORDER BY age(xid) DESC LIMIT 1
"""


def of(one: Partition) -> date | None:
    """Return the day of a partition of the outbox; None for any other table."""
    with suppress(ValueError):
        return date.fromisoformat(one.name.removeprefix("outbox_p"))
    return None


def end_of(day: date) -> datetime:
    """Return the moment at which a day is over."""
    return datetime.combine(day + DAY, time(), UTC)


async def list_partitions(
    connection: asyncpg.Connection, settings: Settings, now: datetime
) -> AsyncIterator[PartitionStatus]:
    """Yield the status of every day."""
    closed = {row["day"]: row for row in await connection.fetch(_CLOSED_DAYS)}
    for day, one in await _all(connection):
        due_at = end_of(day) + timedelta(seconds=settings.outbox_age)
        why = closed[day]["not_archived"] if day in closed else None
        if due_at < now:
            try:
                why = await needed_by(connection, day, one) or why
            except asyncpg.UndefinedTableError:
                continue  # another process has dropped it
        yield PartitionStatus("outbox", one, due_at < now, due_at, why)


async def close(connection: asyncpg.Connection, now: datetime) -> None:
    """Close the days that ended more than an hour ago.

    The transaction id that is stored is above those of all transactions with events of the day.
    """
    over = [day for day, _ in await _all(connection) if now > end_of(day) + CLOCK_MARGIN]
    await connection.execute(_REOPEN_DAYS, CLOCK_MARGIN)
    await connection.execute(_CLOSE_DAYS, over)


async def needed_by(
    connection: asyncpg.Connection, day: date, one: Partition, *, marks: bool = False
) -> str | None:
    """Return why a day is still needed; None if all its events are published.

    `marks` records that they are. It is called before the day is detached: afterwards relays don't
    see its events, and skip them.
    """
    try:
        async with connection.transaction():
            await connection.execute(_WAIT_SHORTLY)
            if marks:
                await connection.execute(_LOCK_PROGRESS)
            why = await _unpublished(connection, day, one)
            if marks and why is None:
                await connection.execute(_PUBLISHED, day)
            return why
    except (asyncpg.LockNotAvailableError, asyncpg.QueryCanceledError):
        return await partitions.used_by(connection, "outbox", one.name)


async def _unpublished(connection: asyncpg.Connection, day: date, one: Partition) -> str | None:
    """Return what still needs a day of the outbox; None if all its events are published.

    A transaction that could have put an event into it began before the day was closed: what is
    visible to each shard's progress must lie above that, and above every event that is there.
    """
    closed = {row["day"]: row for row in await connection.fetch(_CLOSED_DAYS)}.get(day)
    if closed is None:
        return "it is not closed yet: that comes an hour after its end"
    if one.state is not State.ATTACHED:
        return None if closed["is_published"] else _DETACHED
    newest = await connection.fetchval(_NEWEST.format(name=one.name))
    shards, unfinished, is_without_relay = await connection.fetchrow(
        _UNFINISHED, closed["xid"], newest or 0
    )
    if shards != SHARDS:
        return f"pipeline.outbox_cursor has {shards} shards, and not {SHARDS}"
    if not unfinished:
        return None
    many = f"{len(unfinished)} shards" if len(unfinished) > 1 else f"shard {unfinished[0]}"
    if is_without_relay:
        return f"no relay publishes {many}: run `service relay`"
    oldest = await connection.fetchrow(_OLDEST_WRITER)
    if oldest is None:
        return f"the relay has not published all of {many}"
    return f"the relay waits for {oldest['writer']}, which has run since {oldest['since']}"


async def _all(connection: asyncpg.Connection) -> list[tuple[date, Partition]]:
    """Return the days that have a partition, attached or not."""
    found = [(of(one), one) for one in await partitions.like(connection, PATTERN)]
    return [(day, one) for day, one in found if day is not None]
