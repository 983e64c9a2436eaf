"""Tasks that belong to a block of code, and end with it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")

TURN = 200
"""Messages after which a batch lets others have their turn, with `asyncio.sleep(0)`.

Else the relay, and the batches of other partitions, would wait for a thousand handlers. More often
costs more: with 50 a tenth of the rate, for half of what the relay lags behind under full load.
"""


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Let the work run beside the block, and cancel it in the end.

    What it has failed with is raised then, unless the block has failed itself.
    """
    task = asyncio.create_task(work)
    try:
        yield task
    except BaseException:
        await _end(task)
        raise
    await _end(task)
    if not task.cancelled():
        task.result()


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
