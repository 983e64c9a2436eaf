"""The workers of the backlog: they take lanes that have something due, and handle it."""

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
from pipeline.servers.retrying import Attempts, retry_while_unavailable
from pipeline.servers.tasks import sleep_or_event

from .lane_source import LaneSource
from .lanes import Lane, LaneLost, Taken
from .suspects import pessimistic, unchanged

log = logging.getLogger(__name__)

_TURNS = 20
"""Transactions after which a lane is given back, so that others have their turn."""
_SAMPLE_SECONDS = 30.0
_COUNT_SECONDS = 60.0
_ANSWER_SECONDS = 20.0
"""Longer than any question takes: a connection that died without a word is noticed by it."""
_FAREWELL_SECONDS = 2.0
"""In which an attempt that was spent beforehand is given back by a process that has to end."""

T = TypeVar("T")


class BacklogWorkers:
    """A process's workers. Any number of processes share the lanes; each has one worker at most."""

    _name = "backlog"
    _counts = True
    """Whether it tells how much there is, of everything."""

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
        self._looking = asyncio.Lock()
        self._stopping = asyncio.Event()

    @property
    def _number(self) -> int:
        """Number of workers, each of which serves a lane at a time."""
        return self._settings.backlog_workers

    def wake(self) -> None:
        """Look at once for rows that are due: this process has stored some."""
        self._woken.set()

    def stop(self) -> None:
        """Ask `run` to end after the transactions that run."""
        self._stopping.set()
        self.wake()

    def ignoring_cancellation(self, seconds: float) -> tuple[Item, asyncio.Task[Any] | None] | None:
        """Return work outside of a transaction that goes on so long after its cancellation."""
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
                # One looks for all: the others have nothing to do until it has found something.
                async with self._looking:
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
        """Wait for a lane with something due; None when it is time to stop."""
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
        """Sleep, or wake up for what is stored and for `stop`; says whether it was woken."""
        return self._stopping.is_set() or await sleep_or_event(self._woken, seconds)

    async def work_off(self) -> bool:
        """Handle what is due in the lane that waits longest; says whether there was one."""
        lane = await self._claim()
        if lane is None:
            return False
        await self._work_at(lane)
        return True

    async def _work_at(self, lane: Lane) -> None:
        """Handle what is due in the lane, and give it back."""
        try:
            await self._serve(lane)
        except LaneLost as lost:
            log.warning("%s", lost)
            return
        except BreakerOpen:
            pass  # it has told, and the consumer rests
        except StoreUnavailable as away:
            log.warning("%s: %s", self._name, away)
            self._health.not_ready(self._name, str(away))
            await self._release(lane)
            await self._pause(self._settings.retry_pause)
            return
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not self._stopping.is_set():
                raise  # the loop ends over what a task of a handler has raised: that is a death
            with suppress(Exception):  # who ends in order has killed nobody
                await self._release(lane)
            raise
        await self._release(lane)

    async def _release(self, lane: Lane) -> None:
        await self._ask("giving a lane back", lambda driver: lanes.release(driver, lane))

    async def _serve(self, lane: Lane) -> None:
        """Handle what is due in the lane, for a while."""
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
        """Handle one by one what may have killed the worker before, up to what comes again."""
        tried: set[bytes | None] = set()
        # To the end: who gives up in the middle would have to begin anew.
        while not self._stopping.is_set():
            taken = await self._take(lane, 1, before=lane.claimed_at)
            if not taken.keys or any(item.row in tried for item in taken.items):
                return
            tried.update(item.row for item in taken.items)
            await self._handle(lane, taken)

    async def _take(self, lane: Lane, limit: int, *, before: datetime | None = None) -> Taken:
        """Read what is due in the lane, and fetch what it refers to, up to the first row that may
        kill the process. Raises `StoreUnavailable`."""
        handlers, consumers = self._handlers, self._consumers
        taken = await self._ask(
            "reading the backlog",
            lambda driver: lanes.take(driver, lane, handlers, consumers, limit, before=before),
        )
        harmless = self._harmless(lane, taken.items)
        items = await self._fetched(taken.items[:harmless], validates=True)
        if len(items) == harmless:
            items = [*items, *taken.items[harmless:]]
        return replace(taken, items=items)

    async def _fetched(self, items: Sequence[Item], *, validates: bool) -> Sequence[Item]:
        """Return items with what they refer to. Raises `StoreUnavailable`."""
        try:
            # While the lane is surely ours.
            async with asyncio.timeout(self._settings.backlog_lease / 2):
                return await resolve(items, self._consume.claims, lambda _: validates)
        except TimeoutError:
            raise StoreUnavailable("the object store takes longer than a lane may wait") from None

    def _harmless(self, lane: Lane, items: Sequence[Item]) -> int:
        """Return how many rows come before the first that may kill the process."""
        return next((n for n, item in enumerate(items) if self._is_risky(lane, item)), len(items))

    async def _handle(self, lane: Lane, taken: Taken) -> None:
        """Handle rows in one transaction; a row that may kill the process in one of its own."""
        if taken.redecoded:
            taken = replace(taken, items=())  # these call no handler; the others have the next turn
        work = LaneSource(lane, self._settings.backlog_lease, taken)
        harmless = self._harmless(lane, taken.items)
        if harmless < len(taken.items):
            work = replace(work, taken=replace(taken, items=taken.items[: harmless or 1]))
        if harmless or not taken.items:
            await self._apply_singly(work, await self._apply(self._consume, work))
            return
        (item,) = work.items
        if item.is_suspect:
            what = f"{item.consumer}: {item.message.type} {item.message.id!r}"
            log.warning("%s is tried alone: %s", what, item.last_error)
        async with self._consume.alone() as consume:
            # The worst is assumed before: who does not come back has spent an attempt.
            decision = pessimistic(item)
            before = replace(work, assumed={item.key: unchanged(item)})
            await self._apply(consume, replace(work, assumed={item.key: decision}))
            if decision.is_dead:
                return
            try:
                # Only now: to have its data, and to validate it, may be what kills.
                found = await self._fetched([item], validates=False)
                items = [validated(one) for one in found]
                work = replace(work, taken=replace(work.taken, items=items))
                await self._apply(consume, work)
            except (BreakerOpen, StoreUnavailable):
                await self._apply(consume, before)
                raise
            except asyncio.CancelledError:
                if not self._stopping.is_set():
                    raise
                with suppress(Exception):  # who ends in order accuses nobody
                    async with asyncio.timeout(_FAREWELL_SECONDS):
                        await self._apply(consume, before)
                raise

    async def _apply_singly(self, work: LaneSource, results: Sequence[BatchOutcome]) -> None:
        """Try what is undecided: together they would fail again, once for each that is judged."""
        waiting: set[bytes] = set()
        for item, decision in (pair for one in results for pair in one.decided):
            if decision.is_undecided and item.order_key not in waiting:
                alone = Taken(items=[item], redecoded={}, unhandleable=[], keys=[item.order_key])
                await self._apply(self._consume, replace(work, taken=alone))
            waiting.add(item.order_key)

    def _is_risky(self, lane: Lane, item: Item) -> bool:
        return item.is_suspect or lane.starts > 1

    async def _apply(
        self, consume: ConsumeTransactions, work: LaneSource
    ) -> Sequence[BatchOutcome]:
        results = await consume.apply(work, self._patiently("handling rows"))
        if not work.assumed:  # then no handler was called
            self._pace.learn(results)
        return results

    @property
    def _consumers(self) -> set[str]:
        """Consumers whose rows are looked for; the empty one is that of undecoded records."""
        handlers = self._handlers
        return {"", *handlers.consumers} - handlers.callers - self._breaker.resting

    async def _claim(self) -> Lane | None:
        self._breaker.forget_idle()
        lease = self._settings.backlog_lease
        return await self._ask(
            "claiming a lane",
            lambda driver: lanes.claim(driver, self._owner, lease, self._consumers),
        )

    async def _count(self) -> None:
        """Tell now and then what the backlog holds. To count it takes long where that is much."""
        told: set[str] = set()
        while not self._stopping.is_set():
            begun = monotonic()
            try:
                async with asyncio.timeout(_COUNT_SECONDS), autocommitting(self._engine) as driver:
                    rows = await lanes.count(driver)
                # Whose last row is gone has none here, and would seem to have it for ever.
                for consumer in told - {consumer for consumer, *_ in rows}:
                    metrics.observe_backlog(consumer, 0, 0, 0.0)
                for row in rows:
                    metrics.observe_backlog(*row)
                told |= {consumer for consumer, *_ in rows}
            except TimeoutError:
                log.warning("backlog: it takes too long to count, its gauges tell what was before")
            except Exception as error:
                log.debug("backlog: not counted: %s", describe_error(error))
            rest = max(_SAMPLE_SECONDS, 20 * (monotonic() - begun))
            await sleep_or_event(self._stopping, rest)

    async def _ask(self, what: str, question: Callable[[asyncpg.Connection], Awaitable[T]]) -> T:
        async def ask() -> T:
            async with asyncio.timeout(_ANSWER_SECONDS), autocommitting(self._engine) as driver:
                return await question(driver)

        return await self._patiently(what)(ask)

    def _patiently(self, what: str) -> Attempts:
        return retry_while_unavailable(
            f"{self._name}: {what}",
            self._settings.postgresql,
            unless=self._stopping.is_set,
            report=lambda reason: self._health.not_ready(self._name, reason),
        )
