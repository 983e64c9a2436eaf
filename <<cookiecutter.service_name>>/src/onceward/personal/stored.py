"""The stored form of a payload with personal data.

A line that begins with `personal-1` and is JSON, then the payload with null in the place of each
personal value. The line has for each value its position, the id of its key, its ciphertext, and
whether null is allowed there. A payload that is encrypted as a whole has one ciphertext, and the
ids of the keys that it was encrypted with, one after the other.
"""

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import orjson

from .keys import DataKey
from .marks import Subject
from .spans import Span

PREFIX = b"personal-1 "
_NULL = "null"


@dataclass(frozen=True, slots=True)
class Value:
    """One encrypted value."""

    position: int
    """In the characters of the text behind the line."""
    key: bytes
    ciphertext: bytes
    allows_null: bool


@dataclass(frozen=True, slots=True)
class Stored:
    """A payload as it is stored."""

    values: Sequence[Value]
    text: str
    whole: Sequence[bytes] = ()
    """Ids of the keys, if the payload is encrypted as a whole."""
    ciphertext: bytes = b""

    @classmethod
    def parse(cls, data: bytes) -> Self | None:
        """Return what the bytes are the stored form of; None if they are none."""
        if not data.startswith(PREFIX):
            return None
        try:
            line, _, text = data[len(PREFIX) :].partition(b"\n")
            head = orjson.loads(line)
            values = [
                Value(position, bytes.fromhex(key), b64decode(ciphertext), bool(allows_null))
                for position, key, ciphertext, allows_null in head.get("values", ())
            ]
            whole = [bytes.fromhex(key) for key in head.get("whole", ())]
            return cls(values, text.decode(), whole, b64decode(head.get("ciphertext", "")))
        except (ValueError, TypeError, AttributeError):
            return None

    def __bytes__(self) -> bytes:
        """Return the bytes that `parse` reads."""
        head: dict[str, object] = {}
        if self.whole:
            head["whole"] = [key.hex() for key in self.whole]
            head["ciphertext"] = b64encode(self.ciphertext).decode()
        else:
            head["values"] = [
                [one.position, one.key.hex(), b64encode(one.ciphertext).decode(), one.allows_null]
                for one in self.values
            ]
        return b"%b%b\n%b" % (PREFIX, orjson.dumps(head), self.text.encode())

    @property
    def keys(self) -> set[bytes]:
        """Ids of all keys."""
        return {*self.whole, *(one.key for one in self.values)}

    def is_readable(self, keys: Mapping[bytes, object] | set[bytes]) -> bool:
        """Whether the event can be read with these keys, perhaps with null for some values."""
        return all(key in keys for key in self.whole) and all(
            one.key in keys or one.allows_null for one in self.values
        )

    def decrypt(self, keys: Mapping[bytes, DataKey]) -> bytes:
        """Return the payload; it must be readable with the keys. Raises `Changed`."""
        if self.whole:
            data = self.ciphertext
            for key in reversed(self.whole):
                data = keys[key].decrypt(data)
            return data
        parts, at = [], 0
        for one in self.values:
            if one.key in keys:
                parts += [
                    self.text[at : one.position],
                    keys[one.key].decrypt(one.ciphertext).decode(),
                ]
                at = one.position + len(_NULL)
        return "".join([*parts, self.text[at:]]).encode()


def encrypt_values(text: str, spans: Sequence[Span], keys: Mapping[Subject, DataKey]) -> Stored:
    """Return the payload with its personal values encrypted, by the keys of their subjects."""
    values, parts, at, length = [], [], 0, 0
    for start, end, subject, allows_null in spans:
        parts += [text[at:start], _NULL]
        length += start - at
        key = keys[subject]
        values.append(Value(length, key.id, key.encrypt(text[start:end].encode()), allows_null))
        length += len(_NULL)
        at = end
    return Stored(values, "".join([*parts, text[at:]]))


def encrypt_whole(data: bytes, keys: Sequence[DataKey]) -> Stored:
    """Return bytes encrypted as a whole, so that all of the keys are needed to read them."""
    for key in keys:
        data = key.encrypt(data)
    return Stored((), "", [key.id for key in keys], data)
