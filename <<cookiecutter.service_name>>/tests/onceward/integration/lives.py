"""A process that lives in the test, and may die in it: as one that is killed, without a word."""

import asyncio
from collections.abc import Coroutine
from enum import Enum
from typing import Any, NamedTuple

import asyncpg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from onceward.servers.database import autocommitting

from .applier import Applier


class Moment(Enum):
    """When a process dies."""

    CALLED = "in a handler"
    COMMITTING = "before a commit"
    COMMITTED = "after a commit, whose answer is lost"


class Death(NamedTuple):
    """How a process dies."""

    moment: Moment
    occurrence: int
    """At which of these moments in its life, from 1 on."""


class _Gone(Exception):
    """The process is dead: nothing that the test still runs of it may reach the server."""


class Life:
    """Of a process that has this applier. Its lanes stay as they are when it dies: what it has, and
    each attempt, is given back by none, as no connection is left for that."""

    def __init__(self, applier: Applier, death: Death | None) -> None:
        """Without a `death` it lives for ever. Its handlers have to call `called`."""
        self.applier = applier
        self.is_over = False
        self._death = death
        self._moments = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._connections: list[asyncpg.Connection] = []
        engine = applier.engine.sync_engine
        self._commit = engine.dialect.do_commit
        sa.event.listen(engine, "connect", self._connected)
        sa.event.listen(engine, "checkout", self._let_out)
        engine.dialect.do_commit = self._do_commit  # type: ignore[assignment, method-assign]

    async def survives(self, *work: Coroutine[Any, Any, None]) -> bool:
        """Do all of this at once, and say whether the process lives on."""
        async with asyncio.TaskGroup() as group:
            self._tasks = [group.create_task(self._do(one)) for one in work]
        if self.is_over:
            await self.applier.engine.dispose()
        return not self.is_over

    async def called(self) -> None:
        """Be in a handler."""
        if self._dies_at(Moment.CALLED):
            await asyncio.Event().wait()

    async def _do(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except _Gone:
            assert self.is_over

    def _do_commit(self, connection: Any) -> None:
        if self.is_over or self._dies_at(Moment.COMMITTING):
            raise asyncio.CancelledError
        self._commit(connection)
        if self._dies_at(Moment.COMMITTED):
            raise asyncio.CancelledError

    def _connected(self, connection: Any, _: object) -> None:
        self._connections.append(connection.driver_connection)

    def _end(self) -> None:
        """Close the sockets, as the kernel does: no lock outlives the process."""
        for task in self._tasks:
            task.cancel()
        for connection in self._connections:
            connection.terminate()

    def _let_out(self, *_: object) -> None:
        if self.is_over:
            raise _Gone

    def _dies_at(self, moment: Moment) -> bool:
        if self.is_over or self._death is None or self._death.moment is not moment:
            return False
        self._moments += 1
        self.is_over = self._moments == self._death.occurrence
        if self.is_over:
            asyncio.get_running_loop().call_soon(self._end)
        return self.is_over


async def let_leases_end(engine: AsyncEngine, dead: list[Applier]) -> None:
    """Let the time pass for which the dead have lanes."""
    async with autocommitting(engine) as driver:
        await driver.execute(
            "UPDATE pipeline.backlog_lane SET lease_until = now() WHERE owner LIKE ANY ($1)",
            [f"{applier.lanes._owner}:%" for applier in dead],
        )


async def lanes_of(db: asyncpg.Connection, applier: Applier) -> list[int]:
    """Return how many workers have begun with each lane that the applier has, and not come back."""
    rows = await db.fetch(
        "SELECT starts FROM pipeline.backlog_lane WHERE owner LIKE $1", f"{applier.lanes._owner}:%"
    )
    return [row["starts"] for row in rows]
