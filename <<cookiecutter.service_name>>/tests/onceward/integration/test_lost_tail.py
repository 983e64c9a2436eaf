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

from onceward.runtime import Part

from .bank import Bank
from .clusters import private_broker
from .conftest import position_of, position_reaches
from .kafka_wire import Wire
from .test_inbox import somebody_waits
from .test_topics import deleted_before
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


def restart(broker: Kafka) -> None:
    broker.start()
    broker.wait_until_serving()


async def send(kafka: str, bank: Bank, amounts: range, *, commits: bool | None = None) -> None:
    """Send deposits, with `commits` in a transaction that is committed or aborted."""
    id = None if commits is None else bank.name
    async with AIOKafkaProducer(bootstrap_servers=kafka, transactional_id=id) as one:
        if commits is not None:
            await one.begin_transaction()
        for amount in amounts:
            await Deposit(amount).send(one, bank.deposits)
        if commits is not None:
            await (one.commit_transaction() if commits else one.abort_transaction())


async def send_more(kafka: str, bank: Bank) -> None:
    await send(kafka, bank, range(21, 36))


async def send_as_many(kafka: str, bank: Bank) -> None:
    """Fill the topic to the position, so that nothing comes behind it."""
    await send(kafka, bank, range(21, 26))


async def send_a_transaction(kafka: str, bank: Bank) -> None:
    """Have its marker where the record before the position was."""
    await send(kafka, bank, range(21, 25), commits=True)
    await send(kafka, bank, range(31, 36))


async def send_what_is_aborted(kafka: str, bank: Bank) -> None:
    """Have a record there that no consumer gets to see, and the marker behind the position."""
    await send(kafka, bank, range(21, 27), commits=False)
    await send(kafka, bank, range(31, 36))


Others = Callable[[str, Bank], Awaitable[None]]


@pytest.mark.parametrize(
    ("lost", "state", "send_others"),
    [
        ("the partition", "idle", send_more),
        ("the partition", "busy", send_more),
        ("everything", "idle", send_more),
        ("everything", "busy", send_more),
        ("the partition", "idle", send_as_many),
        ("the partition", "idle", send_a_transaction),
        ("the partition", "busy", send_what_is_aborted),
    ],
)
async def test_a_running_service_does_not_skip_records_that_replace_lost_ones(
    broker: Kafka,
    bank: Bank,
    running: Running,
    db: asyncpg.Connection,
    connect: Callable[[], Awaitable[asyncpg.Connection]],
    kafka: str,
    wire: Wire,
    tmp_path: Path,
    lost: str,
    state: str,
    send_others: Others,
) -> None:
    """As after an unclean election, and as after a backup of the broker was restored."""
    data, part = broker.home / "data", f"partition {bank.deposits}/0"
    folder = data / f"{bank.deposits}-0" if lost == "the partition" else data
    await send(kafka, bank, range(1, 6))
    await asyncio.to_thread(broker.stop)
    await asyncio.to_thread(shutil.copytree, folder, tmp_path / "copy")
    await asyncio.to_thread(restart, broker)
    await send(kafka, bank, range(6, 11))
    async with AsyncExitStack() as after, AsyncExitStack() as locked:
        if state == "busy":
            other = await connect()
            await locked.enter_async_context(other.transaction())
            await other.execute("LOCK TABLE account IN EXCLUSIVE MODE")
        health = await after.enter_async_context(
            running(
                bank.service,
                Part.CONSUME,
                kafka_bootstrap_servers=wire.address,
                **PATIENT,
            )
        )
        if state == "busy":
            await somebody_waits(db)
        else:
            await eventually(position_reaches(db, bank.deposits, 10))
        wire.shut()
        await asyncio.to_thread(broker.stop)
        await asyncio.to_thread(set_back, broker, folder, tmp_path / "copy")
        await asyncio.to_thread(restart, broker)
        await send_others(kafka, bank)
        wire.go_on()
        await locked.aclose()

        async def is_decided() -> bool:
            is_blocked = "service topics seek" in health.reasons.get(part, "")
            return is_blocked or (await position_of(db, bank.deposits) or 0) > 10

        await eventually(is_decided)
        assert "its end lost" in health.reasons.get(part, "no message")
        assert await position_of(db, bank.deposits) == 10
    assert {*bank.calls} == {*range(1, 11)}


async def test_a_change_of_the_connection_alone_skips_and_repeats_nothing(
    bank: Bank, running: Running, db: asyncpg.Connection, kafka: str, wire: Wire
) -> None:
    await send(kafka, bank, range(1, 6))
    async with running(
        bank.service, Part.CONSUME, kafka_bootstrap_servers=wire.address, **PATIENT
    ) as health:
        for end in range(5, 25, 5):
            await eventually(position_reaches(db, bank.deposits, end))
            wire.cut()
            await send(kafka, bank, range(end + 1, end + 6))
        await eventually(position_reaches(db, bank.deposits, 25))
        await eventually(lambda: health.is_ready)
    assert bank.calls == [*range(1, 26)]


async def test_a_change_of_the_connection_blocks_nothing_where_retention_has_deleted_all(
    bank: Bank,
    running: Running,
    db: asyncpg.Connection,
    kafka: str,
    wire: Wire,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The record before the position is gone, and so is its offset."""
    await send(kafka, bank, range(1, 6))
    async with running(
        bank.service, Part.CONSUME, kafka_bootstrap_servers=wire.address, **PATIENT
    ) as health:
        await eventually(position_reaches(db, bank.deposits, 5))
        await deleted_before(kafka, bank.deposits, 5)
        wire.cut()
        await eventually(lambda: "reading the position again" in caplog.text)
        await send(kafka, bank, range(6, 11))
        await eventually(position_reaches(db, bank.deposits, 10))
        await eventually(lambda: health.is_ready)
    assert "is blocked" not in caplog.text
    assert bank.calls == [*range(1, 11)]
