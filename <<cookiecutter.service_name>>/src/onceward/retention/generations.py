"""Generations of the inbox: closed and forgotten by age; what is forgotten is dropped.

They change under a lock that excludes consume transactions.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from functools import partial
from random import uniform

import asyncpg

from onceward.apply.statements import GENERATION_LOCK
from onceward.servers.revisions import NotMigrated
from onceward.settings import CLOCK_MARGIN, Settings

from . import partitions, statements
from .partitions import PartitionStatus

log = logging.getLogger(__name__)

PATTERN = "inbox_g[0-9]+"

_ATTEMPTS, _LONGER_ATTEMPTS = 20, 5
_WAIT_SECONDS, _LONGER_WAIT_SECONDS = 0.1, 2.0
"""How long an attempt waits for the lock, while every message waits behind it. The last ones wait
longer, for long transactions."""

_REMEMBERED = "it is not forgotten yet: that needs a moment without a consume transaction"
_KEPT_OPEN = (
    "it is not closed: consume transactions hold the generation lock at every attempt, retention"
    " does not run, or the database's clock was ahead when it was opened"
)


async def read(connection: asyncpg.Connection) -> asyncpg.Record:
    """Return which generations there are, the database's time, and the last round of retention.

    Raises `NotMigrated` if the tables lack the rows that the migration inserts.
    """
    row = await connection.fetchrow(statements.READ_GENERATION)
    if row is None:
        raise NotMigrated
    return row


async def list_partitions(
    connection: asyncpg.Connection, settings: Settings
) -> AsyncIterator[PartitionStatus]:
    """Yield the status of every generation."""
    generation = await read(connection)
    age = timedelta(seconds=settings.inbox_age)
    closed_at = dict(await connection.fetch(statements.LIST_CLOSED_GENERATIONS))
    for one in await partitions.like(connection, PATTERN):
        number = int(one.name.removeprefix("inbox_g"))
        if number < generation["oldest"]:
            # No running transaction reads it: all of them began after it was forgotten.
            yield PartitionStatus("inbox", one, True, generation["since"])
        else:
            due_at = closed_at[number] + age if number in closed_at else None
            is_due = due_at is not None and due_at < generation["now"]
            needed_by = _REMEMBERED if is_due else None
            if number == generation["current"] and _is_overdue(generation, settings):
                is_due, due_at, needed_by = True, generation["opened_at"], _KEPT_OPEN
            is_ahead = number > generation["current"]
            yield PartitionStatus("inbox", one, is_due, due_at, needed_by, is_ahead)


def _is_overdue(generation: asyncpg.Record, settings: Settings) -> bool:
    """Whether the current generation should have been closed, or was opened in the future."""
    age = timedelta(seconds=settings.inbox_generation_age)
    interval = timedelta(seconds=settings.retention_interval)
    open_for: timedelta = generation["now"] - generation["opened_at"]
    return open_for > 2 * age + interval or open_for < -CLOCK_MARGIN


async def rotate(connection: asyncpg.Connection, settings: Settings) -> bool:
    """Close the generation that takes new markers, if it is old enough; returns whether it did."""
    generation = await read(connection)
    age = timedelta(seconds=settings.inbox_generation_age)
    if generation["now"] - generation["opened_at"] <= age:
        return False
    close = partial(close_generation, connection, current=generation["current"])
    return await _retry("close the current inbox generation", close)


async def close_generation(
    connection: asyncpg.Connection, wait: float = _WAIT_SECONDS, *, current: int
) -> bool:
    """Close the current generation; return False if it is not `current` or has no successor.

    Waits for the consume transactions that run, and new ones wait behind it: so for `wait` seconds
    at most. Raises `asyncpg.LockNotAvailableError` then, and can be called again.
    """
    is_closed = await _change(connection, wait, statements.CLOSE_GENERATION, current) is not None
    if is_closed:
        log.info("inbox generation %s is closed", current)
    return is_closed


async def forget(connection: asyncpg.Connection, settings: Settings) -> None:
    """Forget the generations that were closed long ago: no later transaction reads them."""
    before = (await read(connection))["now"] - timedelta(seconds=settings.inbox_age)
    closed = await connection.fetch(statements.LIST_CLOSED_GENERATIONS)
    if not any(closed_at < before for _, closed_at in closed):
        return  # to take the lock would hold up every message

    async def forget_closed(wait: float) -> bool:
        last = await _change(connection, wait, statements.FORGET_GENERATIONS, before, CLOCK_MARGIN)
        if last is not None:
            log.info("inbox generations up to %s are forgotten", last)
        return last is not None

    await _retry("forget old inbox generations", forget_closed)


async def _change(
    connection: asyncpg.Connection, wait: float, statement: str, *values: object
) -> int | None:
    async with connection.transaction():
        limit = f"{round(wait * 1_000)}ms"
        await connection.execute(statements.LOCK_GENERATIONS, GENERATION_LOCK, limit)
        changed: int | None = await connection.fetchval(statement, *values)
        return changed


async def _retry(what: str, change: Callable[[float], Awaitable[bool]]) -> bool:
    """Return the result of a change that takes the generation lock; False if it never gets it.

    `change` is called with the seconds for which it may wait for the lock. Every message waits
    behind it meanwhile, so it gives up after a short wait, and is tried again.
    """
    for attempt in range(_ATTEMPTS):
        is_last = attempt >= _ATTEMPTS - _LONGER_ATTEMPTS
        try:
            return await change(_LONGER_WAIT_SECONDS if is_last else _WAIT_SECONDS)
        except asyncpg.LockNotAvailableError:
            await asyncio.sleep(uniform(0.1, 0.5))
    log.warning(
        "retention could not %s: consume transactions held the generation lock at every attempt;"
        " the next round retries",
        what,
    )
    return False
