"""The database of a test session: created and migrated once, reset before each test."""

import asyncio
import os
import socket
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Self
from unittest.mock import patch
from uuid import uuid4

import asyncpg
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from pydantic import SecretStr
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from onceward.apply import inbox
from onceward.handlers.sessions import clean
from onceward.retention.maintenance import make_ahead
from onceward.servers import revisions
from onceward.servers.database import autocommitting, create_engine, driver_of
from onceward.servers.retrying import Retrying
from onceward.service import Service
from onceward.settings import Settings, WriterSettings

from .errors import HarnessMisused

Migrate = Callable[[str], None]
"""Creates all tables in the empty database of a URL."""

_LONGEST_SECONDS = 600.0
"""Time limit of statements that wait for a checkpoint of the whole server."""
_OUTAGES = 5
"""Attempts after which the error of the database is raised."""
_NEVER = 1_000_000
"""Keys in a row that open the breaker: a test sees each failure, however many there are."""

# Tables of extensions have rows that no test changes.
_TABLES = """
SELECT format('%I.%I', nspname, relname) AS name,
       (SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute
         WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped
           AND attgenerated = '') AS columns
  FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
 WHERE relkind IN ('r', 'p') AND NOT relispartition
   AND nspname NOT IN ('pg_catalog', 'information_schema')
   AND NOT EXISTS (SELECT FROM pg_depend WHERE objid = c.oid AND deptype = 'e')
"""
_SEQUENCES = """
SELECT format('SELECT setval(%L, %s, %L)', format('%I.%I', schemaname, sequencename),
              COALESCE(last_value, start_value), last_value IS NOT NULL)
  FROM pg_sequences
"""

# No triggers and no foreign keys, so that rows are deleted in any order, and nothing else is.
_BEGIN = "SET LOCAL lock_timeout = '2s'; SET LOCAL session_replication_role = replica"


class ResettableDatabase:
    """A database whose rows can be made those that it had after its migration."""

    def __init__(self, url: str) -> None:
        self.url = url
        # The connection that resets stays open, in a loop of its own: a new one would have to look
        # up all tables.
        self._settings = self.settings()
        self._connections = create_engine(self._settings, name="harness", check=None)
        self._loop, self._thread = asyncio.new_event_loop(), ThreadPoolExecutor(1)
        self._shared_by: asyncio.AbstractEventLoop | None = None
        self._pools: dict[str, AsyncEngine] = {}
        self._checked: list[Service] = []
        self._reset_statements = ""

    def prepare(self, service: Service) -> None:
        """Do what a service does when it starts; `reset` restores the rows that are then there."""
        prepared = _prepare(self._connections, self._settings, service)
        self._reset_statements = self._loop.run_until_complete(prepared)

    def close(self) -> None:
        """Close its connection."""
        self._thread.shutdown()
        self._loop.run_until_complete(self._connections.dispose())
        self._loop.close()

    def check(self, service: Service) -> None:
        """Raise `Misconfigured` for a service that would not start because of its handlers."""
        if not any(one is service for one in self._checked):
            # Settings of the others belong to the deployment.
            handlers_only = replace(service, archive=None, claims=None, encryption=None)
            handlers_only.check(self.settings())
            self._checked.append(service)

    def settings(self) -> Settings:
        """Return the settings of the environment, for this database and without Kafka."""
        return _settings(self.url)

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[Self]:
        """Keep connections open, for as long as the block lasts, for tests in this event loop."""
        self._shared_by = asyncio.get_running_loop()
        try:
            yield self
        finally:
            for pool in self._pools.values():
                await pool.dispose()

    @asynccontextmanager
    async def pool(self, name: str) -> AsyncIterator[AsyncEngine]:
        """Lend the connections of a service."""
        settings = self.settings()
        is_shared = asyncio.get_running_loop() is self._shared_by and settings == self._settings
        pools = self._pools if is_shared else {}
        if name not in pools:
            pools[name] = _new_pool(settings, name)
        pool = pools[name]
        try:
            yield pool
        finally:
            # A connection that the test has not returned would be missing in the next test's pool.
            if not is_shared or pool.pool.checkedout():  # type: ignore[attr-defined]
                await pool.dispose()
            else:
                await _clean_idle(pool)

    async def reset(self) -> None:
        """Restore all rows and sequences. Raises `HarnessMisused` if the role is not allowed to.

        What a test has done beyond rows, as by CREATE TABLE, stays until the session ends.
        """

        def reset() -> None:
            work = attempts()(_reset, self._connections, self._reset_statements)
            self._loop.run_until_complete(work)

        await asyncio.get_running_loop().run_in_executor(self._thread, reset)


def _new_pool(settings: Settings, name: str) -> AsyncEngine:
    pool, loop = create_engine(settings, name=name, check=None), asyncio.get_running_loop()

    @sa.event.listens_for(pool.sync_engine, "do_connect")
    @sa.event.listens_for(pool.sync_engine, "checkout")
    def check(*_: object) -> None:
        if asyncio.get_running_loop() is not loop:
            raise HarnessMisused(
                "the test and its fixture run in different event loops: leave out loop_scope= and"
                " asyncio.run, and give asyncio_default_test_loop_scope and"
                " asyncio_default_fixture_loop_scope one value in pyproject.toml"
            )

    return pool


async def _reset(engine: AsyncEngine, statements: str) -> None:
    try:
        async with autocommitting(engine) as driver:
            await driver.execute(statements)
    except asyncpg.InsufficientPrivilegeError as error:
        raise HarnessMisused(
            f"the database can't be reset between tests ({error}): let the role of"
            " PIPELINE_DATABASE_URL be a SUPERUSER, as that of `make up`, or GRANT SET ON"
            " PARAMETER session_replication_role to it"
        ) from None
    except asyncpg.LockNotAvailableError as error:
        raise HarnessMisused(
            f"the database can't be reset ({error}): an earlier test has left a transaction"
            " open; end it, for instance by `async with`"
        ) from None


async def _clean_idle(pool: AsyncEngine) -> None:
    """End what tests have set by the pool itself: as `new_session`, and cached sequences."""
    async with AsyncExitStack() as stack:
        for _ in range(pool.pool.checkedin()):  # type: ignore[attr-defined]
            connection = await stack.enter_async_context(pool.connect())
            driver = await driver_of(connection)
            await driver.execute("DISCARD SEQUENCES")
            await clean(connection, driver)


@asynccontextmanager
async def new_session(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    """Lend a session; settings, temporary tables and locks of its connection end with the block."""
    async with engine.connect() as connection:
        driver = await driver_of(connection)
        try:
            async with AsyncSession(connection, expire_on_commit=False) as session:
                yield session
        finally:
            await clean(connection, driver)


def attempts() -> Retrying:
    """Return attempts at work with the database, with an end."""
    failures = count(1)
    return Retrying(
        "the harness",
        "PostgreSQL",
        unless=lambda: next(failures) >= _OUTAGES,
        report=lambda reason: None,
    )


def with_alembic(config: Config) -> Migrate:
    """Return the function that migrates a database to the newest revisions, the engine's too."""

    def migrate(url: str) -> None:
        environment = {"PIPELINE_DATABASE_URL": url}
        # The migrations read all settings, and need no Kafka.
        environment |= {"PIPELINE_KAFKA_BOOTSTRAP_SERVERS": "unused:9092"}
        with patch.dict(os.environ, environment):
            command.upgrade(config, "heads")

    return migrate


@contextmanager
def resettable_database(
    server_url: str, service: Service, migrate: Migrate
) -> Iterator[ResettableDatabase]:
    """Create a database on the server, for as long as the `with` block lasts."""
    name = f"harness_{uuid4().hex[:12]}"
    try:
        asyncio.run(_administer(server_url, f"CREATE DATABASE {name}"))
    except (ConnectionError, TimeoutError, socket.gaierror) as error:
        raise HarnessMisused(
            f"no PostgreSQL answers at PIPELINE_DATABASE_URL ({error}): start it, or unset the"
            " variable, and the fixture starts one"
        ) from None
    try:
        url = make_url(server_url).set(database=name).render_as_string(hide_password=False)
        migrate(url)
        with closing(ResettableDatabase(url)) as database:
            database.prepare(service)
            yield database
    finally:
        asyncio.run(_administer(server_url, f"DROP DATABASE {name} WITH (FORCE)"))


async def _administer(server_url: str, statement: str) -> None:
    engine = create_engine(_settings(server_url), name="harness", check=None)
    async with autocommitting(engine) as driver:
        await driver.execute(statement, timeout=_LONGEST_SECONDS)
    await engine.dispose()


async def _prepare(engine: AsyncEngine, settings: Settings, service: Service) -> str:
    """Do what a service does when it starts; return the statements that restore this state."""
    async with autocommitting(engine) as driver:
        migrations = revisions.load_migrations()
        if lacking := await revisions.lacking(driver, service.metadata, migrations):
            # In a service, pytest makes it an error; a filter may allow tables of others.
            warnings.warn(f"{'; '.join(lacking)}: {revisions.WRITE_MIGRATION}", stacklevel=2)
        await make_ahead(driver, settings)
        await inbox.register(driver, service.handlers.consumers)
        await driver.execute("CREATE SCHEMA harness_saved")
        statements = [_BEGIN]
        for number, (table, columns) in enumerate(await driver.fetch(_TABLES)):
            statements.append(f"DELETE FROM {table}")
            if await driver.fetchval(f"SELECT EXISTS (SELECT FROM {table})"):
                saved = f"harness_saved.t{number}"
                await driver.execute(f"CREATE TABLE {saved} AS SELECT {columns} FROM {table}")
                statements.append(
                    f"INSERT INTO {table} ({columns}) OVERRIDING SYSTEM VALUE SELECT * FROM {saved}"
                )
        statements += [row[0] for row in await driver.fetch(_SEQUENCES)]
    return ";\n".join(statements)


def _settings(url: str) -> Settings:
    named = ((name, text) for name, text in os.environ.items() if name.startswith("PIPELINE_"))
    return _read_settings(url, frozenset(named))


@cache  # to read them takes longer than to handle a message
def _read_settings(url: str, environment: frozenset[tuple[str, str]]) -> Settings:
    return WriterSettings(
        database_url=SecretStr(url),
        breaker_keys=_NEVER,
        # Each new connection looks up all partitions.
        outbox_days_ahead=1,
        inbox_generations_ahead=1,
    )
