"""The outbox: events staged in memory while handlers run, written by INSERT before the commit.

Events that are due later are written into a table of their own; `relay/scheduled.py` moves them to
the outbox.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from hashlib import blake2b
from math import inf
from typing import NamedTuple, Self

import asyncpg
from opentelemetry.context import Context, get_current

from onceward.errors import StoreUnavailable
from onceward.events.cloudevents import has_own_headers, own_headers
from onceward.events.codec import CLOUD_EVENTS, CloudEvents, Codec
from onceward.events.event import Event, Unpublishable, payload_of
from onceward.events.message import headers_as_json, headers_of
from onceward.observe import traces

from . import statements
from .staged import HEADERS_AT_MOST, StagedEvent

CALLS = "(calls)"
"""Stands for the topic of events that are staged by `call`; no topic has such a name."""
REQUESTS = "(requests)"
"""Stands for the topic of events that come by requests."""

_LONGEST = timedelta(days=36_525)
_NAME_AT_MOST = 500
"""Bytes of the name of a scheduled event, which is in an index."""
_RESERVED = {"content-type", "traceparent", "tracestate", "baggage"}
"""Headers that the engine writes, beside those of CloudEvents."""
_EMPTY_HASH = blake2b(digest_size=16)


class Due(NamedTuple):
    """When a scheduled event is to be published, and the name by which it can be cancelled."""

    name: str | None
    """None: the event's id."""
    at: datetime | None
    after: timedelta | None
    """Either `at` or `after` is set; `after` counts from the database's clock."""

    @classmethod
    def check(cls, at: datetime | None, after: timedelta | None, name: str | None) -> Self:
        """Return the due time; raises `TypeError` or `Unpublishable` for invalid arguments."""
        if (at is None) == (after is None):
            raise TypeError("publish(…) takes at= or after= for an event that is due later")
        if at is not None and at.tzinfo is None:
            raise TypeError(f"publish(…, at=…) needs a time with its zone, not {at!r}")
        if after is not None and abs(after) > _LONGEST:
            raise Unpublishable(f"publish(…, after=…) takes 100 years at most, not {after!r}")
        if name is not None and ("\x00" in name or not 0 < len(name.encode()) <= _NAME_AT_MOST):
            raise Unpublishable(
                f"the name of a scheduled event has 1 to {_NAME_AT_MOST} bytes, no NUL: {name!r}"
            )
        return cls(name, at, after)


_AT_ONCE = (None, None, None)
"""Name, time and delay of an event that is not scheduled."""
_PART_BYTES = 32 * 2**20
"""A statement writes events until they exceed this; PostgreSQL takes less than 1 GB."""


def event_id(marker_key: bytes, payload_hash: bytes, ordinal: int) -> str:
    """Return the id of an event that a message's handler publishes: the same in every execution.

    `ordinal` counts the events that one handler stages for one message, from 0.
    """
    hash = _EMPTY_HASH.copy()  # faster than a new one
    hash.update(b"%b%b%d" % (marker_key, payload_hash, ordinal))
    return hash.hexdigest()


Staged = tuple[int, int, int, int]
"""Numbers of events, of calls, and of events that are scheduled or cancelled; bytes of all."""


class Outbox:
    """The events of one transaction, in the order in which they were staged."""

    def __init__(
        self,
        source: str,
        max_event_bytes: int,
        *,
        call_types: Mapping[str, type[Event]] = {},
        codecs: Mapping[str, Codec] = {},
        closed: Mapping[str, str] = {},
        sent_size: Callable[[StagedEvent, int], int] | None = None,
        memory: float = inf,
    ) -> None:
        """`call_types` are the events that may be staged by `call`, by their types.

        `codecs` are those of topics without CloudEvents in binary mode; `closed` are topics whose
        codec can't write yet, with the reason.
        `sent_size` returns the size of an event's record, given the size that is allowed.
        `memory` is how many bytes make it full.
        """
        self._source = source
        self.max_event_bytes = max_event_bytes
        self._call_types = call_types
        self.codecs = codecs
        self._closed = {**closed}
        self._sent_size = sent_size
        self._memory = memory
        self._bytes = 0
        self._staged: list[StagedEvent] = []
        self.calls: list[StagedEvent] = []
        """Events for handlers outside of the transaction, after its commit."""
        self._scheduled: list[tuple[str, tuple[Due, StagedEvent] | None]] = []
        """Names, and events that are due later; None for one that is cancelled."""
        self._injected: tuple[Context, traces.TraceHeaders] | None = None
        """The latest context and its headers, kept because a handler may publish several events."""

    def __len__(self) -> int:
        return len(self._staged)

    @property
    def staged(self) -> Staged:
        """The state of staging. Setting it to an earlier value drops all that was staged since."""
        return len(self._staged), len(self.calls), len(self._scheduled), self._bytes

    @staged.setter
    def staged(self, earlier: Staged) -> None:
        events, calls, scheduled, self._bytes = earlier
        del self._staged[events:]
        del self.calls[calls:]
        del self._scheduled[scheduled:]

    @property
    def is_full(self) -> bool:
        """Whether what is staged takes more memory than it should."""
        return self._bytes > self._memory

    def clear(self) -> None:
        """Forget what is staged, because it is written."""
        self.staged = 0, 0, 0, 0

    def stage(
        self,
        event: Event,
        *,
        id: str,
        key: str | None,
        sequence: int | None,
        context: Context | None = None,
        due: Due | None = None,
        headers: Mapping[str, str] = {},
    ) -> None:
        """Stage the event for the outbox, or until it is `due`.

        `context` is its trace, by default the current one. `headers` are its own. Raises
        `Unpublishable` if its topic, key or headers can't be sent or it is larger than allowed.
        """
        topic, name = event.__event_topic__, type(event).__name__
        if topic is None:
            raise Unpublishable(
                f'{name} has no topic: declare it as class {name}(Event, type="…", topic="…")'
            )
        staged = self._row(event, topic, id, key, sequence, context, headers)
        if due is None:
            self._staged.append(staged)
        else:
            name = due.name or id
            self._scheduled.append((name, (due._replace(name=name), staged)))

    def call(
        self, event: Event, *, id: str, key: str | None, context: Context | None = None
    ) -> None:
        """Stage the event for its effects. `context` is its trace, by default the current one.

        Raises `TypeError` if no effect takes it, and `Unpublishable` as `stage` does.
        """
        kind = type(event)
        taken = self._call_types.get(kind.__event_type__)
        if taken is not kind:
            name = kind.__name__
            other = f", but {taken.__name__}, which has its type" if taken else ""
            raise TypeError(
                f"no effect takes {name}{other}: register one by @effects.on({name}, …)"
            )
        self.calls.append(self._row(event, CALLS, id, key, None, context))

    def _row(
        self,
        event: Event,
        topic: str,
        id: str,
        key: str | None,
        sequence: int | None,
        context: Context | None,
        own: Mapping[str, str] = {},
    ) -> StagedEvent:
        """Return the event as a row."""
        kind = type(event)
        if sequence is not None and (type(sequence) is not int or not 0 <= sequence < 2**63):
            raise Unpublishable(f"the sequence of {kind.__name__} is no number: {sequence!r}")
        try:
            key_bytes = None if key is None else key.encode()
        except UnicodeEncodeError as error:
            raise Unpublishable(f"the key of {kind.__name__} is not UTF-8: {error}") from error
        except AttributeError as error:
            raise Unpublishable(f"the key of {kind.__name__} is no text: {key!r}") from error
        if key_bytes is not None and b"\x00" in key_bytes:
            raise Unpublishable(f"the key of {kind.__name__} holds a NUL character: {key!r}")
        context = get_current() if context is None else context
        # Read and replaced as one tuple: a handler may publish from several threads.
        injected = self._injected
        if injected is None or injected[0] is not context:
            injected = self._injected = context, traces.creation_context(context)
        row = StagedEvent(
            topic,
            key_bytes,
            payload_of(event),
            id,
            self._source,
            kind.__event_type__,
            key or None,
            sequence,
            "application/json",
            *injected[1],
        )
        is_stored = topic is not CALLS
        if topic in self.codecs:
            if topic in self._closed:
                return row  # `write` raises an error
            row = self._encoded(row)
            is_stored = self.has_cloudevents(row)
        if own:
            row = _with_headers(row, own)
        allowed, sent_size = self.max_event_bytes, self._sent_size
        memory = row.size
        size = sent_size(row, allowed) if sent_size and is_stored else memory
        if size > allowed:
            note = " (only CloudEvents are stored in the object store)" if sent_size else ""
            raise Unpublishable(
                f"{kind.__name__} takes {size:,} bytes and {allowed:,} are allowed{note}: publish a"
                " smaller event, or raise PIPELINE_MAX_EVENT_BYTES and the topic's"
                " max.message.bytes"
            )
        self._bytes += memory
        return row

    def _encoded(self, row: StagedEvent) -> StagedEvent:
        """Return the row as the codec of its topic writes it. Raises `Unpublishable`."""
        payload, content_type, headers = self.codecs[row.topic].encode(row)
        written = None if headers is None else headers_as_json(headers)
        return row._replace(payload=payload, content_type=content_type, headers=written)

    def has_cloudevents(self, event: StagedEvent) -> bool:
        """Whether it is sent as a CloudEvent, whose data may be stored: no dead letter."""
        codec = self.codecs.get(event.topic, CLOUD_EVENTS)
        is_whole = event.headers is None or has_own_headers(event.headers)
        return is_whole and isinstance(codec, CloudEvents)

    def holds(self, id: str) -> bool:
        """Whether the event of this id is staged, and was not dropped since."""
        return any(event.event_id == id for event in self._staged)

    @property
    def _latest(self) -> dict[str, tuple[Due, StagedEvent] | None]:
        """What is scheduled or cancelled last, by name, in the order of staging."""
        found: dict[str, tuple[Due, StagedEvent] | None] = {}
        for name, one in self._scheduled:
            found.pop(name, None)
            found[name] = one
        return found

    @property
    def events(self) -> Iterator[StagedEvent]:
        """The staged events, followed by those that are due later."""
        yield from self._staged
        yield from (one[1] for one in self._latest.values() if one is not None)

    def replace(self, events: Mapping[str, StagedEvent]) -> None:
        """Replace staged events, by their ids."""
        self._staged = [events.get(event.event_id, event) for event in self._staged]
        self._scheduled = [
            (name, one and (one[0], events.get(one[1].event_id, one[1])))
            for name, one in self._scheduled
        ]

    def cancel(self, name: str) -> None:
        """Cancel a scheduled event, if it is not published yet when the transaction commits."""
        self._scheduled.append((name, None))

    def add(self, events: Iterable[StagedEvent]) -> None:
        """Stage events of the engine."""
        self._staged += events

    async def write(self, connection: asyncpg.Connection) -> bool:
        """Write all events in the connection's transaction; returns False if there are none.

        Raises `StoreUnavailable` if a codec can't write one of them now.
        """
        for event in self.events if self._closed else ():
            if event.topic in self._closed:
                raise StoreUnavailable(self._closed[event.topic])
        if self._staged:
            await append(connection, self._staged)
        latest = self._latest
        if cancelled := sorted(name for name, one in latest.items() if one is None):
            if len(latest) > 1:
                await connection.execute(statements.LOCK_SCHEDULED, [*latest])
            await connection.execute(statements.CANCEL_SCHEDULED, cancelled)
        if rows := [(*one[0], *one[1]) for one in latest.values() if one is not None]:
            await connection.execute(statements.SCHEDULE_EVENTS, rows)
        return bool(self._staged or self._scheduled)


def _with_headers(row: StagedEvent, own: Mapping[str, str]) -> StagedEvent:
    """Return the row with an event's own headers. Raises `Unpublishable` for what can't be sent."""
    others = [] if row.headers is None else headers_of(row.headers)
    for name, value in own.items():
        if {type(name), type(value)} != {str}:
            raise Unpublishable(f"headers are texts by their names, not {name!r}: {value!r:.100}")
        if not name or name.lower().startswith("ce_") or name.lower() in _RESERVED:
            raise Unpublishable(f"the header {name!r} is not for you to set: choose another name")
        if any(name == other for other, _ in others):
            raise Unpublishable(f"the codec of {row.topic} sets the header {name!r}")
        try:
            others.append((name, value.encode()))
            name.encode()
        except UnicodeEncodeError as error:
            raise Unpublishable(f"the header {name!r} is not UTF-8: {error}") from error
    written = own_headers(own) if row.headers is None else headers_as_json(others)
    return row._replace(headers=written)


async def append(connection: asyncpg.Connection, events: Sequence[StagedEvent]) -> None:
    """Append rows to the outbox, in order."""
    # Without a transaction each statement would commit, and a rollback would keep the events.
    if not connection.is_in_transaction():
        raise RuntimeError("outbox rows may only be written in a transaction that has begun")
    for part in _parts(events):
        await connection.execute(statements.INSERT_EVENTS, [_AT_ONCE + event for event in part])


def _parts(events: Sequence[StagedEvent]) -> Iterator[Sequence[StagedEvent]]:
    """Divide the events among statements."""
    first, size = 0, 0
    for end, event in enumerate(events, 1):
        size += HEADERS_AT_MOST + len(event.payload or b"")
        if size > _PART_BYTES or end == len(events):
            yield events[first:end]
            first, size = end, 0
