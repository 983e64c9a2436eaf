"""Copies of a database beside production: no call is made before it is decided whose they are."""

import signal
from pathlib import Path

import asyncpg
from aiokafka import AIOKafkaProducer

from tests.contract.bank import Deposit
from tests.pipeline.integration.bank import Bank
from tests.pipeline.integration.processes import variables_of
from tests.servers.processes import starting
from tests.servers.waiting import eventually

CALLS = "SELECT count(*) FROM pipeline.backlog WHERE consumer IN ('tell', 'pay')"


async def test_a_copy_and_a_second_database_of_the_group_call_nobody(
    bank: Bank,
    database_url: str,
    kafka: str,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    tmp_path: Path,
) -> None:
    outside = tmp_path / "outside"
    outside.touch()
    variables = variables_of(bank) | {"BANK_OUTSIDE": str(outside), "BANK_DIES": ""}

    async def has_calls() -> bool:
        return bool(await db.fetchval(CALLS) == 10)

    async def has_none() -> bool:
        return not await db.fetchval(CALLS)

    here = await db.fetchval("SELECT system_identifier FROM pipeline.outbox_cluster")
    await db.execute("UPDATE pipeline.outbox_cluster SET system_identifier = 1")
    async with starting(
        "tests.effects.app",
        lambda: variables,
        database_url=database_url,
        kafka_bootstrap_servers=kafka,
    ) as start:
        copy = await start("consume")
        for amount in range(5):
            await Deposit(amount, f"account-{amount}").send(producer, bank.deposits)
        await eventually(has_calls)

        async def says_why() -> bool:
            return "no call is made" in (await copy.reasons()).get("calls", "")

        await eventually(says_why)
        copy.send(signal.SIGTERM)
        assert await copy.ended() == 0
        assert outside.read_text() == ""

        await db.execute("UPDATE pipeline.outbox_cluster SET system_identifier = $1", here)
        mine = await db.fetchval("SELECT database_id FROM pipeline.inbox_generation")
        await db.execute("UPDATE pipeline.inbox_generation SET database_id = gen_random_uuid()")
        second = await start("consume")
        assert await second.ended() == 1
        assert "reads its topics for another database" in second.output
        assert outside.read_text() == ""

        await db.execute("UPDATE pipeline.inbox_generation SET database_id = $1", mine)
        await start("consume")
        await eventually(has_none)
    assert len(outside.read_text().splitlines()) == 10
