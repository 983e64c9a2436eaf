"""Crashes: connections that end at a chosen statement, as those of a process that dies."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from time import monotonic
from typing import Any, Literal, NamedTuple

import asyncpg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import await_only

from onceward.servers.database import autocommitting, create_engine
from onceward.servers.guard import GuardedConnection
from onceward.servers.tasks import end
from onceward.settings import Settings

from .errors import HarnessMisused

_METHODS = ("execute", "executemany", "fetch", "fetchrow", "fetchval")
"""The methods of a connection of asyncpg by which the engine executes statements."""
_LONGEST = 70
_END_SECONDS = 10.0
_STILL_THERE = (
    "sessions of the process that has died still run a statement: one may wait for a lock of the"
    " test, such as that of a row read FOR UPDATE. End its transaction before this step"
)
_HAS_SESSIONS = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = ANY ($1::integer[]))"


class Crash(NamedTuple):
    """A place in the work of a process, one of its statements, and what is lost there."""

    number: int
    """That of the statement, from 0 on."""
    loses: Literal["process", "answer", "connection"] = "process"
    """The process dies after the statement; or only its connection is lost, after the statement
    with the answer to it, or before the statement is executed."""


class MortalEngine:
    """A pool of connections that simulates processes, one after the other, that die.

    `living` is another pool. It is used to wait until the server has ended the sessions of lost
    connections, and so released their locks.
    """

    def __init__(self, settings: Settings, living: AsyncEngine, *, name: str) -> None:
        self.engine = create_engine(settings, name=name, check=None)
        self._living = living
        self._is_counting = False
        self._connections: list[asyncpg.Connection] = []
        self.begin(None)
        pool = self.engine.sync_engine
        methods = {name: self._counted(name) for name in _METHODS}
        kind = type("MortalConnection", (GuardedConnection,), methods)

        @sa.event.listens_for(pool, "do_connect")
        def connect(dialect: object, record: object, positional: Any, options: Any) -> None:
            if self._died.is_set():
                raise ConnectionRefusedError("the process is dead")
            options["connection_class"] = kind

        @sa.event.listens_for(pool, "connect")
        def note(connection: Any, record: object) -> None:
            self._connections.append(connection.driver_connection)

        # SQLAlchemy prepares its statements, and executes them by none of the methods.
        @sa.event.listens_for(pool, "after_cursor_execute")
        def executed(connection: Any, cursor: object, statement: str, *rest: object) -> None:
            await_only(self._executed(connection.connection.driver_connection, statement))

    def begin(self, crash: Crash | None) -> None:
        """Begin with another process, which has this crash, or none and counts its statements."""
        self.statements: list[str] = []
        """Those that the process has executed, in their order."""
        self.committed: set[int] = set()
        """Numbers of those that have committed something: COMMIT, and all outside transactions."""
        self._crash = crash
        self._died, self._may_end = asyncio.Event(), asyncio.Event()
        self._lost_sessions: list[int] = []

    def _counted(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(GuardedConnection, name)

        async def counted(one: asyncpg.Connection, text: str, *rest: Any, **named: Any) -> Any:
            if self._is_counting and self._crash == (len(self.statements), "connection"):
                self._crash = None
                await self._wait_until_ended(self._terminate(one))
                raise asyncpg.ConnectionDoesNotExistError("the connection is lost")
            result = await method(one, text, *rest, **named)
            await self._executed(one, text)
            return result

        return counted

    async def _executed(self, connection: asyncpg.Connection, statement: str) -> None:
        if not self._is_counting:
            return
        number = len(self.statements)
        self.statements.append(statement)
        if not connection.is_in_transaction() and not statement.startswith("ROLLBACK"):
            self.committed.add(number)
        if self._crash is None or number != self._crash.number:
            return
        if self._crash.loses == "answer":
            await self._wait_until_ended(self._terminate(connection))
            raise asyncpg.ConnectionDoesNotExistError("the answer to the statement is lost")
        self._died.set()
        self._lost_sessions = self._terminate(*self._connections)
        # Code of a dead process does not go on, until it is cancelled; a part may be shielded.
        await self._may_end.wait()
        raise asyncpg.ConnectionDoesNotExistError("the process is dead")

    def _terminate(self, *connections: asyncpg.Connection) -> list[int]:
        """End the connections, and return the process ids of their sessions."""
        alive = [one for one in connections if not one.is_closed()]
        sessions = [one.get_server_pid() for one in alive]
        for one in alive:
            asyncpg.Connection.terminate(one)
        return sessions

    async def _wait_until_ended(self, sessions: list[int]) -> None:
        """Wait until the server has ended these sessions, and with them their locks."""
        ends_at = monotonic() + _END_SECONDS
        async with autocommitting(self._living) as driver:
            while await driver.fetchval(_HAS_SESSIONS, sessions):
                if monotonic() > ends_at:
                    raise HarnessMisused(_STILL_THERE)
                await asyncio.sleep(0.001)

    async def run(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Let the process do the work; return False if it has died."""
        async with self.engine.connect():
            pass  # what a new connection executes is not counted
        task, death = asyncio.ensure_future(work()), asyncio.ensure_future(self._died.wait())
        self._is_counting = True
        try:
            await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._is_counting = False
            await end(death)
            while not task.done():  # code that suppresses its cancellation goes on
                task.cancel()
                self._may_end.set()
                await asyncio.wait({task}, timeout=0.1)
        if self._died.is_set():
            await self._wait_until_ended(self._lost_sessions)
            return False
        task.result()
        return True


def name_of(statement: str) -> str:
    """Return the beginning of a statement, on one line, to be recognised by."""
    text = re.sub(r"\s+", " ", statement).strip()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def crashes_of(process: MortalEngine) -> Iterator[tuple[Crash, str]]:
    """Yield every crash of a process that executes the same, and what happens in it."""
    for number, one in enumerate(process.statements):
        place = f"statement {number + 1} of {len(process.statements)}: {name_of(one)}"
        yield Crash(number), f"the process dies after {place}"
        if number in process.committed:
            yield Crash(number, "answer"), f"the answer is lost to {place}"
        if one.startswith("COMMIT"):
            yield Crash(number, "connection"), f"the connection is lost before {place}"
