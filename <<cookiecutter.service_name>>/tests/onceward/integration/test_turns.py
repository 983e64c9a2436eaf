"""Turns of transactions that have deadlocked: one at a time of all processes, and not for ever."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import asyncpg
import pytest
import sqlalchemy as sa

from onceward import Event, Handlers, Transaction
from onceward.apply import turns
from onceward.consume.partition_source import PartitionBatch, PartitionSource

from .applier import Applier, NewApplier
from .bank import Bank
from tests.contract.bank import Account, Deposit, Deposited, histories
from tests.servers.waiting import PATIENCE, eventually

WAITS = """
SELECT EXISTS (SELECT FROM pg_locks JOIN pg_database ON oid = database
                WHERE datname = current_database() AND NOT granted AND objid = $1)
"""
DEADLOCK = asyncpg.DeadlockDetectedError("deadlock detected")


Meet = Callable[[], Awaitable[None]]
"""Waits until the handlers of both partitions have their first row."""


class Transferred(Event, type="transferred"):
    """Money went from one account to another."""

    account: str
    other: str


@pytest.fixture
async def appliers(new_applier: NewApplier) -> Sequence[Applier]:
    """Return two processes of one service, which have deadlocked."""
    return await deadlocked(new_applier)


async def deadlocked(new_applier: NewApplier, **limits: float) -> Sequence[Applier]:
    """Return two processes of one service, which have deadlocked."""
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    found = [
        await new_applier(bank.handlers, topic=bank.deposits, partition=n, **limits) for n in (0, 1)
    ]
    for applier in found:
        error = ExceptionGroup("of tasks", [DEADLOCK])
        applier.consume.turns.learn(error, await source_of(applier), ())
    return found


@dataclass(frozen=True)
class Waiting(PartitionSource):
    """A partition that waits for so long."""

    patience: float = PATIENCE


async def source_of(applier: Applier, patience: float = PATIENCE) -> Waiting:
    """Return a message of the consumer."""
    batch = PartitionBatch(applier.slot, await applier.read(Deposit(1), start=0))
    return Waiting([batch], patience=patience)


async def turn_of(
    applier: Applier, patience: float = PATIENCE
) -> AbstractAsyncContextManager[None]:
    """Return a turn of the process."""
    return applier.consume.turns.take(await source_of(applier, patience), ())


async def test_one_transaction_runs_at_a_time_of_all_processes(
    appliers: Sequence[Applier], db: asyncpg.Connection
) -> None:
    first, second = appliers
    async with await turn_of(first):
        applying = asyncio.create_task(second.apply(Deposit(1)))
        await eventually(lambda: db.fetchval(WAITS, turns._LOCK))
        assert not applying.done()
    await applying
    assert await histories(db) == {"ada": [1]}


async def test_a_turn_that_does_not_come_is_not_waited_for_for_ever(
    appliers: Sequence[Applier],
) -> None:
    first, second = appliers
    async with await turn_of(first):
        for one in (first, second):  # in the process, and in another
            async with asyncio.timeout(PATIENCE), await turn_of(one, 0.1):
                pass


async def test_who_is_cancelled_while_waiting_leaves_the_turn_to_others(
    appliers: Sequence[Applier], db: asyncpg.Connection
) -> None:
    first, second = appliers
    async with await turn_of(first):
        waiting = [asyncio.create_task(second.apply(Deposit(1))) for _ in range(2)]
        await asyncio.sleep(0.2)
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)
    await second.apply(Deposit(1))
    assert await histories(db) == {"ada": [1]}


async def test_a_turn_whose_connection_is_lost_fails_no_transaction(
    appliers: Sequence[Applier], db: asyncpg.Connection
) -> None:
    first, second = appliers
    first.consume.turns._longest = "100ms"
    async with await turn_of(first), await turn_of(second):
        pass  # the server has ended the first one's session
    await first.apply(Deposit(1))
    assert await histories(db) == {"ada": [1]}


async def test_a_lock_of_python_around_a_load_costs_time_and_is_named(
    new_applier: NewApplier, db: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """One holds the lock and waits for a row; whoever has the row waits for the lock."""
    handlers, lock = Handlers(), asyncio.Lock()

    @handlers.on(Deposited, topic="deposits", consumer="guarded")
    async def guarded(event: Deposited, tx: Transaction) -> None:
        async with lock:
            account = await tx.load_or_create(Account, "ada")
        account.balance += 1
        account.history += f"{event.amount},"

    appliers = [
        await new_applier(handlers, topic="deposits", partition=n, lock_timeout=0.2)
        for n in range(4)
    ]
    numbers = [range(10 * n, 10 * n + 10) for n in range(4)]
    async with asyncio.TaskGroup() as group:
        for applier, its in zip(appliers, numbers, strict=True):
            group.create_task(applier.apply(*(Deposit(n, account=f"{n}") for n in its)))
    for applier in appliers:
        await applier.make_due()
        await applier.work_off()
    assert await appliers[0].backlog() == []
    [amounts] = (await histories(db)).values()
    assert sorted(amounts) == [*range(40)]
    assert "waits itself for a lock of Python, such as asyncio.Lock" in caplog.text


async def test_a_transaction_may_take_its_whole_time_in_its_turn(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """Its turn has begun before it, as it waits for a slot, too."""
    limit = 5
    first, second = await deadlocked(new_applier, transaction_timeout=limit, lock_timeout=1)
    async with await turn_of(first):
        applying = asyncio.create_task(second.apply(Deposit(1)))
        await asyncio.sleep(limit + 1)
        assert not applying.done()
    await applying
    assert await histories(db) == {"ada": [1]}


async def test_a_consumer_that_has_not_deadlocked_waits_for_no_turn(
    new_applier: NewApplier, appliers: Sequence[Applier], caplog: pytest.LogCaptureFixture
) -> None:
    other = Bank(deposits="others", balances="balances", name="other")
    applier = await new_applier(other.handlers, topic=other.deposits)
    source = await source_of(applier)
    with caplog.at_level(logging.WARNING):
        assert not applier.consume.turns.are_needed(source.items)
        applier.consume.turns.learn(asyncpg.LockNotAvailableError("timeout"), source, ())
        assert not applier.consume.turns.are_needed(source.items)
        (record,) = caplog.records
        assert "a handler that waits itself for a lock of Python" in record.getMessage()
        caplog.clear()
        locked = [(Account, ("ada",)), (Account, ("bob",))]
        applier.consume.turns.learn(DEADLOCK, source, (), places=locked)
        applier.consume.turns.learn(DEADLOCK, source, ())
    (record,) = caplog.records
    text = record.getMessage()
    assert "deposit take turns for 600 s, which costs their keys time and no order" in text
    assert "deadlock of deposit: deposited '1' of key 'ada'" in text
    assert "not declared: Account ('bob',); declare them by loads=, by fields of" in text


async def move_by_load(event: Transferred, tx: Transaction, meet: Meet) -> None:
    mine = await tx.load(Account, event.account)
    await meet()
    theirs = await tx.load(Account, event.other)
    assert mine is not None
    assert theirs is not None
    mine.balance -= 1
    theirs.balance += 1


async def move_by_sql(event: Transferred, tx: Transaction, meet: Meet) -> None:
    session = tx.session  # the handler is called again, with a session of its own
    await meet()
    change = sa.text("UPDATE account SET balance = balance + :cents WHERE id = :id")
    await session.execute(change, {"cents": -1, "id": event.account})
    await session.execute(change, {"cents": 1, "id": event.other})


@pytest.mark.parametrize(
    ("move", "advice"),
    [
        pytest.param(
            move_by_load,
            "not declared: Account ('{other}',); let move declare for transferred:"
            " loads=[Account.by('account'), Account.by('other')]",
            id="loaded",
        ),
        pytest.param(
            move_by_sql,
            "declare by loads= also the rows that SQL of the handlers changes",
            id="changed by SQL",
        ),
    ],
)
async def test_a_deadlock_is_named_with_its_key_its_table_and_what_to_declare(
    new_applier: NewApplier,
    db: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
    move: Callable[[Transferred, Transaction, Meet], Awaitable[None]],
    advice: str,
) -> None:
    handlers, inside = Handlers(), set[int | None]()

    @handlers.on(Transferred, topic="moves", consumer="move", loads=Account.by("account"))
    async def transfer(event: Transferred, tx: Transaction) -> None:
        async def meet() -> None:
            inside.add(tx.message.partition)
            await eventually(lambda: len(inside) == 2)

        await move(event, tx, meet)

    appliers = [await new_applier(handlers, topic="moves", partition=number) for number in (0, 1)]
    await db.execute(
        "INSERT INTO account (id, balance, history, version)"
        " VALUES ('ada', 0, '', 0), ('bob', 0, '', 0)"
    )
    with caplog.at_level(logging.WARNING, turns.__name__):
        async with asyncio.TaskGroup() as group:
            for applier, (one, other) in zip(
                appliers, (("ada", "bob"), ("bob", "ada")), strict=True
            ):
                value = json.dumps({"account": one, "other": other}).encode()
                moved = Deposit(1, account=one, id=one, type="transferred", value=value)
                group.create_task(applier.apply(moved))
    assert await appliers[0].backlog() == []
    assert dict(await db.fetch("SELECT id, balance FROM account")) == {"ada": 0, "bob": 0}
    [text] = [one.getMessage() for one in caplog.records if one.name == turns.__name__]
    key = "ada" if "of key 'ada'" in text else "bob"
    other = "bob" if key == "ada" else "ada"
    costs = "transactions of move take turns for 600 s, which costs their keys time and no order"
    assert f"{costs}, after a deadlock over account of move: transferred '{key}' of key" in text
    assert advice.format(other=other) in text
