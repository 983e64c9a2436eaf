"""What the functions of an effect may raise or return, however odd: it is that call's."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa

from onceward import Event, Handlers, Policy, Reject, Retry, Transaction
from onceward.apply import outcome
from onceward.effects import Effects
from onceward.observe import metrics

from .applier import NewApplier, Outside, applier_of
from tests.contract.bank import Deposit, Deposited
from tests.onceward.blocking import Block, interrupting
from tests.onceward.integration.test_exits import EXITS, Response
from tests.onceward.integration.test_ladder import ENDS_ITS_CONNECTION, RAISE


@pytest.mark.parametrize("kind", EXITS)
async def test_exceptions_that_would_end_the_process_fail_only_their_effect(
    new_calling_applier: NewApplier, kind: type[BaseException]
) -> None:
    async def then(event: Event, tx: Transaction, result: str) -> None:
        if result == "told carl":
            raise kind

    outside, applier = await applier_of(new_calling_applier, then=then, policy=Policy(attempts=1))
    outside.errors = {2: kind()}
    await applier.apply(Deposit(1), Deposit(2, "bob"), Deposit(3, "carl"))
    await applier.call()
    rows = await applier.backlog()
    failed = ("attempts used up", kind.__name__)
    assert [(row["reason"], row["error"]) for row in rows] == [failed] * 2


async def test_a_call_that_cancels_its_task_fails_and_the_worker_goes_on(
    new_calling_applier: NewApplier,
) -> None:
    async def cancel() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.Event().wait()

    outside, applier = await applier_of(new_calling_applier, policy=Policy(attempts=1))
    outside.waits = {1: cancel}
    await applier.apply(Deposit(1), Deposit(2, "bob"))
    await applier.call()
    (row,) = await applier.backlog()
    assert row["reason"] == "attempts used up"
    assert row["error"].startswith("CancelledItself: ")
    assert sorted(outside.calls) == [1, 2]


async def at_once(block: Block) -> None:
    block()


async def and_gathers(block: Block) -> None:
    await asyncio.gather(at_once(block), return_exceptions=True)


async def and_denies(block: Block) -> None:
    try:
        block()
    except BaseException as error:
        raise Retry("it did not take place") from error


@pytest.mark.parametrize("is_repeatable", [True, False])
@pytest.mark.parametrize("way", [at_once, and_gathers, and_denies])
async def test_a_call_blocking_the_event_loop_fails_however_it_handles_the_error(
    new_calling_applier: NewApplier, way: Callable[[Block], Awaitable[None]], is_repeatable: bool
) -> None:
    async def wait() -> None:
        await way(block)

    outside, applier = await applier_of(
        new_calling_applier, policy=Policy(attempts=1), repeatable=is_repeatable
    )
    outside.waits = {1: wait}
    await applier.apply(Deposit(1), Deposit(2, "bob"))
    with interrupting() as block:
        await applier.call()
    (row,) = await applier.backlog()
    assert row["reason"] == ("attempts used up" if is_repeatable else "outcome unknown")
    text = "TimeoutError: tell blocks the event loop: await, or use asyncio.to_thread"
    assert row["error"] == text
    assert sorted(outside.calls) == [1, 2]


async def asked_after_a_lost_call(
    new_calling_applier: NewApplier, ask: Callable[[Event, Any], Awaitable[Any]]
) -> tuple[Outside, asyncpg.Record]:
    """Make a call whose outcome is unknown, and ask; return the outside and the call's row."""
    outside, applier = await applier_of(
        new_calling_applier, repeatable=False, ask=ask, policy=Policy(attempts=2, schedule=(0,))
    )
    outside.errors = {1: OSError("lost")}
    await applier.apply(Deposit(1))
    await applier.call()
    await applier.make_due()
    await applier.call()
    (row,) = await applier.backlog()
    return outside, row


@pytest.mark.parametrize("kind", EXITS)
async def test_who_is_asked_may_raise_what_would_end_the_process(
    new_calling_applier: NewApplier, kind: type[BaseException]
) -> None:
    async def ask(event: Event, call: Any) -> bool:
        raise kind

    outside, row = await asked_after_a_lost_call(new_calling_applier, ask)
    assert (row["reason"], row["attempts"]) == ("outcome unknown", 2)
    assert outside.calls == [1]


async def test_the_result_of_ask_is_ignored_if_ask_blocks_the_loop(
    new_calling_applier: NewApplier,
) -> None:
    async def ask(event: Event, call: Any) -> bool:
        with suppress(BaseException):
            block()
        return False

    with interrupting() as block:
        outside, row = await asked_after_a_lost_call(new_calling_applier, ask)
    assert (row["reason"], row["attempts"]) == ("outcome unknown", 2)
    assert outside.calls == [1]


async def test_a_decision_in_an_exception_group_means_no_call_took_place(
    new_calling_applier: NewApplier,
) -> None:
    outside, applier = await applier_of(new_calling_applier, repeatable=False, policy=Policy())
    outside.errors = {1: ExceptionGroup("tasks", [Retry("it is closed", after=60)])}
    await applier.apply(Deposit(1))
    await applier.call()
    (row,) = await applier.backlog()
    assert (row["reason"], row["died_at"]) == ("failed", None)
    assert row["error"] == "Retry: it is closed"


async def test_a_decision_in_an_exception_group_undoes_no_completed_call(
    new_calling_applier: NewApplier,
) -> None:
    async def then(event: Event, tx: Transaction, result: str) -> None:
        raise ExceptionGroup("tasks", [Reject("too late")])

    outside, applier = await applier_of(new_calling_applier, repeatable=False, then=then)
    await applier.apply(Deposit(1))
    await applier.call()
    (row,) = await applier.backlog()
    assert row["reason"] == "outcome unknown"
    assert "it took place, but then" in row["error"]
    assert "Reject: too late" in row["error"]
    assert outside.calls == [1]


async def test_a_completed_call_whose_result_is_not_json_is_not_repeated(
    new_calling_applier: NewApplier, db: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    results: list[object] = []
    calls: list[int] = []
    handlers = Handlers()
    effects = Effects(handlers)

    async def then(event: Deposited, tx: Transaction, result: object) -> None:
        results.append(result)

    @effects.on(Deposited, consumer="tell", then=then)
    async def tell(event: Deposited, call: object) -> Response:
        calls.append(event.amount)
        return Response()

    @handlers.on(Deposited, topic="deposits", consumer="deposit")
    async def deposit(event: Deposited, tx: Transaction) -> None:
        tx.call(event)

    applier = await new_calling_applier(handlers, topic="deposits")
    await applier.apply(Deposit(1))
    with caplog.at_level(logging.WARNING):
        await applier.call()
    assert calls == [1]
    assert await applier.backlog() == []
    assert [type(one) for one in results] == [Response], "what comes after the call has it all"
    query = "SELECT result FROM pipeline.inbox WHERE consumer = 'tell'"
    assert await db.fetch(query) == [(None,)]
    (warning,) = [one.getMessage() for one in caplog.records if "tell" in one.getMessage()]
    assert "was made; its result is not stored" in warning
    assert "return text, a number, a list, a dict or a model" in warning


async def test_an_answer_that_is_neither_true_nor_false_repeats_no_call(
    new_calling_applier: NewApplier,
) -> None:
    async def ask(event: Event, call: Any) -> Any:
        """It has forgotten to return what it has found."""

    outside, row = await asked_after_a_lost_call(new_calling_applier, ask)
    assert row["reason"] == "outcome unknown"
    assert "ask has returned NoneType" in row["error"]
    assert outside.calls == [1]


@pytest.mark.filterwarnings("ignore:.* was never awaited:RuntimeWarning")
async def test_a_call_that_is_returned_and_not_awaited_has_failed(
    new_calling_applier: NewApplier,
) -> None:
    handlers = Handlers()
    effects = Effects(handlers)

    async def send() -> None:
        """Nothing is sent until it is awaited."""

    @effects.on(Deposited, consumer="sending", policy=Policy(attempts=1))
    async def sending(event: Deposited, call: Any) -> object:
        return send()

    @handlers.on(Deposited, topic="deposits", consumer="calling")
    async def calling(event: Deposited, tx: Transaction) -> None:
        tx.call(event, key=event.account)

    applier = await new_calling_applier(handlers, topic="deposits")
    await applier.apply(Deposit(1))
    await applier.call()
    (row,) = await applier.backlog()
    assert "await it" in row["error"]


IN_VAIN = [ENDS_ITS_CONNECTION, *(RAISE.format(code) for code in ("40P01", "55P03", "53100"))]
"""Statements with which a transaction fails that no attempt is spent on."""


def failing(statement: str, times: int) -> Callable[[Event, Transaction, object], Awaitable[None]]:
    """Return a `then` that fails so often, by a statement."""
    left = times

    async def then(event: Event, tx: Transaction, result: object) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            await tx.session.execute(sa.text(statement))

    return then


async def always(event: Event, call: object) -> bool:
    return True


@pytest.mark.parametrize("ask", [None, always], ids=["nobody to ask", "ask"])
@pytest.mark.parametrize("statement", IN_VAIN, ids=["lost", "40P01", "55P03", "53100"])
async def test_a_call_is_not_repeated_because_its_result_could_not_be_stored(
    new_calling_applier: NewApplier, statement: str, ask: Any
) -> None:
    then = failing(statement, times=1_000)
    outside, applier = await applier_of(new_calling_applier, repeatable=False, ask=ask, then=then)
    await applier.apply(Deposit(1))
    for _ in range(9):
        await applier.call()
        await applier.make_due()
    assert outside.calls == [1]
    (row,) = await applier.backlog()
    assert row["reason"] == "outcome unknown"
    if ask is None:
        assert row["died_at"]
    elif statement == ENDS_ITS_CONNECTION:
        assert row["attempts"] > 0


@pytest.mark.parametrize("repeatable", [True, False])
@pytest.mark.parametrize("statement", IN_VAIN, ids=["lost", "40P01", "55P03", "53100"])
async def test_a_result_is_stored_again_before_the_call_is_in_doubt(
    new_calling_applier: NewApplier, statement: str, repeatable: bool
) -> None:
    # A handler that executes statements is called again, in a session of its own.
    then = failing(statement, times=2)
    outside, applier = await applier_of(new_calling_applier, repeatable=repeatable, then=then)
    await applier.apply(Deposit(1))
    await applier.call()
    assert outside.calls == [1]
    assert await applier.backlog() == []


async def test_an_unavailable_called_service_is_logged_once_a_minute(
    new_calling_applier: NewApplier,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each call that is dead then has a line of its own."""
    now = [0.0]
    monkeypatch.setattr(outcome, "monotonic", lambda: now[0])
    monkeypatch.setattr(outcome, "_left_out", {})
    policy = Policy(attempts=3, schedule=(60,))
    outside, applier = await applier_of(new_calling_applier, policy=policy)
    outside.errors = {n: LookupError("away") for n in range(1, 6)}
    await applier.apply(*(Deposit(n, f"account {n}") for n in range(1, 6)))
    lines: list[list[str]] = []
    for _ in range(3):
        await applier.make_due()
        with caplog.at_level(logging.WARNING):
            await applier.call()
        lines.append([one.getMessage() for one in caplog.records if "away" in one.getMessage()])
        caplog.clear()
        now[0] += 60.0
    (first,), (second,), dead = lines
    assert "failed (attempt 1 of 3), again in" in first
    assert "4 more" not in first
    assert "; 4 more have failed since the last line: LookupError: away" in second
    assert len(dead) == 5
    assert all("is dead (attempts used up" in one for one in dead)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Return what each call that has begun is counted as when it ends."""
    began: list[str] = []
    found: list[str | None] = []

    def end(consumer: str, outcome: str | None, seconds: float) -> None:
        assert began.pop() == consumer
        found.append(outcome)

    monkeypatch.setattr(metrics, "call_began", began.append)
    monkeypatch.setattr(metrics, "call_ended", end)
    return found


async def test_calls_are_counted_by_what_became_of_them(
    new_calling_applier: NewApplier, ended: list[str | None]
) -> None:
    outside, applier = await applier_of(new_calling_applier, policy=Policy(attempts=1))
    outside.errors = {2: LookupError("away"), 3: Reject("no such account"), 4: Retry("busy")}
    await applier.apply(*(Deposit(n, f"account {n}") for n in range(1, 5)))
    await applier.call()
    assert sorted(map(str, ended)) == ["done", "done", "failed", "failed"]


async def test_a_call_that_exceeds_its_time_limit_is_late(
    new_calling_applier: NewApplier, ended: list[str | None]
) -> None:
    outside, applier = await applier_of(new_calling_applier, policy=Policy(attempts=1), timeout=0.1)
    outside.waits = {1: asyncio.Event().wait}
    await applier.apply(Deposit(1))
    await applier.call()
    assert ended == ["late"]
