"""`service status`: how far everything is, on one screen, also while servers are away."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor

from onceward.cli import status, status_commands
from onceward.cli.commands import command_line
from onceward.cli.status import Reading, Relay, Stage, Status
from onceward.operators.stopping import Stop
from onceward.servers import database

from .bank import Bank
from .conftest import Command, position_reaches
from .outgoing import event, set_back, stage
from .processes import starting
from tests.conftest import Running
from tests.contract.bank import Deposit
from tests.servers.topics import administrator
from tests.servers.waiting import PATIENCE, eventually


async def told(command: Command) -> dict[str, list[str]]:
    """Return the lines of the screen by their first word."""
    done = await command("status")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    found: dict[str, list[str]] = {}
    for line in filter(None, lines):
        found.setdefault(line.split()[0], []).append(line[10:].strip())
    return found


async def test_lag_is_what_the_topic_has_behind_the_position(
    command: Command,
    bank: Bank,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    running: Running,
) -> None:
    async with running(bank.service):
        for amount in (1, 2):
            await Deposit(amount).send(producer, bank.deposits)
        await eventually(position_reaches(db, bank.deposits, 2))
        screen = await told(command)
        assert "lag 0, moved " in screen["reads"][0]
        assert screen["reads"][0].endswith(", 1 reader")
        (reading,) = json.loads((await command("status", "--json")).stdout)["readings"]
        assert reading["reader"].startswith("127.0.0.1 ")
        assert screen["relays"] == ["1 with 64 shards"]
        for amount in (1, 2, 1):
            await Deposit(amount).send(producer, bank.deposits)
        await eventually(position_reaches(db, bank.deposits, 5))
    await Deposit(3).send(producer, bank.deposits)
    found = json.loads((await command("status", "--json")).stdout)
    (reading,) = found["readings"]
    assert (reading["position"], reading["end"], reading["lag"]) == (5, 6, 1)
    assert reading["duplicates"] == 3
    assert reading["reader"] is None
    assert found["unknown"] == {}
    assert re.search(r"lag 1, (oldest \d+ s, )?moved ", (await told(command))["reads"][0])
    assert (await told(command))["relays"] == ["none: run `service relay`"]
    await db.execute("UPDATE pipeline.position SET next_offset = 9")
    screen = await told(command)
    assert "lag not known" in screen["reads"][0]
    (beyond,) = (line for line in screen["wrong"] if line.startswith("positions: "))
    assert "is at offset 9" in beyond


async def test_what_was_never_read_is_all_lag(
    command: Command, bank: Bank, producer: AIOKafkaProducer
) -> None:
    await Deposit(1).send(producer, bank.deposits)
    assert (await told(command))["reads"][0].endswith("lag 1, never read, no reader")


async def test_what_waits_and_what_is_dead_is_told_by_consumer(
    command: Command, db: asyncpg.Connection
) -> None:
    assert (await told(command))["backlog"] == ["deposit  0 waiting, 0 dead"]
    await db.execute(
        'INSERT INTO pipeline.backlog (key, lane, order_key, consumer, topic, partition, "offset",'
        " timestamp, headers, hash_version, reason, attempts, waited, holds, received_at, died_at)"
        " SELECT sha256(n::text::bytea), 0, '', 'deposit', 't', 0, n, 0, '[]', 1, 'x', 0, 0, false,"
        " now() - interval '3 h', CASE WHEN n > 10001 THEN now() END"
        " FROM generate_series(1, 10003) AS n"
    )
    (line,) = (await told(command))["backlog"]
    assert line == "deposit  10,000+ waiting, 2 dead, oldest at least 3 h"
    assert (await told(command)).get("wrong") is None
    await db.execute("UPDATE pipeline.backlog SET due_at = now() WHERE died_at IS NULL")
    (full,) = (await told(command))["wrong"]
    assert full.startswith("backlog: full of due messages of consumer deposit: partitions wait")
    await db.execute("UPDATE pipeline.backlog SET consumer = 'retired'")
    assert (await told(command))["backlog"] == [
        "retired  10,000+ waiting, 2 dead, oldest at least 3 h",
        "deposit  0 waiting, 0 dead",
    ]
    await db.execute("UPDATE pipeline.backlog SET consumer = 'deposit' WHERE died_at IS NOT NULL")
    assert (await told(command))["backlog"][1] == "deposit  0+ waiting, 2 dead", (
        "what waits behind a dead letter is not due"
    )


async def test_of_several_topics_that_is_named_whose_message_has_waited_longest(
    command: Command, db: asyncpg.Connection
) -> None:
    await db.execute(
        'INSERT INTO pipeline.backlog (key, lane, order_key, consumer, topic, partition, "offset",'
        " timestamp, headers, hash_version, reason, attempts, waited, holds, received_at)"
        " SELECT sha256(n::text::bytea), 0, '', 'deposit', 'topic ' || n, 0, n, 0, '[]', 1, 'x', 0,"
        " 0, false, now() - n * interval '1 h' FROM generate_series(3, 5) AS n"
    )
    (line,) = (await told(command))["backlog"]
    assert line == "deposit  3 waiting, 0 dead, oldest 5 h for topic 5"
    stages = json.loads((await command("status", "--json")).stdout)["stages"]
    (ages,) = [one["oldest_by_topic"] for one in stages if one["kind"] == "backlog"]
    assert {topic: round(age / 3_600, 1) for topic, age in ages.items()} == {
        f"topic {hours}": hours for hours in (3, 4, 5)
    }


async def test_the_outbox_is_measured_by_what_relays_have_not_published(
    command: Command, bank: Bank, db: asyncpg.Connection, running: Running
) -> None:
    assert (await told(command))["outbox"] == ["0 to publish"]
    await stage(db, [event(bank.balances, n, f"key {n}") for n in range(5)])
    assert (await told(command))["outbox"][0].startswith("5 to publish, oldest ")
    await stage(db, [event("reminders", 5)])
    await set_back(db, timedelta(minutes=3), bank.balances)
    assert (await told(command))["outbox"] == [f"6 to publish, oldest 3 min for {bank.balances}"]
    stages = json.loads((await command("status", "--json")).stdout)["stages"]
    (ages,) = [one["oldest_by_topic"] for one in stages if one["kind"] == "outbox"]
    assert ages.keys() == {bank.balances, "reminders"}
    assert ages[bank.balances] > 180 > ages["reminders"]
    await db.execute("DELETE FROM pipeline.outbox WHERE topic = 'reminders'")
    async with running(bank.service, relay_lease=1):

        async def is_published() -> bool:
            return (await told(command))["outbox"] == ["0 to publish"]

        await eventually(is_published)

        async def is_told_of() -> bool:
            found = json.loads((await command("status", "--json")).stdout)
            told = [(one["shards"], one["published"]) for one in found["relays"].values()]
            return told == [(list(range(64)), 5)]

        await eventually(is_told_of)
    await db.execute("UPDATE pipeline.outbox_cluster SET system_identifier = 1")
    assert "service adopt" in (await told(command))["outbox"][0]


async def test_what_is_scheduled_refused_and_held_is_told(
    command: Command, db: asyncpg.Connection
) -> None:
    await db.execute(
        "INSERT INTO pipeline.scheduled (name, due_at, topic, event_id, source, type, content_type)"
        " VALUES ('a', '2030-01-02 03:04+00', 't', 'a', '/s', 'x', 'y')"
    )
    await db.execute(
        "INSERT INTO pipeline.outbox_rejected (id, created_at, topic, event_id, source, type,"
        " content_type, died_at)"
        " SELECT n, now(), 't', n, '/s', 'x', 'y', CASE WHEN n = 1 THEN now() END"
        " FROM generate_series(1, 3) AS n"
    )
    await db.execute(
        "CREATE TABLE pipeline.outbox_p20200101 PARTITION OF pipeline.outbox"
        " FOR VALUES FROM ('2020-01-01 00:00+00') TO ('2020-01-02 00:00+00')"
    )
    screen = await told(command)
    assert screen["scheduled"] == ["1, next 2030-01-02 03:04:00Z"]
    assert screen["rejected"][0].startswith("2 waiting, 1 dead, oldest ")
    held = "held partitions: outbox_p20200101 is overdue: it is not closed yet"
    assert any(line.startswith(held) for line in screen["warning"])
    assert screen["remembers"] == ["everything"]
    last = await db.fetchval("SELECT (now() AT TIME ZONE 'UTC')::date + 7")
    assert screen["ahead"][0] in {
        f"partitions until {day}" for day in (last, last - timedelta(days=1))
    }


async def test_who_reads_which_partition_is_told(
    running: Running,
    bank: Bank,
    new_topic: Callable[..., Awaitable[str]],
    commands: Callable[..., Command],
) -> None:
    wide = Bank(deposits=await new_topic(partitions=3), balances=bank.balances, name=bank.name)
    command = commands(command_line(wide.service))

    async def readers() -> list[str | None]:
        found = json.loads((await command("status", "--json")).stdout)
        return [one["reader"] for one in found["readings"]]

    async def two_share() -> bool:
        return len(set(await readers()) - {None}) == 2

    async with running(wide.service), running(wide.service):
        await eventually(two_share)
        assert None not in await readers()
        assert (await told(command))["reads"][0].endswith(", 2 readers")
    assert await readers() == [None, None, None]


async def test_members_have_the_name_of_the_service_as_their_client_id(
    running: Running, bank: Bank, kafka: str
) -> None:
    """While one release replaces another, the processes of both take each other for the service."""
    async with running(bank.service) as health, administrator(kafka) as admin:
        await eventually(lambda: health.is_ready)
        (answer,) = await admin.describe_consumer_groups([bank.name])
    members = answer.groups[0][5]
    assert [client_id for *_, client_id, _, _, _ in members] == [bank.name]


@pytest.mark.parametrize("is_first", [False, True], ids=["joins later", "is there first"])
async def test_another_program_in_the_group_is_told_by_status_and_readiness(
    running: Running,
    bank: Bank,
    new_topic: Callable[..., Awaitable[str]],
    commands: Callable[..., Command],
    kafka: str,
    is_first: bool,
) -> None:
    """What it reads of other topics does not count."""
    wide = Bank(deposits=await new_topic(partitions=4), balances=bank.balances, name=bank.name)
    command = commands(command_line(wide.service))
    stranger = AIOKafkaConsumer(
        wide.deposits,
        await new_topic(partitions=3),
        bootstrap_servers=kafka,
        group_id=bank.name,
        client_id="billing",
    )
    async with AsyncExitStack() as later:
        if is_first:
            await later.enter_async_context(stranger)
        health = await later.enter_async_context(running(wide.service))
        if not is_first:
            await eventually(lambda: health.is_ready)
            await later.enter_async_context(stranger)
        await eventually(lambda: "group" in health.reasons)
        assert health.reasons["group"].startswith(
            "other programs read partitions of the service (2): client 'billing' at 127.0.0.1"
        )
        assert "client 'billing' at 127.0.0.1 reads" in (await told(command))["wrong"][0]
        found = json.loads((await command("status", "--json")).stdout)["readings"]
        theirs = {(one["topic"], one["partition"]) for one in found if one["stranger"]}
        assert theirs == {one for one in stranger.assignment() if one.topic == wide.deposits}
        await stranger.stop()
        await eventually(lambda: health.is_ready)
        assert "billing" not in (await command("status")).stdout


class Careless(RoundRobinPartitionAssignor):  # type: ignore[misc]  # it has no types
    """Assigns what no member can read."""

    @classmethod
    def assign(cls, cluster: object, members: dict[str, object]) -> dict[str, bytes]:
        return dict.fromkeys(members, b"\0")


async def test_partitions_that_a_program_assigns_in_its_own_way_are_not_known(
    command: Command, bank: Bank, kafka: str
) -> None:
    stranger = AIOKafkaConsumer(
        bank.deposits,
        bootstrap_servers=kafka,
        group_id=bank.name,
        session_timeout_ms=45_000,
        partition_assignment_strategy=[Careless],
    )

    async def is_told() -> bool:
        unknown = json.loads((await command("status", "--json")).stdout)["unknown"]
        return "ValueError" in unknown.get("readers", "")

    joining = asyncio.create_task(stranger.start())
    try:
        await eventually(is_told)
    finally:
        joining.cancel()
        await asyncio.gather(joining, stranger.stop(), return_exceptions=True)


async def test_without_kafka_it_tells_what_postgresql_knows(
    command: Command,
    bank: Bank,
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    unused_tcp_port: int,
) -> None:
    await db.execute(
        "INSERT INTO pipeline.position (consumer_group, topic, partition, next_offset)"
        " VALUES ($1, $2, 0, 5)",
        bank.name,
        bank.deposits,
    )
    monkeypatch.setenv("PIPELINE_KAFKA_BOOTSTRAP_SERVERS", f"127.0.0.1:{unused_tcp_port}")
    screen = await told(command)
    assert "1 partitions, lag not known" in screen["reads"][0]
    assert screen["unknown"][0].startswith(f"topics: Kafka at 127.0.0.1:{unused_tcp_port}")


@pytest.mark.parametrize(
    ("table", "part"),
    [
        ("backlog", "backlog"),
        ("outbox_cluster", "outbox"),
        ("scheduled", "scheduled"),
        ("inbox_generation", "memory"),
        ("inbox_closed", "retention"),
    ],
)
async def test_what_is_locked_is_not_waited_for_and_the_rest_is_told(
    command: Command,
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    table: str,
    part: str,
) -> None:
    monkeypatch.setattr(status, "_SECONDS", 3.0)
    monkeypatch.setattr(database, "_COMMAND_SECONDS", 2 * PATIENCE)
    async with asyncio.timeout(PATIENCE), db.transaction():
        await db.execute(f"LOCK TABLE pipeline.{table} IN ACCESS EXCLUSIVE MODE")
        found = json.loads((await command("status", "--json")).stdout)
        screen = await told(command)
    assert found["unknown"][part] == "PostgreSQL has not answered in 3 s"
    assert f"{part}: PostgreSQL has not answered in 3 s" in screen["unknown"]
    assert screen["relays"] == ["none: run `service relay`"]
    if part == "scheduled":
        assert screen["scheduled"] == ["not known, see below"]
        assert screen["outbox"] == ["0 to publish"]


async def test_watch_looks_again_until_it_is_stopped_also_after_an_outage(
    bank: Bank,
    direct_url: str,
    kafka: str,
    db: asyncpg.Connection,
) -> None:
    async with starting(bank, database_url=direct_url, kafka_bootstrap_servers=kafka) as start:
        process = await start("status", "--watch")
        await eventually(lambda: "0 to publish" in process.output)
        await db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = $1 AND datname = current_database()",
            bank.service.name,
        )
        await eventually(lambda: "(PIPELINE_DATABASE_URL)" in process.output)
        await stage(db, [event(bank.balances, 1)])
        await eventually(lambda: "1 to publish" in process.output)


def test_a_screen_holds_the_worst_that_can_be() -> None:
    long = "x" * 90
    at = datetime(2030, 1, 2, tzinfo=UTC)
    worst = Status(
        long,
        at,
        unknown={f"{part}{long}": long for part in range(9)},
        readings=[Reading(f"{topic}{long}", 0, 1, 0, 10**12, 10**12, at) for topic in range(9)],
        stages=[
            *(Stage("reads", f"{topic}{long}", 10**12) for topic in range(9)),
            *(Stage("backlog", f"{name}{long}", 10**6, 10**6, oldest=1e9) for name in range(9)),
        ],
        relays={long: Relay(list(range(64)))},
        held={f"{name}{long}": long for name in range(9)},
        stops=[
            Stop("topic", f"{topic}{long}", "", "", 0.0, None, 9.0, "ada", long)
            for topic in range(9)
        ],
    )
    lines = status_commands.screen(worst)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert sum("more: see --json" in line for line in lines) == 5


async def test_without_a_terminal_nothing_is_cut_and_each_pause_has_its_line(
    command: Command, bank: Bank, db: asyncpg.Connection
) -> None:
    await db.execute(
        "INSERT INTO pipeline.throttle (kind, subject, topic, record_key, per_second, who, why)"
        " SELECT 'topic', 'topic ' || n, '', '', 0, 'ada', repeat('x', 90) || E'\n' || n"
        " FROM generate_series(1, 9) AS n"
    )
    screen = await told(command)
    assert [one.split(",")[0] for one in screen["paused"]] == [
        f"topic topic {n}" for n in range(1, 10)
    ]
    ends = [one.split("ada: ")[1] for one in screen["paused"]]
    assert ends == [f"{'x' * 90}\\n{n}" for n in range(1, 10)]


async def test_many_consumers_fit_the_screen_and_without_one_all_are_shown(
    command: Command, bank: Bank, db: asyncpg.Connection
) -> None:
    await db.execute(
        'INSERT INTO pipeline.backlog (key, lane, order_key, consumer, topic, partition, "offset",'
        " timestamp, headers, hash_version, reason, attempts, waited, holds)"
        " SELECT sha256(n::text::bytea), 0, '', 'consumer ' || n || repeat('x', 90), 't', 0, n, 0,"
        " '[]', 1, 'x', 0, 0, false FROM generate_series(1, 40) AS n"
    )
    screen = await told(command)
    assert len(screen["backlog"]) == 41
    assert all(one.endswith("x  1 waiting, 0 dead, oldest 0 s") for one in screen["backlog"][:40])
    assert "and" not in screen
    stages = [Stage("backlog", f"consumer {n}", 1) for n in range(41)]
    lines = status_commands.screen(Status(bank.name, datetime.now(UTC), stages=stages))
    assert sum(line.startswith("backlog ") for line in lines) == 3
    assert lines[5].strip() == "and 38 more: see --json"
