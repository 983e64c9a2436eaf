"""Processes that start at once: forked from one that has imported everything.

`python -m tests.servers.fork_server` forks one for every line that it reads, and prints its
process id.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from .databases import HOME
from .waiting import eventually, let_servers_be_slow

_NEEDED = ("onceward.cli.commands", "sqlalchemy.dialects.postgresql.asyncpg", "uvloop")
_OPTIONAL = {"onceward.http": "fastapi", "onceward.page.app": "jinja2"}
"""Modules of optional packages, and the library of each, without which it can't be imported."""


class Forked:
    """A process, and what it has written."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        """The operating system's number for it."""
        self._log = log
        self._code = _code_of(log)

    @property
    def output(self) -> str:
        """What it has written, to standard output and standard error."""
        return self._log.read_text("utf-8", errors="replace")

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return not self._code.exists()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.is_running:
            with suppress(ProcessLookupError):  # its code is about to be written
                os.kill(self.pid, number)

    async def ended(self) -> int:
        """Wait for its end and return the exit code; minus the signal that ended it."""
        await eventually(lambda: not self.is_running)
        return int(self._code.read_text("ascii"))

    async def kill(self) -> None:
        """End it by kill -9."""
        self.send(signal.SIGKILL)
        await self.ended()


class ForkServer:
    """The process that they are forked from; `module` is its program."""

    def __init__(self, environment: Mapping[str, str], module: str = __name__) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=HOME,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._ordering = threading.Lock()
        self._folder = TemporaryDirectory()
        self.logs = Path(self._folder.name)
        """A folder for logs, which is there until `close`."""
        atexit.register(self.close)

    def start(
        self, program: str, *command: str, environment: Mapping[str, str], log: Path, cwd: Path
    ) -> Forked:
        """Start a process: `program` is the name of a module, `environment` all of its variables.

        Blocks until it is forked.
        """
        order = {
            "program": program,
            "command": command,
            "environment": dict(environment),
            "log": str(log),
            "cwd": str(cwd),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        log.touch()
        with self._ordering:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            return Forked(int(self._process.stdout.readline()), log)

    def close(self) -> None:
        """End it, and the processes that still run."""
        atexit.unregister(self.close)
        self._process.communicate()
        self._folder.cleanup()


def _code_of(log: Path) -> Path:
    return log.with_name(f"{log.name}.code")


def write_code(log: Path, code: int) -> None:
    """Store the exit code of a process beside its log, for `Forked`."""
    written = log.with_name(f"{log.name}.new")
    written.write_text(str(code), "ascii")
    written.rename(_code_of(log))


def serve() -> None:
    """Fork a process for every order, until there are no more."""
    optional = (one for one, library in _OPTIONAL.items() if _is_there(one) and _is_there(library))
    for name in (*_NEEDED, *optional):
        importlib.import_module(name)
    let_servers_be_slow()
    gc.freeze()
    running: dict[int, Path] = {}
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if woken in ready:
                os.read(woken, 1024)
                _note_ends(running)
            if 0 in ready:
                if not (line := sys.stdin.readline()):
                    break
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _become(**order)
                running[pid] = Path(order["log"])
                os.write(1, b"%d\n" % pid)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _is_there(name: str) -> bool:
    return find_spec(".".join(name.split(".")[:2])) is not None


def _note_ends(running: dict[int, Path]) -> None:
    for pid, log in [*running.items()]:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del running[pid]
            write_code(log, os.waitstatus_to_exitcode(status))


def _become(
    program: str, command: list[str], environment: dict[str, str], log: str, cwd: str
) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A shell's job in the background ignores it, and so would this process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[0] = cwd
    sys.argv = ["service", *command]
    runpy.run_module(program, run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    serve()
