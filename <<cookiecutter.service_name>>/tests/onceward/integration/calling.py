"""Handlers of calls and their workers, as simple as they can be: they work in transactions.

Those of an optional package work outside of them; what the engine does for both is the same.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from onceward import Event, Handlers, Policy, Transaction
from onceward.handlers.registry import Handler
from onceward.handlers.staging import CALLS
from onceward.retry.workers import BacklogWorkers

Function = Callable[[Any, Transaction], Awaitable[object]]


def take_calls(
    handlers: Handlers, event: type[Event], consumer: str, function: Function | None = None
) -> None:
    """Register a handler of the calls of an event; by default nothing may call it."""

    async def never(event: Event, tx: Transaction) -> None:
        raise AssertionError("never")

    handlers.add(
        Handler(
            event, CALLS, consumer, (), function or never, Policy(), "call", 5.0, takes_old=True
        )
    )


class CallWorkers(BacklogWorkers):
    """Workers of the lanes of calls."""

    name = "calls"
    counts = False

    @property
    def consumers(self) -> set[str]:
        return {*self._handlers.callers} - self._throttles.resting("consumer")
