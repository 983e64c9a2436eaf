"""The outbox: events staged in memory while handlers run, written by one COPY before the commit.

Those that are due later are written into a table of their own, from which `scheduled` moves them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any, NamedTuple, Self

import asyncpg
from opentelemetry.context import Context, get_current
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from pipeline.errors import summarize_error
from pipeline.events.event import Event
from pipeline.events.references import Claims, Kept
from pipeline.observe import statements, traces
from pipeline.schema import SCHEMA

EFFECTS = "(effects)"
"""Stands for a topic where an event is to be given to effects; no topic has such a name."""

_HEADERS_AT_MOST = 700
"""Bytes that names, separators and fixed values of the headers can take."""
_REFERENCE_AT_MOST = 1_500
"""Bytes that the headers take which say where a payload is."""
_LONGEST = timedelta(days=36_525)
_NAME_AT_MOST = 500
"""Bytes of the name of a scheduled event, which is in an index."""

_ADVICE = (
    "publish what the class and JSON keep, which is no NaN, no secret, nothing of exclude=True and"
    " nothing of another type or a subclass; an alias needs serialize_by_alias=True"
)

_BEGUN = blake2b(digest_size=16)


class Unpublishable(ValueError):
    """An event that could never be sent. Nothing was staged; the handler sees this error."""


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
    """Those of a dead letter's record, as JSON; an event's own are made of the other columns."""
    dataref: str | None = None
    """Where the payload is, if it is too large to travel; the one here is empty then."""
    datalength: int | None = None
    datachecksum: str | None = None

    def referring(self, kept: Kept | None) -> Self:
        """Return it with a reference in the place of its payload, if that is kept elsewhere."""
        if kept is None:
            return self
        uri, length, checksum = kept.reference
        # Empty, and not null: a record without a value would be deleted from a compacted topic.
        return self._replace(payload=b"", dataref=uri, datalength=length, datachecksum=checksum)


class Due(NamedTuple):
    """When a scheduled event is to be published, and the name by which it can be cancelled."""

    name: str | None
    """None: the event's id."""
    at: datetime | None
    after: timedelta | None
    """One of both; this one by the database's clock."""

    @classmethod
    def check(cls, at: datetime | None, after: timedelta | None, name: str | None) -> Self:
        """Return it; raises `TypeError` or `Unpublishable` for what can't be meant."""
        if (at is None) == (after is None):
            raise TypeError("publish(…) takes at= or after= for an event that is due later")
        if at is not None and at.tzinfo is None:
            raise TypeError(f"publish(…, at=…) needs a time with its zone, not {at!r}")
        if after is not None and after > _LONGEST:
            raise Unpublishable(f"publish(…, after=…) takes 100 years at most, not {after!r}")
        if name is not None and ("\x00" in name or not 0 < len(name.encode()) <= _NAME_AT_MOST):
            raise Unpublishable(
                f"the name of a scheduled event has 1 to {_NAME_AT_MOST} bytes, no NUL: {name!r}"
            )
        return cls(name, at, after)


COLUMNS = ", ".join(StagedEvent._fields)
"""Those of an event, wherever it is stored."""

# By name, so that two transactions wait for each other and never in a circle; of those that are due
# at the same time `scheduled_at` tells in which order they were staged.
_SCHEDULE = f"""
WITH moment AS MATERIALIZED (SELECT clock_timestamp() AS at)
INSERT INTO pipeline.scheduled (name, due_at, scheduled_at, {COLUMNS})
SELECT name, COALESCE(due_at, at + after), at + place * interval '1 microsecond', {COLUMNS}
  FROM moment, unnest($1::pipeline.new_scheduled[]) WITH ORDINALITY AS new (
           name, due_at, after, {COLUMNS}, place)
 ORDER BY name
    ON CONFLICT (name) DO UPDATE
   SET due_at = excluded.due_at, scheduled_at = excluded.scheduled_at,
       {", ".join(f"{name} = excluded.{name}" for name in StagedEvent._fields)}
"""

_CLAIM = """
INSERT INTO pipeline.claim (name, event_id) SELECT * FROM unnest($1::text[], $2::text[])
"""

CANCEL = "DELETE FROM pipeline.scheduled WHERE name = ANY ($1) RETURNING name"


def event_id(marker_key: bytes, payload_hash: bytes, ordinal: int) -> str:
    """Return the id of the event that a message causes: the same in every execution.

    `ordinal` counts the events that one handler stages for one message, from 0.
    """
    hash = _BEGUN.copy()  # quicker than to make one
    hash.update(b"%b%b%d" % (marker_key, payload_hash, ordinal))
    return hash.hexdigest()


Staged = tuple[int, int, dict[str, tuple[Due, StagedEvent] | None]]
"""How many events and calls are staged, and what is scheduled or cancelled."""


class Outbox:
    """The events of one transaction, in the order in which they were staged."""

    def __init__(
        self,
        source: str,
        max_event_bytes: int,
        *,
        effects: Mapping[str, type[Event]] = {},
        claims: Claims | None = None,
    ) -> None:
        """`effects` are the events that some effect takes, by their types."""
        self._source = source
        self._max_event_bytes = max_event_bytes
        self._effects = effects
        self._claims = claims
        self._large = set[str]()
        """Ids of events whose payloads are not to travel with them."""
        self.storing: Mapping[str, bytes] = {}
        """Payloads, by event id, that are being kept elsewhere just now."""
        self._staged: list[StagedEvent] = []
        self.calls: list[StagedEvent] = []
        """What effects are called with, after the commit."""
        self._scheduled: dict[str, tuple[Due, StagedEvent] | None] = {}
        """By name; None for what is cancelled. What is asked last is what holds."""
        self._injected: tuple[Context, traces.TraceHeaders] | None = None
        """The latest context, and what it is in headers: a handler publishes several events."""
        self._checked: dict[type[Event], tuple[str, int]] = {}
        """Topics and fixed sizes of the events staged so far."""

    def __len__(self) -> int:
        return len(self._staged)

    @property
    def staged(self) -> Staged:
        """What is staged so far. Set to an earlier value, it drops what was staged since."""
        return len(self._staged), len(self.calls), dict(self._scheduled)

    @staged.setter
    def staged(self, earlier: Staged) -> None:
        events, calls, self._scheduled = earlier
        del self._staged[events:]
        del self.calls[calls:]

    def stage(
        self,
        event: Event,
        *,
        id: str,
        key: str | None,
        sequence: int | None,
        context: Context | None = None,
        due: Due | None = None,
    ) -> None:
        """Keep the event for the COPY, or until it is due; in the current trace unless told.

        Raises `Unpublishable` if its topic or key can't be sent or it is larger than allowed.
        """
        kind = type(event)
        topic, size = self._checked.get(kind) or self._check(kind)
        staged = self._written(event, topic, size, id, key, sequence, context)
        if due is None:
            self._staged.append(staged)
        else:
            name = due.name or id
            self._scheduled.pop(name, None)  # its place is the last one now
            self._scheduled[name] = due, staged

    def call(
        self, event: Event, *, id: str, key: str | None, context: Context | None = None
    ) -> None:
        """Keep what effects are to be called with; in the current trace unless told.

        Raises `TypeError` if no effect takes it, and `Unpublishable` as `stage` does.
        """
        kind = type(event)
        taken = self._effects.get(kind.event_type)
        if taken is not kind:
            name = kind.__name__
            other = f", but {taken.__name__}, which has its type" if taken else ""
            raise TypeError(
                f"no effect takes {name}{other}: register one by @handlers.effect({name}, …)"
            )
        size = self._fixed_size(kind)
        self.calls.append(self._written(event, EFFECTS, size, id, key, None, context))

    def _written(
        self,
        event: Event,
        topic: str,
        size: int,
        id: str,
        key: str | None,
        sequence: int | None,
        context: Context | None,
    ) -> StagedEvent:
        """Return the event as a row; `size` is what it takes beside payload, key and context."""
        kind = type(event)
        if key is not None and "\x00" in key:
            raise Unpublishable(f"the key of {kind.__name__} holds a NUL character: {key!r}")
        if sequence is not None and (type(sequence) is not int or not 0 <= sequence < 2**63):
            raise Unpublishable(f"the sequence of {kind.__name__} is no number: {sequence!r}")
        try:
            payload = event.__pydantic_serializer__.to_json(event)  # as model_dump_json() does
            key_bytes = None if key is None else key.encode()
        except (UnicodeEncodeError, PydanticSerializationError) as error:
            text = f"{kind.__name__} can't be written as UTF-8 JSON: {error}"
            raise Unpublishable(text) from error
        _read_back(event, payload)
        traceparent, tracestate, baggage = self._headers_of(
            get_current() if context is None else context
        )
        size += len(payload) + 2 * len(key_bytes or b"")
        size += len(tracestate or "") + len(baggage or "")
        if self._claims is not None and topic != EFFECTS:
            is_large = len(payload) > self._claims.limit or size > self._max_event_bytes
            if is_large and len(payload) <= self._claims.memory:
                self._large.add(id)
                size += _REFERENCE_AT_MOST - len(payload)
        if size > self._max_event_bytes:
            raise Unpublishable(
                f"{kind.__name__} takes {size:,} bytes and {self._max_event_bytes:,} are allowed:"
                " publish a smaller event, or raise PIPELINE_MAX_EVENT_BYTES"
                " and the topic's max.message.bytes"
                + (", or PIPELINE_CLAIM_MEMORY" if self._claims else "")
            )
        return StagedEvent(
            topic,
            key_bytes,
            payload,
            id,
            self._source,
            kind.event_type,
            key or None,
            sequence,
            "application/json",
            traceparent,
            tracestate,
            baggage,
        )

    def holds(self, id: str) -> bool:
        """Whether the event of this id is staged, and not taken back."""
        return any(event.event_id == id for event in self._staged)

    def place(self, place_of: Callable[[str], tuple[str, int] | None]) -> None:
        """Give staged events, by their ids, the key and the sequence that were not known before."""
        for number, event in enumerate(self._staged):
            if place := place_of(event.event_id):
                key, sequence = place
                self._staged[number] = event._replace(
                    key=key.encode(), subject=key, sequence=sequence
                )

    def cancel(self, name: str) -> None:
        """Let a scheduled event not be published, if it still waits when this commits."""
        self._scheduled[name] = None

    def _headers_of(self, context: Context) -> traces.TraceHeaders:
        # Taken and put as one: a handler may publish from threads.
        injected = self._injected
        if injected is None or injected[0] is not context:
            injected = self._injected = context, traces.creation_context(context)
        return injected[1]

    def _check(self, kind: type[Event]) -> tuple[str, int]:
        """Return the topic of such events, and what each takes beside payload, key and context."""
        topic, name = kind.event_topic, kind.__name__
        if topic is None:
            raise Unpublishable(
                f'{name} has no topic: declare it as class {name}(Event, type="…", topic="…")'
            )
        size = self._fixed_size(kind)
        self._checked[kind] = topic, size
        return topic, size

    def _fixed_size(self, kind: type[Event]) -> int:
        return _HEADERS_AT_MOST + len(self._source.encode()) + len(kind.event_type.encode())

    def add(self, events: Iterable[StagedEvent]) -> None:
        """Keep events that are no handler's for the COPY."""
        self._staged += events

    async def write(self, connection: asyncpg.Connection) -> bool:
        """Write all into the transaction open on the connection; False if that is nothing.

        Raises `StoreUnavailable` if something is too large to travel, and can't be kept elsewhere.
        """
        if self._large:
            await self._refer(connection)
        if self._staged:
            await copy(connection, self._staged)
        if self._scheduled:
            await self._schedule(connection)
        return bool(self._staged or self._scheduled)

    async def _refer(self, connection: asyncpg.Connection) -> None:
        """Have large payloads kept elsewhere."""
        assert self._claims is not None
        scheduled = [one[1] for one in self._scheduled.values() if one is not None]
        large = {
            event.event_id: event.payload
            for event in (*self._staged, *scheduled)
            if event.event_id in self._large and event.payload is not None
        }
        if not large:  # they are taken back
            return
        # As the last but one of all: it may take long, and what comes behind does not.
        self.storing = large
        kept = await self._claims.keep(large)
        self.storing = {}
        await connection.execute(_CLAIM, [one.name for one in kept.values()], list(kept))
        self._staged = [event.referring(kept.get(event.event_id)) for event in self._staged]
        for name, one in self._scheduled.items():
            if one is not None:
                self._scheduled[name] = one[0], one[1].referring(kept.get(one[1].event_id))

    async def _schedule(self, connection: asyncpg.Connection) -> None:
        cancelled = sorted(name for name, one in self._scheduled.items() if one is None)
        if cancelled:
            await connection.execute(CANCEL, cancelled)
        rows = [
            (name, one[0].at, one[0].after, *one[1])
            for name, one in self._scheduled.items()
            if one is not None
        ]
        if rows:
            await connection.execute(_SCHEDULE, rows)


def _read_back(event: Event, payload: bytes) -> None:
    """Raise `Unpublishable` if the event's class does not read what it has written as it was."""
    kind = type(event)
    try:
        read = kind.__pydantic_validator__.validate_json(payload)
    except Exception as error:
        why = f"{kind.__name__} can't be read from its own JSON ({summarize_error(error)})"
        raise Unpublishable(f"{why}: {_ADVICE}") from error
    if read.__dict__ != event.__dict__ or event.__pydantic_extra__:
        before, after = _members(event), _members(read)
        for name in before:
            if not _is_same(before[name], after.get(name)):
                why = f"{kind.__name__}.{name} is another value when it is read from its own JSON"
                raise Unpublishable(f"{why}: {_ADVICE}")


def _members(one: object) -> dict[str, Any]:
    if isinstance(one, BaseModel):
        return {name: getattr(one, name) for name in type(one).model_fields} | (
            one.__pydantic_extra__ or {}
        )
    return getattr(one, "__dict__", {})


def _is_same(one: Any, other: Any) -> bool:
    """Whether values are the same, also where Python has no two equal ones."""
    if one == other or type(one) is not type(other):
        return bool(one == other)
    if isinstance(one, datetime):  # of two zones, in the hour that a clock is set back by
        return bool(one.isoformat() == other.isoformat())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    before, after = (
        _members(value) if not isinstance(value, dict) else value for value in (one, other)
    )
    return (
        bool(before)
        and before.keys() == after.keys()
        and all(_is_same(before[name], after[name]) for name in before)
    )


async def copy(connection: asyncpg.Connection, events: Sequence[StagedEvent]) -> None:
    """Append rows to the outbox, in order, by COPY."""
    # Without a transaction COPY would commit by itself, and events would outlive a rollback.
    if not connection.is_in_transaction():
        raise RuntimeError("outbox rows may only be written in a transaction that has begun")
    with statements.Statement("COPY"):
        await connection.copy_records_to_table(
            "outbox", schema_name=SCHEMA, columns=StagedEvent._fields, records=events
        )
