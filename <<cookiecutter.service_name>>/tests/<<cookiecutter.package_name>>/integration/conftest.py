"""Real servers for your tests: a migrated database of its own for each, and the service in it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaConsumer, ConsumerRecord
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from alembic.config import Config
from sqlalchemy import MetaData

from pipeline.health import Health

from <<cookiecutter.package_name>>.main import service

from tests.conftest import Running
from tests.servers.databases import built
from tests.servers.waiting import PATIENCE, eventually

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def template(server_url: str) -> Iterator[str]:
    """Name of the database that `database_url` is a copy of, migrated as the service's own."""
    with built(server_url, Config(ROOT / "alembic.ini"), MetaData()) as name:
        yield name


@pytest.fixture(scope="session")
def partitions(kafka: str) -> int:
    """Create the topics of the service where they are missing; how many partitions it reads."""

    async def create() -> int:
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
        await admin.start()
        try:
            await admin.create_topics([NewTopic(topic, 1, 1) for topic in sorted(service.topics)])
            partitions = [0]
            async with asyncio.timeout(PATIENCE):
                while not all(partitions):  # a topic that was just created has none at first
                    described = await admin.describe_topics(sorted(service.handlers.topics))
                    partitions = [len(topic["partitions"]) for topic in described]
        finally:
            await admin.close()
        return sum(partitions)

    return asyncio.run(create())


RunningService = Callable[[], AbstractAsyncContextManager[Health]]


@pytest.fixture
def running_service(
    running: Running, db: asyncpg.Connection, partitions: int
) -> RunningService:
    """Run the service inside the test, as long as the `with` block lasts.

    In a group and a database of its own. It reads what is sent inside the block; others may be
    sending too, so give your events keys and ids that nobody else has.
    """

    @asynccontextmanager
    async def run() -> AsyncIterator[Health]:
        ours = replace(service, name=f"test-{uuid4().hex[:12]}")
        async with running(ours, consumer_start="latest") as health:
            await eventually(begun)
            yield health

    async def begun() -> bool:
        return bool(await db.fetchval("SELECT count(*) FROM pipeline.position") == partitions)

    return run


Published = Callable[[str, str, int], Awaitable[list[ConsumerRecord]]]


@pytest.fixture
async def published(kafka: str, partitions: int) -> AsyncIterator[Published]:
    """Wait for as many new records with this key in a topic, and return them in their order."""
    async with AIOKafkaConsumer(*service.topics, bootstrap_servers=kafka) as consumer:
        await consumer.seek_to_end()

        async def read(topic: str, key: str, count: int) -> list[ConsumerRecord]:
            found: list[ConsumerRecord] = []
            async with asyncio.timeout(PATIENCE):
                while len(found) < count:
                    record = await consumer.getone()
                    if (record.topic, record.key) == (topic, key.encode()):
                        found.append(record)
            return found

        yield read
