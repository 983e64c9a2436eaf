"""Databases on the tests' PostgreSQL server: created, migrated, copied and dropped."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest
from alembic.config import Config
from sqlalchemy import MetaData, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from onceward.retention.maintenance import run_retention
from onceward.servers.database import autocommitting
from onceward.settings import Settings
from onceward.testing.databases import with_alembic

HOME = Path(__file__).with_name("alembic")
"""Working directory of the tests' processes: its `alembic.ini` names the engine's migrations."""

WAITING_TO_MIGRATE = """
SELECT count(*) FROM pg_stat_activity
 WHERE datname = current_database() AND application_name = 'migrations'
   AND state = 'idle' AND query = 'COMMIT;'
"""
"""Counts the processes that have found the lock of migrations taken, and wait without a transaction
for their next attempt."""


ADOPT = """
UPDATE pipeline.outbox_cluster SET database_oid = oid, kafka_cluster = NULL
  FROM pg_database WHERE datname = current_database()
"""
"""Makes a copy of a template a database of its own, as if it had been migrated by itself."""


def migrations_of_the_engine(*others: str) -> Config:
    """Return Alembic's configuration for the engine's branch, and those in other locations."""
    locations = ("onceward:migrations/versions", *others)
    config = Config()
    config.set_main_option("script_location", str(HOME))
    config.set_main_option("version_locations", "\n".join(locations))
    config.set_main_option("path_separator", "newline")
    return config


def url_of(server_url: str, database: str) -> str:
    """Return the URL of a database of the server."""
    return make_url(server_url).set(database=database).render_as_string(hide_password=False)


async def administer(server_url: str, statement: str) -> None:
    """Execute a statement on the server, in no database of a test."""
    connection = await asyncpg.connect(server_url.replace("+asyncpg", ""))
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


async def empty_database(server_url: str, used_databases: list[str]) -> str:
    """Create a database without tables, to be dropped with the other tests' databases."""
    name = f"test_{uuid4().hex[:12]}"
    await administer(server_url, f"CREATE DATABASE {name}")
    used_databases.append(name)
    return url_of(server_url, name)


async def copied(server_url: str, template: str) -> str:
    """Create a database as a copy of another one, and return its name."""
    name = f"test_{uuid4().hex[:12]}"
    await administer(server_url, f"CREATE DATABASE {name} TEMPLATE {template}")
    await administer(url_of(server_url, name), ADOPT)
    return name


async def drop_databases(server_url: str, names: list[str]) -> None:
    """Drop them all at once, and empty the list."""
    statements = [f"DROP DATABASE {name} WITH (FORCE)" for name in names]
    names.clear()
    await asyncio.gather(*(administer(server_url, statement) for statement in statements))


def build(url: str, config: Config, metadata: MetaData) -> None:
    """Migrate an empty database to the newest revisions, and create the tables of the metadata."""
    with_alembic(config)(url)
    asyncio.run(_furnish(url, metadata))


async def _furnish(url: str, metadata: MetaData) -> None:
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    settings = {"database_url": url, "kafka_bootstrap_servers": "unused:9092"}
    async with autocommitting(engine) as driver:
        await run_retention(driver, Settings.model_validate(settings))
    await engine.dispose()


@contextmanager
def built(server_url: str, config: Config, metadata: MetaData) -> Iterator[str]:
    """Create a database as `build` does, to be copied; its name. It is dropped at the end."""
    name = f"template_{uuid4().hex[:12]}"
    asyncio.run(administer(server_url, f"CREATE DATABASE {name}"))
    config.attributes["service"] = None  # tests give the service names of their own
    build(url_of(server_url, name), config, metadata)
    yield name
    asyncio.run(administer(server_url, f"DROP DATABASE {name} WITH (FORCE)"))


def end_sessions_late(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the server be busy for so long when a connection is terminated."""
    terminate = asyncpg.Connection.terminate
    query = f"SELECT pg_sleep({seconds})\0".encode()

    def terminate_late(connection: asyncpg.Connection) -> None:
        if not connection.is_closed():
            connection._transport.write(b"Q" + (len(query) + 4).to_bytes(4) + query)
        terminate(connection)

    monkeypatch.setattr(asyncpg.Connection, "terminate", terminate_late)
