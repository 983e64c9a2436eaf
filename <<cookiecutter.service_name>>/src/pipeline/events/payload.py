"""Payloads: when two are the same, whatever JSON they are written in."""

import json
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import orjson

HASH_VERSION: int = 1
"""Version of `payload_hash`, stored beside each hash: compare only hashes of one version."""


def payload_hash(type: str, content_type: str | None, data: bytes | None) -> bytes:
    """Return the 16 bytes that tell whether the same id came with another payload.

    JSON counts canonically: key order, white space and escapes don't matter, and a number is its
    literal text, so 1 and 1.0 differ. Data is JSON if it parses and the content type says so or is
    unset. All else counts as bytes, and so does JSON that not all parsers read alike: a key twice
    in one object, half a surrogate pair, nesting beyond 254. No data is not empty data.
    """
    kind = "bytes"
    if data is None:
        kind, data = "none", b""
    elif is_json(content_type) and (canonical := _canonical(data)) is not None:
        kind, data = "json", canonical
    hash = _begun_hash(kind, len(type)).copy()
    hash.update(type.encode())
    hash.update(data)
    return hash.digest()


@lru_cache(maxsize=1_024)
def _begun_hash(kind: str, type_length: int) -> blake2b:
    """Return a hash as it begins: to copy it takes half of the time that to make it does."""
    return blake2b(f"{kind}:{type_length}:".encode(), digest_size=16)


def is_json(content_type: str | None) -> bool:
    """Whether data of this content type is JSON.

    CloudEvents JSON format, 3.1.1: `*/json`, `*/*+json`, or unset.
    """
    if content_type is None or content_type == "application/json":
        return True
    return content_type.partition(";")[0].strip().lower().endswith(("/json", "+json"))


def _canonical(data: bytes) -> bytes | None:
    # The fast way: if orjson writes the very bytes that it has read, but for spaces behind commas
    # and colons, then no number has lost its text and no key was there twice.
    try:
        value = orjson.loads(data)
        written = orjson.dumps(value)
        if written == data or written == _tight(data) or _tight(written) == _tight(data):
            return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        pass  # It may be JSON all the same: 1e999 is.
    try:
        return orjson.dumps(parse(data), option=orjson.OPT_SORT_KEYS)
    except (TypeError, ValueError):
        return None


def _tight(data: bytes) -> bytes:
    """Leave out the spaces that many writers put between tokens; some in strings go with them."""
    return data.replace(b", ", b",").replace(b": ", b":")


def parse(data: bytes) -> Any:
    """Parse JSON, numbers as they are written; raises `ValueError` where parsers could differ."""
    text = data.decode().strip(" \t\n\r")
    try:
        value, end = _JSON.raw_decode(text)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    if end < len(text):
        raise ValueError(f"text goes on behind the JSON at character {end}")
    return value


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    # Pydantic takes the last of two members into a model, but validates both for a dict.
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
