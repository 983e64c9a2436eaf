"""Calls of the service's code, which may cancel the task that it runs in."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from onceward.errors import OncewardError

from .guard import Guard, in_context

T = TypeVar("T")


class CancelledItself(OncewardError):
    """The service's code was cancelled by itself: it has cancelled the task that calls it, or has
    awaited a task or a future that was cancelled."""

    def __init__(self) -> None:
        super().__init__(
            "the function was cancelled, and not by the engine: it has cancelled the task that"
            " calls it, or awaited a task or a future that was cancelled"
        )


async def call_service(
    call: Awaitable[T], guard: Guard | None = None, task: asyncio.Task[Any] | None = None
) -> T:
    """Await a coroutine of the service's code in a context of its own, see `in_context`.

    `task` is the current one, if it is known. Raises `CancelledError` only if it was cancelled from
    outside: by the engine, a time limit or the end of the event loop. Any other cancellation raises
    `CancelledItself`, and is undone.
    """
    task = task or asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    own = [0]
    try:
        result = await in_context(call, guard, own, task.cancelling)
    except BaseException as error:
        if own[0]:
            await _undo(task, before, own[0])
        if isinstance(error, asyncio.CancelledError) and task.cancelling() <= before:
            raise CancelledItself from error
        raise
    if own[0] and await _undo(task, before, own[0]):
        raise CancelledItself
    return result


async def _undo(task: asyncio.Task[object], before: int, own: int) -> bool:
    """Undo what the code itself has requested; return whether a cancellation was pending.

    A task is cancelled from outside while it waits; what is requested in a step of the code is the
    code's own. Raises `CancelledError` if the pending one may come from outside.
    """
    is_pending = False
    try:
        await asyncio.sleep(0)  # a pending cancellation is raised at the next `await`
    except asyncio.CancelledError:
        is_pending = True
    for _ in range(own):
        task.uncancel()
    if is_pending and task.cancelling() > before:
        raise asyncio.CancelledError
    return is_pending
