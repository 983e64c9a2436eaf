"""The outbox: events staged in memory while handlers run, written by one COPY before the commit."""

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import asyncpg
from opentelemetry.context import Context
from pydantic_core import PydanticSerializationError

from . import telemetry
from .events import Event
from .schema import SCHEMA

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_HEADERS_AT_MOST = 700
"""Bytes that names, separators and fixed values of the headers can take."""


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


def event_id(marker_key: bytes, payload_hash: bytes, ordinal: int) -> str:
    """Return the id of the event that a message causes: the same in every execution.

    `ordinal` counts the events that one handler stages for one message, from 0.
    """
    return blake2b(b"%b%b%d" % (marker_key, payload_hash, ordinal), digest_size=16).hexdigest()


class Outbox:
    """The events of one transaction, in the order in which they were staged."""

    def __init__(self, source: str, max_event_bytes: int) -> None:
        self._source = source
        self._max_event_bytes = max_event_bytes
        self._staged: list[StagedEvent] = []
        self._checked: dict[type[Event], tuple[str, int]] = {}
        """Topics and fixed sizes of the events staged so far."""

    def __len__(self) -> int:
        return len(self._staged)

    def stage(
        self,
        event: Event,
        *,
        id: str,
        key: str | None,
        sequence: int | None,
        context: Context | None = None,
    ) -> None:
        """Keep the event for the COPY, in the current trace unless a context is given.

        Raises `Unpublishable` if its topic or key can't be sent or it is larger than allowed.
        """
        kind = type(event)
        topic, size = self._checked.get(kind) or self._check(kind)
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
        traceparent, tracestate, baggage = telemetry.creation_context(context)
        size += len(payload) + 2 * len(key_bytes or b"")
        size += len(tracestate or "") + len(baggage or "")
        if size > self._max_event_bytes:
            raise Unpublishable(
                f"{kind.__name__} takes {size:,} bytes and {self._max_event_bytes:,} are allowed:"
                " publish a smaller event, or raise PIPELINE_MAX_EVENT_BYTES"
                " and the topic's max.message.bytes"
            )
        self._staged.append(
            StagedEvent(
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
        )

    def _check(self, kind: type[Event]) -> tuple[str, int]:
        """Return the topic of such events, and what each takes beside payload, key and context."""
        topic, name = kind.event_topic, kind.__name__
        if topic is None or not _TOPIC.fullmatch(topic) or topic in (".", ".."):
            raise Unpublishable(
                f"{name} has {'no topic' if topic is None else f'the topic {topic!r}'};"
                f' declare it as class {name}(Event, type="…", topic="…"), with 1 to 249 letters,'
                " digits, dots, underscores and hyphens"
            )
        size = _HEADERS_AT_MOST + len(self._source.encode()) + len(kind.event_type.encode())
        self._checked[kind] = topic, size
        return topic, size

    def add(self, events: Iterable[StagedEvent]) -> None:
        """Keep events that are no handler's for the COPY."""
        self._staged += events

    async def write(self, connection: asyncpg.Connection) -> None:
        """Copy the staged events into the transaction that is open on the connection."""
        if self._staged:
            await copy(connection, self._staged)


async def copy(connection: asyncpg.Connection, events: Sequence[StagedEvent]) -> None:
    """Append rows to the outbox, in order, by COPY."""
    # Without a transaction COPY would commit by itself, and events would outlive a rollback.
    if not connection.is_in_transaction():
        raise RuntimeError("outbox rows may only be written in a transaction that has begun")
    await connection.copy_records_to_table(
        "outbox", schema_name=SCHEMA, columns=StagedEvent._fields, records=events
    )
