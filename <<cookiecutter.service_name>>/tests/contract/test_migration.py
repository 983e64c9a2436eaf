"""Migrations: from nothing to the newest schema, and from an older one without a loss."""

import signal
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy.ext.asyncio import create_async_engine

from .bank import Base
from .ledger import Ledger
from tests.servers.databases import HOME, empty_database, migrations_of_the_engine
from tests.servers.processes import Start

NEXT = '''
"""What a later version of the engine may bring."""

import sqlalchemy as sa
from alembic import op

revision = "pipeline_9999"
down_revision = "{head}"


def upgrade() -> None:
    op.add_column("inbox", sa.Column("note", sa.Text), schema="pipeline")
    op.add_column("outbox", sa.Column("note", sa.Text), schema="pipeline")
'''


class TestFromNothing:
    """A database without tables."""

    @pytest.fixture
    async def database_url(self, server_url: str, used_databases: list[str]) -> str:
        """URL of an empty database."""
        return await empty_database(server_url, used_databases)

    async def test_an_empty_database_is_migrated_and_a_second_time_changes_nothing(
        self, ledger: Ledger, start: Start, database_url: str
    ) -> None:
        refused = await start("run")
        assert await refused.ended() == 1
        assert "run `service migrate` first" in refused.output
        for _ in range(2):
            migrating = await start("migrate")
            assert await migrating.ended() == 0, migrating.output
        engine = create_async_engine(database_url)
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        await engine.dispose()
        await start("run")
        await ledger.send_portion()
        await ledger.check()


async def test_the_schema_is_upgraded_under_a_running_service_and_all_data_stays(
    ledger: Ledger, start: Start, tmp_path: Path
) -> None:
    (head,) = ScriptDirectory.from_config(migrations_of_the_engine()).get_heads()
    (tmp_path / "next.py").write_text(NEXT.format(head=head), "utf-8")
    (tmp_path / "alembic.ini").write_text(
        f"[alembic]\nscript_location = {HOME}\npath_separator = newline\n"
        f"version_locations =\n    onceward:migrations/versions\n    {tmp_path}\n",
        "utf-8",
    )
    async with ledger.traffic():
        old = await start("run")
        await ledger.progresses()
        new = await start("run", cwd=tmp_path)
        assert await new.ended() == 1, "first the schema, then the processes"
        migrating = await start("migrate", cwd=tmp_path)
        assert await migrating.ended() == 0, migrating.output
        await ledger.progresses()
        await start("run", cwd=tmp_path)
        old.send(signal.SIGTERM)
        assert await old.ended() == 0
        await ledger.progresses()
    await ledger.db.fetch("SELECT note FROM pipeline.inbox JOIN pipeline.outbox USING (note)")
