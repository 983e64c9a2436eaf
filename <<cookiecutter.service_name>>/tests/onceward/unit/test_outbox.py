"""Staging: the ids of events, what is refused, and how large an event is taken to be."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID
from zoneinfo import ZoneInfo

import asyncpg
import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from opentelemetry import baggage, context, trace
from opentelemetry.trace import SpanContext, TraceFlags, TraceState
from pydantic import (
    BaseModel,
    Field,
    Json,
    PlainSerializer,
    PrivateAttr,
    SecretStr,
    SerializeAsAny,
    computed_field,
)
from pydantic_core import core_schema

import onceward
from onceward import CloudEvents, Codec, Event
from onceward.events.cloudevents import sent_headers
from onceward.events.codec import Encoded, Outgoing
from onceward.events.event import Unpublishable
from onceward.handlers.staged import StagedEvent
from onceward.handlers.staging import Due, Outbox, event_id
from onceward.observe import traces

LIMIT = 10_000


class Told(Event, type="told", topic="told"):
    """Something to tell."""

    text: str = ""
    number: float = 0.0


class ToldAtLength(Told, type="com.example." + "x" * 2_000, topic="told"):
    """An event whose type takes more room than its payload."""


def staged(
    event: Event,
    *,
    key: str | None = None,
    limit: int = LIMIT,
    headers: Mapping[str, str] = {},
    codecs: Mapping[str, Codec] = {},
) -> StagedEvent:
    """Stage one event and return its row."""
    outbox = Outbox("/bank", limit, codecs=codecs)
    outbox.stage(event, id="0" * 32, key=key, sequence=7, headers=headers)
    assert len(outbox) == 1
    return outbox._staged[0]


def size_in_kafka(row: StagedEvent) -> int:
    """Return how large a record batch is that holds the event alone, as the relay sends it."""
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=0, is_transactional=0,
        producer_id=2**62, producer_epoch=2**14, base_sequence=2**30, batch_size=10 * LIMIT,
    )  # fmt: skip
    time = datetime(2026, 12, 31, 23, 59, 59, 999_999, UTC)
    headers = sent_headers(row._asdict() | {"created_at": time})
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
def test_a_staged_event_takes_no_more_space_in_kafka_than_allowed(
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


def sent(row: StagedEvent) -> dict[str, bytes | None]:
    """Return the headers of the row's record."""
    return dict(sent_headers(row._asdict() | {"created_at": datetime.now(UTC)}))


def test_headers_of_an_event_are_sent_beside_those_of_cloudevents() -> None:
    bare = sent(staged(Told()))
    own = {"tenant": "a", "Größe": "ü\x00"}
    found = sent(staged(Told(), headers=own))
    assert found == {**bare, "ce_time": found["ce_time"], "tenant": b"a", "Größe": "ü\x00".encode()}


def test_headers_of_an_event_are_sent_beside_those_of_its_codec() -> None:
    class InFrame(CloudEvents):
        """A codec with a header."""

        def encode(self, event: Outgoing) -> Encoded:
            return Encoded(event.payload, "application/x-frame", [("frame", b"\x00\xff")])

    codecs = {"told": InFrame()}
    row = staged(Told(), headers={"tenant": "ü"}, codecs=codecs)
    assert sent(row) == {"frame": b"\x00\xff", "tenant": "ü".encode()}
    with pytest.raises(Unpublishable, match="the codec of told sets the header 'frame'"):
        staged(Told(), headers={"frame": "1"}, codecs=codecs)


@pytest.mark.parametrize("text", ["x", "ü", "\x00", "€", "🚚"])
def test_headers_of_an_event_count_in_its_size(text: str) -> None:
    fits, too_large = 0, LIMIT
    while too_large - fits > 1:
        size = (fits + too_large) // 2
        try:
            row = staged(Told(), headers={"note": text * size})
        except Unpublishable:
            too_large = size
        else:
            fits = size
            assert size_in_kafka(row) <= LIMIT
    assert fits > LIMIT / 20


@pytest.mark.parametrize("name", ["", "ce_id", "CE_tenant", "Content-Type", "traceparent"])
def test_a_header_that_the_engine_writes_is_refused(name: str) -> None:
    with pytest.raises(Unpublishable, match=f"the header '{name}' is not for you to set"):
        staged(Told(), headers={name: "a"})


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"tenant": b"a"}, "headers are texts by their names, not 'tenant': b'a'"),
        ({1: "a"}, "headers are texts by their names, not 1: 'a'"),
        ({"tenant": "\ud800"}, "the header 'tenant' is not UTF-8"),
        ({"\ud800": "a"}, "is not UTF-8"),
    ],
)
def test_a_header_that_is_no_text_is_refused(headers: Any, reason: str) -> None:
    with pytest.raises(Unpublishable, match=reason):
        staged(Told(), headers=headers)


def test_an_event_that_is_too_large_is_refused_with_both_sizes() -> None:
    with pytest.raises(Unpublishable, match=r"Told takes 10,7\d\d bytes and 10,000 are allowed"):
        staged(Told(text="x" * LIMIT))


def test_an_event_without_a_topic_is_refused() -> None:
    class Lost(Event, type="lost"):
        pass

    with pytest.raises(Unpublishable, match="Lost has no topic"):
        staged(Lost())


class Inner(BaseModel):
    """What an event holds."""

    a: int = 1


class More(Inner):
    """What it does not say it holds."""

    b: int = 2


@dataclass
class Moment:
    """When it was, in a dataclass."""

    at: datetime


class Own:
    """A type of the service's own, whose values are equal to no other."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def __get_pydantic_core_schema__(cls, _: object, __: object) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, cls) else cls(value),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda one: one.name),
        )


class Names(Enum):
    """Some names."""

    ADA = "ada"


def event_with(annotation: Any, value: object, **config: Any) -> Event:
    """Return an event with one field."""

    class Holding(Event, type="holding", topic="held", **config):
        field: annotation

    return Holding.model_validate({"field": value, "alias": value})


def computed() -> Event:
    class Sum(Event, type="sum", topic="held", extra="forbid"):
        field: int = 1

        @computed_field  # type: ignore[prop-decorator]  # as Pydantic's documentation has it
        @property
        def double(self) -> int:
            return 2 * self.field

    return Sum()


BERLIN = ZoneInfo("Europe/Berlin")
TWICE = datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN)
"""In the hour that the clock is set back by: no time of another zone is equal to it."""


@pytest.mark.parametrize(
    "event",
    [
        lambda: Told(number=math.nan),
        lambda: Told(number=math.inf),
        lambda: event_with(float, math.nan, ser_json_inf_nan="constants"),
        lambda: event_with(SecretStr, "secret"),
        lambda: event_with(Inner, More()),
        lambda: event_with(SerializeAsAny[Inner], More()),
        lambda: event_with(list[Inner], [Inner(), More()]),
        lambda: event_with(Annotated[int, Field(alias="alias")], 1),
        lambda: event_with(Annotated[int, Field(validation_alias="alias")], 1),
        lambda: event_with(Annotated[int, Field(exclude=True)], 1),
        lambda: event_with(Annotated[int | None, Field(exclude=True, default=None)], 1),
        lambda: event_with(Annotated[str, PlainSerializer(str.upper)], "abc"),
        lambda: event_with(Annotated[Decimal, PlainSerializer(float)], "12345678901234567.89"),
        lambda: event_with(Json[list[int]], "[1]"),
        lambda: event_with(Any, (1, 2)),
        lambda: event_with(Any, {"at": TWICE}),
        lambda: event_with(int, 1, extra="allow").model_copy(update={"more": (1,)}),
        lambda: event_with(int, 1).model_copy(update={"field": None}),
        computed,
    ],
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_an_event_that_its_class_reads_back_changed_is_refused(
    event: Callable[[], Event],
) -> None:
    with pytest.raises(Unpublishable, match=r"(Told|Holding|Sum).* its own JSON") as info:
        staged(event())
    assert "secret" not in str(info.value).replace("no secret", "")


@pytest.mark.parametrize(
    "event",
    [
        lambda: event_with(datetime, TWICE),
        lambda: event_with(datetime, TWICE.replace(fold=1)),
        lambda: event_with(list[Moment], [Moment(TWICE)]),
        lambda: event_with(dict[str, tuple[datetime, ...]], {"at": (TWICE,)}),
        lambda: event_with(float, math.inf, ser_json_inf_nan="strings"),
        lambda: event_with(list[Inner], [Inner(a=3)]),
        lambda: event_with(Annotated[int, Field(alias="alias")], 1, serialize_by_alias=True),
        lambda: event_with(dict[int, set[UUID]], {1: {UUID(int=1)}}),
        lambda: event_with(list[Names], ["ada"]),
        lambda: event_with(Names, "ada", use_enum_values=True),
        lambda: event_with(Own, "x"),
        lambda: event_with(bytes, b"x"),
        lambda: event_with(timedelta, timedelta(microseconds=-1)),
        lambda: event_with(Decimal, "1.50"),
        lambda: event_with(Any, [1, 1.5, {"a": None}]),
    ],
)
def test_an_event_that_its_own_class_reads_as_it_was_is_taken(event: Callable[[], Event]) -> None:
    assert staged(event()).payload


def test_what_an_event_keeps_to_itself_is_no_part_of_it() -> None:
    class Private(Told, type="private"):
        _lock: object = PrivateAttr(default_factory=object)

        @cached_property
        def length(self) -> int:
            return len(self.text)

    event = Private(text="abc")
    assert event.length == 3
    assert staged(event).payload == b'{"text":"abc","number":0.0}'


def test_an_effect_is_given_events_of_its_own_class_only() -> None:
    class ToldMore(Told, type="told"):
        more: int = 1

    outbox = Outbox("/bank", LIMIT, call_types={"told": Told})
    outbox.call(Told(), id="1", key=None)
    with pytest.raises(TypeError, match="no effect takes ToldMore, but Told, which has its type"):
        outbox.call(ToldMore(), id="2", key=None)
    assert len(outbox.calls) == 1


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


def test_events_staged_concurrently_by_threads_have_their_own_contexts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outbox = Outbox("source", LIMIT)
    ours, theirs = (baggage.set_baggage("n", n, context.Context()) for n in ("ours", "theirs"))
    inject = traces.creation_context

    def stage(id: str, one: context.Context) -> None:
        outbox.stage(Told(), id=id, key=None, sequence=1, context=one)

    def interrupted(one: context.Context) -> traces.TraceHeaders:
        if one is ours:
            stage("theirs", theirs)
        return inject(one)

    monkeypatch.setattr(traces, "creation_context", interrupted)
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
    sources = list(Path(onceward.__file__).parent.rglob("*.py"))
    assert len(sources) > 20
    for source in sources:
        assert not re.search(r"\b(NOTIFY|LISTEN|pg_notify|add_listener)\b", source.read_text())


def test_an_event_due_in_a_thousand_years_is_refused_when_published() -> None:
    assert Due.check(None, timedelta(days=36_525), None).name is None
    with pytest.raises(Unpublishable, match="100 years at most"):
        Due.check(None, timedelta(days=365_250), None)
