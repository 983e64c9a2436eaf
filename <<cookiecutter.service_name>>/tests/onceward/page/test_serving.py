"""The page as a process: it is live, bounded, and ends when it is told to."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import ClassVar

import httpx2
import pytest

from onceward.http_server.connections import Connection
from onceward.observe.health import listen
from onceward.page import watching
from onceward.page.app import Page
from onceward.page.serving import PageServer
from onceward.page.settings import PageSettings
from onceward.servers.database import create_engine
from onceward.servers.tasks import in_background
from onceward.settings import Settings

from .conftest import TOKEN, assert_guarded, csrf, log_in
from tests.contract.bank import Deposit
from tests.onceward.integration import processes
from tests.onceward.integration.applier import Applier
from tests.onceward.integration.bank import Bank
from tests.onceward.integration.test_dead import bury
from tests.servers.processes import Process, Start
from tests.servers.waiting import PATIENCE, eventually


@pytest.fixture
async def start(
    bank: Bank,
    database_url: str,
    kafka: str,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Start]:
    """Start processes that have the command `page`."""
    monkeypatch.setattr(processes, "APP", "tests.onceward.page.app")
    async with processes.starting(
        bank, database_url=database_url, kafka_bootstrap_servers=kafka
    ) as one:
        yield one


@pytest.fixture
def port(unused_tcp_port_factory: Callable[[], int]) -> int:
    """Return where the page is served."""
    return unused_tcp_port_factory()


@pytest.fixture
async def served(start: Start, port: int) -> Process:
    """Return a page that serves."""
    page = await start("page", page_token=TOKEN, page_port=port, page_interval=0.1)
    await page.says(f"the page is at http://127.0.0.1:{port}/")
    return page


@pytest.fixture
async def browser(port: int) -> AsyncIterator[httpx2.AsyncClient]:
    """Return what asks it."""
    url = f"http://127.0.0.1:{port}"
    async with (
        httpx2.AsyncClient(base_url=url, headers={"origin": url}, timeout=60) as client,
        asyncio.timeout(120),
    ):
        yield client


Serving = Callable[[type[Connection]], AbstractAsyncContextManager[str]]


class Few(Connection):
    """Connections of which there are at most four."""

    most = 4
    patience = 4 * PATIENCE
    waiting: ClassVar = {}


class Short(Few):
    """Connections whose requests have to arrive soon, and whose answers have to be taken soon."""

    patience = 0.3
    waiting: ClassVar = {}


@pytest.fixture
def serving(bank: Bank, settings: Callable[..., Settings]) -> Serving:
    """Serve the page by these connections, in this process; yield its origin."""

    @asynccontextmanager
    async def serve(protocol: type[Connection]) -> AsyncIterator[str]:
        engine = create_engine(settings(), name=bank.service.name)
        chosen = PageSettings.model_validate({"token": TOKEN, "interval": 0.1})
        server = PageServer(Page(bank.service, settings(), chosen, engine), protocol)
        listener, url = listen("127.0.0.1", 0, what="the page", prefix="PIPELINE_PAGE")
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
        try:
            with listener:
                async with in_background(server.serve([listener])) as running:
                    await eventually(lambda: server.started)
                    yield url.removesuffix("/")
                    server.should_exit = True
                    await running
        finally:
            await engine.dispose()

    return serve


async def test_it_is_live_and_ends_by_sigterm_while_somebody_looks(
    served: Process, browser: httpx2.AsyncClient, applier: Applier
) -> None:
    await log_in(browser)
    async with browser.stream("GET", "/live") as stream:
        assert_guarded(stream)
        assert stream.headers["x-accel-buffering"] == "no"
        lines = stream.aiter_lines()
        async for line in lines:
            if "data: <div class" in line:
                break
        await bury(applier, Deposit(1))
        async for line in lines:
            if "need a decision" in line:
                break
        served.send(signal.SIGTERM)
        assert [line async for line in lines][-1:] in ([], [""])
    assert await served.ended() == 0
    assert "Traceback" not in served.output
    assert "ERROR" not in served.output


async def test_so_many_may_watch_and_none_after_he_has_logged_out(
    served: Process, browser: httpx2.AsyncClient
) -> None:
    await log_in(browser)
    async with AsyncExitStack() as watched:
        streams = [
            await watched.enter_async_context(browser.stream("GET", "/live"))
            for _ in range(watching._STREAMS)
        ]
        told = [stream.aiter_lines() for stream in streams]
        for lines in told:
            assert (await anext(lines)).startswith("data: ")
        assert (await browser.get("/live")).status_code == 503
        await browser.post("/logout", data={"csrf": await csrf(browser)})
        for lines in told:
            assert [line async for line in lines][-1:] in ([], [""])
        await log_in(browser)
        async with browser.stream("GET", "/live") as stream:
            assert stream.status_code == 200
            assert (await anext(stream.aiter_lines())).startswith("data: ")


async def test_a_form_whose_sender_goes_away_is_nobodys_mistake(
    served: Process, port: int, browser: httpx2.AsyncClient
) -> None:
    _, cut_off = await asyncio.open_connection("127.0.0.1", port)
    cut_off.write(
        f"POST /login HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\norigin: http://127.0.0.1:{port}\r\n"
        "content-type: application/x-www-form-urlencoded\r\ncontent-length: 100\r\n\r\n"
        "token=".encode()
    )
    await cut_off.drain()
    assert (await browser.get("/login")).status_code == 200
    cut_off.close()
    await cut_off.wait_closed()
    assert (await browser.get("/login")).status_code == 200
    served.send(signal.SIGTERM)
    assert await served.ended() == 0
    assert "Traceback" not in served.output


async def test_connections_without_a_request_keep_nobody_out(
    served: Process, port: int, browser: httpx2.AsyncClient
) -> None:
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(120)]
    for _, writer in silent:
        writer.write(b"GET /login HTTP/1.1\r\nHo")
    assert (await browser.get("/login")).status_code == 200
    for _, writer in silent:
        writer.close()


async def test_connections_without_a_request_make_room_for_others_and_live_overviews_stay(
    serving: Serving,
) -> None:
    async with (
        serving(Few) as origin,
        httpx2.AsyncClient(base_url=origin, headers={"origin": origin}, timeout=PATIENCE) as client,
    ):
        await log_in(client)
        async with AsyncExitStack() as watched:
            streams = [
                await watched.enter_async_context(client.stream("GET", "/live"))
                for _ in range(Few.most - 1)
            ]
            lines = [stream.aiter_lines() for stream in streams]
            for _ in range(20):
                _, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
                watched.callback(writer.close)
            assert (await client.get("/login")).status_code == 200
            for one in lines:
                for _ in range(3):
                    assert (await anext(one)).startswith("data: ")
                    while await anext(one):
                        pass
            assert len(Few.waiting) <= Few.most


async def test_a_live_overview_that_its_client_does_not_take_ends(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_STREAMS", 1)
    async with serving(Short) as origin, httpx2.AsyncClient(base_url=origin) as client:
        client.headers |= {"origin": origin, "connection": "close"}
        await log_in(client)
        asked = client.build_request("GET", "/live").headers.items()
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        deaf.connect(("127.0.0.1", client.base_url.port))
        reader, writer = await asyncio.open_connection(sock=deaf, limit=100)
        lines = ["GET /live HTTP/1.1", *(f"{name}: {value}" for name, value in asked), "", ""]
        writer.write("\r\n".join(lines).encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")

        async def is_over() -> bool:
            async with client.stream("GET", "/live") as stream:
                return stream.status_code == 200

        await eventually(is_over)
        writer.close()


async def test_a_form_that_does_not_arrive_in_time_ends_its_connection(serving: Serving) -> None:
    async with serving(Short) as origin:
        host = origin.removeprefix("http://")
        reader, writer = await asyncio.open_connection(*host.split(":"))
        writer.write(
            f"POST /login HTTP/1.1\r\nhost: {host}\r\norigin: {origin}\r\n"
            "content-type: application/x-www-form-urlencoded\r\ncontent-length: 100\r\n\r\n"
            "token=".encode()
        )
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_headers_without_bounds_are_refused(
    served: Process, browser: httpx2.AsyncClient
) -> None:
    await log_in(browser)
    headers = {"x-large": "x" * 200_000}
    assert (await browser.get("/dead", headers=headers)).status_code == 400
    assert (await browser.get("/dead")).status_code == 200
    assert "Traceback" not in served.output


async def test_a_page_that_nobody_could_log_in_to_is_not_served(start: Start) -> None:
    refused = await start("page")
    assert await refused.ended() == 2
    assert "PIPELINE_PAGE_TOKEN" in refused.output


async def test_mistakes_in_settings_of_service_and_page_are_reported_together(
    start: Start,
) -> None:
    refused = await start("page", batch_size=0, page_port="x", page_token="short", page_prot=1)
    assert await refused.ended() == 2
    for name in "BATCH_SIZE", "PAGE_PORT", "PAGE_TOKEN", "PAGE_PROT":
        assert f"  PIPELINE_{name}: " in refused.output
    assert "short" not in refused.output


async def test_a_database_that_refuses_connections_is_told_at_once(
    start: Start, port: int, browser: httpx2.AsyncClient, unused_tcp_port: int
) -> None:
    nowhere = f"postgresql+asyncpg://x:x@127.0.0.1:{unused_tcp_port}/x"
    page = await start("page", page_token=TOKEN, page_port=port, database_url=nowhere)
    await page.says(f"the page is at http://127.0.0.1:{port}/")
    await log_in(browser)
    answer = await browser.get("/dead")
    assert answer.status_code == 503
    assert f"PostgreSQL at 127.0.0.1:{unused_tcp_port} can&#39;t be used: " in answer.text
    assert "ConnectionRefusedError" in answer.text
    assert "in time" not in answer.text


async def test_the_page_warns_once_of_an_address_that_tls_does_not_secure(
    start: Start, port: int
) -> None:
    page = await start(
        "page", page_token=TOKEN, page_port=port, otlp_endpoint="http://collector:4318"
    )
    await page.says(f"the page is at http://127.0.0.1:{port}/")
    assert page.output.count("are not secured by TLS") == 1
    assert "connections to collector (PIPELINE_OTLP_ENDPOINT)" in page.output
