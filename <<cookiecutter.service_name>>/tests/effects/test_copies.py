"""Copies of a database: nothing leaves them before an operator has decided whose they are."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from tests.contract.bank import Deposit
from tests.pipeline.integration.bank import Bank
from tests.pipeline.integration.processes import variables_of
from tests.servers.processes import Start, starting
from tests.servers.topics import following
from tests.servers.waiting import eventually

CALLS = "SELECT count(*) FROM pipeline.backlog WHERE consumer IN ('tell', 'pay')"
HOLD = "SELECT FROM pipeline.backlog_lane WHERE lane >= 64 FOR UPDATE"


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
        "tests.effects.app",
        lambda: variables,
        database_url=database_url,
        kafka_bootstrap_servers=kafka,
    ) as start:
        yield start


async def leave_work(
    start: Start, bank: Bank, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    """Leave five events to be published, and ten calls to be made."""

    async def has_calls() -> bool:
        return bool(await db.fetchval(CALLS) == 10)

    async with db.transaction():
        await db.execute(HOLD)
        origin = await start("consume")
        for amount in range(5):
            await Deposit(amount, f"account-{amount}").send(producer, bank.deposits)
        await eventually(has_calls)
        origin.send(signal.SIGTERM)
        assert await origin.ended() == 0


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

    async def has_no_calls() -> bool:
        return not await db.fetchval(CALLS)

    async with following(kafka, bank.balances) as tail:
        copy = await start("run")
        await Deposit(5, "account-5").send(producer, bank.deposits)

        async def says_why() -> bool:
            return any("service adopt" in one for one in (await copy.reasons()).values())

        await eventually(says_why)
        assert await db.fetchval(handled) == 5
        assert await db.fetchval(CALLS) == 10
        assert (outside.calls, tail.ids) == ([], [])
        adopted = await start("adopt", "--yes")
        assert await adopted.ended() == 0, adopted.output
        await eventually(has_handled_all)
        await eventually(has_no_calls)
        await eventually(lambda: len(tail.ids) == 6)
    assert len(outside.calls) == 12


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
