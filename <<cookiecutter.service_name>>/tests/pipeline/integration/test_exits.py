"""What a handler may raise or return, however odd: it is that message's, and nobody else's."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from pipeline import Event, EventBatch, Handlers, Policy, Reject, Retry, Transaction
from pipeline.errors import is_infrastructure
from pipeline.servers.database import driver_of

from .bank import Bank
from .desk import Desk, NewDesk
from .test_effects import desk_of
from tests.contract.bank import Deposit, Deposited, histories

EXITS = [KeyboardInterrupt, GeneratorExit, SystemExit]


@pytest.mark.parametrize("kind", EXITS)
async def test_what_would_end_the_process_is_the_failure_of_the_message_that_raised_it(
    ledger: tuple[Bank, Desk], db: asyncpg.Connection, kind: type[BaseException]
) -> None:
    bank, desk = ledger

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="ending")
    async def ending(event: Deposited, tx: Transaction) -> None:
        if event.amount == 2:
            raise kind

    @bank.handlers.on_batch(Deposited, topic=bank.deposits, consumer="ending batches")
    async def ending_batches(batch: EventBatch[Deposited]) -> None:
        if any(event.amount == 2 for event, _ in batch):
            raise kind

    await desk.apply(Deposit(1), Deposit(2, "bob"), Deposit(3))
    assert await desk.park() == {("ending", 1): "failed", ("ending batches", 1): "failed"}
    assert await histories(db) == {"ada": [1, 3], "bob": [2]}
    assert {row["error"].partition(":")[0] for row in await desk.backlog()} == {kind.__name__}


@pytest.mark.parametrize("kind", EXITS)
async def test_what_would_end_the_process_is_the_failure_of_the_effect_that_raised_it(
    new_desk: NewDesk, kind: type[BaseException]
) -> None:
    async def then(event: Event, tx: Transaction, result: str) -> None:
        if result == "told carl":
            raise kind

    outside, desk = await desk_of(new_desk, then=then, policy=Policy(attempts=1))
    outside.errors = {2: kind()}
    await desk.apply(Deposit(1), Deposit(2, "bob"), Deposit(3, "carl"))
    await desk.call()
    rows = await desk.backlog()
    assert [(row["reason"], row["error"]) for row in rows] == [
        ("attempts used up", f"{kind.__name__}: ")
    ] * 2


@pytest.mark.parametrize("kind", EXITS)
async def test_who_is_asked_may_raise_what_would_end_the_process(
    new_desk: NewDesk, kind: type[BaseException]
) -> None:
    async def ask(event: Event, call: Any) -> bool:
        raise kind

    outside, desk = await desk_of(
        new_desk, repeatable=False, ask=ask, policy=Policy(attempts=2, schedule=(0,))
    )
    outside.errors = {1: OSError("lost")}
    await desk.apply(Deposit(1))
    await desk.call()
    await desk.make_due()
    await desk.call()
    (row,) = await desk.backlog()
    assert (row["reason"], row["attempts"]) == ("outcome unknown", 2)
    assert outside.calls == [1]


async def test_decisions_out_of_groups_of_tasks_are_decisions_and_open_no_breaker(
    new_desk: NewDesk,
) -> None:
    handlers = Handlers()

    async def decide(error: Exception) -> None:
        raise error

    @handlers.on(Deposited, topic="deposits", consumer="deciding", policy=Policy(attempts=2))
    async def deciding(event: Deposited, tx: Transaction) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(decide(Retry("not now") if event.amount else Reject("never")))
            tasks.create_task(decide(Reject(f"not {event.amount}")))

    desk = await new_desk(handlers, topic="deposits", breaker_keys=20)
    await desk.apply(*(Deposit(n, account=str(n)) for n in range(25)))
    await desk.work_off()  # each alone
    rows = await desk.backlog()
    assert [row["reason"] for row in rows] == ["rejected"] * 25
    assert rows[7]["error"] == "Reject: not 7"


async def test_a_decision_in_a_group_says_that_a_call_did_not_take_place(
    new_desk: NewDesk,
) -> None:
    outside, desk = await desk_of(new_desk, repeatable=False, policy=Policy())
    outside.errors = {1: ExceptionGroup("tasks", [Retry("it is closed", after=60)])}
    await desk.apply(Deposit(1))
    await desk.call()
    (row,) = await desk.backlog()
    assert (row["reason"], row["died_at"]) == ("failed", None)
    assert row["error"] == "Retry: it is closed"


async def test_a_decision_in_a_group_does_not_undo_a_call_that_was_made(new_desk: NewDesk) -> None:
    async def then(event: Event, tx: Transaction, result: str) -> None:
        raise ExceptionGroup("tasks", [Reject("too late")])

    outside, desk = await desk_of(new_desk, repeatable=False, then=then)
    await desk.apply(Deposit(1))
    await desk.call()
    (row,) = await desk.backlog()
    assert row["reason"] == "outcome unknown"
    assert "it took place, but then" in row["error"]
    assert "Reject: too late" in row["error"]
    assert outside.calls == [1]


class Response:
    """What a client returns, and no JSON."""

    status = 200


async def test_a_call_whose_result_is_no_json_was_made_and_is_not_made_again(
    new_desk: NewDesk, db: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    results: list[object] = []
    calls: list[int] = []
    handlers = Handlers()

    async def then(event: Deposited, tx: Transaction, result: object) -> None:
        results.append(result)

    @handlers.effect(Deposited, consumer="tell", then=then)
    async def tell(event: Deposited, call: object) -> Response:
        calls.append(event.amount)
        return Response()

    @handlers.on(Deposited, topic="deposits", consumer="deposit")
    async def deposit(event: Deposited, tx: Transaction) -> None:
        tx.call(event)

    desk = await new_desk(handlers, topic="deposits")
    await desk.apply(Deposit(1))
    with caplog.at_level(logging.WARNING):
        await desk.call()
    assert calls == [1]
    assert await desk.backlog() == []
    assert [type(one) for one in results] == [Response], "what comes after the call has it all"
    query = "SELECT result FROM pipeline.inbox WHERE consumer = 'tell'"
    assert await db.fetch(query) == [(None,)]
    (warning,) = [one.getMessage() for one in caplog.records if "tell" in one.getMessage()]
    assert "was made, and nothing of it is kept" in warning
    assert "return text, a number, a list, a dict or a model" in warning


async def test_a_result_that_is_no_json_is_a_failure_that_says_what_to_return(
    ledger: tuple[Bank, Desk], db: asyncpg.Connection
) -> None:
    bank, desk = ledger

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="returning")
    async def returning(event: Deposited, tx: Transaction) -> object:
        return Response() if event.amount == 2 else {"amount": event.amount}

    await desk.apply(Deposit(1), Deposit(2, "bob"), Deposit(3))
    (row,) = await desk.backlog()
    assert (row["consumer"], row["offset"], row["reason"]) == ("returning", 1, "failed")
    assert row["error"].startswith("TypeError: the function has returned what is no JSON")
    assert "return text, a number, a list, a dict or a model" in row["error"]
    assert await histories(db) == {"ada": [1, 3], "bob": [2]}


async def test_a_misuse_of_the_driver_is_the_messages_fault_and_no_outage(
    ledger: tuple[Bank, Desk], db: asyncpg.Connection
) -> None:
    bank, desk = ledger

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="misusing")
    async def misusing(event: Deposited, tx: Transaction) -> None:
        if event.amount == 2:
            driver = await driver_of(await tx.session.connection())
            async with driver.transaction(isolation="serializable"):
                pass

    await desk.apply(Deposit(1), Deposit(2, "bob"), Deposit(3))
    await desk.work_off()  # each of its handlers alone
    assert await desk.park() == {("misusing", 1): "failed"}
    assert await histories(db) == {"ada": [1, 3], "bob": [2]}
    assert desk.outages == []


async def test_only_a_lost_connection_is_an_outage_of_what_asyncpg_says_of_its_use(
    db: asyncpg.Connection, connect: Callable[[], Awaitable[asyncpg.Connection]]
) -> None:
    one = await connect()
    found: dict[str, bool] = {}

    async def note(what: Any) -> None:
        with pytest.raises(Exception) as info:  # noqa: PT011  # of which kind is the question
            await what
        found[str(info.value).partition(";")[0]] = is_infrastructure(info.value)

    sleeping = asyncio.create_task(one.execute("SELECT pg_sleep(600)"))
    await asyncio.sleep(0)
    await note(one.execute("SELECT"))
    sleeping.cancel()
    await asyncio.gather(sleeping, return_exceptions=True)
    await one.execute("BEGIN")
    await note(one.transaction().start())
    await note(one.fetchval("SELECT $1::int"))
    await note(one.fetchval("SELECT $1::int", "x"))
    pid = one.get_server_pid()
    sleeping = asyncio.create_task(one.execute("SELECT pg_sleep(600)"))
    await asyncio.sleep(0)
    await db.execute("SELECT pg_terminate_backend($1)", pid)
    await note(sleeping)
    await note(one.execute("SELECT"))
    assert [*found.values()] == [False, False, False, False, True, True], found
