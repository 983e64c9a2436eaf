"""How much a transaction is given when handlers are slow, and how others have their turn."""

import asyncio
from itertools import pairwise

import asyncpg
from aiokafka import AIOKafkaProducer

from pipeline.runtime import Part
from pipeline.tasks import TURN, in_background

from .bank import Bank, Deposit
from .conftest import Running, eventually, histories
from .desk import NewDesk

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


async def test_others_have_their_turn_between_the_messages_of_a_batch(
    bank: Bank, new_desk: NewDesk
) -> None:
    desk = await new_desk(bank.handlers, topic=bank.deposits)
    calls = [0]

    async def look() -> None:
        while True:
            calls.append(len(bank.calls))
            await asyncio.sleep(0)

    async with in_background(look()):
        await desk.apply(*(Deposit(number) for number in range(1, 5 * TURN + 1)))
    assert calls[-1] == 5 * TURN
    assert max(after - before for before, after in pairwise(calls)) <= TURN
