"""Pressure on a process, which goes on: nothing reads its log, or silent clients crowd its port."""

import asyncio
import os
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from chaos.proxy import HOST
from demo.processes import Service

CLIENTS = 1_000
FILES = 256
"""Descriptors that a process may have whose port so many clients crowd."""
UNFINISHED = b"GET /health/live HTTP/1.1\r\nX-Nothing: "
"""A request that never ends."""
BYTE_EVERY = 1.0
"""Seconds between the bytes of such a request."""
LOOK_EVERY = 0.2
CAPACITY = 65_536
"""Bytes that a pipe holds, at most."""
NUL = b"\0"
"""What fills a pipe; no log has any."""
ARRIVES_WITHIN = 0.2
"""Seconds in which a line arrives that has waited for room in the pipe."""


class LogPipe:
    """The log of a process: a named pipe, which is read into a file."""

    def __init__(self, file: Path) -> None:
        self.path = file.with_suffix(".pipe")
        """Where the process writes."""
        self._file = file
        self._pipe: int | None = None
        self._came = 0

    def open(self) -> None:
        """Make the pipe, and read it from now on."""
        self.path.unlink(missing_ok=True)
        os.mkfifo(self.path)
        # With a writing end, so that it has no end when no process writes.
        self._pipe = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        asyncio.get_running_loop().add_reader(self._pipe, self.read)

    def read(self) -> None:
        """Read what there is."""
        assert self._pipe is not None
        with self._file.open("ab") as file, suppress(BlockingIOError):
            while True:
                data = os.read(self._pipe, CAPACITY).replace(NUL, b"")
                file.write(data)
                self._came += len(data)

    @asynccontextmanager
    async def unread(self) -> AsyncIterator[None]:
        """Let the pipe be full during the block: who writes waits."""
        assert self._pipe is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pipe)
        self.read()
        with suppress(BlockingIOError):
            while True:
                os.write(self._pipe, NUL * CAPACITY)
        self._came = 0
        try:
            yield
        finally:
            loop.add_reader(self._pipe, self.read)

    async def has_waited(self) -> bool:
        """Return, right after the block, whether something has waited to be written."""
        await asyncio.sleep(ARRIVES_WITHIN)
        return self._came > 0

    def close(self) -> None:
        """Read what there is, and remove the pipe."""
        if self._pipe is not None:
            asyncio.get_running_loop().remove_reader(self._pipe)
            self.read()
            os.close(self._pipe)
            self._pipe = None
            self.path.unlink()


@asynccontextmanager
async def crowded(port: int, pid: int) -> AsyncIterator[None]:
    """Crowd a port of a process during the block, whose descriptors are fewer than the clients.

    Half of them say nothing, and the others hardly anything.
    """
    _, ours = resource.getrlimit(resource.RLIMIT_NOFILE)
    # We need more, and for good: another crowd may be there when this one has gone.
    resource.setrlimit(resource.RLIMIT_NOFILE, (ours, ours))
    before, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (FILES, most))
    clients = [
        asyncio.create_task(_hold(port, is_silent=number >= CLIENTS / 2))
        for number in range(CLIENTS)
    ]
    try:
        yield
    finally:
        for client in clients:
            client.cancel()
        await asyncio.wait(clients)
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (before, most))


async def _hold(port: int, *, is_silent: bool) -> None:
    """Keep a connection for as long as the server does, and let no request end."""
    with suppress(OSError):
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            if not is_silent:
                writer.write(UNFINISHED)
            while not reader.at_eof():
                if not is_silent:
                    writer.write(b"x")
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(), BYTE_EVERY)
        finally:
            writer.close()


async def stood_still(service: Service, seconds: float) -> float:
    """Watch a process for so many seconds; return for how long at most it stood still.

    It does while its event loop has no heartbeat, or its health port does not answer.
    """
    ends, lived, longest = time.monotonic() + seconds, time.monotonic(), 0.0
    while time.monotonic() < ends:
        age = await service.seconds_since_beat()
        if age is not None:
            lived = max(lived, time.monotonic() - age)
        longest = max(longest, time.monotonic() - lived)
        await asyncio.sleep(LOOK_EVERY)
    return longest
