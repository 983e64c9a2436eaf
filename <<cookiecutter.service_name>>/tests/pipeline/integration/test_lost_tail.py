"""A broker loses its last records, and others are written in their place: that is an incident."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from servers.kafka import Kafka
from servers.network import LOOPBACK

from pipeline.runtime import Part

from .bank import Bank
from .clusters import private_broker
from .conftest import position_of, position_reaches
from .kafka_wire import Wire
from .test_inbox import somebody_waits
from tests.conftest import Running
from tests.contract.bank import Deposit
from tests.servers.waiting import eventually

pytestmark = pytest.mark.full

PATIENT = {
    "kafka_session_timeout": 305,
    "transaction_timeout": 300,
    "lock_timeout": 295,
    "backlog_lease": 305,
    "retry_pause": 0.2,
}
"""No transaction ends because a broker takes long to start."""


@pytest.fixture(scope="module")
def broker() -> Iterator[Kafka]:
    """Return a broker that may lose what it has."""
    with private_broker() as one:
        yield one


@pytest.fixture(scope="module")
def kafka(broker: Kafka) -> str:
    """Bootstrap servers of that broker, in the place of the one that all tests share."""
    return f"{LOOPBACK}:{broker.port}"


@pytest.fixture(scope="module")
def used_topics() -> list[str]:
    """Return a list of its own: the topics go with the broker."""
    return []


@pytest.fixture
async def wire(kafka: str) -> AsyncIterator[Wire]:
    """Return a wire to the broker."""
    async with Wire(kafka).listening() as one:
        yield one


def set_back(broker: Kafka, target: Path, source: Path) -> None:
    """Replace a folder of the broker, which does not run, by another one."""
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(source, target)


async def send(kafka: str, bank: Bank, amounts: range) -> None:
    async with AIOKafkaProducer(bootstrap_servers=kafka) as one:
        for amount in amounts:
            await Deposit(amount).send(one, bank.deposits)


def restart(broker: Kafka) -> None:
    broker.start()
    broker.wait_until_serving()


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("lost", ["the partition", "everything"])
async def test_records_in_the_place_of_lost_ones_are_not_skipped_while_the_service_runs(
    broker: Kafka,
    bank: Bank,
    running: Running,
    db: asyncpg.Connection,
    connect: Callable[[], Awaitable[asyncpg.Connection]],
    kafka: str,
    wire: Wire,
    tmp_path: Path,
    lost: str,
    is_busy: bool,
) -> None:
    """As after an unclean election, and as after a backup of the broker was restored."""
    data = broker.home / "data"
    folder = data / f"{bank.deposits}-0" if lost == "the partition" else data
    await send(kafka, bank, range(1, 6))
    await asyncio.to_thread(broker.stop)
    await asyncio.to_thread(shutil.copytree, folder, tmp_path / "copy")
    await asyncio.to_thread(restart, broker)
    await send(kafka, bank, range(6, 11))
    async with AsyncExitStack() as after, AsyncExitStack() as locked:
        if is_busy:
            other = await connect()
            await locked.enter_async_context(other.transaction())
            await other.execute("LOCK TABLE account IN EXCLUSIVE MODE")
        health = await after.enter_async_context(
            running(bank.service, Part.CONSUME, kafka_bootstrap_servers=wire.address, **PATIENT)
        )
        if is_busy:
            await somebody_waits(db)
        else:
            await eventually(position_reaches(db, bank.deposits, 10))
        wire.shut()
        await asyncio.to_thread(broker.stop)
        await asyncio.to_thread(set_back, broker, folder, tmp_path / "copy")
        await asyncio.to_thread(restart, broker)
        await send(kafka, bank, range(11, 26))
        wire.go_on()
        await locked.aclose()
        part = f"partition {bank.deposits}/0"

        async def is_decided() -> bool:
            is_blocked = "service topics seek" in health.reasons.get(part, "")
            return is_blocked or (await position_of(db, bank.deposits) or 0) > 10

        await eventually(is_decided)
        assert "its end lost" in health.reasons.get(part, "no message")
        assert await position_of(db, bank.deposits) == 10
    assert set(bank.calls) == {*range(1, 11)}
