"""A receiver of OTLP over HTTP on the loopback."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

TRACES, METRICS = PATHS = ("/v1/traces", "/v1/metrics")


@asynccontextmanager
async def receiving(take: Callable[[str, bytes], Awaitable[None]]) -> AsyncIterator[str]:
    """Serve on a free port; yields the base URL. `take` is told the path and body of a request."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await take(request.split()[1], body)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
