"""Payloads: a hash that is equal for equal JSON, however it is formatted."""

import json
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import orjson

HASH_VERSION: int = 1
"""Version of `payload_hash`, stored beside each hash: compare only hashes of one version.

The ids of published events contain the hash: with a new version, messages that are handled again
after a restore publish their events with other ids, which consumers take for new events.
"""


def payload_hash(type: str, content_type: str | None, data: bytes | None) -> bytes:
    """Return a hash of 16 bytes, by which another payload with a known id is recognised.

    JSON is hashed in a canonical form: key order, white space and escapes don't matter, and a
    number is its literal text, so 1 and 1.0 differ. Data is JSON if it parses and the content type
    says so or is unset. All other data is hashed as bytes. So is JSON that parsers may read
    differently: a key twice in one object, half a surrogate pair, nesting beyond 254. Missing data
    differs from empty data.
    """
    kind = "bytes"
    if data is None:
        kind, data = "none", b""
    elif is_json(content_type) and (canonical := _canonical(data)) is not None:
        kind, data = "json", canonical
    hash = _begun_hash(kind, len(type)).copy()
    hash.update(type.encode() + data)
    return hash.digest()


@lru_cache(maxsize=1_024)
def _begun_hash(kind: str, type_length: int) -> blake2b:
    """Return the hash of the common prefix: copying it takes half as long as creating it."""
    return blake2b(f"{kind}:{type_length}:".encode(), digest_size=16)


def is_json(content_type: str | None) -> bool:
    """Whether data of this content type is JSON.

    CloudEvents JSON format, 3.1.1: `*/json`, `*/*+json`, or unset.
    """
    if content_type is None or content_type == "application/json":
        return True
    return content_type.partition(";")[0].strip().lower().endswith(("/json", "+json"))


def _canonical(data: bytes) -> bytes | None:
    # The fast path: if orjson writes the same bytes that it has read, except for spaces behind
    # commas and colons, then no number has changed its text and no key occurs twice.
    try:
        value = orjson.loads(data)
        written = orjson.dumps(value)
        if written == data or written == _tight(data) or _tight(written) == _tight(data):
            return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        pass  # orjson rejects some JSON, such as 1e999
    try:
        return orjson.dumps(parse(data), option=orjson.OPT_SORT_KEYS)
    except (TypeError, ValueError):
        return None


def _tight(data: bytes) -> bytes:
    """Remove the spaces that many writers put between tokens, and such ones inside of strings."""
    return data.replace(b", ", b",").replace(b": ", b":")


def parse(data: bytes) -> Any:
    """Parse JSON, keeping the text of numbers. Raises `ValueError` where parsers could differ."""
    if error := not_json(data):
        raise error
    text = data.decode().strip(" \t\n\r")
    try:
        value, end = _JSON.raw_decode(text)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    if end < len(text):
        raise ValueError(f"text goes on behind the JSON at character {end}")
    return value


def not_json(data: bytes | None) -> ValueError | None:
    """Return the error for data that begins as no JSON does; None for other data."""
    if not data or data[:1].isspace() or 0x20 < data[0] < 0x7F:
        return None
    return ValueError(
        f"the data begins with the bytes {data[:2].hex(' ')}, as no JSON does: let the producer"
        " send JSON, or declare a codec, as handlers.topic(…, codec=Confluent(…)), option"
        " schema_registry"
    )


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    # Pydantic uses the last of two equal keys for a model, but validates both for a dict.
    value = dict(members)
    if len(value) < len(members):
        raise ValueError("a key is twice in one object")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(
    parse_int=orjson.Fragment,
    parse_float=orjson.Fragment,
    parse_constant=_no_constant,
    object_pairs_hook=_object,
)
