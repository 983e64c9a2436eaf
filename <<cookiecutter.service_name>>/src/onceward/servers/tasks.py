"""Tasks that belong to a block of code, and end with it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from time import perf_counter
from typing import Any, TypeVar

T = TypeVar("T")

SLICE_SECONDS = 0.005
"""Longest time, in seconds, that a loop over messages may hold the event loop.

Otherwise the relay and the batches of other partitions would wait for a thousand handlers, and a
handler whose answer has arrived meanwhile would exceed its time. Shorter slices cost more, because
the relay's pages of a few milliseconds come in between.
"""

_CANCEL_AGAIN_SECONDS = 10.0
"""Time that a cancelled task has to clean up: longer than a client of Kafka needs to stop."""


class TimeSlice:
    """The time for which a task may hold the event loop."""

    __slots__ = ("_ends_at",)

    def __init__(self) -> None:
        self._ends_at = perf_counter() + SLICE_SECONDS

    @property
    def is_over(self) -> bool:
        """Whether the time is used up, so that the task has to await `end`."""
        return perf_counter() >= self._ends_at

    async def end(self) -> None:
        """Let every other task run, then begin the next slice."""
        await asyncio.sleep(0)
        self._ends_at = perf_counter() + SLICE_SECONDS


async def sleep_or_event(event: asyncio.Event, seconds: float) -> bool:
    """Sleep until the event, but no longer than so many seconds; return whether it is set."""
    # `asyncio.wait_for` makes a task, and some callers sleep several times a second.
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run the work beside the block, and cancel it at the end.

    Raises the work's error then, unless the block has failed itself.
    """
    task = asyncio.create_task(work, name=getattr(work, "__qualname__", None))
    try:
        yield task
    finally:
        await end(task)
    if not task.cancelled():
        task.result()


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks until they have ended; their errors are ignored.

    Libraries may replace a cancellation by an error of their own, as SQLAlchemy does while an
    engine connects for the first time. A loop that continues after errors is cancelled again.
    """
    while running := {task for task in tasks if not task.done()}:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=_CANCEL_AGAIN_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)
