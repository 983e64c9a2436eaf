"""A process is killed in a call: no call is lost, and none is repeated that must not be."""

import signal
from pathlib import Path

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from tests.contract.bank import Deposit
from tests.onceward.integration.bank import Bank
from tests.onceward.integration.processes import variables_of
from tests.onceward.integration.test_killers import STOPPABLE
from tests.servers.processes import starting
from tests.servers.waiting import eventually

SETTINGS = {
    "kafka_session_timeout": 6,
    "transaction_timeout": 3,
    "lock_timeout": 2,
    "backlog_lease": 3.5,
    "retry_pause": 0.2,
}
UNDECIDED = "SELECT count(*) FROM pipeline.backlog WHERE died_at IS NULL"
OVER = """
SELECT (SELECT count(*) FROM pipeline.inbox WHERE consumer IN ('tell', 'pay'))
       + (SELECT count(*) FROM pipeline.backlog WHERE died_at IS NOT NULL)
"""


@pytest.mark.parametrize(
    ("consumer", "moment"),
    [
        ("tell", "after"),
        ("pay", "before"),
        pytest.param("tell", "before", marks=pytest.mark.full),
        pytest.param("pay", "after", marks=pytest.mark.full),
    ],
)
async def test_killed_in_a_call(
    consumer: str,
    moment: str,
    bank: Bank,
    database_url: str,
    kafka: str,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    tmp_path: Path,
) -> None:
    outside = tmp_path / "outside"
    outside.touch()
    variables = variables_of(bank) | {
        "BANK_OUTSIDE": str(outside),
        "BANK_DIES": f"{consumer} {moment}",
    }

    async def is_settled() -> bool:
        calls = await db.fetchval("SELECT count(*) FROM pipeline.inbox WHERE consumer = 'tell'")
        return calls == 3 and not await db.fetchval(UNDECIDED)

    async with starting(
        "tests.onceward.effects.app",
        lambda: variables,
        database_url=database_url,
        kafka_bootstrap_servers=kafka,
        **SETTINGS,
    ) as start:
        process = await start("consume")
        for amount in range(3):
            await Deposit(amount).send(producer, bank.deposits)
        assert await process.ended() == -signal.SIGKILL
        variables["BANK_DIES"] = ""
        await start("consume")
        await eventually(is_settled)

    lines = outside.read_text().splitlines()
    told, paid = (
        [line.split()[1] for line in lines if line.startswith(one)] for one in ("tell", "pay")
    )
    rows = await db.fetch("SELECT id, reason FROM pipeline.backlog")
    assert {row["reason"] for row in rows} <= {"outcome unknown"}
    unknown = [row["id"] for row in rows]
    assert len(set(told)) == 3
    assert len(paid) == len(set(paid)), "never blindly again"
    assert len(unknown) <= 1, "at most that of the process that died"
    assert len({*paid, *unknown}) == 3


@pytest.mark.full
async def test_stopped_in_a_call_that_is_not_taken_for_the_calls_fault(
    bank: Bank,
    database_url: str,
    kafka: str,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    tmp_path: Path,
) -> None:
    outside = tmp_path / "outside"
    variables = {"BANK_OUTSIDE": str(outside), "BANK_DIES": "pay stops"}
    async with starting(
        "tests.onceward.effects.app",
        lambda: variables_of(bank) | variables,
        database_url=database_url,
        kafka_bootstrap_servers=kafka,
        **STOPPABLE,
    ) as start:
        process = await start("consume")
        await Deposit(1).send(producer, bank.deposits)
        await process.stops_for(12)
        await eventually(lambda: db.fetchval(f"SELECT ({OVER}) = 2"))
    assert await db.fetch("SELECT FROM pipeline.backlog") == []
    assert sorted(line.split()[0] for line in outside.read_text().splitlines()) == ["pay", "tell"]
