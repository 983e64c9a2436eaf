"""What is observed of calls: one span for each, in the trace of what staged it, and its time."""

import asyncpg
from opentelemetry import propagate, trace

from onceward import Event, Handlers, Transaction
from onceward.effects import Call, Effects

from .applier import TOPIC, NewApplier, Received, applier_of
from tests.contract.bank import Deposit, Deposited
from tests.onceward.integration.test_backlog import QUICK
from tests.onceward.integration.test_handler_duration import (
    SLOW,
    slowly,
    told,  # noqa: F401 (a fixture)
)
from tests.onceward.integration.test_trace import TRACE, parent_id, span_id, trace_id
from tests.onceward.integration.test_trace_of_attempts import (
    IN_A_TRACE,
    Finished,
    check_attempts,
    finished,  # noqa: F401 (a fixture)
    of,
)


class Answer(Event, type="answer", topic="answers"):
    """What the outside has answered."""

    text: str


def outside(then: bool = False) -> tuple[Handlers, list[Exception]]:
    """Return handlers that call the outside, and the errors that it answers with, in turn."""
    handlers = Handlers()
    effects = Effects(handlers)
    errors: list[Exception] = []

    @handlers.on(Deposited, topic=TOPIC, consumer="deposit", policy=QUICK)
    async def deposit(event: Deposited, tx: Transaction) -> None:
        tx.call(Received(account="ada", amount=event.amount))

    async def answer(event: Received, tx: Transaction, result: str) -> None:
        tx.publish(Answer(text=result))

    @effects.on(Received, consumer="tell", policy=QUICK, then=answer if then else None)
    async def tell(event: Received, call: Call) -> str:
        if errors:
            raise errors.pop()
        return "told"

    return handlers, errors


async def test_a_call_is_one_span_in_the_trace_that_staged_it(
    new_calling_applier: NewApplier,
    finished: Finished,  # noqa: F811
) -> None:
    handlers, _ = outside()
    applier = await new_calling_applier(handlers, topic=TOPIC)
    await applier.apply(Deposit(1, headers=IN_A_TRACE))
    await applier.call()
    (staged,), calls = of(finished(), "deposit"), of(finished(), "tell")
    assert len(calls) == 1
    assert (trace_id(calls[0]), parent_id(calls[0])) == (TRACE, span_id(staged))


async def test_a_call_can_hand_the_trace_on_to_the_outside(
    new_calling_applier: NewApplier,
    finished: Finished,  # noqa: F811
) -> None:
    handlers, _ = outside()
    headers: dict[str, str] = {}

    @Effects(handlers).on(Received, consumer="post")
    async def post(event: Received, call: Call) -> None:
        propagate.inject(headers)

    applier = await new_calling_applier(handlers, topic=TOPIC)
    await applier.apply(Deposit(1, headers=IN_A_TRACE))
    await applier.call()
    (call,) = of(finished(), "post")
    assert headers["traceparent"] == f"00-{TRACE}-{span_id(call)}-01"


async def test_what_is_published_after_a_call_belongs_to_the_call(
    new_calling_applier: NewApplier,
    finished: Finished,  # noqa: F811
    db: asyncpg.Connection,
) -> None:
    handlers, _ = outside(then=True)
    applier = await new_calling_applier(handlers, topic=TOPIC)
    await applier.apply(Deposit(1, headers=IN_A_TRACE))
    await applier.call()
    (call,) = of(finished(), "tell")
    published = await db.fetchval("SELECT traceparent FROM pipeline.outbox")
    assert published == f"00-{TRACE}-{span_id(call)}-01"


async def test_a_repeated_call_is_a_new_span_linked_to_the_first(
    new_calling_applier: NewApplier,
    finished: Finished,  # noqa: F811
) -> None:
    handlers, errors = outside()
    errors += [LookupError("away"), LookupError("away")]
    applier = await new_calling_applier(handlers, topic=TOPIC)
    await applier.apply(Deposit(1, headers=IN_A_TRACE))
    for _ in range(3):
        await applier.make_due()
        await applier.call()
    assert await applier.backlog() == []
    (staged,), calls = of(finished(), "deposit"), of(finished(), "tell")
    assert len(calls) == 3
    check_attempts(calls, parent=span_id(staged))
    assert [one.status.status_code for one in calls[:2]] == [trace.StatusCode.ERROR] * 2


async def test_the_duration_of_a_call_is_recorded_once_not_at_settlement(
    new_calling_applier: NewApplier,
    told: list[dict[tuple[str, str], float]],  # noqa: F811
) -> None:
    outside, applier = await applier_of(new_calling_applier)
    outside.waits = {1: slowly}
    await applier.apply(Deposit(1))
    told.clear()
    await applier.call()
    (longest,) = told
    assert set(longest) == {("tell", "received")}
    assert longest["tell", "received"] >= SLOW
