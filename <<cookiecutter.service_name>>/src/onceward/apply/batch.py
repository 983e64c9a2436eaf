"""Batches: records decoded, validated and matched with their handlers."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from aiokafka import ConsumerRecord

from onceward.errors import OncewardError, StoreUnavailable
from onceward.events.cloudevents import refers
from onceward.events.codec import CLOUD_EVENTS
from onceward.events.event import Event, Tombstone, reader, upcasted
from onceward.events.message import Message, Reason, Record, Undecodable, marker_key
from onceward.events.payload import not_json
from onceward.handlers.registry import Handlers
from onceward.observe import metrics
from onceward.servers.tasks import TimeSlice

from .item import Item, Undecoded, place_of, record_digest
from .positions import Anchor

log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_LOGGED_TYPES, _LONGEST_TYPE = 100, 80
"""Skipped types are logged once each, in at most 80 characters, and after 100 types no longer:
producers may make up any number."""
_logged_types: set[tuple[str, str]] = set()


class UnknownType(OncewardError):
    """No handler takes the type, and the topic is declared with `demands_types`."""

    def __init__(self, message: Message) -> None:
        super().__init__(
            f"no handler takes {message.type!r} of {message.topic}: add one, or leave"
            " demands_types=True out to skip and count such records"
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive records of a partition, decoded: `start` is the position they were read from."""

    start: int
    end: int
    records: Sequence[ConsumerRecord]
    items: Sequence[Item]
    skipped: Sequence[int] = ()
    """Offsets of the records that no handler takes."""
    undecoded: Sequence[Undecoded] = ()

    @property
    def anchor(self) -> Anchor | None:
        """The last record, which is stored with the position; None for a gap without records."""
        return Anchor.of(self.records[-1]) if self.records else None

    def between(self, start: int, end: int) -> "Batch":
        """Return the records from `start` to below `end`."""

        def part(found: Sequence[T], offset_of: Callable[[T], int]) -> Sequence[T]:
            first, last = (bisect_left(found, at, key=offset_of) for at in (start, end))
            return found[first:last]

        return Batch(
            start,
            end,
            part(self.records, lambda record: record.offset),
            part(self.items, lambda item: item.record.offset),
            part(self.skipped, lambda offset: offset),
            part(self.undecoded, lambda one: one.record.offset),
        )


async def read(
    handlers: Handlers,
    start: int,
    records: Sequence[ConsumerRecord],
    *,
    validates: bool = True,
) -> Batch:
    """Decode and validate records of one topic; each becomes items, or is skipped or undecoded.

    Raises `StoreUnavailable` if what their codec needs can't be fetched now.
    """
    if records:
        await handlers.codec(records[0].topic).prepare(records)
    items: list[Item] = []
    skipped: list[int] = []
    undecoded: list[Undecoded] = []
    turn = TimeSlice()
    for record in records:
        if turn.is_over:
            await turn.end()
        found = items_of(handlers, record, validates=validates, logs_skipped=True)
        if isinstance(found, Undecoded):
            undecoded.append(found)
        elif found:
            items += found
        else:
            skipped.append(record.offset)
    end = records[-1].offset + 1 if records else start
    return Batch(start, end, records, items, skipped, undecoded)


async def prepare(handlers: Handlers, records: Iterable[Record]) -> Mapping[str, StoreUnavailable]:
    """Fetch what `items_of` needs for these records; returns topics for which that fails now."""
    unavailable: dict[str, StoreUnavailable] = {}
    if not handlers.codecs:
        return unavailable
    by_topic: dict[str, list[Record]] = {}
    for record in records:
        by_topic.setdefault(record.topic, []).append(record)
    for topic, some in by_topic.items():
        try:
            await handlers.codec(topic).prepare(some)
        except StoreUnavailable as error:
            unavailable[topic] = error
    return unavailable


def items_of(
    handlers: Handlers,
    record: Record,
    *,
    validates: bool,
    hash: bytes | None = None,
    logs_skipped: bool = False,
    holds: bool = True,
    consumer: str = "",
) -> list[Item] | Undecoded:
    """Return the record's message as an item for each of its handlers.

    `validates`: the payload is validated, which runs the service's code; an item that is not
    validated can't be handled yet. The payload's hash is computed unless `hash` is given.
    `holds`: a record that can't be decoded is an item for each consumer, if its topic says so.
    `consumer` is that of a row: a correction takes no other records, and `Applied` is written as
    CloudEvents whatever the topic's codec is.
    """
    topic = record.topic
    if record.value is None and not handlers.takes_tombstones(topic) and not refers(record):
        return []
    try:
        # Quicker than `handlers.codec(topic)`.
        codec = handlers.codecs.get(topic, CLOUD_EVENTS)
        if consumer in handlers.recalling:
            codec = CLOUD_EVENTS
        message = codec.decode(record, hash=hash)
    except StoreUnavailable:
        raise
    except Exception as error:  # of a codec, or of a library that it uses
        reason = error.reason if isinstance(error, Undecodable) else Reason.INVALID_ENVELOPE
        return undecodable(handlers, Undecoded(record, reason, error), holds=holds)
    type = Tombstone.__event_type__ if message.data is None else message.type
    takers = handlers.of(topic, type, consumer)
    if not takers:
        if topic in handlers.demanding and consumer not in handlers.corrections:
            found = Undecoded(record, "unknown type", UnknownType(message))
            return undecodable(handlers, found, holds=holds)
        if logs_skipped:
            _log_skipped(topic, message.type[:_LONGEST_TYPE])
    event, fault = None, None
    for handler in takers if validates and message.reference is None else ():
        if handler.mode == "immediate":  # other messages are validated when they are handled
            event, fault = _validated(handler.event, message)
            break
    items: list[Item] = []
    for handler in takers:
        key = marker_key(handler.consumer, message.source, message.id)
        items.append(Item(handler, key, message, record, event, fault))
    return items


def undecodable(
    handlers: Handlers, one: Undecoded, *, holds: bool = True
) -> list[Item] | Undecoded:
    """Return a record that can't be decoded as an item for each consumer, if its topic says so."""
    record = one.record
    if not (holds and record.topic in handlers.holding):
        return one
    message = Message(
        *(record.topic, record.partition, record.offset, record.timestamp, record.key),
        *("", "", ""),  # source, id and type
        *(None, None, None, None, None, None, None, None, None),
        hash=b"",
    )
    items: list[Item] = []
    for handler in handlers.holders(record.topic):
        key = record_digest(f"{handler.consumer}: {place_of(record)}", record)
        items.append(Item(handler, key, message, record, None, one.error, undecoded=one.reason))
    return items


def _log_skipped(topic: str, type: str) -> None:
    if (topic, type) not in _logged_types and len(_logged_types) < _MOST_LOGGED_TYPES:
        _logged_types.add((topic, type))
        log.info("%s: records of type %r are skipped: no handler takes it", topic, type)


def validated(item: Item) -> Item:
    """Return the item with its event, or with the error of its validation."""
    # The data is not fetched yet, or unavailable; or there is none.
    if item.message.reference is not None or item.undecoded:
        return item
    event, fault = _validated(item.handler.event, item.message)
    return item._replace(event=event, fault=fault)


def _validated(
    model: type[Event], message: Message
) -> tuple[Event, None] | tuple[None, BaseException]:
    data = message.data
    try:
        if data is None:
            key = (message.key or b"").decode("utf-8", "backslashreplace")
            return Tombstone(key=key), None
        if message.type in model.__event_upcasters__:
            data = upcasted(model, message.type, data)
            if data is not message.data:
                metrics.upcasts.add(1, {metrics.TYPE: message.type})
        return reader(model)(data), None
    except BaseException as error:  # a model's own validator may raise anything, sys.exit() too
        return None, not_json(data) or error
