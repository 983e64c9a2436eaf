"""A proxy in front of a server, for tests that cut, hold up or watch connections."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from onceward.servers.tasks import end

Pass = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on all that comes."""
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()


@asynccontextmanager
async def proxy(
    host: str,
    port: int,
    *,
    listen: int = 0,
    ways: Callable[[], tuple[Pass, Pass]] = lambda: (pass_on, pass_on),
) -> AsyncIterator[int]:
    """Listen, connect each client to the server, and yield the port. At the end all is closed.

    `ways` returns what passes on to the server and back, for each connection. When one of the two
    ends, so does the connection.
    """
    tasks: set[asyncio.Task[object]] = set()

    async def connect(client: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        writers = [client_writer]
        try:
            if not listener.is_serving():
                return  # it was accepted when the proxy ended
            with suppress(OSError):
                server, server_writer = await asyncio.open_connection(host, port)
                writers.append(server_writer)
                there, back = ways()
                passing = [
                    asyncio.create_task(there(client, server_writer)),
                    asyncio.create_task(back(server, client_writer)),
                ]
                try:
                    await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await end(*passing)
        finally:
            for writer in writers:
                writer.close()
            tasks.discard(task)

    listener = await asyncio.start_server(connect, "127.0.0.1", listen)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        await asyncio.sleep(0)  # what was accepted has a task then
        await end(*tasks)
