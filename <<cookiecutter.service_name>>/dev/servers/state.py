"""The state of the servers that is stored between commands."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from servers.console import StackError, pause, say


def process_start(pid: int) -> str:
    """Return the start time of a process, "" if it has ended.

    A pid alone does not identify a process: the kernel reuses it after the process has ended.
    """
    if pid <= 0:
        return ""
    if not Path("/proc/self/stat").exists():  # macOS
        command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
        environment = {**os.environ, "LC_ALL": "C"}
        listing = subprocess.run(command, capture_output=True, text=True, env=environment).stdout
        status, _, start = listing.strip().partition(" ")
        return "" if status.startswith("Z") else start.strip()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # Counted from the third field, as the second, the name, may contain anything.
    fields = stat.rpartition(")")[2].split()
    status, threads, ticks = fields[0], int(fields[17]), fields[19]
    # A zombie with remaining threads still has its open files, locks and ports.
    gone = status in "ZX" and threads <= 1
    return "" if gone else f"{boot} {ticks}"


@dataclass
class Record:
    """The stored state of one server; ports are kept after it ends, so addresses do not change."""

    ports: list[int] = field(default_factory=list)
    pid: int = 0
    started: str = ""

    def runs(self) -> bool:
        return bool(self.started) and process_start(self.pid) == self.started


@dataclass
class State:
    # The path of the state directory, and the record's id. A copy of the directory has those of the
    # original; a directory that was moved finds no record of its id at its old path.
    path: str = ""
    inode: str = ""  # device and inode number of the state directory: the same after a rename
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    mode: str = ""  # "process", "compose", or "" when nothing has been brought up
    project: str = ""  # of Docker Compose: the name of its containers and volumes
    # Set by `up`: the servers run until `down`. Without it they run as long as any `run`.
    keep: bool = False
    # Whether Kafka was left out, by `--postgres`.
    postgres_alone: bool = False
    password: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    postgres: Record = field(default_factory=Record)
    kafka: Record = field(default_factory=Record)


class StateDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = State()
        # The recorded path if it is not that of this directory, until the next `save`.
        self.copied_from = ""
        self.moved_from = ""
        self._file = path / "state.json"

    def exists(self) -> bool:
        return self._file.exists()

    def create(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        ignore = self.path / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n")

    def load(self) -> None:
        """Read the record. In a copy of a state directory, the original's record is not used."""
        self.state, self.copied_from, self.moved_from = self._read(), "", ""
        if self.state.path in ("", str(self.path)):
            return
        if self._is_copy():
            self.copied_from = self.state.path
            self.state = State()
        else:
            self.moved_from = self.state.path

    def _read(self) -> State:
        if not self._file.exists():
            return State()
        try:
            content = json.loads(self._file.read_text())
            content["postgres"] = Record(**content["postgres"])
            content["kafka"] = Record(**content["kafka"])
            return State(**content)
        except (ValueError, TypeError, KeyError):
            raise StackError(
                f"{self._file} cannot be read. Stop any servers that use data in {self.path}, and "
                "remove that directory."
            ) from None

    def _is_copy(self) -> bool:
        original = Path(self.state.path) / self._file.name
        try:
            content = json.loads(original.read_text())
            if content.get("id") == self.state.id and not original.samefile(self._file):
                return True
        except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError):
            pass
        except OSError:
            return True  # The original belongs to another user.
        # The original may have been moved after it was copied: then running servers are its own.
        running = self.state.postgres.runs() or self.state.kafka.runs()
        return running and self.state.inode != self._inode()

    def _inode(self) -> str:
        status = self.path.stat()
        return f"{status.st_dev}:{status.st_ino}"

    def _reset_copy(self) -> None:
        """Remove copied data, which was copied while in use, or the link to it."""
        say(
            f"{self.path} was copied from {self.copied_from}, whose servers and data are not "
            "changed: the copy starts with new ports and empty data"
        )
        for name in ("postgres", "kafka"):
            home = self.path / name
            if home.is_symlink():
                home.unlink()
            elif home.exists():
                shutil.rmtree(home)
            (self.path / f"{name}.log").unlink(missing_ok=True)
        self._file.unlink()

    def save(self) -> None:
        self.state.path, self.copied_from, self.moved_from = str(self.path), "", ""
        self.state.inode = self._inode()
        new = self._file.with_suffix(".new")
        new.touch(mode=0o600)  # It contains the database password.
        new.write_text(json.dumps(asdict(self.state), indent=2) + "\n")
        new.replace(self._file)

    def forget(self) -> None:
        self.state = State()
        self._file.unlink()
        (self.path / "maven.log").unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other commands, and read the state under the lock."""
        self.create()
        with (self.path / "lock").open("w") as lock:
            wait_for_lock(lock, "waiting for another stack command to finish")
            self.load()
            if self.copied_from:
                self._reset_copy()
            yield

    @contextlib.contextmanager
    def in_use(self) -> Iterator[Callable[[], bool]]:
        """Register this process as a user of the servers; the value checks for other users.

        The lock is released when the process ends in any way, so no stale user remains.
        """
        self.create()
        with (self.path / "users").open("w") as lock:
            wait_for_lock(lock, "waiting for another `run` to stop its servers", fcntl.LOCK_SH)

            def alone() -> bool:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                return True

            yield alone


def cache_folder() -> Path:
    """Return the folder that all projects of a user share."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dev-stack"


def wait_for_lock(lock: IO[str], message: str, kind: int = fcntl.LOCK_EX) -> None:
    is_reported = False
    while True:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if not is_reported:
                say(message)
                is_reported = True
            pause()
        else:
            return
