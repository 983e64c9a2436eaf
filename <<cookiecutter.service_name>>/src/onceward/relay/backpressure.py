"""Backpressure: limits how many events transactions stage ahead of the process's relay."""

import asyncio
import math

from onceward.servers.tasks import sleep_or_event

PATIENCE = 1.0
"""Seconds that a transaction waits for the relay, at most: enough to send many pages. If it is not
enough, Kafka or the events of other processes delay the relay, and that may last."""


class RelayBackpressure:
    """Estimates how many events are not sent yet; transactions wait while they are too many.

    The consumer and the relay share an event loop, in which each of the relay's many short steps
    waits for a long step of a batch. Without a limit, hardly any event would be published before
    all of a large lag in Kafka is consumed. The number is computed from ids, so it includes events
    of other processes.
    """

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._left = -math.inf
        """Infinitely few while no relay publishes."""
        self._staged = 0
        self._is_small = asyncio.Event()
        self._is_small.set()

    def staged(self, events: int) -> None:
        """Add events that this process has committed."""
        self._staged += events
        self._update()

    def left(self, events: int, *, is_all: bool) -> None:
        """Set how many events the relay sees; `is_all`: they include all that `staged` counted."""
        self._left = events
        if is_all:
            self._staged = 0
        self._update()

    def end(self) -> None:
        """Make no transaction wait: the relay has ended, or can't send."""
        self._left = -math.inf
        self._update()

    async def wait(self) -> None:
        """Wait until few enough events are left, at most for `PATIENCE`."""
        if not self._is_small.is_set():
            await sleep_or_event(self._is_small, PATIENCE)

    def _update(self) -> None:
        if self._left + self._staged > self._at_most:
            self._is_small.clear()
        else:
            self._is_small.set()
