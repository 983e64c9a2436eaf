"""Real servers for your tests: for each a migrated database, topics and a group of its own.

The service may run beside them, for development: tests neither send it anything nor read what it
publishes. `topics("…")` returns the name of the topic that a test has in the place of one.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from aiokafka import ConsumerRecord
from alembic.config import Config
from sqlalchemy import MetaData

from onceward.events.event import declared_events
from onceward.observe.health import Health

from <<cookiecutter.package_name>>.main import service

from tests.conftest import Running
from tests.servers.databases import built
from tests.servers.topics import Rename, following, own_topics

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def template(server_url: str) -> Iterator[str]:
    """Name of the database that `database_url` is a copy of, migrated as the service's own."""
    with built(server_url, Config(ROOT / "alembic.ini"), MetaData()) as name:
        yield name


@pytest.fixture
async def topics(kafka: str, used_topics: list[str], monkeypatch: pytest.MonkeyPatch) -> Rename:
    """Return the function to the name of the test's own topic: `topics("lockers")`."""
    read = service.handlers.topics
    return await own_topics(kafka, read, declared_events(), used_topics, monkeypatch)


RunningService = Callable[[], AbstractAsyncContextManager[Health]]


@pytest.fixture
def running_service(running: Running, topics: Rename) -> RunningService:
    """Run the service inside the test, as long as the `with` block lasts."""
    ours = replace(
        service,
        name=f"test-{uuid4().hex[:12]}",
        handlers=service.handlers.with_topics(topics),
    )
    return lambda: running(ours)


Published = Callable[[str, str, int], Awaitable[list[ConsumerRecord]]]


@pytest.fixture
def published(kafka: str, topics: Rename) -> Published:
    """Wait for as many records with this key in a topic, and return them in their order."""

    async def read(topic: str, key: str, count: int) -> list[ConsumerRecord]:
        async with following(kafka, topics(topic)) as tail:
            await tail.until(lambda: len(tail.of(key)) >= count)
            return tail.of(key)

    return read
