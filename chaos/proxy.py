"""A TCP proxy between one process and one server, whose connections can be broken in four ways."""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

HOST = "127.0.0.1"
CHUNK = 65_536
FORGOTTEN_AFTER = 10.0
"""Seconds for which the server keeps its half of a half-open connection that the client gave up."""

Address = tuple[str, int]


class Proxy:
    """Passes everything on to the server, or not.

    Kafka tells its clients where it lives, and they go there: past the proxy. So the proxy puts
    its own port in place of the broker's wherever the broker names its address. That works with
    any broker and any version of its protocol, where a listener of the broker's own for every
    process would have to be known to the stack that starts it.
    """

    def __init__(self, server: Callable[[], Address], *, kafka: bool = False) -> None:
        self._server = server
        self._kafka = kafka
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self._partitions = 0
        self._latencies: list[float] = []
        self._listener: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen on a free port."""

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._serve(reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._listener = await asyncio.start_server(accept, HOST, 0)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close everything."""
        if self._listener:
            self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> bool:
        """Reset every connection, those that are half-open too; return whether there was one."""
        links = list(self._links)
        for link in links:
            link.reset()
        return bool(links)

    def silence(self) -> bool:
        """Make every connection half-open: what either side says is swallowed, for good.

        New ones are as good as ever. Returns whether there was a connection.
        """
        links = [link for link in self._links if not link.silent]
        for link in links:
            link.silent = True
        return bool(links)

    @contextmanager
    def slowed(self, seconds: float) -> Iterator[None]:
        """Let everything that is said in the block arrive so much later.

        Of several delays at once the longest counts.
        """
        self._latencies.append(seconds)
        try:
            yield
        finally:
            self._latencies.remove(seconds)

    @contextmanager
    def parted(self) -> Iterator[None]:
        """Let nothing through in the block, not even a new connection.

        What has waited arrives, late, when the last one of several such blocks ends.
        """
        self._partitions += 1
        self._passing.clear()
        try:
            yield
        finally:
            self._partitions -= 1
            if not self._partitions:
                self._passing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(writer)
        self._links.add(link)
        try:
            await self._passing.wait()
            there, back = await asyncio.open_connection(*self._server())
            link.ends.append(back)
            said, answered = _chunk, self._frame if self._kafka else _chunk
            await asyncio.gather(
                self._pump(link, reader, back, said), self._pump(link, there, writer, answered)
            )
            if link.silent:
                await asyncio.sleep(FORGOTTEN_AFTER)
        except OSError:
            pass  # the server is away, and the client is told
        finally:
            link.reset()
            self._links.discard(link)

    async def _pump(
        self,
        link: "_Link",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        read: Callable[[asyncio.StreamReader], Awaitable[bytes]],
    ) -> None:
        """Pass on what one side says, to its end."""
        try:
            while data := await read(reader):
                if self._latencies:
                    await asyncio.sleep(max(self._latencies))
                await self._passing.wait()
                if not link.silent:
                    writer.write(data)
                    await writer.drain()
            await self._passing.wait()
            # The other side of a half-open connection does not hear of the end either.
            if not link.silent:
                writer.close()
        except OSError:
            if not link.silent:
                link.reset()

    async def _frame(self, reader: asyncio.StreamReader) -> bytes:
        """Return an answer of Kafka that names our port for its own; nothing at the end."""
        try:
            head = await reader.readexactly(4)
            body = await reader.readexactly(int.from_bytes(head, "big"))
        except asyncio.IncompleteReadError:
            return b""
        host, port = self._server()
        return head + body.replace(_named(host, port), _named(host, self.port))


class _Link:
    """A connection of a client, and ours to the server behind it."""

    def __init__(self, client: asyncio.StreamWriter) -> None:
        self.ends = [client]
        self.silent = False

    def reset(self) -> None:
        """End it at once, and let both sides know by a reset."""
        for end in self.ends:
            if not end.transport.is_closing():
                connection = end.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.transport.abort()


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    return await reader.read(CHUNK)


def _named(host: str, port: int) -> bytes:
    """Return a broker's address as it stands in Kafka's answers: text and a 32-bit number."""
    return host.encode() + struct.pack(">i", port)
