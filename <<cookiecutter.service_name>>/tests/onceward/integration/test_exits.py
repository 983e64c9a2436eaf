"""What a handler may raise or return, however odd: it is that message's, and nobody else's."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from onceward import EventBatch, Handlers, Policy, Reject, Retry, Transaction
from onceward.errors import is_infrastructure
from onceward.servers.database import autocommitting, create_engine, driver_of
from onceward.settings import Settings

from .applier import Applier, NewApplier
from .bank import Bank
from tests.contract.bank import Deposit, Deposited, histories
from tests.servers.waiting import PATIENCE, eventually

EXITS = [KeyboardInterrupt, GeneratorExit, SystemExit]


@pytest.mark.parametrize("kind", EXITS)
async def test_exceptions_that_would_end_the_process_fail_only_their_message(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection, kind: type[BaseException]
) -> None:
    bank, applier = ledger

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="ending")
    async def ending(event: Deposited, tx: Transaction) -> None:
        if event.amount == 2:
            raise kind

    @bank.handlers.on_batch(Deposited, topic=bank.deposits, consumer="ending batches")
    async def ending_batches(batch: EventBatch[Deposited]) -> None:
        if any(event.amount == 2 for event, _ in batch):
            raise kind

    await applier.apply(Deposit(1), Deposit(2, "bob"), Deposit(3))
    assert await applier.park() == {("ending", 1): "failed", ("ending batches", 1): "failed"}
    assert await histories(db) == {"ada": [1, 3], "bob": [2]}
    assert {row["error"].partition(":")[0] for row in await applier.backlog()} == {kind.__name__}


async def test_decisions_out_of_groups_of_tasks_are_decisions_and_open_no_breaker(
    new_applier: NewApplier,
) -> None:
    handlers = Handlers()

    async def decide(error: Exception) -> None:
        raise error

    @handlers.on(Deposited, topic="deposits", consumer="deciding", policy=Policy(attempts=2))
    async def deciding(event: Deposited, tx: Transaction) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(decide(Retry("not now") if event.amount else Reject("never")))
            tasks.create_task(decide(Reject(f"not {event.amount}")))

    applier = await new_applier(handlers, topic="deposits", breaker_keys=20)
    await applier.apply(*(Deposit(n, account=str(n)) for n in range(25)))
    await applier.work_off()  # each alone
    rows = await applier.backlog()
    assert [row["reason"] for row in rows] == ["rejected"] * 25
    assert rows[7]["error"] == "Reject: not 7"


async def _cancel_and_wait() -> None:
    _cancel()
    await asyncio.Event().wait()


async def _cancel_and_return() -> None:
    _cancel()


async def _cancel_and_raise() -> None:
    _cancel()
    raise ValueError("of its own")


async def _swallow_cancellation() -> None:
    with suppress(asyncio.CancelledError):
        await _cancel_and_wait()


async def _swallow_and_time_out() -> None:
    await _swallow_cancellation()
    with suppress(TimeoutError):
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()


async def _await_cancelled() -> None:
    cancelled = asyncio.get_running_loop().create_future()
    cancelled.cancel()
    await cancelled


def _cancel() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


@pytest.mark.parametrize("in_batches", [False, True], ids=["", "in batches"])
async def test_a_handler_that_cancels_its_task_fails_and_its_neighbours_do_not(
    new_applier: NewApplier, in_batches: bool
) -> None:
    handlers = Handlers()
    does = [_cancel_and_wait, _cancel_and_return, _cancel_and_raise]
    does += [_swallow_cancellation, _await_cancelled]
    does += [_swallow_and_time_out]

    async def act(event: Deposited) -> None:
        if event.amount < len(does):
            await does[event.amount]()

    if in_batches:

        @handlers.on_batch(Deposited, topic="deposits", consumer="cancelling")
        async def cancelling_in_batches(batch: EventBatch[Deposited]) -> None:
            for event, _ in batch:
                await act(event)

    else:

        @handlers.on(Deposited, topic="deposits", consumer="cancelling")
        async def cancelling(event: Deposited, tx: Transaction) -> None:
            await act(event)

    applier = await new_applier(handlers, topic="deposits", breaker_keys=100)
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    await applier.apply(*(Deposit(n, account=str(n)) for n in range(len(does) + 1)))
    await applier.work_off()  # each alone
    errors = {row["offset"]: row["error"].partition(":")[0] for row in await applier.backlog()}
    itself = "CancelledItself"
    assert errors == {0: itself, 1: itself, 2: "ValueError", 4: itself}
    assert task.cancelling() == before


async def test_a_worker_that_code_of_the_service_has_cancelled_ends_them_all(
    ledger: tuple[Bank, Applier],
) -> None:
    bank, applier = ledger

    async def cancel(task: asyncio.Task[None]) -> None:
        task.cancel()

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="cancelled", mode="deferred")
    async def cancelled(event: Deposited, tx: Transaction) -> None:
        task = asyncio.current_task()
        assert task is not None
        await asyncio.create_task(cancel(task))
        await asyncio.Event().wait()

    await applier.apply(Deposit(1))
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(applier.lanes.run(), PATIENCE)


class Response:
    """What a client returns, and no JSON."""

    status = 200


async def test_a_result_that_is_not_json_fails_saying_what_to_return(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="returning")
    async def returning(event: Deposited, tx: Transaction) -> object:
        return Response() if event.amount == 2 else {"amount": event.amount}

    await applier.apply(Deposit(1), Deposit(2, "bob"), Deposit(3))
    (row,) = await applier.backlog()
    assert (row["consumer"], row["offset"], row["reason"]) == ("returning", 1, "failed")
    assert row["error"].startswith("TypeError: the function returned a value that can't be JSON")
    assert "return text, a number, a list, a dict or a model" in row["error"]
    assert await histories(db) == {"ada": [1, 3], "bob": [2]}


ODD = [
    Response(),
    {"a": Response()},
    "\ud800",
    b"\xff",
    {Response(): 1},
    Response,
    ValueError("returned"),
    [lambda: None],
]
"""Results of handlers that can't be JSON."""


@pytest.mark.parametrize("uses_session", [False, True], ids=["", "with a session"])
async def test_every_result_that_is_no_json_is_a_failure(
    new_applier: NewApplier, uses_session: bool
) -> None:
    handlers = Handlers()

    @handlers.on(Deposited, topic="deposits", consumer="returning", policy=Policy(attempts=2))
    async def returning(event: Deposited, tx: Transaction) -> object:
        if uses_session:
            _ = tx.session
        return ODD[event.amount] if event.amount < len(ODD) else "\x00"

    applier = await new_applier(handlers, topic="deposits", breaker_keys=100)
    outcomes = await applier.apply(*(Deposit(n, account=str(n)) for n in range(len(ODD) + 1)))
    await applier.work_off()  # each alone
    rows = await applier.backlog()
    assert [row["offset"] for row in rows] == [*range(len(ODD))]
    assert {row["reason"] for row in rows} <= {"failed", "failed in a batch"}
    assert all("return text, a number" in row["error"] for row in rows)
    assert [one.is_new for one in outcomes] == [False] * len(ODD) + [True]


async def test_a_misuse_of_the_driver_is_the_messages_fault_and_no_outage(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    bank, applier = ledger

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="misusing")
    async def misusing(event: Deposited, tx: Transaction) -> None:
        if event.amount == 2:
            driver = await driver_of(await tx.session.connection())
            async with driver.transaction(isolation="serializable"):
                pass

    await applier.apply(Deposit(1), Deposit(2, "bob"), Deposit(3))
    await applier.work_off()  # each of its handlers alone
    assert await applier.park() == {("misusing", 1): "failed"}
    assert await histories(db) == {"ada": [1, 3], "bob": [2]}
    assert applier.outages == []


async def test_of_asyncpgs_usage_errors_only_a_lost_connection_is_an_outage(
    db: asyncpg.Connection, connect: Callable[[], Awaitable[asyncpg.Connection]]
) -> None:
    one = await connect()
    found: dict[str, bool] = {}

    async def note(what: Any) -> None:
        with pytest.raises(Exception) as info:  # noqa: PT011  # of which kind is the question
            await what
        found[str(info.value).partition(";")[0]] = is_infrastructure(info.value)

    pid = one.get_server_pid()

    async def is_asleep() -> bool:
        query = "SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = $1"
        return bool(await db.fetchval(query, pid))

    async def fall_asleep() -> asyncio.Task[str]:
        task = asyncio.create_task(one.execute("SELECT pg_sleep(600)"))
        # PostgreSQL ignores a request to cancel a statement that has not begun.
        await eventually(is_asleep)
        return task

    sleeping = await fall_asleep()
    await note(one.execute("SELECT"))
    sleeping.cancel()
    await asyncio.gather(sleeping, return_exceptions=True)
    await one.execute("BEGIN")
    await note(one.transaction().start())
    await note(one.fetchval("SELECT $1::int"))
    await note(one.fetchval("SELECT $1::int", "x"))
    sleeping = await fall_asleep()
    await db.execute("SELECT pg_terminate_backend($1)", pid)
    await note(sleeping)
    await note(one.execute("SELECT"))
    assert [*found.values()] == [False, False, False, False, True, True], found


async def test_a_cancellation_while_an_engine_connects_for_the_first_time_stays_one(
    settings: Callable[..., Settings],
) -> None:
    ended: list[BaseException | None] = []
    for moment in range(120):
        engine = create_engine(settings(), name="cancelled")

        async def look(engine: AsyncEngine = engine) -> None:
            async with autocommitting(engine) as driver:
                await driver.fetchval("SELECT 1")

        task = asyncio.create_task(look())
        await asyncio.sleep(moment / 10_000)
        task.cancel()
        ended += await asyncio.gather(task, return_exceptions=True)
        await engine.dispose()
    assert {type(one) for one in ended} <= {asyncio.CancelledError, type(None)}
    assert any(ended)
