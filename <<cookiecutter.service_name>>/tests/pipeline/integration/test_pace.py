"""How much a transaction is given when handlers are slow."""

import asyncio

import asyncpg
from aiokafka import AIOKafkaProducer

from pipeline.runtime import Part

from .bank import Bank, Deposit
from .conftest import Running, eventually, histories

SLOW = 0.01
COUNT = 600


async def test_slow_handlers_are_not_called_in_vain_for_batches_that_take_too_long(
    bank: Bank, producer: AIOKafkaProducer, running: Running, db: asyncpg.Connection
) -> None:
    amounts = range(1, COUNT + 1)

    async def dawdle() -> None:
        await asyncio.sleep(SLOW)

    bank.waits = dict.fromkeys(amounts, dawdle)
    await asyncio.gather(*(Deposit(amount).send(producer, bank.deposits) for amount in amounts))
    quick = {"transaction_timeout": 1.0, "lock_timeout": 0.5, "batch_size": 100}
    async with running(bank.service, Part.CONSUME, **quick):
        await eventually(lambda: _has_all(db, list(amounts)))
    # A hundred take more than a second: the first batches are cut off, and done again in halves. So
    # would all the others be if nothing was learnt from them, twice as many calls as messages.
    assert len(bank.calls) < 1.7 * COUNT


async def _has_all(db: asyncpg.Connection, amounts: list[int]) -> bool:
    return (await histories(db)).get("ada") == amounts
