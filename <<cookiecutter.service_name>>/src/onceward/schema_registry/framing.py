"""Framing: which schema a record names, in front of its payload or in a header."""

import io
import struct
from typing import NamedTuple
from uuid import UUID

from confluent_kafka.schema_registry.serde import SchemaId
from confluent_kafka.serialization import SerializationError

from onceward.errors import OncewardError
from onceward.events.message import Record

HEADER = "__value_schema_id"
"""The header of Confluent's `HeaderSchemaIdSerializer`; it has the same bytes as the prefix."""
_FRAME_AT_MOST = 256
"""Bytes of the longest frame that is parsed: that of a message at 50 levels in Protobuf."""

SchemaKey = int | UUID
"""What a record names its schema by: an id of one registry, or the id of all registries."""


class Unframed(OncewardError, ValueError):
    """A record names no schema."""


class Frame(NamedTuple):
    """The schema that a record names, and its payload."""

    key: SchemaKey
    indexes: list[int] | None
    """Which message of a schema in Protobuf it is; None for other formats."""
    body: bytes


def key_of(record: Record) -> SchemaKey:
    """Return the id of the record's schema. Raises `Unframed`."""
    return parse(record, "AVRO").key


def parse(record: Record, kind: str) -> Frame:
    """Return the parts of a record whose schema is of this kind. Raises `Unframed`."""
    value = record.value or b""
    header = next((text for name, text in record.headers if name == HEADER), None)
    framed = header or value
    stream = io.BytesIO(framed[:_FRAME_AT_MOST])
    id = SchemaId(kind)
    try:
        id.from_bytes(stream)
    except (SerializationError, EOFError, ValueError, struct.error) as error:
        place = f"the header {HEADER}" if header else "the payload"
        raise Unframed(
            f"{place} does not begin with the id of a schema, which is a byte 0 and 4 bytes, or a"
            " byte 1 and 16 bytes"
        ) from error
    body = value if header else value[stream.tell() :]
    key = id.guid or id.id
    assert key is not None
    return Frame(key, id.message_indexes, body)
