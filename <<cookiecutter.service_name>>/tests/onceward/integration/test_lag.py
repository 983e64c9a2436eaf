"""How far behind Kafka a service is: records that are not applied, and the age of the first."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from onceward import Transaction
from onceward.consume import consumer
from onceward.observe import metrics
from onceward.operators import offsets, stopping
from onceward.operators.stopping import Subject

from .bank import Bank
from .conftest import position_reaches
from .kafka_wire import Wire
from tests.conftest import Running
from tests.contract.bank import Deposit, Deposited
from tests.servers.waiting import eventually

Told = dict[tuple[str, int], tuple[int, float]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Return lag and delay by topic and partition, as they were last reported."""
    found: Told = {}

    def observe(topic: str, partition: int, lag: int, delay: float) -> None:
        found[topic, partition] = lag, delay

    monkeypatch.setattr(metrics, "observe_lag", observe)
    monkeypatch.setattr(consumer, "_MEASURE_SECONDS", 0.05)
    return found


async def test_what_waits_in_a_partition_is_reported_until_it_is_applied(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection, told: Told
) -> None:
    place = bank.deposits, 0
    written = datetime.now(UTC) - timedelta(hours=1)
    await db.execute("ALTER TABLE account RENAME TO elsewhere")
    for amount in range(6):
        one = Deposit(amount, account=f"{amount}", timestamp=int(written.timestamp() * 1_000))
        await one.send(producer, bank.deposits)
    async with running(bank.service, breaker_keys=2, retry_pause=0.1):
        await eventually(lambda: told.get(place, (0, 0.0))[1] > 3_500)
        assert told[place][0] > 0
        await db.execute("ALTER TABLE elsewhere RENAME TO account")
        await eventually(lambda: told[place] == (0, 0.0))


async def test_what_is_paused_has_a_lag_and_is_not_late(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection, told: Told
) -> None:
    place = bank.deposits, 0
    written = int((datetime.now(UTC) - timedelta(hours=1)).timestamp() * 1_000)
    paused = [Subject("topic", bank.deposits)]
    async with running(bank.service) as health:
        await Deposit(1, timestamp=written).send(producer, bank.deposits)
        await eventually(position_reaches(db, bank.deposits, 1))
        await stopping.ask(db, paused, lasts=None, who="ada", why="a test")
        await eventually(lambda: bool(health.paused))
        for amount in (2, 3):
            await Deposit(amount, timestamp=written).send(producer, bank.deposits)
        await eventually(lambda: told[place][0] == 2)
        await asyncio.sleep(0.5)  # some measurements later
        lag, delay = told[place]
        assert lag == 2
        assert delay < 1
        await stopping.resume(db, paused, who="ada", why=None)
        await eventually(lambda: told[place] == (0, 0.0))


async def test_a_process_that_begins_paused_knows_its_lag(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection, told: Told
) -> None:
    place = bank.deposits, 0
    paused = [Subject("topic", bank.deposits)]
    async with running(bank.service):
        await Deposit(1).send(producer, bank.deposits)
        await eventually(position_reaches(db, bank.deposits, 1))
    await stopping.ask(db, paused, lasts=None, who="ada", why="a test")
    for amount in (2, 3):
        await Deposit(amount).send(producer, bank.deposits)
    told.clear()
    async with running(bank.service) as health:
        await eventually(lambda: told.get(place, (0, 0.0))[0] == 2)
        assert told[place] == (2, 0.0)
        await eventually(lambda: not health.reasons)
        await stopping.resume(db, paused, who="ada", why=None)
        await eventually(position_reaches(db, bank.deposits, 3))
        await eventually(lambda: told[place] == (0, 0.0))


async def test_a_partition_without_a_leader_hides_no_lag_of_others(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
    told: Told,
) -> None:
    other = await new_topic()

    @bank.handlers.on(Deposited, topic=other, consumer="other")
    async def leave(event: Deposited, tx: Transaction) -> None:
        """Leave a marker."""

    paused = [Subject("topic", bank.deposits)]
    async with (
        Wire(kafka).listening() as wire,
        running(bank.service, kafka_bootstrap_servers=wire.address) as health,
    ):
        await eventually(lambda: not health.reasons)
        await stopping.ask(db, paused, lasts=None, who="ada", why="a test")
        await eventually(lambda: bool(health.paused))
        wire.take_leaders(other)
        await eventually(lambda: f"no leader for {other}/0" in str(health.reasons))
        for amount in (1, 2):
            await Deposit(amount).send(producer, bank.deposits)
        await eventually(lambda: told.get((bank.deposits, 0), (0, 0.0))[0] == 2)
        wire.go_on()


async def test_a_partition_that_is_given_up_is_not_behind(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection, told: Told
) -> None:
    await db.execute("ALTER TABLE account RENAME TO elsewhere")
    for amount in range(6):
        await Deposit(amount, account=f"{amount}").send(producer, bank.deposits)
    async with running(bank.service, breaker_keys=2, retry_pause=0.1):
        await eventually(lambda: told.get((bank.deposits, 0), (0, 0.0))[0] > 0)
    assert told == {(bank.deposits, 0): (0, 0.0)}


async def test_records_whose_time_is_not_known_are_not_late(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    told: Told,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, seen, observe = (bank.deposits, 0), list[tuple[int, float]](), metrics.observe_lag

    def see(topic: str, partition: int, lag: int, delay: float) -> None:
        observe(topic, partition, lag, delay)
        seen.append((lag, delay))

    monkeypatch.setattr(metrics, "observe_lag", see)
    await db.execute("ALTER TABLE account RENAME TO elsewhere")
    for amount in range(6):
        # In seconds, as some producers have it.
        one = Deposit(amount, account=f"{amount}", timestamp=int(datetime.now(UTC).timestamp()))
        await one.send(producer, bank.deposits)
    async with running(bank.service, breaker_keys=2, retry_pause=0.1):
        await eventually(lambda: any(lag > 0 for lag, _ in seen))
        await db.execute("ALTER TABLE elsewhere RENAME TO account")
        await eventually(lambda: told[place] == (0, 0.0))
        assert max(delay for _, delay in seen) < 60
        (position,) = await offsets.of_group(db, bank.name)
        assert (position["position"], position["written_at"]) == (6, None)
