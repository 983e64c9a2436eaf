"""Messages: a decoded event together with its record, its identity, and its key in the inbox."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, Protocol

import orjson

from pipeline.errors import UNSTORABLE

from .payload import parse

LONGEST_KEPT_KEY = 64
"""Bytes of the longest key that is cached: caches are bounded by their entries, not by memory."""


class Record(Protocol):
    """The attributes used of a Kafka record, as of aiokafka's `ConsumerRecord[bytes, bytes]`."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def timestamp(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Sequence[tuple[str, bytes | None]]: ...


class Reason(StrEnum):
    """Why a record can't be decoded. These are few and fixed, to label metrics."""

    MISSING_ATTRIBUTE = "missing attribute"
    """A required CloudEvents attribute is absent or empty."""
    INVALID_ATTRIBUTE = "invalid attribute"
    """An attribute is not UTF-8, contains a NUL, is not a string, or is not an RFC 3339 time."""
    INVALID_ENVELOPE = "invalid envelope"
    """The value is not one event in the JSON event format, as its content type says."""
    UNSUPPORTED_SPECVERSION = "unsupported specversion"
    """The version of CloudEvents is not 1.0."""
    NOT_CLOUDEVENTS = "not CloudEvents"
    """The record has no CloudEvents attributes, and the topic has no `Plain`."""
    MISSING_IDENTITY = "missing identity"
    """The record has no CloudEvents attributes, and the topic's `Plain` finds no id."""


class Undecodable(Exception):
    """A record can't be decoded as an event; the text says what is wrong and what to do."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class Header:
    """The value of a header, whose name is case-insensitive, identifies the event.

    Logical duplicates collapse: the same value again, at whatever offset, is the same event. The
    type is part of the id, so that two types may use one value: the id is `["<type>","<value>"]`, a
    JSON array.
    """

    name: str


@dataclass(frozen=True, slots=True, init=False)
class PayloadFields:
    """Top-level fields of the JSON payload identify the event: strings, numbers or booleans.

    Logical duplicates collapse: the same values again, at whatever offset, are the same event. The
    type is part of the id, which is `["<type>",<value>,…]`, a JSON array with the values as they
    are written, so 7, 7.0 and "7" identify three events. A tombstone has no fields: it is
    identified by its position.
    """

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        if not names:
            raise ValueError('name at least one field: PayloadFields("order_id")')
        object.__setattr__(self, "names", names)


@dataclass(frozen=True, slots=True)
class Position:
    """The position in the topic identifies the event: the id is `<partition>-<offset>`.

    Logical duplicates don't collapse: a message that a producer sends twice is two events; one that
    the broker delivers twice is one. A topic that is deleted and created anew repeats positions.
    """


Identity = Header | PayloadFields | Position


@dataclass(frozen=True, slots=True)
class Plain:
    """How events of a topic without CloudEvents are identified; their source is `kafka:<topic>`.

    A record that has CloudEvents attributes nevertheless is decoded by them. Raises `ValueError`
    for a type that is empty or can't be stored.
    """

    type: str
    """The event type of every record of the topic."""
    identity: Identity

    def __post_init__(self) -> None:
        if not self.type or UNSTORABLE.search(self.type):
            raise ValueError(f"the type of a topic's events is a name, not {self.type!r}")


def plain_id(record: Record, plain: Plain, headers: Mapping[str, str]) -> str:
    """Return the event's id by the rule of the topic. Raises `Undecodable`."""
    identity = plain.identity
    try:
        if isinstance(identity, Header):
            values = [headers[identity.name.lower()]]
        elif isinstance(identity, PayloadFields) and record.value is not None:
            payload = parse(record.value)
            values = [payload[name] for name in identity.names]
        else:
            return f"{record.partition}-{record.offset}"
        if any(value in (None, "") or isinstance(value, dict | list) for value in values):
            raise ValueError("null, empty, a list or an object")
        return orjson.dumps([plain.type, *values]).decode()
    except (LookupError, TypeError, ValueError) as error:
        raise Undecodable(
            Reason.MISSING_IDENTITY,
            f"{identity} is to name the events of {record.topic!r}, and has no name for this one"
            f" ({type(error).__name__}: {error}): let the producer send it, or name them otherwise",
        ) from error


class Reference(NamedTuple):
    """Where the data of an event is stored: CloudEvents' `dataref`, and two extensions of ours.

    The extensions serve to verify the data. Other producers may leave them out.
    """

    uri: str
    length: int | None = None
    """Number of bytes; the attribute `datalength`."""
    checksum: str | None = None
    """SHA-256 in hexadecimal digits; the attribute `datachecksum`."""


class Message(NamedTuple):
    """A decoded event, and its record. Attributes that are unset or empty are None."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    """Timestamp of the record, in milliseconds since 1970."""
    key: bytes | None
    source: str
    id: str
    """Identifies the event, together with `source`."""
    type: str
    time: datetime | None
    """When the event happened, in UTC."""
    subject: str | None
    sequence: str | None
    """Position among the events of a subject or source; ordered as text, not as a number."""
    dataschema: str | None
    content_type: str | None
    data: bytes | None
    """The payload. None for a tombstone; `b""` for a structured event without data."""
    traceparent: str | None
    tracestate: str | None
    baggage: str | None
    hash: bytes
    """`payload_hash` of type, content type and data; empty until referenced data is fetched."""
    reference: Reference | None = None
    """Where the data is stored; None if the record contains it, or once it is fetched."""

    def __repr__(self) -> str:
        """Return the record's place and the event's identity, without the payload."""
        place = f"{self.topic}/{self.partition} at {self.offset}"
        return f"<{self.type} {self.id!r} of {self.source!r}, {place}>"


def marker_key(consumer: str, source: str, id: str) -> bytes:
    """Return the key, of 16 bytes, of the marker that a consumer has applied an event."""
    hash = _begun_key(consumer, len(source)).copy()
    hash.update((source + id).encode())
    return hash.digest()


@lru_cache(maxsize=1_024)
def _begun_key(consumer: str, source_length: int) -> blake2b:
    """Return the hash of the common prefix: copying it takes half as long as creating it."""
    return blake2b(f"{len(consumer)}:{source_length}:{consumer}".encode(), digest_size=16)


def printable(text: str) -> str:
    """Return text with escapes for the bytes that were not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def headers_as_json(headers: Sequence[tuple[str, bytes | None]]) -> str:
    """Return headers as JSON; every byte of a value becomes the character with its number."""
    texts = [[name, None if value is None else value.decode("latin-1")] for name, value in headers]
    try:
        return orjson.dumps(texts).decode()
    except orjson.JSONEncodeError:  # a name that is not UTF-8
        return json.dumps(texts)


def headers_of(text: str) -> list[tuple[str, bytes | None]]:
    """Return the headers that `headers_as_json` has encoded."""
    try:
        texts = orjson.loads(text)
    except orjson.JSONDecodeError:
        texts = json.loads(text)
    return [(name, None if value is None else value.encode("latin-1")) for name, value in texts]
