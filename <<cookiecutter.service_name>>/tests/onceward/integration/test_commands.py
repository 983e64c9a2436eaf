"""The command line `service`."""

import json
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import asyncpg
import pytest
import typer
from aiokafka.admin import AIOKafkaAdminClient
from typer.testing import CliRunner

from onceward import Service
from onceward.cli.commands import command_line
from onceward.operators import audit
from onceward.operators.audit import Change
from onceward.retention.archive import Archive
from onceward.servers import cluster

from .bank import Bank
from .conftest import Command, complaint
from .processes import starting
from tests.servers.databases import HOME, empty_database
from tests.servers.processes import Process, Start
from tests.servers.waiting import eventually

ALEMBIC = f"""
[alembic]
script_location = {HOME}
version_locations = onceward:migrations/versions
path_separator = newline
"""


@pytest.fixture
async def empty_database_url(server_url: str, used_databases: list[str]) -> str:
    """URL of a database without tables."""
    return await empty_database(server_url, used_databases)


@pytest.fixture
async def start(
    unborn: Bank,
    empty_database_url: str,
    kafka: str,
) -> AsyncIterator[Start]:
    """Start commands of a bank that has no topics and no tables yet."""
    async with starting(
        unborn,
        database_url=empty_database_url,
        kafka_bootstrap_servers=kafka,
    ) as one:
        yield one


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with an `alembic.ini`, as a service has."""
    (tmp_path / "alembic.ini").write_text(ALEMBIC, "utf-8")
    return tmp_path


async def partitions(kafka: str, *topics: str) -> list[int]:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        found = await admin.describe_topics(list(topics))
    finally:
        await admin.close()
    by_name = {one["topic"]: len(one["partitions"]) for one in found}
    return [by_name[topic] for topic in topics]


def call(unborn: Bank, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Run a command that ends before it needs a server, and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["service", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        command_line(unborn.service)()
    return ended.value.code


def test_without_a_command_it_lists_what_there_is(
    unborn: Bank, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(unborn, monkeypatch) == 2
    said = "".join(capsys.readouterr())
    for name in ("run", "consume", "relay", "migrate", "topics"):
        assert name in said


def with_parameters(command: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Yield the commands that take anything, and what they are called."""
    for name, one in getattr(command, "commands", {}).items():
        if getattr(one, "commands", None):
            yield from with_parameters(one, *path, name)
        elif one.params:
            yield " ".join([*path, name]), one


def test_the_help_of_every_command_has_an_example_that_is_one(unborn: Bank) -> None:
    app = command_line(unborn.service)
    assert isinstance(app, typer.Typer)
    commands = dict(with_parameters(typer.main.get_command(app)))
    assert len(commands) > 15
    for name, command in commands.items():
        example = (command.epilog or "").removeprefix("For example: service ")
        assert example.startswith(name), name
        # Read to its end before the help is shown, and nothing is done.
        done = CliRunner().invoke(app, [*shlex.split(example), "--help"])
        assert done.exit_code == 0, done.output


def test_help_needs_no_settings(
    unborn: Bank, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PIPELINE_DATABASE_URL", raising=False)
    assert call(unborn, monkeypatch, "relay", "--help") == 0
    assert "Publish the outbox" in capsys.readouterr().out


def test_words_are_explained_without_settings(
    unborn: Bank, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PIPELINE_DATABASE_URL", raising=False)
    assert call(unborn, monkeypatch, "help", "words", "LAG", "redr", "--json") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["word"] for one in found] == ["Kafka lag", "Redrive"]
    assert call(unborn, monkeypatch, "help", "words") == 0
    assert found[0]["meaning"] in capsys.readouterr().out
    assert call(unborn, monkeypatch, "help", "words", "walk") == 2


async def test_statements_are_printed_by_room_and_with_the_plans_that_they_name(
    command: Command,
) -> None:
    shown = await command("sql", "--json")
    assert shown.exit_code == 0, shown.output
    names = {(one["room"], one["name"]) for one in map(json.loads, shown.stdout.splitlines())}
    assert {("apply", "move_positions"), ("consume", "read_database_id")} < names
    assert {("retry", "claim_lanes"), ("retry", "count_backlog")} < names
    assert {("handlers", "insert_events"), ("relay", "claim_shards")} < names
    assert {("retention", "drop_partition"), ("servers", "probe_writing")} < names
    shown = await command("sql", "--json", "--explain")
    plans = {one["name"]: one["plan"] for one in map(json.loads, shown.stdout.splitlines())}
    assert len(plans) == len(names)
    assert "Insert on inbox" in plans["insert_markers"]
    assert "outbox_cluster" in plans["claim_lanes"]
    assert "pg_trigger" in plans["read_reactions"]
    assert "Insert on outbox" in plans["insert_events"]
    assert plans["drop_partition"] == "PostgreSQL makes no plan for it"
    assert "braces" in plans["find_last_transaction_of_day"]
    assert "pg_dist_partition" in plans["find_distributed_table"]  # only Citus has it
    text = (await command("sql", "--explain")).stdout
    assert "-- claim_lanes\n-- \n-- Claim lanes" in text
    assert "RETURNING l.lane, l.token, l.starts, chosen.ended_at;\n" in text


def test_a_setting_that_is_missing_is_named_with_where_to_get_it(
    unborn: Bank, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PIPELINE_DATABASE_URL", raising=False)
    assert call(unborn, monkeypatch, "dead", "list") == 2
    said = capsys.readouterr().err
    assert "PIPELINE_DATABASE_URL: is not set (for the servers of `make up`:" in said


def test_unknown_settings_are_reported_with_the_nearest_name_among_other_mistakes(
    unborn: Bank, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIPELINE_BATCH_SISE", "7")
    monkeypatch.setenv("PIPELINE_QQQ", "secret")
    monkeypatch.setenv("PIPELINE_CONCURRENCY", "0")
    assert call(unborn, monkeypatch, "dead", "list") == 2
    said = capsys.readouterr().err
    assert (
        "PIPELINE_BATCH_SISE: there is no such setting; did you mean PIPELINE_BATCH_SIZE?" in said
    )
    assert "PIPELINE_QQQ: there is no such setting; unset it" in said
    assert "PIPELINE_CONCURRENCY: Input should be greater" in said
    assert "secret" not in said
    monkeypatch.setenv("PIPELINE_CONCURRENCY", "1")
    assert call(unborn, monkeypatch, "dead", "list") == 2
    assert "CONCURRENCY" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["dance"], "dance"), (["topics", "create", "--partitions", "0"], "--partitions")],
)
def test_what_the_command_line_does_not_know_is_refused(
    unborn: Bank,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    named: str,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert call(unborn, monkeypatch, *arguments) == 2
    assert named in capsys.readouterr().err


async def test_topics_are_created_once_and_then_left_alone(
    start: Start, unborn: Bank, kafka: str
) -> None:
    for partitions_asked, said in ((3, "created with 3 partitions, replicas: 1"), (5, "exists")):
        process = await start("topics", "create", "--partitions", str(partitions_asked))
        assert await process.ended() == 0, process.output
        for topic in (unborn.deposits, unborn.balances):
            assert f"{topic}: {said}" in process.output
    assert await partitions(kafka, unborn.deposits, unborn.balances) == [3, 3]


async def test_a_topic_that_the_broker_refuses_is_an_error(start: Start, unborn: Bank) -> None:
    process = await start("topics", "create", "--replicas", "3")
    assert await process.ended() == 1
    assert "InvalidReplicationFactor" in process.output
    assert unborn.balances in process.output or unborn.deposits in process.output
    assert "Traceback" not in process.output


async def test_topics_cannot_be_created_while_kafka_is_away(
    start: Start, unused_tcp_port: int
) -> None:
    nowhere = f"127.0.0.1:{unused_tcp_port}"
    process = await start("topics", "create", kafka_bootstrap_servers=nowhere)
    assert await process.ended() == 1
    named = f"Kafka at {nowhere} (PIPELINE_KAFKA_BOOTSTRAP_SERVERS): KafkaConnectionError: "
    assert process.output.splitlines()[-1].startswith(named)
    assert "Traceback" not in process.output
    assert "Unclosed" not in process.output


async def test_migrate_makes_tables_partitions_and_generations_and_may_be_repeated(
    start: Start, folder: Path, empty_database_url: str
) -> None:
    first, second = await start("migrate", cwd=folder), await start("migrate", cwd=folder)
    assert [await first.ended(), await second.ended()] == [0, 0], first.output + second.output
    assert "at the newest schema" in first.output
    third = await start("migrate", cwd=folder)
    assert await third.ended() == 0, third.output
    connection = await asyncpg.connect(empty_database_url.replace("+asyncpg", ""))
    try:
        assert await connection.fetchval("SELECT count(*) FROM pipeline.outbox_cursor") == 64
        made = await connection.fetch(
            "SELECT inhparent::regclass::text AS parent, count(*) FROM pg_inherits"
            " JOIN pg_class ON oid = inhrelid WHERE relkind = 'r' GROUP BY 1 ORDER BY 1"
        )
    finally:
        await connection.close()
    assert [tuple(row) for row in made] == [("pipeline.inbox", 3), ("pipeline.outbox", 8)]


async def test_a_service_that_is_migrated_becomes_ready_when_its_topics_are_there(
    start: Start, folder: Path, unborn: Bank
) -> None:
    migrate = await start("migrate", cwd=folder)
    assert await migrate.ended() == 0, migrate.output
    running = await start("run", cwd=folder)
    await eventually(lambda: _names(running, unborn.deposits))
    create = await start("topics", "create", cwd=folder)
    assert await create.ended() == 0, create.output
    await eventually(running.is_ready)
    status, body = await running.get("/health/ready")
    assert (status, json.loads(body)) == (200, {"ready": True, "reasons": {}})


async def _names(process: Process, topic: str) -> bool:
    return f"topic {topic}" in await process.reasons()


async def test_migrate_says_what_is_missing_instead_of_a_traceback(
    start: Start, folder: Path, tmp_path_factory: pytest.TempPathFactory, unused_tcp_port: int
) -> None:
    elsewhere = await start("migrate", cwd=tmp_path_factory.mktemp("elsewhere"))
    nowhere = f"postgresql+asyncpg://service:x@127.0.0.1:{unused_tcp_port}/service"
    away = await start("migrate", cwd=folder, database_url=nowhere)
    named = f"PostgreSQL at 127.0.0.1:{unused_tcp_port} (PIPELINE_DATABASE_URL): ConnectionRefused"
    for process, hint in ((elsewhere, "alembic.ini"), (away, named)):
        assert await process.ended() == 1, process.output
        assert hint in process.output
        assert "Traceback" not in process.output


async def test_an_unavailable_server_is_named_with_the_variable_of_its_address(
    start: Start, folder: Path, unborn: Bank, kafka: str, unused_tcp_port: int
) -> None:
    migrate = await start("migrate", cwd=folder)
    assert await migrate.ended() == 0, migrate.output
    nowhere = f"127.0.0.1:{unused_tcp_port}"
    nothing = {"database_url": f"postgresql+asyncpg://service:x@{nowhere}/service"}
    silence = {"kafka_bootstrap_servers": nowhere}
    database = f"PostgreSQL at {nowhere} (PIPELINE_DATABASE_URL): "
    brokers = f"Kafka at {nowhere} (PIPELINE_KAFKA_BOOTSTRAP_SERVERS): "
    seek = ("topics", "seek", unborn.deposits, "--to", "earliest")
    for command, away, named in (
        (("dead", "list"), nothing, database),
        (("inbox", "show", "x"), nothing, database),
        (("relay", "reset", "--yes"), nothing, database),
        (seek, nothing, database),
        (seek, silence, brokers),
    ):
        process = await start(*command, **away)
        assert await process.ended() == 1, process.output
        assert process.output.splitlines()[-1].startswith(named), process.output
        assert "Traceback" not in process.output


async def test_a_wrong_password_is_told_in_a_sentence(
    start: Start, folder: Path, empty_database_url: str
) -> None:
    scheme, _, rest = empty_database_url.partition("://")
    wrong = f"{scheme}://service:wrong@{rest.rpartition('@')[2]}"
    for command in ("migrate", "run"):
        process = await start(command, cwd=folder, database_url=wrong)
        assert await process.ended() == 1
        assert "password authentication failed" in process.output
        assert "Traceback" not in process.output


_TABLES = """
SELECT oid::regclass::text FROM pg_class
 WHERE relkind IN ('r', 'p') AND relnamespace = 'pipeline'::regnamespace ORDER BY 1
"""
WITHOUT_DATABASE = (
    "run",
    "consume",
    "relay",
    "migrate",
    "doctor",
    "topics create",
    "topics record",
    "help words",
)
"""Commands that serve or migrate, which other tests refuse the database of another service; the
doctor, which names it; one that needs Kafka only; and one that needs no server."""


def examples_of(app: object) -> dict[str, list[str]]:
    """Return the example of each command that connects."""
    assert isinstance(app, typer.Typer)
    return {
        name: [
            __file__ if word == "new.json" else word
            for word in shlex.split((command.epilog or "").removeprefix("For example: service "))
        ]
        for name, command in with_parameters(typer.main.get_command(app))
        if name not in WITHOUT_DATABASE
    }


async def test_every_command_that_connects_refuses_the_database_of_another_service(
    bank: Bank, commands: Callable[..., Command], db: asyncpg.Connection
) -> None:
    await db.execute("COMMENT ON SCHEMA pipeline IS 'another'")
    app = command_line(bank.service)
    call_it, examples = commands(app), examples_of(app)
    for name in ("adopt", "relay reset"):
        examples[name] = [*name.split(), "--yes"]
    assert len(examples) > 15
    for name, line in examples.items():
        done = await call_it(*line)
        assert done.exit_code == 1, f"{name}: {done.output}"
        assert "is that of service another, and this is service" in done.stderr, name
    doctor = await call_it("doctor", "--json")
    found = [json.loads(line) for line in doctor.stdout.splitlines()]
    (wrong,) = (one for one in found if one["check"] == "database")
    assert (doctor.exit_code, wrong["level"]) == (1, "wrong")
    assert {"kafka", "settings"} < {one["check"] for one in found}


_WORK = """
INSERT INTO pipeline.backlog (key, lane, order_key, consumer, topic, partition, "offset", timestamp,
    headers, hash_version, reason, attempts, waited, holds, died_at)
VALUES ('x', 0, 'x', 'deposit', 't', 0, 1, 0, '[]', 1, 'rejected', 1, 0, true, now());
INSERT INTO pipeline.scheduled (name, due_at, topic, event_id, source, type, content_type)
VALUES ('remind-ada', '2100-01-01', 't', 'a', '/s', 'x', 'y')
"""
READING = {
    *("status", "inbox show", "scheduled list", "retention status", "sql"),
    *("dead list", "dead show", "dead events list", "dead events show"),
}
"""Commands that a copy does not refuse, beside those that adopt it."""


async def test_every_command_leaves_a_copy_as_it_is_and_some_read_it(
    bank: Bank, commands: Callable[..., Command], db: asyncpg.Connection
) -> None:
    await db.execute(_WORK)
    await db.execute("UPDATE pipeline.outbox_cluster SET database_oid = 1")
    names = [row[0] for row in await db.fetch(_TABLES)]

    async def rows() -> list[object]:
        return [await db.fetch(f"SELECT * FROM {name}") for name in names]

    app, before, refused = command_line(bank.service), await rows(), set[str]()
    call_it, examples = commands(app), examples_of(app)
    for name, line in examples.items():
        done = await call_it(*(word for word in line if word != "--watch"))
        if str(cluster.NotAdopted()) in done.stderr:
            assert done.exit_code == 1, name
            refused.add(name)
        assert await rows() == before, name
    assert refused == examples.keys() - READING - {"adopt", "relay reset"}
    assert (await call_it("adopt", "--yes", "--keep-progress")).exit_code == 0
    assert (await call_it("scheduled", "cancel", "remind-ada")).exit_code == 0


ROUTINE = {"retention run"}
"""Commands that do what a service does by itself, beside those of `WITHOUT_DATABASE`."""


def test_commands_that_need_a_decision_take_a_reason_and_an_operator(unborn: Bank) -> None:
    app = command_line(unborn.service)
    assert isinstance(app, typer.Typer)
    options = {
        name: {one.name for one in command.params}
        for name, command in with_parameters(typer.main.get_command(app))
        if name not in WITHOUT_DATABASE
    }
    unsigned = {name for name, its in options.items() if not {"because", "operator"} <= its}
    assert unsigned == READING | ROUTINE


async def test_what_commands_change_is_in_the_audit_with_who_and_why(
    bank: Bank, command: Command, db: asyncpg.Connection
) -> None:
    await db.execute(_WORK)
    await db.execute("INSERT INTO pipeline.outbox_closed (day) VALUES ('2020-01-01')")
    day = "day 2020-01-01 of the outbox"
    changes: dict[tuple[str, ...], list[str]] = {
        ("adopt", "--yes", "--keep-progress"): ["database, 0 events again"],
        ("retention", "skip-archive", "2020-01-01"): [day],
        ("retention", "skip-archive", "--all"): ["all days of the outbox", day],
        ("scheduled", "cancel", "remind-ada"): ["scheduled event remind-ada"],
        ("topics", "seek", bank.deposits, "--to", "earliest"): [f"{bank.deposits}/0 to 0"],
    }
    expected = []
    for line, subjects in changes.items():
        done = await command(*line, "--because", "a test", "--operator", "ann")
        assert done.exit_code == 0, done.output
        action = next(one for one in line if one not in ("retention", "scheduled", "topics"))
        expected += [("ann", action, subject, "a test") for subject in subjects]
    audited = await db.fetch("SELECT who, action, subject, why FROM pipeline.audit ORDER BY id")
    assert [tuple(row) for row in audited] == expected


async def test_what_is_rolled_back_is_not_in_the_audit(db: asyncpg.Connection) -> None:
    with pytest.raises(ValueError, match="no"):
        async with audit.changing(db, Change("ann", "seek")) as subjects:
            subjects.append("deposits/0 to 0")
            raise ValueError("no")
    assert await db.fetchval("SELECT count(*) FROM pipeline.audit") == 0


def archiving(bank: Bank) -> Service:
    """Return the bank's service with an archive, which no command of these tests reaches."""
    return replace(bank.service, archive=cast(Archive, SimpleNamespace(is_on=True)))


@pytest.mark.parametrize(
    "another", ["system_identifier = 1", "database_oid = 1", "kafka_cluster = 'another'"]
)
async def test_retention_archives_nothing_of_a_database_that_is_not_adopted(
    bank: Bank, commands: Callable[..., Command], db: asyncpg.Connection, another: str
) -> None:
    """Of a physical copy with other brokers, too: it has the archive of its original."""
    await db.execute(f"UPDATE pipeline.outbox_cluster SET {another}")
    done = await commands(command_line(archiving(bank)))("retention", "run")
    assert done.exit_code == 1
    assert str(cluster.NotAdopted()) in complaint(done)


async def test_retention_needs_kafka_for_an_archive_alone_and_for_no_partition(
    bank: Bank,
    commands: Callable[..., Command],
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    unused_tcp_port: int,
) -> None:
    """In an outage of Kafka the outbox grows: partitions must not run out, and a disk be freed."""
    called = [commands(command_line(one)) for one in (bank.service, archiving(bank))]
    nowhere = f"127.0.0.1:{unused_tcp_port}"
    monkeypatch.setenv("PIPELINE_KAFKA_BOOTSTRAP_SERVERS", nowhere)
    last = await db.fetchval("SELECT max(relname) FROM pg_class WHERE relname ~ '^outbox_p[0-9]+$'")
    for call_it, exit_code in zip(called, (0, 1), strict=True):
        await db.execute(f"DROP TABLE pipeline.{last}")
        done = await call_it("retention", "run")
        assert done.exit_code == exit_code, done.output
        assert await db.fetchval("SELECT to_regclass($1) IS NOT NULL", f"pipeline.{last}")
    assert f"Kafka at {nowhere} (PIPELINE_KAFKA_BOOTSTRAP_SERVERS): " in complaint(done)


async def test_a_database_is_migrated_before_it_is_adopted(
    bank: Bank, commands: Callable[..., Command], db: asyncpg.Connection
) -> None:
    await db.execute(
        "ALTER TABLE pipeline.outbox_cluster DROP database_oid, DROP kafka_cluster;"
        " UPDATE alembic_version SET version_num = 'pipeline_0001'"
    )
    done = await commands(command_line(bank.service))("adopt")
    assert done.exit_code == 1
    assert "lacks pipeline_0002: run `service migrate` first" in complaint(done)


async def test_a_list_that_would_take_too_much_memory_is_refused(
    bank: Bank, commands: Callable[..., Command]
) -> None:
    service = commands(command_line(bank.service))
    for line, limit in (("dead list", 1_000_000), ("scheduled list", 100_000)):
        done = await service(*line.split(), "--limit", f"{limit + 1}")
        assert done.exit_code == 2
        assert f"less than or equal to {limit}" in complaint(done)
