"""CloudEvents: decodes a record as an event, and encodes the headers of a published event.

The rules are those of CloudEvents 1.0 (Kafka binding, JSON format, the extensions `sequence`,
`dataref` and distributed tracing) and W3C Trace Context. Percent-encoding belongs to HTTP: values
are UTF-8.
"""

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import asyncpg
import orjson

from onceward.errors import UNSTORABLE

from .message import Message, Reason, Record, Reference, Undecodable, headers_of
from .payload import is_json, parse, payload_hash

STRUCTURED = "application/cloudevents+json"
REQUIRED = ("ce_specversion", "ce_id", "ce_source", "ce_type")
_required = itemgetter(*REQUIRED)
_REFERENCE = ("ce_dataref", "ce_datalength", "ce_datachecksum")
_ATTRIBUTES = (
    *(*REQUIRED, *_REFERENCE, "ce_time", "ce_subject", "ce_sequence"),
    *("ce_dataschema", "ce_datacontenttype"),
)
TRACE = ("traceparent", "tracestate", "baggage")
SEVERAL = "\ud800"
"""Begins what stands for several values of a header: no text, and no bytes either."""
_EXTENSION = ("ce_traceparent", "ce_tracestate")
"""Trace context as attributes, which counts where the headers of W3C are missing."""
_CONTEXTS = (TRACE[:2], _EXTENSION)
_AS_TEXT = (("ce_subject", "subject"), *((name, name) for name in TRACE))
"""Headers, and the columns of the outbox that they are encoded from."""
_REFERRING = (*_AS_TEXT, *((name, name[3:]) for name in _REFERENCE))
"""Those of an event whose payload is stored elsewhere."""

_RFC3339 = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(?:\.\d+)?(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII
)
_LENGTH = re.compile(r"[0-9]{1,18}")
_TRACEPARENT = re.compile(
    r"(?!ff|00.{54})[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
    r"(?:-[!-~]*)?"  # fields of later versions
)


class Named(NamedTuple):
    """Identity and data of a record without CloudEvents attributes; its source is its topic."""

    id: str
    name: str
    """The record's own name for the type, which no setting of the service changes: it is hashed."""
    type: str
    content_type: str | None
    data: bytes | None


def decode(
    record: Record,
    otherwise: Callable[[Record, Mapping[str, str]], Named],
    *,
    structured: bool = False,
    hash: bytes | None = None,
) -> Message:
    """Decode a record as CloudEvents, in binary or structured mode, or by `otherwise`.

    Header names are case-insensitive. An empty value counts as absent, and several values of a name
    are not text, but of `TRACE` the last one is used. Malformed trace context is dropped. `hash` is
    that of the payload, if it is known already. Raises `Undecodable`.
    """
    headers, data, is_structured = _headers_and_data(record)
    # Nearly all events have the first of these headers, which is quicker to look up.
    if is_structured or "ce_specversion" in headers or not headers.keys().isdisjoint(REQUIRED):
        source, id, type = _identity(headers)
        content_type = headers.get("content-type") or headers.get("ce_datacontenttype")
    elif structured and data is not None:
        headers, data, _ = _headers_and_data(record, STRUCTURED)
        source, id, type = _identity(headers)
        content_type = headers.get("ce_datacontenttype")
    else:
        source = f"kafka:{record.topic}"
        id, name, type, content_type, data = otherwise(record, headers)
        hash = hash or payload_hash(name, content_type, data)
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


def _headers_and_data(
    record: Record, media_type: str | None = None
) -> tuple[dict[str, str], bytes | None, bool]:
    """Return headers and data as in binary mode, and whether the record is in structured mode.

    `media_type` replaces that of the record.
    """
    try:
        headers = {name.lower(): value.decode() for name, value in record.headers if value}
    except UnicodeDecodeError:
        headers = {}
    if len(headers) < len(record.headers):
        headers = _lenient(record)
    data = record.value
    media_type = media_type or headers.get("content-type", "")
    if is_structured := _is_structured(media_type):
        attributes, data = _unwrap(media_type, data)
        headers = {name: headers[name] for name in TRACE if name in headers} | attributes
    values = "".join(headers.values())
    if not values.isascii() or "\0" in values:
        headers = _storable(headers)
    return headers, data, is_structured


def _is_structured(media_type: str) -> bool:
    return media_type[:23].lower() == "application/cloudevents"


def names_of(record: Record) -> tuple[str | None, str | None]:
    """Return CloudEvents id and `traceparent`, even of an undecodable record; None if unknown."""
    headers = _lenient(record)
    media_type = headers.get("content-type", "")
    if _is_structured(media_type):
        headers.pop("ce_id", None)  # it is not the event's
        with suppress(Undecodable):
            headers |= _unwrap(media_type, record.value)[0]
    id = headers.get("ce_id")
    return None if id is None or UNSTORABLE.search(id) else id, _trace(headers)[0]


def _lenient(record: Record) -> dict[str, str]:
    """Return the headers, with surrogates for bytes that are not UTF-8, and for several values."""
    headers: dict[str, str] = {}
    for name, value in record.headers:
        if value:
            key, text = name.lower(), value.decode("utf-8", "surrogateescape")
            former = text if key in TRACE else headers.get(key, text)
            headers[key] = text if text == former else f"{SEVERAL}{former[:40]}, {text[:40]}"
    return headers


def event_headers(event: asyncpg.Record | Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """Return the headers of a row of the outbox in binary mode, without those that are None.

    Values are not checked here: staging has checked them. Raises `ValueError` for a naive time.
    """
    time = event["created_at"]
    if time.tzinfo is not UTC:
        if time.tzinfo is None:
            raise ValueError(f"the time of event {event['event_id']!r} has no time zone: {time}")
        time = time.astimezone(UTC)
    headers = [
        *_constant_headers(event["source"], event["type"], event["content_type"]),
        ("ce_id", event["event_id"].encode()),
        ("ce_time", orjson.dumps(time)[1:-1]),  # takes a quarter of the time of isoformat()
    ]
    if (sequence := event["sequence"]) is not None:
        headers.append(("ce_sequence", b"%020d" % sequence))
    for name, column in _AS_TEXT if event["dataref"] is None else _REFERRING:
        value = event[column]
        if value is not None:
            headers.append((name, str(value).encode()))
    return headers


def sent_headers(event: asyncpg.Record | Mapping[str, Any]) -> Sequence[tuple[str, bytes | None]]:
    """Return the headers of the record of a row of the outbox."""
    kept = event["headers"]
    if kept is None:
        return event_headers(event)
    if not has_own_headers(kept):
        return headers_of(kept)
    own = ((name, value.encode()) for name, value in json.loads(kept).items())
    return [*event_headers(event), *own]


def own_headers(headers: Mapping[str, str]) -> str:
    """Return the headers that a row has beside those of CloudEvents, as JSON of ASCII."""
    return json.dumps(headers)


def has_own_headers(kept: str) -> bool:
    """Whether a row's headers come beside those of CloudEvents, not in their place."""
    return kept.startswith("{")


@lru_cache(maxsize=1_024)
def _constant_headers(
    source: str, type: str, content_type: str | None
) -> tuple[tuple[str, bytes], ...]:
    headers = ("ce_specversion", b"1.0"), ("ce_source", source.encode()), ("ce_type", type.encode())
    return headers if content_type is None else (*headers, ("content-type", content_type.encode()))


def _identity(headers: Mapping[str, str]) -> tuple[str, str, str]:
    try:
        version, id, source, type = _required(headers)
    except KeyError as error:  # its argument is the first missing header
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


def _unwrap(media_type: str, value: bytes | None) -> tuple[dict[str, str], bytes]:
    """Return the headers and the value of a structured event as in binary mode."""
    try:
        if media_type.partition(";")[0].strip().lower() != STRUCTURED:
            raise ValueError(f"content-type is {media_type[:80]!r}")
        event = parse(value or b"")
        if not isinstance(event, dict):
            raise ValueError("the value is not a JSON object")
        if "data" in event and not event.get("datacontenttype"):
            event["datacontenttype"] = "application/json"
        headers: dict[str, str] = {}
        for name in (*_ATTRIBUTES, *_EXTENSION):
            attribute = event.get(name[3:])
            if isinstance(attribute, orjson.Fragment):  # an Integer: its text in binary mode
                attribute = orjson.dumps(attribute).decode()
            if isinstance(attribute, str):
                headers[name] = attribute
            elif attribute is not None and name not in _EXTENSION:
                raise Undecodable(
                    Reason.INVALID_ATTRIBUTE,
                    f"the attribute {name[3:]} is no string: let the producer send one",
                )
        return {n: v for n, v in headers.items() if v}, _data(event, headers)
    except (TypeError, ValueError) as error:
        raise Undecodable(
            Reason.INVALID_ENVELOPE,
            f"not an event in structured mode: {error}. Let the producer send each event in a"
            " record of its own as application/cloudevents+json, or in binary mode; batches aren't"
            " read",
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
    """Return the headers without unstorable trace context; raises for other attributes."""
    for name in (*_ATTRIBUTES, "content-type"):
        if UNSTORABLE.search(headers.get(name, "")):
            value = headers[name].replace(SEVERAL, "")[:80].encode("utf-8", "surrogateescape")
            raise Undecodable(
                Reason.INVALID_ATTRIBUTE,
                f"{name} is not UTF-8, holds a NUL or has several values: {value!r}; let the"
                " producer send one text",
            )
    traces = (*TRACE, *_EXTENSION)
    return {n: v for n, v in headers.items() if n not in traces or not UNSTORABLE.search(v)}


def refers(record: Record) -> bool:
    """Whether a record may refer to its data instead of containing it."""
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
    for parent, state in _CONTEXTS:
        traceparent = headers.get(parent)
        if traceparent is not None and _TRACEPARENT.fullmatch(traceparent):
            return traceparent, headers.get(state)
    return None, None


def _time(text: str) -> datetime:
    try:
        if not _RFC3339.fullmatch(text):
            raise ValueError("not RFC 3339")
        if text[17:19] == "60":  # a leap second, unknown to Python: the second before
            text = f"{text[:17]}59{text[19:]}"
        time = datetime.fromisoformat(text.upper())
        return time if time.tzinfo is UTC else time.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise Undecodable(
            Reason.INVALID_ATTRIBUTE,
            f"time is {text[:80]!r} ({error}): let the producer send 2026-01-31T23:59:59Z",
        ) from error
