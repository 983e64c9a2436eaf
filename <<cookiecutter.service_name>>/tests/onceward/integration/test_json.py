"""What commands that change something tell programs: with `--json`, and nothing beside it."""

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
import typer
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from onceward.cli.commands import command_line
from onceward.runtime import Part

from .bank import Bank
from .conftest import Command, position_reaches
from .test_scheduled import LONG_AGO, schedule
from tests.conftest import Running
from tests.contract.bank import Deposit
from tests.servers.waiting import eventually

Commands = Callable[[typer.Typer], Command]
Tells = Callable[..., Any]

FOR_EVER = {"run", "consume"}
"""Commands that serve: what they do is in their log."""


@pytest.fixture
def line(bank: Bank) -> typer.Typer:
    """Return the command line of the bank."""
    app = command_line(bank.service)
    assert isinstance(app, typer.Typer)
    return app


@pytest.fixture
def tells(command: Command) -> Tells:
    """Call a command with `--json`, and return what each line on standard output says."""

    async def call(*arguments: str, code: int = 0) -> Any:
        done = await command(*arguments, "--json")
        assert done.exit_code == code, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]

    return call


def ends(command: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Yield every command that is no group of others, and what it is called."""
    for name, one in getattr(command, "commands", {}).items():
        if getattr(one, "commands", None):
            yield from ends(one, *path, name)
        else:
            yield " ".join([*path, name]), one


def test_every_command_that_ends_by_itself_tells_programs_too(line: typer.Typer) -> None:
    lacking = {
        name
        for name, one in ends(typer.main.get_command(line))
        if not any("--json" in option.opts for option in one.params)
    }
    assert lacking == FOR_EVER


async def test_migrate_tells_the_revisions_that_the_database_is_at(
    tells: Tells, db: asyncpg.Connection
) -> None:
    told = await tells("migrate")
    had = await db.fetch("SELECT version_num FROM alembic_version ORDER BY 1")
    assert told == [{"revisions": [row["version_num"] for row in had]}]


async def test_a_reset_tells_how_many_events_are_published_again(
    tells: Tells, command: Command, bank: Bank, db: asyncpg.Connection
) -> None:
    await db.execute(
        "INSERT INTO pipeline.outbox"
        " (topic, key, payload, event_id, source, type, content_type)"
        " SELECT $1, 'ada', '{}', 'e' || n, '/bank', 'x', 'y' FROM generate_series(1, 3) n",
        bank.balances,
    )
    assert await tells("relay", "reset", "--yes") == [{"published_again": 3}]
    assert await tells("relay", "reset", "--yes", "--keep-progress") == [{"published_again": 0}]
    asked = await command("relay", "reset", "--json", input="y\n")
    # The first line is the answer, as a terminal shows it.
    assert json.loads(asked.stdout.partition("\n")[2]) == {"published_again": 3}
    assert "make 0 calls, publish 0 scheduled events, 3 events again?" in asked.stderr


async def test_who_adopts_is_told_of_processes_that_read_at_these_brokers(
    command: Command, bank: Bank, kafka: str
) -> None:
    async with AIOKafkaConsumer(
        bank.deposits,
        bootstrap_servers=kafka,
        group_id=bank.name,
        client_id=bank.name,
        enable_auto_commit=False,
    ) as consumer:
        await eventually(lambda: bool(consumer.assignment()))
        asked = await command("adopt", input="n\n")
    assert asked.exit_code == 1
    assert "reads topics of the service: if for another database, end it before" in asked.stdout


async def test_topics_create_tells_which_are_new(
    unborn: Bank, commands: Commands, kafka: str
) -> None:
    app = command_line(unborn.service)
    assert isinstance(app, typer.Typer)
    create = commands(app)
    ours = sorted((unborn.deposits, unborn.balances))
    for there, elsewhere in ("created", "existed"), ("existed", "created"):
        done = await create("topics", "create", "--partitions", "2", "--json")
        told = json.loads(done.stdout)
        # Events of other tests have topics, too.
        assert [name for name in told.pop(there) if name in ours] == ours
        assert set(told.pop(elsewhere)).isdisjoint(ours)
        assert told == {"partitions": 2, "replicas": 1}


async def test_seek_and_replay_tell_where_each_partition_goes_on(
    tells: Tells,
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
) -> None:
    def to(offset: int, *, old: int) -> dict[str, Any]:
        slot = {"group": bank.name, "topic": bank.deposits, "partition": 0}
        return {"slot": slot, "old": old, "new": offset, "first": 0, "end": 3}

    for amount in (1, 2, 3):
        await Deposit(amount).send(producer, bank.deposits)
    async with running(bank.service, Part.CONSUME):
        await eventually(position_reaches(db, bank.deposits, 3))
        seek = ("topics", "seek", bank.deposits, "--partition", "0", "--to", "earliest")
        assert await tells(*seek, "--dry-run") == [to(0, old=3)]
        replayed = await tells("replay", bank.deposits, "--from", "1")
    became = {"applied": 0, "known": 2, "waiting": 0, "buried": 0}
    assert replayed == [{"moves": [to(1, old=3)], "became": became}]
    again = await tells("replay", bank.deposits, "--from", "1", "--no-wait")
    assert again == [{"moves": [to(1, old=3)], "became": None}]


async def test_skip_archive_and_cancel_report_what_they_found_despite_missing_items(
    tells: Tells, db: asyncpg.Connection
) -> None:
    await db.execute("INSERT INTO pipeline.outbox_closed (day) VALUES ('2020-01-01')")
    let_go = await tells("retention", "skip-archive", "2020-01-01", "2020-01-02", code=1)
    assert let_go == [{"day": "2020-01-01"}]
    await schedule(db, "t", [("a", LONG_AGO), ("b", LONG_AGO + timedelta(hours=1))])
    cancelled = await tells("scheduled", "cancel", "b", "c", "a", code=1)
    assert cancelled == [{"name": "a"}, {"name": "b"}]
