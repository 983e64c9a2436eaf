"""What is kept about the servers between two commands."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from servers.console import StackError, pause, say


@dataclass
class Record:
    """What is known of one server; the ports outlive the process, so addresses stay the same."""

    ports: list[int] = field(default_factory=list)
    pid: int = 0
    started: str = ""


@dataclass
class State:
    # The path of the state directory, and the record's id. A copy of the directory has those of the
    # original; a directory that was moved finds no record of its id at its old path.
    path: str = ""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    mode: str = ""  # "process", "compose", or "" when nothing has been brought up
    project: str = ""  # of Docker Compose: the name of its containers and volumes
    # Set by `up`: the servers stay until `down`. Without it they last as long as any `run`.
    keep: bool = False
    password: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    postgres: Record = field(default_factory=Record)
    kafka: Record = field(default_factory=Record)


class StateDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = State()
        # The recorded path if it is another than ours, until the next `save`.
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
        """Read the record; that of a directory of which this is a copy counts as none."""
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
                f"{self._file} cannot be understood. End the servers that run on data in "
                f"{self.path}, if there are any, and remove that directory."
            ) from None

    def _is_copy(self) -> bool:
        original = Path(self.state.path) / self._file.name
        try:
            content = json.loads(original.read_text())
            same = content.get("id") == self.state.id
            return same and not original.samefile(self._file)
        except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError):
            return False
        except OSError:
            return True  # It belongs to another user.

    def _begin_anew(self) -> None:
        """Remove what a copy has brought along: data that was in use, or the link to it."""
        say(
            f"{self.path} was copied from {self.copied_from}, whose servers and data are left "
            "alone: this copy starts with ports and data of its own"
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
        new = self._file.with_suffix(".new")
        new.touch(mode=0o600)  # It holds the database password.
        new.write_text(json.dumps(asdict(self.state), indent=2) + "\n")
        new.replace(self._file)

    def forget(self) -> None:
        self.state = State()
        self._file.unlink()
        (self.path / "maven.log").unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One command at a time; what the one before has recorded is read under the lock."""
        self.create()
        with (self.path / "lock").open("w") as lock:
            wait_for_lock(lock, "waiting for another stack command to finish")
            self.load()
            if self.copied_from:
                self._begin_anew()
            yield

    @contextlib.contextmanager
    def in_use(self) -> Iterator[Callable[[], bool]]:
        """Count as a user of the servers; the value tells whether we are the only one.

        The lock vanishes with its holder however that ends, so no user is counted for ever.
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
    """The folder that all projects of this user share."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dev-stack"


def wait_for_lock(lock: IO[str], message: str, kind: int = fcntl.LOCK_EX) -> None:
    said = False
    while True:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if not said:
                say(message)
                said = True
            pause()
        else:
            return
