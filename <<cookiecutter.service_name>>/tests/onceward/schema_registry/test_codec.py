"""The codec with a real registry, and with the serializers and deserializers of Confluent."""

import asyncio
import json
import re
import socket
import ssl
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import json_format
from servers.apicurio import Apicurio

from onceward import Event, Handlers
from onceward.apply.item import StoredRecord
from onceward.cli.dead_letters import REASONS
from onceward.errors import StoreUnavailable
from onceward.events.event import Unpublishable
from onceward.events.message import Message, Record, Undecodable
from onceward.events.payload import payload_hash
from onceward.plain import Header, PayloadFields, Position
from onceward.schema_registry import Confluent, Framing, Strategy, schemas
from onceward.schema_registry.avro import Avro
from onceward.schema_registry.framing import HEADER
from onceward.schema_registry.protobuf import Protobuf
from onceward.service import Misconfigured

from .proxy import Proxy
from .shop import (
    FIELDS,
    NAME,
    ORDER,
    PROTOBUF,
    SCHEMAS,
    OrderPlaced,
    avro,
    kafka_record,
    outgoing,
    record,
)

pytestmark = pytest.mark.together

KINDS = pytest.mark.parametrize("kind", SCHEMAS)
GUIDE = Path(__file__).parents[3] / "docs" / "schema-registry.md"
ORDER_CLASS = Protobuf(PROTOBUF, {})._class(NAME)


def codec(**options: Any) -> Confluent:
    """Return a codec that knows the name of the event's schemas."""
    return Confluent(**{"identity": Position(), "types": {NAME: OrderPlaced}, **options})


async def decoded(one: Confluent, *records: Record) -> list[Message]:
    """Prepare and decode records, as a reader does."""
    await one.prepare(records)
    return [one.decode(each) for each in records]


async def failure(one: Confluent, record: Record) -> tuple[str, str]:
    """Return why a record is a dead letter."""
    with pytest.raises(Undecodable) as caught:
        await decoded(one, record)
    assert caught.value.reason in REASONS
    return caught.value.reason, str(caught.value)


@dataclass
class Producer:
    """Confluent's own serializers."""

    client: SchemaRegistryClient
    topic: str

    def body(self, kind: str, event: Event) -> bytes:
        """Return a record's value, with prefix; its schema is registered for the topic."""
        context = SerializationContext(self.topic, MessageField.VALUE, [])
        settings = {"auto.register.schemas": True, "subject.name.strategy.type": "TOPIC"}
        fields = event.model_dump(mode="python")
        if kind == "AVRO":
            fields |= {"photo": b"\xff\x00"}
            text = SCHEMAS[kind].schema_str
            serializer: Any = AvroSerializer(self.client, text, conf=settings)
            body = serializer(fields, context)
        elif kind == "JSON":
            text = SCHEMAS[kind].schema_str
            body = JSONSerializer(text, self.client, conf=settings)(
                json.loads(event.model_dump_json()), context
            )
        else:
            message = json_format.Parse(event.model_dump_json(), ORDER_CLASS())
            body = ProtobufSerializer(ORDER_CLASS, self.client, conf=settings)(message, context)
        assert isinstance(body, bytes)
        return body


@pytest.fixture
def produced(client: SchemaRegistryClient, topic: str) -> Producer:
    """Return a producer for the topic."""
    return Producer(client, topic)


def by_header(kind: str, body: bytes) -> Record:
    """Return a record with the prefix of the body as GUID in the header."""
    id = int.from_bytes(body[1:5])
    indexes, rest = (body[5:7], body[7:]) if kind == "PROTOBUF" else (b"", body[5:])
    return kafka_record(rest, [(HEADER, b"\1" + UUID(int=id).bytes + indexes)])


@KINDS
@pytest.mark.parametrize("framing", ["prefix", "header", "guid"])
async def test_records_of_confluents_serializers_become_events(
    kind: str, framing: str, produced: Producer, proxy: Proxy
) -> None:
    body = produced.body(kind, ORDER)
    if kind == "PROTOBUF":
        body = body[:5] + b"\2\2" + body[6:] if body[5:6] == b"\0" else body
        assert body[5:7] == b"\2\2", "the second message of the file"
    framed = kafka_record(body)
    if framing == "guid":
        framed = by_header(kind, body)
    elif framing == "header":
        frame = 7 if kind == "PROTOBUF" else 5
        framed = kafka_record(body[frame:], [(HEADER, body[:frame])])
    one = codec()
    (message,) = await decoded(one, framed)
    assert (message.type, message.source, message.id) == (
        *(OrderPlaced.__event_type__, "kafka:orders"),
        "0-7",
    )
    assert OrderPlaced.model_validate_json(message.data or b"") == ORDER
    assert message.content_type == "application/json"
    assert message.hash == payload_hash(NAME, "application/json", message.data)
    requests = len(proxy.paths)
    await decoded(one, framed, framed)
    assert len(proxy.paths) == requests, "schemas are kept"


@KINDS
async def test_confluents_deserializers_read_what_is_published(
    kind: str, client: SchemaRegistryClient, topic: str, proxy: Proxy
) -> None:
    client.register_schema(f"{topic}-value", SCHEMAS[kind])
    one = codec()
    await one.open(topic, [OrderPlaced])
    encoded = one.encode(outgoing(ORDER, topic))
    assert encoded.headers is None
    context = SerializationContext(topic, MessageField.VALUE, [])
    body = encoded.payload
    assert body is not None
    if kind == "AVRO":
        assert encoded.content_type == "application/avro"
        read: Any = AvroDeserializer(client)(body, context)
        assert (read["price"], read["at"]) == (ORDER.price, ORDER.at)
        assert (read["customer"], read["photo"]) == (ORDER.customer, b"\xff\x00")
    elif kind == "JSON":
        assert encoded.content_type == "application/octet-stream"
        read = JSONDeserializer(SCHEMAS[kind].schema_str, schema_registry_client=client)(
            body, context
        )
        assert read == json.loads(ORDER.model_dump_json())
    else:
        assert encoded.content_type == "application/protobuf"
        message = ProtobufDeserializer(ORDER_CLASS, {"use.deprecated.format": False})(body, context)
        assert message is not None
        assert (message.order_id, message.price) == (ORDER.order_id, str(ORDER.price))
    (again,) = await decoded(one, kafka_record(body))
    assert OrderPlaced.model_validate_json(again.data or b"") == ORDER


@KINDS
async def test_confluents_deserializers_read_what_names_its_schema_by_the_header(
    kind: str, client: SchemaRegistryClient, topic: str, proxy: Proxy
) -> None:
    id = client.register_schema(f"{topic}-value", SCHEMAS[kind])
    one = codec(framing=Framing.HEADER, identity=None)
    await one.open(topic, [OrderPlaced])
    payload, content_type, headers = one.encode(outgoing(ORDER, topic))
    assert headers is not None
    indexes = b"\2\2" if kind == "PROTOBUF" else b""  # the second message of the file
    assert dict(headers)[HEADER] == b"\1" + UUID(int=id).bytes + indexes
    context = SerializationContext(topic, MessageField.VALUE, [*headers])
    with SchemaRegistryClient({"url": proxy.url}) as by_proxy:
        if kind == "AVRO":
            read: Any = AvroDeserializer(by_proxy)(payload, context)
            assert (read["order_id"], read["price"]) == (ORDER.order_id, ORDER.price)
        elif kind == "JSON":
            text = SCHEMAS[kind].schema_str
            read = JSONDeserializer(text, schema_registry_client=by_proxy)(payload, context)
            assert read == json.loads(payload or b"") == json.loads(ORDER.model_dump_json())
        else:
            settings = {"use.deprecated.format": False}
            message = ProtobufDeserializer(ORDER_CLASS, settings)(payload, context)
            assert message is not None
            assert message.order_id == ORDER.order_id
    (again,) = await decoded(one, kafka_record(payload, headers))
    assert (again.id, again.source, again.type) == ("e-1", "/shop", "order.placed.v1")
    assert (again.subject, again.sequence) == ("o-1", f"{7:020}")
    assert again.time is not None
    assert content_type.encode() == dict(headers)["content-type"]
    assert OrderPlaced.model_validate_json(again.data or b"") == ORDER


async def test_a_registry_without_guids_has_none_for_the_header(
    client: SchemaRegistryClient, topic: str, proxy: Proxy
) -> None:
    client.register_schema(f"{topic}-value", SCHEMAS["AVRO"])
    proxy.knows_guids = False
    with pytest.raises(Unpublishable, match=r"has no GUID .* Declare Confluent without framing="):
        await codec(framing=Framing.HEADER).open(topic, [OrderPlaced])


async def test_cloudevents_headers_name_the_event_where_there_are_any(
    produced: Producer, proxy: Proxy
) -> None:
    body = produced.body("AVRO", ORDER)
    headers = {"specversion": "1.0", "id": "e-1", "source": "/shop", "type": "other.v2"}
    headers |= {"datacontenttype": "application/avro", "time": "2026-01-31T00:00:00Z"}
    named = [(f"ce_{name}", text.encode()) for name, text in headers.items()]
    record = kafka_record(body, [*named, ("content-type", b"application/avro")])
    (message,) = await decoded(codec(identity=None), record)
    assert (message.source, message.id, message.type) == ("/shop", "e-1", "other.v2")
    assert message.content_type == "application/json"
    assert message.time is not None


async def test_records_without_them_are_named_by_the_rule_of_the_topic(
    produced: Producer, proxy: Proxy
) -> None:
    record = kafka_record(produced.body("AVRO", ORDER), [("x-id", b"7")])
    for identity, id in (
        (Header("x-id"), '["shop.OrderPlaced","7"]'),
        (PayloadFields("order_id"), '["shop.OrderPlaced","o-1"]'),
    ):
        (message,) = await decoded(codec(identity=identity), record)
        assert message.id == id
    (message,) = await decoded(codec(types={}), record)
    assert message.type == NAME
    reason, text = await failure(codec(identity=None), record)
    assert reason == "missing identity"
    assert "Confluent(identity=" in text


async def test_a_record_is_the_same_event_whatever_type_the_service_gives_it(
    produced: Producer, proxy: Proxy
) -> None:
    class Renamed(Event, type="order.placed.v2"):
        order_id: str

    record = kafka_record(produced.body("AVRO", ORDER))
    found = []
    every: list[dict[str, Any]] = [
        {"types": {}},
        {"types": {NAME: OrderPlaced}},
        {"types": {NAME: Renamed}},
        {"types": {}, "schemas": {Renamed: record_of_ids()}},
    ]
    for options in every:
        (message,) = await decoded(codec(identity=PayloadFields("order_id"), **options), record)
        found.append(message)
    assert [one.type for one in found] == [NAME, "order.placed.v1", *["order.placed.v2"] * 2]
    assert len({(one.id, one.hash) for one in found}) == 1


def record_of_ids() -> Schema:
    """Return a schema of the service that keeps only the id."""
    return record(NAME, {"name": "order_id", "type": "string"})


async def test_a_json_schema_without_a_title_needs_the_headers(
    client: SchemaRegistryClient, topic: str, proxy: Proxy
) -> None:
    text = '{"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}'
    id = client.register_schema(f"{topic}-value", Schema(text, "JSON"))
    reason, text = await failure(codec(), kafka_record(b"\0" + id.to_bytes(4) + b"{}"))
    assert reason == "missing type"
    assert "title" in text


async def test_a_tombstone_and_data_by_reference_have_no_schema(topic: str, proxy: Proxy) -> None:
    (message,) = await decoded(codec(), kafka_record(None))
    assert (message.type, message.data) == ("tombstone", None)
    headers = {"specversion": "1.0", "id": "1", "source": "/a", "type": "t", "dataref": "file:///x"}
    named = [(f"ce_{name}", text.encode()) for name, text in headers.items()]
    (message,) = await decoded(codec(), kafka_record(b"", named))
    assert message.reference is not None


async def test_tombstones_are_named_by_the_rule_of_the_topic(proxy: Proxy) -> None:
    tombstone = kafka_record(None, [("x-id", b"7")])
    (message,) = await decoded(codec(identity=Header("x-id")), tombstone)
    assert (message.type, message.id) == ("tombstone", '["tombstone","7"]')
    (message,) = await decoded(codec(identity=PayloadFields("order_id")), tombstone)
    assert message.id == "0-7", "it has no fields"
    reason, _ = await failure(codec(identity=Header("x-id")), kafka_record(None))
    assert reason == "missing identity"
    (message,) = await decoded(codec(identity=None), kafka_record(None))
    assert (message.type, message.id) == ("tombstone", "0-7")


async def test_a_records_hash_does_not_depend_on_the_services_schema(
    client: SchemaRegistryClient, topic: str, proxy: Proxy
) -> None:
    class Seen(Event, type="seen"):
        order_id: str
        seen: int

    id = client.register_schema(f"{topic}-value", SCHEMAS["AVRO"])
    written = Avro(SCHEMAS["AVRO"], {}).write(NAME, ORDER.model_dump_json().encode())
    body = kafka_record(b"\0" + id.to_bytes(4) + written)
    fields = [{"name": "order_id", "type": "string"}, {"name": "seen", "type": "long"}]
    added = {"name": "colour", "type": "string", "default": "red"}
    found = []
    for one in (
        Confluent(identity=Position(), types={NAME: Seen}),
        Confluent(identity=Position(), schemas={Seen: record(NAME, *fields)}),
        Confluent(identity=Position(), schemas={Seen: record(NAME, *fields, added)}),
    ):
        (message,) = await decoded(one, body)
        found.append((message.hash, len(json.loads(message.data or b""))))
    assert {hash for hash, _ in found} == {found[0][0]}
    assert [count for _, count in found] == [10, 2, 3]
    assert one.decode(body, hash=b"known").hash == b"known"
    other = kafka_record(b"\0" + id.to_bytes(4) + written[:-1] + b"\2")
    assert one.decode(other).hash != found[0][0]


async def test_data_of_a_newer_writer_is_read_by_the_readers_schema(
    client: SchemaRegistryClient, topic: str, proxy: Proxy
) -> None:
    class Old(Event, type="old"):
        order_id: str
        seen: int
        colour: str

    newer = record(NAME, *FIELDS, {"name": "weight2", "type": "int", "default": 0})
    reader = record(
        NAME,
        {"name": "order_id", "type": "string"},
        {"name": "seen", "type": "double"},
        {"name": "colour", "type": "string", "default": "red"},
    )
    id = client.register_schema(f"{topic}-value", newer)
    payload = json.dumps({**json.loads(ORDER.model_dump_json()), "seen": 5, "weight2": 1})
    body = b"\0" + id.to_bytes(4) + Avro(newer, {}).write(NAME, payload.encode())
    one = Confluent(identity=Position(), schemas={Old: reader})
    (message,) = await decoded(one, kafka_record(body))
    assert message.type == "old", "by the name of the service's own schema"
    assert json.loads(message.data or b"") == {"order_id": "o-1", "seen": 5.0, "colour": "red"}
    # By the writer's schema, where the service has none.
    (message,) = await decoded(codec(), kafka_record(body))
    assert json.loads(message.data or b"")["weight2"] == 1


async def test_schemas_refer_to_others(
    client: SchemaRegistryClient, topic: str, proxy: Proxy
) -> None:
    inner = f"shop.Inner{topic.replace('-', '')}"
    client.register_schema(inner, record(inner, {"name": "it", "type": "int"}))
    outer = avro(
        {"type": "record", "name": "shop.Outer", "fields": [{"name": "inner", "type": inner}]},
        [SchemaReference(inner, inner, 1)],
    )
    id = client.register_schema(f"{topic}-value", outer)
    (message,) = await decoded(codec(), kafka_record(b"\0" + id.to_bytes(4) + b"\x08"))
    assert message.data == b'{"inner":{"it":4}}'
    imported = Schema('syntax = "proto3"; message R {int32 it = 1;}', "PROTOBUF")
    client.register_schema(f"{topic}-r", imported)
    text = 'syntax = "proto3"; import "r.proto"; message M { R r = 1; }'
    schema = Schema(text, "PROTOBUF", [SchemaReference("r.proto", f"{topic}-r", 1)])
    id = client.register_schema(f"{topic}-m", schema)
    frame = b"\0" + id.to_bytes(4) + b"\0"
    (message,) = await decoded(codec(), kafka_record(frame + b"\x0a\x02\x08\x05"))
    assert (message.type, json.loads(message.data or b"")) == ("M", {"r": {"it": 5}})


async def test_an_unknown_id_makes_a_dead_letter_without_repeated_requests(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = codec()
    reason, text = await failure(one, kafka_record(b"\0\0\0\xff\xffx"))
    assert reason == "unknown schema"
    assert "no schema 65535:" in text
    requests = len(proxy.paths)
    await failure(one, kafka_record(b"\0\0\0\xff\xffx"))
    assert len(proxy.paths) == requests
    # It is requested again after its time, when it may have been registered.
    monkeypatch.setenv("PIPELINE_SCHEMA_REGISTRY_UNKNOWN_AGE", "0.0001")
    short = codec()
    await failure(short, kafka_record(b"\0\0\0\xff\xffx"))
    await failure(short, kafka_record(b"\0\0\0\xff\xffx"))
    assert len(proxy.paths) == requests + 2


async def test_an_unknown_id_is_requested_immediately_for_a_redriven_record(
    client: SchemaRegistryClient, topic: str, proxy: Proxy
) -> None:
    id = client.register_schema(f"{topic}-value", record("shop.A", {"name": "it", "type": "long"}))
    value = b"\0" + id.to_bytes(4) + b"\2"
    one = codec()
    proxy.lacks = "/schemas/ids/"
    await failure(one, kafka_record(value))
    proxy.lacks = None
    await failure(one, kafka_record(value))
    (message,) = await decoded(one, StoredRecord(topic, 0, 7, 0, None, value, [], 1.0))
    assert message.data == b'{"it":1}'
    assert len(await decoded(one, kafka_record(value))) == 1


async def test_what_a_schema_refers_to_is_named_if_the_registry_lacks_it(
    client: SchemaRegistryClient, topic: str, proxy: Proxy
) -> None:
    imported = Schema('syntax = "proto3"; message R {int32 it = 1;}', "PROTOBUF")
    client.register_schema(f"{topic}-r", imported)
    text = 'syntax = "proto3"; import "r.proto"; message M { R r = 1; }'
    schema = Schema(text, "PROTOBUF", [SchemaReference("r.proto", f"{topic}-r", 1)])
    id = client.register_schema(f"{topic}-value", schema)
    proxy.lacks = f"/subjects/{topic}-r/"
    reason, said = await failure(codec(), kafka_record(b"\0" + id.to_bytes(4) + b"\0"))
    assert reason == "unknown schema"
    missing = f"it refers to version 1 of the subject '{topic}-r', which the registry does not have"
    assert f"the schema {id} can't be used: {missing}" in said
    with pytest.raises(Unpublishable, match=re.escape(missing)):
        await codec(types={"M": OrderPlaced}).open(topic, [OrderPlaced])


async def test_a_schema_that_cant_be_used_is_not_to_be_registered(
    client: SchemaRegistryClient, topic: str, proxy: Proxy
) -> None:
    array = {"name": "it", "type": {"type": "array", "items": "null"}}
    id = client.register_schema(f"{topic}-value", record("A", array))
    reason, text = await failure(codec(), kafka_record(b"\0" + id.to_bytes(4) + b"\0"))
    assert (reason, "register it" in text) == ("unknown schema", False)
    assert f"the schema {id} can't be used: " in text
    assert "items take no bytes" in text


async def test_records_wait_while_no_temporary_file_can_be_written(
    client: SchemaRegistryClient, topic: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = client.register_schema(f"{topic}-value", PROTOBUF)
    body = kafka_record(b"\0" + id.to_bytes(4) + b"\2\2")
    one = codec()
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "tempdir", "/proc/nowhere")
        for waiting in (one.prepare([body]), one.open(topic, [OrderPlaced])):
            with pytest.raises(StoreUnavailable, match=r"temporary files, such as /tmp"):
                await waiting
    (message,) = await decoded(one, body)
    assert message.type == OrderPlaced.__event_type__
    await one.open(topic, [OrderPlaced])


@pytest.mark.parametrize("id", [0, 2**31 - 1, 2**31, 2**32 - 1])
async def test_no_id_that_a_record_may_have_makes_the_registry_unavailable(
    proxy: Proxy, id: int
) -> None:
    reason, text = await failure(codec(), kafka_record(b"\0" + id.to_bytes(4) + b"x"))
    assert (reason, f"no schema {id}:" in text) == ("unknown schema", True)


@pytest.mark.parametrize("knows_guids", [True, False])
async def test_an_unknown_guid_is_a_dead_letter_even_without_registry_guids(
    proxy: Proxy, knows_guids: bool
) -> None:
    proxy.knows_guids = knows_guids
    guid = UUID(int=9_999_999)
    reason, text = await failure(codec(), kafka_record(b"x", [(HEADER, b"\1" + guid.bytes)]))
    assert (reason, str(guid) in text) == ("unknown schema", True)


async def test_a_stream_of_unknown_ids_makes_few_requests_at_once(proxy: Proxy) -> None:
    one = codec()
    records = [kafka_record(b"\0\0\1" + number.to_bytes(2)) for number in range(40)] * 3
    await asyncio.gather(one.prepare(records[:60]), one.prepare(records[60:]))
    assert proxy.most_at_once <= 4
    assert len(proxy.paths) <= 80
    await one.prepare(records)
    assert len(proxy.paths) <= 80


async def test_a_misfitting_payload_is_a_dead_letter_with_the_reason(
    produced: Producer, proxy: Proxy
) -> None:
    body = produced.body("AVRO", ORDER)
    one = codec()
    reason, text = await failure(one, kafka_record(body[:-3]))
    assert reason == "invalid envelope"
    assert f"the schema {int.from_bytes(body[1:5])}" in text
    assert "ends too early" in text
    reason, text = await failure(one, kafka_record(b'{"order_id": 1}'))
    assert (reason, "does not begin with the id of a schema" in text) == ("invalid envelope", True)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((500, b'{"error_code": 50001, "message": "down"}'), "it answers 500"),
        ((503, b"<html>"), "it answers 503"),
        ((404, b"<html>"), "it answers 404"),
        ((401, b"{}"), "it answers 401: check PIPELINE_SCHEMA_REGISTRY_USER"),
        ((200, b"<html>"), "not of its API"),
        ((200, b"null"), "not of its API"),
        ((200, b"{}"), "not of its API (a schema without text)"),
        ((200, b'{"schema": ""}'), "not of its API (a schema without text)"),
    ],
)
async def test_a_registry_that_does_not_answer_as_one_is_unavailable(
    produced: Producer, proxy: Proxy, answer: tuple[int, bytes], text: str
) -> None:
    record = kafka_record(produced.body("AVRO", ORDER))
    one = codec()
    proxy.answer = answer
    with pytest.raises(StoreUnavailable) as caught:
        await one.prepare([record])
    assert text in str(caught.value)
    assert f"schema registry {proxy.url} (PIPELINE_SCHEMA_REGISTRY_URL)" in str(caught.value)
    with pytest.raises(StoreUnavailable):
        await one.open("orders", [OrderPlaced])
    proxy.answer = None
    assert len(await decoded(one, record)) == 1


async def test_a_registry_that_is_unavailable_gets_few_requests_of_a_batch(proxy: Proxy) -> None:
    records = [kafka_record(b"\0\0\1" + number.to_bytes(2)) for number in range(40)]
    proxy.answer = (503, b"")
    with pytest.raises(StoreUnavailable, match="it answers 503"):
        await codec().prepare(records)
    assert len(proxy.paths) <= 8, "two rounds of those at once"


async def test_another_url_is_used_if_the_first_does_not_answer(
    produced: Producer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = kafka_record(produced.body("AVRO", ORDER))
    monkeypatch.setenv("PIPELINE_SCHEMA_REGISTRY_TIMEOUT", "2")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # its queue accepts connections
        first = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("PIPELINE_SCHEMA_REGISTRY_URL", f"{first}, {proxy.url}")
        assert len(await decoded(codec(), record)) == 1
        monkeypatch.setenv("PIPELINE_SCHEMA_REGISTRY_URL", first)
        with pytest.raises(StoreUnavailable, match=first):
            await codec().prepare([record])


async def test_certificates_are_read_once_and_again_after_an_error(
    produced: Producer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[object] = []
    create = ssl.create_default_context

    def counting(*arguments: Any, **options: Any) -> ssl.SSLContext:
        created.append(create(*arguments, **options))
        return created[-1]  # type: ignore[return-value]

    monkeypatch.setattr(ssl, "create_default_context", counting)
    known = kafka_record(produced.body("AVRO", ORDER))
    created.clear()
    one = codec()
    await decoded(one, known)
    first = len(created)
    for id in range(3):
        await failure(one, kafka_record(b"\0\0\xf0\0" + bytes([id])))
    assert len(created) == first > 0
    proxy.answer = (503, b"")
    unknown = kafka_record(b"\0\0\xf0\0\x09")
    with pytest.raises(StoreUnavailable):
        await one.prepare([unknown])
    proxy.answer = None
    await failure(one, unknown)
    assert len(created) == 2 * first


async def test_a_record_that_was_not_prepared_waits(produced: Producer, proxy: Proxy) -> None:
    with pytest.raises(StoreUnavailable, match="is not in memory"):
        codec().decode(kafka_record(produced.body("AVRO", ORDER)))


async def test_what_is_kept_needs_no_registry(produced: Producer, proxy: Proxy) -> None:
    record = kafka_record(produced.body("AVRO", ORDER))
    one = codec()
    await one.prepare([record])
    proxy.answer = (503, b"")
    assert len(await decoded(one, record)) == 1


async def test_no_more_schemas_are_kept_than_settings_say(
    client: SchemaRegistryClient, topic: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_SCHEMA_REGISTRY_SCHEMAS", "2")
    monkeypatch.setattr(schemas, "_IN_USE", 0.0)
    one = codec()
    for number in range(5):
        schema = record(f"shop.N{number}{topic[-6:]}", {"name": "it", "type": "int"})
        id = client.register_schema(f"{topic}-{number}", schema)
        await decoded(one, kafka_record(b"\0" + id.to_bytes(4) + b"\2"))
    assert len(one._schemas._formats) == len(one._schemas._used) == 2


async def test_a_batch_may_have_more_schemas_than_are_kept(
    client: SchemaRegistryClient, topic: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_SCHEMA_REGISTRY_SCHEMAS", "1")
    records = []
    for number in range(6):
        schema = record(f"shop.N{number}{topic[-6:]}", {"name": "it", "type": "int"})
        id = client.register_schema(f"{topic}-{number}", schema)
        records.append(kafka_record(b"\0" + id.to_bytes(4) + b"\2"))
    one = codec()
    assert len(await decoded(one, *records[:2])) == 2
    # Another partition prepares its batch before the first one is decoded.
    await one.prepare(records[2:4])
    await asyncio.gather(one.prepare(records[:2]), one.prepare(records[4:]))
    assert [one.decode(each).data for each in records] == [b'{"it":1}'] * 6


@pytest.mark.parametrize(
    ("strategy", "subject"),
    [
        (Strategy.TOPIC, "{topic}-value"),
        (Strategy.RECORD, "{name}"),
        (Strategy.TOPIC_RECORD, "{topic}-{name}"),
    ],
)
async def test_events_are_written_by_the_latest_schema_of_their_subject(
    client: SchemaRegistryClient, topic: str, proxy: Proxy, strategy: Strategy, subject: str
) -> None:
    name = f"shop.O{topic.replace('-', '')}"
    subject = subject.format(topic=topic, name=name)
    client.register_schema(subject, record(name, *FIELDS))
    id = client.register_schema(
        subject, record(name, *FIELDS, {"name": "new", "type": "int", "default": 3})
    )
    one = codec(types={name: OrderPlaced}, strategy=strategy)
    await one.open(topic, [OrderPlaced])
    body = one.encode(outgoing(ORDER, topic)).payload
    assert body is not None
    assert int.from_bytes(body[1:5]) == id
    (message,) = await decoded(one, kafka_record(body))
    assert json.loads(message.data or b"")["new"] == 3


async def test_an_event_without_a_schema_stops_the_start_with_what_to_do(
    client: SchemaRegistryClient, topic: str, proxy: Proxy
) -> None:
    with pytest.raises(Unpublishable, match=f"'{topic}-value' has no schema. Register it"):
        await codec().open(topic, [OrderPlaced])
    client.register_schema(f"{topic}-value", record("shop.Other", {"name": "it", "type": "int"}))
    with pytest.raises(Unpublishable, match=r"types=\{'shop.Other': OrderPlaced\}"):
        await codec().open(topic, [OrderPlaced])


async def test_only_events_of_the_topic_are_requested_when_it_is_opened(
    client: SchemaRegistryClient, topic: str, proxy: Proxy
) -> None:
    one = codec()
    await one.open(topic, [])
    assert proxy.paths == []
    with pytest.raises(Unpublishable, match=r"had no schema for 'order.placed.v1'"):
        one.encode(outgoing(ORDER, topic))
    # Tests write events that the service only reads: by the latest schema, not by its own.
    client.register_schema(f"{topic}-value", SCHEMAS["AVRO"])
    one = codec(schemas={OrderPlaced: record(NAME, *FIELDS[:3])})
    await one.open(topic, [OrderPlaced])
    assert one.encode(outgoing(ORDER, topic)).payload


async def test_own_schemas_must_be_registered_and_are_in_development(
    client: SchemaRegistryClient, topic: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OrderPlaced, "__event_topic__", topic)
    own: dict[type[Event], Schema] = {OrderPlaced: SCHEMAS["AVRO"]}
    client.register_schema(f"{topic}-value", record(NAME, *FIELDS[:3]))
    with pytest.raises(Unpublishable, match="does not have the schema of the code"):
        await Confluent(schemas=own).open(topic, [OrderPlaced])
    monkeypatch.setenv("PIPELINE_SCHEMA_REGISTRY_AUTO_REGISTER", "true")
    await Confluent(schemas=own).open(topic, [OrderPlaced])
    monkeypatch.delenv("PIPELINE_SCHEMA_REGISTRY_AUTO_REGISTER")
    one = Confluent(schemas=own)
    await one.open(topic, [OrderPlaced])
    assert one.encode(outgoing(ORDER, topic)).payload


async def test_what_does_not_fit_its_schema_is_refused_when_it_is_published(
    client: SchemaRegistryClient, topic: str, proxy: Proxy
) -> None:
    fields = [field for field in FIELDS if field["name"] != "at"]
    millis = {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}
    client.register_schema(f"{topic}-value", record(NAME, *fields, millis))
    one = codec()
    await one.open(topic, [OrderPlaced])
    whole = ORDER.model_copy(update={"at": ORDER.at.replace(microsecond=0)})
    assert one.encode(outgoing(whole, topic)).payload
    with pytest.raises(Unpublishable, match="another event when it is read again"):
        one.encode(outgoing(ORDER, topic))
    with pytest.raises(Unpublishable, match="price: the value is no decimal") as caught:
        one.encode(outgoing(whole.model_copy(update={"price": Decimal("NaN")}), topic))
    assert "OrderPlaced does not fit the schema 'shop.OrderPlaced'" in str(caught.value)
    nothing: Any = SimpleNamespace(payload=None, topic=topic, type="tombstone")
    assert one.encode(nothing).payload is None


def test_an_own_schema_that_is_invalid_is_refused_where_it_is_declared() -> None:
    with pytest.raises(ValueError, match="the schema of OrderPlaced is invalid"):
        Confluent(schemas={OrderPlaced: Schema("{}", "AVRO")})
    with pytest.raises(ValueError, match="none of AVRO, PROTOBUF and JSON"):
        Confluent(schemas={OrderPlaced: Schema("{}", "XML")})


async def test_credentials_are_sent(
    apicurio: Apicurio, produced: Producer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = kafka_record(produced.body("AVRO", ORDER))
    monkeypatch.setenv("PIPELINE_SCHEMA_REGISTRY_TOKEN", "the-token")
    await decoded(codec(), record)
    assert proxy.authorization == "Bearer the-token"
    monkeypatch.delenv("PIPELINE_SCHEMA_REGISTRY_TOKEN")
    monkeypatch.setenv("PIPELINE_SCHEMA_REGISTRY_USER", "ada")
    monkeypatch.setenv("PIPELINE_SCHEMA_REGISTRY_PASSWORD", "pass")
    await decoded(codec(), record)
    assert proxy.authorization == "Basic YWRhOnBhc3M="


async def test_without_a_registry_the_service_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PIPELINE_SCHEMA_REGISTRY_URL", raising=False)
    with pytest.raises(Misconfigured, match="PIPELINE_SCHEMA_REGISTRY_URL is not set"):
        await codec().open("orders", [])
    monkeypatch.setenv("PIPELINE_SCHEMA_REGISTRY_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("PIPELINE_SCHEMA_REGISTRY_CA_FILE", "/nowhere.pem")
    with pytest.raises(Misconfigured, match="PIPELINE_SCHEMA_REGISTRY_"):
        await codec().open("orders", [])


async def test_the_example_of_the_guide_reads_and_writes_events(
    client: SchemaRegistryClient, proxy: Proxy
) -> None:
    schema, example = re.findall(
        r"```(?:json|python)\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL
    )
    handlers = Handlers()
    names: dict[str, Any] = {"Decimal": Decimal, "datetime": datetime, "handlers": handlers}
    names["__name__"] = __name__
    exec(example, names)
    client.register_schema("orders-value", Schema(schema, "AVRO"))
    placed = names["OrderPlaced"](
        order_id="o-1", price=Decimal("9.90"), at=datetime(2026, 1, 31, tzinfo=UTC)
    )
    one = handlers.codecs["orders"]
    await one.open("orders", [type(placed)])
    record = kafka_record(one.encode(outgoing(placed)).payload)
    await one.prepare([record])
    message = one.decode(record)
    assert (message.type, message.id) == ("order.placed.v1", '["shop.OrderPlaced","o-1"]')
    assert type(placed).model_validate_json(message.data or b"") == placed
