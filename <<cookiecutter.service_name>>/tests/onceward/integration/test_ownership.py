"""Who owns a partition, and where it goes on: the position in PostgreSQL decides, alone."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import asyncpg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.structs import OffsetAndMetadata

from onceward import Transaction
from onceward.apply.positions import PositionMoved
from onceward.consume.reader import Reader
from onceward.observe.health import Health
from onceward.runtime import Part

from .applier import Applier, NewApplier
from .bank import Bank
from .conftest import position_of, position_reaches
from .processes import starting
from tests.conftest import Running
from tests.contract.bank import Deposit, Deposited, histories
from tests.servers.waiting import PATIENCE, eventually


@pytest.fixture
async def two_partitions(new_topic: Callable[..., Awaitable[str]]) -> Bank:
    """Return a bank whose deposits come from two partitions."""
    topic = await new_topic(partitions=2)
    return Bank(deposits=topic, balances="balances", name=f"bank-{topic[-8:]}")


async def committed_offsets(kafka: str, group: str) -> dict[TopicPartition, int]:
    """Return the offsets that Kafka has of a group."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        offsets = await admin.list_consumer_group_offsets(group)
    finally:
        await admin.close()
    return {partition: found.offset for partition, found in offsets.items()}


async def test_a_batch_read_from_an_outdated_position_has_no_effect(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    """Trap 12: the second of two owners is refused."""
    bank, applier = ledger
    stale = await applier.read(Deposit(3), Deposit(4), start=await applier.position())
    await applier.apply(Deposit(1), Deposit(2))
    with pytest.raises(PositionMoved):
        await applier.apply_batch(stale)
    assert bank.calls == [1, 2]
    assert await histories(db) == {"ada": [1, 2]}
    assert await db.fetchval("SELECT count(*) FROM pipeline.inbox") == 2
    assert await applier.position() == 2


async def test_of_two_concurrent_owners_one_applies_and_the_other_is_refused(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """Trap 12."""
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    owner, zombie = [await new_applier(bank.handlers, topic=bank.deposits) for _ in range(2)]
    for round in range(10):
        start = await owner.position()
        # Of different length, so that the zombie's end would be found out.
        amounts = range(start, start + 5)
        outcomes = await asyncio.gather(
            owner.apply(*(Deposit(n) for n in amounts), start=start),
            zombie.apply(*(Deposit(n) for n in amounts[: 1 + round % 5]), start=start),
            return_exceptions=True,
        )
        assert [type(one) for one in outcomes if isinstance(one, Exception)] == [PositionMoved]
    end = await owner.position()
    assert await histories(db) == {"ada": list(range(end))}


async def test_a_new_service_begins_at_the_earliest_record_that_the_broker_has(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection, kafka: str
) -> None:
    for amount in (1, 2, 3):
        await Deposit(amount).send(producer, bank.deposits)
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    await admin.delete_records({TopicPartition(bank.deposits, 0): RecordsToDelete(2)})
    await admin.close()
    async with running(bank.service, Part.CONSUME):
        await eventually(position_reaches(db, bank.deposits, 3))
    assert await histories(db) == {"ada": [3]}


async def test_where_a_new_service_begins_is_stored_before_it_reads(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    await Deposit(1).send(producer, bank.deposits)
    async with running(bank.service, Part.CONSUME, consumer_start="latest"):
        await eventually(position_reaches(db, bank.deposits, 1))
    # Nothing was read, and yet what comes while the service is away is not skipped.
    await Deposit(2).send(producer, bank.deposits)
    async with running(bank.service, Part.CONSUME, consumer_start="latest"):
        await eventually(position_reaches(db, bank.deposits, 2))
    assert await histories(db) == {"ada": [2]}


async def test_the_position_wins_over_kafkas_offset_which_only_follows(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection, kafka: str
) -> None:
    here = TopicPartition(bank.deposits, 0)

    async def follows() -> bool:
        return await committed_offsets(kafka, bank.name) == {here: 3}

    for amount in (1, 2, 3):
        await Deposit(amount).send(producer, bank.deposits)
    async with running(bank.service, Part.CONSUME):
        await eventually(follows)
    assert bank.calls == [1, 2, 3]
    # As after a restore of the database, but for the markers.
    await db.execute("UPDATE pipeline.position SET next_offset = 1")
    async with running(bank.service, Part.CONSUME):
        await eventually(position_reaches(db, bank.deposits, 3))
        await eventually(follows)
    assert bank.calls == [1, 2, 3]
    await db.execute("DELETE FROM pipeline.inbox WHERE id = '3'")
    await db.execute("UPDATE pipeline.position SET next_offset = 2")
    async with running(bank.service, Part.CONSUME):
        await eventually(position_reaches(db, bank.deposits, 3))
    assert bank.calls == [1, 2, 3, 3]


async def test_a_position_moved_under_a_running_service_is_read_again(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    async with running(bank.service, Part.CONSUME) as health:
        for amount in (1, 2):
            await Deposit(amount).send(producer, bank.deposits)
        await eventually(position_reaches(db, bank.deposits, 2))
        await db.execute("UPDATE pipeline.position SET next_offset = 0")
        await Deposit(3).send(producer, bank.deposits)
        await eventually(position_reaches(db, bank.deposits, 3))
        await eventually(lambda: health.is_ready)
    assert await histories(db) == {"ada": [1, 2, 3]}


async def test_offset_gaps_of_transactions_are_passed_and_aborted_records_never_handled(
    bank: Bank, running: Running, db: asyncpg.Connection, kafka: str
) -> None:
    """Trap 13."""
    producer = AIOKafkaProducer(bootstrap_servers=kafka, transactional_id=f"test-{bank.name}")
    await producer.start()
    try:
        for amount in (1, 2, 3, 4):
            await producer.begin_transaction()
            await Deposit(amount).send(producer, bank.deposits)
            await (producer.abort_transaction() if amount == 2 else producer.commit_transaction())
        async with running(bank.service, Part.CONSUME, batch_size=1):
            # Of each transaction there is one record and one marker of Kafka's own.
            await eventually(position_reaches(db, bank.deposits, 7))
    finally:
        await producer.stop()
    assert await histories(db) == {"ada": [1, 3, 4]}


async def test_a_second_member_takes_over_without_loss_or_double_and_gives_back(
    two_partitions: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    bank = two_partitions
    parts = [f"partition {bank.deposits}/{number}" for number in (0, 1)]
    sent = 0

    async def send(count: int) -> None:
        nonlocal sent
        for amount in range(sent, sent + count):
            await Deposit(amount, account=f"of {amount % 2}", partition=amount % 2).send(
                producer, bank.deposits
            )
        sent += count

    def holds(health: Health) -> set[str]:
        return {part for part in parts if part in health._parts}

    async def applied() -> bool:
        return sum(map(len, (await histories(db)).values())) == sent

    async with running(bank.service, Part.CONSUME, batch_size=3) as first:
        await eventually(lambda: len(holds(first)) == 2)
        sending = asyncio.create_task(send(100))
        async with running(bank.service, Part.CONSUME, batch_size=3) as second:
            await eventually(lambda: len(holds(first)) == len(holds(second)) == 1)
            await sending
            await send(20)
            await eventually(applied)
        await eventually(lambda: len(holds(first)) == 2)
        await send(20)
        await eventually(applied)
    assert await histories(db) == {f"of {n}": list(range(n, sent, 2)) for n in (0, 1)}
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox") == sent
    versions = await db.fetch("SELECT subject, sequence FROM pipeline.outbox ORDER BY id")
    for account in ("of 0", "of 1"):
        sequence = [row["sequence"] for row in versions if row["subject"] == account]
        assert sequence == list(range(1, sent // 2 + 1))


async def test_a_batch_that_runs_when_its_partition_is_revoked_is_finished_first(
    two_partitions: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    """Trap 12."""
    bank = two_partitions
    inside, go_on = asyncio.Event(), asyncio.Event()

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="waiting", timeout=PATIENCE)
    async def waiting(event: Deposited, tx: Transaction) -> None:
        inside.set()
        await go_on.wait()

    for amount in (1, 2):
        await Deposit(amount, account=str(amount), partition=amount - 1).send(
            producer, bank.deposits
        )
    async with running(bank.service, Part.CONSUME) as first:
        await eventually(lambda: sorted(bank.calls) == [1, 2])
        async with running(bank.service, Part.CONSUME) as second:
            # The first one is asked to give up its partitions, and keeps the second waiting.
            await eventually(lambda: second.reasons.get("consumer") is not None)
            assert not any(part.startswith("partition") for part in second._parts)
            go_on.set()
            await eventually(lambda: first.is_ready and second.is_ready)
            await eventually(lambda: any(part.startswith("partition") for part in second._parts))
    assert sorted(bank.calls) == [1, 2]
    assert await histories(db) == {"1": [1], "2": [2]}


async def test_a_stopping_service_finishes_its_running_batch_and_starts_no_other(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside, go_on = asyncio.Event(), asyncio.Event()

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="waiting", timeout=PATIENCE)
    async def waiting(event: Deposited, tx: Transaction) -> None:
        inside.set()
        await go_on.wait()

    stop = Reader.stop

    async def stop_and_let_the_handler_go_on(reader: Reader, grace: float) -> None:
        asyncio.get_running_loop().call_soon(go_on.set)
        await stop(reader, grace)

    monkeypatch.setattr(Reader, "stop", stop_and_let_the_handler_go_on)
    for amount in range(10):
        await Deposit(amount).send(producer, bank.deposits)
    async with running(bank.service, Part.CONSUME, batch_size=2):
        await inside.wait()
    assert await histories(db) == {"ada": [0, 1]}
    assert await position_of(db, bank.deposits) == 2
    assert await committed_offsets(kafka, bank.name) == {TopicPartition(bank.deposits, 0): 2}


async def test_hundreds_of_duplicates_on_two_partitions_of_two_members_are_applied_once(
    two_partitions: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    """Traps 24 and 31."""
    bank, amounts = two_partitions, range(300)
    # In opposite order, and each three times.
    await asyncio.gather(
        *(
            Deposit(n, account=f"account {n}", partition=partition).send(producer, bank.deposits)
            for n, m in zip(amounts, reversed(amounts), strict=True)
            for partition, n in ((0, n), (1, m), (0, n), (1, m), (1, n), (0, m))
        )
    )
    async with (
        running(bank.service, Part.CONSUME, batch_size=50),
        running(bank.service, Part.CONSUME, batch_size=50),
    ):
        for partition in (0, 1):
            await eventually(position_reaches(db, bank.deposits, 900, partition))
    assert await histories(db) == {f"account {n}": [n] for n in amounts}
    events = await db.fetch("SELECT event_id FROM pipeline.outbox")
    assert Counter(Counter(row["event_id"] for row in events).values()) == {1: 300}


async def test_kafkas_offset_moved_by_somebody_is_not_where_the_service_goes_on(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection, kafka: str
) -> None:
    for amount in (1, 2, 3):
        await Deposit(amount).send(producer, bank.deposits)
    here = TopicPartition(bank.deposits, 0)
    async with AIOKafkaConsumer(bootstrap_servers=kafka, group_id=bank.name) as somebody:
        somebody.assign([here])
        await somebody.commit({here: OffsetAndMetadata(2, "")})
    async with running(bank.service, Part.CONSUME):
        await eventually(position_reaches(db, bank.deposits, 3))
    assert await histories(db) == {"ada": [1, 2, 3]}


@pytest.mark.full
async def test_processes_with_a_blocked_event_loop_keep_partitions_and_stay_alive(
    two_partitions: Bank,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    database_url: str,
    kafka: str,
) -> None:
    bank, value = two_partitions, b'{"how": "sleep"}'
    deposits = [Deposit(n, account=f"of {n % 2}", partition=n % 2) for n in range(100)]
    deposits[50:50] = [
        Deposit(n, account=f"struck {n}", type="struck", id=f"sleep {n}", value=value, partition=n)
        for n in (0, 1)
    ]

    async def is_over() -> bool:
        dead = "SELECT count(*) FROM pipeline.backlog WHERE died_at IS NOT NULL"
        applied = sum(map(len, (await histories(db)).values()))
        return bool(applied == 100 and await db.fetchval(dead) == 2)

    async with starting(
        bank,
        database_url=database_url,
        kafka_bootstrap_servers=kafka,
        kafka_session_timeout=6,  # as long as the handler sleeps
        transaction_timeout=5,
        lock_timeout=2,
        # The two may block one process after the other, and each outlasts one block of a third.
        backlog_lease=12,
        relay_lease=12,
        unclean_starts=1,
    ) as start:
        both = [await start("run"), await start("run")]
        for one in both:
            await eventually(one.is_ready)
        await asyncio.gather(*(one.send(producer, bank.deposits) for one in deposits))
        await eventually(is_over)
        for one in both:
            assert one.is_running
            assert "crashed" not in one.output
            assert "reading the position again" not in one.output
            assert "lost the lease" not in one.output
            assert "a call was interrupted" in one.output
            assert "in strike" in one.output, "the place where it has blocked is in the log"
        assert await db.fetchval("SELECT max(starts) FROM pipeline.position") == 0
    rows = await db.fetch("SELECT reason, error FROM pipeline.backlog")
    assert {row["reason"] for row in rows} == {"attempts used up"}
    assert all("strike blocks the event loop" in row["error"] for row in rows)
