"""Real object stores: a folder, and an S3-compatible server on loopback."""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from uuid import uuid4

import asyncpg
import pytest
from servers.s3proxy import S3Proxy
from servers.state import Record, StateDirectory

from onceward.archive import days
from onceward.archive.commands import group
from onceward.cli.commands import command_line
from onceward.handlers.staged import StagedEvent
from onceward.object_store import Store
from onceward.retention import partitions
from onceward.retention.maintenance import Round, run_retention
from onceward.settings import Settings

from . import app
from tests.onceward.integration.conftest import Command, commands  # noqa: F401 (fixtures)
from tests.onceward.integration.outgoing import publish_all
from tests.onceward.integration.tcp_proxy import TcpProxy
from tests.servers.programs import running

DAY = date(2020, 1, 1)
OLD = f"outbox_p{DAY:%Y%m%d}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and {"s3", "s3proxy"} & set(item.fixturenames):
            item.add_marker(pytest.mark.full)  # a folder holds in `make test`


@pytest.fixture(scope="session")
def s3proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Proxy]:
    """Run an S3-compatible server."""
    directory = StateDirectory(tmp_path_factory.mktemp("s3proxy"))
    server = S3Proxy(directory, "s3proxy", Record())
    with running(server):
        yield server


@pytest.fixture
def s3(s3proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> S3Proxy:
    """Let the environment lead to that server, and the archive into a bucket of the test's own."""
    for name, value in s3proxy.environment().items():
        monkeypatch.setenv(name, value)
    url = s3proxy.bucket(f"test-{uuid4().hex[:12]}")
    monkeypatch.setenv("PIPELINE_ARCHIVE_URL", f"{url}/archives")
    return s3proxy


@pytest.fixture
async def proxy(s3: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TcpProxy]:
    """Return the proxy through which S3 is reached; nobody is patient with who is behind it."""
    monkeypatch.setattr(days, "REQUEST_SECONDS", 1)
    async with TcpProxy("127.0.0.1", s3.port).listening() as one:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{one.port}")
        yield one


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the archive be in a folder of the test's own, and return its path."""
    path = str(tmp_path_factory.mktemp("the archive"))
    monkeypatch.setenv("PIPELINE_ARCHIVE_URL", f"file://{path.replace(' ', '%20')}")
    return path


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.full)])
def store(request: pytest.FixtureRequest) -> Store:
    """Return each of the stores, with the environment that leads there."""
    request.getfixturevalue(request.param)
    opened = app.archive.open()
    assert opened is not None
    return opened


@dataclass
class House:
    """A database with an old day of the outbox, and who keeps it in order."""

    db: asyncpg.Connection
    settings: Callable[..., Settings]

    async def fill(self, events: int, *, payload: int = 2) -> None:
        """Put published events into the old day."""
        await self.insert(DAY, events, payload)
        await self.publish()

    async def insert(self, day: date, events: int, payload: int) -> None:
        """Put events into a day; their payloads can't be compressed."""
        await self.db.execute(
            "INSERT INTO pipeline.outbox"
            " (topic, key, payload, event_id, source, type, content_type, created_at)"
            " SELECT 't', 'ada', (SELECT string_agg(sha256((n || '-' || m)::bytea), '')"
            "   FROM generate_series(0, $2::int / 32) m), 'e' || n, '/bank', 'x', 'y', $3"
            " FROM generate_series(1, $1::int) n",
            events,
            payload,
            datetime(day.year, day.month, day.day, 12, tzinfo=UTC),
        )

    async def publish(self) -> None:
        """Move every shard's progress over all that is visible, as a relay does."""
        await run_retention(self.db, self.settings())
        await publish_all(self.db)

    async def stage(self, *events: StagedEvent) -> None:
        """Put these published events into the old day."""
        for one in events:
            await self.db.execute(
                f"INSERT INTO pipeline.outbox ({', '.join(one._fields)}, created_at)"
                f" VALUES ({', '.join(f'${n}' for n in range(1, len(one) + 2))})",
                *one,
                datetime(DAY.year, DAY.month, DAY.day, 12, tzinfo=UTC),
            )
        await self.publish()

    async def keep(self, **changes: object) -> Round:
        """Do a round of retention, with the archive."""
        return await run_retention(self.db, self.settings(**changes), archive=app.archive)

    async def rows(self, day: date = DAY) -> int | None:
        """Return how many events the day's table has; None when it is gone."""
        name = f"outbox_p{day:%Y%m%d}"
        if not await partitions.like(self.db, name):
            return None
        found: int = await self.db.fetchval(f"SELECT count(*) FROM pipeline.{name}")
        return found


async def make_day(db: asyncpg.Connection, day: date = DAY) -> None:
    """Make the table of a day that is long over."""
    bounds = f"FROM ('{day} 00:00+00') TO ('{day + timedelta(days=1)} 00:00+00')"
    await partitions.attach(db, "outbox", f"outbox_p{day:%Y%m%d}", bounds)


@pytest.fixture
async def house(
    db: asyncpg.Connection,
    settings: Callable[..., Settings],
) -> House:
    """Return a database with an old day, which is empty."""
    await make_day(db)
    return House(db, settings)


@pytest.fixture
def service(commands: Callable[..., Command]) -> Command:  # noqa: F811
    """Call `service archive …`."""
    return commands(group(app.archive))


@pytest.fixture
def retention(commands: Callable[..., Command]) -> Command:  # noqa: F811
    """Call `service retention …`."""
    return commands(command_line(app.service), "retention")
