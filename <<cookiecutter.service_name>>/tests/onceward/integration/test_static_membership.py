"""Static members of the group: they keep their partitions through a restart, and are fenced."""

import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import NewPartitions

from .bank import Bank
from .conftest import position_of, position_reaches
from .processes import starting
from .test_inbox import somebody_waits
from .test_membership import has_applied
from tests.contract.bank import Deposit
from tests.servers.processes import Process, Start
from tests.servers.topics import administrator
from tests.servers.waiting import eventually

LONG = 60
"""Session time-out in seconds: a restart takes less, however busy the machine is."""
PARTITIONS = 4


@pytest.fixture
async def bank(bank: Bank, new_topic: Callable[..., Awaitable[str]]) -> Bank:
    """Return a bank whose deposits have partitions for several members."""
    bank.deposits = await new_topic(PARTITIONS)
    return bank


@pytest.fixture
async def start(bank: Bank, database_url: str, kafka: str) -> AsyncIterator[Start]:
    """Start processes of the bank, which log what they are assigned."""
    async with starting(
        bank,
        database_url=database_url,
        kafka_bootstrap_servers=kafka,
        kafka_session_timeout=6,
        transaction_timeout=5,
        retry_pause=0.2,
        log_loggers="aiokafka.consumer.group_coordinator",
    ) as one:
        # A message is logged once a minute otherwise, and an assignment is missed.
        yield partial(one, more_variables={"BANK_REPEATS": "0"})


def assignments(process: Process) -> list[set[int]]:
    """Return the partitions that the process was assigned, each time."""
    return [
        set(map(int, re.findall(r"partition=(\d+)", line)))
        for line in process.output.splitlines()
        if "Setting newly assigned partitions" in line
    ]


def latest(process: Process) -> set[int]:
    """Return the partitions that the process was assigned last."""
    return set().union(*assignments(process)[-1:])


async def leader_and_follower(start: Start) -> tuple[Process, Process]:
    """Start two members, of which the first leads the group, and wait for their partitions."""
    leader = await start("run", kafka_group_instance_id="member-1", kafka_session_timeout=LONG)
    await eventually(lambda: latest(leader) == {0, 1, 2, 3})
    follower = await start("run", kafka_group_instance_id="member-2", kafka_session_timeout=LONG)
    await eventually(lambda: (latest(leader), latest(follower)) == ({0, 2}, {1, 3}))
    return leader, follower


async def all_are_read(
    db: asyncpg.Connection, producer: AIOKafkaProducer, topic: str, partitions: int
) -> None:
    """Send a deposit to each partition, and wait until all are applied."""

    async def are_known() -> bool:
        await producer.client.force_metadata_update()
        return len(await producer.partitions_for(topic)) == partitions

    await eventually(are_known)
    for partition in range(partitions):
        one = Deposit(partition + 1, f"account {partition}", partition=partition)
        await one.send(producer, topic)
    for partition in range(partitions):
        await eventually(position_reaches(db, topic, 1, partition))


@pytest.mark.parametrize("ended", [signal.SIGTERM, signal.SIGKILL])
async def test_a_static_member_that_restarts_keeps_its_partitions_and_disturbs_no_other(
    start: Start,
    bank: Bank,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    ended: signal.Signals,
) -> None:
    leader, follower = await leader_and_follower(start)
    before = len(assignments(leader))
    follower.send(ended)
    await follower.ended()
    again = await start("run", kafka_group_instance_id="member-2", kafka_session_timeout=LONG)
    await all_are_read(db, producer, bank.deposits, PARTITIONS)
    assert assignments(again) == [{1, 3}]
    assert len(assignments(leader)) == before


async def test_a_restarted_leader_keeps_its_partitions_and_assigns_added_ones(
    start: Start, bank: Bank, producer: AIOKafkaProducer, db: asyncpg.Connection, kafka: str
) -> None:
    leader, follower = await leader_and_follower(start)
    await leader.kill()
    async with administrator(kafka) as admin:
        await admin.create_partitions({bank.deposits: NewPartitions(PARTITIONS + 2)})
    again = await start("run", kafka_group_instance_id="member-1", kafka_session_timeout=LONG)
    await eventually(lambda: (latest(again), latest(follower)) == ({0, 2, 4}, {1, 3, 5}))
    async with administrator(kafka) as admin:
        await admin.create_partitions({bank.deposits: NewPartitions(PARTITIONS + 4)})
    await eventually(lambda: (latest(again), latest(follower)) == ({0, 2, 4, 6}, {1, 3, 5, 7}))
    await all_are_read(db, producer, bank.deposits, PARTITIONS + 4)


@pytest.mark.parametrize("stopped", [0, 1], ids=["leader", "follower"])
async def test_a_member_that_was_stopped_for_longer_than_its_session_reads_again(
    start: Start, bank: Bank, producer: AIOKafkaProducer, db: asyncpg.Connection, stopped: int
) -> None:
    members = []
    for number in (1, 2):
        members.append(await start("run", kafka_group_instance_id=f"member-{number}"))
        await eventually(members[-1].is_ready)
    await eventually(lambda: sorted(map(sorted, map(latest, members))) == [[0, 2], [1, 3]])
    members[stopped].send(signal.SIGSTOP)
    await eventually(lambda: latest(members[1 - stopped]) == {0, 1, 2, 3})
    members[stopped].send(signal.SIGCONT)
    await eventually(lambda: sorted(map(sorted, map(latest, members))) == [[0, 2], [1, 3]])
    await all_are_read(db, producer, bank.deposits, PARTITIONS)


async def test_with_one_instance_id_the_later_process_serves_until_it_ends(
    start: Start, bank: Bank, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    first = await start("run", kafka_group_instance_id="the-same")
    await eventually(first.is_ready)
    later = await start("run", kafka_group_instance_id="the-same")

    async def is_fenced() -> bool:
        return "FencedInstanceIdError" in (await first.reasons()).get("consumer", "")

    await eventually(is_fenced)
    assert "PIPELINE_KAFKA_GROUP_INSTANCE_ID" in (await first.reasons())["consumer"]
    assert (await first.get("/health/live"))[0] == 200
    await eventually(later.is_ready)
    await all_are_read(db, producer, bank.deposits, PARTITIONS)
    assert assignments(later) == [{0, 1, 2, 3}]
    assert len(assignments(first)) == 1
    await later.kill()
    await eventually(first.is_ready)
    await Deposit(9, partition=3).send(producer, bank.deposits)
    await eventually(position_reaches(db, bank.deposits, 2, 3))


async def test_a_process_whose_id_was_taken_in_its_transaction_doubles_nothing(
    start: Start,
    bank: Bank,
    producer: AIOKafkaProducer,
    connect: Callable[[], Awaitable[asyncpg.Connection]],
    db: asyncpg.Connection,
) -> None:
    """Trap 12: for a while two processes have the partition."""
    first = await start("run", kafka_group_instance_id="the-same")
    await Deposit(1).send(producer, bank.deposits)
    await eventually(position_reaches(db, bank.deposits, 1))
    locking = await connect()
    async with locking.transaction():
        await locking.execute("SELECT FROM account FOR UPDATE")
        await Deposit(2).send(producer, bank.deposits)
        await somebody_waits(db)
        later = await start("run", kafka_group_instance_id="the-same")
        await eventually(lambda: latest(later) == {0, 1, 2, 3})
    await eventually(lambda: has_applied(db, 1, 2))
    await eventually(later.is_ready)
    assert await position_of(db, bank.deposits) == 2
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox") == 2
    assert first.is_running
