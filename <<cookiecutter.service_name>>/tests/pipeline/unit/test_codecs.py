"""What the engine asks of codecs, and its own, `CloudEvents`."""

import json
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from sqlalchemy import MetaData

from pipeline import CloudEvents, Codec, Event, Handlers, Service, Transaction
from pipeline.errors import StoreUnavailable
from pipeline.events import message
from pipeline.events.codec import Encoded, Outgoing
from pipeline.events.event import Unpublishable
from pipeline.events.message import Message, Reason, Undecodable
from pipeline.handlers.staging import Outbox, StagedEvent
from pipeline.testing import plugin

TYPE = "order.placed.v1"
ID = "4d47e190-0402-4048-bc2c-89dd54343cdc"


class OrderPlaced(Event, type=TYPE, topic="orders"):
    """An order was placed."""

    order_id: int


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


def test_only_cloudevents_have_data_that_may_be_stored_elsewhere() -> None:
    for codec, expected in [(CloudEvents(structured=True), True), (InJson(), False)]:
        outbox = Outbox("/shop", 1_000_000, codecs={"orders": codec})
        outbox.stage(OrderPlaced(order_id=1), id=ID, key="1", sequence=None)
        (row,) = outbox.events
        assert row.headers is None
        assert outbox.has_cloudevents(row) is expected


@pytest.mark.parametrize("has_store", [True, False])
def test_a_large_event_of_another_codec_is_refused_with_the_reason(has_store: bool) -> None:
    """It would not be read again from an object store."""
    sent_size = (lambda event, allowed: 100) if has_store else None
    large = OrderPlaced(order_id=10**2_000)
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
    outbox.stage(OrderPlaced(order_id=1), id=ID, key="1", sequence=None)
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
def test_a_structured_event_without_its_content_type_is_read_where_the_topic_says_so(
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
        outbox.stage(OrderPlaced(order_id=1), id=ID, key="1", sequence=7)
        rows += outbox.events

    assert rows[0] == rows[1]
    assert rows[0].headers is None
