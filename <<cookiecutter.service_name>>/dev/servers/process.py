"""A server that runs as a process on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from servers.console import LOCALE, StackError, last_lines, pause, say
from servers.network import keep_or_pick
from servers.state import Record, StateDirectory, process_start

START_TIMEOUT = 120.0


class LocalServer(ABC):
    """A server; its data is in `home`, and its output in `log`."""

    title: ClassVar[str]
    port_count: ClassVar[int]
    # Sent one after the other until the process has ended.
    stop_signals: ClassVar[Sequence[signal.Signals]]

    def __init__(self, directory: StateDirectory, name: str, record: Record) -> None:
        self.directory = directory
        self.record = record
        self.home = directory.path / name
        self.log = directory.path / f"{name}.log"
        self.log_start = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self.record.ports[0]

    @property
    def process_options(self) -> dict[str, Any]:
        # Java servers get paths that are relative to their home: an absolute one may have letters
        # that end an entry of a class path or are escapes in a properties file.
        return {"cwd": self.home, "env": {**os.environ, **LOCALE}}

    @abstractmethod
    def check_requirements(self) -> None:
        """Find or install the programs. Raises `StackError` if that is not possible."""

    @abstractmethod
    def prepare(self) -> None:
        """Create missing data and configuration."""

    @abstractmethod
    def command(self) -> list[str]: ...

    @abstractmethod
    def answers(self) -> bool: ...

    def runs(self) -> bool:
        if self.process is not None:
            self.process.poll()
        return self.record.runs()

    def serves(self) -> bool:
        return self.runs() and self.answers()

    def start(self) -> None:
        self.record.ports = keep_or_pick(self.record.ports, self.port_count)
        self.directory.save()
        self.prepare()
        with self.log.open("ab") as log:
            self.log_start = log.tell()
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # In a session of its own, a Ctrl-C or a closed terminal does not end it.
                start_new_session=True,
                **self.process_options,
            )
        self.record.pid = self.process.pid
        self.record.started = process_start(self.process.pid)
        self.directory.save()

    def wait_until_serving(self) -> None:
        """Wait until it serves, and restart it if it ends because of a temporary error."""
        deadline = time.monotonic() + START_TIMEOUT
        retries = 30
        while not self.serves():
            if not self.runs():
                if self.process is None:  # A server of an earlier command has ended.
                    self.check_requirements()
                else:
                    # "in use": another process has taken the port, or child processes of a killed
                    # PostgreSQL still use its shared memory. A later start may succeed.
                    if retries == 0 or b"in use" not in self.latest_log():
                        raise StackError(
                            f"{self.title} ended while starting.\n{last_lines(self.log)}"
                        )
                    if retries == 30:
                        say(f"the port or memory of {self.title} is in use, retrying")
                    retries -= 1
                    pause(1)
                self.start()
            if time.monotonic() > deadline:
                raise StackError(
                    f"{self.title} did not serve within {START_TIMEOUT:.0f} s. "
                    f"Try `down`, then `up`.\n{last_lines(self.log)}"
                )
            pause()

    def latest_log(self) -> bytes:
        with self.log.open("rb") as log:
            log.seek(self.log_start)
            return log.read()

    def send(self, number: signal.Signals) -> None:
        if self.runs():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.record.pid, number)

    def stop(self) -> None:
        for number in self.stop_signals:
            self.send(number)
            deadline = time.monotonic() + 10
            while self.runs() and time.monotonic() < deadline:
                time.sleep(0.02)
        if self.runs():
            raise StackError(f"{self.title} (pid {self.record.pid}) cannot be stopped.")
        self.record.pid, self.record.started = 0, ""
        self.directory.save()

    def remove(self) -> None:
        self.log.unlink(missing_ok=True)
        shutil.rmtree(self.home, ignore_errors=True)


def stop_all(servers: Sequence[LocalServer]) -> None:
    # Send the signal to all before waiting for the first.
    for server in servers:
        server.send(server.stop_signals[0])
    for server in servers:
        server.stop()
