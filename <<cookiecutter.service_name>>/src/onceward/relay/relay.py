"""The relay: publishes the outbox, window by window, for the shards that it holds leases of."""

import asyncio
import logging
import math
import socket
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime
from functools import partial
from time import monotonic
from typing import Any, TypeVar
from uuid import uuid4

import asyncpg
from aiokafka.errors import KafkaError
from sqlalchemy.ext.asyncio import AsyncEngine

from onceward.apply.encryption import Encryption
from onceward.apply.throttles import Throttles
from onceward.errors import Paused, SourceLost, describe_error, is_infrastructure
from onceward.observe import metrics
from onceward.observe.health import Health
from onceward.servers.database import autocommitting
from onceward.servers.retrying import pause
from onceward.servers.tasks import end, in_background, sleep_or_event
from onceward.settings import Settings

from .backpressure import RelayBackpressure
from .brokers import NotSent
from .cursor import Cursor, ServerChanged, grouped
from .publisher import TRIALS, Publisher
from .rejected import Rejected
from .rejections import Rejections
from .scheduled import Scheduled
from .trial import Trial
from .window import PAGE_BYTES, Page, Progress, fresh, is_as_seen, opened, page

log = logging.getLogger(__name__)

T = TypeVar("T")

_NARROW_SECONDS = 1.0
"""So long after it has read a window the next one has few events, and is not measured before."""
_EXPLAINED = (NotSent, Paused, SourceLost)
"""Errors whose text is complete, so that no traceback is logged."""


class Relay:
    """One relay process. Any number of them share the shards; each shard has one owner."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        name: str,
        settings: Settings,
        health: Health,
        encryption: Encryption | None = None,
        throttles: Throttles | None = None,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._health = health
        self._encryption = encryption
        owner = f"{socket.gethostname()}:{uuid4().hex[:12]}"
        self._publisher = Publisher(settings, client_id=f"{name}-relay", owner=owner)
        self._trials = Publisher(settings, client_id=f"{name}-relay", owner=owner, endings=TRIALS)
        self._trial: Trial | None = None
        self._cursor = Cursor(settings, owner)
        self._throttles = throttles or Throttles()
        self._rejected = Rejected(settings, health, self._throttles)
        self._scheduled = Scheduled()
        self.backpressure = RelayBackpressure(2 * settings.relay_batch_events)
        self._ahead: tuple[Mapping[int, Progress], list[Page]] = {}, []
        """Pages that were read in advance, and the progress that they begin at."""
        self._narrow_until = 0.0
        self._lags = True
        self._failures = 0
        self._staged = asyncio.Event()
        self._stopping = asyncio.Event()

    def wake(self, events: int) -> None:
        """Publish at once: this process has committed so many events."""
        self.backpressure.staged(events)
        self._staged.set()

    def stop(self) -> None:
        """Make `run` publish what is committed, within a quarter of the shutdown grace."""
        self._stopping.set()
        self._staged.set()

    async def run(self) -> None:
        """Publish until `stop`."""
        self._health.not_ready("relay", "has not started yet")
        try:
            while True:
                try:
                    await self._serve()
                except Exception as error:
                    self._report(error)
                if self._stopping.is_set():
                    break
                await asyncio.sleep(pause(self._failures))
        finally:
            self.backpressure.end()
            await self._publisher.discard()
            await self._trials.discard()

    def _report(self, error: Exception) -> None:
        self.backpressure.end()
        reason = describe_error(error)
        if isinstance(error, KafkaError | NotSent):
            reason = f"{self._settings.kafka}: {reason}"
        elif is_infrastructure(error):
            reason = f"{self._settings.postgresql}: {reason}"
        self._health.not_ready("relay", reason)
        if not (isinstance(error, _EXPLAINED) or is_infrastructure(error)):
            log.error("relay: unexpected error, starting again", exc_info=error)
        elif self._failures == 0:
            log.warning("relay: %s; trying again", reason)
        self._failures += 1

    async def _serve(self) -> None:
        """Hold leases and publish on one connection until `stop`, or until something fails."""
        self._cursor.forget()
        self._ahead = {}, []
        self._narrow_until = 0.0
        async with autocommitting(self._engine) as driver:
            if not self._cursor.holds_lease():
                metrics.forget_outbox()
            try:
                try:
                    await self._publish_until_stopped(driver)
                finally:
                    if self._trial is not None:
                        await end(self._trial.work)
                        self._trial = None
            except TimeoutError:
                raise  # a write to a server that does not answer would take as long again
            except Exception:
                # Otherwise each retry would repeat the pages acknowledged since the last write.
                if not driver.is_closed():
                    await self._cursor.write_moved(driver)
                raise
            await self._cursor.release(driver)

    async def _publish_until_stopped(self, driver: asyncpg.Connection) -> None:
        settings = self._settings
        pause = settings.relay_poll_min
        drained_by = math.inf
        is_poll = False
        while True:
            # A shard is not given away while events of it are sent.
            if self._trial is not None:
                await self._cursor.extend_if_due(driver)
            elif self._cursor.is_renewal_due:
                await self._renew(driver)
            self._staged.clear()
            # Read before the step: what is committed before `stop` must be in its window.
            stopping = self._stopping.is_set()
            has_moved = not stopping and await self._scheduled.move_if_due(driver, self._health)
            found, is_more = await self._step(driver, is_poll=is_poll and not has_moved)
            await self._cursor.write_if_due(driver)
            if stopping:
                drained_by = min(drained_by, monotonic() + settings.shutdown_grace / 4)
                if not is_more or monotonic() >= drained_by:
                    return
                continue
            # Events of this process are reported. Only those of others are found by a poll.
            if is_poll:
                pause = min(2 * pause, settings.relay_poll_max)
                pause = settings.relay_poll_min if found else pause
            rest = pause if self._trial else min(pause, self._rejected.seconds_to_next())
            is_poll = not (is_more or await sleep_or_event(self._staged, rest))

    async def _renew(self, driver: asyncpg.Connection) -> None:
        took_some = await self._cursor.renew(driver, self._publisher.fence)
        if took_some or self._rejected.is_time_to_look:
            await self._rejected.look(driver, sorted(self._cursor.progress))

    async def _step(self, driver: asyncpg.Connection, *, is_poll: bool) -> tuple[bool, bool]:
        """Publish the next page of every group of shards.

        Returns whether there was any event, and whether there are more in open windows. `is_poll`:
        no event was reported, so that mostly nothing was committed since the last step.
        """
        # A page of the window may add as many waiting events as a drained page removes. So two
        # pages are drained before each page of the window, and the number of waiting ones falls.
        is_draining = await self._retry(driver) and await self._drain(driver)
        cursor = self._cursor
        if is_poll and await is_as_seen(driver, cursor.progress.values(), cursor.server):
            return is_draining, is_draining
        (read_from, pages), self._ahead = self._ahead, ({}, [])
        if read_from != cursor.progress:
            pages = await self._read(driver, cursor.progress)
        if {one.server for one in pages} - {cursor.server}:
            raise ServerChanged
        self._observe(pages)
        events = [event for one in pages for event in one.events]
        then = {shard: one.then for one in pages for shard in one.shards}
        if events:
            async with in_background(self._read_ahead(driver, then)) as reading:
                await self._publish(driver, events, then)
                await asyncio.wait({reading})
        was_paged = any(one.target for one in cursor.progress.values())
        for one in pages:
            cursor.advance(one)
        self._failures = 0
        self._health.ready("relay")
        # The last page of a window may be followed by events committed since it was opened.
        is_more = is_draining or was_paged or any(one.target for one in cursor.progress.values())
        return is_draining or bool(events), is_more

    def _observe(self, pages: Sequence[Page]) -> None:
        """Report how many events are still to be sent, and when a topic's oldest was created."""
        events = [event for one in pages for event in one.events]
        # The windows of the groups overlap in their ids, so the widest one approximates the rest.
        beyond = max((one.then.high_id - one.then.last_id for one in pages), default=0)
        # Windows that were opened just now include all that was committed.
        is_all = not any(one.target for one in self._cursor.progress.values())
        self.backpressure.left(len(events) + beyond, is_all=is_all)
        if events or beyond or self._lags:  # an idle poll reports nothing, which saves its cost
            oldest: dict[str, datetime] = {}
            for event in events:
                topic, created_at = event["topic"], event["created_at"]
                if created_at <= oldest.get(topic, created_at):
                    oldest[topic] = created_at
            metrics.observe_outbox(len(events) + beyond, oldest, is_all=not beyond)
        self._lags = bool(events or beyond)

    async def _read(
        self, driver: asyncpg.Connection, progress: Mapping[int, Progress]
    ) -> list[Page]:
        groups = grouped(progress)
        share = max(1, len(groups))
        limit, at_most = max(1, self._settings.relay_batch_events // share), PAGE_BYTES // share
        paged = [(one, shards) for one, shards in groups.items() if one.target is not None]
        unpaged = [(one, shards) for one, shards in groups.items() if one.target is None]
        pages = []
        for one, shards in paged:
            async with self._cursor.turn:
                pages.append(await page(driver, one, shards, limit, at_most))
        narrow = []
        for one, shards in unpaged:
            extend = partial(self._cursor.extend_if_due, driver)
            if monotonic() > self._narrow_until and (
                wide := await opened(driver, one, shards, extend)
            ):
                pages.append(wide)
            else:
                narrow.append((one, shards))
        # One snapshot for all groups, so that they have the same progress and become one group.
        snapshot = driver.transaction(isolation="repeatable_read", readonly=True)
        async with snapshot if len(narrow) > 1 else nullcontext():
            for one, shards in narrow:
                pages.append(await fresh(driver, one, shards, limit, at_most))
        if unpaged:
            self._narrow_until = monotonic() + _NARROW_SECONDS
        return pages

    async def _read_ahead(self, driver: asyncpg.Connection, then: Mapping[int, Progress]) -> None:
        """Read the pages from the progress `then`, if all windows have more pages."""
        if all(one.target for one in then.values()):
            with suppress(Exception):  # the next step reads again, and raises it
                self._ahead = then, await self._read(driver, then)

    async def _publish(
        self,
        driver: asyncpg.Connection,
        events: Sequence[asyncpg.Record],
        then: Mapping[int, Progress],
    ) -> None:
        """Send events; rejected ones are stored together with the progress `then`."""
        is_waiting = self._rejected.is_waiting
        topics = {one["topic"] for one in events if not is_waiting(one["topic"])}
        if topics:
            await self._while_leased(driver, self._publisher.look_up(topics))
        # Only now, as that may take long: a topic that was paused meanwhile is not sent any.
        await self._throttles.fresh(self._stopping.is_set)
        topics = {one for one in topics if not is_waiting(one)}
        waiting = {one["id"] for one in events if one["topic"] not in topics}
        # Reading the page, or moving scheduled events, may have taken most of the lease.
        await self._cursor.extend_if_due(driver)
        rejections = await self._send(driver, [one for one in events if one["id"] not in waiting])
        if unsent := [one for one in events if one["id"] in waiting or one["id"] in rejections]:
            async with self._cursor.writing(driver, then):
                await self._rejected.add(driver, unsent, rejections)

    async def _retry(self, driver: asyncpg.Connection) -> bool:
        """Send events that wait for a topic, if one is due; returns whether it accepts some."""
        await self._try(driver)
        return await self._drain(driver)

    async def _due(self, driver: asyncpg.Connection, topic: str) -> Sequence[asyncpg.Record]:
        """Return the next events that wait for a topic, to be sent at once.

        All that may take long comes before: an event that is redriven meanwhile goes before later
        ones, and a topic that is paused meanwhile is not sent any.
        """
        await self._throttles.fresh(self._stopping.is_set)
        await self._cursor.extend_if_due(driver)
        return await self._rejected.due(driver, topic, sorted(self._cursor.progress))

    async def _try(self, driver: asyncpg.Connection) -> None:
        """Store what a topic did that was tried, or try the next one that has refused events.

        That may take long, so the events are sent beside those of the other topics.
        """
        trial, cursor = self._trial, self._cursor
        if trial is None:
            if topic := self._rejected.next_topic(accepting=False):
                self._rejected.postpone(topic)
                looking = self._trials.look_up([topic])
                self._trial = Trial.begin(topic, looking, then=self._staged.set)
        elif trial.work.done():
            self._trial = None
            # Another error of Kafka says nothing about the topic, which is tried again.
            with suppress(KafkaError, NotSent):
                rejections = trial.work.result()
                if trial.sent and rejections is not None:
                    cursor.published += len(trial.sent) - len(rejections)
                    await self._settle(driver, trial.sent, rejections)
                elif rows := await self._due(driver, trial.topic):
                    events = await self._decrypted(driver, rows)
                    sending = self._trials.send(events, cursor.holds_lease)
                    self._trial = Trial.begin(trial.topic, sending, rows, then=self._staged.set)

    async def _drain(self, driver: asyncpg.Connection) -> bool:
        """Send events that wait for a topic that accepts some again; returns whether it has."""
        topic = self._rejected.next_topic(accepting=True)
        if topic is None:
            return False
        await self._while_leased(driver, self._publisher.look_up([topic]))
        rows = await self._due(driver, topic)
        if not rows:
            return False
        rejections = await self._send(driver, rows)
        await self._settle(driver, rows, rejections)
        return len(rejections) < len(rows)

    async def _settle(
        self, driver: asyncpg.Connection, rows: Sequence[asyncpg.Record], rejections: Rejections
    ) -> None:
        shards = {row["shard"] for row in rows}
        async with self._cursor.writing(driver, self._cursor.of(shards)):
            await self._rejected.settle(driver, rows, rejections)

    async def _decrypted(
        self, driver: asyncpg.Connection, events: Sequence[asyncpg.Record]
    ) -> Sequence[asyncpg.Record]:
        """Return the events as they are sent; of those that are erased the publisher sends none."""
        if self._encryption is None:
            return events
        async with self._cursor.turn:
            return await self._encryption.decrypt(driver, events, "payload")

    async def _send(
        self, driver: asyncpg.Connection, events: Sequence[asyncpg.Record]
    ) -> Rejections:
        """Send without a time limit; returns the rejections."""
        if not events:
            return {}
        events = await self._decrypted(driver, events)
        cursor = self._cursor
        sending = self._publisher.send(events, cursor.holds_lease)
        rejections = await self._while_leased(driver, sending)
        cursor.published += len(events) - len(rejections)
        return rejections

    async def _while_leased(self, driver: asyncpg.Connection, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work with the brokers, extending the leases meanwhile."""
        cursor, begun = self._cursor, monotonic()
        async with in_background(work) as working:
            while not working.done():
                await asyncio.wait({working}, timeout=cursor.seconds_to_extension)
                is_extended = await cursor.extend_if_due(driver)
                # The producer retries without end: only the time shows that Kafka is unavailable.
                if is_extended and monotonic() - begun > self._settings.relay_lease / 4:
                    self._health.not_ready(
                        "relay", f"waits for {self._settings.kafka} to acknowledge events"
                    )
        return working.result()
