"""Migrations: the engine's revisions, a branch of their own, and what `migrations/env.py` calls."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from alembic import context
from alembic.util import CommandError
from pydantic import ValidationError
from sqlalchemy import MetaData, text
from sqlalchemy.dialects.postgresql.base import ischema_names
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from pipeline import schema
from pipeline.servers.database import connect_args
from pipeline.settings import Settings, mistakes

_PARTITION = re.compile(r"(outbox_p\d{8}|inbox_g\d+)")
_LOCK = 0x1B0C4

# Else a comparison warns of types it does not know, and leaves their columns out.
ischema_names.update(xid8=schema.Xid8, pg_snapshot=schema.Snapshot)


def run(metadata: MetaData) -> None:
    """Run what Alembic was asked for, on the engine's tables and those of the service."""
    if context.is_offline_mode():
        context.configure(dialect_name="postgresql", **options(metadata))
        with context.begin_transaction():
            context.run_migrations()
    else:
        asyncio.run(_run_online(metadata))


async def _run_online(metadata: MetaData) -> None:
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
        await connection.run_sync(_migrate, metadata)
        await connection.commit()
    await engine.dispose()


def _migrate(connection: Connection, metadata: MetaData) -> None:
    # Two processes that migrate at once: the second one waits and finds nothing to do.
    connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    context.configure(connection=connection, **options(metadata))
    with context.begin_transaction():
        context.run_migrations()


def options(metadata: MetaData) -> dict[str, Any]:
    """Return what a comparison of models and database has to look at."""
    schemas = {table.schema for table in metadata.tables.values()} | {None, schema.SCHEMA}

    def include_name(name: str | None, kind: str, parents: Mapping[str, Any]) -> bool:
        if kind == "schema":
            return name in schemas
        # Partitions come and go with retention; their parent is what a migration changes.
        ours = kind == "table" and parents["schema_name"] == schema.SCHEMA
        return not (ours and name and _PARTITION.fullmatch(name))

    return {
        "target_metadata": [schema.metadata, metadata],
        "include_schemas": True,
        "include_name": include_name,
        "compare_server_default": True,
    }
