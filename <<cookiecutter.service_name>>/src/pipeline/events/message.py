"""What a record says: the event's identity and attributes, its payload and the payload's hash.

The rules are those of CloudEvents 1.0 (Kafka binding, JSON format, the extensions `sequence`,
`dataref` and distributed tracing) and W3C Trace Context. Percent-encoding belongs to HTTP: values
are UTF-8.
"""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import orjson

from .payload import is_json, parse, payload_hash
from .references import Reference

LONGEST_KEPT_KEY = 64
"""Bytes. What is known of longer keys is not kept: caches are bounded by number, not by size."""

_REQUIRED = ("ce_specversion", "ce_id", "ce_source", "ce_type")
_required = itemgetter(*_REQUIRED)
_OPTIONAL = ("ce_time", "ce_subject", "ce_sequence", "ce_dataschema", "ce_datacontenttype")
_REFERENCE = ("ce_dataref", "ce_datalength", "ce_datachecksum")
_TRACES = (("traceparent", "tracestate"), ("ce_traceparent", "ce_tracestate"))
"""Parent and state, by HTTP's names first."""
_TRACE = (*_TRACES[0], *_TRACES[1], "baggage")

# PostgreSQL's text holds no NUL; a surrogate stands for a byte that was not UTF-8.
_UNUSABLE = re.compile(r"[\x00\ud800-\udfff]")
_RFC3339 = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(?:\.\d+)?(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII
)
_LENGTH = re.compile(r"[0-9]{1,18}")
_TRACEPARENT = re.compile(
    r"(?!ff|00.{54})[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
    r"(?:-[!-~]*)?"  # of versions to come
)


class Record(Protocol):
    """What is read of a Kafka record; aiokafka's `ConsumerRecord[bytes, bytes]` is one."""

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
    """Why a record can't be decoded: few and fixed, to label metrics."""

    MISSING_ATTRIBUTE = "missing attribute"
    """A required CloudEvents attribute is absent or empty."""
    INVALID_ATTRIBUTE = "invalid attribute"
    """An attribute is not UTF-8, holds a NUL, is no string, or is no RFC 3339 time."""
    INVALID_ENVELOPE = "invalid envelope"
    """What claims to be structured mode is not one event in the JSON event format."""
    UNSUPPORTED_SPECVERSION = "unsupported specversion"
    """CloudEvents, but not 1.0."""
    NOT_CLOUDEVENTS = "not CloudEvents"
    """No CloudEvents, and nobody said how else the topic names its events."""
    MISSING_IDENTITY = "missing identity"
    """No CloudEvents, and what should name the event instead is absent or unusable."""


class Undecodable(Exception):
    """A record can't be read as an event; the text says what is wrong and what to do."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class Header:
    """The value of a header, whose name counts in any case, names the event.

    Logical duplicates collapse: the same value again, at whatever offset, is the same event. The
    type belongs to the key: two types may use one value. The id is `["<type>","<value>"]`, a JSON
    array.
    """

    name: str


@dataclass(frozen=True, slots=True, init=False)
class PayloadFields:
    """Top-level fields of the JSON payload, strings, numbers or booleans, name the event together.

    Logical duplicates collapse: the same values again, at whatever offset, are the same event. The
    type belongs to the key. The id is `["<type>",<value>,…]`, a JSON array with the values as they
    are written, so 7, 7.0 and "7" name three events. A tombstone has no fields: its position names
    it.
    """

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        if not names:
            raise ValueError('name at least one field: PayloadFields("order_id")')
        object.__setattr__(self, "names", names)


@dataclass(frozen=True, slots=True)
class Position:
    """The place in the topic names the event: the id is `<partition>-<offset>`.

    Logical duplicates don't collapse: what a producer sends twice is two events. What the broker
    delivers twice is one. A topic that is deleted and made anew repeats its positions.
    """


Identity = Header | PayloadFields | Position


@dataclass(frozen=True, slots=True)
class Plain:
    """How a topic without CloudEvents names its events; their source is `kafka:<topic>`.

    A record that has CloudEvents all the same is read as that. Raises `ValueError` for a type that
    is empty or can't be stored.
    """

    type: str
    """The event type of every record of the topic."""
    identity: Identity

    def __post_init__(self) -> None:
        if not self.type or _UNUSABLE.search(self.type):
            raise ValueError(f"the type of a topic's events is a name, not {self.type!r}")


class Message(NamedTuple):
    """An event, and the record that brought it. What is unset or empty is None."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    """The record's, in milliseconds since 1970."""
    key: bytes | None
    source: str
    id: str
    """Identifies the event, together with `source`."""
    type: str
    time: datetime | None
    """When it happened, in UTC."""
    subject: str | None
    sequence: str | None
    """Its place among the events of a subject or source; ordered as text, not as a number."""
    dataschema: str | None
    content_type: str | None
    data: bytes | None
    """The payload. None is a tombstone; a structured event without data is none, and has `b""`."""
    traceparent: str | None
    tracestate: str | None
    baggage: str | None
    hash: bytes
    """`payload_hash` of type, content type and data; empty while the data is not there."""
    reference: Reference | None = None
    """Where the data is, until it is fetched."""

    def __repr__(self) -> str:
        """Return where it is from and what it is; its payload is nobody's business."""
        place = f"{self.topic}/{self.partition} at {self.offset}"
        return f"<{self.type} {self.id!r} of {self.source!r}, {place}>"


def decode(record: Record, plain: Plain | None = None, *, hash: bytes | None = None) -> Message:
    """Read a record as an event: CloudEvents in binary or structured mode, or as `plain` says.

    Header names count in any case, the last of several with one name wins, an empty value is none,
    and malformed trace context is dropped. `hash` is the payload's, where it has been computed
    before. Raises `Undecodable`, and nothing else.
    """
    try:
        headers = {name.lower(): value.decode() for name, value in record.headers if value}
    except UnicodeDecodeError:
        headers = _lenient(record)
    data = record.value
    media_type = headers.get("content-type", "")
    structured = media_type[:23].lower() == "application/cloudevents"
    if structured:
        attributes, data = _unwrap(media_type, data)
        headers = {name: headers[name] for name in _TRACE if name in headers} | attributes
    values = "".join(headers.values())
    if not values.isascii() or "\0" in values:
        headers = _storable(headers)
    content_type = headers.get("content-type") or headers.get("ce_datacontenttype")
    # Nearly all have the first one: that is quicker to ask.
    if structured or "ce_specversion" in headers or not headers.keys().isdisjoint(_REQUIRED):
        source, id, type = _identity(headers)
    elif plain is not None:
        source, id, type = f"kafka:{record.topic}", _plain_id(record, plain, headers), plain.type
    else:
        raise Undecodable(
            Reason.NOT_CLOUDEVENTS,
            f"the headers {', '.join(_REQUIRED)} are missing: let the producer send CloudEvents,"
            f" or say how {record.topic!r} names its events, with"
            " Plain(type=…, identity=Header(…) or PayloadFields(…) or Position())",
        )
    reference = None
    if not data and "ce_dataref" in headers and "ce_id" in headers:
        reference, data = _reference(headers), b""
    time = headers.get("ce_time")
    traceparent, tracestate = _trace(headers)
    return Message(
        record.topic,
        record.partition,
        record.offset,
        record.timestamp,
        record.key,
        source,
        id,
        type,
        None if time is None else _time(time),
        headers.get("ce_subject"),
        headers.get("ce_sequence"),
        headers.get("ce_dataschema"),
        content_type,
        data,
        traceparent,
        tracestate,
        headers.get("baggage"),
        b"" if reference else hash or payload_hash(type, content_type, data),
        reference,
    )


def names_of(record: Record) -> tuple[str | None, str | None]:
    """Return the CloudEvents id and `traceparent` that are in the headers, decodable or not."""
    headers = _lenient(record)
    id = headers.get("ce_id")
    return None if id is None or _UNUSABLE.search(id) else id, _trace(headers)[0]


def _lenient(record: Record) -> dict[str, str]:
    """Return the headers, with surrogates for bytes that are not UTF-8."""
    return {
        name.lower(): value.decode("utf-8", "surrogateescape")
        for name, value in record.headers
        if value
    }


def marker_key(consumer: str, source: str, id: str) -> bytes:
    """Return the 16 bytes under which the inbox remembers that a consumer took an event."""
    hash = _begun_key(consumer, len(source)).copy()
    hash.update((source + id).encode())
    return hash.digest()


@lru_cache(maxsize=1_024)
def _begun_key(consumer: str, source_length: int) -> blake2b:
    """Return a key's hash as it begins: to copy it takes half of the time that to make it does."""
    return blake2b(f"{len(consumer)}:{source_length}:{consumer}".encode(), digest_size=16)


def event_headers(
    *,
    id: str,
    source: str,
    type: str,
    time: datetime,
    subject: str | None,
    sequence: int | None,
    content_type: str | None,
    traceparent: str | None,
    tracestate: str | None,
    baggage: str | None,
) -> list[tuple[str, bytes]]:
    """Return the headers of an event in binary mode; what is None gets none.

    Values go out as they are: staging has checked them. Raises `ValueError` for a naive `time`.
    """
    if time.tzinfo is not UTC:
        if time.tzinfo is None:
            raise ValueError(f"the time of event {id!r} has no time zone: {time}")
        time = time.astimezone(UTC)
    headers = [
        *_constant_headers(source, type, content_type),
        ("ce_id", id.encode()),
        ("ce_time", orjson.dumps(time)[1:-1]),  # in a fourth of isoformat()'s time
    ]
    if subject is not None:
        headers.append(("ce_subject", subject.encode()))
    if sequence is not None:
        headers.append(("ce_sequence", b"%020d" % sequence))
    if traceparent is not None:
        headers.append(("traceparent", traceparent.encode()))
    if tracestate is not None:
        headers.append(("tracestate", tracestate.encode()))
    if baggage is not None:
        headers.append(("baggage", baggage.encode()))
    return headers


@lru_cache(maxsize=1_024)
def _constant_headers(
    source: str, type: str, content_type: str | None
) -> tuple[tuple[str, bytes], ...]:
    headers = ("ce_specversion", b"1.0"), ("ce_source", source.encode()), ("ce_type", type.encode())
    return headers if content_type is None else (*headers, ("content-type", content_type.encode()))


def _identity(headers: Mapping[str, str]) -> tuple[str, str, str]:
    try:
        version, id, source, type = _required(headers)
    except KeyError as error:  # of the first one that is missing
        name = error.args[0]
        raise Undecodable(
            Reason.MISSING_ATTRIBUTE,
            f"the CloudEvents attribute {name[3:]} is missing or empty: let the producer set it"
            f" (in binary mode as header {name})",
        ) from None
    if version != "1.0":
        raise Undecodable(
            Reason.UNSUPPORTED_SPECVERSION,
            f"specversion is {version[:80]!r}: let the producer send CloudEvents 1.0",
        )
    return source, id, type


def _plain_id(record: Record, plain: Plain, headers: Mapping[str, str]) -> str:
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


def _unwrap(media_type: str, value: bytes | None) -> tuple[dict[str, str], bytes]:
    """Return the headers and the value that a structured event has in binary mode."""
    try:
        if media_type.partition(";")[0].strip().lower() != "application/cloudevents+json":
            raise ValueError(f"content-type is {media_type[:80]!r}")
        event = parse(value or b"")
        if not isinstance(event, dict):
            raise ValueError("the value is no JSON object")
        if "data" in event and not event.get("datacontenttype"):
            event["datacontenttype"] = "application/json"
        headers: dict[str, str] = {}
        for name in (
            *(*_REQUIRED, *_OPTIONAL, *_REFERENCE),
            *("ce_traceparent", "ce_tracestate"),
        ):
            attribute = event.get(name[3:])
            if isinstance(attribute, orjson.Fragment):  # an Integer, as it is in binary mode
                attribute = orjson.dumps(attribute).decode()
            if isinstance(attribute, str):
                headers[name] = attribute
            elif attribute is not None and name not in _TRACE:
                raise Undecodable(
                    Reason.INVALID_ATTRIBUTE,
                    f"the attribute {name[3:]} is no string: let the producer send one",
                )
        return {n: v for n, v in headers.items() if v}, _data(event, headers)
    except (TypeError, ValueError) as error:
        raise Undecodable(
            Reason.INVALID_ENVELOPE,
            f"no event in structured mode: {error}. Let the producer send each event in a record of"
            " its own as application/cloudevents+json, or in binary mode; batches aren't read",
        ) from error


def _data(event: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
    data, encoded = event.get("data"), event.get("data_base64")
    content_type = headers.get("ce_datacontenttype")
    if encoded is not None:
        if data is not None:
            raise ValueError("both data and data_base64 are set")
        return base64.b64decode(encoded, validate=True)
    if "data" in event and is_json(content_type):
        return orjson.dumps(data)
    if data is None or isinstance(data, str):
        return (data or "").encode()
    raise ValueError(f"data of the type {content_type!r} is no string")


def _storable(headers: Mapping[str, str]) -> dict[str, str]:
    """Drop trace context that PostgreSQL can't store; raise for any other such attribute."""
    storable = dict(headers)
    for name, value in headers.items():
        if _UNUSABLE.search(value):
            if name in _TRACE:
                del storable[name]
            elif name in (*_REQUIRED, *_OPTIONAL, *_REFERENCE, "content-type"):
                raise Undecodable(
                    Reason.INVALID_ATTRIBUTE,
                    f"{name} is not UTF-8 or holds a NUL: {value[:80]!r}; let the producer send"
                    " text",
                )
    return storable


def refers(record: Record) -> bool:
    """Whether a record may say where its data is instead of bringing it."""
    return any(name.lower() == "ce_dataref" for name, _ in record.headers)


def _reference(headers: Mapping[str, str]) -> Reference:
    length = headers.get("ce_datalength")
    if length is not None and not _LENGTH.fullmatch(length):
        raise Undecodable(
            Reason.INVALID_ATTRIBUTE,
            f"datalength is {length[:80]!r}: let the producer send the number of bytes",
        )
    return Reference(
        headers["ce_dataref"],
        None if length is None else int(length),
        headers.get("ce_datachecksum"),
    )


def _trace(headers: Mapping[str, str]) -> tuple[str | None, str | None]:
    for parent, state in _TRACES:
        traceparent = headers.get(parent)
        if traceparent is not None and _TRACEPARENT.fullmatch(traceparent):
            return traceparent, headers.get(state)
    return None, None


def _time(text: str) -> datetime:
    try:
        if not _RFC3339.fullmatch(text):
            raise ValueError("not RFC 3339")
        if text[17:19] == "60":  # A leap second, which Python doesn't know: the second before.
            text = f"{text[:17]}59{text[19:]}"
        time = datetime.fromisoformat(text.upper())
        return time if time.tzinfo is UTC else time.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise Undecodable(
            Reason.INVALID_ATTRIBUTE,
            f"time is {text[:80]!r} ({error}): let the producer send 2026-01-31T23:59:59Z",
        ) from error


def printable(text: str) -> str:
    """Return text with escapes for the bytes that were not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def headers_as_json(headers: Sequence[tuple[str, bytes | None]]) -> str:
    """Write headers as JSON; every byte of a value is one character of the same number."""
    texts = [[name, None if value is None else value.decode("latin-1")] for name, value in headers]
    try:
        return orjson.dumps(texts).decode()
    except orjson.JSONEncodeError:  # a name that is not UTF-8
        return json.dumps(texts)


def headers_of(text: str) -> list[tuple[str, bytes | None]]:
    """Return the headers that were written as JSON."""
    try:
        texts = orjson.loads(text)
    except orjson.JSONDecodeError:
        texts = json.loads(text)
    return [(name, None if value is None else value.encode("latin-1")) for name, value in texts]
