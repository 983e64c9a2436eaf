"""Real servers for all tests: a database and topics of its own for every test."""

import asyncio
import gc
import logging
import os
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer, ConsumerRecord
from sqlalchemy import make_url

from onceward import Service
from onceward.observe import logs
from onceward.observe.health import Health
from onceward.relay.relay import Relay
from onceward.runtime import Part, serve
from onceward.servers.consumer import KafkaConsumer
from onceward.settings import Settings

from .contract.bank import Base
from .servers.databases import built, copied, drop_databases, migrations_of_the_engine, url_of
from .servers.pooler import POOLED, pooling
from .servers.scheduling import pytest_xdist_make_scheduler  # noqa: F401 (a hook)
from .servers.topics import create_topic, delete_topics
from .servers.waiting import PATIENCE, let_servers_be_slow

# With the HTTP API the fixture `harness` has `receive`, too. The engine's distribution always has
# that package, but requires FastAPI only as an extra.
HAS_API = find_spec("onceward.http") is not None and find_spec("fastapi") is not None
pytest_plugins = ["onceward.http.testing" if HAS_API else "onceward.testing.plugin"]

DATABASE_URL, KAFKA = "PIPELINE_DATABASE_URL", "PIPELINE_KAFKA_BOOTSTRAP_SERVERS"
SERVERS = {"apicurio", "harness_database", "kafka", "s3proxy", "server_url", "store_url"}
"""Fixtures that speak to a server."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and SERVERS & set(item.fixturenames):
            item.add_marker(pytest.mark.integration)


def pytest_collection_finish() -> None:
    # Modules stay: to look at them after every test would take most of the time that it takes.
    gc.freeze()


@pytest.fixture(autouse=True)
def collected(request: pytest.FixtureRequest) -> Iterator[None]:
    """Collect garbage after every test with servers, so that a leak is reported where it is."""
    yield
    if request.node.get_closest_marker("integration"):
        gc.collect()


@pytest.fixture(scope="session", autouse=True)
def connections_tell_their_origin() -> Iterator[None]:
    """Let a connection that is never closed say where it was opened, as in asyncio's debug mode."""
    opened = asyncpg.Connection.__init__

    def init(self: asyncpg.Connection, *args: Any) -> None:
        opened(self, *args)
        self._source_traceback = "".join(traceback.format_stack(limit=20))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncpg.Connection, "__init__", init)
        yield


@pytest.fixture(autouse=True)
def log_as_before(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Undo what `logs.configure` does to the process: its stream is closed after the test."""
    levels = {logger: logger.level for logger in _all_loggers()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.Logger, "makeRecord", logging.Logger.makeRecord)
        patch.setattr(caplog.handler, "formatter", caplog.handler.formatter)
        yield
    root = logging.getLogger()
    for handler in [*root.handlers]:
        if handler.name == logs._HANDLER:
            root.removeHandler(handler)
    for logger in _all_loggers():
        if logger.level != (level := levels.get(logger, logging.NOTSET)):
            logger.setLevel(level)  # clears the caches of all loggers


def _all_loggers() -> list[logging.Logger]:
    root = logging.getLogger()
    named = root.manager.loggerDict.values()
    return [root, *(one for one in named if isinstance(one, logging.Logger))]


@pytest.fixture(scope="session", autouse=True)
def no_settings_of_the_shell() -> Iterator[None]:
    """Let tests see nothing of the environment's settings but where the servers are."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [*os.environ]:
            if name.startswith("PIPELINE_") and name not in (DATABASE_URL, KAFKA):
                patch.delenv(name)
        yield


@pytest.fixture(scope="session", autouse=True)
def slow_servers() -> None:
    """Let commands wait for slow servers."""
    let_servers_be_slow()


@pytest.fixture(scope="session")
def server_url() -> str:
    """URL of the PostgreSQL server that `make test` has started."""
    return _environment(DATABASE_URL)


@pytest.fixture(scope="session")
def kafka() -> str:
    """Bootstrap servers of the Kafka that `make test` has started."""
    return _environment(KAFKA)


def _environment(name: str) -> str:
    try:
        return os.environ[name]
    except KeyError:
        pytest.fail(f"{name} is not set: run these tests by `make test`", pytrace=False)


@pytest.fixture(scope="session")
def way_in(server_url: str) -> Iterator[str]:
    """URL that services reach the server by: directly, or `make test-pooler`: by PgBouncer."""
    if POOLED:
        with pooling(server_url) as pooler:
            yield pooler.url
    else:
        yield server_url


@pytest.fixture(scope="session")
def template(server_url: str) -> Iterator[str]:
    """Name of a migrated database, with a bank's tables, that every test gets a copy of."""
    with built(server_url, migrations_of_the_engine(), Base.metadata) as name:
        yield name


@pytest.fixture(scope="session")
def used_databases(server_url: str, template: str) -> Iterator[list[str]]:
    """Databases to be dropped: many at once, because every DROP waits for a checkpoint."""
    names: list[str] = []
    yield names
    asyncio.run(drop_databases(server_url, names))


@pytest.fixture
async def database_url(
    server_url: str, way_in: str, template: str, used_databases: list[str]
) -> AsyncIterator[str]:
    """URL of a database of the test's own, a copy of the template."""
    name = await copied(server_url, template)
    yield url_of(way_in, name)
    used_databases.append(name)
    if len(used_databases) > 50:
        await drop_databases(server_url, used_databases)


@pytest.fixture
def settings(database_url: str, kafka: str) -> Callable[..., Settings]:
    """Make settings; keywords change them.

    Pauses are short. Time limits are so long that a slow machine exceeds none: a test of a limit
    sets its own.
    """

    def make(**changes: object) -> Settings:
        quick: dict[str, object] = {
            "database_url": database_url,
            "database_pooler": POOLED,
            "kafka_bootstrap_servers": kafka,
            "kafka_session_timeout": 120,
            "transaction_timeout": 60,
            "lock_timeout": 4,
            "backlog_lease": 120,
            "retry_pause": 0.2,
            "offset_commit_interval": 0.2,
            "relay_lease": 2,
            # Payloads that tests need to be too large are easily compressed.
            "relay_compression": "none",
        }
        return Settings.model_validate(quick | changes)

    return make


@pytest.fixture
def direct_url(server_url: str, database_url: str) -> str:
    """URL of the test's database, past any pooler."""
    return url_of(server_url, make_url(database_url).database or "")


@pytest.fixture
async def connect(direct_url: str) -> AsyncIterator[Callable[[], Awaitable[asyncpg.Connection]]]:
    """Open connections to the test's database, past any pooler, closed at the test's end."""
    opened: list[asyncpg.Connection] = []

    async def open_one() -> asyncpg.Connection:
        opened.append(await asyncpg.connect(direct_url.replace("+asyncpg", "")))
        return opened[-1]

    yield open_one
    for connection in opened:
        connection.terminate()


@pytest.fixture
async def db(connect: Callable[[], Awaitable[asyncpg.Connection]]) -> asyncpg.Connection:
    """Return a connection to the test's database."""
    return await connect()


@pytest.fixture
async def producer(kafka: str) -> AsyncIterator[AIOKafkaProducer]:
    """Return a producer."""
    async with AIOKafkaProducer(bootstrap_servers=kafka, enable_idempotence=True) as one:
        yield one


@pytest.fixture(scope="session")
def used_topics(kafka: str) -> Iterator[list[str]]:
    """Topics to be deleted when all tests have ended."""
    names: list[str] = []
    yield names
    if names:
        asyncio.run(delete_topics(kafka, names))


@pytest.fixture
def new_topic(kafka: str, used_topics: list[str]) -> Callable[..., Awaitable[str]]:
    """Create a topic of the test's own."""

    async def create(partitions: int = 1, **configs: str) -> str:
        used_topics.append(f"test-{uuid4().hex[:12]}")
        await create_topic(kafka, used_topics[-1], partitions, **configs)
        return used_topics[-1]

    return create


Running = Callable[..., AbstractAsyncContextManager[Health]]


@pytest.fixture
def running(settings: Callable[..., Settings]) -> Running:
    """Run a service inside the test, as long as the `with` block lasts."""

    @asynccontextmanager
    async def run(
        service: Service,
        parts: Part = Part.CONSUME | Part.RELAY,
        *,
        make_relay: Callable[..., Relay] = Relay,
        **changes: object,
    ) -> AsyncIterator[Health]:
        health, stopping = Health(stall_after=3_600), asyncio.Event()
        chosen = settings(**changes)
        work = serve(
            service, chosen, parts, health=health, stopping=stopping, make_relay=make_relay
        )
        task = asyncio.create_task(work)
        try:
            yield health
        finally:
            stopping.set()
            await asyncio.wait_for(task, PATIENCE)

    return run


Refusing = Callable[..., Coroutine[Any, Any, None]]


@pytest.fixture
def refusing(settings: Callable[..., Settings]) -> Refusing:
    """Run a service that does not start: raises its error."""

    async def run(service: Service, parts: Part, **changes: object) -> None:
        health, stopping = Health(stall_after=3_600), asyncio.Event()
        serving = serve(service, settings(**changes), parts, health=health, stopping=stopping)
        await asyncio.wait_for(serving, PATIENCE)

    return run


Records = Callable[..., Awaitable[list[ConsumerRecord]]]


@pytest.fixture
def records(kafka: str) -> Records:
    """Read a topic from the beginning, until it has returned `count` records."""

    async def read(topic: str, count: int, patience: float = PATIENCE) -> list[ConsumerRecord]:
        found: list[ConsumerRecord] = []
        async with KafkaConsumer(
            topic, bootstrap_servers=kafka, auto_offset_reset="earliest"
        ) as one:
            until = asyncio.get_running_loop().time() + patience
            while len(found) < count:
                for batch in (await one.getmany(timeout_ms=200)).values():
                    found += batch
                assert asyncio.get_running_loop().time() < until, f"{len(found)} of {count} records"
        return found

    return read
