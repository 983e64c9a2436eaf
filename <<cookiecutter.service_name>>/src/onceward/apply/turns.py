"""Turns: transactions of consumers that have deadlocked run one at a time.

Each call of a handler may lock its rows in order; a batch locks those of many messages.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from time import monotonic

from sqlalchemy.ext.asyncio import AsyncEngine

from onceward.errors import leaves, sqlstate_of
from onceward.handlers.rows import Place
from onceward.servers.database import autocommitting

from . import statements
from .deadlocks import describe_deadlock
from .item import Item
from .source import Source, without_decision

log = logging.getLogger(__name__)

_LOCK = 0x1B0C9
"""Advisory lock of the transaction whose turn it is."""
_SECONDS = 600.0
"""Time after a deadlock for which the transactions of its consumers take turns."""
_DEADLOCK, _LOCK_TIME_OUT = "40P01", "55P03"
"""Error codes of PostgreSQL."""


class Turns:
    """The turns of a process's transactions, beside those of other processes."""

    def __init__(self, engine: AsyncEngine, time_limit: float) -> None:
        """`time_limit` is that of a transaction, in seconds."""
        self._engine = engine
        # The transaction whose turn it is waits for a slot, too.
        self._longest = f"{round(2_000 * time_limit)}ms"
        """Length of a turn, after which a process that has stopped loses it."""
        self._lock = asyncio.Lock()
        """Held by the transaction of this process whose turn is next."""
        self._until: dict[str, float] = {}

    @asynccontextmanager
    async def take(self, source: Source, decisions: Collection[bytes]) -> AsyncIterator[None]:
        """Run the block in turn if the source needs one, or without when its patience ends."""
        async with AsyncExitStack() as turn:
            if self._until and self.are_needed(without_decision(source, decisions)):
                with suppress(TimeoutError):
                    async with asyncio.timeout(source.patience):
                        await turn.enter_async_context(self._lock)
                        await turn.enter_async_context(self._turn_of_all())
            yield

    def learn(
        self,
        error: BaseException,
        source: Source,
        decisions: Collection[bytes],
        culprits: Collection[Item] = (),
        places: Iterable[Place] = (),
    ) -> None:
        """Let the source's consumers take turns for a while if the error is a deadlock.

        Log what a person can do about it, and about a lock that was not granted in time. `culprits`
        are the messages of the call that has failed; `places` are the rows that were locked.
        """
        codes = {sqlstate_of(one) for one in leaves(error)}
        items = without_decision(source, decisions)
        consumers = {item.consumer for item in items}
        if _LOCK_TIME_OUT in codes:
            log.warning(
                "%s: a lock was not granted within PIPELINE_LOCK_TIMEOUT; its holder may be a"
                " command, a migration, or a handler that waits itself for a lock of Python, such"
                " as asyncio.Lock (docs/handlers.md)",
                ", ".join(sorted(consumers)),
            )
        if _DEADLOCK in codes:
            if not self.are_needed(items):
                log.warning(
                    "transactions of %s take turns for %.0f s, which costs their keys time and no"
                    " order, after a %s",
                    ", ".join(sorted(consumers)),
                    _SECONDS,
                    describe_deadlock(error, items, culprits, places),
                )
            self._until |= dict.fromkeys(consumers, monotonic() + _SECONDS)

    def are_needed(self, items: Iterable[Item]) -> bool:
        """Return whether transactions of one of these messages' consumers take turns."""
        if not self._until:
            return False
        now = monotonic()
        return any(self._until.get(item.consumer, 0.0) > now for item in items)

    @asynccontextmanager
    async def _turn_of_all(self) -> AsyncIterator[None]:
        """Hold the lock in a transaction of its own: its wait is not part of another's time."""
        async with autocommitting(self._engine) as driver:
            transaction = driver.transaction()
            await transaction.start()
            await driver.execute(statements.TAKE_TURN, _LOCK, self._longest)
            yield
            with suppress(Exception):  # the lock ends with the connection, too
                await transaction.rollback()
