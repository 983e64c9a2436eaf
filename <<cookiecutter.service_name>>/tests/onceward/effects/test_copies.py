"""Copies of a database: nothing leaves them before an operator has decided whose they are."""

import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from tests.contract.bank import Deposit
from tests.onceward.integration.bank import Bank
from tests.onceward.integration.processes import variables_of
from tests.onceward.integration.test_stamps import delete_group
from tests.servers.processes import Process, Start, starting
from tests.servers.topics import following
from tests.servers.waiting import eventually

INCIDENTS = Path(__file__).parents[3] / "docs" / "incidents.md"
CALLS = "SELECT count(*) FROM pipeline.backlog WHERE consumer IN ('tell', 'pay')"
HOLD = "SELECT FROM pipeline.backlog_lane WHERE lane >= 64 FOR UPDATE"
SCHEDULE = """
INSERT INTO pipeline.scheduled (name, due_at, topic, key, payload, event_id, source, type,
                                content_type)
VALUES ('due', now() - interval '1 minute', $1, 'ada', '{}', 'due', '/bank', 'reminder',
        'application/json')
"""


class Outside:
    """A file of the calls that were made."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.touch()

    @property
    def calls(self) -> list[str]:
        """A line for each call."""
        return self.file.read_text().splitlines()


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    """What the calls are made to."""
    return Outside(tmp_path / "outside")


@pytest.fixture
async def start(
    bank: Bank, database_url: str, kafka: str, outside: Outside
) -> AsyncIterator[Start]:
    """Start processes of the bank that calls the outside."""
    variables = variables_of(bank) | {"BANK_OUTSIDE": str(outside.file), "BANK_DIES": ""}
    async with starting(
        "tests.onceward.effects.app",
        lambda: variables,
        database_url=database_url,
        kafka_bootstrap_servers=kafka,
    ) as start:
        yield start


def calls_are(db: asyncpg.Connection, number: int) -> Callable[[], Awaitable[bool]]:
    """Return the question whether so many calls wait, for `eventually`."""

    async def are_there() -> bool:
        return bool(await db.fetchval(CALLS) == number)

    return are_there


def says_why(process: Process) -> Callable[[], Awaitable[bool]]:
    """Return the question whether a process waits for `service adopt`, for `eventually`."""

    async def is_told() -> bool:
        return any("service adopt" in one for one in (await process.reasons()).values())

    return is_told


async def leave_work(
    start: Start, bank: Bank, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    """Leave five events to be published, one that is due, and ten calls to be made."""
    async with db.transaction():
        await db.execute(HOLD)
        origin = await start("consume")
        for amount in range(5):
            await Deposit(amount, f"account-{amount}").send(producer, bank.deposits)
        await eventually(calls_are(db, 10))
        origin.send(signal.SIGTERM)
        assert await origin.ended() == 0
    await db.execute(SCHEDULE, bank.balances)


@pytest.mark.parametrize(
    "another", ["system_identifier = 1", "database_oid = 1", "kafka_cluster = 'another'"]
)
async def test_nothing_leaves_a_copy_before_it_is_adopted(
    start: Start,
    bank: Bank,
    kafka: str,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    outside: Outside,
    another: str,
) -> None:
    await leave_work(start, bank, producer, db)
    await db.execute(f"UPDATE pipeline.outbox_cluster SET {another}")
    handled = "SELECT count(*) FROM pipeline.inbox WHERE consumer = 'have told'"

    async def has_handled_all() -> bool:
        return bool(await db.fetchval(handled) == 6)

    async with following(kafka, bank.balances) as tail:
        copy = await start("run")
        await Deposit(5, "account-5").send(producer, bank.deposits)
        await eventually(says_why(copy))
        assert await db.fetchval(handled) == 5
        assert await db.fetchval(CALLS) == 10
        assert await db.fetchval("SELECT count(*) FROM pipeline.scheduled") == 1
        assert (outside.calls, tail.ids) == ([], [])
        adopted = await start("adopt", "--yes")
        assert await adopted.ended() == 0, adopted.output
        await eventually(has_handled_all)
        await eventually(calls_are(db, 0))
        await eventually(lambda: len(tail.ids) == 7)
    assert len(outside.calls) == 12


async def test_nothing_leaves_a_database_whose_data_is_replaced_under_a_process(
    start: Start,
    bank: Bank,
    kafka: str,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    connect: Callable[[], Awaitable[asyncpg.Connection]],
    outside: Outside,
) -> None:
    """As where production's dump is loaded into staging's tables, and connections stay open."""
    other = await connect()
    async with following(kafka, bank.balances) as tail:
        relay = await start("relay", relay_lease=2)
        consume = await start("consume", retention_interval=2, backlog_poll_max=0.1)
        await eventually(relay.is_ready)
        await eventually(consume.is_ready)
        async with other.transaction():
            await other.execute(HOLD)
            await Deposit(5).send(producer, bank.deposits)
            await eventually(calls_are(db, 2))
            await eventually(lambda: len(tail.ids) == 1)
            await db.execute("UPDATE pipeline.outbox_cluster SET system_identifier = 1")
        # The workers look for calls many times before the next round of retention is due.
        await eventually(says_why(consume))
        await eventually(says_why(relay))
        await db.execute(SCHEDULE, bank.balances)
        assert (len(outside.calls), len(tail.ids)) == (0, 1)
        adopted = await start("adopt", "--yes", "--keep-progress")
        assert await adopted.ended() == 0, adopted.output
        await eventually(calls_are(db, 0))
        await tail.until_ids(["due"])
        await eventually(consume.is_ready)
    assert len(outside.calls) == 2


async def test_a_second_database_of_a_group_calls_nobody_before_it_is_refused(
    start: Start, bank: Bank, producer: AIOKafkaProducer, db: asyncpg.Connection, outside: Outside
) -> None:
    await leave_work(start, bank, producer, db)
    await db.execute("UPDATE pipeline.inbox_generation SET database_id = gen_random_uuid()")
    for part in ("run", "relay"):
        second = await start(part)
        assert await second.ended() == 1
        assert "reads its topics for another database" in second.output
    assert outside.calls == []


async def test_a_copy_for_staging_begins_without_work_and_refuses_the_originals_brokers(
    start: Start,
    bank: Bank,
    kafka: str,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    outside: Outside,
) -> None:
    await leave_work(start, bank, producer, db)
    await db.execute("UPDATE pipeline.outbox_cluster SET system_identifier = 1")
    _, _, section = INCIDENTS.read_text("utf-8").partition("### A copy of the database\n")
    (statements,) = re.findall(r"```sql\n(.*?)```", section.partition("\n### ")[0], re.DOTALL)
    await db.execute(statements)
    adopted = await start("adopt", "--yes")
    assert await adopted.ended() == 0, adopted.output
    refused = await start("run")
    assert await refused.ended() == 1
    assert "reads its topics for another database" in refused.output

    async def is_forgotten() -> bool:  # as at other brokers, where the group has read nothing
        return await delete_group(kafka, bank.name) == 0

    await eventually(is_forgotten)
    async with following(kafka, bank.balances) as tail:
        staging = await start("run")
        await eventually(staging.is_ready)
        await Deposit(5, "account-5").send(producer, bank.deposits)
        await eventually(lambda: len(outside.calls) == 2)
        await eventually(lambda: len(tail.ids) >= 1)
        await eventually(calls_are(db, 0))
        assert len(tail.ids) == 1
    assert len(outside.calls) == 2
