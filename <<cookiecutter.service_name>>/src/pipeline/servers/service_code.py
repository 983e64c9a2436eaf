"""Calls of the service's code, which may cancel the task that it runs in."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from .guard import Guard, in_context

T = TypeVar("T")


class CancelledItself(Exception):
    """The service's code was cancelled by itself: it has cancelled the task that calls it, or has
    awaited a task or a future that was cancelled."""

    def __init__(self) -> None:
        super().__init__(
            "the function was cancelled, and not by the engine: it has cancelled the task that"
            " calls it, or awaited a task or a future that was cancelled"
        )


async def call_service(call: Awaitable[T], guard: Guard | None = None) -> T:
    """Await a coroutine of the service's code in a context of its own, see `in_context`.

    Raises `CancelledError` only if the task was cancelled from outside: by the engine, a time limit
    or the end of the event loop. Any other cancellation raises `CancelledItself`, and is undone.
    """
    code = _Steps()
    try:
        result = await in_context(call, guard, code.take)
    except BaseException as error:
        await code.undo_cancellations()
        if isinstance(error, asyncio.CancelledError) and not code.is_cancelled:
            raise CancelledItself from error
        raise
    if await code.undo_cancellations():
        raise CancelledItself
    return result


class _Steps:
    """The steps of the service's code, and how often it has cancelled its own task.

    A task is cancelled from outside while it waits. What is requested in a step of the code itself
    is the code's own.
    """

    __slots__ = ("_before", "_own", "_task")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._before = task.cancelling()
        self._own = 0

    @property
    def is_cancelled(self) -> bool:
        """Whether the task was cancelled from outside since the call began."""
        return self._task.cancelling() > self._before + self._own

    async def undo_cancellations(self) -> bool:
        """Undo those of the code; return whether one was pending.

        Raises `CancelledError` if the task is cancelled from outside meanwhile.
        """
        if not self._own:
            return False
        is_pending = False
        try:
            await asyncio.sleep(0)  # a pending cancellation is raised at the next `await`
        except asyncio.CancelledError:
            is_pending = True
        for _ in range(self._own):
            self._task.uncancel()
        self._own = 0
        if self.is_cancelled:
            raise asyncio.CancelledError
        return is_pending

    def take(self, step: Callable[[Any], Any], value: Any) -> Any:
        """Execute a step."""
        before = self._task.cancelling()
        try:
            return step(value)
        finally:
            self._own = max(0, self._own + self._task.cancelling() - before)
