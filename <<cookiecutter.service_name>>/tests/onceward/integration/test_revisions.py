"""A process refuses a database that is older than its code, and takes one that is newer."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import make_url

from onceward.servers import revisions
from onceward.testing.databases import with_alembic

from .bank import Bank
from .processes import starting
from tests.servers.databases import (
    HOME,
    WAITING_TO_MIGRATE,
    administer,
    empty_database,
    url_of,
)
from tests.servers.processes import Start
from tests.servers.waiting import eventually

SERVICE = (("service_0001", None), ("service_0002", "service_0001"))
ENGINE = ("pipeline_0003", "pipeline_0002")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in the folder of a service that has a branch of its own, and return it."""
    folder = tmp_path / "service"
    (folder / "versions").mkdir(parents=True)
    (folder / "alembic.ini").write_text(
        f"[alembic]\nscript_location = {HOME}\npath_separator = newline\n"
        f"version_locations =\n    onceward:migrations/versions\n    {folder / 'versions'}\n",
        "utf-8",
    )
    monkeypatch.chdir(folder)
    return folder


def add(
    folder: Path,
    revision: str,
    below: str | None,
    depends_on: str | None = None,
    statement: str = "SELECT",
) -> None:
    """Write a migration that executes a statement."""
    branch = None if below else (revision.partition("_")[0],)
    (folder / "versions" / f"{revision}.py").write_text(
        f"revision, down_revision = {revision!r}, {below!r}\n"
        f"branch_labels, depends_on = {branch!r}, {depends_on!r}\n\n\n"
        "from alembic import op\n\n\n"
        f"def upgrade() -> None:\n    op.execute({statement!r})\n",
        "utf-8",
    )


async def bring_to(db: asyncpg.Connection, *names: str) -> None:
    """Say that the database has these revisions."""
    await db.execute("DELETE FROM alembic_version")
    await db.executemany("INSERT INTO alembic_version VALUES ($1)", [(one,) for one in names])


@pytest.mark.parametrize(
    ("had", "missing"),
    [
        (["pipeline_0003", "service_0002"], set()),
        (["pipeline_0002", "service_0002"], {"pipeline_0003"}),
        (["pipeline_0003", "service_0001"], {"service_0002"}),
        (["pipeline_0003"], {"service_0002"}),
        (["service_0002"], {"pipeline_0003"}),
        ([], {"pipeline_0003", "service_0002"}),
        (["pipeline_9999", "service_0002"], set()),
        (["pipeline_0003", "service_9999"], set()),
        (["pipeline_9999", "service_9999"], set()),
        (["pipeline_9999", "service_0001"], {"service_0002"}),
        (["pipeline_0002", "service_9999"], {"pipeline_0003"}),
        (["merged_9999"], set()),
    ],
)
async def test_an_older_branch_is_missing_and_a_newer_one_is_not(
    folder: Path, db: asyncpg.Connection, had: list[str], missing: set[str]
) -> None:
    for revision, below in (ENGINE, *SERVICE):
        add(folder, revision, below)
    migrations = revisions.load_migrations()
    assert migrations is not None
    await bring_to(db, *had)
    assert await revisions.missing(db, migrations) == missing


@pytest.mark.parametrize(
    ("had", "missing"),
    [
        (["service_0002"], set()),  # Alembic tells it of the engine's no more: it depends on them
        (["pipeline_0002", "service_0001"], {"pipeline_0003", "service_0002"}),
        (["pipeline_0003", "service_0001"], {"service_0002"}),
        (["pipeline_0002", "service_9999"], {"pipeline_0003"}),
        (["service_9999"], set()),
    ],
)
async def test_what_others_depend_on_is_there_with_them(
    folder: Path, db: asyncpg.Connection, had: list[str], missing: set[str]
) -> None:
    add(folder, *ENGINE)
    add(folder, *SERVICE[0])
    add(folder, *SERVICE[1], depends_on="pipeline_0003")
    migrations = revisions.load_migrations()
    assert migrations is not None
    await bring_to(db, *had)
    assert await revisions.missing(db, migrations) == missing


async def test_a_branch_that_others_depend_on_may_be_newer(
    folder: Path, db: asyncpg.Connection
) -> None:
    add(folder, *ENGINE)
    add(folder, *SERVICE[0], depends_on="pipeline_0002")
    migrations = revisions.load_migrations()
    assert migrations is not None
    await bring_to(db, "pipeline_9999", "service_0001")
    assert await revisions.missing(db, migrations) == set()


@pytest.fixture
async def start(
    bank: Bank,
    direct_url: str,
    kafka: str,
    folder: Path,
) -> AsyncIterator[Start]:
    """Start processes of the bank; its database has the engine's first revision."""
    async with starting(
        bank,
        database_url=direct_url,
        database_pooler=False,
        kafka_bootstrap_servers=kafka,
    ) as one:
        yield one


@pytest.fixture
async def start_migrate(unborn: Bank, direct_url: str, folder: Path) -> AsyncIterator[Start]:
    """Start `migrate`, which needs no Kafka."""
    async with starting(
        unborn,
        database_url=direct_url,
        database_pooler=False,
        kafka_bootstrap_servers="unused:9092",
    ) as one:
        yield one


SERVING = [("run",), ("consume",), ("relay",), ("retention", "run")]


@pytest.mark.parametrize("command", SERVING, ids=" ".join)
async def test_a_process_refuses_an_older_schema_and_says_what_to_do(
    start: Start, folder: Path, db: asyncpg.Connection, command: tuple[str, ...]
) -> None:
    add(folder, *ENGINE)
    add(folder, *SERVICE[0])
    before = await db.fetchval("SELECT count(*) FROM pg_class")
    process = await start(*command, cwd=folder)
    assert await process.ended() == 1, process.output
    (line,) = (one for one in process.output.splitlines() if "NotMigrated" in one)
    assert line.endswith(
        "NotMigrated: the database lacks pipeline_0003, service_0001: run `service migrate` first"
    )
    assert "Traceback" not in process.output
    assert await db.fetchval("SELECT count(*) FROM pg_class") == before


async def test_a_process_starts_as_soon_as_its_database_is_migrated(
    start: Start, folder: Path
) -> None:
    add(folder, *SERVICE[0])
    refused = await start("relay", cwd=folder)
    assert await refused.ended() == 1, refused.output
    migrate = await start("migrate", cwd=folder)
    assert await migrate.ended() == 0, migrate.output
    await eventually((await start("relay", cwd=folder)).is_ready)


async def test_a_process_warns_of_a_table_without_a_migration(
    start: Start, folder: Path, db: asyncpg.Connection
) -> None:
    await db.execute("ALTER TABLE account DROP COLUMN version")
    process = await start("relay", cwd=folder)
    await process.says("the table account of the code lacks version: write the migration")


GONE = ("archives", "finished_at", "held", "singleton", "started_at")
OTHER = {
    "dropped": "ALTER TABLE pipeline.outbox DROP COLUMN dataref CASCADE",
    "renamed": "ALTER TABLE pipeline.outbox RENAME COLUMN dataref TO data_ref",
}


@pytest.mark.parametrize("how", OTHER)
@pytest.mark.parametrize("command", [*SERVING, ("migrate",)], ids=" ".join)
async def test_a_process_names_a_column_that_its_schema_lacks(
    start: Start, folder: Path, db: asyncpg.Connection, command: tuple[str, ...], how: str
) -> None:
    await db.execute(OTHER[how])
    process = await start(*command, cwd=folder)
    assert await process.ended() == 1, process.output
    assert "column pipeline.outbox.dataref is missing: the database was altered" in process.output
    assert "docs/updating.md" in process.output
    assert "Traceback" not in process.output


async def test_a_migration_is_not_applied_where_a_column_is_missing(
    start: Start, folder: Path, db: asyncpg.Connection
) -> None:
    add(folder, *SERVICE[0])
    await db.execute(OTHER["dropped"])
    before = await db.fetch("SELECT version_num FROM alembic_version ORDER BY 1")

    process = await start("migrate", cwd=folder)

    assert await process.ended() == 1, process.output
    assert "column pipeline.outbox.dataref is missing" in process.output
    assert await db.fetch("SELECT version_num FROM alembic_version ORDER BY 1") == before


async def test_a_command_that_meets_a_missing_column_names_it_and_the_doctor(
    start: Start, folder: Path, db: asyncpg.Connection
) -> None:
    await db.execute("ALTER TABLE pipeline.backlog RENAME COLUMN died_at TO dead_at")
    process = await start("status", cwd=folder)
    assert await process.ended() == 1, process.output
    assert re.search(r"died_at\" does not exist.*`service doctor` names", process.output)
    assert "Traceback" not in process.output


async def test_the_doctor_names_every_column_and_table_that_its_schema_lacks(
    start: Start, folder: Path, db: asyncpg.Connection
) -> None:
    await db.execute(OTHER["renamed"])
    await db.execute("ALTER TABLE pipeline.claim ALTER COLUMN event_id TYPE varchar(40)")
    await db.execute("DROP TABLE pipeline.retention_round")
    doctor = await start("doctor", "--json", cwd=folder)
    assert await doctor.ended() == 1, doctor.output
    found = [json.loads(line) for line in doctor.output.splitlines() if line.startswith("{")]
    wrong = [one["found"] for one in found if one["check"] == "schema"]
    assert wrong == [
        "column pipeline.claim.event_id is character varying(40) and not text",
        "column pipeline.outbox.dataref is missing",
        *(f"column pipeline.retention_round.{name} is missing" for name in GONE),
    ]
    assert "Traceback" not in doctor.output


async def test_a_database_of_an_older_first_revision_is_named_before_writes(
    start: Start, folder: Path, server_url: str, used_databases: list[str]
) -> None:
    """Of a service that was baked before the first revision was edited in place."""
    url = await empty_database(server_url, used_databases)
    migrate = await start("migrate", cwd=folder, database_url=url)
    assert await migrate.ended() == 0, migrate.output
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        for table in ("outbox", "outbox_rejected", "scheduled"):
            await connection.execute(f"ALTER TABLE pipeline.{table} DROP COLUMN dataref")
        await connection.execute("ALTER TABLE pipeline.retention_round DROP COLUMN archives")
    finally:
        await connection.close()
    for command in ("migrate", "run"):
        process = await start(command, cwd=folder, database_url=url)
        assert await process.ended() == 1, process.output
        lacking = (
            "column pipeline.outbox.dataref is missing",
            "column pipeline.outbox_rejected.dataref is missing",
            "column pipeline.retention_round.archives is missing",
            "column pipeline.scheduled.dataref is missing",
        )
        assert ", ".join(lacking) in process.output
        assert "Traceback" not in process.output


@pytest.fixture
async def shared(
    folder: Path, server_url: str, used_databases: list[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    """Migrate a database for another service than the bank; its URL."""
    (folder / "env.py").write_text(
        "import os\n\nfrom sqlalchemy import MetaData\n\nfrom onceward import migrations\n\n"
        'migrations.run(MetaData(), os.environ["BANK_NAME"])\n',
        "utf-8",
    )
    ini = folder / "alembic.ini"
    ini.write_text(ini.read_text("utf-8").replace(f"{HOME}", f"{folder}"), "utf-8")
    url = await empty_database(server_url, used_databases)
    monkeypatch.setenv("BANK_NAME", "o'rders:x")
    await asyncio.to_thread(with_alembic(Config(ini)), url)
    return url


@pytest.mark.parametrize("command", [*SERVING, ("migrate",)], ids=" ".join)
async def test_the_database_of_another_service_is_refused_and_left_as_it_is(
    start: Start, folder: Path, bank: Bank, shared: str, command: tuple[str, ...]
) -> None:
    add(folder, *SERVICE[0])
    process = await start(*command, cwd=folder, database_url=shared)
    assert await process.ended() == 1, process.output
    (line,) = (one for one in process.output.splitlines() if "WrongDatabase" in one)
    assert f"is that of service o'rders:x, and this is service {bank.name}" in line
    assert "let PIPELINE_DATABASE_URL name a database of its own" in line
    assert "Traceback" not in process.output
    connection = await asyncpg.connect(shared.replace("+asyncpg", ""))
    try:
        assert [row[0] for row in await connection.fetch("SELECT * FROM alembic_version")] == [
            "pipeline_0002"
        ]
    finally:
        await connection.close()


@pytest.mark.parametrize(
    ("table", "partmethod", "repmodel", "refused"),
    [
        ("outbox", "h", "s", True),
        ("inbox", "n", "t", True),  # a reference table
        ("outbox", "n", "s", False),  # a local one
        (None, "h", "s", False),
    ],
)
async def test_tables_of_the_engine_that_citus_has_distributed_are_refused(
    db: asyncpg.Connection, table: str | None, partmethod: str, repmodel: str, refused: bool
) -> None:
    """In the catalogue of Citus, of which a table of the same columns takes the place."""
    await db.execute(
        'CREATE TABLE pg_dist_partition (logicalrelid regclass, partmethod "char", repmodel "char")'
    )
    await db.execute("CREATE TABLE mine (id int)")
    name = f"pipeline.{table}" if table else "mine"
    row = f"('{name}'::regclass, '{partmethod}', '{repmodel}')"
    await db.execute(f"INSERT INTO pg_dist_partition VALUES {row}")
    if not refused:
        await revisions.check_database(db, "bank")
        return
    with pytest.raises(revisions.WrongDatabase, match=f"has distributed {name}, and") as error:
        await revisions.check_database(db, "bank")
    assert f"SELECT undistribute_table('{name}')" in str(error.value)


@pytest.mark.parametrize("command", ["migrate", pytest.param("run", marks=pytest.mark.full)])
async def test_a_database_that_cannot_store_every_character_is_refused_and_told(
    start: Start, folder: Path, server_url: str, used_databases: list[str], command: str
) -> None:
    name = f"latin_{uuid4().hex[:12]}"
    await administer(
        server_url, f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0"
    )
    used_databases.append(name)
    url = url_of(server_url, name)
    process = await start(command, cwd=folder, database_url=url)
    assert await process.ended() == 1, process.output
    assert "WrongDatabase: the database's encoding is LATIN1, in which" in process.output
    assert "ENCODING 'UTF8'" in process.output
    assert "Traceback" not in process.output
    doctor = await start("doctor", "--json", cwd=folder, database_url=url)
    assert await doctor.ended() == 1, doctor.output
    found = [json.loads(line) for line in doctor.output.splitlines() if line.startswith("{")]
    (encoding,) = (one["found"] for one in found if one["check"] == "database")
    assert "encoding is LATIN1" in encoding


async def test_the_doctor_says_that_the_database_is_another_services(
    start: Start, folder: Path, shared: str
) -> None:
    doctor = await start("doctor", "--json", cwd=folder, database_url=shared)
    assert await doctor.ended() == 1, doctor.output
    found = [json.loads(line) for line in doctor.output.splitlines() if line.startswith("{")]
    (wrong,) = (one for one in found if one["check"] == "database")
    assert "is that of service o'rders:x, and this is" in wrong["found"]


async def test_alembic_refuses_the_database_of_another_service_too(
    folder: Path, bank: Bank, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BANK_NAME", bank.name)
    config = Config(folder / "alembic.ini")
    with pytest.raises(CommandError, match="is that of service o'rders:x, and this is"):
        await asyncio.to_thread(with_alembic(config), shared)


@pytest.mark.full
async def test_a_renamed_service_starts_after_the_statement_that_the_refusal_names(
    start: Start, folder: Path, shared: str
) -> None:
    refused = await start("relay", cwd=folder, database_url=shared)
    assert await refused.ended() == 1, refused.output
    found = re.search(r"COMMENT ON SCHEMA pipeline IS '.+?'", refused.output)
    assert found is not None, refused.output
    connection = await asyncpg.connect(shared.replace("+asyncpg", ""))
    try:
        await connection.execute(found[0])
    finally:
        await connection.close()
    migrate = await start("migrate", cwd=folder, database_url=shared)
    assert await migrate.ended() == 0, migrate.output
    await eventually((await start("relay", cwd=folder, database_url=shared)).is_ready)


@pytest.mark.parametrize(("table", "command"), [("inbox", "run"), ("outbox", "migrate")])
async def test_a_default_partition_is_named_and_what_to_do(
    start: Start, folder: Path, db: asyncpg.Connection, table: str, command: str
) -> None:
    await db.execute(f"CREATE TABLE pipeline.rest PARTITION OF pipeline.{table} DEFAULT")
    process = await start(command, cwd=folder)
    assert await process.ended() == 1, process.output
    assert f"pipeline.{table} has the default partition pipeline.rest" in process.output
    assert "detach it and insert its rows again" in process.output
    assert "Traceback" not in process.output
    await db.execute(f"ALTER TABLE pipeline.{table} DETACH PARTITION pipeline.rest")
    migrate = await start("migrate", cwd=folder)
    assert await migrate.ended() == 0, migrate.output


async def test_migrate_without_a_schema_in_the_search_path_says_so(
    start: Start, folder: Path, server_url: str, used_databases: list[str]
) -> None:
    url = await empty_database(server_url, used_databases)
    name = make_url(url).database
    await administer(server_url, f"ALTER DATABASE {name} SET search_path = nowhere")
    process = await start("migrate", cwd=folder, database_url=url)
    assert await process.ended() == 1, process.output
    assert "Refused: no schema of the role's search_path exists" in process.output
    assert "Traceback" not in process.output


@pytest.mark.parametrize(
    ("statement", "error", "advice"),
    [
        (
            "ALTER TABLE drawer ADD colour text NOT NULL",
            'column "colour" of relation "drawer" contains null values',
            "give a new column that is not nullable a server_default",
        ),
        ("ALTER TABLE draer ADD colour text", 'relation "draer" does not exist', "correct the"),
        ("ALTER TABLE drawer ADD CHECK (cents > 5)", "is violated by some row", "correct the"),
    ],
)
async def test_a_migration_that_fails_says_what_to_correct(
    start_migrate: Start,
    folder: Path,
    db: asyncpg.Connection,
    statement: str,
    error: str,
    advice: str,
) -> None:
    await db.execute("CREATE TABLE drawer AS SELECT 1 AS cents")
    add(folder, "service_0001", None)
    add(folder, "service_0002", "service_0001", statement=statement)
    migrate = await start_migrate("migrate", cwd=folder)
    assert await migrate.ended() == 1, migrate.output
    failed, at, what_to_do = migrate.output.splitlines()[-3:]
    assert failed.startswith("Refused: the migration service_0002 failed, and its transaction")
    assert error in failed
    assert at.endswith(f"/service_0002.py, line 9, in the statement: {statement}")
    assert advice in what_to_do
    assert "Traceback" not in migrate.output
    applied = await db.fetch("SELECT version_num FROM alembic_version")
    assert "service_0001" in {row["version_num"] for row in applied}


async def test_a_migration_whose_code_fails_says_where(
    start_migrate: Start, folder: Path, db: asyncpg.Connection
) -> None:
    add(folder, "service_0001", None)
    path = folder / "versions" / "service_0001.py"
    path.write_text(path.read_text("utf-8") + "    op.execute(draer)\n", "utf-8")

    migrate = await start_migrate("migrate", cwd=folder)

    assert await migrate.ended() == 1, migrate.output
    failed, at, what_to_do = migrate.output.splitlines()[-3:]
    assert failed.endswith("was rolled back: NameError: name 'draer' is not defined")
    assert at == f"  at {path}, line 10"
    assert "correct the migration" in what_to_do
    assert "Traceback" not in migrate.output


async def test_a_long_statement_of_a_migration_is_cut(
    start_migrate: Start, folder: Path, db: asyncpg.Connection
) -> None:
    add(folder, "service_0001", None, statement=f"INSERT INTO draer VALUES ({'7' * 10_000})")

    migrate = await start_migrate("migrate", cwd=folder)

    assert await migrate.ended() == 1, migrate.output
    assert "in the statement: INSERT INTO draer VALUES (777" in migrate.output
    assert len(migrate.output) < 2_000
    assert "correct the migration" in migrate.output.splitlines()[-1]


CONCURRENTLY = """
revision, down_revision = "service_0002", "service_0001"
branch_labels, depends_on = None, None

from alembic import op


def upgrade() -> None:
    with op.get_context().autocommit_block():
        op.execute("DROP INDEX CONCURRENTLY IF EXISTS drawer_cents_idx")
        op.create_index("drawer_cents_idx", "drawer", ["cents"], postgresql_concurrently=True)
"""


async def test_an_index_is_made_concurrently_while_another_process_waits_to_migrate(
    start_migrate: Start, folder: Path, db: asyncpg.Connection, direct_url: str
) -> None:
    add(folder, "service_0001", None)
    (folder / "versions" / "service_0002.py").write_text(CONCURRENTLY, "utf-8")
    add(folder, "service_0003", "service_0002", statement="ALTER TABLE draer ADD colour text")
    other = await asyncpg.connect(direct_url.replace("+asyncpg", ""))
    try:
        await db.execute("CREATE TABLE drawer (cents integer)")
        writing = db.transaction()
        await writing.start()
        await db.execute("INSERT INTO drawer VALUES (1)")
        one, two = (
            await start_migrate("migrate", cwd=folder),
            await start_migrate("migrate", cwd=folder),
        )
        indexing = "SELECT count(*) = 1 FROM pg_stat_progress_create_index"
        await eventually(lambda: other.fetchval(indexing))
        await eventually(lambda: other.fetchval(f"SELECT ({WAITING_TO_MIGRATE}) = 1"))
        # Nobody waits for the table.
        await other.execute("INSERT INTO drawer VALUES (2)")
        assert one.is_running
        assert two.is_running
        await writing.commit()

        assert [await one.ended(), await two.ended()] == [1, 1], one.output + two.output
        for process in (one, two):
            assert "the migration service_0003 failed" in process.output
        index = "SELECT indisvalid FROM pg_index WHERE indexrelid = 'drawer_cents_idx'::regclass"
        assert await other.fetchval(index)
        applied = await other.fetch("SELECT version_num FROM alembic_version")
        assert "service_0002" in {row["version_num"] for row in applied}
    finally:
        await other.close()


async def test_a_newer_schema_may_lack_what_this_code_no_longer_needs(
    start: Start, folder: Path, db: asyncpg.Connection
) -> None:
    await db.execute("ALTER TABLE pipeline.claim DROP COLUMN published_at")
    await bring_to(db, "pipeline_9999")
    await eventually((await start("relay", cwd=folder)).is_ready)


@pytest.mark.full
async def test_a_process_of_the_release_before_works_on_a_newer_schema(
    start: Start, folder: Path, db: asyncpg.Connection
) -> None:
    add(folder, *SERVICE[0])
    await bring_to(db, "pipeline_9999", "service_9999")
    await eventually((await start("run", cwd=folder)).is_ready)
    house = await start("retention", "run", cwd=folder)
    assert await house.ended() == 0, house.output


@pytest.mark.parametrize(
    ("has_more", "code", "said"),
    [
        (False, 0, "The schema is newer than this code: nothing was migrated"),
        (True, 1, "Refused: nothing was migrated: the database has pipeline_9999, which this code"),
    ],
)
async def test_migrate_changes_nothing_on_a_newer_schema(
    start: Start, folder: Path, db: asyncpg.Connection, has_more: bool, code: int, said: str
) -> None:
    """It succeeds before the process of the release before, unless that has migrations to apply."""
    for revision, below in SERVICE[: 1 + has_more]:
        add(folder, revision, below)
    await bring_to(db, "pipeline_9999", "service_0001")
    migrate = await start("migrate", cwd=folder)
    assert await migrate.ended() == code, migrate.output
    assert said in migrate.output
    assert ("lacks service_0002" in migrate.output) == has_more
    assert await revisions.applied_revisions(db) == ["pipeline_9999", "service_0001"]


async def test_a_database_without_any_revision_is_refused_where_tables_are_too(
    start: Start, folder: Path, db: asyncpg.Connection
) -> None:
    await db.execute("DROP TABLE alembic_version")
    process = await start("relay", cwd=folder)
    assert await process.ended() == 1, process.output
    assert "NotMigrated: the database lacks pipeline_0002" in process.output


async def test_nothing_is_refused_if_the_codes_required_schema_is_unknown(
    start: Start, folder: Path, db: asyncpg.Connection
) -> None:
    (folder / "alembic.ini").unlink()
    await bring_to(db)
    relay = await start("relay", cwd=folder)
    await eventually(relay.is_ready)
    await relay.kill()  # its locks and those of DROP are taken in different orders
    await db.execute("DROP SCHEMA pipeline CASCADE")
    process = await start("relay", cwd=folder)
    assert await process.ended() == 1, process.output
    assert "NotMigrated: the database has no pipeline tables yet" in process.output


async def test_migrations_that_cannot_be_read_are_a_sentence(start: Start, folder: Path) -> None:
    (folder / "alembic.ini").write_text("[alembic]\n", "utf-8")
    process = await start("relay", cwd=folder)
    assert await process.ended() == 1, process.output
    assert "CommandError: No 'script_location'" in process.output
    assert "Traceback" not in process.output
