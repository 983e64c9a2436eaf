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
from aiokafka.errors import KafkaError
from servers.network import LOOPBACK

from .bank import Bank
from .brokers import Replica, replicas
from .conftest import position_of, position_reaches
from .processes import starting
from .test_lost_tail import PATIENT
from .test_process import check_the_ledger, send_deposits
from tests.contract.bank import Deposit, histories
from tests.servers.topics import administrator
from tests.servers.waiting import eventually

pytestmark = pytest.mark.full

PARTITIONS = 4
LINES = 25
"""Log lines of a process in a minute, and of its start: what is repeated is told once a minute."""


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
        started = time.monotonic()
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
            minutes = (time.monotonic() - started) / 60
            assert "Traceback" not in one.output
            assert "events wait" not in one.output
            assert len(one.output.splitlines()) <= LINES * (1 + minutes)


async def test_records_that_an_unclean_election_has_lost_are_an_incident(
    brokers: Sequence[Replica], database_url: str, db: asyncpg.Connection, kafka: str
) -> None:
    """The process is paused meanwhile, as its virtual machine may be, and asks another leader."""
    first, second, _ = brokers
    name = f"bank-{uuid4().hex[:8]}"
    bank = Bank(f"{name}-in", f"{name}-out", name)
    part = f"partition {bank.deposits}/0"
    lossy = {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"}
    topic = NewTopic(bank.deposits, -1, -1, {0: [first.id, second.id]}, lossy)
    async with administrator(kafka) as admin:
        await admin.create_topics([topic])

    async def are_in_sync(leader: int, *others: int) -> bool:
        try:
            async with administrator(kafka) as admin:
                (found,) = await admin.describe_topics([bank.deposits])
        except KafkaError:  # it has asked a broker that is stopped
            return False
        return [(one["leader"], {*one["isr"]}) for one in found["partitions"]] == [
            (leader, {leader, *others})
        ]

    async def send(amounts: range) -> None:
        async with AIOKafkaProducer(bootstrap_servers=kafka, acks="all") as one:
            for amount in amounts:
                await Deposit(amount).send(one, bank.deposits)

    def restart(one: Replica) -> None:
        if not one.runs():
            one.start()
        one.wait_until_serving()

    async with starting(
        bank, database_url=database_url, kafka_bootstrap_servers=kafka, hang_timeout=600, **PATIENT
    ) as start:
        try:
            await eventually(lambda: are_in_sync(first.id, second.id))
            await send(range(1, 6))
            process = await start("consume")
            await eventually(position_reaches(db, bank.deposits, 5))
            await asyncio.to_thread(second.stop)
            await eventually(lambda: are_in_sync(first.id))
            await send(range(6, 11))
            await eventually(position_reaches(db, bank.deposits, 10))
            process.send(signal.SIGSTOP)
            first.send(signal.SIGKILL)
            await asyncio.to_thread(first.stop)
            await asyncio.to_thread(restart, second)
            await eventually(lambda: are_in_sync(second.id))
            await send(range(21, 36))
            process.send(signal.SIGCONT)

            async def is_decided() -> bool:
                is_blocked = "service topics seek" in (await process.reasons()).get(part, "")
                return is_blocked or (await position_of(db, bank.deposits) or 0) > 10

            await eventually(is_decided)
            assert "its end lost" in (await process.reasons())[part]
            assert await position_of(db, bank.deposits) == 10
            assert await histories(db) == {"ada": [*range(1, 11)]}
        finally:
            for one in (first, second):
                await asyncio.to_thread(restart, one)
