"""The relay: publishes the outbox, shard by shard, window by window, under leases."""

import asyncio
import logging
import math
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from uuid import uuid4

import asyncpg
from aiokafka.errors import KafkaError
from sqlalchemy.ext.asyncio import AsyncEngine

from pipeline.errors import describe_error, is_infrastructure
from pipeline.observe import metrics
from pipeline.observe.health import Health
from pipeline.schema import SHARDS
from pipeline.servers.cluster import IS_OURS, OtherCluster
from pipeline.servers.database import autocommitting, lease_ended
from pipeline.servers.retrying import pause
from pipeline.servers.tasks import in_background, sleep_or_event
from pipeline.settings import Settings

from .backpressure import RelayBackpressure
from .publisher import LeaseExpired, NotSent, Publisher
from .rejected import Unsent
from .rejection import Refused
from .scheduled import Scheduled
from .window import PAGE_BYTES, Page, Progress, fitting, fresh, is_as_seen, page

log = logging.getLogger(__name__)

_FIRST_PAGE = 100
"""Small, until it is known how large the events are."""
_SCHEDULED = "scheduled events"
"""The part of the relay's health that says whether they are moved."""


class ServerChanged(Exception):
    """Behind a pooler another server has taken over: what it has seen is only in its cursor."""

    def __init__(self) -> None:
        super().__init__("the database server was restarted or replaced: reading the cursor again")


_EXPLAINED = (LeaseExpired, NotSent, OtherCluster, ServerChanged)

_SERVER = "SELECT pg_postmaster_start_time()"

_ANNOUNCE = """
INSERT INTO pipeline.outbox_relay (owner, lease_until, published)
VALUES ($1, clock_timestamp() + make_interval(secs => $2), $3)
    ON CONFLICT (owner)
    DO UPDATE SET lease_until = excluded.lease_until, published = excluded.published
"""

_COUNT_RELAYS = f"""
WITH gone AS (DELETE FROM pipeline.outbox_relay WHERE {lease_ended("$1")})
SELECT (SELECT count(*) FROM pipeline.outbox_relay WHERE NOT {lease_ended("$1")}) AS alive,
       (SELECT extract(epoch FROM min(lease_until) - clock_timestamp())::float
          FROM pipeline.outbox_cursor WHERE lease_until >= clock_timestamp()) AS first_ends,
       {IS_OURS} AS is_ours,
       pg_postmaster_start_time() AS server
"""

_GONE = f"""
SELECT array_agg(DISTINCT owner) AS owners, max(lease_until) AS until
  FROM pipeline.outbox_cursor
 WHERE {lease_ended("$2")} AND owner <> $1
"""

_CLAIM = f"""
UPDATE pipeline.outbox_cursor
   SET owner = $1, token = token + 1, lease_until = clock_timestamp() + make_interval(secs => $2)
 WHERE shard IN (
       SELECT shard FROM pipeline.outbox_cursor
        WHERE (lease_until IS NULL OR {lease_ended("$2")}
               OR (owner = $1 AND shard <> ALL ($4)))
          AND (owner IS NULL OR owner = $1 OR (owner = ANY ($5) AND lease_until <= $6))
          AND pg_postmaster_start_time() = $7 AND {IS_OURS}
        ORDER BY shard LIMIT $3
          FOR UPDATE SKIP LOCKED)
RETURNING shard, token, seen, target, last_id, high_id
"""

_WRITE = """
UPDATE pipeline.outbox_cursor AS cursor
   SET seen = $3, target = $4, last_id = $5, high_id = $6,
       lease_until = CASE WHEN $7 THEN clock_timestamp() + make_interval(secs => $8) END,
       owner = CASE WHEN $7 THEN owner END
  FROM unnest($1::smallint[], $2::bigint[]) AS mine (shard, token)
 WHERE cursor.shard = mine.shard AND cursor.token = mine.token
   AND pg_postmaster_start_time() = $9
RETURNING cursor.shard
"""

_LEAVE = "DELETE FROM pipeline.outbox_relay WHERE owner = $1"


Pages = list[tuple[list[int], Page]]
"""Pages of groups of shards."""


@dataclass(frozen=True)
class _Ahead:
    """Pages that were read in advance, and the progress from which they go on."""

    progress: Mapping[int, Progress]
    pages: Pages


class Relay:
    """One relay process. Any number of them share the shards; each shard has one owner."""

    def __init__(self, engine: AsyncEngine, *, name: str, settings: Settings, health: Health):
        self._engine = engine
        self._settings = settings
        self._health = health
        self._owner = f"{socket.gethostname()}:{uuid4().hex[:12]}"
        self._publisher = Publisher(settings, client_id=f"{name}-relay", owner=self._owner)
        self._unsent = Unsent(settings)
        self._scheduled = Scheduled()
        self._progress: dict[int, Progress] = {}
        self._tokens: dict[int, int] = {}
        self._server: datetime | None = None
        self._lease_ends = 0.0
        self._extend_at = 0.0
        self._renew_at = 0.0
        self._look_at = 0.0
        self._page = min(settings.relay_page, _FIRST_PAGE)
        self._published = 0
        self._ahead: _Ahead | None = None
        self._lags = True
        self.lead = RelayBackpressure(2 * settings.relay_page)
        """What the transactions of this process are ahead by."""
        self._turn = asyncio.Lock()
        """Held by what uses the connection while a page is sent."""
        self._write_at = 0.0
        self._dirty: set[int] = set()
        self._failures = 0
        self._staged = asyncio.Event()
        self._stopping = asyncio.Event()

    def wake(self, events: int) -> None:
        """Tell the relay that this process has staged so many."""
        self.lead.staged(events)
        self._staged.set()

    def stop(self) -> None:
        """Ask `run` to publish what is there, within the shutdown grace, and end."""
        self._stopping.set()
        self._staged.set()

    async def run(self) -> None:
        """Publish until `stop`."""
        self._health.not_ready("relay", "has not started yet")
        try:
            await self._serve_until_stopped()
        finally:
            self.lead.end()
            await self._publisher.discard()

    async def _serve_until_stopped(self) -> None:
        while True:
            try:
                await self._serve()
                break
            except Exception as error:
                self.lead.end()
                reason = self._told(error)
                self._health.not_ready("relay", reason)
                if not (isinstance(error, _EXPLAINED) or is_infrastructure(error)):
                    log.exception("relay: unexpected error, starting again")
                elif self._failures == 0:
                    log.warning("relay: %s; trying again", reason)
                self._failures += 1
            if self._stopping.is_set():
                break
            await asyncio.sleep(pause(self._failures))

    def _told(self, error: Exception) -> str:
        """Say what failed, and at which server."""
        if isinstance(error, KafkaError | NotSent):
            return f"{self._settings.kafka}: {describe_error(error)}"
        if is_infrastructure(error):
            return f"{self._settings.postgresql}: {describe_error(error)}"
        return describe_error(error)

    async def _serve(self) -> None:
        """Hold leases and publish on one connection until `stop`, or until something fails."""
        # What was in memory is not known to be still ours: begin with what the database says.
        self._forget()
        async with autocommitting(self._engine) as driver:
            if not self._holds_lease():
                metrics.forget_outbox()
            self._server = await driver.fetchval(_SERVER)
            try:
                await self._publish_until_stopped(driver)
            except TimeoutError:
                raise  # the next question would wait as long again for a server that says nothing
            except Exception:
                # Else every try would repeat the pages that Kafka has taken since the last write.
                if not driver.is_closed():
                    await self._write(driver, self._progress_of(self._dirty))
                raise
            await self._release(driver)

    async def _publish_until_stopped(self, driver: asyncpg.Connection) -> None:
        settings = self._settings
        pause = settings.relay_poll_min
        drained_by = math.inf
        is_poll = False
        while True:
            if monotonic() >= self._renew_at:
                await self._renew(driver)
            self._staged.clear()
            # Asked before the step: what is committed before `stop` must be in its window.
            stopping = self._stopping.is_set()
            has_moved = not stopping and await self._move_scheduled(driver)
            found, is_more = await self._step(driver, is_poll=is_poll and not has_moved)
            if self._dirty and monotonic() >= self._write_at:
                await self._write(driver, self._progress_of(self._dirty))
            if stopping:
                drained_by = min(drained_by, monotonic() + settings.shutdown_grace / 4)
                if not is_more or monotonic() >= drained_by:
                    return
                continue
            if found:
                pause = settings.relay_poll_min
            rest = min(pause, self._unsent.seconds_to_next())
            is_poll = not (is_more or await sleep_or_event(self._staged, rest))
            pause = min(2 * pause, settings.relay_poll_max) if is_poll else settings.relay_poll_min

    async def _move_scheduled(self, driver: asyncpg.Connection) -> bool:
        """Move what is due, if it is time. What keeps that from being done holds up no others."""
        if not self._scheduled.is_time:
            return False
        try:
            has_moved = await self._scheduled.move(driver)
        except asyncpg.PostgresError as error:
            if driver.is_closed():
                raise
            reason = f"they wait: {describe_error(error)}"
            if reason != self._health.reasons.get(_SCHEDULED):
                log.warning("relay: %s: %s", _SCHEDULED, reason)
            self._health.not_ready(_SCHEDULED, reason)
            return False
        self._health.ready(_SCHEDULED)
        return has_moved

    async def _step(self, driver: asyncpg.Connection, *, is_poll: bool) -> tuple[bool, bool]:
        """Publish the next page of every group of shards.

        Says whether there was any event, and whether there are more of those that it has seen. A
        poll, which nobody has asked for, mostly finds the database as it was.
        """
        # A page of the window may set as many events aside as a page of those that were set aside
        # holds. So two of these go out before each, as long as some do: fewer and fewer wait.
        is_draining = await self._retry(driver) and await self._retry(driver)
        if is_poll and await is_as_seen(driver, self._progress.values(), self._server):
            return is_draining, is_draining
        ahead, self._ahead = self._ahead, None
        is_ahead = ahead is not None and ahead.progress == self._progress
        pages = ahead.pages if ahead and is_ahead else await self._read(driver, self._progress)
        if {one.server for _, one in pages} - {self._server}:
            raise ServerChanged
        events = [event for _, one in pages for event in one.events]
        self._observe([one for _, one in pages])
        then = {shard: one.then for shards, one in pages for shard in shards}
        if events:
            self._page = fitting(events, self._settings.relay_page)
            async with self._reading_ahead(driver, then):
                await self._publish(driver, events, then)
        was_paged = any(one.target for one in self._progress.values())
        self._progress.update(then)
        for shards, one in pages:
            if one.events or one.then.target is not None:
                self._dirty.update(shards)
        self._failures = 0
        self._health.ready("relay")
        # After the last page of a window comes what was committed behind it.
        is_more = is_draining or was_paged or any(one.target for one in self._progress.values())
        return is_draining or bool(events), is_more

    def _observe(self, pages: Sequence[Page]) -> None:
        """Tell how many events are still to be sent, and since when the oldest one waits."""
        events = [event for one in pages for event in one.events]
        # Windows overlap in their ids: the widest says how far it is, about.
        beyond = max((one.then.high_id - one.then.last_id for one in pages), default=0)
        # A window that was opened now has also what was committed lately.
        self.lead.left(
            len(events) + beyond, is_all=not any(one.target for one in self._progress.values())
        )
        if events or beyond or self._lags:  # telling the same at every idle poll would cost more
            oldest = min((event["created_at"] for event in events), default=None)
            metrics.observe_outbox(len(events) + beyond, oldest)
        self._lags = bool(events or beyond)

    async def _read(self, driver: asyncpg.Connection, progress: Mapping[int, Progress]) -> Pages:
        """Read the next page of every group of shards."""
        groups = _grouped(progress)
        share = max(1, len(groups))
        limit, at_most = max(1, self._page // share), PAGE_BYTES // share
        paged = [(one, shards) for one, shards in groups.items() if one.target is not None]
        unpaged = [(one, shards) for one, shards in groups.items() if one.target is None]
        pages: Pages = []
        for one, shards in paged:
            async with self._turn:
                pages.append((shards, await page(driver, one, shards, limit, at_most)))
        if len(unpaged) == 1:
            pages += [
                (shards, await fresh(driver, one, shards, limit, at_most))
                for one, shards in unpaged
            ]
        elif unpaged:
            # One snapshot for all of them, so that they are one group from now on.
            async with driver.transaction(isolation="repeatable_read", readonly=True):
                pages += [
                    (shards, await fresh(driver, one, shards, limit, at_most))
                    for one, shards in unpaged
                ]
        return pages

    @asynccontextmanager
    async def _reading_ahead(
        self, driver: asyncpg.Connection, then: Mapping[int, Progress]
    ) -> AsyncIterator[None]:
        """Read what comes then, in windows of which there is more, while a page is sent."""
        if any(one.target is None for one in then.values()):
            yield
            return

        async def read() -> None:
            with suppress(Exception):  # it is raised when it is read again
                self._ahead = _Ahead(then, await self._read(driver, then))

        async with in_background(read()) as reading:
            yield
            await asyncio.wait({reading})

    async def _publish(
        self,
        driver: asyncpg.Connection,
        events: Sequence[asyncpg.Record],
        then: Mapping[int, Progress],
    ) -> None:
        """Send events; what Kafka refuses is stored together with the progress `then`."""
        refused: Refused = {event["id"]: None for event in events if self._unsent.holds(event)}
        refused |= await self._send(driver, [one for one in events if one["id"] not in refused])
        if unsent := [event for event in events if event["id"] in refused]:
            async with self._writing(driver, then):
                await self._unsent.park(driver, unsent, refused)

    async def _retry(self, driver: asyncpg.Connection) -> bool:
        """Send what was refused and is due; says whether some of it was sent."""
        rows = await self._unsent.due(driver, sorted(self._progress))
        if not rows:
            return False
        refused = await self._send(driver, rows)
        async with self._writing(driver, self._progress_of({row["shard"] for row in rows})):
            await self._unsent.settle(driver, rows, refused)
        return len(refused) < len(rows)

    @asynccontextmanager
    async def _writing(
        self, driver: asyncpg.Connection, progress: Mapping[int, Progress]
    ) -> AsyncIterator[None]:
        """Store in one transaction progress and what is written inside, if we own the shards."""
        async with self._turn, driver.transaction():
            if await self._write(driver, progress):
                raise LeaseExpired("shards went to another relay before refusals were stored")
            yield

    async def _send(self, driver: asyncpg.Connection, events: Sequence[asyncpg.Record]) -> Refused:
        """Send, however long it takes, and extend the leases meanwhile; returns what is refused."""
        if not events:
            return {}
        begun = monotonic()
        # What came before may have taken most of the lease: to read a page, to move what is due.
        await self._extend_in_time(driver)
        async with in_background(self._publisher.send(events, self._holds_lease)) as sending:
            while not sending.done():
                await asyncio.wait({sending}, timeout=max(0.0, self._extend_at - monotonic()))
                is_extended = await self._extend_in_time(driver)
                # The producer tries for ever; to wait without a word would look like health.
                if is_extended and monotonic() - begun > self._settings.relay_lease / 4:
                    self._health.not_ready(
                        "relay", f"waits for {self._settings.kafka} to acknowledge events"
                    )
            refused = sending.result()
        self._published += len(events) - len(refused)
        return refused

    async def _extend_in_time(self, driver: asyncpg.Connection) -> bool:
        """Extend the leases if a third of their time is over; says whether that was done."""
        if monotonic() < self._extend_at:
            return False
        if await self._extend(driver):
            raise LeaseExpired("shards went to another relay before all events were sent")
        return True

    def _holds_lease(self) -> bool:
        return monotonic() < self._lease_ends

    async def _extend(self, driver: asyncpg.Connection) -> list[int]:
        """Extend the leases; returns the shards that went to another relay."""
        lease = self._settings.relay_lease
        # From before the first statement: the database's clock started later, never earlier.
        begun = monotonic()
        async with self._turn:
            await driver.execute(_ANNOUNCE, self._owner, lease, self._published)
            lost = await self._write(driver, self._progress)
        self._lease_ends = begun + lease
        metrics.lease_extended(self._lease_ends)
        self._extend_at = begun + lease / 3
        return lost

    async def _renew(self, driver: asyncpg.Connection) -> None:
        """Extend the leases, and take or give shards to an even share."""
        lease = self._settings.relay_lease
        await self._extend(driver)
        alive, first_ends, is_ours, server = await driver.fetchrow(_COUNT_RELAYS, lease)
        if not is_ours:
            raise OtherCluster
        if server != self._server:
            raise ServerChanged
        share = math.ceil(SHARDS / max(1, alive))
        known = set(self._progress)
        if len(self._progress) > share:
            given = sorted(self._progress)[share:]
            await self._write(driver, self._progress_of(given), keep=False)
        elif len(self._progress) < share:
            await self._claim(driver, share)
            gone = await driver.fetchrow(_GONE, self._owner, lease)
            if gone["owners"] and len(self._progress) < share:
                fenced = await self._publisher.fence(gone["owners"])
                await self._claim(driver, share, fenced, gone["until"])
        if self._progress.keys() - known or monotonic() >= self._look_at:
            begun = monotonic()
            await self._unsent.look(driver, sorted(self._progress))
            # It counts all that waits, which may be much.
            self._look_at = monotonic() + 20 * (monotonic() - begun)
        # A relay that lives extends its leases long before: the first to end is a dead one's.
        self._renew_at = monotonic() + min(lease / 3, first_ends or math.inf)
        metrics.relay_shards.set(len(self._progress))

    async def _claim(
        self,
        driver: asyncpg.Connection,
        share: int,
        gone: Sequence[str] = (),
        until: datetime | None = None,
    ) -> None:
        """Take shards that are free, and those of relays that are gone since `until` or before."""
        known = list(self._progress)
        for row in await driver.fetch(
            _CLAIM,
            self._owner,
            self._settings.relay_lease,
            share - len(known),
            known,
            list(gone),
            until,
            self._server,
        ):
            self._tokens[row["shard"]] = row["token"]
            self._progress[row["shard"]] = Progress(
                row["seen"], row["target"], row["last_id"], row["high_id"]
            )

    def _progress_of(self, shards: Iterable[int]) -> dict[int, Progress]:
        return {shard: self._progress[shard] for shard in sorted(shards)}

    async def _write(
        self, driver: asyncpg.Connection, progress: Mapping[int, Progress], *, keep: bool = True
    ) -> list[int]:
        """Store the progress of shards and extend their leases, or give them back.

        Returns the shards that were another relay's already.
        """
        lost: list[int] = []
        for one, members in _grouped(progress).items():
            rows = await driver.fetch(
                _WRITE,
                members,
                [self._tokens[shard] for shard in members],
                one.seen,
                one.target,
                one.last_id,
                one.high_id,
                keep,
                self._settings.relay_lease,
                self._server,
            )
            still_ours = {row["shard"] for row in rows}
            for shard in members:
                self._dirty.discard(shard)
                if not keep or shard not in still_ours:
                    del self._progress[shard], self._tokens[shard]
            lost += [shard for shard in members if shard not in still_ours]
        if lost:
            log.warning("relay: shards %s went to another relay", lost)
        self._write_at = monotonic() + self._settings.relay_cursor_interval
        return lost

    async def _release(self, driver: asyncpg.Connection) -> None:
        await self._write(driver, self._progress, keep=False)
        await driver.execute(_LEAVE, self._owner)

    def _forget(self) -> None:
        self._progress.clear()
        self._tokens.clear()
        self._dirty.clear()
        self._ahead = None
        self._renew_at = 0.0
        metrics.relay_shards.set(0)  # nobody publishes them while this fails


def _grouped(progress: Mapping[int, Progress]) -> dict[Progress, list[int]]:
    """Return the shards that are equally far, which are read and written as one."""
    groups: dict[Progress, list[int]] = {}
    for shard, one in progress.items():
        groups.setdefault(one, []).append(shard)
    return groups
