"""The time limit of a handler's call."""

import asyncio
import math
from time import perf_counter
from typing import Self


class Deadline:
    """Cancels the task that makes it when a call of a handler takes too long.

    As `asyncio.timeout` does, which sets a timer for every call, at a cost that exceeds most
    handlers'. Here one timer stands for many calls: it looks for how long the latest has run.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = math.inf
        self._ends_at = math.inf
        self._begun = 0.0
        self.is_over = False
        """Whether the latest call was cancelled."""
        self.seconds = 0.0
        """How long the latest call has taken."""

    def within(self, seconds: float) -> Self:
        """Give the call in the `with` that follows so many seconds; `TimeoutError` ends it."""
        self.is_over = False
        self._ends_at = self._loop.time() + seconds
        if self._ends_at < self._looks_at:
            self._look_at(self._ends_at)
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
            # Also where the call has swallowed its end and returned.
            if is_ours and kind in (None, asyncio.CancelledError):
                raise TimeoutError from error

    def overdue(self) -> float:
        """Return for how many seconds a call goes on that was cancelled."""
        return max(0.0, self._loop.time() - self._ends_at)

    def close(self) -> None:
        """Let no timer stay behind."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_at(self, time: float) -> None:
        self.close()
        self._looks_at = time
        self._timer = self._loop.call_at(time, self._look)

    def _look(self) -> None:
        self._looks_at = math.inf
        if self._loop.time() >= self._ends_at:
            # What it waits for may have come while others kept the loop: that is seen to first.
            self._loop.call_soon(self._end)
        elif self._ends_at < math.inf:
            self._look_at(self._ends_at)

    def _end(self) -> None:
        if self._loop.time() >= self._ends_at:
            self.is_over = True
            self._task.cancel()
