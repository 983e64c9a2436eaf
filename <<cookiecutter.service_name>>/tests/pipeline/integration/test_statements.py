"""Statements of a handler are spans of its message; large transactions take several INSERTs."""

import asyncio

import asyncpg
import sqlalchemy as sa
from opentelemetry import trace

from pipeline import Handlers, Transaction

from .desk import NewDesk
from .outgoing import event, stage
from .test_trace import SENDER, TRACE, parent_id, sent_in_a_trace, span_id, trace_id
from .test_trace_of_attempts import Finished, finished  # noqa: F401 (a fixture)
from tests.contract.bank import Account, Deposit, Deposited

TOPIC = "deposits"


async def test_events_too_large_for_one_statement_take_several_in_their_order(
    db: asyncpg.Connection,
) -> None:
    events = [event("t", number, payload=b" " * 900_000) for number in range(100)]
    sent: list[str] = []
    db.add_query_logger(lambda query: sent.append(query.query))
    await stage(db, events)
    await asyncio.sleep(0)  # asyncpg reports in the loop's next round
    assert sum("INSERT INTO pipeline.outbox" in text for text in sent) == 3
    found = await db.fetch("SELECT event_id FROM pipeline.outbox ORDER BY id")
    assert [row["event_id"] for row in found] == [one.event_id for one in events]


async def test_what_a_handler_asks_is_a_span_of_its_message_and_what_a_batch_does_is_none(
    new_desk: NewDesk,
    finished: Finished,  # noqa: F811
) -> None:
    handlers = Handlers()

    @handlers.on(Deposited, topic=TOPIC, consumer="look", loads=Account.by("account"))
    async def look(event: Deposited, tx: Transaction) -> None:
        await tx.session.execute(sa.select(sa.func.upper(sa.bindparam("name", "secret"))))
        await tx.session.execute(sa.text("SELECT 'in the text'"))

    desk = await new_desk(handlers, topic=TOPIC)
    await desk.apply(Deposit(1, headers=sent_in_a_trace("01")), Deposit(2, account="bob"))
    asked = [one for one in finished() if one.kind is trace.SpanKind.CLIENT]
    processed = {span_id(one): one for one in finished() if one.kind is trace.SpanKind.CONSUMER}
    assert [parent_id(one) in processed for one in asked] == [True] * 4
    assert trace_id(asked[0]) == TRACE
    assert parent_id(processed[str(parent_id(asked[0]))]) == SENDER
    texts = [(one.attributes or {}).get("db.query.text") for one in asked]
    assert texts == [texts[0], None] * 2, "its values may be in the text"
    assert str(texts[0]).startswith("SELECT upper($1::VARCHAR)")
    assert not any("secret" in one.to_json() for one in asked)


async def test_a_statement_that_fails_is_told_of_with_the_servers_code(
    new_desk: NewDesk,
    finished: Finished,  # noqa: F811
) -> None:
    handlers = Handlers()

    @handlers.on(Deposited, topic=TOPIC, consumer="divide", loads=Account.by("account"))
    async def divide(event: Deposited, tx: Transaction) -> None:
        await tx.session.execute(sa.text("SELECT 1 / 0"))

    desk = await new_desk(handlers, topic=TOPIC)
    await desk.apply(Deposit(1))
    failed = next(one for one in finished() if one.kind is trace.SpanKind.CLIENT)
    assert (failed.attributes or {})["error.type"] == "22012"
    assert failed.status.status_code is trace.StatusCode.ERROR
