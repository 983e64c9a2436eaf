"""Staging: the ids of events, what is refused, and how large an event is taken to be."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path

import asyncpg
import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from opentelemetry import baggage, context, trace
from opentelemetry.trace import SpanContext, TraceFlags, TraceState

import pipeline
from pipeline import Event, telemetry
from pipeline.message import event_headers
from pipeline.outbox import Due, Outbox, StagedEvent, Unpublishable, event_id

LIMIT = 10_000


class Told(Event, type="told", topic="told"):
    """Something to tell."""

    text: str = ""
    number: float = 0.0


class ToldAtLength(Told, type="com.example." + "x" * 2_000, topic="told"):
    """An event whose type takes more room than its payload."""


def staged(event: Event, *, key: str | None = None, limit: int = LIMIT) -> StagedEvent:
    """Stage one event and return its row."""
    outbox = Outbox("/bank", limit)
    outbox.stage(event, id="0" * 32, key=key, sequence=7)
    assert len(outbox) == 1
    return outbox._staged[0]


def size_in_kafka(row: StagedEvent) -> int:
    """Return how large a record batch is that holds the event alone, as the relay sends it."""
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=0, is_transactional=0,
        producer_id=2**62, producer_epoch=2**14, base_sequence=2**30, batch_size=10 * LIMIT,
    )  # fmt: skip
    headers = event_headers(
        id=row.event_id,
        source=row.source,
        type=row.type,
        time=datetime(2026, 12, 31, 23, 59, 59, 999_999, UTC),
        subject=row.subject,
        sequence=row.sequence,
        content_type=row.content_type,
        traceparent=row.traceparent,
        tracestate=row.tracestate,
        baggage=row.baggage,
    )
    builder.append(0, 2**42, row.key, row.payload, headers=headers)
    return len(builder.build())


@pytest.fixture
def traced() -> Iterator[None]:
    """Run the test within a trace that carries much."""
    state = TraceState([(f"vendor{n}", "v" * 200) for n in range(5)])
    span = trace.NonRecordingSpan(SpanContext(2**127, 2**63, True, TraceFlags(1), state))
    token = context.attach(baggage.set_baggage("user", "ü" * 300, trace.set_span_in_context(span)))
    yield
    context.detach(token)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("key", [None, "k", "ключ" * 200], ids=["no key", "short key", "long key"])
@pytest.mark.parametrize("kind", [Told, ToldAtLength])
def test_an_event_that_is_staged_takes_no_more_room_in_kafka_than_is_allowed(
    kind: type[Told], key: str | None
) -> None:
    """Trap 6: the largest text that staging lets pass, with all that goes beside it."""
    fits, too_large = 0, LIMIT
    while too_large - fits > 1:
        size = (fits + too_large) // 2
        try:
            row = staged(kind(text="x" * size), key=key)
        except Unpublishable:
            too_large = size
        else:
            fits = size
            assert size_in_kafka(row) <= LIMIT
    assert row.baggage is not None
    assert row.tracestate is not None
    assert fits > LIMIT / 10


def test_an_event_that_is_too_large_is_refused_with_both_sizes() -> None:
    with pytest.raises(Unpublishable, match=r"Told takes 10,7\d\d bytes and 10,000 are allowed"):
        staged(Told(text="x" * LIMIT))


@pytest.mark.parametrize("topic", [None, "", ".", "..", "a b", "ä", "a/b", "x" * 250, "a\n"])
def test_a_topic_that_kafka_can_not_have_is_refused(topic: str | None) -> None:
    class Lost(Event, type="lost", topic=topic):
        pass

    with pytest.raises(Unpublishable, match="Lost has "):
        staged(Lost())


@pytest.mark.parametrize("topic", ["a", "A-b_c.9", "x" * 249, "..."])
def test_a_topic_that_kafka_can_have_is_taken(topic: str) -> None:
    class Sent(Event, type="sent", topic=topic):
        pass

    assert staged(Sent()).topic == topic


@pytest.mark.parametrize("key", ["\x00", "a\x00b", "\ud800"])
def test_a_key_that_can_not_be_stored_is_refused(key: str) -> None:
    with pytest.raises(Unpublishable):
        staged(Told(), key=key)


def test_a_payload_that_is_no_text_is_refused() -> None:
    with pytest.raises(Unpublishable, match="UTF-8"):
        staged(Told(text="\udfff"))


def test_what_is_refused_leaves_nothing_staged() -> None:
    outbox = Outbox("/bank", LIMIT)
    for event, key in ((Told(text="x" * LIMIT), None), (Told(), "\x00"), (Told(text="\ud800"), "")):
        with pytest.raises(Unpublishable):
            outbox.stage(event, id="1", key=key, sequence=None)
    assert len(outbox) == 0


def test_a_row_has_what_the_event_and_the_engine_say_of_it() -> None:
    row = staged(Told(text="ä"), key="schlüssel")
    assert row._asdict() == {
        "topic": "told",
        "key": "schlüssel".encode(),
        "payload": '{"text":"ä","number":0.0}'.encode(),
        "event_id": "0" * 32,
        "source": "/bank",
        "type": "told",
        "subject": "schlüssel",
        "sequence": 7,
        "content_type": "application/json",
        "traceparent": None,
        "tracestate": None,
        "baggage": None,
        "headers": None,
        "dataref": None,
        "datalength": None,
        "datachecksum": None,
    }


def test_each_event_has_the_context_that_it_was_staged_in() -> None:
    """Also one without a trace, which is a context that is empty; and in whatever order."""

    class Named(Event, type="named", topic="named"):
        """An event."""

    outbox = Outbox("source", LIMIT)
    contexts = [baggage.set_baggage("n", number, context.Context()) for number in (1, 2)]
    token = context.attach(baggage.set_baggage("n", "current"))
    try:
        for one in (*contexts, *contexts, contexts[1], None, context.Context(), None):
            outbox.stage(Named(), id="event_id", key="key", sequence=1, context=one)
    finally:
        context.detach(token)
    found = [row.baggage for row in outbox._staged]
    assert found == ["n=1", "n=2", "n=1", "n=2", "n=2", "n=current", None, "n=current"]


def test_an_event_that_a_thread_stages_between_has_its_own_context_and_so_have_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outbox = Outbox("source", LIMIT)
    ours, theirs = (baggage.set_baggage("n", n, context.Context()) for n in ("ours", "theirs"))
    inject = telemetry.creation_context

    def stage(id: str, one: context.Context) -> None:
        outbox.stage(Told(), id=id, key=None, sequence=1, context=one)

    def interrupted(one: context.Context) -> telemetry.TraceHeaders:
        if one is ours:
            stage("theirs", theirs)
        return inject(one)

    monkeypatch.setattr(telemetry, "creation_context", interrupted)
    stage("ours", ours)
    stage("theirs", theirs)
    assert [(row.event_id, row.baggage) for row in outbox._staged] == [
        ("theirs", "n=theirs"),
        ("ours", "n=ours"),
        ("theirs", "n=theirs"),
    ]


def test_an_event_id_differs_when_anything_differs_that_it_is_made_of() -> None:
    parts = [(b"m" * 16, b"1" * 16), (b"h" * 16, b"1" * 16), (0, 1, 11)]
    ids = {event_id(*combination) for combination in product(*parts)}  # type: ignore[arg-type]
    assert len(ids) == 2 * 2 * 3


def test_an_event_id_is_the_same_in_every_release() -> None:
    """A restart in the middle of an upgrade must not make a new event of an old one."""
    assert event_id(b"\x00" * 16, b"\x01" * 16, 0) == "e32fcad4bd076e6887be84c3d0d713fc"


async def test_nothing_staged_needs_no_connection() -> None:
    connection: asyncpg.Connection = None
    await Outbox("/bank", LIMIT).write(connection)


def test_the_engine_neither_notifies_nor_listens() -> None:
    """Trap 18: NOTIFY takes a lock of the whole cluster at commit, and poolers drop LISTEN."""
    sources = list(Path(pipeline.__file__).parent.rglob("*.py"))
    assert len(sources) > 20
    for source in sources:
        assert not re.search(r"\b(NOTIFY|LISTEN|pg_notify|add_listener)\b", source.read_text())


def test_an_event_that_is_due_in_a_thousand_years_is_refused_where_it_is_published() -> None:
    assert Due.check(None, timedelta(days=36_525), None).name is None
    with pytest.raises(Unpublishable, match="100 years at most"):
        Due.check(None, timedelta(days=365_250), None)
