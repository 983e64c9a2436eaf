"""Turns: transactions of consumers that have deadlocked run one at a time.

Each call of a handler may lock its rows in order; a batch locks those of many messages.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from time import monotonic

from sqlalchemy.ext.asyncio import AsyncEngine

from pipeline.errors import leaves, sqlstate_of
from pipeline.servers.database import IDLE_LIMIT, autocommitting

log = logging.getLogger(__name__)

_LOCK = 0x1B0C9
"""Advisory lock of the transaction whose turn it is."""
_TAKE = f"SELECT {IDLE_LIMIT}, pg_advisory_xact_lock($1)"
_SECONDS = 600.0
"""Time after a deadlock for which the transactions of its consumers take turns."""
_WAIT_SECONDS = 4.0
"""Longest wait for a turn, below half a lease of the backlog: then one runs without it."""
_DEADLOCK = "40P01"
"""Error code of PostgreSQL."""


class Turns:
    """The turns of a process's transactions, beside those of other processes."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        """Held by the transaction of this process whose turn is next."""
        self._until: dict[str, float] = {}

    @asynccontextmanager
    async def take(self, consumers: Collection[str]) -> AsyncIterator[None]:
        """Run the block when it is the turn of these consumers, or after a few seconds."""
        async with AsyncExitStack() as turn:
            if self._are_taken_by(consumers):
                with suppress(TimeoutError):
                    async with asyncio.timeout(_WAIT_SECONDS):
                        await turn.enter_async_context(self._lock)
                        await turn.enter_async_context(self._turn_of_all())
            yield

    def learn(self, error: Exception, consumers: Collection[str]) -> None:
        """Let transactions of these consumers take turns for a while if the error is a deadlock."""
        if any(sqlstate_of(one) == _DEADLOCK for one in leaves(error)):
            if not self._are_taken_by(consumers):
                log.warning(
                    "transactions of %s deadlock: they take turns for %.0f s; declare the rows of"
                    " their handlers by loads= (docs/handling-errors.md)",
                    ", ".join(sorted(consumers)),
                    _SECONDS,
                )
            self._until |= dict.fromkeys(consumers, monotonic() + _SECONDS)

    def _are_taken_by(self, consumers: Collection[str]) -> bool:
        now = monotonic()
        return any(self._until.get(consumer, 0.0) > now for consumer in consumers)

    @asynccontextmanager
    async def _turn_of_all(self) -> AsyncIterator[None]:
        """Hold the lock in a transaction of its own: its wait is not part of another's time."""
        async with autocommitting(self._engine) as driver:
            transaction = driver.transaction()
            await transaction.start()
            await driver.execute(_TAKE, _LOCK)
            yield
            with suppress(Exception):  # the lock ends with the connection, too
                await transaction.rollback()
