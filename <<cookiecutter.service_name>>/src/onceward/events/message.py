"""Messages: a decoded event together with its record, its identity, and its key in the inbox."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, Protocol

import orjson

from onceward.errors import OncewardError

_LAST_MILLISECOND = 253_402_300_799_000
"""The end of the year 9999. Producers may send any number as a timestamp."""

FIRST_MILLISECOND = 5_000_000_000
"""In February 1970. What seems to be older are seconds, of times until 2128, or no time at all."""

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


def time_of(milliseconds: int) -> datetime:
    """Return the time of a record; a timestamp outside of the calendar becomes its nearest time."""
    return datetime.fromtimestamp(min(max(0, milliseconds), _LAST_MILLISECOND) / 1e3, UTC)


def seconds_of(milliseconds: float) -> float | None:
    """Return the time of a record in seconds since 1970.

    None: it is not known, as its producer sets none, or counts in seconds.
    """
    return milliseconds / 1e3 if milliseconds >= FIRST_MILLISECOND else None


class Reason(StrEnum):
    """Why a record can't be decoded. These are few and fixed, to label metrics."""

    MISSING_ATTRIBUTE = "missing attribute"
    """A required CloudEvents attribute is absent or empty."""
    INVALID_ATTRIBUTE = "invalid attribute"
    """An attribute is not one string of UTF-8 without a NUL, or is not an RFC 3339 time."""
    INVALID_ENVELOPE = "invalid envelope"
    """The value is not one event in the JSON event format, or in the form of the topic's codec."""
    UNSUPPORTED_SPECVERSION = "unsupported specversion"
    """The version of CloudEvents is not 1.0."""
    NOT_CLOUDEVENTS = "not CloudEvents"
    """The record has no CloudEvents attributes, and the topic has no other codec."""
    MISSING_IDENTITY = "missing identity"
    """The topic's codec finds no id in the record."""
    MISSING_TYPE = "missing type"
    """The topic's codec finds no type in the record."""
    UNKNOWN_SCHEMA = "unknown schema"
    """The record names a schema that the topic's codec can't have."""


class Undecodable(OncewardError):
    """A record can't be decoded as an event; the text says what is wrong and what to do."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason: Reason = reason


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
    """`payload_hash` of the record's name for the type, content type and data; empty until
    referenced data is fetched."""
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
    """Return text with escapes for the bytes that were not UTF-8, such as `\\xff`."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


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
