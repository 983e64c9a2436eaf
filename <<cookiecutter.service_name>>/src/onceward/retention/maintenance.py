"""Retention: makes partitions ahead, and drops those that have aged and are no longer needed."""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, timedelta

import asyncpg

from onceward.errors import describe_error
from onceward.observe import metrics
from onceward.servers.revisions import NotMigrated
from onceward.settings import CLOCK_MARGIN, Settings

from . import days, generations, partitions, statements
from .archive import Archive, archive_day, lacking, record_archiving
from .partitions import NotOwner, PartitionStatus, State

log = logging.getLogger(__name__)

_DISCARDED_AT_ONCE = 1_000

_SUMMARIZE_SECONDS = 600.0
"""Time limit of a statement that reads what was written since the last round."""


@dataclass
class Round:
    """What one round of retention has done."""

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
    try:
        generation = await generations.read(connection)
    except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
        raise NotMigrated from None
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
            if warns and is_short:
                log.warning("cannot create future partitions of the %s: %s", table, error)
            return ready
    return len(wanted)


async def begin_round(connection: asyncpg.Connection, seconds: float) -> bool:
    """Return whether a round may begin: none has in any process for so many seconds.

    It only saves work: two rounds at once do no harm. Raises `NotOwner` where another role has to
    run retention.
    """
    await partitions.must_own(connection)
    return bool(await connection.fetchval(statements.BEGIN_ROUND, seconds))


async def run_retention(
    connection: asyncpg.Connection,
    settings: Settings,
    *,
    archive: Archive | None = None,
    report: Callable[[str], None] = log.info,
) -> Round:
    """Run a round of retention: make partitions ahead, and drop what is too old and not needed.

    Days of the outbox are archived before, which may take long: `report` is called with the
    progress. Can be interrupted at any point, repeated, and done by two processes at once. Raises
    `NotMigrated`; and `NotOwner` where another role has to do it.
    """
    await make_ahead(connection, settings)
    await record_archiving(connection, archive)
    await partitions.must_own(connection)
    done = Round()
    if await generations.rotate(connection, settings):
        # Roles of other processes may lack the privilege to make the next one.
        await make_ahead(connection, settings)
    await generations.forget(connection, settings)
    await days.close(connection, (await generations.read(connection))["now"])
    async for one in list_partitions(connection, settings):
        if one.is_due:
            if why := await _drop(connection, one, archive, report):
                done.held.append(replace(one, needed_by=why))
                log.warning("partition %s is due since %s: %s", one.name, one.due_at, why)
            else:
                done.dropped.append(one.name)
    done.discarded = await _delete_discarded(connection, settings)
    await _summarize(connection)
    finished_at = await connection.fetchval(statements.FINISH_ROUND, len(done.held))
    metrics.observe_retention(len(done.held), finished_at)
    return done


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
    connection: asyncpg.Connection,
    one: PartitionStatus,
    archive: Archive | None,
    report: Callable[[str], None],
) -> str | None:
    """Drop a partition that is due; returns why not, if it is still needed."""
    day, why = days.of(one.partition), one.needed_by
    try:
        if day is not None:
            why = await days.needed_by(connection, day, one.partition, marks=True)
            why = why or await lacking(connection, archive, day)
        if why is None:
            await partitions.detach(connection, one.table, one.partition)
            if day is not None:
                # A command may have made its events wait again, before it was detached.
                detached = one.partition._replace(state=State.DETACHED)
                why = await days.needed_by(connection, day, detached)
                why = why or await archive_day(connection, archive, one.name, day, report)
        return why or await partitions.drop(connection, one.name)
    except (TimeoutError, asyncpg.QueryCanceledError, asyncpg.LockNotAvailableError):
        return await partitions.used_by(connection, one.table, one.name)
    except asyncpg.UndefinedTableError:
        is_there = await partitions.like(connection, one.name)
        return "another process is dropping it" if is_there else None
    except asyncpg.PostgresError as error:
        return str(error)


async def _summarize(connection: asyncpg.Connection) -> None:
    """Summarize what was written since the last round, so that searches by key need not read it."""
    try:
        await connection.execute(statements.SUMMARIZE_INDEXES, timeout=_SUMMARIZE_SECONDS)
    except (TimeoutError, asyncpg.PostgresError) as error:  # as if one was dropped meanwhile
        log.info("left to the next round, to summarize partitions: %s", describe_error(error))


async def _delete_discarded(connection: asyncpg.Connection, settings: Settings) -> int:
    """Delete the dead letters that a person has discarded long ago; returns how many.

    One of the inbox is also the memory of its message: it stays as long as a marker would.
    """
    generation = await generations.read(connection)
    before = generation["now"] - timedelta(seconds=settings.discarded_age)
    limits = [("outbox_rejected", "id", before)]
    if generation["since"] is not None:
        limits.append(("backlog", "key", min(before, generation["since"] - CLOCK_MARGIN)))
    deleted = 0
    for table, key, discarded_before in limits:
        statement = statements.DELETE_DISCARDED.format(table=table, key=key)
        last = _DISCARDED_AT_ONCE
        while last == _DISCARDED_AT_ONCE:
            tag = await connection.execute(statement, discarded_before, _DISCARDED_AT_ONCE)
            last = int(tag.split()[1])
            deleted += last
    return deleted
