"""Offsets with gaps, records still in work, partitions that are new: how far a partition is."""

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from onceward import Transaction
from onceward.apply.positions import Slot
from onceward.operators import offsets
from onceward.operators.audit import Change
from onceward.runtime import Part

from .bank import Bank
from .conftest import position_of, position_reaches
from .test_interrupted import Gate
from .test_ownership import committed_offsets
from tests.conftest import Running
from tests.contract.bank import Deposit, Deposited, histories
from tests.servers.waiting import PATIENCE, eventually

NewTopic = Callable[..., Awaitable[str]]


def bank_on(topic: str) -> Bank:
    """Return a bank whose deposits come from the topic."""
    return Bank(deposits=topic, balances="balances", name=f"bank-{topic[-8:]}")


@pytest.fixture
async def transactions(kafka: str) -> AsyncIterator[AIOKafkaProducer]:
    """Return a producer that sends in transactions."""
    producer = AIOKafkaProducer(bootstrap_servers=kafka, transactional_id=f"test-{uuid4()}")
    async with producer:
        yield producer


async def all_records(kafka: str, topic: str) -> list[ConsumerRecord]:
    """Return what the first partition of a topic holds now."""
    here = TopicPartition(topic, 0)
    found: list[ConsumerRecord] = []
    async with AIOKafkaConsumer(bootstrap_servers=kafka) as consumer:
        consumer.assign([here])
        await consumer.seek_to_beginning(here)
        end = (await consumer.end_offsets([here]))[here]
        while await consumer.position(here) < end:
            found += (await consumer.getmany(here, timeout_ms=200)).get(here, [])
    return found


async def test_offset_gaps_left_by_compaction_are_passed_even_at_the_position(
    new_topic: NewTopic,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
) -> None:
    """Trap 13."""
    compacting = {"cleanup.policy": "compact", "segment.ms": "50"}
    bank = bank_on(await new_topic(**compacting, **{"min.cleanable.dirty.ratio": "0.001"}))
    sent = 0

    async def send(count: int) -> None:
        nonlocal sent
        for amount in range(sent, sent + count):
            await Deposit(amount, ("ada", "bob")[amount % 2]).send(producer, bank.deposits)
        sent += count

    async def is_compacted() -> bool:
        await send(1)  # the newest segment never is
        return {3, 4, 5}.isdisjoint(one.offset for one in await all_records(kafka, bank.deposits))

    await send(3)
    async with running(bank.service, Part.CONSUME):
        await eventually(position_reaches(db, bank.deposits, 3))
    await send(3)
    await eventually(is_compacted)
    async with running(bank.service, Part.CONSUME, batch_size=2):
        await eventually(position_reaches(db, bank.deposits, sent))
    # Compaction may have gone on: what is left at the end was there for the service, too.
    left = [one.offset for one in await all_records(kafka, bank.deposits)]
    assert set(bank.calls) >= {0, 1, 2, *left}
    assert set(bank.calls).isdisjoint({3, 4, 5})
    assert bank.calls == sorted(set(bank.calls))
    assert await histories(db) == {
        "ada": [amount for amount in bank.calls if amount % 2 == 0],
        "bob": [amount for amount in bank.calls if amount % 2 == 1],
    }


async def test_a_position_behind_an_open_transaction_is_in_the_topic(
    new_topic: NewTopic,
    running: Running,
    producer: AIOKafkaProducer,
    transactions: AIOKafkaProducer,
    db: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`service topics seek --to latest` sets it to where the next record will be written."""
    bank = bank_on(await new_topic(partitions=1))
    await transactions.begin_transaction()
    await Deposit(1).send(transactions, bank.deposits)
    await offsets.seek(db, Slot(bank.name, bank.deposits, 0), 1, Change("ada", "seek"))
    async with running(bank.service, Part.CONSUME) as health:
        await eventually(lambda: health.is_ready)
        await transactions.commit_transaction()
        await Deposit(2).send(producer, bank.deposits)
        await eventually(position_reaches(db, bank.deposits, 3))
    assert "is blocked" not in caplog.text
    assert bank.calls == [2]


@pytest.mark.parametrize("commits", [True, False], ids=["committed", "aborted"])
async def test_records_behind_an_open_transaction_wait_until_it_is_decided(
    new_topic: NewTopic,
    running: Running,
    producer: AIOKafkaProducer,
    transactions: AIOKafkaProducer,
    db: asyncpg.Connection,
    commits: bool,
) -> None:
    """Trap 13: what comes later is not passed off as all there is, by a restart neither."""
    bank = bank_on(await new_topic(partitions=2))
    await transactions.begin_transaction()
    await Deposit(1).send(transactions, bank.deposits)
    await Deposit(2).send(producer, bank.deposits)
    for end in (1, 2):
        async with running(bank.service, Part.CONSUME):
            await Deposit(10 * end, "bob", partition=1).send(producer, bank.deposits)
            await eventually(position_reaches(db, bank.deposits, end, partition=1))
            assert await position_of(db, bank.deposits) == 0
    await (transactions.commit_transaction() if commits else transactions.abort_transaction())
    await Deposit(3).send(producer, bank.deposits)
    wanted = {"ada": [1, 2, 3] if commits else [2, 3], "bob": [10, 20]}

    async def all_is_applied() -> bool:
        return await histories(db) == wanted

    # Kafka may write its marker before the last record or behind it.
    async with running(bank.service, Part.CONSUME, batch_size=1):
        await eventually(all_is_applied)


async def test_a_restart_behind_kafkas_own_markers_loses_nothing(
    running: Running, transactions: AIOKafkaProducer, bank: Bank, db: asyncpg.Connection
) -> None:
    """Trap 13: the position stands before a marker, and after some that nobody will see."""
    for amount in range(0, 12, 3):
        for one, commits in ((amount, True), (amount + 1, False), (amount + 2, True)):
            await transactions.begin_transaction()
            await Deposit(one).send(transactions, bank.deposits)
            await (
                transactions.commit_transaction() if commits else transactions.abort_transaction()
            )
        async with running(bank.service, Part.CONSUME):
            # Each transaction is a record and a marker; the last marker is not waited for.
            await eventually(position_reaches(db, bank.deposits, 2 * amount + 5))
    assert await histories(db) == {"ada": [n for n in range(12) if n % 3 != 1]}


async def test_kafkas_offset_never_passes_a_record_that_is_still_in_work(
    new_topic: NewTopic,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
) -> None:
    """Trap 13: the next batch is fetched already, and other partitions go on."""
    bank = bank_on(await new_topic(partitions=2))
    held, free = (TopicPartition(bank.deposits, partition) for partition in (0, 1))
    gate = Gate()

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="waiting", timeout=PATIENCE)
    async def waiting(event: Deposited, tx: Transaction) -> None:
        if event.amount == 4:
            await gate.wait()

    async def is_committed(offsets: dict[TopicPartition, int]) -> bool:
        return await committed_offsets(kafka, bank.name) == offsets

    for amount in range(1, 8):
        await Deposit(amount).send(producer, bank.deposits)
    # It has 40 s: nothing here ends because a time is over.
    patient = {
        "kafka_session_timeout": 45,
        "transaction_timeout": 40,
        "lock_timeout": 35,
        "backlog_lease": 45,
    }
    async with running(bank.service, Part.CONSUME, batch_size=2, **patient):
        await gate.reached.wait()
        for end in (1, 2, 3):
            await Deposit(10 * end, "bob", partition=1).send(producer, bank.deposits)
            await eventually(lambda end=end: is_committed({held: 2, free: end}))  # type: ignore[misc]
        gate.open.set()
        await eventually(lambda: is_committed({held: 7, free: 3}))
    assert await histories(db) == {"ada": list(range(1, 8)), "bob": [10, 20, 30]}


async def test_partitions_added_while_two_members_run_are_applied_from_their_beginning(
    running: Running, producer: AIOKafkaProducer, bank: Bank, db: asyncpg.Connection, kafka: str
) -> None:
    async def are_known() -> bool:
        await producer.client.force_metadata_update()
        return len(await producer.partitions_for(bank.deposits)) == 4

    sent: defaultdict[str, list[int]] = defaultdict(list)

    async def send(amount: int) -> None:
        account = str(amount % 4)
        sent[account].append(amount)
        await Deposit(amount, account, partition=amount % 4).send(producer, bank.deposits)

    async with (
        running(bank.service, Part.CONSUME) as one,
        running(bank.service, Part.CONSUME) as other,
    ):
        await send(4)
        await eventually(position_reaches(db, bank.deposits, 1))
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
        await admin.start()
        await admin.create_partitions({bank.deposits: NewPartitions(4)})
        await admin.close()
        await eventually(are_known)
        # Long before the members notice, every 10 s.
        for amount in range(8, 40):
            await send(amount)
        for partition in range(4):
            end = len(sent[str(partition)])
            await eventually(position_reaches(db, bank.deposits, end, partition))
        await eventually(lambda: one.is_ready and other.is_ready)
    assert await histories(db) == sent
