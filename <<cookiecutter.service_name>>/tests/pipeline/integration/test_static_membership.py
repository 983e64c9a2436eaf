"""Static members of the group, which keep their partitions through a restart."""

import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiokafka import AIOKafkaProducer

from .bank import Bank
from .processes import starting
from tests.contract.bank import Deposit
from tests.servers.processes import Process, Start
from tests.servers.topics import following
from tests.servers.waiting import eventually

pytestmark = pytest.mark.full

ASSIGNED = "Setting newly assigned partitions"


@pytest.fixture
async def bank(bank: Bank, new_topic: Callable[..., Awaitable[str]]) -> Bank:
    """Return a bank whose deposits have a partition for each of two processes."""
    bank.deposits = await new_topic(2)
    return bank


@pytest.fixture
async def start(bank: Bank, database_url: str, kafka: str) -> AsyncIterator[Start]:
    async with starting(
        bank,
        database_url=database_url,
        kafka_bootstrap_servers=kafka,
        kafka_session_timeout=60,
        retry_pause=0.2,
        log_loggers="aiokafka.consumer.group_coordinator",
    ) as one:
        yield one


async def both_assigned(first: Process, second: Process) -> None:
    """Wait until each of two processes has one of the partitions."""

    def has_one(process: Process) -> bool:
        lines = [line for line in process.output.splitlines() if ASSIGNED in line]
        return bool(lines) and lines[-1].count("TopicPartition") == 1

    await eventually(lambda: has_one(first) and has_one(second))


@pytest.mark.parametrize("ended", [signal.SIGTERM, signal.SIGKILL])
async def test_a_static_member_that_restarts_keeps_its_partition_and_disturbs_no_other(
    bank: Bank, start: Start, producer: AIOKafkaProducer, kafka: str, ended: signal.Signals
) -> None:
    first, second = [await start("run", kafka_group_instance_id=f"member-{n}") for n in (1, 2)]
    await both_assigned(first, second)
    before = second.output.count(ASSIGNED)
    first.send(ended)
    await first.ended()
    async with following(kafka, bank.balances) as balances:
        for amount in (1, 2):
            await Deposit(amount, partition=amount - 1).send(producer, bank.deposits)
        again = await start("run", kafka_group_instance_id="member-1")
        await balances.until(lambda: len(set(balances.ids)) == 2)
    await eventually(again.is_ready)
    assert again.output.count(ASSIGNED) == 1
    assert second.output.count(ASSIGNED) == before


async def test_two_processes_of_one_id_displace_each_other_and_double_nothing(
    bank: Bank, start: Start, producer: AIOKafkaProducer, kafka: str
) -> None:
    first, second = [await start("run", kafka_group_instance_id="the-same") for _ in range(2)]
    async with following(kafka, bank.balances) as balances:
        amount = 0
        while first.output.count(ASSIGNED) + second.output.count(ASSIGNED) < 4:
            amount += 1
            await Deposit(amount, partition=amount % 2).send(producer, bank.deposits)
            await balances.until(lambda: len(set(balances.ids)) == amount)  # noqa: B023
    assert first.is_running
    assert second.is_running
