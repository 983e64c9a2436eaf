"""A key with many messages a second: when one is dead, the others are handled directly again."""

import asyncio
from functools import partial
from itertools import count

import asyncpg
from aiokafka import AIOKafkaProducer

from onceward import Policy
from onceward.runtime import Part
from onceward.servers.tasks import in_background

from .bank import Bank
from tests.conftest import Running
from tests.contract.bank import Deposit, histories
from tests.servers.waiting import eventually

POISON = 300
A_SECOND = 500
AT_ONCE = 10
"""Messages that are sent together."""
IN_A_ROW = 200
"""Messages that are handled without one that waits: no more of them are stored."""
WITHIN = 10 * A_SECOND
"""Messages after the poison by which they are handled directly again: half of those between two, if
one of 10,000 is poison."""


async def test_a_hot_key_is_handled_directly_again_when_its_poison_is_dead(
    bank: Bank, running: Running, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    options = {"policy": Policy(attempts=1)}
    bank = Bank(bank.deposits, bank.balances, bank.name, refused={POISON}, options=options)

    def latest() -> int:
        return bank.calls[-1] if bank.calls else 0

    def has_room(n: int) -> bool:
        return n <= latest() + A_SECOND

    async def feed() -> None:
        for n in count(1, AT_ONCE):
            await eventually(partial(has_room, n))  # a slow machine gets no more than it handles
            deposits = (Deposit(one) for one in range(n, n + AT_ONCE))
            await asyncio.gather(*(one.send(producer, bank.deposits) for one in deposits))
            await asyncio.sleep(AT_ONCE / A_SECOND)

    async def is_direct() -> bool:
        begin = len(bank.calls)
        while len(bank.calls) < begin + IN_A_ROW:
            assert latest() < POISON + WITHIN
            if await db.fetchval("SELECT count(*) FROM pipeline.backlog WHERE died_at IS NULL"):
                return False
            await asyncio.sleep(0.005)
        return True

    async with running(bank.service, Part.CONSUME), in_background(feed()):
        dead = "SELECT count(*) FROM pipeline.backlog WHERE died_at IS NOT NULL"
        await eventually(lambda: db.fetchval(dead))
        await eventually(is_direct)
    [amounts] = (await histories(db)).values()
    assert amounts == [n for n in range(1, amounts[-1] + 1) if n != POISON]
