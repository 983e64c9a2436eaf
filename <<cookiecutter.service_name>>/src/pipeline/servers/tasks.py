"""Tasks that belong to a block of code, and end with it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from time import perf_counter
from typing import Any, TypeVar

T = TypeVar("T")

TURN = 0.005
"""Seconds after which work on many messages lets others have their turn.

Else the relay, and the batches of other partitions, would wait for a thousand handlers; and one
whose answer has come meanwhile would be cancelled for being late. Shorter turns cost more: the
relay's pages of a few milliseconds then come between.
"""


class TimeSlice:
    """The time for which a task keeps the event loop to itself, at most; its own if it waits."""

    __slots__ = ("_ends_at",)

    def __init__(self) -> None:
        self._ends_at = perf_counter() + TURN

    @property
    def is_over(self) -> bool:
        """Whether the others are to be let in now, by `end`. Asked after each message."""
        return perf_counter() >= self._ends_at

    async def end(self) -> None:
        """Let every other task go on; then the next turn begins."""
        await asyncio.sleep(0)
        self._ends_at = perf_counter() + TURN


async def sleep_or_event(event: asyncio.Event, seconds: float) -> bool:
    """Sleep, or wake up for the event; says whether it has come."""
    # Without the task of `asyncio.wait_for`: some sleep several times a second.
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Let the work run beside the block, and cancel it in the end.

    What it has failed with is raised then, unless the block has failed itself.
    """
    task = asyncio.create_task(work)
    try:
        yield task
    except BaseException:
        await end(task)
        raise
    await end(task)
    if not task.cancelled():
        task.result()


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended, however they do."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
