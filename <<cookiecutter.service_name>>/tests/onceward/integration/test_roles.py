"""Every role of the database does its own work, and nothing else."""

import logging
import re
import shlex
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from onceward.apply import statements as apply_statements
from onceward.cli import dead, dead_events, dead_letters, inbox_commands, moves, status
from onceward.cli.dead import STATES
from onceward.cli.dead_events import DeadEvents
from onceward.cli.dead_letters import DeadLetters
from onceward.handlers import statements as handler_statements
from onceward.handlers.staged import StagedEvent
from onceward.operators import adopting, stop_statements, stopping
from onceward.operators import statements as operator_statements
from onceward.operators.stopping import Subject
from onceward.relay import relay
from onceward.relay import statements as relay_statements
from onceward.retention import partition_statements, partitions
from onceward.retention import statements as retention_statements
from onceward.retention.archive import Archive
from onceward.retention.maintenance import make_ahead, run_retention
from onceward.retention.partitions import NotOwner
from onceward.retry import count_statements
from onceward.retry import statements as retry_statements
from onceward.schema import FIRST_LANE_OF_CALLS
from onceward.servers import cluster
from onceward.settings import Settings

from .bank import CLAIM, Bank
from .grantees import DIRECTLY, PARTS, PASSWORD, SQL, NotGranted, Roles, grant, splitting
from .outgoing import event, stage
from .processes import starting
from .prometheus import series
from tests.contract.bank import Base, Deposit
from tests.servers.databases import HOME, administer, drop_databases
from tests.servers.processes import ROOT, Start
from tests.servers.topics import following
from tests.servers.waiting import eventually

pytestmark = [DIRECTLY, pytest.mark.full]

COLUMNS = "topic, event_id, source, type, content_type"
VALUES = "'t', 'e', 's', 'y', 'c'"

STATEMENT = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b")

PUBLISHED = """
SELECT bool_and(pg_visible_in_snapshot(xid, seen))
  FROM pipeline.outbox JOIN pipeline.outbox_cursor USING (shard)
"""

MODULES: dict[str, tuple[ModuleType, ...]] = {
    "service": (
        *(apply_statements, retry_statements, count_statements, handler_statements, moves),
    ),
    "relay": (relay, relay_statements),
    "operator": (
        *(status, dead, dead_events, dead_letters, inbox_commands),
        stop_statements,
    ),
    "retention": (retention_statements, partition_statements),
}
"""Modules whose statements each role executes."""

BY_RETENTION = retention_statements.CLOSE_GENERATION, retention_statements.FORGET_GENERATIONS

THROTTLED = apply_statements.READ_STOPS, apply_statements.NOTE_TAKEN

BY_OTHERS = {*BY_RETENTION}
"""Statements of these modules that another role executes."""

BY_A_PERSON = (
    *(
        operator_statements.LOCK_LANE,
        operator_statements.REDRIVE_ROWS,
        operator_statements.DISCARD_ROWS,
    ),
    *(
        handler_statements.CANCEL_SCHEDULED,
        operator_statements.LIST_SCHEDULED,
        apply_statements.ADD_TO_BACKLOG,
    ),
    *(
        operator_statements.HOLD_SHARD,
        operator_statements.REDRIVE_EVENTS,
        operator_statements.DISCARD_EVENTS,
    ),
    *(
        operator_statements.READ_POSITIONS_OF_GROUP,
        count_statements.COUNT_BACKLOG,
        operator_statements.COUNT_UNPUBLISHED,
        operator_statements.LIST_RELAYS,
    ),
    *(
        operator_statements.COUNT_WAITING_EVENTS,
        operator_statements.COUNT_DEAD_EVENTS,
        operator_statements.COUNT_SCHEDULED,
    ),
    *(store.chunk_statement(state) for store in (DeadLetters, DeadEvents) for state in STATES),
)

BESIDES: dict[str, tuple[str, ...]] = {
    "service": (
        *THROTTLED,
        stop_statements.ADD_TO_AUDIT,
        operator_statements.READ_POSITIONS_OF_GROUP,
        operator_statements.SET_POSITION,
        operator_statements.SET_POSITION_BACK,
        operator_statements.READ_ROW,
    ),
    "relay": (*THROTTLED, operator_statements.HAS_ANY_RELAY_BEGUN),
    "operator": BY_A_PERSON,
    "retention": (
        *BY_RETENTION,
        stop_statements.ADD_TO_AUDIT,
        operator_statements.NOTE_NO_ARCHIVING,
        operator_statements.SKIP_ARCHIVE,
    ),
}
"""Statements of other modules that a role executes."""

GUIDE = (ROOT / "docs" / "security.md").read_text("utf-8")

# Without partitions, which come with their table.
RELATIONS = """
SELECT relname FROM pg_class
 WHERE relnamespace = 'pipeline'::regnamespace AND relkind IN ('r', 'p', 'S', 'v', 'm', 'f')
   AND NOT relispartition
"""


@pytest.fixture
async def granted(server_url: str, direct_url: str, db: asyncpg.Connection) -> AsyncIterator[Roles]:
    """Roles that may do what they may."""
    async with splitting(server_url, direct_url, db) as made:
        yield made


@pytest.fixture
async def start(bank: Bank, kafka: str) -> AsyncIterator[Start]:
    async with starting(bank, kafka_bootstrap_servers=kafka, lock_timeout=2) as start:
        yield start


async def test_everything_that_can_be_granted_has_a_decision(db: asyncpg.Connection) -> None:
    named = set(re.findall(r"\bpipeline\.(\w+)", SQL.read_text("utf-8")))
    named -= {"personal_forgotten", "personal_key"}  # of an optional package
    named |= {"inbox_filter"}  # only processes of version 1.0.0 use it
    assert named == {row["relname"] for row in await db.fetch(RELATIONS)}


async def test_nobody_may_number_events(granted: Roles, db: asyncpg.Connection) -> None:
    writable = (
        "SELECT attname FROM pg_attribute WHERE attrelid = 'pipeline.outbox'::regclass"
        " AND attnum > 0 AND has_column_privilege($1, attrelid, attnum, 'INSERT')"
    )
    changes = "SELECT has_any_column_privilege($1, 'pipeline.outbox', 'UPDATE')"
    for part in ("service", "relay", "operator"):
        rows = await db.fetch(writable, granted.names[part])
        event = {"service": StagedEvent._fields, "relay": (*StagedEvent._fields, "release")}
        assert {row["attname"] for row in rows} == set(event.get(part, ()))
        assert not await db.fetchval(changes, granted.names[part])


async def test_each_process_does_its_work_under_its_own_role(
    granted: Roles,
    bank: Bank,
    start: Start,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
) -> None:
    consuming = await start("consume", database_url=granted.of("service"))
    relaying = await start("relay", database_url=granted.of("relay"))
    await eventually(consuming.is_ready)
    await eventually(relaying.is_ready)
    deposits = Deposit(5), Deposit(7), Deposit(9, failures=2), Deposit(11, "bob", failures=99)
    for one in deposits:
        await one.send(producer, bank.deposits)
    # It cancels and schedules an event, and makes a call; and a result to keep.
    await Deposit(1, type="promised").send(producer, bank.deposits)
    await Deposit(2, type="noted").send(producer, bank.deposits)
    await db.execute(
        f"INSERT INTO pipeline.scheduled (name, due_at, {COLUMNS})"
        f" VALUES ('n', now(), '{bank.balances}', 'e', 's', 'y', 'c')"
    )
    dead = "SELECT count(*) = 1 FROM pipeline.backlog WHERE died_at IS NOT NULL"
    await eventually(lambda: db.fetchval(dead))
    # Three balances, and what was scheduled, here and by the promise.
    await eventually(lambda: db.fetchval("SELECT count(*) = 5 FROM pipeline.outbox"))
    await eventually(lambda: db.fetchval("SELECT count(*) = 1 FROM pipeline.backlog"))
    remembered = (
        "SELECT array_agg(consumer ORDER BY consumer) FROM pipeline.inbox WHERE consumer <> $1"
    )
    assert await db.fetchval(remembered, "deposit") == ["note", "promise", "tell"]
    await eventually(lambda: db.fetchval(PUBLISHED))
    for process in (consuming, relaying):
        assert "permission denied" not in process.output, process.output

    operator = granted.of("operator")
    looking = ("status",), ("retention", "status"), ("dead", "list"), ("scheduled", "list")
    for command in looking:
        process = await start(*command, database_url=operator)
        assert await process.ended() == 0, (command, process.output)
    process = await start("doctor", database_url=operator)
    await process.ended()
    assert "GRANT pg_read_all_stats TO" in process.output, "it can't see who holds what open"
    for complaint in ("permission", "can't be made", "lacks"):
        told = [one for one in process.output.splitlines() if complaint in one]
        assert all("as it should be" in one for one in told), process.output
    process = await start("dead", "redrive", "--all", "--yes", database_url=operator)
    await process.says("is dead again")
    await eventually(lambda: db.fetchval(dead))
    process = await start(
        "dead", "discard", "--all", "--yes", "--because", "a test", database_url=operator
    )
    assert await process.ended() == 0, process.output
    assert await db.fetchval("SELECT discarded_why FROM pipeline.backlog") == "a test"
    asked = "topic", bank.deposits, "--because", "a test"
    for line in (("pause", *asked, "--yes"), ("resume", *asked)):
        process = await start(*line, database_url=operator)
        assert await process.ended() == 0, process.output
    actions = [row[0] for row in await db.fetch("SELECT action FROM pipeline.audit ORDER BY id")]
    assert actions == ["redrive", "discard", "pause", "resume"]


async def test_a_script_that_was_not_run_after_a_migration_is_named(
    granted: Roles, bank: Bank, start: Start, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    """As where the table `release` is new, and was not granted yet."""
    await db.execute(f"REVOKE ALL ON pipeline.release FROM {granted.names['service']}")
    process = await start("consume", database_url=granted.of("service"), release="1.4.2")
    await process.says("permission denied for table release")
    await Deposit(5).send(producer, bank.deposits)
    await grant(granted.of("owner"), granted.parts)
    process = await start("consume", database_url=granted.of("service"), release="1.4.2")
    await eventually(process.is_ready)
    await eventually(lambda: db.fetchval("SELECT count(*) = 1 FROM pipeline.inbox"))


async def test_a_relay_publishes_more_than_a_page_under_its_own_role(
    granted: Roles, bank: Bank, start: Start, db: asyncpg.Connection, kafka: str
) -> None:
    await stage(db, [event(bank.balances, number) for number in range(10)])
    async with following(kafka, bank.balances) as tail:
        await start("relay", database_url=granted.of("relay"), relay_batch_events=2)
        await tail.until_ids(range(10))


async def test_a_database_is_adopted_by_its_owner_and_by_nobody_else(
    granted: Roles, db: asyncpg.Connection
) -> None:
    await db.execute("UPDATE pipeline.outbox_cluster SET system_identifier = 1")
    for role in PARTS:
        async with granted.connected(role) as connection:
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await adopting.adopt(connection, keep_progress=True)
    async with granted.connected("owner") as connection:
        await adopting.adopt(connection, keep_progress=True)
        assert await cluster.is_ours(connection)


async def test_who_may_not_read_a_sequence_is_told_nothing_of_it(
    granted: Roles, db: asyncpg.Connection
) -> None:
    """PostgreSQL 18 answers NULL then, as for one that was never used."""
    await stage(db, [event("t", 1)])
    for role in (*PARTS, "owner"):
        async with granted.connected(role) as connection:
            assert await adopting.sequences_behind(connection) == []


def blocks(language: str) -> list[str]:
    """Return the examples of the page's chapter on roles."""
    _, chapter = GUIDE.split("## Roles of the database\n")
    return re.findall(rf"^```{language}\n(.*?)^```$", chapter, re.DOTALL | re.MULTILINE)


@pytest.fixture
async def set_up(server_url: str) -> AsyncIterator[Roles]:
    """Do what docs/security.md has an administrator do first."""
    parcels = f"parcels_{uuid4().hex[:8]}"
    (page,) = blocks("sql")
    page = page.replace("parcels", parcels).replace("…", PASSWORD)
    try:
        for statement in page.splitlines():
            await administer(server_url, statement)
        url = make_url(server_url).set(database=parcels)
        (before_15,) = re.findall(r"also does `(REVOKE [^`]+)` in that database", GUIDE)
        await administer(url.render_as_string(hide_password=False), before_15)
        every = ("migration", *PARTS)
        names = {one: f"{parcels}_{one}" for one in every}
        yield Roles(names, url.render_as_string(hide_password=False))
    finally:
        await drop_databases(server_url, [parcels])
        for name in re.findall("CREATE ROLE ([a-z0-9_]+)", page):
            await administer(server_url, f"DROP ROLE IF EXISTS {name}")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a folder to migrate from; the bank has no revisions of its own."""
    (tmp_path / "alembic.ini").write_text(
        f"[alembic]\nscript_location = {HOME}\n"
        "version_locations = onceward:migrations/versions\npath_separator = newline\n"
    )
    return tmp_path


async def test_a_database_is_set_up_and_served_without_superuser_roles(
    set_up: Roles, home: Path, start: Start, bank: Bank, producer: AIOKafkaProducer
) -> None:
    releasing, hourly = blocks("sh")
    migrating, granting = releasing.splitlines()
    assert granting.split() == [
        "psql",
        *(word for part in PARTS for word in ("--set", f"{part}=parcels_{part}")),
        *("--file", "deploy/postgres/roles.sql", "postgresql://parcels_migration@host/parcels"),
    ]
    engine = create_async_engine(set_up.of("migration"))

    async def release() -> None:
        _, *arguments = shlex.split(migrating)
        process = await start(*arguments, cwd=home, database_url=set_up.of("migration"))
        assert await process.ended() == 0, process.output
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        await grant(set_up.of("migration"), set_up.parts)

    await release()
    consuming = await start("consume", database_url=set_up.of("service"))
    relaying = await start("relay", database_url=set_up.of("relay"))
    for process in (consuming, relaying):
        await eventually(process.is_ready)
    async with set_up.connected("migration") as db:
        for amount in (5, 7):
            await Deposit(amount).send(producer, bank.deposits)
            await eventually(lambda: db.fetchval("SELECT count(*) > 0 FROM pipeline.outbox"))
            await eventually(lambda: db.fetchval(PUBLISHED))
            await release()
        await eventually(lambda: db.fetchval("SELECT sum(balance) = 12 FROM account"))
        await eventually(lambda: db.fetchval(PUBLISHED))
    _, *arguments = shlex.split(hourly.splitlines()[0])
    process = await start(*arguments, database_url=set_up.of("retention"))
    assert await process.ended() == 0, process.output
    for role in PARTS:
        process = await start("doctor", database_url=set_up.of(role))
        await process.ended()
        assert not re.search("Traceback|lacks|may do nothing", process.output), process.output
        sees_all = role in ("operator", "retention")
        assert ("pg_read_all_stats" in process.output) != sees_all, process.output
    for process in (consuming, relaying):
        assert process.is_running
        assert "permission denied" not in process.output, process.output
    await engine.dispose()


@pytest.mark.parametrize("role", ["service", "relay"])
async def test_who_knows_an_archive_and_may_drop_nothing_tells_those_who_drop(
    granted: Roles, db: asyncpg.Connection, settings: Callable[..., Settings], role: str
) -> None:
    known = cast(Archive, SimpleNamespace(is_on=True))
    async with granted.connected(role) as connection:
        with pytest.raises(NotOwner):
            await run_retention(connection, settings(), archive=known)
    assert await db.fetchval("SELECT archives FROM pipeline.retention_round")


async def test_an_operator_may_judge_events_that_kafka_refuses(granted: Roles) -> None:
    async with granted.connected("operator") as connection, connection.transaction():
        await connection.execute(operator_statements.HOLD_SHARD, 0)
        await connection.execute(operator_statements.REDRIVE_EVENTS, [])
        await connection.execute(operator_statements.DISCARD_EVENTS, [], "somebody", "a test")


async def test_a_service_may_schedule_cancel_and_claim(granted: Roles) -> None:
    async with granted.connected("service") as connection, connection.transaction():
        await connection.execute(handler_statements.CANCEL_SCHEDULED, ["none"])
        await connection.execute(CLAIM, ["name"], ["id"])
        await connection.execute(
            f"INSERT INTO pipeline.scheduled (name, due_at, {COLUMNS})"
            f" VALUES ('n', now(), {VALUES}) ON CONFLICT (name) DO UPDATE SET due_at = now()"
        )


async def discarded_long_ago(db: asyncpg.Connection) -> None:
    """Store a dead letter and a dead event that may be deleted."""
    await db.execute(
        "INSERT INTO pipeline.backlog (key, lane, order_key, consumer, topic, partition,"
        ' "offset", timestamp, headers, hash_version, reason, attempts, waited, holds, died_at,'
        " discarded_at) VALUES ('k', 0, '', 'deposit', 't', 0, 0, 0, '[]', 1, 'x', 1, 0, false,"
        " now() - interval '50 days', now() - interval '40 days')"
    )
    await db.execute(
        "INSERT INTO pipeline.outbox_rejected (id, created_at, topic, event_id, source, type,"
        " content_type, reason, died_at, discarded_at)"
        " VALUES (1, now(), 't', 'e', '/s', 'x', 'y', 'x', now() - interval '50 days',"
        " now() - interval '40 days')"
    )
    await db.execute("UPDATE pipeline.inbox_generation SET since = now() - interval '9 days'")


async def test_retention_makes_and_drops_partitions_which_belong_to_it(
    granted: Roles, start: Start, db: asyncpg.Connection
) -> None:
    (gone,) = await db.fetchrow(
        "SELECT max(relname) FROM pg_class WHERE relname ~ '^outbox_p[0-9]{8}$'"
    )
    await db.execute(f"DROP TABLE pipeline.{gone}")
    await db.execute(
        "CREATE TABLE pipeline.outbox_p20200101 PARTITION OF pipeline.outbox"
        " FOR VALUES FROM ('2020-01-01 00:00+00') TO ('2020-01-02 00:00+00');"
        f"ALTER TABLE pipeline.outbox_p20200101 OWNER TO {granted.names['retention']};"
        "UPDATE pipeline.outbox_cursor SET seen = pg_current_snapshot()"
    )
    await discarded_long_ago(db)

    async def is_dropped() -> bool:  # when no transaction of the server is as old as the day
        process = await start("retention", "run", database_url=granted.of("retention"))
        assert await process.ended() == 0, process.output
        await db.execute("UPDATE pipeline.outbox_cursor SET seen = pg_current_snapshot()")
        return bool(await db.fetchval("SELECT to_regclass('pipeline.outbox_p20200101') IS NULL"))

    await eventually(is_dropped)
    assert await db.fetchval("SELECT to_regclass('pipeline.outbox_p20200101') IS NULL")
    for table in ("backlog", "outbox_rejected"):
        assert await db.fetchval(f"SELECT count(*) FROM pipeline.{table}") == 0
    async with granted.connected("owner") as connection:
        await partitions.attach(connection, "inbox", "inbox_g999", "IN (999)")
    for one in gone, "inbox_g999":  # whoever has made it
        owner = await db.fetchval("SELECT tableowner FROM pg_tables WHERE tablename = $1", one)
        assert owner == granted.names["retention"]


async def test_a_role_without_ownership_leaves_partitions_to_others_and_reports_shortage(
    granted: Roles, start: Start, db: asyncpg.Connection
) -> None:
    process = await start("retention", "run", database_url=granted.of("service"))
    assert await process.ended() == 1
    assert f"a member of their owner {granted.names['retention']}" in process.output
    assert "Traceback" not in process.output

    days = "SELECT relname FROM pg_class WHERE relname ~ '^outbox_p[0-9]{8}$' ORDER BY 1"
    today, *later = [row["relname"] for row in await db.fetch(days)]
    await db.execute(f"DROP TABLE pipeline.{later[-1]}, pipeline.{later[-2]}")
    await db.execute(
        "UPDATE pipeline.retention_round SET held = 2, finished_at = now() - interval '7 hours'"
    )
    relaying = await start("relay", database_url=granted.of("relay"))
    await eventually(relaying.is_ready)
    assert "cannot create future partitions of the outbox" in relaying.output
    told = series((await relaying.get("/metrics"))[1])
    values = {name: value for (name, _), value in told.items()}
    assert values["pipeline_retention_held"] == 2
    assert values["pipeline_retention_age_seconds"] > 25_000
    await relaying.kill()

    await db.execute(f"DROP TABLE pipeline.{today}")
    relaying = await start("relay", database_url=granted.of("relay"))
    await relaying.says("service retention run")
    assert not await relaying.is_ready()
    process = await start("retention", "run", database_url=granted.of("retention"))
    assert await process.ended() == 0, process.output
    await eventually(relaying.is_ready)


async def test_partitions_left_to_the_next_retention_round_are_not_a_shortage(
    granted: Roles,
    start: Start,
    db: asyncpg.Connection,
    settings: Callable[..., Settings],
    caplog: pytest.LogCaptureFixture,
) -> None:
    await db.execute("UPDATE pipeline.inbox_generation SET opened_at = now() - interval '97 hours'")
    async with granted.connected("retention") as connection:
        await run_retention(connection, settings())
    assert await db.fetchval("SELECT current FROM pipeline.inbox_generation") == 2
    assert await partitions.like(db, "inbox_g4"), "as many as before stand ready"

    # As after a rotation by somebody who then died, before midnight.
    await db.execute("DROP TABLE pipeline.inbox_g4")
    relaying = await start("relay", database_url=granted.of("relay"))
    await eventually(relaying.is_ready)
    told = series((await relaying.get("/metrics"))[1])
    values = {name: value for (name, _), value in told.items()}
    assert values["pipeline_outbox_ahead_seconds"] > 6 * 86_400
    assert "cannot create future partitions" not in relaying.output
    # And after it.
    *_, furthest = await partitions.like(db, "outbox_p[0-9]{8}")
    await db.execute(f"DROP TABLE pipeline.{furthest.name}")
    async with granted.connected("relay") as connection:
        caplog.clear()
        await make_ahead(connection, settings())
        assert not any(one.levelno >= logging.WARNING for one in caplog.records)
        # A second one that is missing is more than what was left.
        await make_ahead(connection, settings(inbox_generations_ahead=3))
        assert "cannot create future partitions of the inbox" in caplog.text


async def test_a_partition_of_another_owner_keeps_no_other_from_being_summarized(
    granted: Roles, db: asyncpg.Connection
) -> None:
    await db.execute(f"ALTER TABLE pipeline.inbox_g1 OWNER TO {granted.names['owner']}")
    async with granted.connected("retention") as connection:
        assert await connection.fetch(retention_statements.SUMMARIZE_INDEXES)


KEDA = ROOT / "deploy" / "kubernetes" / "components" / "keda"
QUERIES = [
    " ".join(query.split())
    for path in sorted(KEDA.glob("*.yaml"))
    for query in re.findall(r"query: >-\n((?: {10}.*\n)+)", path.read_text("utf-8"))
]
"""What the autoscaler asks as the operator."""


async def test_the_autoscaler_counts_what_is_due(
    granted: Roles, bank: Bank, db: asyncpg.Connection
) -> None:
    assert len(QUERIES) >= 2
    await stage(db, [event(bank.balances, n) for n in range(3)])
    await db.execute(
        'INSERT INTO pipeline.backlog (key, lane, order_key, consumer, topic, partition, "offset",'
        " timestamp, headers, hash_version, reason, attempts, waited, holds, due_at)"
        " SELECT sha256(n::text::bytea), 16 * n, '', 'deposit', 't', 0, n, 0, '[]', 1, 'x', 0, 0,"
        " false, now() + (n % 2) * interval '1 hour' FROM generate_series(0, 5) AS n"
    )
    async with granted.connected("operator") as connection:
        for query in QUERIES:
            of_messages = 2 if f"lane < {FIRST_LANE_OF_CALLS} " in query else 1
            waiting = 3 if "pipeline.outbox" in query else of_messages
            assert await connection.fetchval(query) == waiting, query
        paused = [Subject("consumer", "deposit")]
        await stopping.ask(connection, paused, lasts=None, who="ada", why="a test")
        for query in QUERIES:
            waiting = 3 if "pipeline.outbox" in query else 0
            assert await connection.fetchval(query) == waiting, query


def statements(role: str) -> list[str]:
    """Return those that the role executes, of what the engine has written down."""
    found = [value for module in MODULES[role] for value in vars(module).values()]
    found += [one for value in found if isinstance(value, dict) for one in value.values()]
    mine = [one for one in found if isinstance(one, str) and STATEMENT.match(one)]
    ours = BESIDES[role]
    mine += ours
    # What is put in when a statement is executed, `{…}` or `:names`, PostgreSQL does not know.
    whole = [one for one in mine if not re.search("[{]|:names", one)]
    return [one for one in mine if one in ours or (one in whole and one not in BY_OTHERS)]


@pytest.mark.parametrize("role", MODULES)
async def test_a_role_may_do_every_statement_of_its_part(granted: Roles, role: str) -> None:
    asked = statements(role)
    assert len(asked) > 10
    assert await denied(granted, role, asked) == []


async def denied(
    granted: Roles, role: str, asked: list[str], how: str = "EXPLAIN (GENERIC_PLAN)"
) -> list[str]:
    """Return those of the statements that the role may not execute."""
    found = []
    async with granted.connected(role) as connection:
        for one in asked:
            try:
                await connection.execute(f"{how} {one}")
            except asyncpg.InsufficientPrivilegeError:
                found.append(one)
    return found


BEYOND_THE_DATABASE = [
    "CREATE ROLE somebody",
    "CREATE DATABASE somewhere",
    "DROP DATABASE postgres",
    "ALTER ROLE service PASSWORD 'guessed'",  # the superuser of the tests
    "ALTER ROLE CURRENT_USER SUPERUSER",
    "SET ROLE service",
    "GRANT pg_read_all_data TO CURRENT_USER",
    "ALTER SYSTEM SET fsync = off",
    "SELECT rolpassword FROM pg_authid",
    "SELECT pg_read_file('PG_VERSION')",
    "COPY account TO '/tmp/account'",
    "COPY account TO PROGRAM 'cat'",
    "UPDATE pg_class SET relname = 'x'",
    "SELECT FROM neighbour.ledger",
    "DROP TABLE neighbour.ledger",
    "DROP SCHEMA neighbour CASCADE",
    "CREATE TABLE neighbour.mine (a int)",
]
"""What those may not do that own the tables; a neighbour's are in the same database."""

FORBIDDEN = {
    "service": [
        f"INSERT INTO pipeline.outbox (id, {COLUMNS}) OVERRIDING SYSTEM VALUE VALUES (1, {VALUES})",
        f"INSERT INTO pipeline.outbox (xid, {COLUMNS}) VALUES ('1', {VALUES})",
        "SELECT FROM pipeline.outbox",
        "SELECT nextval('pipeline.outbox_id_seq')",
        "DELETE FROM pipeline.outbox",
        "UPDATE pipeline.outbox_cursor SET last_id = 0",
        "DELETE FROM pipeline.outbox_rejected",
        "DELETE FROM pipeline.position",
        "UPDATE pipeline.inbox_generation SET oldest = 0",
        "DELETE FROM pipeline.inbox_closed",
        "DELETE FROM pipeline.claim",
        "UPDATE pipeline.throttle SET until = now()",
        "DELETE FROM pipeline.throttle",
        "UPDATE pipeline.outbox_cluster SET system_identifier = 1",
        "UPDATE pipeline.retention_round SET held = 0",
        "TRUNCATE pipeline.backlog",
        "DROP TABLE pipeline.backlog",
        "CREATE TABLE pipeline.mine (a int)",
        "ALTER TABLE account ADD b int",
    ],
    "relay": [
        f"INSERT INTO pipeline.outbox (id, {COLUMNS}) OVERRIDING SYSTEM VALUE VALUES (1, {VALUES})",
        f"INSERT INTO pipeline.outbox (xid, {COLUMNS}) VALUES ('1', {VALUES})",
        "UPDATE pipeline.outbox SET type = 'x'",
        "DELETE FROM pipeline.outbox",
        "SELECT FROM pipeline.backlog",
        "SELECT FROM pipeline.inbox",
        "SELECT FROM pipeline.position",
        "SELECT FROM account",
        "SELECT nextval('pipeline.outbox_id_seq')",
        "DELETE FROM pipeline.outbox_cursor",
        "UPDATE pipeline.scheduled SET topic = 'x'",
        f"INSERT INTO pipeline.scheduled (name, due_at, {COLUMNS}) VALUES ('n', now(), {VALUES})",
        "UPDATE pipeline.outbox_cluster SET system_identifier = 1",
        "DROP TABLE pipeline.outbox",
        "CREATE TABLE pipeline.mine (a int)",
    ],
    "operator": [
        f"INSERT INTO pipeline.outbox ({COLUMNS}) VALUES ({VALUES})",
        "UPDATE pipeline.position SET next_offset = 0",
        "DELETE FROM pipeline.position",
        "DELETE FROM pipeline.inbox",
        "DELETE FROM pipeline.backlog",
        "UPDATE pipeline.backlog SET value = ''",
        "UPDATE pipeline.outbox_cursor SET last_id = 0",
        "UPDATE pipeline.outbox_rejected SET payload = ''",
        "UPDATE pipeline.audit SET who = 'x'",
        "DELETE FROM pipeline.audit",
        "DELETE FROM pipeline.outbox_rejected",
        "UPDATE pipeline.retention_round SET held = 0",
        "SELECT FROM account",
        "DROP TABLE pipeline.backlog",
        "CREATE TABLE pipeline.mine (a int)",
    ],
    "retention": [
        *BEYOND_THE_DATABASE,
        "SELECT FROM account",
        "UPDATE account SET balance = 0",
        "DROP TABLE account",
        "CREATE TABLE public.mine (a int)",
        "SELECT FROM pipeline.position",
        "UPDATE pipeline.position SET next_offset = 0",
        "SELECT FROM pipeline.audit",
        "DELETE FROM pipeline.audit",
        "SELECT value FROM pipeline.backlog",
        "SELECT error FROM pipeline.backlog",
        "UPDATE pipeline.backlog SET died_at = now()",
        "SELECT payload FROM pipeline.outbox_rejected",
        "SELECT payload FROM pipeline.scheduled",
        "DELETE FROM pipeline.scheduled",
        "UPDATE pipeline.outbox_cursor SET last_id = 0",
        "UPDATE pipeline.outbox_cluster SET system_identifier = 1",
        "DELETE FROM pipeline.outbox_relay",
        "INSERT INTO pipeline.claim (name, event_id) VALUES ('n', 'e')",
        "UPDATE alembic_version SET version_num = 'x'",
        "DROP TABLE pipeline.backlog",
        "DROP TABLE pipeline.position",
        "TRUNCATE pipeline.backlog",
        "DROP SCHEMA pipeline CASCADE",
        "ALTER TABLE pipeline.backlog ADD b int",
    ],
    "owner": BEYOND_THE_DATABASE,
}


@pytest.mark.parametrize("role", FORBIDDEN)
async def test_what_a_role_does_not_need_is_denied(
    granted: Roles, db: asyncpg.Connection, role: str
) -> None:
    await db.execute("CREATE SCHEMA neighbour; CREATE TABLE neighbour.ledger ()")
    assert await denied(granted, role, FORBIDDEN[role], "") == FORBIDDEN[role]


async def test_the_partitions_go_to_another_role_while_the_service_runs(
    granted: Roles,
    start: Start,
    bank: Bank,
    producer: AIOKafkaProducer,
    server_url: str,
    db: asyncpg.Connection,
) -> None:
    consuming = await start("consume", database_url=granted.of("service"))
    await eventually(consuming.is_ready)
    await Deposit(5).send(producer, bank.deposits)
    await eventually(lambda: db.fetchval("SELECT count(*) = 1 FROM pipeline.inbox"))
    heir = f"heir_{uuid4().hex[:8]}"
    await administer(server_url, f"CREATE ROLE {heir}; GRANT {heir} TO {granted.names['owner']}")
    try:
        await grant(granted.of("owner"), granted.parts | {"retention": heir})
        owners = "SELECT array_agg(DISTINCT tableowner::text) FROM pg_tables WHERE tablename ~ $1"
        assert await db.fetchval(owners, "^(inbox|outbox)(_[gp][0-9]+)?$") == [heir]
        await Deposit(7).send(producer, bank.deposits)
        await eventually(lambda: db.fetchval("SELECT count(*) = 2 FROM pipeline.inbox"))
        former = await start("retention", "run", database_url=granted.of("retention"))
        assert await former.ended() == 1
        assert f"a member of their owner {heir}" in former.output
        async with granted.connected("owner") as connection:
            await partitions.attach(connection, "inbox", "inbox_g999", "IN (999)")
        assert await may_read(db, granted.names["operator"], "inbox_g999")
        assert not await may_read(db, granted.names["relay"], "inbox_g999")
    finally:
        await db.execute(f"REASSIGN OWNED BY {heir} TO {granted.names['retention']}")
        await db.execute(f"DROP OWNED BY {heir}")
        await administer(server_url, f"DROP ROLE {heir}")


async def may_read(db: asyncpg.Connection, name: str, table: str) -> bool:
    may: bool = await db.fetchval(
        "SELECT has_table_privilege($1, 'pipeline.' || $2, 'SELECT')", name, table
    )
    return may


async def test_a_role_with_all_parts_keeps_the_rest_after_losing_retention(
    granted: Roles, server_url: str, settings: Callable[..., Settings]
) -> None:
    all_in_one, owner = granted.names["service"], granted.names["owner"]
    named = granted.parts | {"relay": all_in_one}
    await administer(server_url, f"GRANT {all_in_one} TO {owner}")
    try:
        await grant(granted.of("owner"), named | {"retention": all_in_one})
        async with granted.connected("service") as connection:
            await run_retention(connection, settings())
        await grant(granted.of("owner"), named)
        for part in ("service", "relay"):
            assert await denied(granted, "service", statements(part)) == []
    finally:
        await administer(server_url, f"REVOKE {all_in_one} FROM {owner}")


async def test_partitions_that_are_in_use_are_not_waited_for_one_by_one(
    granted: Roles, server_url: str, db: asyncpg.Connection
) -> None:
    heir = f"heir_{uuid4().hex[:8]}"
    await administer(server_url, f"CREATE ROLE {heir}; GRANT {heir} TO {granted.names['owner']}")
    try:
        async with db.transaction():
            await db.execute("SELECT FROM pipeline.outbox")
            with pytest.raises(NotGranted, match="lock timeout"):
                await grant(granted.of("owner"), granted.parts | {"retention": heir})
        assert await denied(granted, "service", statements("service")) == []
    finally:
        await administer(server_url, f"DROP ROLE {heir}")


async def test_who_migrates_and_is_no_member_of_retention_is_told_so(
    granted: Roles, server_url: str
) -> None:
    stranger = f"stranger_{uuid4().hex[:8]}"
    await administer(server_url, f"CREATE ROLE {stranger}")
    try:
        with pytest.raises(NotGranted, match=f'(SET ROLE|member of role) "{stranger}"'):
            await grant(granted.of("owner"), granted.parts | {"retention": stranger})
    finally:
        await administer(server_url, f"DROP ROLE {stranger}")


async def test_a_superuser_may_grant_too(
    granted: Roles, direct_url: str, db: asyncpg.Connection
) -> None:
    await db.execute(f"REVOKE ALL ON pipeline.position FROM {granted.names['service']}")
    await grant(direct_url, granted.parts)
    assert await denied(granted, "service", statements("service")) == []
    assert await denied(granted, "owner", ["CREATE TABLE pipeline.later (a int)"], "") == []
    assert await may_read(db, granted.names["operator"], "later")


async def test_to_grant_takes_what_was_given_before(granted: Roles, db: asyncpg.Connection) -> None:
    await db.execute(f"GRANT SELECT (key), DELETE ON pipeline.backlog TO {granted.names['relay']}")
    await db.execute("GRANT ALL ON pipeline.backlog TO PUBLIC")
    await grant(granted.of("owner"), granted.parts)
    taken = ["SELECT key FROM pipeline.backlog", "DELETE FROM pipeline.backlog"]
    assert await denied(granted, "relay", taken) == taken
    assert await denied(granted, "relay", ["SELECT FROM pipeline.outbox"]) == []


def as_identifier(name: str) -> str:
    """Return a name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'


async def test_tables_of_the_service_are_let_in_wherever_the_owner_makes_them(
    granted: Roles, db: asyncpg.Connection
) -> None:
    await db.execute(f"CREATE SCHEMA ours AUTHORIZATION {granted.names['owner']}")
    for table in (*Base.metadata.tables, "alembic_version"):
        await db.execute(f"ALTER TABLE public.{as_identifier(table)} SET SCHEMA ours")
    name = await db.fetchval("SELECT current_database()")
    await db.execute(f"ALTER DATABASE {name} SET search_path = ours")
    await grant(granted.of("owner"), granted.parts)
    later = "CREATE TABLE ours.later (a int GENERATED BY DEFAULT AS IDENTITY, b serial)"
    assert await denied(granted, "owner", [later], "") == []
    reading = ["SELECT FROM ours.account", "SELECT FROM ours.later"]
    assert await denied(granted, "service", [*reading, "INSERT INTO later VALUES (DEFAULT)"]) == []
    assert await denied(granted, "service", ["SELECT nextval('later_b_seq')"], "") == []
    assert await denied(granted, "operator", reading) == reading


@pytest.mark.parametrize(
    ("one", "complaint"),
    [
        ("owner", "member of a role that owns tables"),
        ("public", 'role "public" does not exist'),
        ("nobody", 'role "nobody" does not exist'),
        ('odd"; DROP TABLE account; --', "does not exist"),
    ],
)
async def test_who_can_not_be_held_to_a_part_is_refused(
    granted: Roles, db: asyncpg.Connection, one: str, complaint: str
) -> None:
    with pytest.raises(NotGranted, match=complaint):
        await grant(granted.of("owner"), granted.parts | {"relay": granted.names.get(one, one)})
    assert await db.fetchval("SELECT to_regclass('account') IS NOT NULL")
    assert await denied(granted, "relay", statements("relay")) == []


async def test_a_role_of_an_odd_name_is_let_in(
    granted: Roles, server_url: str, db: asyncpg.Connection
) -> None:
    name = f'Odd "{uuid4().hex[:8]}"; --'
    quoted = as_identifier(name)
    await administer(
        server_url, f"CREATE ROLE {quoted}; GRANT {quoted} TO {granted.names['owner']}"
    )
    try:
        for part in ("relay", "retention"):
            await grant(granted.of("owner"), granted.parts | {part: name})
            assert await may_read(db, name, "outbox")
        await grant(granted.of("owner"), granted.parts)
    finally:
        await db.execute(f"DROP OWNED BY {quoted}")
        await administer(server_url, f"DROP ROLE {quoted}")


async def test_an_operator_reads_partitions_made_later_and_the_others_do_not(
    granted: Roles, db: asyncpg.Connection
) -> None:
    async with granted.connected("retention") as connection:
        await partitions.attach(connection, "inbox", "inbox_g999", "IN (999)")
    for role, may in (("operator", True), ("service", False), ("relay", False)):
        assert await may_read(db, granted.names[role], "inbox_g999") is may
