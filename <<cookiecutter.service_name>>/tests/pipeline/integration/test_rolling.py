"""Three brokers, as in production, that are killed or stopped one after the other.

Partitions get other leaders, groups and transactions other coordinators, and the brokers another
controller. Nothing is lost, doubled, reordered or parked.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import NewTopic
from servers.network import LOOPBACK

from .bank import Bank
from .brokers import Replica, replicas
from .processes import starting
from .test_process import check_the_ledger, send_deposits
from tests.servers.topics import administrator
from tests.servers.waiting import eventually

pytestmark = pytest.mark.full

PARTITIONS = 4
LINES = 75
"""Log lines of a process, of its start and of three restarts."""


@pytest.fixture(scope="module")
def brokers() -> Iterator[Sequence[Replica]]:
    """Return a cluster whose brokers may be stopped."""
    with replicas() as some:
        yield some


@pytest.fixture(scope="module")
def kafka(brokers: Sequence[Replica]) -> str:
    """Bootstrap servers of that cluster, in the place of the broker that all tests share."""
    return ",".join(f"{LOOPBACK}:{one.port}" for one in brokers)


async def _are_in_sync(kafka: str, topics: Sequence[str]) -> bool:
    async with administrator(kafka) as admin:
        found = await admin.describe_topics(topics)
    in_sync = [len(one["isr"]) for topic in found for one in topic["partitions"]]
    return in_sync == [3] * PARTITIONS * len(topics)


@pytest.fixture
async def bank(kafka: str) -> Bank:
    """Return a bank whose topics have replicas on all brokers."""
    name = f"bank-{uuid4().hex[:8]}"
    topics = f"{name}-in", f"{name}-out"
    async with administrator(kafka) as admin:
        await admin.create_topics([NewTopic(topic, PARTITIONS, 3) for topic in topics])
    await eventually(lambda: _are_in_sync(kafka, topics))
    return Bank(*topics, name)


class Traffic:
    """Deposits that are sent all the time."""

    def __init__(self, producer: AIOKafkaProducer, bank: Bank) -> None:
        self.sent = 0
        self._producer, self._bank = producer, bank
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Send deposits until `flowing` ends."""
        while not self._stopping.is_set():
            amounts = range(self.sent + 1, self.sent + 11)
            await send_deposits(self._producer, self._bank, amounts, PARTITIONS)
            self.sent += 10
            await asyncio.sleep(0.05)

    @asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        """Send as long as the block lasts."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.run())
            yield
            self._stopping.set()


@pytest.mark.parametrize(
    ("number", "is_transactional"),
    [(signal.SIGKILL, False), (signal.SIGKILL, True), (signal.SIGTERM, False)],
)
async def test_the_service_goes_on_while_brokers_are_restarted_one_after_the_other(
    brokers: Sequence[Replica],
    bank: Bank,
    database_url: str,
    db: asyncpg.Connection,
    kafka: str,
    producer: AIOKafkaProducer,
    number: signal.Signals,
    is_transactional: bool,
) -> None:
    """Traps 6, 7 and 23."""
    traffic = Traffic(producer, bank)

    async def goes_on() -> None:
        """Wait until deposits that are sent from now on have been applied."""
        enough = traffic.sent + 200

        async def are_applied() -> bool:
            return bool(await db.fetchval("SELECT count(*) >= $1 FROM pipeline.inbox", enough))

        await eventually(are_applied)

    async with starting(
        bank,
        database_url=database_url,
        kafka_bootstrap_servers=kafka,
        kafka_session_timeout=6,
        transaction_timeout=4,
        lock_timeout=2,
        relay_transactional=is_transactional,
        relay_lease=2,
    ) as start:
        processes = [await start("run"), await start("run")]
        async with traffic.flowing():
            for broker in brokers:
                await goes_on()
                await asyncio.to_thread(broker.send, number)
                await asyncio.to_thread(broker.stop)
                begun = time.monotonic()
                await goes_on()
                print(f"gone on {time.monotonic() - begun:.1f} s after the end of a broker")
                await asyncio.to_thread(broker.start)
                await asyncio.to_thread(broker.wait_until_serving)
                await eventually(lambda: _are_in_sync(kafka, [bank.deposits, bank.balances]))
        await check_the_ledger(db, kafka, bank, traffic.sent)
        assert await db.fetchval("SELECT count(*) FROM pipeline.backlog") == 0
        for one in processes:
            await eventually(one.is_ready)
            assert "Traceback" not in one.output
            assert "events wait" not in one.output
            assert len(one.output.splitlines()) <= LINES
