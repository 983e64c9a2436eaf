"""Batches: records decoded, validated and matched with their handlers."""

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from operator import attrgetter
from typing import NamedTuple

from aiokafka import ConsumerRecord
from opentelemetry.context import Context

from pipeline.events.cloudevents import decode, refers
from pipeline.events.event import Event, Tombstone, reader
from pipeline.events.identity import Plain, Position
from pipeline.events.message import (
    LONGEST_KEPT_KEY,
    Marker,
    Message,
    Record,
    Undecodable,
    marker_key,
)
from pipeline.handlers.ordering import sequence_of
from pipeline.handlers.policy import DIED, Reject
from pipeline.handlers.registry import Handler, Handlers
from pipeline.servers.tasks import TimeSlice

from .inbox import Anchor, Known

_offset = attrgetter("offset")

_BARE_TOMBSTONE = Plain(Tombstone.event_type, Position())
"""Compacted topics carry tombstones without any header: their place names them."""


class UnknownType(Exception):
    """No handler takes the type, and the topic is declared to hold no other."""

    def __init__(self, message: Message) -> None:
        super().__init__(
            f"no handler takes {message.type!r} of {message.topic}: add one, or leave"
            " handlers.demand_types(…) out to skip and count what nobody takes"
        )


class Item(NamedTuple):
    """One message for one of its handlers."""

    handler: Handler
    marker: Marker
    record: Record
    event: Event | None = None
    """None if the payload does not fit the handler's model, or can't be had: then `fault` says why;
    or as long as nobody has looked."""
    fault: BaseException | None = None
    attempts: int = 0
    """Attempts before this one."""
    waited: float = 0.0
    """Seconds that its policy has let it wait so far."""
    row: bytes | None = None
    """Key of its row, if it comes from the backlog."""
    stored: Known | None = None
    """What its row remembers of its payload, if it comes from the backlog."""
    was_young: bool = False
    """Whether it was not too old when it was stored in the backlog."""
    reason: str = ""
    """Why it is in the backlog, if it comes from there."""
    last_error: str | None = None
    """Type and text of what it failed with the last time."""
    trace: str | None = None
    """`traceparent` that is stored with its row: its first attempt's, or else its sender's."""
    called: Context | None = None
    """Context of the call that has been made for it already, outside of any transaction."""

    @property
    def is_suspect(self) -> bool:
        """Whether a process has died over it."""
        return self.reason == DIED

    @property
    def sequence(self) -> int:
        """What it keeps its order by, where its handler goes by that; 0: by its place."""
        if self.handler.gaps is None:
            return 0
        with suppress(Reject):
            return sequence_of(self.marker.message)
        return 0

    @property
    def order_key(self) -> bytes:
        """What it keeps its order with: (consumer, topic, key). Without a key it is by itself."""
        return order_key(self.marker.consumer, self.record)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A record that can't be given to any handler."""

    record: Record
    reason: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive records of a partition, decoded: `start` is the position they were read from."""

    start: int
    end: int
    records: Sequence[ConsumerRecord]
    items: Sequence[Item]
    skipped: Sequence[int] = ()
    """Offsets of the records that no handler takes."""
    quarantined: Sequence[Quarantined] = ()

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
            [one for one in self.quarantined if start <= one.record.offset < end],
        )


async def read(
    handlers: Handlers,
    topic: str,
    start: int,
    records: Sequence[ConsumerRecord],
    *,
    validates: bool = True,
) -> Batch:
    """Decode and validate records; every one of them is an item, skipped or quarantined."""
    items: list[Item] = []
    skipped: list[int] = []
    quarantined: list[Quarantined] = []
    turn = TimeSlice()
    for record in records:
        if turn.is_over:
            await turn.end()
        found = items_of(handlers, record, validates=validates)
        if isinstance(found, Quarantined):
            quarantined.append(found)
        elif found:
            items += found
        else:
            skipped.append(record.offset)
    end = records[-1].offset + 1 if records else start
    return Batch(start, end, records, items, skipped, quarantined)


def items_of(
    handlers: Handlers, record: Record, *, validates: bool, hash: bytes | None = None
) -> list[Item] | Quarantined:
    """Return what the record is to each of its handlers.

    To validate its payload runs the service's code. Until that is done an item can't be handled.
    The payload's hash is computed unless it is given.
    """
    topic = record.topic
    if record.value is None and not handlers.takes_tombstones(topic) and not refers(record):
        return []
    plain = handlers.plain_of(topic) or (_BARE_TOMBSTONE if record.value is None else None)
    try:
        message = decode(record, plain, hash=hash)
    except Undecodable as error:
        return Quarantined(record, error.reason, error)
    found = _items(handlers, record, message, validates=validates)
    if not found and handlers.demands_types(topic):
        return Quarantined(record, "unknown type", UnknownType(message))
    return found


def _items(handlers: Handlers, record: Record, message: Message, *, validates: bool) -> list[Item]:
    type = Tombstone.event_type if message.data is None else message.type
    takers = handlers.of(message.topic, type)
    event, fault = None, None
    for handler in takers if validates and message.reference is None else ():
        if handler.mode == "immediate":  # what is handled later is validated then
            event, fault = _validated(handler.event, message)
            break
    items: list[Item] = []
    for handler in takers:
        consumer = handler.consumer
        key = marker_key(consumer, message.source, message.id)
        items.append(Item(handler, Marker(key, consumer, message), record, event, fault))
    return items


def validated(item: Item) -> Item:
    """Return the item with its event, or with why its payload is none."""
    if item.marker.message.reference is not None:  # it is not there yet, or can't be had
        return item
    event, fault = _validated(item.handler.event, item.marker.message)
    return item._replace(event=event, fault=fault)


def _validated(
    model: type[Event], message: Message
) -> tuple[Event, None] | tuple[None, BaseException]:
    try:
        return _event_of(model, message), None
    except BaseException as error:  # a model's own validator may raise anything, sys.exit() too
        return None, error


def _event_of(model: type[Event], message: Message) -> Event:
    if message.data is None:
        return Tombstone(key=(message.key or b"").decode("utf-8", "backslashreplace"))
    event: Event = reader(model)(message.data)
    return event


def in_sequence(items: Sequence[Item]) -> Sequence[Item]:
    """Put the events of a key into the order of their sequence, where their handler goes by it."""
    places: dict[bytes, list[int]] = {}
    for place, item in enumerate(items):
        if item.handler.gaps is not None:
            places.setdefault(item.order_key, []).append(place)
    if not places:
        return items
    ordered = list(items)
    for of_key in places.values():
        in_order = sorted((items[place] for place in of_key), key=lambda item: item.sequence)
        for place, item in zip(of_key, in_order, strict=True):
            ordered[place] = item
    return ordered


def order_key(consumer: str, record: Record) -> bytes:
    """Return the 16 bytes of (consumer, topic, key); of the record's place if it has no key."""
    if record.key is None:
        return _digest(consumer, record.topic, f"-{record.partition}:{record.offset}".encode())
    made = _kept_digest if len(record.key) <= LONGEST_KEPT_KEY else _digest
    return made(consumer, record.topic, b"+" + record.key)


def _digest(consumer: str, topic: str, key: bytes) -> bytes:
    text = f"{len(consumer)}:{len(topic)}:{consumer}{topic}".encode()
    return blake2b(text + key, digest_size=16).digest()


_kept_digest = lru_cache(maxsize=65_536)(_digest)
