"""The backlog: messages that are stored, to be handled later in the order of their key.

Retries, deferred messages, calls of effects and dead letters are rows of one table. A lane is a
share of the order keys. Only the worker with the lane's lease handles its rows; consume
transactions add rows. A key may have rows in two lanes, of retries and of deferred messages, after
a deployment has changed its handler's mode; then the markers prevent two workers from applying the
same message.

A row is due when it is added, also behind other rows of its key, because those may be deleted
before a worker reads it. Of the rows of a key that one transaction adds only the first is due: they
are read together. The lane's worker makes the first row of a key the only one that is due.
"""

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from typing import NamedTuple

import asyncpg

from onceward.errors import Paused
from onceward.events.cloudevents import event_headers
from onceward.events.message import headers_as_json, marker_key, printable
from onceward.events.payload import HASH_VERSION
from onceward.handlers.policy import DEFERRED, Decision, Policy, dead
from onceward.handlers.registry import Handlers
from onceward.handlers.staged import StagedEvent
from onceward.schema import FIRST_LANE_OF_CALLS, LANES

from . import statements
from .batch import items_of
from .encryption import Encryption
from .item import (
    IdentityMismatch,
    Item,
    Known,
    Row,
    StoredRecord,
    Undecoded,
    order_key,
    record_digest,
)

_FIRST_LANES = {"immediate": 0, "deferred": LANES, "call": FIRST_LANE_OF_CALLS}
"""The lowest number of each mode's lanes."""
_MOST_DUE = 10_000
"""Rows that wait for a worker while more messages are stored to be tried alone."""
_NEXT = -1
"""Offset of a call that is not stored yet: the database numbers it after all stored calls."""


class BacklogFull(Paused):
    """Workers are behind with messages that are to be tried alone."""

    reason = "backlog full"


async def is_full(connection: asyncpg.Connection, consumers: Collection[str]) -> bool:
    """Whether more rows of consumers are to be tried again than workers can be expected to soon."""
    lanes = _FIRST_LANES["deferred"]
    due = await connection.fetchval(statements.COUNT_DUE, lanes - 1, _MOST_DUE, list(consumers))
    return bool(due >= _MOST_DUE)


async def raise_if_full(connection: asyncpg.Connection, consumers: Collection[str]) -> None:
    """Raise `BacklogFull` if the backlog of consumers is full."""
    if await is_full(connection, consumers):
        raise BacklogFull(
            f"{_MOST_DUE} messages of {', '.join(sorted(consumers))} or more wait for a worker: the"
            " partition goes on when fewer do; `service dead list --waiting` shows their errors"
        )


class Stored(NamedTuple):
    """What the backlog has of messages."""

    known: dict[bytes, Known] = {}  # noqa: RUF012
    """The hashes of those that have rows, by marker key."""
    waiting: Collection[bytes] = ()
    """Order keys of which rows are waiting."""
    overtaken: Collection[bytes] = ()
    """Order keys whose rows another transaction has changed since they were read."""


async def find(connection: asyncpg.Connection, items: Sequence[Item]) -> Stored:
    """Return which of these messages have rows, and for which of their keys rows are waiting.

    It follows the statement that inserts the markers, so that it sees the rows of transactions for
    which that statement has waited.
    """
    rows = await connection.fetch(
        statements.FIND_IN_BACKLOG,
        [item.key for item in items],
        # Deferred messages are stored in any case.
        list({item.order_key for item in items if item.handler.mode == "immediate"}),
    )
    known = {row["key"]: Known(row["hash"], row["hash_version"]) for row in rows if row["key"]}
    return Stored(known, {row["order_key"] for row in rows if row["order_key"]})


async def add(
    connection: asyncpg.Connection, rows: Sequence[Row], encryption: Encryption | None
) -> Sequence[Row]:
    """Store rows in the order of their keys; returns those that are new, as stored, encrypted.

    Rows that exist already are not changed, and of two with one key the first is stored. A row
    behind another one of its order key in `rows` is not due: a worker reads it together with that
    one, and makes it due when that one is settled.
    """
    if not rows:
        return rows
    if encryption is not None:
        rows = await encryption.encrypt(connection, rows)
    new = []
    waiting: set[bytes] = set()
    for row in rows:
        record, decision = row.record, row.decision
        message = row.item.message if row.item else None
        own = row.item if row.consumer else None
        key = own.order_key if own else order_key(row.consumer, record)
        mode = own.handler.mode if own else row.mode
        new.append(
            (
                row.key,
                lane_of(key, mode),
                key,
                own.sequence if own else 0,
                row.consumer,
                record.topic,
                record.partition,
                None if record.offset == _NEXT else record.offset,
                record.timestamp,
                record.key,
                record.value,
                headers_as_json(record.headers),
                message and message.source,
                message and message.id,
                message and message.type,
                message and message.hash,
                row.remembered,
                decision.trace or (message and message.traceparent),
                decision.reason,
                decision.history.attempts,
                decision.history.waited,
                None if decision.due_in == 0.0 and key in waiting else decision.due_in,
                decision.is_dead,
                decision.holds,
                decision.error,
                decision.traceback,
            )
        )
        if not decision.is_dead or decision.holds:
            waiting.add(key)
    stored = {
        row["key"] for row in await connection.fetch(statements.ADD_TO_BACKLOG, HASH_VERSION, new)
    }
    return first_with(stored, rows)


def first_with(keys: Collection[bytes], rows: Sequence[Row]) -> list[Row]:
    """Return the first row with each of the keys, in the order of the rows."""
    first = {row.key: row for row in reversed(rows) if row.key in keys}
    return [row for row in rows if first.get(row.key) is row]


def lane_of(order_key: bytes, mode: str) -> int:
    """Return the lane of a key. Each mode of handlers has lanes of its own."""
    return order_key[0] % LANES + _FIRST_LANES[mode]


async def add_calls(
    connection: asyncpg.Connection,
    handlers: Handlers,
    calls: Sequence[StagedEvent],
    encryption: Encryption | None,
) -> None:
    """Store a row for each handler of each call, as if the event were a record of a topic.

    The calls of a key have the order in which they are stored. If the transactions lock the rows
    that the events are about, that is the order of the transactions.
    """
    rows: list[Row] = []
    now = datetime.now(UTC)
    for event in calls:
        headers = event_headers(event._asdict() | {"created_at": now, "sequence": None})
        # A call without a key gets one of its own, so that it waits for no other.
        key = event.event_id.encode() if event.key is None else event.key
        milliseconds = int(now.timestamp() * 1000)
        record = StoredRecord(event.topic, 0, _NEXT, milliseconds, key, event.payload, headers, 0.0)
        found = items_of(handlers, record, validates=False)
        assert not isinstance(found, Undecoded)  # the engine has written it
        rows += [Row(one.key, one.consumer, record, DEFERRED, one) for one in found]
    await add(connection, rows, encryption)


def row_of(item: Item, decision: Decision) -> Row:
    """Return the row of a message that is not applied now."""
    # Of a record that can't be decoded no message is known.
    known, mode = None if item.undecoded else item, item.handler.mode
    return Row(item.row or item.key, item.consumer, item.record, decision, known, mode=mode)


def undecoded_row(one: Undecoded) -> Row:
    """Return the dead letter of a record that can't be given to any handler."""
    record = one.record
    # With key and value: a topic that was created anew has other records at the same offsets.
    key = record_digest(f"{record.topic}:{record.partition}:{record.offset}", record)
    return Row(key, "", record, dead(Policy(), one.reason, one.error))


def mismatch_row(item: Item, error: IdentityMismatch) -> Row:
    """Return the dead letter of a message that has the identity of another one.

    It does not block its key: the other message has the place in the order. It belongs to the event
    and to no consumer, unless it was a row of one before.
    """
    decision = dead(Policy(), "identity mismatch", error, item.history)
    key, consumer = (item.row, item.consumer) if item.row else (mismatch_key(item), "")
    return Row(key, consumer, item.record, decision, item, error.remembered)


def dead_letter(row: Row, topic: str) -> StagedEvent:
    """Return the record of a dead row for a dead-letter topic, with the reason in its headers."""
    record, decision = row.record, row.decision
    why = {
        "id": row.key.hex(),
        "reason": decision.reason,
        "error": decision.error or "",
        "attempts": decision.attempts,
        "consumer": row.consumer,
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
    }
    headers = [
        # A header name that is not UTF-8 can't be sent again.
        *((printable(name), value) for name, value in record.headers),
        *((f"dead-letter-{name}", str(value).encode()) for name, value in why.items()),
    ]
    return StagedEvent(
        topic=topic,
        key=record.key,
        payload=record.value,
        event_id=row.key.hex(),
        source=row.consumer,
        type="dead letter",
        subject=None,
        sequence=None,
        content_type="",
        traceparent=row.item.message.traceparent if row.item else None,
        tracestate=None,
        baggage=None,
        headers=headers_as_json(headers),
    )


def mismatch_key(item: Item) -> bytes:
    """Return the key of the row of a message that has the identity of another one.

    The identity is that of the event: all consumers have the same row.
    """
    message = item.message
    identity = marker_key("", message.source, message.id)
    return blake2b(identity + message.hash, digest_size=16).digest()
