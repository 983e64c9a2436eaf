"""What is kept about the servers between two commands."""

from __future__ import annotations

import contextlib
import fcntl
import json
import secrets
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
    mode: str = ""  # "process", "compose", or "" when nothing has been brought up
    # Set by `up`: the servers stay until `down`. Without it they last as long as any `run`.
    keep: bool = False
    password: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    postgres: Record = field(default_factory=Record)
    kafka: Record = field(default_factory=Record)


class StateDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = State()
        self._file = path / "state.json"

    def exists(self) -> bool:
        return self._file.exists()

    def create(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        ignore = self.path / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n")

    def load(self) -> None:
        if not self._file.exists():
            self.state = State()
            return
        try:
            content = json.loads(self._file.read_text())
            content["postgres"] = Record(**content["postgres"])
            content["kafka"] = Record(**content["kafka"])
            self.state = State(**content)
        except (ValueError, TypeError, KeyError):
            raise StackError(
                f"{self._file} cannot be understood. End the servers that run on data in "
                f"{self.path}, if there are any, and remove that directory."
            ) from None

    def save(self) -> None:
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
