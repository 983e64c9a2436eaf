"""The time limit of a handler's call."""

import asyncio
import math
from time import perf_counter
from typing import Self


class Deadline:
    """Cancels the task that makes it when a call of a handler takes too long.

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
        """Return the seconds for which a call has run since its cancellation."""
        return max(0.0, self._loop.time() - self._ends_at)

    def close(self) -> None:
        """Cancel the pending timer."""
        if self._timer is not None:
            self._timer.cancel()

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
