"""A proxy to a server: it can be shut, cut, held, and passed slowly."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class TcpProxy:
    """Leads to a server on this machine, as long as it is open."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._server_port = port
        self._is_shut = False
        self._passes = asyncio.Event()
        self._passes.set()
        self._open: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.delay = 0.0
        """Seconds that what passes takes, in either direction."""
        self.attempts = 0
        """Connections that were asked for, taken or not."""

    def shut(self) -> None:
        """Cut all connections and take no others, as a server that has gone."""
        self._is_shut = True
        self.cut()

    def cut(self) -> None:
        """Cut all connections, and take new ones."""
        for writer in self._open:
            writer.close()

    def hold(self) -> None:
        """Let nothing pass and tell nobody, as a network that loses everything."""
        self._passes.clear()

    def restore(self) -> None:
        """Be an open proxy again."""
        self._is_shut = False
        self._passes.set()
        self.delay = 0.0

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.attempts += 1
        try:
            if self._is_shut:
                raise ConnectionRefusedError
            answers, server = await asyncio.open_connection(self._host, self._server_port)
        except OSError:
            writer.close()
            return
        self._open |= {writer, server}
        try:
            await asyncio.gather(self._pass(reader, server), self._pass(answers, writer))
        finally:
            self._open -= {writer, server}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                await self._passes.wait()
                await asyncio.sleep(self.delay)
                writer.write(data)
                await writer.drain()
        writer.close()

    @asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator["TcpProxy"]:
        """Take connections as long as the block lasts."""
        server = await asyncio.start_server(self._accept, self._host, port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.restore()
            self.shut()
