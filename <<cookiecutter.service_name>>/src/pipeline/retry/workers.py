"""The backlog's workers: each claims a lane with due rows, handles them, and releases the lane."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from time import monotonic
from typing import Any, TypeVar
from uuid import uuid4

import asyncpg

from pipeline.apply.batch import validated
from pipeline.apply.breaker import BreakerOpen
from pipeline.apply.claim_check import resolve
from pipeline.apply.item import Item
from pipeline.apply.outcome import BatchOutcome
from pipeline.apply.pace import Pace
from pipeline.apply.transactions import ConsumeTransactions
from pipeline.errors import StoreUnavailable, describe_error
from pipeline.observe import metrics
from pipeline.observe.health import Health
from pipeline.retry import lanes
from pipeline.servers.database import autocommitting
from pipeline.servers.retrying import Attempts
from pipeline.servers.tasks import sleep_or_event

from .lane_source import LaneSource
from .lanes import Lane, LaneLost, Taken
from .suspects import pessimistic, unchanged

log = logging.getLogger(__name__)

_TURNS = 20
"""Transactions after which a lane is released, so that other lanes are served as well."""
_SAMPLE_SECONDS = 30.0
"""Shortest time between two counts of the backlog."""
_COUNT_SECONDS = 60.0
"""Time-out of a count."""
_ANSWER_SECONDS = 20.0
"""Time-out of a statement: longer than any takes, so it means that the connection is dead."""
_UNDO_ATTEMPT_SECONDS = 2.0
"""Time-out, on shutdown, for undoing an attempt that was stored as failed beforehand."""

T = TypeVar("T")


class BacklogWorkers:
    """A process's workers. All processes share the lanes; a lane has one worker at a time."""

    _name = "backlog"
    _counts = True
    """Whether `run` also counts the backlog, of all consumers, for the metrics."""

    def __init__(self, consume: ConsumeTransactions, health: Health) -> None:
        self._consume = consume
        self._engine = consume.engine
        self._handlers = consume.handlers
        self._settings = consume.settings
        self._pace = Pace(consume.settings)
        self._breaker = consume.breaker
        self._health = health
        self._owner = f"{socket.gethostname()}:{uuid4().hex[:12]}"
        self._woken = asyncio.Event()
        self._claiming = asyncio.Lock()
        self._stopping = asyncio.Event()

    @property
    def _number(self) -> int:
        """Number of workers, each of which serves one lane at a time."""
        return self._settings.backlog_workers

    def wake(self) -> None:
        """Look for due rows at once, because this process has stored some."""
        self._woken.set()

    def stop(self) -> None:
        """Make `run` end after the running transactions."""
        self._stopping.set()
        self.wake()

    def ignoring_cancellation(self, seconds: float) -> tuple[Item, asyncio.Task[Any] | None] | None:
        """Return a message whose call runs so long after its cancellation, and its task.

        Here None: only the workers of effects make calls outside of a transaction.
        """
        return None

    async def run(self) -> None:
        """Work until `stop`."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._number):
                group.create_task(self._work())
            if self._counts:
                group.create_task(self._count())

    async def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                # One worker polls at a time: while it finds no lane, there is none for the others.
                async with self._claiming:
                    lane = await self._next()
                if lane is not None:
                    await self._work_at(lane)
            except Exception as error:
                if self._stopping.is_set():
                    return
                log.exception("%s: unexpected error, starting again", self._name)
                self._health.not_ready(self._name, describe_error(error))
                await self._pause(self._settings.retry_pause)

    async def _next(self) -> Lane | None:
        """Wait for a lane with due rows and claim it; None after `stop`."""
        pause = self._settings.backlog_poll_min
        while not self._stopping.is_set():
            self._woken.clear()
            lane = await self._claim()
            self._health.ready(self._name)
            if lane is not None:
                return lane
            if await self._pause(pause):
                pause = self._settings.backlog_poll_min
            else:
                pause = min(2 * pause, self._settings.backlog_poll_max)
        return None

    async def _pause(self, seconds: float) -> bool:
        """Sleep until `wake` or `stop`, or for so long; returns whether it was one of the two."""
        return self._stopping.is_set() or await sleep_or_event(self._woken, seconds)

    async def _work_at(self, lane: Lane) -> None:
        """Handle due rows of the lane and release it, unless it must count as a death."""
        try:
            await self._serve(lane)
        except LaneLost as lost:
            log.warning("%s", lost)
            return
        except BreakerOpen:
            pass  # the breaker has reported it, and pauses the consumer
        except StoreUnavailable as away:
            log.warning("%s: %s", self._name, away)
            self._health.not_ready(self._name, str(away))
            await self._release(lane)
            await self._pause(self._settings.retry_pause)
            return
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not self._stopping.is_set():
                # The event loop ends over an error in a handler's task. That counts as a death.
                raise
            with suppress(Exception):  # a clean end is no death: the release resets the starts
                await self._release(lane)
            raise
        await self._release(lane)

    async def _release(self, lane: Lane) -> None:
        await self._query("releasing a lane", lambda driver: lanes.release(driver, lane))

    async def _serve(self, lane: Lane) -> None:
        """Handle due rows of the lane, in a limited number of transactions."""
        if lane.starts > 1:
            await self._clear(lane)
            lane = replace(lane, starts=1)
        for _ in range(_TURNS):
            if self._stopping.is_set():
                return
            taken = await self._take(lane, self._pace.limit)
            if not taken.keys:
                return
            await self._handle(lane, taken)

    async def _clear(self, lane: Lane) -> None:
        """Handle one by one the rows that an earlier worker may have died over.

        These were stored before this worker claimed the lane. Ends at a row that it has tried.
        """
        tried: set[bytes | None] = set()
        # No limit of transactions here: to release the lane halfway would reset its starts.
        while not self._stopping.is_set():
            taken = await self._take(lane, 1, before=lane.claimed_at)
            if not taken.keys or any(item.row in tried for item in taken.items):
                return
            tried.update(item.row for item in taken.items)
            await self._handle(lane, taken)

    async def _take(self, lane: Lane, limit: int, *, before: datetime | None = None) -> Taken:
        """Read due rows of the lane, and fetch the data of those before the first row that may kill
        the process. Raises `StoreUnavailable`."""
        handlers, consumers = self._handlers, self._consumers
        taken = await self._query(
            "reading the backlog",
            lambda driver: lanes.take(driver, lane, handlers, consumers, limit, before=before),
        )
        harmless = self._harmless(lane, taken.items)
        items = await self._fetched(taken.items[:harmless], validates=True)
        if len(items) == harmless:
            items = [*items, *taken.items[harmless:]]
        return replace(taken, items=items)

    async def _fetched(self, items: Sequence[Item], *, validates: bool) -> Sequence[Item]:
        """Return items with the data that they refer to. Raises `StoreUnavailable`."""
        try:
            # Half of the lease, so that the lane is still held afterwards.
            async with asyncio.timeout(self._settings.backlog_lease / 2):
                return await resolve(items, self._consume.claims, lambda _: validates)
        except TimeoutError:
            raise StoreUnavailable("the object store takes longer than half a lease") from None

    def _harmless(self, lane: Lane, items: Sequence[Item]) -> int:
        """Return how many rows come before the first that may kill the process."""
        return next((n for n, item in enumerate(items) if self._is_risky(lane, item)), len(items))

    async def _handle(self, lane: Lane, taken: Taken) -> None:
        """Handle rows in one transaction; a row that may kill the process gets one of its own."""
        if taken.redecoded:
            # Redecoded messages call no handler. The items follow in the next transaction.
            taken = replace(taken, items=())
        source = LaneSource(lane, self._settings.backlog_lease, taken)
        harmless = self._harmless(lane, taken.items)
        if harmless < len(taken.items):
            source = replace(source, taken=replace(taken, items=taken.items[: harmless or 1]))
        if harmless or not taken.items:
            await self._apply_singly(source, await self._apply(self._consume, source))
            return
        (item,) = source.items
        if item.is_suspect:
            what = f"{item.consumer}: {item.message.type} {item.message.id!r}"
            log.warning("%s is tried alone: %s", what, item.last_error)
        async with self._consume.alone() as consume:
            # Stored before the attempt: it counts as failed unless this process completes it.
            decision = pessimistic(item)
            undo = replace(source, assumed={item.key: unchanged(item)})
            await self._apply(consume, replace(source, assumed={item.key: decision}))
            if decision.is_dead:
                return
            try:
                # Not before: fetching or validating its data may be what kills the process.
                found = await self._fetched([item], validates=False)
                items = [validated(one) for one in found]
                source = replace(source, taken=replace(source.taken, items=items))
                await self._apply(consume, source)
            except (BreakerOpen, StoreUnavailable):
                await self._apply(consume, undo)
                raise
            except asyncio.CancelledError:
                if not self._stopping.is_set():
                    raise
                with suppress(Exception):  # a clean end does not count as a failed attempt
                    async with asyncio.timeout(_UNDO_ATTEMPT_SECONDS):
                        await self._apply(consume, undo)
                raise

    async def _apply_singly(self, source: LaneSource, results: Sequence[BatchOutcome]) -> None:
        """Apply undecided messages one by one; a batch would fail again for each one at fault."""
        waiting: set[bytes] = set()
        for item, decision in (pair for one in results for pair in one.decided):
            if decision.is_undecided and item.order_key not in waiting:
                alone = Taken(items=[item], redecoded={}, unhandleable=[], keys=[item.order_key])
                await self._apply(self._consume, replace(source, taken=alone))
            waiting.add(item.order_key)

    def _is_risky(self, lane: Lane, item: Item) -> bool:
        return item.is_suspect or lane.starts > 1

    async def _apply(
        self, consume: ConsumeTransactions, source: LaneSource
    ) -> Sequence[BatchOutcome]:
        results = await consume.apply(source, self._attempts("handling rows"))
        if not source.assumed:  # with assumed decisions no handler is called
            self._pace.learn(results)
        return results

    @property
    def _consumers(self) -> set[str]:
        """Consumers whose due rows are handled; the empty name is that of undecoded records."""
        handlers = self._handlers
        return {"", *handlers.consumers} - handlers.callers - self._breaker.resting

    async def _claim(self) -> Lane | None:
        self._breaker.forget_idle()
        lease = self._settings.backlog_lease
        return await self._query(
            "claiming a lane",
            lambda driver: lanes.claim(driver, self._owner, lease, self._consumers),
        )

    async def _count(self) -> None:
        """Set the metrics of the backlog now and then. Counting a large one takes long."""
        known: set[str] = set()
        while not self._stopping.is_set():
            begun = monotonic()
            try:
                async with asyncio.timeout(_COUNT_SECONDS), autocommitting(self._engine) as driver:
                    rows = await lanes.count(driver)
                # A consumer without rows is not among the results, and its gauges must become 0.
                for consumer in known - {consumer for consumer, *_ in rows}:
                    metrics.observe_backlog(consumer, 0, 0, 0.0)
                for row in rows:
                    metrics.observe_backlog(*row)
                known |= {consumer for consumer, *_ in rows}
            except TimeoutError:
                log.warning("backlog: counting takes too long, its metrics keep their last values")
            except Exception as error:
                log.debug("backlog: not counted: %s", describe_error(error))
            rest = max(_SAMPLE_SECONDS, 20 * (monotonic() - begun))
            await sleep_or_event(self._stopping, rest)

    async def _query(self, what: str, statement: Callable[[asyncpg.Connection], Awaitable[T]]) -> T:
        async def query() -> T:
            async with asyncio.timeout(_ANSWER_SECONDS), autocommitting(self._engine) as driver:
                return await statement(driver)

        return await self._attempts(what)(query)

    def _attempts(self, what: str) -> Attempts:
        return Attempts(
            f"{self._name}: {what}",
            self._settings.postgresql,
            unless=self._stopping.is_set,
            report=lambda reason: self._health.not_ready(self._name, reason),
        )
