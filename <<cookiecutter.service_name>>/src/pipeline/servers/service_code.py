"""Calls of the service's code, which may cancel the task that it runs in."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar, cast

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
    code = _ServiceCode(cast(Coroutine[Any, Any, T], call))
    try:
        result = await in_context(code, guard)
    except BaseException as error:
        await code.undo_cancellations()
        if isinstance(error, asyncio.CancelledError) and not code.is_cancelled:
            raise CancelledItself from error
        raise
    if await code.undo_cancellations():
        raise CancelledItself
    return result


class _ServiceCode(Coroutine[Any, Any, T]):
    """A coroutine of the service's code, and how often it has cancelled its own task.

    A task is cancelled from outside while it waits. What is requested in a step of the code itself
    is the code's own.
    """

    __slots__ = ("_before", "_code", "_own", "_task")

    def __init__(self, code: Coroutine[Any, Any, T]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._code = code
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

    @property
    def cr_frame(self) -> FrameType | None:
        """That of the code, for `guard.frames_of`."""
        return cast(FrameType | None, getattr(self._code, "cr_frame", None))

    @property
    def cr_await(self) -> Any:
        """What the code awaits, for `guard.frames_of`."""
        return getattr(self._code, "cr_await", None)

    def send(self, value: Any) -> Any:
        """Execute the next step."""
        return self._step(self._code.send, value)

    def throw(self, error: Any, *rest: Any) -> Any:
        """Execute the next step, which begins with an error."""
        return self._step(self._code.throw, error)

    def close(self) -> None:
        """End the code where it waits."""
        self._code.close()

    def __await__(self) -> Any:
        return self._code.__await__()

    def _step(self, step: Callable[[Any], Any], value: Any) -> Any:
        before = self._task.cancelling()
        try:
            return step(value)
        finally:
            self._own = max(0, self._own + self._task.cancelling() - before)
