"""Topics that do not hold what the position says: an incident, and a person says where to go on."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from time import time as now

import asyncpg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import NewTopic
from aiokafka.admin.records_to_delete import RecordsToDelete

from onceward.observe.health import Health
from onceward.redaction import HIDDEN
from onceward.runtime import Part
from onceward.testing.files import records_of

from .bank import Bank
from .conftest import position_of, position_reaches
from .processes import starting
from tests.conftest import Running
from tests.contract.bank import Deposit, histories
from tests.servers.processes import Start
from tests.servers.topics import administrator
from tests.servers.waiting import eventually


async def created_anew(kafka: str, topic: str) -> None:
    """Delete the topic and create it again, empty."""
    async with administrator(kafka) as admin:
        await admin.delete_topics([topic])

        async def is_gone() -> bool:
            return topic not in await admin.list_topics()

        await eventually(is_gone)

        async def is_back() -> bool:
            answer = await admin.create_topics([NewTopic(topic, 1, 1)])
            return bool(answer.topic_errors[0][1] == 0)  # until the old one is deleted for good

        await eventually(is_back)


async def deleted_before(kafka: str, topic: str, offset: int) -> None:
    """Delete records as retention does."""
    async with administrator(kafka) as admin:
        await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(offset)})


async def send(producer: AIOKafkaProducer, bank: Bank, *amounts: int) -> None:
    for amount in amounts:
        await Deposit(amount).send(producer, bank.deposits)


def reason(bank: Bank, health: Health) -> str:
    return health.reasons.get(f"partition {bank.deposits}/0", "")


@pytest.fixture
async def start(
    bank: Bank,
    database_url: str,
    kafka: str,
) -> AsyncIterator[Start]:
    """Start commands of the bank."""
    async with starting(bank, database_url=database_url, kafka_bootstrap_servers=kafka) as one:
        yield one


@pytest.fixture
async def handled(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> Bank:
    """Return a bank that has handled the deposits 1 to 5, and is stopped."""
    await send(producer, bank, 1, 2, 3, 4, 5)
    async with running(bank.service, Part.CONSUME):
        await eventually(position_reaches(db, bank.deposits, 5))
    return bank


async def seek(start: Start, *arguments: str) -> str:
    """Run `service topics seek` and return what it says."""
    process = await start("topics", "seek", *arguments)
    assert await process.ended() == 0, process.output
    return process.output


@pytest.mark.parametrize("amounts", [(), (11, 12), (11, 12, 13, 14), (11, 12, 13, 14, 15, 16, 17)])
async def test_a_topic_created_anew_is_an_incident_until_somebody_decides(
    handled: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
    start: Start,
    amounts: tuple[int, ...],
) -> None:
    """Trap 34: with no record, with fewer than the old one had, as many as were read, and more."""
    await created_anew(kafka, handled.deposits)
    async with AIOKafkaProducer(bootstrap_servers=kafka) as fresh:  # one that knows the new topic
        await send(fresh, handled, *amounts)
        async with running(handled.service, Part.CONSUME) as health:
            if len(amounts) == 4:  # the record that shows it is still to come
                await send(fresh, handled, 15)
            await eventually(lambda: "service topics seek" in reason(handled, health))
            assert await position_of(db, handled.deposits) == 5
            assert handled.calls == [1, 2, 3, 4, 5]
            said = await seek(start, handled.deposits, "--to", "earliest")
            assert f"{handled.deposits}/0 goes from 5 to 0" in said
            await send(fresh, handled, 20)
            wanted = [1, 2, 3, 4, 5, *amounts, *([15] if len(amounts) == 4 else []), 20]
            await eventually(lambda: health.is_ready and handled.calls == wanted)
    assert await histories(db) == {"ada": wanted}


@pytest.mark.parametrize("seconds", [0, 5])
async def test_a_topic_created_anew_is_an_incident_while_a_process_reads_it(
    handled: Bank,
    start: Start,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
    seconds: int,
) -> None:
    """The brokers tell the process of it, or it was stopped for so long that it asks."""
    process = await start("consume", kafka_session_timeout=100)
    await send(producer, handled, 6)
    await eventually(position_reaches(db, handled.deposits, 6))
    if seconds:
        process.send(signal.SIGSTOP)
    await created_anew(kafka, handled.deposits)
    async with AIOKafkaProducer(bootstrap_servers=kafka) as fresh:
        await send(fresh, handled, *range(11, 19))
        await asyncio.sleep(seconds)
        process.send(signal.SIGCONT)

        async def is_decided() -> bool:
            is_blocked = "is blocked" in process.output
            return is_blocked or await position_of(db, handled.deposits) != 6

        await eventually(is_decided)
    assert "is blocked and skips no record: offset 6: topic changed" in process.output
    assert await position_of(db, handled.deposits) == 6


@pytest.mark.parametrize("change", ["applied records expire", "others expire", "aborted"])
async def test_a_process_that_was_stopped_goes_on_unless_records_are_lost(
    handled: Bank,
    start: Start,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
    change: str,
) -> None:
    process = await start("consume", kafka_session_timeout=100)
    await send(producer, handled, 6)
    await eventually(position_reaches(db, handled.deposits, 6))
    process.send(signal.SIGSTOP)
    match change:
        case "applied records expire":
            await deleted_before(kafka, handled.deposits, 6)
        case "others expire":
            await send(producer, handled, 7, 8)
            await deleted_before(kafka, handled.deposits, 7)
        case "aborted":
            async with AIOKafkaProducer(
                bootstrap_servers=kafka, transactional_id=handled.name
            ) as one:
                await one.begin_transaction()
                await send(one, handled, 7)
                await one.abort_transaction()
    await asyncio.sleep(5)
    process.send(signal.SIGCONT)
    if change == "others expire":
        await process.says("1 offsets are lost to this service")
        assert await position_of(db, handled.deposits) == 6
        return
    if change == "aborted":
        await eventually(position_reaches(db, handled.deposits, 8))
    await send(producer, handled, 9)
    end = 7 if change == "applied records expire" else 9
    await eventually(position_reaches(db, handled.deposits, end))
    assert "is blocked" not in process.output
    assert await histories(db) == {"ada": [1, 2, 3, 4, 5, 6, 9]}


async def test_offsets_that_have_expired_are_an_incident_until_somebody_decides(
    handled: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
    start: Start,
) -> None:
    """Trap 34: records 6 and 7 are lost, and nobody may pass over that in silence."""
    await send(producer, handled, 6, 7, 8)
    await deleted_before(kafka, handled.deposits, 7)
    async with running(handled.service, Part.CONSUME) as health:
        await eventually(lambda: "2 offsets are lost" in reason(handled, health))
        assert await position_of(db, handled.deposits) == 5
        said = await seek(start, handled.deposits, "--to", "earliest", "--dry-run")
        assert f"{handled.deposits}/0 would go from 5 to 7 (the brokers have 7 to 8)" in said
        assert await position_of(db, handled.deposits) == 5
        await seek(start, handled.deposits, "--to", "earliest", "--partition", "0")
        await eventually(position_reaches(db, handled.deposits, 8))
        await eventually(lambda: health.is_ready)
    assert await histories(db) == {"ada": [1, 2, 3, 4, 5, 8]}


async def test_offsets_that_expire_while_they_are_waited_for_are_an_incident(
    handled: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
) -> None:
    handled.refused.add(6)
    # The first failure opens the breaker: the partition waits before its record.
    async with running(handled.service, Part.CONSUME, breaker_keys=1) as health:
        await send(producer, handled, 6, 7, 8)
        await eventually(lambda: "offset 5: breaker open" in reason(handled, health))
        await deleted_before(kafka, handled.deposits, 7)
        await eventually(lambda: "2 offsets are lost" in reason(handled, health))
        assert await position_of(db, handled.deposits) == 5


async def test_a_partition_on_which_nothing_comes_goes_on_where_somebody_says(
    handled: Bank, running: Running, db: asyncpg.Connection, start: Start
) -> None:
    await db.execute("DELETE FROM pipeline.inbox")  # so that it shows
    async with running(handled.service, Part.CONSUME) as health:
        await eventually(lambda: health.is_ready)
        await seek(start, handled.deposits, "--to", "3")
        await eventually(position_reaches(db, handled.deposits, 5))
        await eventually(lambda: handled.calls == [1, 2, 3, 4, 5, 4, 5])


async def test_an_idle_partition_is_ready_again_after_connections_were_lost(
    handled: Bank, running: Running, db: asyncpg.Connection
) -> None:
    async with running(handled.service, Part.CONSUME) as health:
        await eventually(lambda: health.is_ready)
        for _ in range(20):
            await db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            await asyncio.sleep(0.1)
        await eventually(lambda: health.is_ready)


async def test_who_skips_records_is_told_so(handled: Bank, start: Start) -> None:
    await seek(start, handled.deposits, "--to", "2")
    assert "skips 3 offsets" in await seek(start, handled.deposits, "--to", "latest")


@pytest.mark.parametrize(
    ("value", "why"),
    [(b"{", "invalid payload"), (b'{"account": "ada", "amount": 2}', "failed")],
)
async def test_a_faulty_record_is_set_aside_and_passed_with_its_preceding_gap(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
    value: bytes,
    why: str,
) -> None:
    async with AIOKafkaProducer(bootstrap_servers=kafka, transactional_id=bank.name) as one:
        await one.begin_transaction()
        await Deposit(1).send(one, bank.deposits)
        await one.abort_transaction()
    bank.refused.add(2)
    await Deposit(2, value=value).send(producer, bank.deposits)

    async def is_set_aside() -> bool:
        return bool(await db.fetchval("SELECT count(*) FROM pipeline.backlog"))

    async with running(bank.service, Part.CONSUME):
        await eventually(is_set_aside)
    (row,) = await db.fetch('SELECT "offset", reason FROM pipeline.backlog')
    assert row["reason"] == why
    assert await position_of(db, bank.deposits) == row["offset"] + 1 > 1
    assert await histories(db) == {}


@pytest.mark.parametrize("kind", ["committed", "aborted"])
async def test_the_marks_of_transactions_are_passed_when_nothing_comes_behind_them(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
    kind: str,
) -> None:
    """Trap 13. Else the topic, once it is empty, would seem to have lost offsets."""
    async with AIOKafkaProducer(bootstrap_servers=kafka, transactional_id=bank.name) as one:
        await one.begin_transaction()
        await Deposit(1).send(one, bank.deposits)
        await (one.commit_transaction() if kind == "committed" else one.abort_transaction())
    async with running(bank.service, Part.CONSUME) as health:
        await eventually(position_reaches(db, bank.deposits, 2))
    await deleted_before(kafka, bank.deposits, 2)
    async with running(bank.service, Part.CONSUME) as health:
        await eventually(lambda: health.is_ready)
        await send(producer, bank, 2)
        await eventually(position_reaches(db, bank.deposits, 3))
    assert await histories(db) == {"ada": [1, 2] if kind == "committed" else [2]}


@pytest.mark.parametrize("first", [3, 5])
async def test_retention_may_delete_what_was_read(
    handled: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
    first: int,
) -> None:
    await deleted_before(kafka, handled.deposits, first)
    async with running(handled.service, Part.CONSUME) as health:
        await eventually(lambda: health.is_ready)
        await send(producer, handled, 6)
        await eventually(position_reaches(db, handled.deposits, 6))
    assert await histories(db) == {"ada": [1, 2, 3, 4, 5, 6]}


async def test_compaction_may_drop_the_record_that_a_topic_is_recognised_by(
    bank: Bank,
    new_topic: Callable[..., Awaitable[str]],
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
) -> None:
    topic = await new_topic(
        **{
            "cleanup.policy": "compact",
            "segment.ms": "1",
            "min.cleanable.dirty.ratio": "0.001",
            "max.compaction.lag.ms": "1",
        }
    )
    compacted = Bank(deposits=topic, balances=bank.balances, name=bank.name)
    await send(producer, compacted, 1, 2)
    async with running(compacted.service, Part.CONSUME):
        await eventually(position_reaches(db, topic, 2))
    await send(producer, compacted, 3, 4)

    async def is_compacted() -> bool:
        await Deposit(5, account="bob").send(producer, topic)  # a segment that is written stays
        async with AIOKafkaConsumer(bootstrap_servers=kafka) as consumer:
            partition = TopicPartition(topic, 0)
            consumer.assign([partition])
            consumer.seek(partition, 1)
            return bool((await consumer.getone()).offset > 1)

    await eventually(is_compacted)
    async with running(compacted.service, Part.CONSUME) as health:
        await eventually(lambda: 5 in compacted.calls)
        assert health.is_ready
    assert 4 in compacted.calls


async def test_times_that_no_calendar_has_stop_nothing(
    bank: Bank,
    new_topic: Callable[..., Awaitable[str]],
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
) -> None:
    topic = await new_topic(**{"message.timestamp.after.max.ms": str(2**63 - 1)})
    bank = Bank(deposits=topic, balances=bank.balances, name=bank.name)
    times = [0, 2**62]
    for amount, time in enumerate(times):
        record = Deposit(amount).record(bank.deposits, 0)
        await producer.send_and_wait(
            bank.deposits,
            record.value,
            key=record.key,
            headers=list(record.headers),
            timestamp_ms=time,
        )
    for _ in range(2):
        async with running(bank.service, Part.CONSUME) as health:
            await eventually(position_reaches(db, bank.deposits, len(times)))
            await eventually(lambda: health.is_ready)
    assert bank.calls == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["elsewhere", "--to", "earliest"], "does not read topic elsewhere"),
        (["deposits", "--to", "700"], "has the offsets 0 to 5"),
        (["deposits", "--to", "earliest", "--partition", "3"], "has the partitions 0 to 0"),
        (["deposits", "--to", "yesterday"], "not earliest, latest, an offset, or a time"),
    ],
)
async def test_what_a_topic_does_not_have_can_not_be_sought(
    handled: Bank, db: asyncpg.Connection, start: Start, arguments: list[str], hint: str
) -> None:
    chosen = [handled.deposits if word == "deposits" else word for word in arguments]
    process = await start("topics", "seek", *chosen)
    assert await process.ended() != 0
    assert hint in process.output
    assert "Traceback" not in process.output
    assert await position_of(db, handled.deposits) == 5


async def test_a_topic_that_is_not_there_can_not_be_sought(
    unborn: Bank,
    database_url: str,
    kafka: str,
) -> None:
    async with starting(unborn, database_url=database_url, kafka_bootstrap_servers=kafka) as start:
        process = await start("topics", "seek", unborn.deposits, "--to", "earliest")
        assert await process.ended() == 1
    assert f"there is no topic {unborn.deposits}: create it" in process.output
    assert "Unclosed" not in process.output


async def test_records_are_recorded_as_the_kit_reads_them(
    bank: Bank, start: Start, producer: AIOKafkaProducer, tmp_path: Path
) -> None:
    old = round(1_000 * (now() - 7_200))
    await Deposit(1, timestamp=old).send(producer, bank.deposits)
    await send(producer, bank, 2)
    await Deposit(3, account="correct-horse", value=b"\xff").send(producer, bank.deposits)
    token = {"BANK_TOKEN": "correct-horse"}
    process = await start(
        "topics", "record", bank.deposits, "--last", "1h", more_variables=token, log_level="ERROR"
    )
    assert await process.ended() == 0, process.output
    (file := tmp_path / "recorded").write_text(process.output, "utf-8")
    first, second = records_of(file, bank.service.handlers, keeps_times=True)
    assert (first.key, first.value) == (b"ada", b'{"account": "ada", "amount": 2}')
    assert ("ce_id", b"2") in first.headers
    assert abs(first.timestamp - 1_000 * now()) < 600_000
    assert (second.key, second.value) == (HIDDEN.encode(), b"\xff")


async def test_a_topic_that_is_not_there_can_not_be_recorded(unborn: Bank, start: Start) -> None:
    process = await start("topics", "record", unborn.deposits)
    assert await process.ended() == 1
    assert f"there is no topic {unborn.deposits}" in process.output
