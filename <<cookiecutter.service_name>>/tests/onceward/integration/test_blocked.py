"""Handlers that block the event loop: they are ended like those that wait for too long."""

import asyncio
import sys
from asyncio.selector_events import _SelectorSocketTransport  # type: ignore[attr-defined]
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa

from onceward import EventBatch, Handlers, Park, Policy, Transaction
from onceward.servers.database import driver_of

from .applier import NewApplier
from tests.contract.bank import Account, Deposit, Deposited, histories
from tests.onceward.blocking import Block, interrupting

Way = Callable[[Transaction, Block], Awaitable[None]]

BLOCKS = "TimeoutError: blocking blocks the event loop: await, or use asyncio.to_thread"


async def at_once(tx: Transaction, block: Block) -> None:
    block()


async def after_a_change(tx: Transaction, block: Block) -> None:
    account = await tx.load_or_create(Account, "changed")
    account.history += "1,"
    block()


async def after_a_statement(tx: Transaction, block: Block) -> None:
    await tx.session.execute(sa.text("SELECT 1"))
    block()


class Slow(sa.types.TypeDecorator[str]):
    """A text that takes long to be prepared."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str:
        value()
        return ""


async def in_a_statement(tx: Transaction, block: Block) -> None:
    await tx.session.execute(sa.select(sa.bindparam("value", block, Slow)))


async def in_a_flush(tx: Transaction, block: Block) -> None:
    sa.event.listen(tx.session.sync_session, "before_flush", lambda *_: block())
    tx.session.add(Account("flushed"))
    await tx.session.flush()


async def in_the_driver(tx: Transaction, block: Block) -> None:
    """Nothing is raised in it, whose state would be lost."""

    def rows() -> Iterator[tuple[str]]:
        block()
        yield ("",)

    driver = await driver_of(await tx.session.connection())
    await driver.executemany("SELECT $1::text", rows())


async def in_the_transport(tx: Transaction, block: Block) -> None:
    """The driver calls it: a function of Python, unless the event loop is uvloop."""

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is _SelectorSocketTransport.write.__code__:
            sys.setprofile(None)
            block()

    driver = await driver_of(await tx.session.connection())
    sys.setprofile(profile)
    await driver.execute("SELECT 1")


async def in_a_task(tx: Transaction, block: Block) -> None:
    await asyncio.create_task(at_once(tx, block))


async def in_a_group(tx: Transaction, block: Block) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(at_once(tx, block))
        group.create_task(asyncio.sleep(60))


async def in_a_callback(tx: Transaction, block: Block) -> None:
    asyncio.get_running_loop().call_soon(block)
    await asyncio.sleep(0)


async def while_it_cleans_up(tx: Transaction, block: Block) -> None:
    try:
        raise ValueError
    finally:
        block()


async def and_catches_errors(tx: Transaction, block: Block) -> None:
    with suppress(Exception):
        block()


async def and_catches_all(tx: Transaction, block: Block) -> None:
    with suppress(BaseException):
        block()
    await tx.load_or_create(Account, "caught")


async def and_says_that_it_was_cancelled(tx: Transaction, block: Block) -> None:
    try:
        block()
    except BaseException as error:
        raise asyncio.CancelledError from error


async def and_says_otherwise(tx: Transaction, block: Block) -> None:
    try:
        block()
    except BaseException as error:
        raise Park("not now") from error


WAYS: list[Way] = [
    at_once,
    after_a_change,
    after_a_statement,
    in_a_statement,
    in_a_flush,
    in_the_driver,
    in_the_transport,
    in_a_task,
    in_a_group,
    in_a_callback,
    while_it_cleans_up,
    and_catches_errors,
    and_catches_all,
    and_says_that_it_was_cancelled,
    and_says_otherwise,
]
UNKNOWN = in_the_driver, in_the_transport, in_a_callback
"""Ways after which no traceback has the handler's frame."""


@pytest.mark.parametrize("way", WAYS)
async def test_a_call_blocking_the_event_loop_is_ended_and_neighbours_applied(
    new_applier: NewApplier, db: asyncpg.Connection, way: Way
) -> None:
    handlers = Handlers()

    @handlers.on(
        Deposited,
        topic="deposits",
        consumer="blocking",
        timeout=1,
        policy=Policy(attempts=2, schedule=(60,)),
    )
    async def blocking(event: Deposited, tx: Transaction) -> None:
        if event.amount == 2:
            await way(tx, block)
        account = await tx.load_or_create(Account, event.account)
        account.history += f"{event.amount},"

    applier = await new_applier(handlers, topic="deposits")
    with interrupting() as block:
        outcomes = await applier.apply(*(Deposit(n, account=str(n % 2)) for n in range(5)))
        assert [one.is_new for one in outcomes] == [True, True, False, True, False]
        reasons = {("blocking", 2): "undecided", ("blocking", 4): "follows another"}
        assert await applier.park() == reasons
        assert {row["attempts"] for row in await applier.backlog()} == {0}
        await applier.work_off()
        first, _ = await applier.backlog()
        assert (first["reason"], first["attempts"]) == ("failed", 1)
        assert first["error"] == BLOCKS
        where = at_once if way is in_a_group else way  # a group's own error is replaced
        assert f"in {where.__name__}" in first["traceback"] or way in UNKNOWN
        await applier.make_due()
        await applier.work_off()
    assert await applier.park() == {("blocking", 2): "attempts used up"}
    assert await histories(db) == {"0": [0, 4], "1": [1, 3]}
    assert applier.outages == []


@pytest.mark.parametrize("way", [at_once, in_a_task, and_catches_all])
async def test_a_batch_handler_blocking_the_event_loop_fails_for_one_message(
    new_applier: NewApplier, way: Way
) -> None:
    handlers = Handlers()

    @handlers.on_batch(Deposited, topic="deposits", consumer="blocking")
    async def blocking(batch: EventBatch[Deposited]) -> None:
        for event, tx in batch:
            if event.amount == 2:
                await way(tx, block)

    applier = await new_applier(handlers, topic="deposits")
    with interrupting() as block:
        outcomes = await applier.apply(*(Deposit(n, account=str(n)) for n in range(5)))
        assert [one.is_new for one in outcomes] == [True, True, False, True, True]
        assert await applier.park() == {("blocking", 2): "undecided"}
        await applier.work_off()
    (row,) = await applier.backlog()
    assert (row["reason"], row["attempts"], row["error"]) == ("failed", 1, BLOCKS)


async def test_code_of_the_engine_is_not_interrupted(new_applier: NewApplier) -> None:
    """Its statements would be half sent, and its readers would end."""
    handlers, waited = Handlers(), list[str]()

    @handlers.on(Deposited, topic="deposits", consumer="listening")
    async def listening(event: Deposited, tx: Transaction) -> None:
        # Called by the engine, when the handler has returned.
        sa.event.listen(tx.session.sync_session, "before_flush", wait)
        tx.session.add(Account(event.account))

    def wait(*_: object) -> None:
        block()
        waited.append("to the end")

    applier = await new_applier(handlers, topic="deposits")
    with interrupting() as block:
        await applier.apply(Deposit(1))
    assert waited == ["to the end"]
    assert await applier.backlog() == []


async def test_a_task_outliving_its_call_is_uninterrupted_and_blames_no_message(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    handlers, left = Handlers(), list[asyncio.Task[None]]()
    goes_on = asyncio.Event()

    async def later() -> None:
        await goes_on.wait()
        block()

    @handlers.on(Deposited, topic="deposits", consumer="leaving")
    async def leaving(event: Deposited, tx: Transaction) -> None:
        if event.amount == 1:
            left.append(asyncio.create_task(later()))
        if event.amount == 3:
            goes_on.set()
            await asyncio.wait(left)
        account = await tx.load_or_create(Account, "ada")
        account.history += f"{event.amount},"

    applier = await new_applier(handlers, topic="deposits")
    with interrupting() as block:
        outcomes = await applier.apply(*(Deposit(n) for n in range(5)))
    assert [one.is_new for one in outcomes] == 5 * [True]
    assert [task.exception() for task in left] == [None]
    assert await histories(db) == {"ada": [0, 1, 2, 3, 4]}
