"""The format of the archive: parts, gzip files of JSON lines, and a manifest for each day.

The manifest is written last, and makes the day complete. A part is named after its number and its
content, so that a process that writes another one never replaces one that a manifest names.
"""

import gzip
import zlib
from base64 import b64encode
from collections.abc import Iterable, Iterator
from datetime import date, datetime
from hashlib import sha256
from io import BytesIO
from typing import Any, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, model_validator

MANIFEST = "manifest.json"

BINARY = ("key", "payload")
"""Columns of bytes: text where they are UTF-8, else Base64 under a name of its own."""


class Damaged(Exception):
    """An object is not what it must be; the text says which and how."""


class Part(BaseModel):
    """A part of a day: consecutive events, by id."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    rows: int
    first_id: int
    last_id: int
    last_event_id: str
    size: int
    """Of the object, in bytes, compressed."""
    sha256: str

    @classmethod
    def of(cls, number: int, content: bytes) -> Self:
        """Describe a part by its content. Raises `Damaged` if it is none."""
        digest = sha256(content).hexdigest()
        name = f"part-{number:05}-{digest}.jsonl.gz"
        try:
            text = gzip.decompress(content).removesuffix(b"\n")
            first = orjson.loads(text[: text.find(b"\n") + 1] or text)
            last = orjson.loads(text[text.rfind(b"\n") + 1 :])
            return cls(
                name=name,
                rows=text.count(b"\n") + 1,
                first_id=first["id"],
                last_id=last["id"],
                last_event_id=last["event_id"],
                size=len(content),
                sha256=digest,
            )
        except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError) as error:
            raise Damaged(f"{name} holds no events: {error}") from None


class Manifest(BaseModel):
    """All of a day."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    service: str
    table: Literal["outbox"] = "outbox"
    day: date
    rows: int
    finished_at: datetime
    parts: tuple[Part, ...]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        ids = [id for part in self.parts for id in (part.first_id, part.last_id)]
        if ids != sorted(ids) or sum(part.rows for part in self.parts) != self.rows:
            raise ValueError("the parts are not those of the day")
        return self


class PartWriter:
    """Compresses rows as they come; holds only what is compressed."""

    def __init__(self) -> None:
        self._compressor = zlib.compressobj(6, wbits=31)  # 31: a gzip file, without a time
        self._compressed: list[bytes] = []
        self.bytes = 0
        """Before they are compressed."""

    def add(self, rows: Iterable[Iterable[tuple[str, Any]]]) -> None:
        """Add rows, given as names and values."""
        text = b"".join(_line(dict(row)) for row in rows)
        self.bytes += len(text)
        self._compressed.append(self._compressor.compress(text))

    def end(self) -> bytes:
        """Return the file."""
        return b"".join([*self._compressed, self._compressor.flush()])


def _line(row: dict[str, Any]) -> bytes:
    for name in BINARY:
        value = row[name]
        if value is not None:
            try:
                row[name] = value.decode()
            except UnicodeDecodeError:
                row[name] = None
                row[f"{name}_base64"] = b64encode(value).decode()
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


def events(content: bytes, event_id: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a part that have this id."""
    needle = orjson.dumps(event_id)
    for line in BytesIO(gzip.decompress(content)):
        if needle in line and (event := orjson.loads(line))["event_id"] == event_id:
            yield event
