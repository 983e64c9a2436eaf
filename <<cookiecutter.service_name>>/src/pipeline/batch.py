"""Batches: records decoded, validated and matched with their handlers."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from aiokafka import ConsumerRecord

from .events import Event, Tombstone
from .failures import told
from .handlers import Handler, Handlers
from .inbox import Anchor, Marker
from .message import Message, Plain, Position, Undecodable, decode, marker_key

_offset = attrgetter("offset")

_BARE_TOMBSTONE = Plain(Tombstone.event_type, Position())
"""Compacted topics carry tombstones without any header: their place names them."""


class Stuck(Exception):
    """A record that can't be handled. Its partition stands still before it."""

    def __init__(self, offset: int, reason: str, error: BaseException) -> None:
        super().__init__(f"offset {offset}: {reason}: {told(error)}")
        self.offset = offset
        self.reason = reason
        self.error = error


@dataclass(frozen=True, slots=True)
class Item:
    """One message for one of its handlers."""

    handler: Handler
    marker: Marker
    event: Event


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive records of a partition, decoded: `start` is the position they were read from."""

    start: int
    end: int
    records: Sequence[ConsumerRecord]
    items: Sequence[Item]
    skipped: Sequence[int] = ()
    """Offsets of the records that no handler takes."""
    stuck: Stuck | None = None
    """The record at `end`, if it can't be decoded."""

    @property
    def anchor(self) -> Anchor | None:
        """The last record, which stays beside the position; None for a gap without records."""
        return Anchor.of(self.records[-1]) if self.records else None

    @property
    def offsets(self) -> list[int]:
        """Offsets of the records that handlers take, each once."""
        return sorted({item.marker.message.offset for item in self.items})

    def between(self, start: int, end: int) -> "Batch":
        """Return the records from `start` to below `end`."""
        first, last = (bisect_left(self.records, at, key=_offset) for at in (start, end))
        return Batch(
            start,
            end,
            self.records[first:last],
            [item for item in self.items if start <= item.marker.message.offset < end],
            [offset for offset in self.skipped if start <= offset < end],
        )


def read(handlers: Handlers, topic: str, start: int, records: Sequence[ConsumerRecord]) -> Batch:
    """Decode and validate records; the batch ends before the first one that can't be."""
    plain = handlers.plain_of(topic)
    tombstones = handlers.takes_tombstones(topic)
    items: list[Item] = []
    skipped: list[int] = []
    stuck = None
    end = start
    taken = len(records)
    for place, record in enumerate(records):
        try:
            found: list[Item] = []
            if record.value is not None or tombstones:
                how = plain or (_BARE_TOMBSTONE if record.value is None else None)
                found = list(_items(handlers, decode(record, how)))
            if found:
                items += found
            else:
                skipped.append(record.offset)
        except Undecodable as error:
            stuck = Stuck(record.offset, error.reason, error)
        except Exception as error:  # a model's own validator may raise anything
            stuck = Stuck(record.offset, "invalid payload", error)
        if stuck:
            end, taken = record.offset, place
            break
        end = record.offset + 1
    return Batch(start, end, records[:taken], items, skipped, stuck)


def _items(handlers: Handlers, message: Message) -> Iterator[Item]:
    type = Tombstone.event_type if message.data is None else message.type
    event: Event | None = None
    for handler in handlers.of(message.topic, type):
        if event is None:
            event = _validated(handler.event, message)
        key = marker_key(handler.consumer, message.source, message.id)
        yield Item(handler, Marker(key, handler.consumer, message), event)


def _validated(model: type[Event], message: Message) -> Event:
    if message.data is None:
        return Tombstone(key=(message.key or b"").decode("utf-8", "backslashreplace"))
    return model.model_validate_json(message.data)
