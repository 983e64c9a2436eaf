"""Migrations: the engine's revisions, a branch of their own, and what `migrations/env.py` calls."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from alembic import context, op
from alembic.util import CommandError
from pydantic import ValidationError
from sqlalchemy import MetaData, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from onceward.schema import SCHEMA
from onceward.servers import revisions
from onceward.servers.database import autocommitting, connect_args, keep_alive
from onceward.servers.statements import READ_DATABASE
from onceward.settings import Settings, mistakes

_LOCK = 0x1B0C4
_PAUSE_SECONDS = 0.5
"""Time between two attempts to lock."""
_UNLIMITED = """
SELECT set_config(name, '0', true) FROM pg_settings
 WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')
"""
"""The transaction of the lock is idle for as long as the migrations last."""


def run(metadata: MetaData, service: str | None = None) -> None:
    """Run Alembic's command on the engine's tables and those of the service.

    The schema of the engine is marked with the service's name; that of another service is refused
    (None: neither). The attribute "service" of Alembic's configuration takes precedence. Raises
    `CommandError`.
    """
    service = context.config.attributes.get("service", service)
    if context.is_offline_mode():
        _run_migrations(metadata, service, dialect_name="postgresql")
    else:
        asyncio.run(_run_online(metadata, service))


async def _run_online(metadata: MetaData, service: str | None) -> None:
    try:
        settings = Settings()
    except ValidationError as error:
        raise CommandError("\n  ".join(("wrong settings:", *mistakes(error, Settings)))) from None
    engine = create_async_engine(
        settings.database_url.get_secret_value(),
        poolclass=NullPool,
        connect_args=connect_args(settings, name="migrations"),
    )
    event.listen(engine.sync_engine, "connect", keep_alive)
    async with _locked(engine), engine.connect() as connection:
        if service:
            try:
                *found, _ = (await connection.execute(text(READ_DATABASE))).one()
                revisions.must_fit(service, *found)
            except revisions.WrongDatabase as error:
                raise CommandError(str(error)) from None
            # Alembic begins no transactions, and ends none, on a connection that is in one.
            await connection.rollback()
        await connection.run_sync(lambda sync: _run_migrations(metadata, service, connection=sync))
        await connection.commit()
    await engine.dispose()


@asynccontextmanager
async def _locked(engine: AsyncEngine) -> AsyncIterator[None]:
    """Lock out other processes that migrate: the second waits, and finds nothing to do.

    The lock has a connection of its own, as migrations may commit. Its transaction must not have a
    snapshot, for which CREATE INDEX CONCURRENTLY would wait, and a process that waits has none.
    """
    async with autocommitting(engine) as driver:
        while True:
            async with driver.transaction(isolation="read_committed"):
                if await driver.fetchval("SELECT pg_try_advisory_xact_lock($1)", _LOCK):
                    # In the simple protocol, which closes the result above, and its snapshot.
                    await driver.execute(_UNLIMITED)
                    yield
                    return
            await asyncio.sleep(_PAUSE_SECONDS)


def _run_migrations(metadata: MetaData, service: str | None, **target: Any) -> None:
    # A migration that commits must not leave its revision to the transaction of a later one.
    context.configure(
        transaction_per_migration=True, service=service, **target, **options(metadata)
    )
    with context.begin_transaction():
        context.run_migrations()


def alter_in_turns(table: str, statements: str) -> None:
    """Execute statements that lock a whole table, followed by semicolons.

    Others wait behind a statement that waits for such a lock: so it waits for a second, and lets
    them pass, for ten minutes.
    """
    op.execute(f"""
        DO $$
        DECLARE
            limit_before text = current_setting('lock_timeout');
        BEGIN
            FOR attempt IN 1 .. 300 LOOP
                BEGIN
                    SET LOCAL lock_timeout = '1s';
                    {statements}
                    PERFORM set_config('lock_timeout', limit_before, true);
                    RETURN;
                EXCEPTION WHEN lock_not_available THEN
                    PERFORM pg_sleep(1);
                END;
            END LOOP;
            RAISE EXCEPTION 'a transaction has held {table} for ten minutes: see'
                ' pg_stat_activity, end it, and migrate again';
        END $$
    """)


def options(metadata: MetaData) -> dict[str, Any]:
    """Return what Alembic compares: the service's tables, in the schemas that they are in.

    The engine's tables are declared by its migrations alone.
    """
    schemas = {table.schema for table in metadata.tables.values()} | {None}

    def include_name(name: str | None, kind: str, _parents: Mapping[str, Any]) -> bool:
        return kind != "schema" or (name in schemas and name != SCHEMA)

    return {
        "target_metadata": metadata,
        "include_schemas": True,
        "include_name": include_name,
        "compare_server_default": True,
    }
