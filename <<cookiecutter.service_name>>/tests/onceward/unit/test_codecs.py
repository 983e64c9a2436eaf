"""Records as other frameworks write them, and what is published in their forms."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import MetaData

from onceward import (
    CloudEvents,
    Codec,
    Event,
    Handlers,
    Service,
    Transaction,
)
from onceward.errors import StoreUnavailable
from onceward.events import message
from onceward.events.codec import Encoded, Outgoing
from onceward.events.event import Unpublishable
from onceward.events.message import Message, Reason, Undecodable, headers_of
from onceward.events.payload import payload_hash
from onceward.handlers.staged import StagedEvent
from onceward.handlers.staging import Outbox
from onceward.plain import Header, PayloadFields, Plain, Position
from onceward.plain.codec import Identity
from onceward.testing import plugin

TYPE = "order.placed.v1"
ID = "4d47e190-0402-4048-bc2c-89dd54343cdc"
DATA = b'{"orderId": 1, "total": 59.970}'
ORDER = b'{"orderId":1,"total":59.970}'
"""The data, as it is written when it is taken out of a payload: with all digits."""
AS_TEXT = json.dumps(DATA.decode()).encode()


class OrderPlaced(Event, type=TYPE, topic="orders"):
    """An order was placed."""

    orderId: int  # as in the records


class Record(NamedTuple):
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    topic: str = "orders"
    partition: int = 3
    offset: int = 17
    timestamp: int = 1_700_000_000_123
    key: bytes | None = b"1"


def undecodable(codec: Codec, record: Record) -> Undecodable:
    with pytest.raises(Undecodable) as caught:
        codec.decode(record)
    return caught.value


def published(codec: Codec, event: Event, id: str = ID) -> Record:
    """Return the record of an event that a handler has published to a topic of this codec."""
    outbox = Outbox("/shop", 1_000_000, codecs={"orders": codec})
    outbox.stage(event, id=id, key="1", sequence=None)
    (row,) = outbox.events
    assert row.headers is not None
    return Record(row.payload, headers_of(row.headers), key=row.key)


DEBEZIUM = Plain(Header("eventType"), Header("id"), types={"OrderPlaced": TYPE})
DEBEZIUM_ENVELOPE = Plain(
    Header("eventType"), Header("id"), data="payload", types={"OrderPlaced": TYPE}
)
SPRING = Plain(
    Header("__TypeId__"),
    PayloadFields("orderId"),
    types={"com.example.shop.OrderPlaced": TYPE},
)
MASS_TRANSIT = Plain(
    PayloadFields("messageType.0"),
    PayloadFields("messageId"),
    data="message",
    types={"urn:message:Shop:OrderPlaced": TYPE},
    content_type="application/vnd.masstransit+json",
)
JAVA = Plain(PayloadFields("type"), PayloadFields("id"), data="order", types={"PLACED": TYPE})

DEBEZIUM_HEADERS: list[tuple[str, bytes | None]] = [
    ("id", ID.encode()),
    ("eventType", b"OrderPlaced"),
]
MASS_TRANSIT_ENVELOPE = {
    "messageId": ID,
    "requestId": None,
    "correlationId": None,
    "conversationId": "08dc3a1e-7f4e-1c6b-00ff-5c3a1e7f4e1c",
    "initiatorId": None,
    "sourceAddress": "loopback://localhost/kafka",
    "destinationAddress": "loopback://localhost/kafka/orders",
    "responseAddress": None,
    "faultAddress": None,
    "messageType": ["urn:message:Shop:OrderPlaced", "urn:message:Shop:IOrderEvent"],
    "message": {"orderId": 1, "total": "TOTAL"},
    "expirationTime": None,
    "sentTime": "2026-03-01T10:15:30.1234567Z",
    "headers": {},
    "host": {"machineName": "shop-1", "processName": "Shop", "processId": 1},
}
WITH_SCHEMA = b'{"schema":{"type":"string","optional":true},"payload":%b}'


@pytest.mark.parametrize(
    ("codec", "value", "headers", "id", "data"),
    [
        (DEBEZIUM, DATA, DEBEZIUM_HEADERS, ID, DATA),
        (DEBEZIUM, AS_TEXT, DEBEZIUM_HEADERS, ID, ORDER),
        (DEBEZIUM_ENVELOPE, WITH_SCHEMA % AS_TEXT, DEBEZIUM_HEADERS, ID, ORDER),
        (DEBEZIUM_ENVELOPE, WITH_SCHEMA % DATA, DEBEZIUM_HEADERS, ID, ORDER),
        (
            Plain(
                PayloadFields("eventType"),
                Header("id"),
                data="payload",
                types={"OrderPlaced": TYPE},
            ),
            b'{"eventType": "OrderPlaced", "payload": %b}' % AS_TEXT,
            DEBEZIUM_HEADERS[:1],
            ID,
            ORDER,
        ),
        (SPRING, DATA, [("__TypeId__", b"com.example.shop.OrderPlaced")], 1, DATA),
        (
            MASS_TRANSIT,
            json.dumps(MASS_TRANSIT_ENVELOPE).encode().replace(b'"TOTAL"', b"59.970"),
            [("Content-Type", b"application/vnd.masstransit+json")],
            ID,
            ORDER,
        ),
        (JAVA, b'{"type": "PLACED", "id": "7", "order": %b}' % DATA, [], "7", ORDER),
    ],
    ids=[
        "Debezium with the string converter",
        "Debezium with the JSON converter, payload not expanded",
        "Debezium with the JSON converter and schemas, payload not expanded",
        "Debezium with the JSON converter and schemas, payload expanded",
        "Debezium with the type in the envelope",
        "Spring Kafka",
        "MassTransit",
        "plain Java",
    ],
)
def test_a_record_is_read_as_the_framework_writes_it(
    codec: Codec,
    value: bytes,
    headers: list[tuple[str, bytes | None]],
    id: str | int,
    data: bytes,
) -> None:
    message = codec.decode(Record(value, headers))

    assert (message.source, message.type) == ("kafka:orders", TYPE)
    assert isinstance(codec, Plain)
    assert isinstance(codec.types, dict)
    name = next(iter(codec.types), TYPE)
    assert message.id == json.dumps([name, id], separators=(",", ":"))
    assert message.data == data
    in_json = CloudEvents().decode(
        Record(
            DATA,
            [
                ("ce_specversion", b"1.0"),
                ("ce_id", b"1"),
                ("ce_source", b"/"),
                ("ce_type", name.encode()),
                ("content-type", b"application/json"),
            ],
        )
    )
    assert message.hash == in_json.hash


SOURCE = b"""{"version": "3.7.0.Final", "connector": "postgresql", "name": "shop",
 "ts_ms": 1700000000000, "snapshot": "false", "db": "shop", "sequence": "[null,\\"34498112\\"]",
 "schema": "public", "table": "order", "txId": 771, "lsn": 34498112, "xmin": null}"""
CHANGE = b'{"before": %b, "after": %b, "source": %b, "op": "%b", "transaction": null}'
ROW = b'{"id": 1, "state": "new"}'


@pytest.mark.parametrize("has_schema", [False, True])
@pytest.mark.parametrize(
    ("op", "before", "after"),
    [(b"c", b"null", ROW), (b"r", b"null", ROW), (b"u", ROW, ROW), (b"d", ROW, b"null")],
)
def test_a_row_change_is_read_by_the_codec_of_its_page(
    op: bytes, before: bytes, after: bytes, has_schema: bool
) -> None:
    page = Path(__file__).parents[3] / "docs" / "debezium-input.md"
    text = page.read_text("utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    if has_schema:
        assert 'write `PayloadFields("payload.op")` and `data="payload"`' in text
        code = code.replace('PayloadFields("op"),', 'PayloadFields("payload.op"), data="payload",')
    names: dict[str, Any] = {"__name__": __name__}
    exec(code, names)
    codec = names["handlers"].codecs["shop.public.order"]
    value = CHANGE % (before, after, SOURCE, op)

    message = codec.decode(Record(WITH_SCHEMA % value if has_schema else value, []))

    assert (message.type, message.id) == ("order.changed.v1", "3-17")
    change = json.loads(names["OrderChanged"].model_validate_json(message.data).model_dump_json())
    assert change == {"before": json.loads(before), "after": json.loads(after)}


def test_a_deleted_rows_tombstone_has_none_of_its_topics_types() -> None:
    codec = Plain(PayloadFields("op"), Position(), types={"d": TYPE})

    message = codec.decode(Record(None, []))

    assert (message.type, message.data) == ("tombstone", None)


def renamed(name: str) -> str:
    return name.removeprefix("com.example.")


@pytest.mark.parametrize(
    ("types", "name", "type"),
    [
        ({}, "OrderPlaced", "OrderPlaced"),
        ({"OrderPlaced": TYPE}, "OrderPlaced", TYPE),
        ({"OrderPlaced": TYPE}, "OrderShipped", "OrderShipped"),
        (renamed, "com.example.OrderPlaced", "OrderPlaced"),
    ],
)
def test_names_of_types_are_translated(
    types: dict[str, str] | Callable[[str], str], name: str, type: str
) -> None:
    codec = Plain(Header("eventType"), Position(), types=types)

    assert codec.decode(Record(DATA, [("eventtype", name.encode())])).type == type


def fails(name: str) -> str:
    raise RuntimeError("no such type")


@pytest.mark.parametrize(
    ("codec", "value", "headers"),
    [
        (DEBEZIUM, DATA, DEBEZIUM_HEADERS[:1]),
        (DEBEZIUM, DATA, [*DEBEZIUM_HEADERS[:1], ("eventType", b"")]),
        (DEBEZIUM, DATA, [*DEBEZIUM_HEADERS[:1], ("eventType", b"a\x00")]),
        (Plain(Header("eventType"), Header("id"), types=fails), DATA, DEBEZIUM_HEADERS),
        (MASS_TRANSIT, b'{"messageId": "1", "message": {}}', []),
        (MASS_TRANSIT, b'{"messageId": "1", "message": {}, "messageType": []}', []),
        (MASS_TRANSIT, b'{"messageId": "1", "message": {}, "messageType": [7]}', []),
        (MASS_TRANSIT, b'{"messageId": "1", "message": {}, "messageType": [{}]}', []),
        (JAVA, b'{"type": null, "id": "7", "order": {}}', []),
    ],
)
def test_a_record_without_the_name_of_its_type_is_undecodable(
    codec: Plain, value: bytes, headers: list[tuple[str, bytes | None]]
) -> None:
    error = undecodable(codec, Record(value, headers))

    assert error.reason is Reason.MISSING_TYPE
    assert repr(codec.type) in str(error)
    assert "Let the producer send it" in str(error)


@pytest.mark.parametrize(
    ("codec", "value", "headers", "text"),
    [
        (DEBEZIUM, DATA, DEBEZIUM_HEADERS[:1], "the header 'eventType' has no value"),
        (DEBEZIUM, DATA, [("EVENTTYPE", b"x")], "the header 'id' has no value"),
        (MASS_TRANSIT, b'{"message": {}, "messageType": []}', [], "has no 'messageType.0'"),
        (MASS_TRANSIT, b'{"message": {}, "messageType": null}', [], "has no 'messageType.0'"),
        (MASS_TRANSIT, b'{"message": {}, "messageType": {}}', [], "has no 'messageType.0'"),
        (MASS_TRANSIT, b'{"messageType": ["a"]}', [], "the payload has no 'message'"),
        (MASS_TRANSIT, b'{"message": {}, "messageType": ["a"]}', [], "has no 'messageId'"),
        (Plain("a", PayloadFields("a.b")), b'{"a": []}', [], "the payload has no 'a.b'"),
        (JAVA, b'{"type": "a", "id": [], "order": 1}', [], "'id' is null, empty, a list or an"),
        (JAVA, b'{"type": "a\\u0000", "order": 1}', [], "the type is empty, no text, or text that"),
    ],
)
def test_what_a_record_lacks_is_named_as_the_user_wrote_it(
    codec: Plain, value: bytes, headers: list[tuple[str, bytes | None]], text: str
) -> None:
    assert text in str(undecodable(codec, Record(value, headers)))


@pytest.mark.parametrize(
    "value", [b"{}", b"[]", b"7", b"{", b'"{"', b'{"message": "no JSON"}', b'"\\ud800"']
)
def test_a_record_without_its_envelope_is_undecodable(value: bytes) -> None:
    error = undecodable(MASS_TRANSIT, Record(value, []))

    assert error.reason is Reason.INVALID_ENVELOPE
    assert "with its data at 'message'" in str(error)


def test_a_tombstone_without_a_type_keeps_its_id() -> None:
    message = DEBEZIUM.decode(Record(None, DEBEZIUM_HEADERS[:1]))

    assert (message.type, message.id, message.data) == ("tombstone", f'["tombstone","{ID}"]', None)
    assert MASS_TRANSIT.decode(Record(None, [])).id == "3-17"


IDENTITIES: list[Identity] = [Header("id"), Header("X-Id"), PayloadFields("orderId"), Position()]


@pytest.mark.parametrize(
    "codec",
    [
        DEBEZIUM,
        DEBEZIUM_ENVELOPE,
        SPRING,
        MASS_TRANSIT,
        JAVA,
        *(Plain(TYPE, one) for one in IDENTITIES),
        *(Plain(Header("type"), one) for one in IDENTITIES),
        *(Plain(PayloadFields("type"), one) for one in IDENTITIES),
        Plain(PayloadFields("meta.type"), PayloadFields("meta.ids.0"), data="body.0.order"),
        Plain(PayloadFields("meta.type"), PayloadFields("order.orderId"), data="order"),
    ],
    ids=str,
)
def test_what_is_published_is_read_again(codec: Plain) -> None:
    event = OrderPlaced(orderId=1)

    message = codec.decode(published(codec, event))

    assert message.type == TYPE
    assert message.data is not None
    assert OrderPlaced.model_validate_json(message.data) == event
    assert message.content_type in ("application/json", codec.content_type)
    if codec.identity in (Header("id"), Header("X-Id"), PayloadFields("messageId")):
        name = next(iter(codec.types), TYPE) if isinstance(codec.types, dict) else TYPE
        assert message.id == f'["{name}","{ID}"]'
    assert codec.decode(published(codec, event)).hash == message.hash


def test_what_is_published_has_the_form_of_the_framework() -> None:
    event = OrderPlaced(orderId=1)

    debezium = published(DEBEZIUM, event)
    assert debezium.value == b'{"orderId":1}'
    assert {*DEBEZIUM_HEADERS, ("content-type", b"application/json")} <= {*debezium.headers}
    assert ("__TypeId__", b"com.example.shop.OrderPlaced") in published(SPRING, event).headers
    mass_transit = published(MASS_TRANSIT, event)
    assert json.loads(mass_transit.value or b"") == {
        "messageId": ID,
        "messageType": ["urn:message:Shop:OrderPlaced"],
        "message": {"orderId": 1},
    }
    assert ("content-type", b"application/vnd.masstransit+json") in mass_transit.headers


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        (Plain("order.shipped", Position()), "read as 'order.shipped'"),
        (Plain(Header("t"), Position(), types={TYPE: "other"}), "read as 'other'"),
        (Plain(Header("t"), Position(), types=renamed), "has no inverse"),
    ],
)
async def test_a_type_that_would_be_read_as_another_is_refused(codec: Plain, text: str) -> None:
    with pytest.raises(Unpublishable, match=text):
        await codec.open("orders", [OrderPlaced])
    with pytest.raises(Unpublishable, match=text):
        published(codec, OrderPlaced(orderId=1))


@pytest.mark.parametrize(
    "codec",
    [
        Plain(PayloadFields("orderId"), Position()),
        Plain(TYPE, PayloadFields("region", "orderId")),
        Plain(TYPE, PayloadFields("orderId.inner")),
        Plain(PayloadFields("types.1"), Position()),
        Plain(TYPE, PayloadFields("order"), data="order"),
    ],
    ids=str,
)
def test_an_event_that_its_codec_could_not_read_is_refused(codec: Plain) -> None:
    with pytest.raises(Unpublishable, match="can't be written as its topic's codec reads it"):
        published(codec, OrderPlaced(orderId=1))


def test_a_codec_without_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="leave out types="):
        Plain(TYPE, Position(), types={"a": "b"})
    with pytest.raises(ValueError, match="one field names the type"):
        Plain(PayloadFields("a", "b"), Position())
    with pytest.raises(ValueError, match="can't have both type and identity"):
        Plain(Header("id"), Header("ID"))


def test_mapping_a_name_to_an_event_type_keeps_the_id() -> None:
    record = Record(DATA, [("t", b"Placed"), ("id", b"7")])
    before = Plain(Header("t"), Header("id")).decode(record)
    after = Plain(Header("t"), Header("id"), types={"Placed": TYPE}).decode(record)
    assert (before.type, after.type) == ("Placed", TYPE)
    assert before.id == after.id == '["Placed","7"]'
    assert before.hash == after.hash == payload_hash("Placed", None, DATA)


class Deep(Event, type="deep", topic="orders"):
    """An event of any depth."""

    tree: Any


def test_an_event_that_is_too_deep_for_its_envelope_is_unpublishable() -> None:
    tree: list[Any] = []
    for _ in range(190):
        tree = [tree]
    with pytest.raises(Unpublishable, match="can't be written as its topic's codec reads it"):
        published(Plain("deep", Position(), data=".".join("abcdefg" * 10)), Deep(tree=tree))


def test_only_cloudevents_have_data_that_may_be_stored_elsewhere() -> None:
    for codec, expected in [(CloudEvents(structured=True), True), (InJson(), False)]:
        outbox = Outbox("/shop", 1_000_000, codecs={"orders": codec})
        outbox.stage(OrderPlaced(orderId=1), id=ID, key="1", sequence=None)
        (row,) = outbox.events
        assert row.headers is None
        assert outbox.has_cloudevents(row) is expected


@pytest.mark.parametrize("has_store", [True, False])
def test_a_large_event_of_another_codec_is_refused_with_the_reason(has_store: bool) -> None:
    """It would not be read again from an object store."""
    sent_size = (lambda event, allowed: 100) if has_store else None
    large = OrderPlaced(orderId=10**2_000)
    for codec, is_refused in [(CloudEvents(), not has_store), (InJson(), True)]:
        outbox = Outbox("/shop", 2_500, codecs={"orders": codec}, sent_size=sent_size)
        if not is_refused:
            outbox.stage(large, id=ID, key="1", sequence=None)
            continue
        with pytest.raises(Unpublishable, match="2,500 are allowed") as refused:
            outbox.stage(large, id=ID, key="1", sequence=None)
        assert ("only CloudEvents are stored" in str(refused.value)) is has_store
        assert not [*outbox.events]


class InJson(Codec):
    """Writes the headers of CloudEvents, and JSON that only it can read."""

    def decode(self, record: message.Record, *, hash: bytes | None = None) -> Message:
        return CloudEvents().decode(record, hash=hash)

    def encode(self, event: Outgoing) -> Encoded:
        return Encoded(b"\0" + (event.payload or b""), "application/json")


async def test_an_event_waits_for_a_codec_that_is_not_open() -> None:
    outbox = Outbox("/shop", 1_000_000, codecs={"orders": InJson()}, closed={"orders": "no answer"})
    outbox.stage(OrderPlaced(orderId=1), id=ID, key="1", sequence=None)
    with pytest.raises(StoreUnavailable, match="no answer"):
        await outbox.write(None)  # it is not used


async def test_base_classes_of_events_need_not_be_writable() -> None:
    opened: list[str] = []

    class Strict(InJson):
        async def open(self, topic: str, events: Sequence[type[Event]]) -> None:
            opened.extend(one.__event_type__ for one in events)
            if any(one.__event_type__ == "strict.base" for one in events):
                raise Unpublishable("it has no schema")

    class Kind(Event, type="strict.base", topic="strict-topic"):
        pass

    class Leaf(Kind, type="strict.leaf"):
        pass

    handlers = Handlers()
    handlers.topic("strict-topic", codec=Strict())
    await Service("shop", handlers, MetaData()).open_codecs()
    assert sorted(opened) == ["strict.base", "strict.leaf"]
    assert handlers.closed == {}


async def test_the_kit_writes_published_events_as_the_service_does() -> None:
    """It opens codecs for events that the service only reads, and for no other class of a type."""
    opened: list[tuple[str, str]] = []

    class Opening(InJson):
        async def open(self, topic: str, events: Sequence[type[Event]]) -> None:
            opened.extend((topic, one.__name__) for one in events)

    class Sold(Event, type="kit.sold", topic="kit-sold"):
        pass

    class Resold(Event, type="kit.sold"):
        pass

    class Bought(Event, type="kit.bought"):
        pass

    handlers = Handlers()
    for topic in ("kit-sold", "kit-bought"):
        handlers.topic(topic, codec=Opening())

    @handlers.on(Resold, topic="kit-sold", consumer="resold")
    async def resold(event: Resold, tx: Transaction) -> None: ...

    @handlers.on(Bought, topic="kit-bought", consumer="bought")
    async def bought(event: Bought, tx: Transaction) -> None: ...

    service = Service("shop", handlers, MetaData())
    await service.open_codecs()
    await plugin._open_for_input(service)
    assert opened == [("kit-sold", "Sold"), ("kit-bought", "Bought")]


STRUCTURED = {"specversion": "1.0", "id": "1", "source": "/shop", "type": TYPE, "data": {"a": 1}}


@pytest.mark.parametrize("content_type", [None, b"application/json"])
def test_the_topic_can_allow_structured_events_without_their_content_type(
    content_type: bytes | None,
) -> None:
    record = Record(json.dumps(STRUCTURED).encode(), [("content-type", content_type)])

    message = CloudEvents(structured=True).decode(record)

    assert (message.source, message.id, message.type) == ("/shop", "1", TYPE)
    assert (message.data, message.content_type) == (b'{"a":1}', "application/json")
    error = undecodable(CloudEvents(), record)
    assert error.reason is Reason.NOT_CLOUDEVENTS
    given = "its content-type is 'application/json'" if content_type else "it has no content-type"
    assert f"looks like a structured CloudEvent; {given}: let the producer send" in str(error)
    assert "codec=CloudEvents(structured=True)" in str(error)


def test_a_topic_of_structured_events_has_binary_ones_and_tombstones_too() -> None:
    codec = CloudEvents(structured=True)
    headers: list[tuple[str, bytes | None]] = [
        ("ce_specversion", b"1.0"),
        ("ce_id", b"2"),
        ("ce_source", b"/shop"),
        ("ce_type", b"other"),
    ]

    assert codec.decode(Record(b"{}", headers)).id == "2"
    assert codec.decode(Record(None, [])).id == "3-17"
    assert undecodable(codec, Record(b"[]", [])).reason is Reason.INVALID_ENVELOPE
    assert undecodable(codec, Record(b"{}", [])).reason is Reason.MISSING_ATTRIBUTE


def test_cloudevents_are_published_as_if_their_topic_had_no_codec() -> None:
    rows: list[StagedEvent] = []
    for codecs in ({}, {"orders": CloudEvents(structured=True)}):
        outbox = Outbox("/shop", 1_000_000, codecs=codecs)
        outbox.stage(OrderPlaced(orderId=1), id=ID, key="1", sequence=7)
        rows += outbox.events

    assert rows[0] == rows[1]
    assert rows[0].headers is None


def test_the_trace_is_in_the_headers_of_every_form() -> None:
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    outbox = Outbox("/shop", 1_000_000, codecs={"orders": MASS_TRANSIT})
    outbox.stage(OrderPlaced(orderId=1), id=ID, key="1", sequence=None)
    (row,) = outbox.events
    encoded = MASS_TRANSIT.encode(row._replace(traceparent=traceparent, tracestate="a=b"))

    message: Message = MASS_TRANSIT.decode(Record(encoded.payload, [*(encoded.headers or ())]))

    assert (message.traceparent, message.tracestate) == (traceparent, "a=b")
