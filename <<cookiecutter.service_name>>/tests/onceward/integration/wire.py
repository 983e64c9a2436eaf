"""What passes between one process and its servers, and the point at which the process dies."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import NamedTuple, Protocol

from .boundaries import Boundary, Moment, Point

_END_SECONDS = 1.0
"""How long a server may take to notice the end of a connection; then it is closed."""


class Request(NamedTuple):
    """What a client sends and expects one answer to."""

    sent: bytes
    id: int
    boundary: str | None
    """None for what is only a part of another request and changes nothing."""


class Answer(NamedTuple):
    """A message of a server."""

    sent: bytes
    completes: int | None
    """The request whose answer ends with it."""


class Language(Protocol):
    """What is spoken on one connection."""

    def requests(self, client: asyncio.StreamReader) -> AsyncIterator[Request]:
        """Cut what the client sends into requests."""

    def answers(self, server: asyncio.StreamReader) -> AsyncIterator[Answer]:
        """Cut what the server sends into messages, as the client shall see them."""


class Wire:
    """The connections of one process. The process dies at the point, if one is given."""

    def __init__(self, point: Point | None = None) -> None:
        self.seen: Counter[str] = Counter()
        """How often each boundary was reached."""
        self.has_killed = asyncio.Event()
        self._point = point
        self._is_known = asyncio.Event()
        self._connections: list[Connection] = []

    def lead_to(self, kill: Callable[[], None]) -> None:
        """Say how the process is killed; nothing passes before that is known."""
        self._kill = kill
        self._is_known.set()

    async def serve(
        self, stack: AsyncExitStack, host: str, port: int, speak: Callable[[int], Language]
    ) -> int:
        """Listen in front of a server, as long as the stack is open; returns the port."""
        tasks: list[asyncio.Task[None]] = []

        def accept(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
            tasks.append(asyncio.create_task(connect(client, to_client)))

        async def connect(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
            async with closing(to_client):
                await self._is_known.wait()
                server, to_server = await asyncio.open_connection(host, port)
                async with closing(to_server):
                    connection = Connection(self, speak(listening), to_client, to_server)
                    self._connections.append(connection)
                    await connection.run(client, server)

        async def end() -> None:
            if tasks:
                await asyncio.wait(tasks, timeout=_END_SECONDS)
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception) and not isinstance(outcome, OSError):
                    raise outcome  # what was said was not understood

        stack.push_async_callback(end)
        listener = await asyncio.start_server(accept, host, 0)
        await stack.enter_async_context(listener)
        listening = int(listener.sockets[0].getsockname()[1])
        return listening

    def reach(self, boundary: str) -> Moment | None:
        """Count the boundary; returns the moment at which the process dies, if it is here."""
        self.seen[boundary] += 1
        if self._point is None:
            return None
        wanted, moment = self._point
        is_here = (boundary, self.seen[boundary]) == (wanted.name, wanted.occurrence)
        return moment if is_here else None

    def kill(self) -> None:
        """Kill the process, and end all its connections as the kernel of its host would."""
        self._kill()
        self.has_killed.set()
        self.end()

    def end(self) -> None:
        """End the connections."""
        for connection in self._connections:
            connection.cut()


class FreezingWire(Wire):
    """The process is stopped, as by SIGSTOP: its connections stay open and silent."""

    def freeze_before(self, request: str) -> None:
        """Stop the process when it next reaches this boundary."""
        self._point = Point(Boundary(request, self.seen[request] + 1), Moment.BEFORE)

    def kill(self) -> None:
        self.has_killed.set()


@asynccontextmanager
async def closing(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    """Close the connection after the block."""
    try:
        yield
    finally:
        writer.close()


class Connection:
    """One connection of the process to a server."""

    def __init__(
        self,
        wire: Wire,
        language: Language,
        to_client: asyncio.StreamWriter,
        to_server: asyncio.StreamWriter,
    ) -> None:
        self._wire = wire
        self._language = language
        self._to_client = to_client
        self._to_server = to_server
        self._deadly: int | None = None
        """The request whose answer the process shall not see."""

    async def run(self, client: asyncio.StreamReader, server: asyncio.StreamReader) -> None:
        """Pass on what comes until one side ends."""
        answering = asyncio.create_task(self._pass_answers(server))
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await self._pass_requests(client)
            if not self._wire.has_killed.is_set():
                self.cut()
            await answering
        finally:
            answering.cancel()

    def cut(self) -> None:
        """End both directions; what was passed to the server arrives before the end."""
        self._to_client.close()
        if self._to_server.can_write_eof() and not self._to_server.is_closing():
            with suppress(OSError):
                self._to_server.write_eof()

    async def _pass_requests(self, client: asyncio.StreamReader) -> None:
        async for request in self._language.requests(client):
            if self._wire.has_killed.is_set():
                return
            moment = request.boundary and self._wire.reach(request.boundary)
            if moment is Moment.BEFORE:
                self._wire.kill()
                return
            if moment is Moment.ANSWERED:
                self._deadly = request.id
            self._to_server.write(request.sent)
            if moment is Moment.UNANSWERED:
                self._wire.kill()
                return

    async def _pass_answers(self, server: asyncio.StreamReader) -> None:
        # Read to the end, also for a dead client: a socket that is closed with unread bytes resets
        # the connection, and the last request might be lost on its way.
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            async for answer in self._language.answers(server):
                if self._wire.has_killed.is_set():
                    continue
                if self._deadly is None:
                    self._to_client.write(answer.sent)
                elif answer.completes == self._deadly:
                    self._wire.kill()
        if self._deadly is not None and not self._wire.has_killed.is_set():
            self._wire.kill()  # the answer was an end of the connection
        self._to_client.close()
