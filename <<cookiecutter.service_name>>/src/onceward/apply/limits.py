"""Limits of transactions: their number, time and messages, and the time of a handler's call."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from time import perf_counter
from typing import Self

from sqlalchemy.ext.asyncio import AsyncConnection

from onceward.servers import database
from onceward.settings import Settings

from .outcome import BatchOutcome
from .statements import SHARE_GENERATIONS

_HANDLERS_SHARE = 0.25
"""Share of the transaction's time limit that its handlers may take."""
_FIRST = 100
"""Messages of the first transaction, before the handlers' duration is known."""
_AT_LEAST = 2
"""Messages of the smallest transaction: with one, it could not be measured that several take no
longer."""


async def begin(connection: AsyncConnection, limits: str) -> None:
    """Begin the transaction with its limits, and prevent rotation until it ends."""
    await database.begin(connection, f"{limits}; {SHARE_GENERATIONS}")


class Deadline:
    """Cancels the task that created it when a call of a handler takes too long.

    `asyncio.timeout` does the same, but sets a timer for every call, which costs more than most
    handlers do. Here one timer serves many calls: it checks how long the latest has run.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._checks_at = math.inf
        self._ends_at = math.inf
        self._begun = 0.0
        self.is_over = False
        """Whether the latest call was cancelled."""
        self.seconds = 0.0
        """Duration of the latest call."""

    def within(self, seconds: float) -> Self:
        """Limit the call in the `with` block to so many seconds. It raises `TimeoutError`."""
        self.is_over = False
        self._ends_at = self._loop.time() + seconds
        if self._ends_at < self._checks_at:
            self._check_at(self._ends_at)
        return self

    def __enter__(self) -> None:
        self._begun = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        self.seconds = perf_counter() - self._begun
        self._ends_at = math.inf
        if self.is_over:
            is_ours = self._task.uncancel() <= self._cancelling
            # Also if the call has suppressed the cancellation and returned.
            if is_ours and kind in (None, asyncio.CancelledError):
                raise TimeoutError from error

    def overdue(self) -> float:
        """Return the seconds for which a call has run since its time limit, which cancels it."""
        return max(0.0, self._loop.time() - self._ends_at)

    def close(self) -> None:
        """Cancel the pending timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._checks_at = math.inf

    def _check_at(self, time: float) -> None:
        self.close()
        self._checks_at = time
        self._timer = self._loop.call_at(time, self._check)

    def _check(self) -> None:
        self._checks_at = math.inf
        if self._loop.time() >= self._ends_at:
            # What the call awaits may have completed while other code blocked the loop. Callbacks
            # that are ready run before the cancellation.
            self._loop.call_soon(self._end)
        elif self._ends_at < math.inf:
            self._check_at(self._ends_at)

    def _end(self) -> None:
        if self._loop.time() >= self._ends_at:
            self.is_over = True
            self._task.cancel()


class Pace:
    """Adapts the number of messages to the time that handlers take.

    A transaction that exceeds its time limit is rolled back and applied again in parts, so the
    calls of slow handlers would be wasted.
    """

    def __init__(self, settings: Settings) -> None:
        self._at_most = settings.batch_size
        self._seconds = _HANDLERS_SHARE * settings.transaction_timeout
        self.limit = min(_FIRST, settings.batch_size)
        """Messages of the next transaction."""

    def learn(self, outcomes: Sequence[BatchOutcome], number: int) -> None:
        """Adapt to so many messages, which were applied in one transaction or had to be divided.

        Few do not raise the limit: they may be those of another, quicker handler. More than half of
        it count as full: of each key in the backlog as many rows are read as of any other.
        """
        if 2 * number > self.limit:
            self.limit = min(self._at_most, 2 * self.limit)
        for one in outcomes:
            if one.applied:
                fitting = math.ceil(len(one.applied) * self._seconds / one.seconds)
                self.limit = min(self.limit, max(_AT_LEAST, fitting))
        if len(outcomes) > 1:  # the messages did not fit into one transaction
            largest = max(len(one.applied) for one in outcomes)
            self.limit = min(self.limit, max(_AT_LEAST, largest))


class ConcurrencyLimit:
    """Room for so many transactions of readers, and for one of each worker; or for one alone."""

    def __init__(self, *, readers: int, workers: int) -> None:
        """Workers hold a lease: they have slots of their own, and wait for no reader."""
        self._of_readers = asyncio.Semaphore(readers)
        self._number = readers + workers
        self._slots = asyncio.Semaphore(self._number)
        self._entrance = asyncio.Lock()
        """Held by the one that takes a slot next, or all of them."""

    @asynccontextmanager
    async def one(self, *, waits: bool) -> AsyncIterator[None]:
        """Run the block in a slot; `waits` is for those without a lease."""
        async with self._of_readers if waits else nullcontext():
            async with self._entrance:
                await self._slots.acquire()
            try:
                yield
            finally:
                self._slots.release()

    @asynccontextmanager
    async def all(self) -> AsyncIterator[None]:
        """Run the block when those that have begun have ended; no other begins until its end."""
        async with self._entrance, AsyncExitStack() as taken:
            for _ in range(self._number):
                await taken.enter_async_context(self._slots)
            yield
