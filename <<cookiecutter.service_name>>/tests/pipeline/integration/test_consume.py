"""What the consume transaction does to a message."""

from collections.abc import Callable

import asyncpg
from aiokafka import AIOKafkaProducer

from .bank import Bank, Deposit
from .conftest import Records, Running, eventually


async def balance(db: asyncpg.Connection, account: str = "ada") -> int | None:
    """Return what an account holds."""
    return await db.fetchval("SELECT balance FROM account WHERE id = $1", account)


async def test_a_message_changes_its_row_is_remembered_and_causes_an_event(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    records: Records,
) -> None:
    await Deposit(5).send(producer, bank.deposits)
    await Deposit(7).send(producer, bank.deposits)
    async with running(bank.service):
        events = await records(bank.balances, 2)
    assert await balance(db) == 12
    assert await db.fetchval("SELECT version FROM account") == 2
    assert await db.fetchval("SELECT count(*) FROM pipeline.inbox") == 2
    headers = [dict(event.headers) for event in events]
    assert [one["ce_sequence"] for one in headers] == [b"%020d" % 1, b"%020d" % 2]
    assert [one["ce_source"] for one in headers] == [f"/{bank.name}".encode()] * 2
    assert [event.key for event in events] == [b"ada", b"ada"]
