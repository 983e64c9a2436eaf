"""Connections to the API: real ones, of clients that are silent, slow or many."""

import asyncio
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import ClassVar

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse

from onceward.http_server.connections import Connection
from onceward.http_server.server import Server
from onceward.observe.health import listen
from onceward.servers.tasks import in_background
from onceward.service import Misconfigured
from onceward.settings import Settings

from .cashier import new_key
from .routes import app_of
from tests.onceward.integration.bank import Bank
from tests.servers.waiting import PATIENCE, eventually


class Few(Connection):
    """Connections of which there are at most four."""

    most = 4
    patience = 4 * PATIENCE
    waiting: ClassVar = {}
    lost = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it."""
        super().connection_lost(exc)
        type(self).lost += 1


class Short(Few):
    """Connections whose requests have to arrive soon, and whose answers have to be taken soon."""

    patience = 0.3
    waiting: ClassVar = {}


@pytest.fixture(autouse=True)
def _none_is_lost_yet() -> None:
    Few.lost = Short.lost = 0


@asynccontextmanager
async def serving(app: FastAPI, protocol: type[Connection]) -> AsyncIterator[int]:
    """Serve an application; yield the port."""
    server = Server(app, grace=1, protocol=protocol)
    listener, _ = listen("127.0.0.1", 0, what="the API", prefix="PIPELINE_HTTP")
    with listener:
        async with in_background(server.serve([listener])) as running:
            await eventually(lambda: server.started)
            yield listener.getsockname()[1]
            server.should_exit = True
            await running


@pytest.fixture
def app(bank: Bank, settings: Callable[..., Settings]) -> FastAPI:
    app = app_of(bank.service, settings())
    app.state.seconds = PATIENCE

    @app.get("/large/{times}")
    async def large(times: int) -> Response:
        return Response(bytes(times * PIECE))

    @app.get("/stream/{times}/{size}")
    async def stream(times: int, size: int) -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(times):
                yield bytes(size)
                await asyncio.sleep(0 if size == PIECE else Short.patience / 5)

        return StreamingResponse(pieces())

    return app


PIECE = 1_000_000
UNREAD = {
    "one answer": "GET /large/40 HTTP/1.1\nHost: bank\n\n",
    "the last answer": "GET /large/40 HTTP/1.1\nHost: bank\nConnection: close\n\n",
    "many answers": "GET /large/1 HTTP/1.1\nHost: bank\n\n" * 40,
    "a stream": f"GET /stream/40/{PIECE} HTTP/1.1\nHost: bank\n\n",
    "answers before a mistake": "GET /large/40 HTTP/1.1\nHost: bank\n\nmistake\n\n",
}
"""Requests whose answers, of 40 MB, the buffers of no socket take."""


class Client:
    """A connection, on which the test sends what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, text: str) -> None:
        """Send as it is."""
        self.writer.write(text.replace("\n", "\r\n").encode())
        await self.writer.drain()

    async def answer(self) -> tuple[int, str]:
        """Return status and body of the next answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r")[0])
        return int(head.split()[1]), (await self.reader.readexactly(length)).decode()

    async def post(self, amount: int = 5, path: str = "/deposits") -> tuple[int, str]:
        """Pay in; return status and body of the answer."""
        await self.send(request(amount, path))
        return await self.answer()

    async def is_closed(self) -> bool:
        """Wait until the server has closed it."""
        with suppress(ConnectionError):
            return await self.reader.read() == b""
        return True


def request(amount: int = 5, path: str = "/deposits") -> str:
    """Return a request to pay in."""
    body = f'{{"account": "ada", "amount": {amount}}}'
    head = f"POST {path} HTTP/1.1\nHost: bank\nIdempotency-Key: {new_key()}\n"
    return f"{head}Content-Type: application/json\nContent-Length: {len(body)}\n\n{body}"


@asynccontextmanager
async def connected(port: int, number: int = 1) -> AsyncIterator[list[Client]]:
    """Yield connections."""
    clients = [Client(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(number)]
    try:
        yield clients
    finally:
        for one in clients:
            one.writer.close()


async def test_after_a_failure_the_connection_takes_the_next_request(
    app: FastAPI, bank: Bank, caplog: pytest.LogCaptureFixture
) -> None:
    bank.errors[5] = KeyError("a mistake")

    @app.post("/broken")
    async def broken() -> None:
        raise KeyError("a mistake of the route")

    async with serving(app, Few) as port, connected(port) as (client,):
        for path in ("/deposits", "/broken", "/nothing", "/deposits"):
            assert (await client.post(5, path))[0] in (500, 404)
        assert (await client.post(7))[0] == 201
        await client.send(f"POST /deposits HTTP/1.1\nHost: bank\nContent-Length: {10**6}\n\n")
        assert (await client.answer())[0] == 413
        await client.send("x" * 10**6)
        assert (await client.post(8))[0] == 201
    failures = [one for one in caplog.records if one.levelname == "ERROR"]
    assert {one.getMessage() for one in failures} == {"a request has failed"}
    assert len(failures) == 3
    assert all(one.exc_info for one in failures)


@pytest.mark.parametrize("sent", ["", "POST /deposits HTTP/1.1\nHo", request()[:-1]])
async def test_a_request_that_does_not_arrive_in_time_ends_its_connection(
    app: FastAPI, sent: str
) -> None:
    async with serving(app, Short) as port, connected(port, 2) as (slow, other):
        await slow.send(sent)
        if sent.endswith("5"):
            status, text = await slow.answer()
            assert (status, "did not arrive within 0.3 s" in text) == (408, True)
        assert await slow.is_closed()
        assert await other.is_closed()
        assert not Short.waiting


async def test_the_second_request_of_a_connection_has_a_deadline_too(app: FastAPI) -> None:
    async with serving(app, Short) as port, connected(port) as (client,):
        assert (await client.post())[0] == 201
        await client.send(request()[:-1])
        assert (await client.answer())[0] == 408
        assert await client.is_closed()


async def test_a_request_that_is_being_answered_has_no_deadline_to_arrive(
    app: FastAPI, bank: Bank
) -> None:
    is_over = asyncio.Event()

    async def wait() -> None:
        await is_over.wait()

    bank.waits[5] = wait
    async with serving(app, Short) as port, connected(port, 2) as (client, silent):
        answered = asyncio.create_task(client.post())
        assert await silent.is_closed()
        is_over.set()
        assert (await answered)[0] == 201


@pytest.mark.parametrize("sent", ["", "POST /deposits HTTP/1.1\nHo", request()[:-1]])
async def test_silent_connections_make_room_for_requests(app: FastAPI, sent: str) -> None:
    async with serving(app, Few) as port, connected(port, 20) as silent:
        for one in silent:
            with suppress(ConnectionError):
                await one.send(sent)
        async with connected(port) as (client,):
            assert (await client.post())[0] == 201
        assert len(Few.waiting) <= Few.most


@pytest.mark.parametrize("sent", UNREAD.values(), ids=UNREAD)
async def test_a_client_that_takes_no_answer_in_time_loses_its_connection(
    app: FastAPI, sent: str
) -> None:
    async with serving(app, Short) as port, connected(port) as (client,):
        await client.send(sent)
        await eventually(lambda: Short.lost == 1)
        taken = 0
        with suppress(ConnectionError):
            while some := await client.reader.read(PIECE):
                taken += len(some)
        assert taken < 40 * PIECE
        assert not Short.waiting


@pytest.mark.parametrize("sent", UNREAD.values(), ids=UNREAD)
async def test_clients_that_take_no_answers_make_room_for_others(app: FastAPI, sent: str) -> None:
    async with serving(app, Few) as port, connected(port, Few.most) as deaf:
        for one in deaf:
            await one.send(sent)
        await eventually(lambda: sum(one.flow.write_paused for one in Few.waiting) == Few.most)
        async with connected(port, Few.most) as clients:
            for client in clients:
                assert (await client.post())[0] == 201
        assert Few.lost >= Few.most


async def test_a_stream_may_last_as_long_as_its_client_reads(app: FastAPI) -> None:
    async with serving(app, Short) as port, connected(port) as (client,):
        await client.send("GET /stream/20/5 HTTP/1.1\nHost: bank\nConnection: close\n\n")
        answer = await client.reader.read()
        assert answer.count(bytes(5)) == 20
        assert answer.endswith(b"0\r\n\r\n")


async def test_requests_beyond_the_limit_are_answered_with_503(app: FastAPI, bank: Bank) -> None:
    is_over = asyncio.Event()

    async def wait() -> None:
        await is_over.wait()

    bank.waits[5] = wait
    async with serving(app, Few) as port, connected(port, Few.most) as busy:
        answers = [asyncio.create_task(client.post()) for client in busy]
        await eventually(lambda: not Few.waiting)
        async with connected(port) as (one,):
            status, text = await one.post()
        assert (status, "repeat it" in text) == (503, True)
        is_over.set()
        assert {status for status, _ in await asyncio.gather(*answers)} == {201}


async def test_a_failing_application_start_raises_an_error_without_exiting_the_process() -> None:
    @asynccontextmanager
    async def broken(_: Starlette) -> AsyncIterator[None]:
        raise KeyError("a mistake of the application")
        yield

    with pytest.raises(Misconfigured, match="did not start"):
        await Server(Starlette(lifespan=broken), grace=1).serve([])


def test_half_of_the_descriptors_are_left_to_the_process() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert Connection.most <= limit // 2
