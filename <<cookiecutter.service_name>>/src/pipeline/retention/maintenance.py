"""Retention: partitions and generations stand ready before anything needs them, and go in time.

What is old enough goes as a whole. What somebody still needs stays, and is told of.
"""

import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, time, timedelta
from functools import partial
from time import monotonic
from typing import Literal
from uuid import uuid4

import asyncpg
from tenacity import (
    AsyncRetrying,
    AttemptManager,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random,
)

from pipeline.apply import filters, inbox
from pipeline.errors import describe_error
from pipeline.observe import telemetry
from pipeline.schema import SHARDS
from pipeline.servers.cluster import IS_OURS
from pipeline.servers.revisions import NotMigrated
from pipeline.settings import CLOCK_MARGIN, Settings

from . import partitions
from .archive import Archive
from .partitions import NotOwner, Partition, State, StillNeeded

log = logging.getLogger(__name__)

_DAY = timedelta(days=1)
_LEASE_SECONDS = 60.0
"""Longer than a step takes, mostly; one that takes longer may be taken twice."""
_TOLD_SECONDS = 10.0
"""How often it is told how far the archive is."""
_FAREWELL_SECONDS = 2.0
_GIVEN_WAY_ATTEMPTS = 20
_HOLD_UP_SECONDS, _HOLD_UP_LONGER_SECONDS, _LONGER_ATTEMPTS = 0.1, 2.0, 5
"""For how long an attempt lets every message wait; where transactions are longer, the last ones."""
_DISCARDED_AT_ONCE = 1_000
_TAKEN = (
    "somebody has detached it, and relays went past what they did not see: move it away, or attach"
    " it again and run `service relay reset`"
)
_REMEMBERED = "it is not forgotten yet, which waits for a moment without messages"
_BUSY = "it could not be closed: there is no moment without a transaction of messages"
_AHEAD_OF_TIME = (
    "it is not closed before {until}: the database's clock was ahead when it was opened"
)
_NEGLECTED = "it is not closed: nobody has finished a round of retention since {at}"
_NO_ARCHIVE = (
    "it is not archived: process {who} knows of no archive. Run retention with the settings of the"
    " others; or, to let the day go unarchived, `service retention forgo {day}`"
)

_OUTBOX = "outbox_p[0-9]{8}"
_INBOX = "inbox_g[0-9]+"

_GENERATION = """
SELECT current, oldest, opened_at, since, clock_timestamp() AS now, finished_at, held
  FROM pipeline.inbox_generation, pipeline.retention_lease
"""

# A lease that would last for longer was taken before the clock was set back.
_LEASE = """
UPDATE pipeline.retention_lease
   SET owner = $1, lease_until = clock_timestamp() + make_interval(secs => $2)
 WHERE owner IS NULL OR owner = $1 OR lease_until < clock_timestamp()
    OR lease_until > clock_timestamp() + make_interval(secs => $2)
RETURNING owner
"""

_OWNER = "SELECT COALESCE(owner, 'none') FROM pipeline.retention_lease"

_FINISHED = """
UPDATE pipeline.retention_lease
   SET finished_at = clock_timestamp(), held = $2 WHERE owner = $1
RETURNING finished_at
"""

_END_LEASE = "UPDATE pipeline.retention_lease SET owner = NULL WHERE owner = $1"

_CLOSED_GENERATIONS = "SELECT generation, closed_at FROM pipeline.inbox_closed"

# Its own transaction id, and not the snapshot's xmax, which is that of the latest *completed* one
# plus one: a running transaction above it may have rows in the partition already.
_CLOSE_DAYS = """
INSERT INTO pipeline.outbox_closed (day) SELECT unnest($1::date[]) ON CONFLICT DO NOTHING
"""

_CLOSED_DAYS = "SELECT day, xid, is_published, not_archived FROM pipeline.outbox_closed"

# Those that are gone; and those that are not over, as after a jump of the clock. Nobody takes the
# lease meanwhile: who was overtaken does not know which days are over by now, and would make one
# that the other has detached somebody's.
_REOPEN_DAYS = """
WITH lease AS (
    SELECT FROM pipeline.retention_lease WHERE owner = $2 FOR SHARE)
DELETE FROM pipeline.outbox_closed WHERE day <> ALL ($1) AND EXISTS (SELECT FROM lease)
"""

_PUBLISHED = "UPDATE pipeline.outbox_closed SET is_published = true WHERE day = $1"

_NOT_ARCHIVED = "UPDATE pipeline.outbox_closed SET not_archived = $2 WHERE day = $1"

# So that a process that knows of no archive drops nothing that is to be in it.
_ARCHIVES = "UPDATE pipeline.retention_lease SET archives = true WHERE NOT archives"

_IS_ARCHIVED = """
SELECT archives AND NOT COALESCE(
           (SELECT goes_unarchived FROM pipeline.outbox_closed WHERE day = $1), false)
  FROM pipeline.retention_lease
"""

_FORGO = """
UPDATE pipeline.outbox_closed SET goes_unarchived = true, not_archived = NULL
 WHERE $1::date[] IS NULL OR day = ANY ($1)
RETURNING day
"""

_ARCHIVES_NO_LONGER = "UPDATE pipeline.retention_lease SET archives = false"

# For somebody who holds a day locked, as VACUUM FULL does.
_WAIT_SHORTLY = """
SELECT set_config('lock_timeout', '2s', true), set_config('statement_timeout', '10s', true)
"""

# Waits for a reset, and a reset for us: it takes the relays' progress back.
_LOCK_PROGRESS = "LOCK TABLE pipeline.outbox_cursor IN ACCESS SHARE MODE"

_IS_OURS = f"SELECT {IS_OURS}"

_NEWEST = "SELECT xid FROM pipeline.{name} ORDER BY xid DESC LIMIT 1"

_UNFINISHED = """
SELECT count(*) AS shards,
       array_agg(shard ORDER BY shard) FILTER (WHERE is_unfinished) AS unfinished,
       bool_or(lease_until IS NULL OR lease_until < clock_timestamp())
           FILTER (WHERE is_unfinished) AS is_nobodys
  FROM (SELECT shard, lease_until,
               pg_snapshot_xmin(seen) < $1 OR pg_snapshot_xmin(seen) <= $2 AS is_unfinished
          FROM pipeline.outbox_cursor) AS cursor
"""

# In whatever database of the cluster: snapshots hold them all. Who began after the oldest progress
# holds nothing back. What a user may not see of others is null here, and then not named.
_OLDEST_WRITER = """
WITH running AS (
    SELECT format('process %s of %s in %s', pid,
                  COALESCE(NULLIF(application_name, ''), usename, '?'), datname) AS who,
           xact_start AS since, backend_xid AS xid
      FROM pg_stat_activity WHERE pid <> pg_backend_pid()
     UNION ALL
    SELECT format('the prepared transaction %s in %s', gid, database), prepared, transaction
      FROM pg_prepared_xacts)
SELECT who, since FROM running
 WHERE age(xid) >= (SELECT max(age(pg_snapshot_xmin(seen)::xid)) FROM pipeline.outbox_cursor)
 ORDER BY age(xid) DESC LIMIT 1
"""

_DELETE_DISCARDED = """
WITH old AS (
    SELECT {key} FROM pipeline.{table}
     WHERE discarded_at < $1 ORDER BY discarded_at LIMIT $2 FOR UPDATE SKIP LOCKED)
DELETE FROM pipeline.{table} WHERE {key} = ANY (ARRAY(SELECT {key} FROM old))
"""


class TakenOver(Exception):
    """Another process is at it: our lease had ended."""

    def __init__(self) -> None:
        super().__init__("another process has taken over the work of retention")


@dataclass(frozen=True)
class PartitionStatus:
    """Where a partition stands on its way out."""

    table: Literal["inbox", "outbox"]
    partition: Partition
    is_due: bool
    """Whether its age has come."""
    due_at: datetime | None = None
    """When it comes, or came; None for a generation that is not closed yet."""
    needed_by: str | None = None
    """Of one that is due: what holds it back; None if nothing does."""
    not_archived: str | None = None
    """Why its rows could not be archived the last time, without which it does not go."""
    is_ahead: bool = False
    """Whether it is a generation that takes no markers yet."""

    @property
    def name(self) -> str:
        """The table that it is."""
        return self.partition.name


@dataclass
class Round:
    """What one round of retention has done."""

    owner: str
    """The process that is at it."""
    is_ours: bool = True
    """Whether that is this one, to the end; otherwise nothing more was done."""
    dropped: list[str] = field(default_factory=list)
    """Partitions that are gone."""
    held: list[PartitionStatus] = field(default_factory=list)
    """Partitions that are due, and that somebody needs."""
    discarded: int = 0
    """Dead letters deleted, which a person had discarded long ago."""


AHEAD_SECONDS = 60.0
"""How often it is seen to, at least, that partitions are there: messages would wait for one."""


async def make_ahead(
    connection: asyncpg.Connection, settings: Settings, *, warns: bool = True
) -> None:
    """Make outbox partitions and inbox generations ahead, which nobody may find missing.

    Harmless to repeat and to run in several processes at once. Raises `NotMigrated`; and
    `NotOwner` where one is missing that is needed now, and another role has to make it.
    """
    generation = None
    if await partitions.exists(connection, "inbox_generation"):
        generation = await connection.fetchrow(_GENERATION)
    if generation is None:
        raise NotMigrated
    today = generation["now"].astimezone(UTC).date()
    current = int(generation["current"])
    generations = {
        f"inbox_g{number}": f"IN ({number})"
        for number in range(current, current + settings.inbox_generations_ahead + 1)
    }
    days = {
        f"outbox_p{day:%Y%m%d}": f"FROM ('{day} 00:00+00') TO ('{day + _DAY} 00:00+00')"
        for day in (today + ahead * _DAY for ahead in range(settings.outbox_days_ahead + 1))
    }
    await _attach(connection, "inbox", generations, warns=warns)
    ready = await _attach(connection, "outbox", days, warns=warns)
    telemetry.observe_partitions(_end_of(today + (ready - 1) * _DAY), generation["since"])
    telemetry.observe_retention(generation["held"], generation["finished_at"])


async def _attach(
    connection: asyncpg.Connection, table: str, wanted: Mapping[str, str], *, warns: bool
) -> int:
    """Make partitions by their bounds, the first of which is needed now; returns how many of them
    stand ready without a gap. Raises `NotOwner` if that is none."""
    for ready, (name, bounds) in enumerate(wanted.items()):
        try:
            await partitions.attach(connection, table, name, bounds)
        except NotOwner as error:
            if not ready:
                raise
            # After midnight or a rotation the furthest is there as of retention's next round.
            is_short = ready < max(2, len(wanted) - 1)
            level = logging.WARNING if warns and is_short else logging.DEBUG
            log.log(level, "partitions of the %s run out: %s", table, error)
            return ready
    return len(wanted)


async def tidy(
    connection: asyncpg.Connection,
    settings: Settings,
    *,
    archive: Archive | None = None,
    say: Callable[[str], None] = log.info,
) -> Round:
    """Do what one process does for all, unless another one is at it.

    Close an inbox generation that is old enough, forget old ones, drop what is too old and what
    nobody needs, and build filters. Days of the outbox go into the archive before, which may take
    long: `say` is told how far it is. Can be cut off at any point, and two at once do no harm.
    Raises `NotOwner` where another role has to do it.
    """
    if archive is not None and not archive.is_on:
        archive = None
    if archive is not None:  # noted also by those who may not drop, for those who know of none
        await connection.execute(_ARCHIVES)
    await partitions.must_own(connection)
    lease = _Lease(connection, min(_LEASE_SECONDS, settings.housekeeping_interval))
    try:
        await lease.take()
    except TakenOver:
        return Round(await connection.fetchval(_OWNER), is_ours=False)
    done = Round(lease.owner)
    try:
        if await _rotate(connection, settings, lease):
            await make_ahead(connection, settings)  # who may not would miss one until next time
        await _forget(connection, settings, lease)
        await _close_days(connection, lease)
        keeper = None
        if archive is not None:
            keeper = _Keeper(connection, settings, archive, lease, say)
        async for one in survey(connection, settings):
            if one.is_due:
                await lease.take()
                await _drop(connection, one, done, keeper)
        await _delete_discarded(connection, settings, done)
        finished_at = await lease.finish(len(done.held))
        telemetry.observe_retention(len(done.held), finished_at)
        await filters.build(connection, mebibytes=settings.inbox_filter_mebibytes)
    except TakenOver as error:
        log.warning("%s; it goes on with it", error)
        done.owner, done.is_ours = await connection.fetchval(_OWNER), False
    finally:
        with suppress(Exception):  # else it ends by itself
            await lease.end()
    for held in done.held:
        log.warning("partition %s is due since %s: %s", held.name, held.due_at, held.needed_by)
    return done


async def maintain(
    connection: asyncpg.Connection,
    settings: Settings,
    *,
    archive: Archive | None = None,
    say: Callable[[str], None] = log.info,
) -> Round:
    """Make partitions ahead and tidy up."""
    await make_ahead(connection, settings)
    return await tidy(connection, settings, archive=archive, say=say)


async def forgo(connection: asyncpg.Connection, days: Sequence[date] | None) -> list[date]:
    """Let days go without being archived, whoever drops them; returns which.

    None: all that are over, and those to come too, unless a process still has an archive.
    """
    if days is None:
        await connection.execute(_ARCHIVES_NO_LONGER)
    return sorted([row["day"] for row in await connection.fetch(_FORGO, days)])


async def survey(
    connection: asyncpg.Connection, settings: Settings
) -> AsyncIterator[PartitionStatus]:
    """Tell of every partition when it is due, and of those that are due what holds them back.

    That is asked when its turn comes.
    """
    generation = await connection.fetchrow(_GENERATION)
    now = generation["now"]
    age = timedelta(seconds=settings.inbox_age)
    closed_at = dict(await connection.fetch(_CLOSED_GENERATIONS))
    for one in await partitions.like(connection, _INBOX):
        number = int(one.name.removeprefix("inbox_g"))
        if number < generation["oldest"]:
            # No transaction looks into it: those that run began after that.
            yield PartitionStatus("inbox", one, True, generation["since"])
        else:
            due_at = closed_at[number] + age if number in closed_at else None
            is_due = due_at is not None and due_at < now
            needed_by = _REMEMBERED if is_due else None
            if number == generation["current"] and (why := _kept_open(generation, settings)):
                is_due, due_at, needed_by = True, generation["opened_at"], why
            is_ahead = number > generation["current"]
            yield PartitionStatus("inbox", one, is_due, due_at, needed_by, is_ahead=is_ahead)
    closed = {row["day"]: row for row in await connection.fetch(_CLOSED_DAYS)}
    for day, one in await _days(connection):
        due_at = _end_of(day) + timedelta(seconds=settings.outbox_age)
        try:
            why = await _held_by(connection, day, one) if due_at < now else None
        except asyncpg.UndefinedTableError:
            continue  # another process has dropped it
        failed = closed[day]["not_archived"] if day in closed else None
        yield PartitionStatus("outbox", one, due_at < now, due_at, why, failed)


def _kept_open(generation: asyncpg.Record, settings: Settings) -> str | None:
    """Say why the current generation is not closed, if it should be."""
    now, opened_at = generation["now"], generation["opened_at"]
    age = timedelta(seconds=settings.inbox_generation_age)
    interval = timedelta(seconds=settings.housekeeping_interval)
    if opened_at > now + CLOCK_MARGIN:
        # Not at once: what says that the clock was wrong then, and is not now?
        return _AHEAD_OF_TIME.format(until=f"{opened_at + age:%Y-%m-%d %H:%M}Z")
    if now - opened_at <= 2 * age + interval:
        return None
    if now - generation["finished_at"] > 2 * interval:
        return _NEGLECTED.format(at=f"{generation['finished_at']:%Y-%m-%d %H:%M}Z")
    return _BUSY


async def _rotate(connection: asyncpg.Connection, settings: Settings, lease: "_Lease") -> bool:
    """Close the generation that takes new markers, if it is old enough; says whether it did."""
    generation = await connection.fetchrow(_GENERATION)
    current = generation["current"]
    age = timedelta(seconds=settings.inbox_generation_age)
    if generation["now"] - generation["opened_at"] <= age:
        return False
    async for attempt in _giving_way():
        with attempt:
            await lease.hold()
            is_closed = await inbox.rotate(connection, current=current, wait=_held_up(attempt))
            if is_closed:
                log.info("inbox generation %s is closed", current)
            return is_closed
    log.warning("inbox generation %s is busy; it will be closed in the next round", current)
    return False


async def _forget(connection: asyncpg.Connection, settings: Settings, lease: "_Lease") -> None:
    """Forget the generations that were closed long ago."""
    generation = await connection.fetchrow(_GENERATION)
    before = generation["now"] - timedelta(seconds=settings.inbox_age)
    closed = await connection.fetch(_CLOSED_GENERATIONS)
    if not any(closed_at < before for _, closed_at in closed):
        return  # the lock would hold up every message
    async for attempt in _giving_way():
        with attempt:
            await lease.hold()
            wait = _held_up(attempt)
            last = await inbox.forget(connection, before=before, margin=CLOCK_MARGIN, wait=wait)
            if last is not None:
                log.info("inbox generations up to %s are forgotten", last)
            return
    log.warning("inbox generations are in use; they will be forgotten in the next round")


def _giving_way() -> AsyncRetrying:
    """Try what holds up every message again and again; it gives way at once, so that none waits."""
    return AsyncRetrying(
        retry=retry_if_exception_type(asyncpg.LockNotAvailableError),
        wait=wait_random(0.1, 0.5),
        stop=stop_after_attempt(_GIVEN_WAY_ATTEMPTS),
        retry_error_callback=lambda _: None,
    )


def _held_up(attempt: AttemptManager) -> float:
    """Return for how many seconds an attempt may let every message wait."""
    is_last = attempt.retry_state.attempt_number > _GIVEN_WAY_ATTEMPTS - _LONGER_ATTEMPTS
    return _HOLD_UP_LONGER_SECONDS if is_last else _HOLD_UP_SECONDS


async def _close_days(connection: asyncpg.Connection, lease: "_Lease") -> None:
    """Note who could have put events into days that are over, an hour after their end."""
    now = (await connection.fetchrow(_GENERATION))["now"]
    over = [day for day, _ in await _days(connection) if now > _end_of(day) + CLOCK_MARGIN]
    await connection.execute(_REOPEN_DAYS, over, lease.owner)
    await connection.execute(_CLOSE_DAYS, over)


async def _held_by(
    connection: asyncpg.Connection, day: date, one: Partition, *, marks: bool = False
) -> str | None:
    """Say who needs a day of the outbox, or has it locked. Else None, which can be noted at once.

    That is before the detach: afterwards nobody could find out, as relays don't see its events.
    """
    try:
        async with connection.transaction():
            await connection.execute(_WAIT_SHORTLY)
            if marks:
                await connection.execute(_LOCK_PROGRESS)
            why = await _what_needs(connection, day, one)
            if why is None and marks:
                await connection.execute(_PUBLISHED, day)
            return why
    except (asyncpg.LockNotAvailableError, asyncpg.QueryCanceledError):
        return await partitions.used_by(connection, "outbox", one.name)


async def _what_needs(connection: asyncpg.Connection, day: date, one: Partition) -> str | None:
    """Say who still needs a day of the outbox; None if all its events are published.

    A transaction that could have put an event into it began before the day was closed: what is
    visible to each shard's progress must lie above that, and above every event that is there.
    """
    closed = {row["day"]: row for row in await connection.fetch(_CLOSED_DAYS)}.get(day)
    if closed is None:
        return "it is not closed yet: that comes an hour after its end"
    if one.state is not State.ATTACHED:
        # Relays go past what they don't see: only what was found before the detach counts.
        is_ours = closed["is_published"]
        return None if is_ours else _TAKEN
    if not await connection.fetchval(_IS_OURS):
        return "the outbox is another database cluster's: see `service relay reset`"
    newest = await connection.fetchval(_NEWEST.format(name=one.name))
    shards, unfinished, is_nobodys = await connection.fetchrow(
        _UNFINISHED, closed["xid"], newest or 0
    )
    if shards != SHARDS:
        return f"pipeline.outbox_cursor has {shards} shards, and not {SHARDS}"
    if not unfinished:
        return None
    many = f"{len(unfinished)} shards" if len(unfinished) > 1 else f"shard {unfinished[0]}"
    if is_nobodys:
        return f"no relay publishes {many}: run `service relay`"
    writer = await connection.fetchrow(_OLDEST_WRITER)
    if writer is None:
        return f"the relay has not published all of {many}"
    return f"the relay can't be past {writer['who']}, which runs since {writer['since']}"


class _Lease:
    """Lets one process at a time do what one does for all."""

    def __init__(self, connection: asyncpg.Connection, seconds: float) -> None:
        self.owner = f"{socket.gethostname()}:{uuid4().hex[:12]}"
        self._connection = connection
        self._seconds = seconds
        self._renew_at = 0.0

    async def take(self) -> None:
        """Take it, or renew it. Raises `TakenOver`."""
        if not await self._connection.fetchval(_LEASE, self.owner, self._seconds):
            raise TakenOver
        self._renew_at = monotonic() + self._seconds / 3

    async def hold(self) -> None:
        """Renew it when a third of it is over. Raises `TakenOver`."""
        if monotonic() >= self._renew_at:
            await self.take()

    async def finish(self, held: int) -> datetime:
        """Note that all is done, for whoever tells of it; returns when. Raises `TakenOver`."""
        at: datetime | None = await self._connection.fetchval(_FINISHED, self.owner, held)
        if at is None:
            raise TakenOver
        return at

    async def end(self) -> None:
        """Give it to whoever comes next."""
        await self._connection.execute(_END_LEASE, self.owner, timeout=_FAREWELL_SECONDS)


class _Keeper:
    """Has days archived, as long as the lease is ours."""

    def __init__(
        self,
        connection: asyncpg.Connection,
        settings: Settings,
        archive: Archive,
        lease: _Lease,
        say: Callable[[str], None],
    ) -> None:
        self._connection = connection
        self._settings = settings
        self._ahead_seconds = min(settings.housekeeping_interval, AHEAD_SECONDS)
        self._make_at = monotonic() + self._ahead_seconds
        self._archive = archive
        self._lease = lease
        self._say = say

    async def keep(self, day: date, one: Partition) -> None:
        """Return when the day is archived. Raises `Held`, and notes why; or `TakenOver`."""
        say_at = monotonic() + _TOLD_SECONDS

        async def tell(progress: str) -> None:
            nonlocal say_at
            await self._lease.hold()
            if monotonic() >= self._make_at:
                # It may take longer than those that stand ready last.
                await make_ahead(self._connection, self._settings, warns=False)
                self._make_at = monotonic() + self._ahead_seconds
            if monotonic() >= say_at:
                self._say(f"archiving {one.name}: {progress}")
                say_at = monotonic() + _TOLD_SECONDS

        try:
            await self._archive.keep(self._connection, one.name, day, tell)
            # Else the other one may be at it, and would find no table.
            await self._lease.take()
        except (TakenOver, asyncpg.UndefinedTableError):
            raise
        except Exception as error:
            why = f"it is not archived: {describe_error(error)}"
            await self._connection.execute(_NOT_ARCHIVED, day, why)
            raise StillNeeded(why) from error


async def _drop(
    connection: asyncpg.Connection, one: PartitionStatus, done: Round, keeper: _Keeper | None
) -> None:
    """Drop what is due and nobody needs."""
    first, day = None, _day_of(one.partition)
    try:
        if one.needed_by is None and day is not None:
            why = await _held_by(connection, day, one.partition, marks=True)
            one = replace(one, needed_by=why)
        if one.needed_by is None:
            if day is not None:
                first = await _archiving(connection, day, one.partition, done, keeper)
            await partitions.drop(connection, one.table, one.partition, first=first)
    except asyncpg.UndefinedTableError:
        return  # another process has dropped it
    except (StillNeeded, asyncpg.PostgresError) as error:
        one = replace(one, needed_by=str(error))
    if one.needed_by is None:
        done.dropped.append(one.name)
    else:
        done.held.append(one)


async def _archiving(
    connection: asyncpg.Connection, day: date, one: Partition, done: Round, keeper: _Keeper | None
) -> Callable[[], Awaitable[None]] | None:
    """Return what archives a day, if that is wanted. Raises `Held` where nobody here can."""
    if not await connection.fetchval(_IS_ARCHIVED, day):
        return None
    if keeper is None:
        why = _NO_ARCHIVE.format(who=done.owner, day=day)
        await connection.execute(_NOT_ARCHIVED, day, why)
        raise StillNeeded(why)
    return partial(keeper.keep, day, one)


async def _delete_discarded(
    connection: asyncpg.Connection, settings: Settings, done: Round
) -> None:
    """Delete the dead letters that a person has discarded long ago.

    One of the inbox is also the memory of its message: it stays as long as a marker would.
    """
    generation = await connection.fetchrow(_GENERATION)
    before = generation["now"] - timedelta(seconds=settings.discarded_age)
    if generation["since"] is not None:
        forgotten = generation["since"] - CLOCK_MARGIN
        done.discarded += await _delete(connection, "backlog", "key", min(before, forgotten))
    done.discarded += await _delete(connection, "outbox_rejected", "id", before)


async def _delete(connection: asyncpg.Connection, table: str, key: str, before: datetime) -> int:
    deleted, last = 0, _DISCARDED_AT_ONCE
    while last == _DISCARDED_AT_ONCE:
        tag = await connection.execute(
            _DELETE_DISCARDED.format(table=table, key=key), before, _DISCARDED_AT_ONCE
        )
        last = int(tag.split()[1])
        deleted += last
    return deleted


async def _days(connection: asyncpg.Connection) -> list[tuple[date, Partition]]:
    """Return the days of the outbox; tables that only look like one are somebody's."""
    found = [(_day_of(one), one) for one in await partitions.like(connection, _OUTBOX)]
    return [(day, one) for day, one in found if day is not None]


def _day_of(one: Partition) -> date | None:
    with suppress(ValueError):
        return date.fromisoformat(one.name.removeprefix("outbox_p"))
    return None


def _end_of(day: date) -> datetime:
    return datetime.combine(day + _DAY, time(), UTC)
