"""How long statements take is told, of each once; those of a handler are spans in its message's."""

import asyncio
from collections import Counter
from collections.abc import Callable

import asyncpg
import pytest
import sqlalchemy as sa
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader

from onceward import Handlers, Transaction
from onceward.observe import buffer, statements

from .applier import Applier, NewApplier
from .bank import Bank
from .outgoing import event, stage
from .test_trace import SENDER, TRACE, parent_id, sent_in_a_trace, span_id, trace_id
from .test_trace_of_attempts import Finished, finished  # noqa: F401 (a fixture)
from tests.contract.bank import Account, Deposit, Deposited

TOPIC = "deposits"
Counted = Callable[[], Counter[str]]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Return how many statements of each kind were told of, with what has failed."""
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("test")
    monkeypatch.setattr(statements, "_duration", meter.create_histogram("x"))

    def count() -> Counter[str]:
        found: Counter[str] = Counter()
        buffer.flush()
        data = reader.get_metrics_data()
        for resource in data.resource_metrics if data else ():
            for point in resource.scope_metrics[0].metrics[0].data.data_points:
                assert isinstance(point, HistogramDataPoint)
                attributes = dict(point.attributes or {})
                words = (attributes["db.query.summary"], attributes.get("error.type", ""))
                found[" ".join(map(str, words)).strip()] += point.count
        return found

    return count


def deposits(first: int) -> list[Deposit]:
    return [Deposit(number, account=f"of {number % 10}") for number in range(first, first + 20)]


async def test_each_statement_of_a_batch_is_told_of_once(
    ledger: tuple[Bank, Applier], counted: Counted
) -> None:
    """SQLAlchemy's and asyncpg's own, and many at once."""
    _, applier = ledger
    await applier.apply(*deposits(0))
    position = await applier.position()
    await asyncio.sleep(0)  # asyncpg reports in the loop's next round
    before = counted()
    await applier.apply(*deposits(20), start=position)
    await asyncio.sleep(0)
    words = dict.fromkeys(("BEGIN", "UPDATE", "COMMIT"), 1)
    assert counted() - before == {"SELECT": 2, "INSERT": 2, "WITH": 2} | words


async def test_events_too_large_for_one_statement_take_several_in_their_order(
    db: asyncpg.Connection, counted: Counted
) -> None:
    events = [event("t", number, payload=b" " * 900_000) for number in range(100)]
    db.add_query_logger(lambda query: statements.executed(query.query, 0, None))
    await stage(db, events)
    await asyncio.sleep(0)
    assert counted()["INSERT"] == 3
    found = await db.fetch("SELECT event_id FROM pipeline.outbox ORDER BY id")
    assert [row["event_id"] for row in found] == [one.event_id for one in events]


async def test_only_a_handlers_own_queries_are_spans_of_its_message(
    new_applier: NewApplier,
    finished: Finished,  # noqa: F811
) -> None:
    handlers = Handlers()

    @handlers.on(Deposited, topic=TOPIC, consumer="look", loads=Account.by("account"))
    async def look(event: Deposited, tx: Transaction) -> None:
        await tx.session.execute(sa.select(sa.func.upper(sa.bindparam("name", "secret"))))
        await tx.session.execute(sa.text("SELECT 'in the text'"))

    applier = await new_applier(handlers, topic=TOPIC)
    await applier.apply(Deposit(1, headers=sent_in_a_trace("01")), Deposit(2, account="bob"))
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
    new_applier: NewApplier,
    finished: Finished,  # noqa: F811
    counted: Counted,
) -> None:
    handlers = Handlers()

    @handlers.on(Deposited, topic=TOPIC, consumer="divide", loads=Account.by("account"))
    async def divide(event: Deposited, tx: Transaction) -> None:
        await tx.session.execute(sa.text("SELECT 1 / 0"))

    applier = await new_applier(handlers, topic=TOPIC)
    await applier.apply(Deposit(1))
    failed = next(one for one in finished() if one.kind is trace.SpanKind.CLIENT)
    assert (failed.attributes or {})["error.type"] == "22012"
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert counted()["SELECT 22012"] >= 1
