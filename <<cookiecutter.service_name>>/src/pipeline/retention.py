"""Retention: partitions and generations stand ready before anything needs them.

New partitions are made apart and attached, because a plain `CREATE … PARTITION OF` queues behind
open transactions and stalls everyone behind it.
"""

import logging
from datetime import UTC, timedelta

import asyncpg
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random

from . import filters, inbox
from .settings import Settings

log = logging.getLogger(__name__)

HOUSEKEEPING_LOCK = 0x1B0C6
"""Advisory lock: one process makes partitions at a time."""

_BEGIN = "SELECT set_config('lock_timeout', '2s', true), pg_advisory_xact_lock($1)"

# Not `to_regclass`: it answers from the session's cache, which behind a lock that was waited for
# does not know yet what the other process has made.
_EXISTS = """
SELECT EXISTS (
       SELECT FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
        WHERE nspname = 'pipeline' AND relname = $1)
"""

_GENERATION = "SELECT current, opened_at, clock_timestamp() AS now FROM pipeline.inbox_generation"


_ROTATION_ATTEMPTS = 20


class NotMigrated(Exception):
    """The engine's tables are not there."""

    def __init__(self) -> None:
        super().__init__("the database has no pipeline tables yet: run `service migrate` first")


async def keep_house(connection: asyncpg.Connection, settings: Settings) -> None:
    """Make partitions ahead, close an inbox generation that is old enough, and build filters."""
    generation = await make_ahead(connection, settings)
    age = timedelta(seconds=settings.inbox_generation_age)
    if generation["now"] - generation["opened_at"] > age:
        await _rotate(connection, generation["current"])
    await filters.build(connection, mebibytes=settings.inbox_filter_mebibytes)


async def make_ahead(connection: asyncpg.Connection, settings: Settings) -> asyncpg.Record:
    """Make outbox partitions and inbox generations ahead; returns the current generation.

    Harmless to repeat and to run in several processes at once. Raises `NotMigrated`.
    """
    generation = await connection.fetchrow(_GENERATION) if await _is_there(connection) else None
    if generation is None:
        raise NotMigrated
    today = generation["now"].astimezone(UTC).date()
    for ahead in range(settings.outbox_days_ahead + 1):
        day = today + timedelta(days=ahead)
        name = f"outbox_p{day:%Y%m%d}"
        bounds = f"FROM ('{day} 00:00+00') TO ('{day + timedelta(days=1)} 00:00+00')"
        await _attach(connection, "outbox", name, bounds)
    current = int(generation["current"])
    for number in range(current, current + settings.inbox_generations_ahead + 1):
        await _attach(connection, "inbox", f"inbox_g{number}", f"IN ({number})")
    return generation


async def _is_there(connection: asyncpg.Connection) -> bool:
    return bool(await connection.fetchval(_EXISTS, "inbox_generation"))


async def _attach(connection: asyncpg.Connection, parent: str, name: str, bounds: str) -> None:
    """Create a partition and attach it, unless it is there."""
    if await connection.fetchval(_EXISTS, name):
        return
    async with connection.transaction():
        await connection.execute(_BEGIN, HOUSEKEEPING_LOCK)
        if await connection.fetchval(_EXISTS, name):
            return
        await connection.execute(
            f"CREATE TABLE pipeline.{name}"
            f" (LIKE pipeline.{parent} INCLUDING ALL EXCLUDING IDENTITY)"
        )
        await connection.execute(
            f"ALTER TABLE pipeline.{parent} ATTACH PARTITION pipeline.{name} FOR VALUES {bounds}"
        )
    log.info("made partition %s", name)


async def _rotate(connection: asyncpg.Connection, current: int) -> None:
    """Close the generation. It gives way at once and tries again, so that it stalls no message."""
    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(asyncpg.LockNotAvailableError),
        wait=wait_random(0.1, 0.5),
        stop=stop_after_attempt(_ROTATION_ATTEMPTS),
        retry_error_callback=lambda _: None,
    ):
        with attempt:
            if await inbox.rotate(connection, current=current):
                log.info("inbox generation %s is closed", current)
            return
    log.warning("inbox generation %s is busy; it will be closed in the next round", current)
