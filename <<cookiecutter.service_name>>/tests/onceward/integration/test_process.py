"""The service as real processes: killed, stopped, started in a world that is not ready."""

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from sqlalchemy import make_url

from .bank import Bank
from .outgoing import event, stage
from .processes import forwarding, starting
from .test_consume import balance
from tests.contract.bank import Deposit
from tests.servers.databases import empty_database
from tests.servers.processes import Start
from tests.servers.topics import following, ids_in
from tests.servers.waiting import PATIENCE, eventually

NewTopic = Callable[..., Awaitable[str]]


@pytest.fixture
async def start(bank: Bank, database_url: str, kafka: str) -> AsyncIterator[Start]:
    """Start processes of the bank, on the test's servers."""
    async with starting(
        bank,
        database_url=database_url,
        kafka_bootstrap_servers=kafka,
        kafka_session_timeout=6,
        transaction_timeout=5,
        lock_timeout=2,
        relay_lease=1,
    ) as one:
        yield one


async def send_deposits(
    producer: AIOKafkaProducer, bank: Bank, amounts: range, partitions: int = 1
) -> None:
    """Send deposits for four accounts, every 20th one twice."""
    sends = []
    for amount in amounts:
        account = amount % 4
        one = Deposit(amount, f"account-{account}", partition=account % partitions)
        sends += [one.send(producer, bank.deposits) for _ in range(1 + (amount % 20 == 0))]
    await asyncio.gather(*sends)


async def check_the_ledger(db: asyncpg.Connection, kafka: str, bank: Bank, count: int) -> None:
    """Compare what was sent with the accounts and with what was published."""
    async with following(kafka, bank.deposits) as sent, following(kafka, bank.balances) as told:
        await sent.until_ids(range(1, count + 1))
        await eventually(lambda: _inbox_holds(db, count))
        staged = [row["event_id"] for row in await db.fetch("SELECT event_id FROM pipeline.outbox")]
        await told.until_ids(staged)
    histories = {
        row["id"].encode(): row["history"].strip(",").split(",")
        for row in await db.fetch("SELECT id, history FROM account")
    }
    assert histories == sent.first_ids()
    assert await db.fetchval("SELECT sum(balance) FROM account") == sum(range(1, count + 1))
    assert len(staged) == len(set(staged)) == count
    first: dict[bytes | None, dict[int, None]] = {}
    for record in told.records:
        first.setdefault(record.key, {})[json.loads(record.value)["amount"]] = None
    assert {key: list(map(str, found)) for key, found in first.items()} == histories


async def _inbox_holds(db: asyncpg.Connection, count: int) -> bool:
    return bool(await db.fetchval("SELECT count(*) = $1 FROM pipeline.inbox", count))


@pytest.mark.full
async def test_a_relay_frozen_longer_than_its_lease_loses_and_reorders_nothing(
    start: Start, new_topic: NewTopic, db: asyncpg.Connection, kafka: str
) -> None:
    topic = await new_topic(2)
    keys = [f"key-{number}" for number in range(30)]

    async def write(numbers: range) -> None:
        await stage(db, [event(topic, n, keys[n % 30]) for n in numbers])

    async with following(kafka, topic) as tail:
        frozen = await start("relay", relay_batch_events=7, hang_timeout=600)
        await eventually(frozen.is_ready)
        await write(range(3_000))
        await tail.until(lambda: len(tail.records) > 200)
        frozen.send(signal.SIGSTOP)
        before = len(tail.ids)
        other = await start("relay", relay_batch_events=500)
        await write(range(3_000, 3_300))
        await tail.until_ids(range(3_300))
        assert before < 3_000, "too late to tell"
        frozen.send(signal.SIGCONT)
        await write(range(3_300, 3_600))
        await tail.until_ids(range(3_600))
        for process in (frozen, other):
            process.send(signal.SIGTERM)
            assert await process.ended() == 0
    assert tail.first_ids() == {
        key.encode(): [str(n) for n in range(3_600) if keys[n % 30] == key] for key in keys
    }


async def members(kafka: str, group: str) -> int:
    """Return how many members the broker counts in a consumer group."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        (answer,) = await admin.describe_consumer_groups([group])
        (described,) = answer.groups
        return len(described[-1] if isinstance(described[-1], list) else described[-2])
    finally:
        await admin.close()


async def _waits_for_a_lock(db: asyncpg.Connection) -> bool:
    return bool(
        await db.fetchval(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
    )


PATIENT = {
    "kafka_session_timeout": 45,
    "transaction_timeout": 40,
    "lock_timeout": 35,
    "backlog_lease": 60,
    "relay_lease": 60,
}
"""Settings with which nothing here ends because a time is over."""


async def test_sigterm_finishes_the_batch_publishes_it_and_leaves_the_group(
    start: Start,
    bank: Bank,
    producer: AIOKafkaProducer,
    connect: Callable[[], Awaitable[asyncpg.Connection]],
    db: asyncpg.Connection,
    kafka: str,
) -> None:
    process = await start("run", **PATIENT)
    await Deposit(1).send(producer, bank.deposits)
    await eventually(lambda: _inbox_holds(db, 1))
    assert await members(kafka, bank.name) == 1
    other = await connect()
    async with other.transaction():
        await other.execute("SELECT FROM account FOR UPDATE")
        await Deposit(2).send(producer, bank.deposits)
        await eventually(lambda: _waits_for_a_lock(db))
        process.send(signal.SIGTERM)
        await process.says("SIGTERM")
        assert process.is_running
    assert await process.ended() == 0
    assert await balance(db) == 3
    assert len(await ids_in(kafka, bank.balances)) == 2
    assert await members(kafka, bank.name) == 0
    assert await db.fetchval("SELECT count(owner) FROM pipeline.outbox_cursor") == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_the_process_and_rolls_the_batch_back(
    start: Start,
    bank: Bank,
    producer: AIOKafkaProducer,
    connect: Callable[[], Awaitable[asyncpg.Connection]],
    db: asyncpg.Connection,
    second: signal.Signals,
) -> None:
    process = await start("run", **PATIENT)
    await Deposit(1).send(producer, bank.deposits)
    await eventually(lambda: _inbox_holds(db, 1))
    other = await connect()
    async with other.transaction():
        await other.execute("SELECT FROM account FOR UPDATE")
        await Deposit(2).send(producer, bank.deposits)
        await eventually(lambda: _waits_for_a_lock(db))
        process.send(signal.SIGTERM)
        await process.says("SIGTERM")
        process.send(second)
        assert await process.ended() == -second
    assert await balance(db) == 1


async def test_the_process_tells_its_health_and_its_metrics(
    start: Start, bank: Bank, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    process = await start("run")
    await eventually(process.is_ready)
    await Deposit(1).send(producer, bank.deposits)
    await eventually(lambda: _inbox_holds(db, 1))
    status, body = await process.get("/health/live")
    assert (status, json.loads(body)["alive"]) == (200, True)
    status, body = await process.get("/metrics")
    assert status == 200
    assert f'messaging_destination_name="{bank.deposits}"' in body
    assert "pipeline_relay_shards" in body


async def test_a_process_waits_for_kafka_and_goes_on_when_it_comes(
    start: Start,
    bank: Bank,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
    unused_tcp_port: int,
) -> None:
    process = await start("run", kafka_bootstrap_servers=f"127.0.0.1:{unused_tcp_port}")
    await process.says("retention failed, trying again: Kafka at")
    status, body = await process.get("/health/ready")
    assert (status, "retention" in json.loads(body)["reasons"]) == (503, True)
    assert (await process.get("/health/live"))[0] == 200
    async with forwarding(unused_tcp_port, kafka):
        await Deposit(1).send(producer, bank.deposits)
        await eventually(lambda: _inbox_holds(db, 1))
        await eventually(process.is_ready)
        process.send(signal.SIGTERM)
        assert await process.ended() == 0
    assert len(await ids_in(kafka, bank.balances)) == 1


async def test_a_process_that_waits_for_kafka_stops_when_it_is_told_to(
    start: Start, db: asyncpg.Connection, unused_tcp_port: int
) -> None:
    await stage(db, [event("t", 1)])
    process = await start("run", kafka_bootstrap_servers=f"127.0.0.1:{unused_tcp_port}")
    await process.says("retention failed, trying again: Kafka at")
    process.send(signal.SIGTERM)
    assert await process.ended() == 0, process.output
    assert "Traceback" not in process.output


async def test_a_process_stops_though_kafka_accepts_connections_and_never_answers(
    start: Start, db: asyncpg.Connection
) -> None:
    await stage(db, [event("t", 1)])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nowhere = f"127.0.0.1:{silent.getsockname()[1]}"
        process = await start("run", kafka_bootstrap_servers=nowhere, shutdown_grace=1)
        silent.settimeout(PATIENCE)
        asked, _ = await asyncio.to_thread(silent.accept)
        with asked:
            process.send(signal.SIGTERM)
            assert await process.ended() == 0, process.output


async def test_a_process_waits_for_the_database_and_goes_on_when_it_comes(
    start: Start,
    bank: Bank,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    database_url: str,
    unused_tcp_port: int,
) -> None:
    url = make_url(database_url)
    away = url.set(host="127.0.0.1", port=unused_tcp_port).render_as_string(hide_password=False)
    process = await start("run", database_url=away)
    await process.says("retention failed")
    assert not await process.is_ready()
    assert (await process.get("/health/live"))[0] == 200
    async with forwarding(unused_tcp_port, f"{url.host}:{url.port}"):
        await Deposit(1).send(producer, bank.deposits)
        await eventually(lambda: _inbox_holds(db, 1))
        await eventually(process.is_ready)
        process.send(signal.SIGTERM)
        assert await process.ended() == 0


async def test_a_database_that_is_not_migrated_is_named_with_what_to_do(
    start: Start, server_url: str, used_databases: list[str]
) -> None:
    process = await start("run", database_url=await empty_database(server_url, used_databases))
    assert await process.ended() == 1
    assert "service migrate" in process.output
    assert "Traceback" not in process.output


async def test_a_database_that_does_not_exist_is_named_without_a_traceback(
    start: Start, server_url: str
) -> None:
    url = make_url(server_url).set(database="no_such_one").render_as_string(hide_password=False)
    process = await start("run", database_url=url)
    assert await process.ended() == 1
    assert 'database "no_such_one" does not exist' in process.output
    assert "Traceback" not in process.output


async def test_all_wrong_settings_are_told_at_once(start: Start) -> None:
    process = await start(
        "run", database_url=None, kafka_bootstrap_servers=None, batch_size=0, health_port="x"
    )
    assert await process.ended() == 2
    for name in ("DATABASE_URL", "KAFKA_BOOTSTRAP_SERVERS", "BATCH_SIZE", "HEALTH_PORT"):
        assert f"PIPELINE_{name}: " in process.output
    assert "Traceback" not in process.output


@pytest.mark.parametrize("wrong", ["a setting", "the database", "the code"])
async def test_what_ends_a_process_that_serves_is_a_line_of_its_log(
    start: Start, server_url: str, used_databases: list[str], wrong: str, tmp_path: Path
) -> None:
    match wrong:
        case "a setting":
            process = await start("consume", batch_size=0, log_json=True)
            said = "The settings are wrong:\n  PIPELINE_BATCH_SIZE: "
        case "the database":
            empty = await empty_database(server_url, used_databases)
            process = await start("consume", database_url=empty, log_json=True)
            said = "NotMigrated: "
        case _:
            (tmp_path / "alembic.ini").write_text("[alembic]\nscript_location = %(here)s")
            (tmp_path / "versions").mkdir()
            (tmp_path / "versions" / "broken.py").write_text("1 / 0")
            process = await start("consume", cwd=tmp_path, log_json=True)
            said = "stopped by an unexpected error"
    assert await process.ended() == (2 if wrong == "a setting" else 1)
    *_, line = map(json.loads, process.output.splitlines())
    assert (line["level"], line["message"].startswith(said)) == ("CRITICAL", True), line
    assert ("exception" in line) == (wrong == "the code")


async def test_a_password_in_a_wrong_setting_is_not_printed(start: Start) -> None:
    process = await start("run", database_url="postgresql://service:secret@localhost/service")
    assert await process.ended() == 2
    assert "postgresql+asyncpg://" in process.output
    assert "secret" not in process.output


async def test_a_health_port_that_is_taken_is_named_with_what_to_do(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await start("run", health_port=port)
        assert await process.ended() == 1
    assert "PIPELINE_HEALTH_PORT" in process.output
    assert str(port) in process.output
    assert "Traceback" not in process.output


async def test_a_process_works_from_any_folder(
    start: Start, bank: Bank, producer: AIOKafkaProducer, db: asyncpg.Connection, tmp_path: Path
) -> None:
    await start("run", cwd=tmp_path)
    await Deposit(1).send(producer, bank.deposits)
    await eventually(lambda: _inbox_holds(db, 1))
