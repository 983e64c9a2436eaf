"""A page on the test's own database, and a browser's way of asking it."""

import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import ModuleType

import asyncpg
import httpx2
import pytest

from onceward.page.app import Page
from onceward.page.settings import PageSettings
from onceward.servers.database import create_engine
from onceward.settings import Settings

from tests.contract.bank import Deposit
from tests.onceward.integration.applier import Applier, NewApplier
from tests.onceward.integration.bank import Bank
from tests.onceward.integration.conftest import bank, new_applier  # noqa: F401 (fixtures)
from tests.onceward.integration.test_dead import bury

TOKEN = "a token of the tests"
ORIGIN = "http://localhost:8081"
PAGES = [
    *("/", "/dead", "/events", "/backlog", "/scheduled", "/stops", "/positions"),
    *("/retention", "/doctor", "/words"),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)


Opened = Callable[..., AbstractAsyncContextManager[httpx2.AsyncClient]]


@pytest.fixture
def opened(
    bank: Bank,  # noqa: F811
    settings: Callable[..., Settings],
    database_url: str,
    kafka: str,
) -> Opened:
    """Open a page to somebody who is not logged in, and comes from an address."""

    @asynccontextmanager
    async def open_one(
        address: str = "127.0.0.1",
        url: str = database_url,
        brokers: str = kafka,
        backlog_lease: float = 120.0,
        modules: Sequence[ModuleType] = (),
        **chosen: object,
    ) -> AsyncIterator[httpx2.AsyncClient]:
        of_service = settings(
            database_url=url, kafka_bootstrap_servers=brokers, backlog_lease=backlog_lease
        )
        engine = create_engine(of_service, name=bank.service.name)
        how = PageSettings.model_validate(chosen or {"token": TOKEN})
        page = Page(bank.service, of_service, how, engine, modules)
        transport = httpx2.ASGITransport(page.app(), client=(address, 1))
        try:
            async with httpx2.AsyncClient(
                transport=transport, base_url=ORIGIN, headers={"origin": ORIGIN}
            ) as client:
                yield client
        finally:
            await engine.dispose()

    return open_one


async def log_in(client: httpx2.AsyncClient) -> None:
    """Log in as Ann."""
    done = await client.post("/login", data={"name": "ann", "token": TOKEN})
    assert done.status_code == 303


@pytest.fixture
async def ann(opened: Opened) -> AsyncIterator[httpx2.AsyncClient]:
    """Return the page as Ann sees it, who is logged in."""
    async with opened() as client:
        await log_in(client)
        yield client


async def csrf(client: httpx2.AsyncClient, path: str = "/dead") -> str:
    """Return what the forms of a page carry."""
    found = re.search('name="csrf" value="([^"]+)"', (await client.get(path)).text)
    assert found
    return found[1]


@pytest.fixture
async def applier(bank: Bank, new_applier: NewApplier) -> Applier:  # noqa: F811
    """Return the applier of the bank."""
    return await new_applier(bank.handlers, topic=bank.deposits)


async def buried(applier: Applier, db: asyncpg.Connection, *deposits: Deposit) -> str:
    """Store deposits as dead letters, and return the id of the first."""
    await bury(applier, *deposits)
    id: str = await db.fetchval(
        "SELECT left(encode(key, 'hex'), 16) FROM pipeline.backlog ORDER BY \"offset\" LIMIT 1"
    )
    return id


def assert_guarded(answer: httpx2.Response) -> None:
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
