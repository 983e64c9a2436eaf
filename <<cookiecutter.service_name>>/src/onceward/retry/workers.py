"""The backlog's workers: each claims lanes with due rows, handles them, and releases the lanes."""

import asyncio
import logging
import socket
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import count, takewhile
from time import monotonic
from typing import Any, TypeVar
from uuid import uuid4

import asyncpg

from onceward.apply.claim_check import resolve
from onceward.apply.encryption import Rows
from onceward.apply.item import Item
from onceward.apply.limits import Pace
from onceward.apply.outcome import BatchOutcome
from onceward.apply.source import without_decision
from onceward.apply.throttles import Resting
from onceward.apply.transactions import ConsumeTransactions
from onceward.errors import Paused, StoreUnavailable, describe_error
from onceward.handlers.policy import TRIED_ALONE
from onceward.observe.health import Health
from onceward.schema import LANES
from onceward.servers.database import autocommitting
from onceward.servers.retrying import Retrying
from onceward.servers.tasks import end, in_background, sleep_or_event

from . import lanes
from .lane_source import LaneSource, beforehand, is_full, is_suspect, read_rows, take
from .lanes import LaneLost, Lease
from .measuring import measure

log = logging.getLogger(__name__)

_TURNS = 20
"""Transactions after which lanes are released, so that others are served as well."""
_QUICK_SECONDS = 1.0
"""Time after which one lane is claimed again: slow rows must not delay those of other lanes."""
_ANSWER_SECONDS = 20.0
"""Time-out of a statement: longer than any takes, so it means that the connection is dead."""
_STOPPING_SHARE = 0.6
"""Share of the shutdown grace for queries. Work has less, and its lanes are released then."""
_MOST_UNANSWERED = 100
"""Largest number of claims without an answer that are remembered."""

T = TypeVar("T")


class BacklogWorkers:
    """A process's workers. All processes share the lanes; a lane has one worker at a time.

    A worker claims as many lanes as it needs to fill its transactions: twice as many after one that
    was quick and not full, otherwise one. What is tried alone is tried with one lane.

    Those of an optional package's lanes override `name`, `counts`, `consumers` and `serve`.
    """

    name = "backlog"
    counts = True
    """Whether `run` also counts the backlog, of all consumers, for the metrics."""

    def __init__(self, consume: ConsumeTransactions, health: Health) -> None:
        self._consume = consume
        self._engine = consume.engine
        self._handlers = consume.handlers
        self._settings = consume.settings
        self._pace = Pace(consume.settings)
        self._breaker = consume.breaker
        self._throttles = consume.throttles
        self._health = health
        self.number = consume.settings.backlog_workers
        """Number of workers."""
        self._owner = f"{socket.gethostname()}:{uuid4().hex[:12]}"
        self._claims = count()
        self._unanswered: deque[str] = deque(maxlen=_MOST_UNANSWERED)
        """Owners of claims whose answers were lost; a later claim may take another lane first."""
        self._woken = asyncio.Event()
        self._claiming = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._ends_at = float("inf")
        """When queries end, by the clock of the event loop, after `stop`."""

    def wake(self) -> None:
        """Look for due rows at once, because this process has stored some."""
        self._woken.set()

    def stop(self) -> None:
        """Make `run` end after the running transactions; all later queries have one time limit."""
        grace = _STOPPING_SHARE * self._settings.shutdown_grace
        self._ends_at = min(self._ends_at, asyncio.get_running_loop().time() + grace)
        self._stopping.set()
        self.wake()

    async def run(self) -> None:
        """Work until `stop`."""
        counting = in_background(measure(self._engine)) if self.counts else nullcontext()
        async with counting:
            workers = [asyncio.create_task(self._work()) for _ in range(self.number)]
            try:
                # Not a group of tasks, which would ignore that one was cancelled.
                for worker in asyncio.as_completed(workers):
                    await worker
            finally:
                await end(*workers)

    async def work_off(self, lanes: int = 1) -> int:
        """Handle what is due in so many lanes, as `run` does.

        Returns the number of lanes to be claimed next; 0 if nothing was due.
        """
        lease = await self._claim(lanes)
        return await self._work_at(lease) if lease is not None else 0

    async def _work(self) -> None:
        lanes = 1
        while not self._stopping.is_set():
            try:
                # One worker polls at a time: while it finds no lane, there is none for the others.
                async with self._claiming:
                    lease = await self._next(lanes)
                lanes = 1
                if lease is not None:
                    lanes = await self._work_at(lease)
            except Exception as error:
                if self._stopping.is_set():
                    return
                log.exception("%s: unexpected error, starting again", self.name)
                self._health.not_ready(self.name, describe_error(error))
                await self._pause(self._settings.retry_pause)

    async def _next(self, lanes: int) -> Lease | None:
        """Wait for lanes with due rows and claim so many at most; None after `stop`.

        Rows that become due during a pause share transactions.
        """
        shortest, longest = self._settings.backlog_poll_min, self._settings.backlog_poll_max
        pause = shortest
        while True:
            rest = self._throttles.soonest("consumer")
            is_woken = await self._pause(min(pause, max(shortest, rest)))
            if self._stopping.is_set():
                return None
            self._woken.clear()
            lease = await self._claim(lanes)
            self._health.ready(self.name)
            if lease is not None:
                return lease
            pause = shortest if is_woken else min(2 * pause, longest)

    async def _pause(self, seconds: float) -> bool:
        """Sleep until `wake` or `stop`, or for so long; returns whether it was one of the two."""
        return self._stopping.is_set() or await sleep_or_event(self._woken, seconds)

    async def _work_at(self, lease: Lease) -> int:
        """Handle due rows of the lanes and release them, unless it must count as a death.

        Returns the number of lanes to be claimed next.
        """
        forgets_deaths, lanes = False, 1
        try:
            lanes = await self.serve(lease)
            forgets_deaths = not self._stopping.is_set()
        except LaneLost as lost:
            log.warning("%s", lost)
        except Paused:
            pass  # the breaker has reported it, or a person has paused the consumer
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not self._stopping.is_set():
                # The event loop ends over an error in a handler's task. That counts as a death.
                raise
            is_store = isinstance(error, StoreUnavailable)
            with suppress(Exception):  # a clean end is no death
                # Without its store a row can't be tried: that would stop the process each time.
                await self._release(lease, forgets_deaths=is_store)
            if not is_store:
                raise
            log.warning("%s: %s", self.name, error)
            self._health.not_ready(self.name, str(error))
            await self._pause(self._settings.retry_pause)
            return 1
        await self._release(lease, forgets_deaths=forgets_deaths)
        return lanes

    async def _release(self, lease: Lease, *, forgets_deaths: bool) -> None:
        release = partial(lanes.release, lease=lease, forgets_deaths=forgets_deaths)
        await self._query("releasing a lane", release)

    async def serve(self, lease: Lease) -> int:
        """Handle due rows of the lanes, in a limited number of transactions.

        Returns the number of lanes to be claimed next.
        """
        if lease.starts > 1:
            await self._clear(lease)
            lease = replace(lease, starts=1)
        for _ in range(_TURNS):
            limit, begun = self._pace.limit, monotonic()
            rows = [] if self._stopping.is_set() else await self._due(lease, limit)
            if not rows:
                break
            left = await self._handle(lease, rows)
            if left is lease and not (is_full(rows, limit) or lease.unavailable):
                # Nothing is left; what becomes due next shares a later transaction.
                is_quick = monotonic() - begun < _QUICK_SECONDS
                return min(2 * len(lease.lanes), LANES) if is_quick else 1
            lease = left
            if len(lease.lanes) > 1:
                break
        return 1

    async def _only(self, lease: Lease, lane: int) -> Lease:
        """Release the other lanes, whose rows must not wait for one that is tried alone."""
        if len(lease.lanes) == 1:
            return lease
        if lane not in lease.lanes:  # of a handler whose mode has been changed
            lane = lease.lanes[0]
        await self._release(lease.of({*lease.lanes} - {lane}), forgets_deaths=False)
        return lease.of({lane})

    async def _clear(self, lease: Lease) -> None:
        """Handle one by one the rows that an earlier worker may have died over.

        These were stored before its lease ended, and are the first ones: it had read no more than
        a batch. Ends at a row that this worker has tried.
        """
        tried: set[bytes] = set()
        for _ in range(self._settings.batch_size):
            rows = await self._due(lease, 1, before=lease.ended_at)
            keys = {row["key"] for row in rows}
            if self._stopping.is_set() or not rows or keys & tried:
                return
            tried |= keys
            await self._handle(lease, rows)

    async def _due(self, lease: Lease, limit: int, *, before: datetime | None = None) -> Rows:
        """Return due rows, which are not decoded yet. Raises `StoreUnavailable`."""
        options: dict[str, Any] = {"before": before, "encryption": self._consume.encryption}
        await self._throttles.fresh(self._stopping.is_set)
        consumers = self.consumers
        rows = await self._query(
            "reading the backlog", lambda driver: take(driver, lease, consumers, limit, **options)
        )
        for error in lease.unavailable.values() if not rows else ():
            raise error
        return rows

    async def _read(self, lease: Lease, rows: Rows, *, validates: bool = True) -> LaneSource:
        """Decode rows and fetch the data that they refer to. Raises `StoreUnavailable`.

        Takes half of the lease at most, so that the lanes are still held afterwards.
        """
        try:
            async with asyncio.timeout(self._settings.backlog_lease / 2):
                source = await read_rows(lease, self._handlers, rows, validates=validates)
                if source.redecoded:  # these are stored, and handled later
                    return source
                claims = self._consume.claims
                return replace(
                    source, items=await resolve(source.items, claims, lambda _: validates)
                )
        except TimeoutError:
            raise StoreUnavailable("objects or schemas take longer than half a lease") from None

    async def _handle(self, lease: Lease, rows: Rows) -> Lease:
        """Handle the rows before the first over which a process may have died; or that one alone.

        Rows whose data or schemas can't be fetched now stay due. Returns the lanes that are left.
        """
        suspect = next((n for n, row in enumerate(rows) if is_suspect(lease, row)), len(rows))
        try:
            if suspect == 0:
                lease = await self._only(lease, rows[0]["lane"])
                await self._try_alone(lease, rows[0])
            else:
                lanes = {row["key"]: row["lane"] for row in rows}
                source = await self._read(lease, rows[:suspect])
                lease = await self._handle_together(source, lanes)
        except StoreUnavailable as error:
            # If it is that of a topic, rows of the others can be handled.
            if error not in lease.unavailable.values():
                raise
        return lease

    async def _handle_together(self, source: LaneSource, lanes: Mapping[bytes, int]) -> Lease:
        """Handle rows in one transaction, up to one that is to be tried alone.

        If they begin with such rows, handle these in a transaction each: those of one lane.

        `lanes` are those of the rows, by their keys. Returns the lanes that are left.
        """
        lease = source.lease
        alone = [*takewhile(lambda item: item.reason in TRIED_ALONE, source.items)]
        if not alone:
            items = [*takewhile(lambda item: item.reason not in TRIED_ALONE, source.items)]
            await self._try(self._consume, replace(source, items=items))
            return lease
        waiting: set[bytes] = set()
        tries = 0
        for item in alone:
            if item.order_key in waiting:  # not past an earlier message of its key
                continue
            lane = lanes.get(item.row or b"", lease.lanes[0])
            may_try = tries < _TURNS and (tries == 0 or lane in lease.lanes)
            rests = item.consumer in self._throttles.resting("consumer")
            if may_try and not (rests or self._stopping.is_set()):
                tries += 1
                lease = await self._only(lease, lane)
                only = replace(LaneSource.of(lease, [item]), compares=True)
                outcomes = await self._try(self._consume, only)
                if not any(one.decided for one in outcomes):
                    continue
            waiting.add(item.order_key)
        return lease

    async def _try_alone(self, lease: Lease, row: asyncpg.Record) -> None:
        """Handle a row over which a process may have died, while this one does nothing else.

        Decoding, fetching or validating it may be what kills the process, as well as its handler.
        So the attempt is stored as failed before. It is undone if it can't be made now, or the
        worker is stopped.
        """
        if row["deaths"]:
            where = f"{row['topic']}/{row['partition']} at offset {row['offset']}"
            log.warning("%s, for %s, is tried alone: %s", where, row["consumer"], row["error"])
        failed, undone = beforehand(lease, self._handlers, row)
        async with AsyncExitStack() as alone:
            async with in_background(self._extend(lease)):
                consume = await alone.enter_async_context(self._consume.alone())
            heads = {row["order_key"]: (row["key"], row["attempts"], row["waited"])}
            changed = await self._query("reading a row", partial(lanes.overtaken, heads=heads))
            if changed:  # its key is paused, or it was decided on: only the first row is made due
                failed = replace(failed, unhandleable=())
            await self._apply(consume, failed)
            if changed or failed.unhandleable[0].decision.is_dead:
                return
            try:
                source = await self._read(lease, [row])
                # It is not due: its attempt is stored.
                await self._try(consume, replace(source, compares=False))
            except (Paused, StoreUnavailable):
                await self._apply(consume, undone)
                raise
            except asyncio.CancelledError:
                if self._stopping.is_set():
                    with suppress(Exception):  # a clean end does not count as a failed attempt
                        async with asyncio.timeout_at(self._ends_at):
                            await self._apply(consume, undone)
                raise

    async def _try(
        self, consume: ConsumeTransactions, source: LaneSource
    ) -> Sequence[BatchOutcome]:
        """Call the handlers of rows, which is the probe of consumers whose breaker is open.

        Raises `Resting` if others have taken what may be taken of all their consumers.
        """
        within = self._within_rates(source)
        if source.items and not within.items:
            raise Resting
        source = replace(within, throttles=self._throttles)
        called = Counter(
            ("consumer", one.consumer) for one in without_decision(source, source.decisions)
        )
        with self._breaker.probe((name for _, name in called), is_worker=True):
            await self._throttles.took(called)
            return await self._apply(consume, source)

    def _within_rates(self, source: LaneSource) -> LaneSource:
        """Leave out what throttled consumers may not take now, and what follows it."""
        limited = self._throttles.limited("consumer")
        if not limited:
            return source
        left = {one: self._throttles.free("consumer", one) for one in limited}
        items, behind, decided = list[Item](), set[bytes](), source.decisions
        for item in source.items:
            if item.consumer in left and item.key not in decided:
                left[item.consumer] -= 1
            if left.get(item.consumer, 0.0) < 0.0:
                behind.add(item.order_key)
            if item.order_key not in behind:
                items.append(item)
        return replace(source, items=items)

    async def _apply(
        self, consume: ConsumeTransactions, source: LaneSource
    ) -> Sequence[BatchOutcome]:
        attempts = replace(self._attempts("handling rows"), waits_for_stores=False)
        async with in_background(self._extend(source.lease)):
            results = await consume.apply(source, attempts)
        if source.items and not source.assumed:  # otherwise no handler is called
            self._pace.learn(results, len(source.items))
        return results

    async def _extend(self, lease: Lease) -> None:
        """Extend the lease while its transaction waits for others of this process."""
        while True:
            await asyncio.sleep(lease.seconds / 3)
            with suppress(Exception):  # it is tried again in time
                await self._query("extending a lease", partial(lanes.extend_unlocked, lease=lease))

    @property
    def consumers(self) -> set[str]:
        """Consumers whose due rows are handled; the empty name is that of undecoded records."""
        callers = self._handlers.callers
        return {"", *self._handlers.consumers} - callers - self._throttles.resting("consumer")

    async def _claim(self, lanes: int = 1) -> Lease | None:
        self._breaker.forget_idle()
        await self._throttles.fresh(self._stopping.is_set)
        return await self._query("claiming a lane", partial(self._claim_once, most=lanes))

    async def _claim_once(self, driver: asyncpg.Connection, *, most: int) -> Lease | None:
        # Each claim has an owner of its own: one that is executed late takes no lane of another.
        owner, lease = f"{self._owner}:{next(self._claims)}", self._settings.backlog_lease
        try:
            consumers, unanswered = self.consumers, self._unanswered
            return await lanes.claim(driver, owner, lease, consumers, unanswered, most)
        except BaseException:
            self._unanswered.append(owner)
            raise

    async def _query(self, what: str, statement: Callable[[asyncpg.Connection], Awaitable[T]]) -> T:
        async def query() -> T:
            ends_at = min(self._ends_at, asyncio.get_running_loop().time() + _ANSWER_SECONDS)
            async with asyncio.timeout_at(ends_at), autocommitting(self._engine) as driver:
                return await statement(driver)

        return await self._attempts(what)(query)

    def _attempts(self, what: str) -> Retrying:
        return Retrying(
            f"{self.name}: {what}",
            self._settings.postgresql,
            unless=self._stopping.is_set,
            report=lambda reason: self._health.not_ready(self.name, reason),
        )
