"""Slots: the transactions of a process that may run at once, or one alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext


class Slots:
    """Room for so many transactions of readers, and for one of each worker."""

    def __init__(self, *, readers: int, workers: int) -> None:
        """Workers hold a lease: they have slots of their own, and wait for no reader."""
        self._of_readers = asyncio.Semaphore(readers)
        self._number = readers + workers
        self._slots = asyncio.Semaphore(self._number)
        self._entrance = asyncio.Lock()
        """Held by the one that takes a slot next, or all of them."""

    @asynccontextmanager
    async def one(self, *, waits: bool) -> AsyncIterator[None]:
        """Run the block in a slot; `waits` is for those without a lease."""
        async with self._of_readers if waits else nullcontext():
            async with self._entrance:
                await self._slots.acquire()
            try:
                yield
            finally:
                self._slots.release()

    @asynccontextmanager
    async def all(self) -> AsyncIterator[None]:
        """Run the block when those that have begun have ended; no other begins until its end."""
        async with self._entrance, AsyncExitStack() as taken:
            for _ in range(self._number):
                await taken.enter_async_context(self._slots)
            yield
