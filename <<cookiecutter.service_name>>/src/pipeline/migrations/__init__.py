"""Migrations: the engine's revisions, a branch of their own, and what `migrations/env.py` calls."""

import asyncio
from collections.abc import Mapping
from typing import Any

from alembic import context, op
from alembic.util import CommandError
from pydantic import ValidationError
from sqlalchemy import MetaData, text
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from pipeline.schema import SCHEMA
from pipeline.servers import revisions
from pipeline.servers.database import connect_args
from pipeline.settings import Settings, mistakes

_LOCK = 0x1B0C4


def run(metadata: MetaData, service: str | None = None) -> None:
    """Run Alembic's command on the engine's tables and those of the service.

    The schema of the engine is marked with the service's name; that of another service is refused
    (None: neither). The attribute "service" of Alembic's configuration takes precedence. Raises
    `CommandError`.
    """
    service = context.config.attributes.get("service", service)
    if context.is_offline_mode():
        context.configure(dialect_name="postgresql", service=service, **options(metadata))
        with context.begin_transaction():
            context.run_migrations()
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
    async with engine.connect() as connection:
        await connection.run_sync(_migrate, metadata, service)
        await connection.commit()
    await engine.dispose()


def _migrate(connection: Connection, metadata: MetaData, service: str | None) -> None:
    # Of two processes that migrate at once, the second waits and finds nothing to do.
    connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    if service:
        try:
            *found, _ = connection.execute(text(revisions.DATABASE)).one()
            revisions.must_fit(service, *found)
        except revisions.WrongDatabase as error:
            raise CommandError(str(error)) from None
    context.configure(connection=connection, service=service, **options(metadata))
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
