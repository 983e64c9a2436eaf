"""The trace of what does not go through at once: retries, redrives, scheduled events."""

import json
import logging
from collections.abc import Callable
from datetime import timedelta

import asyncpg
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from onceward import Event, EventBatch, Handlers, Reject, Transaction
from onceward.observe import logs, metrics, traces

from .applier import Applier, NewApplier
from .bank import Bank
from .test_dead import redrive
from .test_scheduled import move_all
from .test_trace import SENDER, TRACE, parent_id, sent_in_a_trace, span_id, trace_id
from tests.contract.bank import Account, Deposit, Deposited

TOPIC = "deposits"
IN_A_TRACE = sent_in_a_trace("01")
TRACEPARENT = dict(IN_A_TRACE)["traceparent"]
IN_NONE: tuple[tuple[str, bytes], ...] = ()
Finished = Callable[[], list[ReadableSpan]]


class Answer(Event, type="answer", topic="answers"):
    """What is to be said later."""

    text: str


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> Finished:
    """Record every trace, also one that begins here; returns the spans so far, in their order."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampling.ALWAYS_ON, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(traces, "_tracer", provider.get_tracer("test"))
    return lambda: list(exporter.get_finished_spans())


def of(spans: list[ReadableSpan], consumer: str) -> list[ReadableSpan]:
    return [one for one in spans if (one.attributes or {})[metrics.CONSUMER] == consumer]


def linked(span: ReadableSpan) -> list[str]:
    return [trace.format_span_id(link.context.span_id) for link in span.links]


def check_attempts(spans: list[ReadableSpan], *, parent: str | None) -> None:
    """Check that all are in one trace, and each but the first links to that one."""
    first, *others = spans
    assert {trace_id(one) for one in spans} == {trace_id(first)}
    assert parent_id(first) == parent
    assert linked(first) == []
    for one in others:
        assert linked(one) == [span_id(first)]
        # Without a sender's it is the first attempt that holds the trace together.
        assert parent_id(one) == (parent or span_id(first))


async def test_the_lines_about_a_message_are_of_its_attempt(
    ledger: tuple[Bank, Applier], finished: Finished, caplog: pytest.LogCaptureFixture
) -> None:
    bank, applier = ledger
    bank.errors = {1: Reject("no"), 2: ValueError("not yet")}
    caplog.handler.setFormatter(logs.JsonLines())
    caplog.set_level(logging.WARNING, "onceward.apply.outcome")
    await applier.apply(
        Deposit(1, headers=IN_A_TRACE),
        Deposit(2, "bob"),
        Deposit(3, "carol", value=b"{}", headers=IN_A_TRACE),
    )
    await applier.work_off()
    told = {line["message_id"]: line for line in map(json.loads, caplog.text.splitlines())}
    assert {id: line["key"] for id, line in told.items()} == {"1": "ada", "2": "bob", "3": "carol"}
    spans = {(one.attributes or {})["messaging.message.id"]: one for one in finished()}
    for id in ("1", "2"):
        assert told[id]["trace_id"] == trace_id(spans[id])
        assert told[id]["span_id"] == span_id(spans[id])
    assert told["1"]["trace_id"] == TRACE
    # No handler has seen it: what is known is where it comes from.
    assert (told["3"]["trace_id"], told["3"]["span_id"]) == (TRACE, SENDER)


async def test_an_undecodable_records_log_line_has_its_headers_id_and_trace(
    ledger: tuple[Bank, Applier], caplog: pytest.LogCaptureFixture
) -> None:
    _, applier = ledger
    caplog.handler.setFormatter(logs.JsonLines())
    caplog.set_level(logging.WARNING, "onceward.apply.outcome")
    of_the_past = ("CE_SpecVersion", b"0.3")
    await applier.apply(
        Deposit(1, headers=(*IN_A_TRACE, of_the_past)),
        Deposit(2, "bob", headers=(("ce_id", b"\xff"), ("traceparent", b"nonsense"))),
        Deposit(3, "carol", headers=(of_the_past, ("ce_id", b""), ("traceparent", TRACEPARENT))),
    )
    told = [json.loads(line) for line in caplog.text.splitlines()]
    names = "offset", "reason", "message_id", "trace_id", "span_id"
    assert [tuple(line.get(name) for name in names) for line in told] == [
        (0, "unsupported specversion", "1", TRACE, SENDER),
        (1, "invalid attribute", None, None, None),
        (2, "unsupported specversion", "3", TRACE, SENDER),
    ]


@pytest.mark.parametrize(("headers", "parent"), [(IN_A_TRACE, SENDER), (IN_NONE, None)])
async def test_every_attempt_is_a_span_that_links_to_the_first(
    ledger: tuple[Bank, Applier],
    finished: Finished,
    headers: tuple[tuple[str, bytes], ...],
    parent: str | None,
) -> None:
    bank, applier = ledger
    bank.refused.add(1)
    await applier.apply(Deposit(1, headers=headers), Deposit(2, headers=headers))
    for _ in range(2):
        await applier.make_due()
        await applier.work_off()
    bank.refused.clear()
    await applier.make_due()
    await applier.work_off()
    offset = "messaging.kafka.offset"
    attempts = [one for one in finished() if (one.attributes or {})[offset] == 0]
    assert bank.calls.count(1) == len(attempts) == 4
    check_attempts(attempts, parent=parent)


async def test_an_attempt_refused_only_at_flush_is_linked_as_well(
    new_applier: NewApplier, finished: Finished
) -> None:
    handlers = Handlers()

    @handlers.on(Deposited, topic=TOPIC, consumer="open")
    async def open_account(event: Deposited, tx: Transaction) -> None:
        tx.session.add(Account(event.account))

    applier = await new_applier(handlers, topic=TOPIC)
    await applier.apply(Deposit(1))
    await applier.apply(Deposit(2))
    before = finished()[1:]
    await applier.make_due()
    await applier.work_off()
    later = finished()[1 + len(before) :]
    assert before
    assert later
    # In place it was tried more than once; the latest of these has been judged.
    assert {tuple(linked(one)) for one in later} == {(span_id(before[-1]),)}
    assert {trace_id(one) for one in later} == {trace_id(before[-1])}


async def test_a_handler_of_batches_links_its_attempts_too(
    new_applier: NewApplier, finished: Finished
) -> None:
    handlers = Handlers()

    @handlers.on_batch(Deposited, topic=TOPIC, consumer="sum")
    async def sum_up(events: EventBatch[Deposited]) -> None:
        if any(event.amount == 1 for event, _ in events):
            raise LookupError("not yet")

    applier = await new_applier(handlers, topic=TOPIC)
    await applier.apply(Deposit(1))
    await applier.make_due()
    await applier.work_off()
    check_attempts(finished(), parent=None)
    assert len(finished()) == 2


async def test_a_dead_letter_that_is_redriven_stays_in_its_trace(
    ledger: tuple[Bank, Applier], finished: Finished
) -> None:
    bank, applier = ledger
    bank.errors[1] = Reject("no")
    await applier.apply(Deposit(1))
    (row,) = await applier.backlog()
    assert row["died_at"] is not None
    bank.errors.clear()
    await redrive(applier)
    await applier.work_off()
    assert bank.calls == [1, 1]
    check_attempts(finished(), parent=None)


async def test_what_was_never_attempted_links_to_nothing(
    ledger: tuple[Bank, Applier], finished: Finished
) -> None:
    bank, applier = ledger
    bank.refused.add(1)
    await applier.apply(Deposit(1), Deposit(2, headers=IN_A_TRACE))  # waits behind the first
    bank.refused.clear()
    await applier.make_due()
    await applier.work_off()
    *_, waited = finished()
    assert (trace_id(waited), parent_id(waited), linked(waited)) == (TRACE, SENDER, [])


async def test_a_trace_that_is_not_recorded_is_handed_on_by_every_attempt(
    ledger: tuple[Bank, Applier], finished: Finished, db: asyncpg.Connection
) -> None:
    bank, applier = ledger
    bank.refused.add(1)
    await applier.apply(Deposit(1, headers=sent_in_a_trace("00")))
    bank.refused.clear()
    await applier.make_due()
    await applier.work_off()
    assert finished() == []
    handed_on = await db.fetchval("SELECT traceparent FROM pipeline.outbox")
    assert handed_on == f"00-{TRACE}-{SENDER}-00"


async def test_a_scheduled_event_is_published_in_the_trace_of_what_staged_it(
    new_applier: NewApplier, finished: Finished, db: asyncpg.Connection
) -> None:
    handlers = Handlers()

    @handlers.on(Deposited, topic=TOPIC, consumer="remind")
    async def remind(event: Deposited, tx: Transaction) -> None:
        tx.publish(Answer(text="later"), after=timedelta(hours=1))

    applier = await new_applier(handlers, topic=TOPIC)
    headers = sent_in_a_trace("01", tracestate="vendor=1", baggage="tenant=7")
    await applier.apply(Deposit(1, headers=headers))
    await db.execute("UPDATE pipeline.scheduled SET due_at = now()")
    await move_all(db)
    (span,) = finished()
    row = await db.fetchrow("SELECT traceparent, tracestate, baggage FROM pipeline.outbox")
    created = f"00-{TRACE}-{span_id(span)}-01"
    assert tuple(row or ()) == (created, "vendor=1", "tenant=7")
