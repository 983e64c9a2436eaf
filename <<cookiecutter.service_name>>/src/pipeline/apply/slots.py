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
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._taking_all = asyncio.Lock()

    @asynccontextmanager
    async def one(self, *, waits: bool) -> AsyncIterator[None]:
        """Run the block in a slot; `waits` is for those without a lease."""
        async with self._of_readers if waits else nullcontext():
            while True:
                await self._may_begin.wait()
                await self._slots.acquire()
                if self._may_begin.is_set():
                    break
                self._slots.release()  # to the one that takes all
            try:
                yield
            finally:
                self._slots.release()

    @asynccontextmanager
    async def all(self) -> AsyncIterator[None]:
        """Run the block when those that have begun have ended; no other begins until its end."""
        async with self._taking_all, AsyncExitStack() as taken:
            self._may_begin.clear()
            taken.callback(self._may_begin.set)
            for _ in range(self._number):
                await taken.enter_async_context(self._slots)
            yield
