"""Real servers for the engine's tests: a database and topics of its own for every test."""

import asyncio
import gc
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
import typer
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from alembic import command
from alembic.config import Config
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from typer.testing import CliRunner, Result

from pipeline import Handlers, Service, dead_commands
from pipeline.breaker import Breaker
from pipeline.caller import Caller
from pipeline.consume import Consume
from pipeline.database import autocommitting, create_engine
from pipeline.filters import Filters
from pipeline.health import Health
from pipeline.inbox import Slot
from pipeline.lanes import Lanes
from pipeline.lead import Lead
from pipeline.retention import keep_house
from pipeline.runtime import Part, serve
from pipeline.settings import Settings

from .bank import Bank, Base
from .clock import Clock
from .desk import Desk, NewDesk
from .pooler import POOLED, pooling

HOME = Path(__file__).with_name("alembic")
"""Where processes work: its `alembic.ini` names what the tests' databases are migrated to."""
PATIENCE = 120.0
"""Seconds that a test waits for what must happen."""

PAST_ANY_POOLER = (
    # They speak to servers of their own, or to none.
    *("clients", "crash_matrix", "nasty_records", "outages", "restore", "tls"),
    # They are about Kafka, or about who has which partition.
    *("broker", "lead", "membership", "offsets", "publisher", "topics"),
    # They are about plans and sizes, which are the server's.
    *("aging", "backlog_plans", "pace", "plans", "volume"),
    # They are about processes that die, and about what a person asks and is told.
    *("alerts", "commands", "dead_events", "doctor", "killers", "revisions", "status"),
)
"""Tests that would be the same behind a pooler."""
collect_ignore = [f"test_{name}.py" for name in PAST_ANY_POOLER] if POOLED else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.integration)


def pytest_collection_finish() -> None:
    # Modules stay: to look at them after every test would take most of the time that it takes.
    gc.freeze()


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collect garbage after every test, so that what leaks is told of the test that leaks it."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def server_url() -> str:
    """URL of the PostgreSQL server that `make test` has started."""
    return _environment("PIPELINE_DATABASE_URL")


@pytest.fixture(scope="session")
def kafka() -> str:
    """Bootstrap servers of the Kafka that `make test` has started."""
    return _environment("PIPELINE_KAFKA_BOOTSTRAP_SERVERS")


def _environment(name: str) -> str:
    try:
        return os.environ[name]
    except KeyError:
        pytest.exit(f"{name} is not set: run these tests by `make test`", returncode=2)


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
    """Name of a migrated database that every test gets a copy of."""
    name = f"template_{uuid4().hex[:12]}"
    asyncio.run(administer(server_url, f"CREATE DATABASE {name}"))
    build(_database_url(server_url, name))
    yield name
    asyncio.run(administer(server_url, f"DROP DATABASE {name} WITH (FORCE)"))


def build(url: str) -> None:
    """Make the engine's and the bank's tables in an empty database."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPELINE_DATABASE_URL", url)
        upgrade()
    asyncio.run(_furnish(url))


def upgrade() -> None:
    """Migrate the engine's tables, in the database that the environment names."""
    config = Config()
    config.set_main_option("script_location", str(HOME))
    config.set_main_option("version_locations", "pipeline:migrations/versions")
    config.set_main_option("path_separator", "newline")
    command.upgrade(config, "heads")


@contextmanager
def migrated(server_url: str, config: Config) -> Iterator[str]:
    """Make a database as `service migrate` does, to be copied, and drop it at the end."""
    name = f"template_{uuid4().hex[:12]}"
    asyncio.run(administer(server_url, f"CREATE DATABASE {name}"))
    url = _database_url(server_url, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPELINE_DATABASE_URL", url)
        command.upgrade(config, "heads")
    asyncio.run(_keep_house(url))
    yield name
    asyncio.run(administer(server_url, f"DROP DATABASE {name} WITH (FORCE)"))


async def _keep_house(url: str) -> None:
    engine = create_async_engine(url)
    async with autocommitting(engine) as driver:
        await keep_house(driver, _settings(url, "unused:9092"))
    await engine.dispose()


async def _furnish(url: str) -> None:
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with autocommitting(engine) as driver:
        await keep_house(driver, _settings(url, "unused:9092"))
    await engine.dispose()


async def administer(server_url: str, statement: str) -> None:
    """Execute a statement on the server, in no database of a test."""
    connection = await asyncpg.connect(server_url.replace("+asyncpg", ""))
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def _database_url(server_url: str, database: str) -> str:
    return make_url(server_url).set(database=database).render_as_string(hide_password=False)


def _settings(database_url: str, kafka: str, **changes: object) -> Settings:
    quick: dict[str, object] = {
        "database_url": database_url,
        "database_pooler": POOLED,
        "kafka_bootstrap_servers": kafka,
        "kafka_session_timeout": 6,
        "transaction_timeout": 5,
        "lock_timeout": 2,
        "retry_pause": 0.2,
        "offset_commit_interval": 0.2,
        "relay_lease": 2,
    }
    return Settings.model_validate(quick | changes)


@pytest.fixture(scope="session")
def used_databases(server_url: str, template: str) -> Iterator[list[str]]:
    """Databases to be dropped: many at once, because every DROP waits for a checkpoint."""
    names: list[str] = []
    yield names
    asyncio.run(drop_databases(server_url, names))


async def drop_databases(server_url: str, names: list[str]) -> None:
    """Drop them all at once, and forget their names."""
    statements = [f"DROP DATABASE {name} WITH (FORCE)" for name in names]
    names.clear()
    await asyncio.gather(*(administer(server_url, statement) for statement in statements))


@pytest.fixture
async def database_url(
    server_url: str, way_in: str, template: str, used_databases: list[str]
) -> AsyncIterator[str]:
    """URL of a database of the test's own, migrated, with the bank's tables."""
    name = f"test_{uuid4().hex[:12]}"
    await administer(server_url, f"CREATE DATABASE {name} TEMPLATE {template}")
    yield _database_url(way_in, name)
    used_databases.append(name)
    if len(used_databases) > 15:
        await drop_databases(server_url, used_databases)


@pytest.fixture
def settings(database_url: str, kafka: str) -> Callable[..., Settings]:
    """Make settings that are quick to give up; keywords change them."""

    def make(**changes: object) -> Settings:
        url = str(changes.pop("database_url", database_url))
        return _settings(url, kafka, **changes)

    return make


@pytest.fixture
def quick(settings: Callable[..., Settings]) -> Callable[..., Settings]:
    """Make settings of a relay that soon tries again what Kafka refuses."""

    def make(**changes: object) -> Settings:
        return settings(**{"unsent_pause": 0.1, "relay_lease": 3, **changes})

    return make


@pytest.fixture
def direct_url(server_url: str, database_url: str) -> str:
    """URL of the test's database, past any pooler."""
    return _database_url(server_url, make_url(database_url).database or "")


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
async def clock(db: asyncpg.Connection) -> Clock:
    """Return the clock of the test's database, which can be set."""
    one = Clock(db)
    await one.put_up()
    return one


@pytest.fixture
async def producer(kafka: str) -> AsyncIterator[AIOKafkaProducer]:
    """Return a producer."""
    async with AIOKafkaProducer(bootstrap_servers=kafka, enable_idempotence=True) as one:
        yield one


@pytest.fixture
def new_topic(kafka: str) -> Callable[..., Awaitable[str]]:
    """Create a topic of the test's own."""

    async def create(partitions: int = 1, **configs: str) -> str:
        name = f"test-{uuid4().hex[:12]}"
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
        await admin.start()
        try:
            await admin.create_topics([NewTopic(name, partitions, 1, topic_configs=configs)])
        finally:
            await admin.close()
        return name

    return create


@pytest.fixture
async def bank(new_topic: Callable[..., Awaitable[str]]) -> Bank:
    """Return a bank with topics and a group of its own, of one partition each."""
    return Bank(
        deposits=await new_topic(), balances=await new_topic(), name=f"bank-{uuid4().hex[:8]}"
    )


@pytest.fixture
def unborn() -> Bank:
    """Return a bank whose topics do not exist."""
    name = uuid4().hex[:12]
    return Bank(deposits=f"test-{name}-in", balances=f"test-{name}-out", name=f"bank-{name}")


@pytest.fixture
def missing() -> str:
    """Return the name of a topic that does not exist."""
    return f"test-{uuid4().hex[:12]}"


Command = Callable[..., Awaitable[Result]]


@pytest.fixture
def commands(
    database_url: str, kafka: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[typer.Typer], Command]]:
    """Call commands in a thread, as a process would."""
    monkeypatch.setenv("PIPELINE_DATABASE_URL", database_url)
    monkeypatch.setenv("PIPELINE_DATABASE_POOLER", str(POOLED))
    monkeypatch.setenv("PIPELINE_KAFKA_BOOTSTRAP_SERVERS", kafka)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(HOME)

    def of(group: typer.Typer) -> Command:
        async def command(*arguments: str, input: str | None = None) -> Result:
            return await asyncio.to_thread(CliRunner().invoke, group, arguments, input=input)

        return command

    root = logging.getLogger()
    level, handlers = root.level, [*root.handlers]
    yield of
    # One that serves configures the log, for the process.
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture
def service(bank: Bank, commands: Callable[[typer.Typer], Command]) -> Command:
    """Call `service dead …` of a service that has this bank's handlers."""
    return commands(dead_commands.group(bank.service))


def complaint(done: Result) -> str:
    """Return what a command has complained of, without the frame around it."""
    return " ".join(done.stderr.replace("│", " ").split())


Running = Callable[..., AbstractAsyncContextManager[Health]]


@pytest.fixture
def running(settings: Callable[..., Settings]) -> Running:
    """Run a service inside the test, as long as the `with` block lasts."""

    @asynccontextmanager
    async def run(
        service: Service, parts: Part = Part.CONSUME | Part.RELAY, **changes: object
    ) -> AsyncIterator[Health]:
        health, stopping = Health(stall_after=3_600), asyncio.Event()
        chosen = settings(**changes)
        task = asyncio.create_task(serve(service, chosen, parts, health=health, stopping=stopping))
        try:
            yield health
        finally:
            stopping.set()
            await asyncio.wait_for(task, PATIENCE)

    return run


async def eventually(
    condition: Callable[[], bool | Awaitable[bool]], patience: float = PATIENCE
) -> None:
    """Wait until the condition holds; fails the test when it does not in time."""
    deadline = asyncio.get_running_loop().time() + patience
    while True:
        holds = condition()
        if await holds if isinstance(holds, Awaitable) else holds:
            return
        if asyncio.get_running_loop().time() > deadline:
            pytest.fail(f"did not happen within {patience} s")
        await asyncio.sleep(0.02)


Records = Callable[..., Awaitable[list[ConsumerRecord]]]


@pytest.fixture
def records(kafka: str) -> Records:
    """Read a topic from the beginning, until it has returned `count` records."""

    async def read(topic: str, count: int, patience: float = PATIENCE) -> list[ConsumerRecord]:
        found: list[ConsumerRecord] = []
        async with AIOKafkaConsumer(
            topic, bootstrap_servers=kafka, auto_offset_reset="earliest"
        ) as one:
            async with asyncio.timeout(patience):
                while len(found) < count:
                    for batch in (await one.getmany(timeout_ms=200)).values():
                        found += batch
        return found

    return read


@pytest.fixture
async def new_desk(settings: Callable[..., Settings]) -> AsyncIterator[NewDesk]:
    """Make desks: partitions whose batches the test applies itself, without Kafka."""
    engines: list[AsyncEngine] = []

    async def make(
        handlers: Handlers,
        *,
        topic: str,
        partition: int = 0,
        **changes: object,
    ) -> Desk:
        group = "desk"
        chosen = settings(**changes)
        engines.append(create_engine(chosen, name=group))
        health = Health(stall_after=PATIENCE)
        breaker = Breaker(keys=chosen.breaker_keys, pause=chosen.retry_pause, health=health)
        filters = Filters(mebibytes=chosen.inbox_filter_mebibytes)
        parked, called = asyncio.Event(), asyncio.Event()
        consume = Consume(
            engines[-1],
            group=group,
            source=f"/{group}",
            settings=chosen,
            breaker=breaker,
            filters=filters,
            handlers=handlers,
            room=Lead(0).room,
            staged=lambda _: None,
            parked=parked.set,
            called=called.set,
        )
        common: dict[str, Any] = {
            "handlers": handlers,
            "settings": chosen,
            "breaker": breaker,
            "health": health,
        }
        lanes = Lanes(
            engines[-1],
            consume,
            workers=chosen.backlog_workers,
            parked=parked,
            **common,
        )
        caller = Caller(
            engines[-1],
            consume,
            group=group,
            parked=called,
            **common,
        )
        slot = Slot(group, topic, partition)
        return Desk(engines[-1], consume, lanes, caller, health, handlers, slot, filters)

    yield make
    for engine in engines:
        await engine.dispose()


@pytest.fixture
async def ledger(new_desk: NewDesk) -> tuple[Bank, Desk]:
    """Return a bank without topics, and the desk of its one partition."""
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    return bank, await new_desk(bank.handlers, topic=bank.deposits)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what the engine tells telemetry, by outcome."""
    counted: Counter[str] = Counter()

    def processed(topic: str, consumer: str, outcome: str, count: int, group: str) -> None:
        counted[outcome] += count

    monkeypatch.setattr("pipeline.telemetry.processed", processed)
    return counted


async def histories(db: asyncpg.Connection) -> dict[str, list[int]]:
    """Return the deposits of every account, in the order in which they were applied."""
    rows = await db.fetch("SELECT id, history FROM account")
    return {row["id"]: [int(part) for part in row["history"].split(",") if part] for row in rows}


async def position_of(db: asyncpg.Connection, topic: str, partition: int = 0) -> int | None:
    """Return the position stored of a partition; tests have one group in a database."""
    position: int | None = await db.fetchval(
        "SELECT next_offset FROM pipeline.position WHERE topic = $1 AND partition = $2",
        topic,
        partition,
    )
    return position


def position_reaches(
    db: asyncpg.Connection, topic: str, offset: int, partition: int = 0
) -> Callable[[], Awaitable[bool]]:
    """Return the question whether the position stored is at `offset`, for `eventually`."""

    async def is_there() -> bool:
        return await position_of(db, topic, partition) == offset

    return is_there
