"""Events of a shop, and their schemas in each format."""

import base64
import json
from collections.abc import Iterable
from datetime import date, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from confluent_kafka.schema_registry import Schema
from pydantic import Base64Bytes

from onceward import Event
from onceward.events.message import Record


class OrderPlaced(Event, type="order.placed.v1", topic="orders"):
    """A customer has ordered something."""

    order_id: str
    price: Decimal
    at: datetime
    day: date
    customer: UUID
    photo: Base64Bytes
    weight: float
    lines: list[str]
    note: str | None = None
    seen: int = 0


ORDER = OrderPlaced(
    order_id="o-1",
    price=Decimal("12345678901234567890123456.7890"),
    at=datetime.fromisoformat("2026-01-31T23:59:59.123456Z"),
    day=date(2026, 1, 31),
    customer=UUID("8ffd705c-c55a-4ce3-9bc0-4b2647519b3e"),
    photo=base64.b64encode(b"\xff\x00"),
    weight=0.1,
    lines=["tea", "Brötchen"],
    note="x",
    seen=2**62,
)

NAME = "shop.OrderPlaced"

FIELDS: list[dict[str, Any]] = [
    {"name": "order_id", "type": "string"},
    {
        "name": "price",
        "type": {"type": "bytes", "logicalType": "decimal", "precision": 40, "scale": 4},
    },
    {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    {"name": "day", "type": {"type": "int", "logicalType": "date"}},
    {"name": "customer", "type": {"type": "string", "logicalType": "uuid"}},
    {"name": "photo", "type": "bytes"},
    {"name": "weight", "type": "double"},
    {"name": "lines", "type": {"type": "array", "items": "string"}},
    {"name": "note", "type": ["null", "string"], "default": None},
    {"name": "seen", "type": "long", "default": 0},
]


def record(name: str, *fields: dict[str, Any]) -> Schema:
    """Return the schema of a record in Avro."""
    return avro({"type": "record", "name": name, "fields": list(fields)})


def avro(schema: object, references: Any = None) -> Schema:
    """Return a schema in Avro."""
    return Schema(json.dumps(schema), "AVRO", references or [])


AVRO = record(NAME, *FIELDS)

PROTOBUF = Schema(
    """
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
message Shop { string name = 1; }
message OrderPlaced {
  string order_id = 1;
  string price = 2;
  google.protobuf.Timestamp at = 3;
  string day = 4;
  string customer = 5;
  bytes photo = 6;
  double weight = 7;
  repeated string lines = 8;
  optional string note = 9;
  int64 seen = 10;
}
""",
    "PROTOBUF",
)

JSON = Schema(
    json.dumps(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "title": NAME,
            "type": "object",
            "required": ["order_id", "price"],
            "properties": {
                "order_id": {"type": "string"},
                "price": {"type": ["string", "number"]},
                "weight": {"type": "number"},
            },
        }
    ),
    "JSON",
)

SCHEMAS = {"AVRO": AVRO, "PROTOBUF": PROTOBUF, "JSON": JSON}


def kafka_record(
    value: bytes | None, headers: Iterable[tuple[str, bytes]] = (), topic: str = "orders"
) -> Record:
    """Return a record as a consumer gets it."""
    return SimpleNamespace(
        topic=topic,
        partition=0,
        offset=7,
        timestamp=1_700_000_000_000,
        key=b"o-1",
        value=value,
        headers=tuple(headers),
    )


def outgoing(event: Event, topic: str = "orders") -> Any:
    """Return an event as a codec gets it."""
    return SimpleNamespace(
        topic=topic,
        key=None,
        payload=event.model_dump_json().encode(),
        event_id="e-1",
        source="/shop",
        type=event.__event_type__,
        subject="o-1",
        sequence=7,
        traceparent=None,
        tracestate=None,
        baggage=None,
    )
