"""Processes of the service under faults, and the gates at which they have an open transaction."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import asyncpg
from sqlalchemy.ext.asyncio import AsyncEngine

from onceward.servers.database import autocommitting

from . import statements
from .proof import CanNotProve

Role = Literal["consume", "relay"]
GATES: Mapping[Role, int] = {
    "consume": statements.CONSUME_GATE,
    "relay": statements.RELAY_GATE,
}
SESSION_SECONDS = 4.0
"""Time after which the other processes have the partitions of one that is silent."""
LOCK_SECONDS = 2.0
"""Longest wait of a transaction at a gate; then the server rolls it back."""
FOREVER = 3_000_000_000.0
"""Seconds."""
SETTINGS = {
    "PIPELINE_KAFKA_SESSION_TIMEOUT": f"{SESSION_SECONDS:g}",
    "PIPELINE_TRANSACTION_TIMEOUT": "3",
    "PIPELINE_LOCK_TIMEOUT": f"{LOCK_SECONDS:g}",
    "PIPELINE_RELAY_LEASE": "2",
    "PIPELINE_BACKLOG_LEASE": "5",
    "PIPELINE_RETRY_PAUSE": "0.5",
    "PIPELINE_BREAKER_KEYS": "1000000",  # a pause would only prolong the run
    # Many small transactions.
    "PIPELINE_BATCH_SIZE": "20",
    "PIPELINE_RELAY_BATCH_EVENTS": "20",
    "PIPELINE_RELAY_CURSOR_INTERVAL": "0.05",
    # Time that is made to pass forgets nothing.
    "PIPELINE_INBOX_AGE": f"{FOREVER}",
    "PIPELINE_INBOX_GENERATION_AGE": f"{FOREVER}",
}
"""Of the processes, unless the environment has others. By default brokers refuse a session timeout
of less than 6 seconds, and the servers of `dev/stack.py` allow it."""
_SERVERS = "PIPELINE_DATABASE_URL", "PIPELINE_KAFKA_BOOTSTRAP_SERVERS"
_LOOK_SECONDS = 0.02
_END_SECONDS = 15.0
_TAIL = 2_000


def environment(database_url: str) -> dict[str, str]:
    """Return the environment of processes that use this database."""
    own = {"PIPELINE_DATABASE_URL": database_url, "PIPELINE_HEALTH_PORT": "0"}
    return {**SETTINGS, **os.environ, **own}


@dataclass
class Processes:
    """The processes of a run; those that have ended stay in it."""

    words: tuple[str, ...]
    """What follows `python -m`, up to the command."""
    database_url: str
    folder: Path
    notes: Path
    stack: Path | None = None
    """State of the servers of `dev/stack.py`, if these serve nothing else."""
    running: dict[int, tuple[Role, asyncio.subprocess.Process]] = field(default_factory=dict)

    async def start(self, *command: str) -> asyncio.subprocess.Process:
        """Start a command; its output goes to a file with its name."""
        with (self.folder / f"{command[0]}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *self.words, *command),
                env=environment(self.database_url),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def run(self, *command: str) -> None:
        """Run a command to its end. Raises `CanNotProve` if it fails."""
        if await (await self.start(*command)).wait():
            raise CanNotProve(f"`{' '.join(command)}` failed:\n{self._tail(command[0])}")

    async def serve(self, role: Role) -> None:
        """Start a process that serves until it is stopped."""
        process = await self.start(role)
        self.running[process.pid] = role, process

    def check(self) -> None:
        """Raise `CanNotProve` if a process has ended by itself."""
        for role, process in self.running.values():
            if process.returncode is not None:
                raise CanNotProve(f"a process has ended by itself:\n{self._tail(role)}")

    def _tail(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text("utf-8", "replace")[-_TAIL:]

    async def kill(self, pid: int) -> None:
        """End one by kill -9, and start another."""
        role, process = self.running.pop(pid)
        process.kill()
        await process.wait()
        await self.serve(role)

    async def restart(self, server: str) -> None:
        """Stop a server of the stack, and start it again. Raises `CanNotProve` if that fails."""
        stack = sys.executable, "dev/stack.py", "--state", str(self.stack)
        own = {name: value for name, value in os.environ.items() if name not in _SERVERS}
        for words in (("down", server), ("run", "--", "true")):
            with (self.folder / "stack.log").open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *stack, *words, env=own, stdout=log, stderr=log
                )
            if await process.wait():
                raise CanNotProve(f"{server} was not restarted:\n{self._tail('stack')}")

    async def stop(self) -> None:
        """Ask all to end, and kill those that don't."""
        all_of = [process for _, process in self.running.values()]
        for number in (signal.SIGCONT, signal.SIGTERM):
            for one in all_of:
                with suppress(ProcessLookupError):
                    one.send_signal(number)
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await asyncio.gather(*(one.wait() for one in all_of))
        for one in all_of:
            with suppress(ProcessLookupError):
                one.kill()
            await one.wait()
        self.running.clear()


def noted(notes: Path, word: str) -> Iterator[list[Any]]:
    """Yield what belongs to each note of this word, in their order."""
    for line in notes.read_text("utf-8").splitlines():
        first, *rest = json.loads(line)
        if first == word:
            yield rest


@dataclass(frozen=True)
class Hit:
    """A process, and its session that waits at the gate."""

    pid: int
    session: int


class Gates:
    """Makes transactions wait when all but their commit is done, so that faults can hit them."""

    def __init__(self, engine: AsyncEngine, processes: Processes) -> None:
        self._engine = engine
        self._processes = processes

    @asynccontextmanager
    async def closed(self, role: Role) -> AsyncIterator[None]:
        """Let no transaction pass in the block."""
        async with autocommitting(self._engine) as driver:
            await driver.execute(statements.CLOSE_GATE, GATES[role])
            try:
                yield
            finally:
                # A restart of the server also opens it.
                with suppress(asyncpg.InterfaceError, asyncpg.PostgresConnectionError):
                    await driver.execute(statements.OPEN_GATE, GATES[role])

    async def are_two(self, seconds: float) -> bool:
        """Return whether two transactions are open, now or within these seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (await self._fetch(statements.OPEN))[0]["count"] < 2:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_SECONDS)
                return True
        return False

    async def hits(self, role: Role, seconds: float) -> list[Hit]:
        """Return those that wait, or none after these seconds."""
        until = monotonic() + seconds
        while True:
            rows = await self._fetch(statements.WAITING, GATES[role])
            owners = {session: pid for pid, session in noted(self._processes.notes, "session")}
            found = [Hit(owners[one], one) for (one,) in rows if one in owners]
            found = [one for one in found if one.pid in self._processes.running]
            if found or monotonic() > until:
                return found
            self._processes.check()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _fetch(self, query: str, *arguments: object) -> list[asyncpg.Record]:
        async with autocommitting(self._engine) as driver:
            rows: list[asyncpg.Record] = await driver.fetch(query, *arguments)
            return rows

    async def end(self, hit: Hit) -> None:
        """End a session: the server rolls back."""
        await self._fetch(statements.END_SESSION, hit.session)

    async def progress(self, role: Role) -> int:
        """Return how many transactions of the role have passed."""
        (row,) = await self._fetch(statements.PROGRESS)
        return int(row[role])

    async def passes(self, role: Role, progress: int) -> None:
        """Wait until more transactions than these have passed."""
        while await self.progress(role) <= progress:
            self._processes.check()
            await asyncio.sleep(_LOOK_SECONDS)
