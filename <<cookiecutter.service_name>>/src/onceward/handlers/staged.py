"""A staged event: a row of the outbox that a transaction will insert."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from onceward.events.cloudevents import event_headers
from onceward.events.codec import Codec

HEADERS_AT_MOST = 700
"""Upper limit, in bytes, of the names, separators and fixed values of the headers."""


class StagedEvent(NamedTuple):
    """A row of the outbox. The database adds id, xid, shard and time."""

    topic: str
    key: bytes | None
    payload: bytes | None
    event_id: str
    source: str
    type: str
    subject: str | None
    sequence: int | None
    content_type: str
    traceparent: str | None
    tracestate: str | None
    baggage: str | None
    headers: str | None = None
    """Headers of the record, as JSON pairs; None: CloudEvents, which are made of the other columns.
    A JSON object has the event's own headers, which come beside those of CloudEvents."""
    dataref: str | None = None
    """Location of the payload if it is too large for a record; `payload` is then empty."""
    datalength: int | None = None
    datachecksum: str | None = None

    @property
    def size(self) -> int:
        """Upper limit of its record's size in bytes, with payload, key and headers."""
        key, payload = len(self.key or b""), len(self.payload or b"")
        names = len((self.source + self.type).encode())
        others = len((self.tracestate or "") + (self.baggage or "") + (self.headers or ""))
        return HEADERS_AT_MOST + payload + 2 * key + names + others

    def encoded(
        self, codec: Codec, at: datetime
    ) -> tuple[bytes | None, Sequence[tuple[str, bytes]]]:
        """Return value and headers of its record, as a relay sends it that it has staged at a time.

        Raises `Unpublishable` if the codec can't write it.
        """
        payload, content_type, headers = codec.encode(self)
        if headers is None:
            row = {"content_type": content_type, "created_at": at}
            headers = event_headers(self._asdict() | row)
        return payload, headers


COLUMNS = ", ".join(StagedEvent._fields)
"""Columns of an event, in each table that stores events."""
