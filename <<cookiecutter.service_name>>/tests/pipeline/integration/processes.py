"""Real processes of the bank, for the tests that start, stop and kill them."""

import asyncio
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from .bank import Bank
from .conftest import HOME, PATIENCE, eventually
from .pooler import POOLED

ROOT = Path(__file__).parents[3]
APP = f"{__package__}.app"


def environment(bank: Bank, **settings: object) -> dict[str, str]:
    """Return the environment of a process of the bank; no other settings reach it."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")
    }
    settings.setdefault("database_pooler", POOLED)
    chosen = {f"PIPELINE_{name.upper()}": str(value) for name, value in settings.items()}
    return {
        **inherited,
        **chosen,
        "BANK_DEPOSITS": bank.deposits,
        "BANK_BALANCES": bank.balances,
        "BANK_NAME": bank.name,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "200",
        "NO_COLOR": "1",
    }


class Process:
    """A process of the bank, and what it writes."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process = process
        self._port = port
        self._reading = asyncio.create_task(self._read())
        self.output = ""

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self.output += line.decode()

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    @property
    def pid(self) -> int:
        """The operating system's number for it."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.returncode is None

    async def ended(self) -> int:
        """Wait for its end and return the exit code; minus the signal that ended it."""
        code = await asyncio.wait_for(self._process.wait(), PATIENCE)
        await self._reading
        return code

    async def kill(self) -> None:
        """End it by kill -9."""
        if self.is_running:
            self.send(signal.SIGKILL)
            await self.ended()

    async def says(self, text: str) -> None:
        """Wait until it has written the text."""
        await eventually(lambda: text in self.output)

    async def get(self, path: str) -> tuple[int, str]:
        """Ask its health server; status 0 as long as it does not answer."""
        return await asyncio.to_thread(self._get, path)

    def _get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=5) as one:
                return one.status, one.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    async def is_ready(self) -> bool:
        """Whether its readiness says yes."""
        return (await self.get("/health/ready"))[0] == 200

    async def reasons(self) -> dict[str, Any]:
        """Return why it is not ready."""
        _, body = await self.get("/health/ready")
        found: dict[str, Any] = json.loads(body or '{"reasons": {}}')["reasons"]
        return found


Start = Callable[..., Awaitable[Process]]


@asynccontextmanager
async def starting(
    bank: Bank, free_port: Callable[[], int], **common: object
) -> AsyncIterator[Start]:
    """Start processes of the bank; what still runs at the end of the block is killed."""
    started: list[Process] = []

    async def start(*command: str, cwd: Path = HOME, **settings: object) -> Process:
        port = free_port()
        chosen = {"health_port": port, "log_json": False, **common, **settings}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            APP,
            *command,
            cwd=cwd,
            env=environment(bank, **{k: v for k, v in chosen.items() if v is not None}),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        started.append(Process(process, port))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            await process.kill()
            print(process.output)  # pytest shows it beside a failure


@asynccontextmanager
async def forwarding(port: int, to: str) -> AsyncIterator[None]:
    """Listen on a port and pass everything on to the address, as if the server had come up."""
    host, _, to_port = to.rpartition(":")

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(to_port))
        await asyncio.gather(pipe(reader, back), pipe(there, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()
