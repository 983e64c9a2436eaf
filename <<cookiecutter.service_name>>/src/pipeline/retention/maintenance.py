"""Retention: makes partitions ahead, and drops those that have aged and are no longer needed."""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import asyncpg

from pipeline.apply import filters
from pipeline.observe import metrics
from pipeline.servers.revisions import NotMigrated
from pipeline.settings import CLOCK_MARGIN, Settings

from . import days, generations, partitions
from .archive import Archive, Archiving, record_archiving
from .lease import Lease, TakenOver
from .partitions import NotOwner, PartitionStatus, StillNeeded

log = logging.getLogger(__name__)

_LEASE_SECONDS = 60.0
"""Longer than a step takes, mostly; one that takes longer may be done twice."""
_DISCARDED_AT_ONCE = 1_000

_DELETE_DISCARDED = """
WITH old AS (
    SELECT {key} FROM pipeline.{table}
     WHERE discarded_at < $1 ORDER BY discarded_at LIMIT $2 FOR UPDATE SKIP LOCKED)
DELETE FROM pipeline.{table} WHERE {key} = ANY (ARRAY(SELECT {key} FROM old))
"""


@dataclass
class Round:
    """What one round of retention has done."""

    owner: str
    """The process that has the lease."""
    is_ours: bool = True
    """Whether this process held the lease to the end; otherwise it stopped when it lost it."""
    dropped: list[str] = field(default_factory=list)
    """Partitions that were dropped."""
    held: list[PartitionStatus] = field(default_factory=list)
    """Partitions that are due, and still needed."""
    discarded: int = 0
    """Dead letters deleted, which a person had discarded long ago."""


async def make_ahead(
    connection: asyncpg.Connection, settings: Settings, *, warns: bool = True
) -> None:
    """Make outbox partitions and inbox generations ahead of their use.

    Harmless to repeat and to run in several processes at once. Raises `NotMigrated`; and
    `NotOwner` where one is missing that is needed now, and another role has to make it.
    """
    generation = None
    if await partitions.exists(connection, "inbox_generation"):
        generation = await generations.read(connection)
    if generation is None:
        raise NotMigrated
    today = generation["now"].astimezone(UTC).date()
    current = int(generation["current"])
    wanted = {
        f"inbox_g{number}": f"IN ({number})"
        for number in range(current, current + settings.inbox_generations_ahead + 1)
    }
    await _attach(connection, "inbox", wanted, warns=warns)
    wanted = {
        f"outbox_p{day:%Y%m%d}": f"FROM ('{day} 00:00+00') TO ('{day + days.DAY} 00:00+00')"
        for day in (today + ahead * days.DAY for ahead in range(settings.outbox_days_ahead + 1))
    }
    ready = await _attach(connection, "outbox", wanted, warns=warns)
    until = days.end_of(today + (ready - 1) * days.DAY)
    metrics.observe_partitions(until, generation["since"])
    metrics.observe_retention(generation["held"], generation["finished_at"])


async def _attach(
    connection: asyncpg.Connection, table: str, wanted: Mapping[str, str], *, warns: bool
) -> int:
    """Make partitions by their bounds, the first of which is needed now.

    Returns how many are ready without a gap. Raises `NotOwner` if that is none.
    """
    for ready, (name, bounds) in enumerate(wanted.items()):
        try:
            await partitions.attach(connection, table, name, bounds)
        except NotOwner as error:
            if not ready:
                raise
            # After midnight or a rotation the last one is missing until retention's next round.
            is_short = ready < max(2, len(wanted) - 1)
            level = logging.WARNING if warns and is_short else logging.DEBUG
            log.log(level, "partitions of the %s run out: %s", table, error)
            return ready
    return len(wanted)


async def run_retention(
    connection: asyncpg.Connection,
    settings: Settings,
    *,
    archive: Archive | None = None,
    report: Callable[[str], None] = log.info,
) -> Round:
    """Run a round of retention: make partitions ahead, and drop what is too old and not needed.

    Only one process at a time drops. Days of the outbox are archived before, which may take long:
    `report` is called with the progress. Can be interrupted at any point. Raises `NotMigrated`; and
    `NotOwner` where another role has to do it.
    """
    await make_ahead(connection, settings)
    if archive is not None and not archive.is_on:
        archive = None
    if archive is not None:
        await record_archiving(connection)
    await partitions.must_own(connection)
    lease = Lease(connection, min(_LEASE_SECONDS, settings.housekeeping_interval))
    try:
        await lease.take()
    except TakenOver as error:
        return Round(error.owner, is_ours=False)
    done = Round(lease.owner)
    try:
        await _run(connection, settings, Archiving(connection, archive, lease, report), lease, done)
    except TakenOver as error:
        log.warning("%s", error)
        done.owner, done.is_ours = error.owner, False
    finally:
        with suppress(Exception):  # the lease expires by itself
            await lease.end()
    for one in done.held:
        log.warning("partition %s is due since %s: %s", one.name, one.due_at, one.needed_by)
    return done


async def _run(
    connection: asyncpg.Connection,
    settings: Settings,
    archiving: Archiving,
    lease: Lease,
    done: Round,
) -> None:
    """Run the steps of a round while this process holds the lease. Raises `TakenOver`."""
    if await generations.rotate(connection, settings, lease):
        # Roles of other processes may lack the privilege to make the next one.
        await make_ahead(connection, settings)
    await generations.forget(connection, settings, lease)
    await days.close(connection, lease.owner, (await generations.read(connection))["now"])
    async for one in list_partitions(connection, settings):
        if one.is_due:
            await lease.take()
            await _drop(connection, one, archiving, done)
    done.discarded = await _delete_discarded(connection, settings)
    finished_at = await lease.finish(len(done.held))
    metrics.observe_retention(len(done.held), finished_at)
    await filters.build(connection, mebibytes=settings.inbox_filter_mebibytes)


async def list_partitions(
    connection: asyncpg.Connection, settings: Settings
) -> AsyncIterator[PartitionStatus]:
    """Yield every partition, when it is due, and why it is still needed then.

    The reason is determined when the partition is yielded.
    """
    async for one in generations.list_partitions(connection, settings):
        yield one
    now = (await generations.read(connection))["now"]
    async for one in days.list_partitions(connection, settings, now):
        yield one


async def _drop(
    connection: asyncpg.Connection, one: PartitionStatus, archiving: Archiving, done: Round
) -> None:
    """Drop a partition that is due, unless it is still needed."""
    first = None
    try:
        if day := days.of(one.partition):
            await days.require_published(connection, day, one.partition, marks=True)
            first = await archiving.before_drop(one.name, day)
        elif one.needed_by is not None:
            raise StillNeeded(one.needed_by)
        await partitions.drop(connection, one.table, one.partition, first=first)
    except asyncpg.UndefinedTableError:
        return  # another process has dropped it
    except (StillNeeded, asyncpg.PostgresError) as error:
        done.held.append(replace(one, needed_by=str(error)))
    else:
        done.dropped.append(one.name)


async def _delete_discarded(connection: asyncpg.Connection, settings: Settings) -> int:
    """Delete the dead letters that a person has discarded long ago; returns how many.

    One of the inbox is also the memory of its message: it stays as long as a marker would.
    """
    generation = await generations.read(connection)
    before = generation["now"] - timedelta(seconds=settings.discarded_age)
    deleted = await _delete(connection, "outbox_rejected", "id", before)
    if generation["since"] is not None:
        forgotten = generation["since"] - CLOCK_MARGIN
        deleted += await _delete(connection, "backlog", "key", min(before, forgotten))
    return deleted


async def _delete(connection: asyncpg.Connection, table: str, key: str, before: datetime) -> int:
    statement = _DELETE_DISCARDED.format(table=table, key=key)
    deleted, last = 0, _DISCARDED_AT_ONCE
    while last == _DISCARDED_AT_ONCE:
        tag = await connection.execute(statement, before, _DISCARDED_AT_ONCE)
        last = int(tag.split()[1])
        deleted += last
    return deleted
