"""Backpressure: how far the transactions of a process may be ahead of its relay."""

import asyncio
from contextlib import suppress

PATIENCE = 1.0
"""Seconds that a transaction waits for the relay, at most: long enough for it to send many pages.
If it needs longer, Kafka or the events of other processes delay it, which may last."""


class RelayBackpressure:
    """About how many events the relay has not sent; transactions wait while they are many.

    Both share an event loop, where each of the relay's many short steps waits for a long one of a
    batch: without it, hardly any event would be published before all of a large backlog in Kafka
    is consumed. Counted by ids, so that what other processes stage counts as well.
    """

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._left = 0
        self._staged = 0
        self._is_followed = False
        self._is_small = asyncio.Event()
        self._is_small.set()

    def staged(self, events: int) -> None:
        """Note events that this process has committed."""
        self._staged += events
        self._update()

    def left(self, events: int, *, is_all: bool) -> None:
        """Note how many the relay still sees; `is_all`: what was committed lately is among them."""
        self._is_followed = True
        self._left = events
        if is_all:
            self._staged = 0
        self._update()

    def end(self) -> None:
        """Let no transaction wait: the relay has ended, or can't work."""
        self._is_followed = False
        self._update()

    async def wait(self) -> None:
        """Wait until they are few, at most for `PATIENCE`."""
        if not self._is_small.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_small.wait(), PATIENCE)

    def _update(self) -> None:
        if self._is_followed and self._left + self._staged > self._at_most:
            self._is_small.clear()
        else:
            self._is_small.set()
