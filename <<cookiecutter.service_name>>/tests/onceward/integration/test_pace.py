"""How much a transaction is given when handlers are slow, and how others have their turn."""

import asyncio
import gc
from itertools import pairwise
from time import perf_counter
from typing import ClassVar

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from onceward.runtime import Part, _collect_seldom
from onceward.servers.tasks import SLICE_SECONDS, in_background

from .applier import NewApplier
from .bank import Bank
from tests.conftest import Running
from tests.contract.bank import Deposit, histories
from tests.servers.waiting import eventually

pytestmark = pytest.mark.full

SLOW = 0.01
COUNT = 600


async def test_batches_of_slow_handlers_are_made_smaller_to_avoid_wasted_calls(
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


class Knot:
    """What refers to itself, like two ORM objects to each other."""

    alive: ClassVar[int] = 0

    def __init__(self) -> None:
        Knot.alive += 1
        self._strings = [[self] for _ in range(40)]

    def __del__(self) -> None:
        Knot.alive -= 1


async def test_cycles_that_handlers_leave_are_collected_after_so_many_objects(
    bank: Bank, new_applier: NewApplier
) -> None:
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    amounts, alive = range(1, 1_001), list[int]()

    async def knot() -> None:
        Knot()
        alive.append(Knot.alive)

    bank.waits = dict.fromkeys(amounts, knot)
    before = gc.get_threshold()
    gc.collect()
    try:
        _collect_seldom(4_000)
        await applier.apply(*(Deposit(amount) for amount in amounts))
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
    assert max(alive) < 300
    gc.collect()
    assert Knot.alive == 0


async def test_others_have_their_turn_between_the_messages_of_a_batch(
    bank: Bank, new_applier: NewApplier
) -> None:
    """Also of a few, if they take long."""
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    amounts, calls = range(1, 21), [0]

    async def burn() -> None:
        until = perf_counter() + SLICE_SECONDS
        while perf_counter() < until:
            pass

    bank.waits = dict.fromkeys(amounts, burn)

    async def look() -> None:
        while True:
            calls.append(len(bank.calls))
            await asyncio.sleep(0)

    async with in_background(look()):
        await applier.apply(*(Deposit(amount) for amount in amounts))
    assert calls[-1] == len(amounts)
    assert max(after - before for before, after in pairwise(calls)) == 1
