"""Events on their way through Kafka in Confluent's wire format, and a registry that goes away."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from servers.apicurio import Apicurio
from sqlalchemy.orm import DeclarativeBase

from onceward import Event, Handlers, Service, Transaction
from onceward.apply import batch
from onceward.operators import corrections
from onceward.plain import PayloadFields
from onceward.schema_registry import Confluent
from onceward.schema_registry.avro import Avro

from .proxy import Proxy
from .shop import record
from tests.conftest import Records, Running
from tests.servers.waiting import eventually

pytestmark = pytest.mark.full


class Base(DeclarativeBase):
    """The shop has no tables."""


class Paid(Event, type="paid"):
    """Somebody has paid."""

    order_id: str
    amount: Decimal


FIELDS: list[dict[str, Any]] = [
    {"name": "order_id", "type": "string"},
    {
        "name": "amount",
        "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2},
    },
]
PAID, BOOKED = record("shop.Paid", *FIELDS), record("shop.Booked", *FIELDS)


class Shop:
    """A service that reads payments and publishes what it has booked, both in Avro."""

    def __init__(self, payments: str, bookings: str) -> None:
        self.payments, self.bookings = payments, bookings
        self.handlers = Handlers()
        self.seen: list[Paid] = []

        class Booked(Paid, type="booked", topic=bookings):
            pass

        self.handlers.topic(
            payments,
            codec=Confluent(types={"shop.Paid": Paid}, identity=PayloadFields("order_id")),
        )
        self.handlers.topic(bookings, codec=Confluent(types={"shop.Booked": Booked}))

        @self.handlers.on(Paid, topic=payments, consumer="book")
        async def book(paid: Paid, tx: Transaction) -> None:
            self.seen.append(paid)
            tx.publish(Booked(order_id=paid.order_id, amount=paid.amount), key=paid.order_id)

        self.service = Service(f"shop-{uuid4().hex[:8]}", self.handlers, Base.metadata)

    def register(self, client: SchemaRegistryClient, *schemas: Schema) -> None:
        """Register the schemas of both topics, always in the same order, with the same ids."""
        client.register_schema(f"{self.payments}-value", PAID)
        client.register_schema(f"{self.bookings}-value", BOOKED)
        for number, schema in enumerate(schemas):
            client.register_schema(f"{self.payments}-{number}", schema)


@pytest.fixture
async def shop(new_topic: Callable[..., Awaitable[str]]) -> Shop:
    """Return a shop with topics of its own, of one partition each."""
    return Shop(await new_topic(), await new_topic())


async def parked(db: asyncpg.Connection) -> list[tuple[str, str, int]]:
    """Return reason, error and attempts of what is in the backlog."""
    rows = await db.fetch("SELECT reason, error, attempts FROM pipeline.backlog ORDER BY 2")
    return [tuple(row) for row in rows]


def written_by(client: SchemaRegistryClient, topic: str) -> Callable[[str, Decimal], bytes]:
    """Return how Confluent's serializer writes a payment for a topic, by order and amount."""
    context = SerializationContext(topic, MessageField.VALUE)
    settings = {"auto.register.schemas": False, "subject.name.strategy.type": "TOPIC"}
    serializer = AvroSerializer(client, PAID.schema_str, conf=settings)

    def write(order: str, amount: Decimal) -> bytes:
        value: bytes = serializer({"order_id": order, "amount": amount}, context)
        return value

    return write


async def test_a_payment_of_confluents_serializer_becomes_a_booking_for_its_deserializer(
    shop: Shop,
    client: SchemaRegistryClient,
    proxy: Proxy,
    running: Running,
    producer: AIOKafkaProducer,
    records: Records,
    db: asyncpg.Connection,
) -> None:
    shop.register(client)
    write = written_by(client, shop.payments)
    amounts = [Decimal("1234567890.10"), Decimal("0.01"), Decimal("-5.00")]
    async with running(shop.service):
        for number, amount in enumerate(amounts):
            value = write(str(number), amount)
            for _ in range(2):  # the second is a duplicate
                await producer.send_and_wait(shop.payments, value, key=b"one")
        await producer.send_and_wait(shop.payments, b"\0\0\x0f\x42\x40x")
        await producer.send_and_wait(shop.payments, b'{"order_id": "4"}')
        found = await records(shop.bookings, 3)

        async def both_are_dead() -> bool:
            return len(await parked(db)) == 2

        await eventually(both_are_dead)
    read = AvroDeserializer(client)
    booked = SerializationContext(shop.bookings, MessageField.VALUE)
    values = [read(one.value, booked) for one in found]
    assert [(one["order_id"], str(one["amount"])) for one in values] == [
        (str(number), str(amount)) for number, amount in enumerate(amounts)
    ]
    headers = dict(found[0].headers)
    assert headers["ce_type"] == b"booked"
    assert headers["content-type"] == b"application/avro"
    assert len(shop.seen) == 3
    errors = [error for _, error, _ in await parked(db)]
    assert "has no schema 1000000:" in errors[1]
    assert "does not begin with the id of a schema" in errors[0]


async def test_a_payment_in_avro_is_corrected(
    shop: Shop,
    client: SchemaRegistryClient,
    proxy: Proxy,
    running: Running,
    producer: AIOKafkaProducer,
    records: Records,
    db: asyncpg.Connection,
) -> None:
    corrected: list[Paid] = []
    handlers = shop.handlers

    async def none_waits() -> bool:
        return await parked(db) == []

    @handlers.correct(Paid, topic=shop.payments, of="book", consumer="unbook")
    async def unbook(paid: Paid, tx: Transaction) -> None:
        corrected.append(paid)

    shop.register(client)
    write = written_by(client, shop.payments)
    async with running(shop.service):
        for number in range(3):
            value = write(str(number), Decimal("0.10"))
            await producer.send_and_wait(shop.payments, value, key=b"one")
        await eventually(lambda: len(shop.seen) == 3)
        assert corrected == [], "it takes no records"
        found = await records(shop.payments, 3)
        assert await batch.prepare(handlers, found) == {}
        items = [corrections.item_of(handlers, "unbook", one) for one in found]
        for _ in range(2):  # nothing is new, or it has a marker
            async with db.transaction():
                await corrections.hand(db, [one for one in items if one], 0.0, None)
            await eventually(none_waits)
    assert corrected == shop.seen


async def test_a_registry_that_is_stopped_and_started_again_costs_no_attempt(
    shop: Shop,
    apicurio: Apicurio,
    proxy: Proxy,
    running: Running,
    producer: AIOKafkaProducer,
    records: Records,
    db: asyncpg.Connection,
) -> None:
    newer = record("shop.Paid", *FIELDS, {"name": "by", "type": "string", "default": "cash"})
    await asyncio.to_thread(_start_again, apicurio)  # its ids are those of an empty registry
    with SchemaRegistryClient({"url": apicurio.url}) as client:
        shop.register(client, newer)
        old_id = client.get_latest_version(f"{shop.payments}-value").schema_id
        new_id = client.get_latest_version(f"{shop.payments}-0").schema_id

    async def pay(number: int, id: int | None, schema: Schema) -> None:
        assert id is not None
        by = {"by": "card"} if schema is newer else {}
        payload = json.dumps({"order_id": str(number), "amount": str(number), **by})
        value = b"\0" + id.to_bytes(4) + Avro(schema, {}).write("shop.Paid", payload.encode())
        await producer.send_and_wait(shop.payments, value, key=str(number).encode())

    async with running(shop.service, retry_pause=0.1) as health:
        await pay(1, old_id, PAID)
        await records(shop.bookings, 1)
        await asyncio.to_thread(apicurio.stop)
        await pay(2, old_id, PAID)
        await records(shop.bookings, 2)  # by a schema that is known
        await pay(3, new_id, newer)
        await pay(4, old_id, PAID)
        await eventually(lambda: any(proxy.url in text for text in health.reasons.values()))
        assert await parked(db) == []
        assert len(shop.seen) == 2
        proxy.answer = (503, b"")  # until the registry has its schemas again
        await asyncio.to_thread(apicurio.start)
        await asyncio.to_thread(apicurio.wait_until_serving)
        _register_again(shop, apicurio, newer, new_id)
        proxy.answer = None
        await records(shop.bookings, 4)
        await eventually(lambda: health.is_ready)
    assert [one.order_id for one in shop.seen] == ["1", "2", "3", "4"]
    assert await parked(db) == []


def _start_again(apicurio: Apicurio) -> None:
    apicurio.stop()
    apicurio.start()
    apicurio.wait_until_serving()


def _register_again(shop: Shop, apicurio: Apicurio, newer: Schema, id: int | None) -> None:
    """Register the schemas in the registry, which has forgotten them, with the same ids."""
    with SchemaRegistryClient({"url": apicurio.url}) as client:
        shop.register(client, newer)
        assert client.get_latest_version(f"{shop.payments}-0").schema_id == id


async def test_a_service_waits_for_an_unavailable_registry_at_its_start(
    shop: Shop,
    client: SchemaRegistryClient,
    proxy: Proxy,
    running: Running,
    producer: AIOKafkaProducer,
    records: Records,
) -> None:
    shop.register(client)
    proxy.answer = (503, b"")
    context = SerializationContext(shop.payments, MessageField.VALUE)
    serializer = AvroSerializer(
        client, PAID.schema_str, conf={"subject.name.strategy.type": "TOPIC"}
    )
    value = serializer({"order_id": "1", "amount": Decimal(1)}, context)
    await producer.send_and_wait(shop.payments, value)
    async with running(shop.service) as health:
        await eventually(lambda: any(proxy.url in text for text in health.reasons.values()))
        proxy.answer = None
        await records(shop.bookings, 1)
