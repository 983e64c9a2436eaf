"""Processes of the bank that start at once: forked from one that has imported everything.

`python -m tests.pipeline.integration.zygote` forks one for every line that it reads, and tells
when it has started and when it has ended.
"""

import asyncio
import gc
import importlib
import json
import math
import os
import runpy
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from pipeline.consume import gathering

from .processes import APP
from tests.servers.databases import HOME
from tests.servers.waiting import PATIENCE

_LAST_LINES = 20
_NEEDED = ("operate.commands", "sqlalchemy.dialects.postgresql.asyncpg", "uvloop")


class Forked:
    """A process of the bank, and what it has written."""

    def __init__(self, pid: int, code: asyncio.Future[int], log: Path) -> None:
        self._pid = pid
        self._code = code
        self._log = log

    @property
    def last_lines(self) -> str:
        """What it wrote last."""
        return "\n".join(self._log.read_text("utf-8").splitlines()[-_LAST_LINES:])

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if not self._code.done():
            with suppress(ProcessLookupError):  # it has ended, and its zygote is about to tell
                os.kill(self._pid, number)

    def kill(self) -> None:
        """End it by kill -9."""
        self.send(signal.SIGKILL)

    async def ended(self) -> int:
        """Wait for its end and return the exit code; minus the signal that ended it."""
        return await asyncio.wait_for(asyncio.shield(self._code), PATIENCE)


class Zygote:
    """The process that they are forked from."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._started: asyncio.Queue[tuple[int, asyncio.Future[int]]] = asyncio.Queue()
        self._known: dict[int, asyncio.Future[int]] = {}
        self._ordering = asyncio.Lock()

    async def start(self, *command: str, environment: dict[str, str], log: Path) -> Forked:
        """Start a process with this command line and nothing in its environment but this."""
        order = {"command": command, "environment": environment, "log": str(log)}
        assert self._process.stdin is not None
        async with self._ordering:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            pid, ended = await asyncio.wait_for(self._started.get(), PATIENCE)
        return Forked(pid, ended, log)

    async def listen(self) -> None:
        """Take note of starts and ends, of which either may come first. Process ids come again."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            told = json.loads(line)
            pid = told["pid"]
            if (ended := self._known.pop(pid, None)) is None:
                ended = self._known[pid] = asyncio.get_running_loop().create_future()
            if "code" in told:
                ended.set_result(told["code"])
            else:
                self._started.put_nowait((pid, ended))


@asynccontextmanager
async def zygote(environment: dict[str, str]) -> AsyncIterator[Zygote]:
    """Start one, and end it with the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"{__package__}.zygote",
        cwd=HOME,
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    one = Zygote(process)
    listening = asyncio.create_task(one.listen())
    try:
        yield one
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        await listening


def main() -> None:
    """Fork until there are no more orders."""
    for name in _NEEDED:
        importlib.import_module(name)
    # Batches share transactions however slow the machine is, and soon after a failure.
    gathering._EXPECTED_SECONDS, gathering._TIME_SHARE = math.inf, 1.0
    gathering._APART_SECONDS = 0.5
    gc.freeze()
    signal.signal(signal.SIGCHLD, _tell_ends)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _become(**json.loads(line))
        _tell(pid=pid)


def _become(command: list[str], environment: dict[str, str], log: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["service", *command]
    runpy.run_module(APP, run_name="__main__")
    sys.exit()


def _tell_ends(*_: object) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _tell(pid=pid, code=os.waitstatus_to_exitcode(status))


def _tell(**what: int) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")  # whole, also from the signal's handler


if __name__ == "__main__":
    main()
