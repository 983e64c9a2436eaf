"""How far the transactions of a process may be ahead of its relay."""

import asyncio
from contextlib import suppress

PATIENCE = 1.0
"""Seconds that a transaction waits for the relay, at most: alone with the event loop that sends
many pages meanwhile. What keeps it longer, Kafka or what others have staged, may last."""


class RelayBackpressure:
    """About how many events the relay has not sent; transactions wait while they are many.

    Both share an event loop, where each of the relay's many short steps waits for a long one of a
    batch: else hardly anything would be published of a topic that is caught up with, before
    all of it is consumed. Counted by ids, so that what other processes stage counts as well.
    """

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._left = 0
        self._staged = 0
        self._is_followed = False
        self._is_small = asyncio.Event()
        self._is_small.set()

    def staged(self, events: int) -> None:
        """Tell of events that this process has committed."""
        self._staged += events
        self._tell()

    def left(self, events: int, *, is_all: bool) -> None:
        """Tell how many the relay still sees; `is_all`: also of what was committed lately."""
        self._is_followed = True
        self._left = events
        if is_all:
            self._staged = 0
        self._tell()

    def end(self) -> None:
        """Let nobody wait: no relay works here, or it can't."""
        self._is_followed = False
        self._tell()

    async def room(self) -> None:
        """Wait until they are few, though not for long."""
        if not self._is_small.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_small.wait(), PATIENCE)

    def _tell(self) -> None:
        if self._is_followed and self._left + self._staged > self._at_most:
            self._is_small.clear()
        else:
            self._is_small.set()
