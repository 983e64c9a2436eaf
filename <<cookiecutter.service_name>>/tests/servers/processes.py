"""Real processes of a service, for the tests that start, stop and kill them."""

import asyncio
import http.client
import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from .databases import HOME
from .fork_server import Forked, ForkServer
from .pooler import POOLED
from .waiting import eventually

ROOT = Path(__file__).parents[2]


def environment(variables: Mapping[str, str], **settings: object) -> dict[str, str]:
    """Return the environment of a process with these settings; no others reach it."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")
    }
    settings.setdefault("database_pooler", POOLED)
    chosen = {f"PIPELINE_{name.upper()}": str(value) for name, value in settings.items()}
    return {
        **inherited,
        **chosen,
        **variables,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT / "dev", ROOT))),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "200",
        "NO_COLOR": "1",
    }


class Process(Forked):
    """A process of a service, and what it writes."""

    async def says(self, text: str) -> None:
        """Wait until it has written the text."""
        await eventually(lambda: text in self.output)

    async def stops_for(self, seconds: float) -> None:
        """Wait until it has stopped itself, and continue it after so many seconds."""
        status = Path(f"/proc/{self.pid}/stat")
        await eventually(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")
        await asyncio.sleep(seconds)
        self.send(signal.SIGCONT)

    async def get(self, path: str) -> tuple[int, str]:
        """Send a request to its health server; status 0 as long as it does not answer."""
        # It has picked a port that was free, and logs it.
        port = re.search(r"health and metrics on port (\d+)", self.output)
        if port is None:
            return 0, ""
        return await asyncio.to_thread(_get, f"http://127.0.0.1:{port[1]}{path}")

    async def is_ready(self) -> bool:
        """Whether its readiness says yes."""
        return (await self.get("/health/ready"))[0] == 200

    async def reasons(self) -> dict[str, Any]:
        """Return why it is not ready."""
        _, body = await self.get("/health/ready")
        found: dict[str, Any] = json.loads(body or '{"reasons": {}}')["reasons"]
        return found


def most_memory(pid: int) -> int:
    """Return the most memory that a process ever had, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    (kibibytes,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return 1024 * int(kibibytes)


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as one:
            return one.status, one.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except (OSError, http.client.HTTPException):  # it may die while it answers
        return 0, ""


Start = Callable[..., Awaitable[Process]]


@asynccontextmanager
async def starting(
    program: str, variables: Callable[[], Mapping[str, str]], **common: object
) -> AsyncIterator[Start]:
    """Start processes of a program, which is the name of a module.

    Each gets the variables that `variables` returns then, these settings, and what its start adds.
    What still runs at the end of the block is killed.
    """
    started: list[Process] = []

    async def start(
        *command: str,
        cwd: Path = HOME,
        more_variables: Mapping[str, str] = MappingProxyType({}),
        **settings: object,
    ) -> Process:
        chosen = {"health_port": 0, "log_json": False, **common, **settings}
        log = _fork_server().logs / uuid4().hex
        forked = await asyncio.to_thread(
            _fork_server().start,
            program,
            *command,
            environment=environment(
                {**variables(), **more_variables},
                **{name: value for name, value in chosen.items() if value is not None},
            ),
            log=log,
            cwd=cwd,
        )
        started.append(Process(forked.pid, log))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            await process.kill()
            print(process.output)  # pytest shows it beside a failure


@cache
def _fork_server() -> ForkServer:
    """Return the one of this process."""
    return ForkServer(environment({}))
