"""The format of the archive: parts, gzip files of JSON lines, and a manifest for each day.

A day is finished when its manifest is written, last. A part's name has its number and the hash of
its content, so a process that writes other content never replaces a part that a manifest names.
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

from onceward.errors import OncewardError

MANIFEST = "manifest.json"

BINARY = ("key", "payload")
"""Columns of bytes: stored as text if they are UTF-8, else as Base64 under `<name>_base64`."""


class Damaged(OncewardError):
    """An object's content is wrong; the text names the object and the error."""


class Part(BaseModel):
    """A part of a day: the events of a range of ids."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    rows: int
    first_id: int
    last_id: int
    last_event_id: str
    size: int
    """Compressed size of the object in bytes."""
    sha256: str

    @classmethod
    def of(cls, number: int, content: bytes) -> Self:
        """Return the description of a part from its content. Raises `Damaged` if it is invalid."""
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
            raise Damaged(f"{name} has no readable events: {error}") from None


class Manifest(BaseModel):
    """The parts of a finished day."""

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
            raise ValueError("its parts do not add up to its rows, or overlap")
        return self


class PartWriter:
    """Compresses rows one after another; only compressed data is held in memory."""

    def __init__(self) -> None:
        self._compressor = zlib.compressobj(6, wbits=31)  # 31: a gzip file, without a time
        self._compressed: list[bytes] = []
        self.bytes = 0
        """Size before compression."""

    def add(self, rows: Iterable[Iterable[tuple[str, Any]]]) -> None:
        """Add rows, each as pairs of names and values."""
        text = b"".join(_line(dict(row)) for row in rows)
        self.bytes += len(text)
        self._compressed.append(self._compressor.compress(text))

    def end(self) -> bytes:
        """Return the compressed file."""
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
