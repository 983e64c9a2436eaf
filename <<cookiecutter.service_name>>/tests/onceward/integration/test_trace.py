"""One trace from the sender through consume, handler, outbox and relay to the next consumer."""

from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from onceward import Event, Handlers, Service, Transaction
from onceward.observe import exporters, traces
from onceward.relay.window import Page, fresh
from onceward.runtime import Part

from .bank import Bank
from tests.conftest import Records, Running
from tests.contract.bank import Base, Deposit
from tests.servers.waiting import eventually

NewTopic = Callable[..., Awaitable[str]]
TRACE = "0af7651916cd43dd8448eb211c80319c"
SENDER = "b7ad6b7169203331"


def sent_in_a_trace(flags: str, **more: str) -> tuple[tuple[str, bytes], ...]:
    """Return the headers that a sender inside a trace adds."""
    headers = {"traceparent": f"00-{TRACE}-{SENDER}-{flags}", **more}
    return tuple((name, value.encode()) for name, value in headers.items())


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Record the spans of both services; a trace that begins here is not recorded."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(
        sampling.ParentBased(exporters._LinkedOrRatio(0)), shutdown_on_exit=False
    )
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(traces, "_tracer", provider.get_tracer("test"))
    return exporter


class Auditor:
    """A second service, which reads what the bank publishes, and publishes nothing."""

    def __init__(self, balances: str) -> None:
        self.heard: list[int] = []
        self.current: list[str] = []
        handlers = Handlers()

        class BalanceHeard(Event, type="balance.changed"):
            amount: int

        @handlers.on(BalanceHeard, topic=balances, consumer="audit")
        async def audit(event: BalanceHeard, tx: Transaction) -> None:
            context = trace.get_current_span().get_span_context()
            self.current.append(trace.format_trace_id(context.trace_id))
            self.heard.append(event.amount)

        self.service = Service(f"auditor-{balances}", handlers=handlers, metadata=Base.metadata)


def trace_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return trace.format_trace_id(span.context.trace_id)


def span_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return trace.format_span_id(span.context.span_id)


def parent_id(span: ReadableSpan) -> str | None:
    return None if span.parent is None else trace.format_span_id(span.parent.span_id)


def header(record_headers: object, name: str) -> str | None:
    value = dict(record_headers).get(name)  # type: ignore[call-overload]
    return None if value is None else value.decode()


async def test_one_trace_runs_through_two_services(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    records: Records,
    spans: InMemorySpanExporter,
) -> None:
    auditor = Auditor(bank.balances)
    more = {"tracestate": "vendor=1", "baggage": "tenant=7"}
    await Deposit(5, headers=sent_in_a_trace("01", **more)).send(producer, bank.deposits)
    async with running(bank.service), running(auditor.service, Part.CONSUME):
        await eventually(lambda: auditor.heard == [5])
        await eventually(lambda: len(spans.get_finished_spans()) == 3)
    found = {span.name: span for span in spans.get_finished_spans()}
    consumed, sent = found[f"process {bank.deposits}"], found[f"send {bank.balances}"]
    audited = found[f"process {bank.balances}"]
    # The handler's span is the child of the sender's; its context is stored and travels.
    assert (trace_id(consumed), parent_id(consumed)) == (TRACE, SENDER)
    created = f"00-{TRACE}-{span_id(consumed)}-01"
    row = await db.fetchrow("SELECT traceparent, tracestate, baggage FROM pipeline.outbox")
    assert tuple(row or ()) == (created, "vendor=1", "tenant=7")
    (record,) = await records(bank.balances, 1)
    for name, value in {"traceparent": created, **more}.items():
        assert header(record.headers, name) == value
    # The relay's span is in a trace of its own and links to the event's.
    assert trace_id(sent) != TRACE
    assert sent.parent is None
    assert [trace.format_span_id(link.context.span_id) for link in sent.links] == [
        span_id(consumed)
    ]
    assert (trace_id(audited), parent_id(audited)) == (TRACE, span_id(consumed))
    assert auditor.current == [TRACE]
    assert (
        await db.fetchval(
            "SELECT count(*) FROM pipeline.inbox WHERE traceparent LIKE $1", f"%{TRACE}%"
        )
        == 2
    )


async def test_a_trace_that_is_not_recorded_passes_through_without_a_span(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    records: Records,
    spans: InMemorySpanExporter,
) -> None:
    auditor = Auditor(bank.balances)
    await Deposit(5, headers=sent_in_a_trace("00")).send(producer, bank.deposits)
    async with running(bank.service), running(auditor.service, Part.CONSUME):
        await eventually(lambda: auditor.heard == [5])
        (record,) = await records(bank.balances, 1)
    assert spans.get_finished_spans() == ()
    assert header(record.headers, "traceparent") == f"00-{TRACE}-{SENDER}-00"
    assert auditor.current == [TRACE]


async def test_one_send_links_to_every_event_that_it_carries(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    records: Records,
    spans: InMemorySpanExporter,
) -> None:
    for amount in range(1, 6):
        await Deposit(amount, headers=sent_in_a_trace("01")).send(producer, bank.deposits)
    async with running(bank.service, Part.CONSUME):
        await eventually(lambda: len(spans.get_finished_spans()) == 5)
    handled = {span_id(span) for span in spans.get_finished_spans()}
    spans.clear()
    async with running(bank.service, Part.RELAY):
        await records(bank.balances, 5)
        await eventually(lambda: len(spans.get_finished_spans()) == 1)
    (sent,) = spans.get_finished_spans()
    assert {trace.format_span_id(link.context.span_id) for link in sent.links} == handled
    assert dict(sent.attributes or {})["messaging.batch.message_count"] == 5


async def test_a_handler_that_raises_marks_its_span_and_not_the_message_text(
    bank: Bank, running: Running, producer: AIOKafkaProducer, spans: InMemorySpanExporter
) -> None:
    bank.refused.add(666)
    await Deposit(666, headers=sent_in_a_trace("01")).send(producer, bank.deposits)
    async with running(bank.service):
        await eventually(lambda: len(spans.get_finished_spans()) > 0)
    span = spans.get_finished_spans()[0]
    assert span.status.status_code is trace.StatusCode.ERROR
    assert dict(span.attributes or {})["error.type"] == "Refused"
    assert "666 is refused" not in span.to_json()


async def test_a_service_that_has_nothing_to_do_records_nothing(
    bank: Bank, running: Running, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 26."""
    provider = TracerProvider(sampling.ALWAYS_ON, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(traces, "_tracer", provider.get_tracer("test"))
    polls = 0

    async def polled(*args: Any) -> Page:
        nonlocal polls
        polls += 1
        return await fresh(*args)

    monkeypatch.setattr("onceward.relay.relay.fresh", polled)
    async with running(bank.service) as health:
        await eventually(lambda: not health.reasons)
        await eventually(lambda: polls > 10)
    assert spans.get_finished_spans() == ()
