"""Days of the outbox: closed when they are over, dropped when all their events are published."""

from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta

import asyncpg

from onceward.schema import SHARDS
from onceward.settings import CLOCK_MARGIN, Settings

from . import partitions, statements
from .partitions import Partition, PartitionStatus, State

PATTERN = "outbox_p[0-9]{8}"
DAY = timedelta(days=1)

_DETACHED = (
    "it was not detached by retention, and relays skip the events that they do not see: move it"
    " away, or attach it again and run `service adopt`"
)


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
    closed = {row["day"]: row for row in await connection.fetch(statements.LIST_CLOSED_DAYS)}
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
    await connection.execute(statements.REOPEN_DAYS, CLOCK_MARGIN)
    await connection.execute(statements.CLOSE_DAYS, over)


async def needed_by(
    connection: asyncpg.Connection, day: date, one: Partition, *, marks: bool = False
) -> str | None:
    """Return why a day is still needed; None if all its events are published.

    `marks` records that they are. It is called before the day is detached: afterwards relays don't
    see its events, and skip them.
    """
    try:
        async with connection.transaction():
            await connection.execute(statements.LIMIT_WAIT_FOR_DAY)
            if marks:
                await connection.execute(statements.LOCK_PROGRESS)
            why = await _unpublished(connection, day, one)
            if marks and why is None:
                await connection.execute(statements.MARK_DAY_PUBLISHED, day)
            return why
    except (asyncpg.LockNotAvailableError, asyncpg.QueryCanceledError):
        return await partitions.used_by(connection, "outbox", one.name)


async def _unpublished(connection: asyncpg.Connection, day: date, one: Partition) -> str | None:
    """Return what still needs a day of the outbox; None if all its events are published.

    A transaction that could have put an event into it began before the day was closed: what is
    visible to each shard's progress must lie above that, and above every event that is there.
    """
    rows = await connection.fetch(statements.LIST_CLOSED_DAYS)
    closed = {row["day"]: row for row in rows}.get(day)
    if closed is None:
        return "it is not closed yet: that comes an hour after its end"
    if one.state is not State.ATTACHED:
        return None if closed["is_published"] else _DETACHED
    statement = statements.FIND_LAST_TRANSACTION_OF_DAY.format(name=one.name)
    newest = await connection.fetchval(statement)
    shards, unfinished, is_without_relay = await connection.fetchrow(
        statements.FIND_UNFINISHED_SHARDS, closed["xid"], newest or 0
    )
    if shards != SHARDS:
        return f"pipeline.outbox_cursor has {shards} shards, and not {SHARDS}"
    if not unfinished:
        return None
    many = f"{len(unfinished)} shards" if len(unfinished) > 1 else f"shard {unfinished[0]}"
    if is_without_relay:
        return f"no relay publishes {many}: run `service relay`"
    oldest = await connection.fetchrow(statements.FIND_OLDEST_WRITER)
    if oldest is None:
        return f"the relay has not published all of {many}"
    return f"the relay waits for {oldest['writer']}, which has run since {oldest['since']}"


async def _all(connection: asyncpg.Connection) -> list[tuple[date, Partition]]:
    """Return the days that have a partition, attached or not."""
    found = [(of(one), one) for one in await partitions.like(connection, PATTERN)]
    return [(day, one) for day, one in found if day is not None]
