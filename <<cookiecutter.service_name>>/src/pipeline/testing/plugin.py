"""The pytest plugin: `pytest_plugins = ["pipeline.testing.plugin"]` in the top `conftest.py`.

The service's tests define the fixture `harness_service`, and use the fixture `harness`.
"""

import os
from collections.abc import AsyncIterator, Iterator

import pytest
from alembic.config import Config

from pipeline.service import Service

from .databases import Migrate, ResettableDatabase, resettable_database, with_alembic
from .harness import Harness, open_harness

_URL = "PIPELINE_DATABASE_URL"


@pytest.fixture(scope="session")
def harness_service() -> Service:
    """The service whose handlers are tested: define this fixture in a `conftest.py`."""
    pytest.fail(
        "the fixture `harness` does not know the service. Write into the conftest.py of its tests:"
        '\n\n    @pytest.fixture(scope="session")\n    def harness_service() -> Service:\n'
        "        return service  # that of main.py",
        pytrace=False,
    )


@pytest.fixture(scope="session")
def harness_migrate(pytestconfig: pytest.Config) -> Migrate:
    """The function that makes the tables in an empty database: by the service's `alembic.ini`."""
    return with_alembic(Config(pytestconfig.rootpath / "alembic.ini"))


@pytest.fixture(scope="session")
def harness_database(
    harness_service: Service, harness_migrate: Migrate
) -> Iterator[ResettableDatabase]:
    """The migrated database of the session, on the server that the environment names."""
    if not (server := os.environ.get(_URL)):
        pytest.fail(
            f"{_URL} is not set, and the fixture `harness` needs PostgreSQL (no Kafka): run"
            " `make test`; or run `make up` once, and in this shell"
            ' `eval "$(.venv/bin/python dev/stack.py env)"`',
            pytrace=False,
        )
    with resettable_database(server, harness_service, harness_migrate) as database:
        yield database


@pytest.fixture
async def harness(
    harness_service: Service, harness_database: ResettableDatabase
) -> AsyncIterator[Harness]:
    """The service, without Kafka, on a database that holds what the migrations have put there."""
    async with open_harness(harness_service, harness_database) as one:
        yield one
