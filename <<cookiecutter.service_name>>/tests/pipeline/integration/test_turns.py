"""Turns of transactions that have deadlocked: one at a time of all processes, and not for ever."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack

import asyncpg
import pytest

from pipeline.apply import turns
from pipeline.apply.item import Item

from .bank import Bank
from .desk import Desk, NewDesk
from tests.contract.bank import Deposit, histories
from tests.servers.waiting import PATIENCE, eventually

WAITS = """
SELECT EXISTS (SELECT FROM pg_locks JOIN pg_database ON oid = database
                WHERE datname = current_database() AND NOT granted AND objid = $1)
"""
DEADLOCK = asyncpg.DeadlockDetectedError("deadlock detected")


@pytest.fixture
async def desks(new_desk: NewDesk) -> Sequence[Desk]:
    """Return two processes of one service, which have deadlocked."""
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    found = [await new_desk(bank.handlers, topic=bank.deposits, partition=n) for n in (0, 1)]
    for desk in found:
        desk.consume.turns.learn(ExceptionGroup("of tasks", [DEADLOCK]), await items(desk))
    return found


async def items(desk: Desk) -> Sequence[Item]:
    """Return a message of the consumer."""
    return (await desk.read(Deposit(1), start=0)).items


async def test_one_transaction_runs_at_a_time_of_all_processes(
    desks: Sequence[Desk], db: asyncpg.Connection
) -> None:
    first, second = desks
    async with first.consume.turns.take(await items(first), PATIENCE):
        applying = asyncio.create_task(second.apply(Deposit(1)))
        await eventually(lambda: db.fetchval(WAITS, turns._LOCK))
        assert not applying.done()
    await applying
    assert await histories(db) == {"ada": [1]}


async def test_a_turn_that_does_not_come_is_not_waited_for_for_ever(desks: Sequence[Desk]) -> None:
    first, second = desks
    async with first.consume.turns.take(await items(first), PATIENCE):
        for one in (first, second):  # in the process, and in another
            async with asyncio.timeout(PATIENCE), one.consume.turns.take(await items(one), 0.1):
                pass


async def test_who_is_cancelled_while_waiting_leaves_the_turn_to_others(
    desks: Sequence[Desk], db: asyncpg.Connection
) -> None:
    first, second = desks
    async with first.consume.turns.take(await items(first), PATIENCE):
        waiting = [asyncio.create_task(second.apply(Deposit(1))) for _ in range(2)]
        await asyncio.sleep(0.2)
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)
    await second.apply(Deposit(1))
    assert await histories(db) == {"ada": [1]}


async def test_a_turn_whose_connection_is_lost_fails_no_transaction(
    desks: Sequence[Desk], db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_TAKE", turns._TAKE.replace("'5s'", "'100ms'"))
    first, second = desks
    async with AsyncExitStack() as held:
        await held.enter_async_context(first.consume.turns.take(await items(first), PATIENCE))
        async with second.consume.turns.take(await items(second), PATIENCE):
            pass  # the server has ended the other's session
    await first.apply(Deposit(1))
    assert await histories(db) == {"ada": [1]}


async def test_a_consumer_that_has_not_deadlocked_waits_for_no_turn(
    new_desk: NewDesk, desks: Sequence[Desk], caplog: pytest.LogCaptureFixture
) -> None:
    other = Bank(deposits="others", balances="balances", name="other")
    desk = await new_desk(other.handlers, topic=other.deposits)
    of_other = await items(desk)
    with caplog.at_level(logging.WARNING):
        assert not desk.consume.turns.are_needed(of_other)
        desk.consume.turns.learn(asyncpg.LockNotAvailableError("timeout"), of_other)
        assert not desk.consume.turns.are_needed(of_other)
        assert not caplog.records
        desk.consume.turns.learn(DEADLOCK, of_other)
        desk.consume.turns.learn(DEADLOCK, of_other)
    (record,) = caplog.records
    assert "deposit deadlock: they take turns for 600 s; declare the rows" in record.getMessage()
