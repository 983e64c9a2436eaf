"""The backlog: messages that are stored, to be handled later in the order of their key.

Retries, deferred messages, effects and dead letters are rows of one table, and nothing else knows
of them.
A lane is a share of the order keys. Only who holds a lane's lease handles its rows; consume
transactions add some. A key may have rows in two lanes, of retries and of deferred messages, after
a deployment has changed its handler's mode; then the markers keep two workers apart.

A row is due when it is added, also behind others of its key, because those may be gone by the time
it is seen. Those that are added with it can't be: of them only the first of a key is due. Who holds
the lane lets only the first row of a key be due.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from typing import NamedTuple

import asyncpg

from pipeline.events.cloudevents import event_headers
from pipeline.events.message import Record, headers_as_json, printable
from pipeline.events.payload import HASH_VERSION
from pipeline.handlers.policy import DEFERRED, Decision, Policy, dead
from pipeline.handlers.registry import Handlers
from pipeline.handlers.staging import StagedEvent
from pipeline.schema import LANES

from .batch import items_of
from .item import IdentityMismatch, Item, Known, StoredRecord, Undecoded, order_key

_FIRST_LANES = {"immediate": 0, "deferred": LANES, "effect": 2 * LANES}
"""Of each mode's lanes the one with the lowest number."""
_NEXT = -1
"""Offset of what is not stored yet and stands behind all that is: effects have no other place."""


class Row(NamedTuple):
    """A message or record to be stored, and what becomes of it."""

    key: bytes
    """The marker's key where there is an identity: nothing is stored twice."""
    consumer: str
    """Empty for a record that could not be decoded, which is nobody's yet."""
    record: Record
    decision: Decision
    item: Item | None = None
    remembered: bytes | None = None
    """The payload hash that the message's identity came with before, if that was another."""

    @property
    def is_new(self) -> bool:
        """Whether it is not in the backlog yet."""
        return self.item is not None and self.item.row is None

    @property
    def first_trace(self) -> str | None:
        """`traceparent` of its first attempt, if that has just been made."""
        if self.item is None or self.item.trace != self.item.message.traceparent:
            return None
        return self.decision.trace


_FIND = """
SELECT b.key, NULL::bytea AS order_key, b.hash, b.hash_version
  FROM pipeline.backlog b WHERE b.key = ANY ($1)
UNION ALL
SELECT NULL, wanted.key, NULL, NULL
  FROM unnest($2::bytea[]) AS wanted (key)
 WHERE EXISTS (SELECT FROM pipeline.backlog b
                WHERE b.order_key = wanted.key AND (b.died_at IS NULL OR b.holds))
"""

# Rows, not columns: asyncpg looks at every element of an array, and at a row as one.
_ADD = """
INSERT INTO pipeline.backlog
       (key, lane, order_key, sequence, consumer, topic, partition, "offset", timestamp,
        record_key, value, headers, source, id, type, hash, hash_version, remembered_hash,
        traceparent, reason, attempts, waited, due_at, died_at, holds, error, traceback)
SELECT key, lane, order_key, sequence, consumer, topic, partition,
       COALESCE("offset", nextval('pipeline.backlog_effect_seq')), timestamp, record_key, value,
       headers, source, id, type, hash, $1, remembered_hash, traceparent,
       reason, attempts, waited, clock_timestamp() + make_interval(secs => due_in),
       CASE WHEN is_dead THEN clock_timestamp() END, holds, error, traceback
  FROM unnest($2::pipeline.new_backlog_row[])
    ON CONFLICT DO NOTHING
"""

# Written so that the planner, whatever it knows, asks the index for one row of each lane: EXISTS is
# a join with everything that is due, or looks through the table for a lane that has nothing; and
# without COALESCE it expects so few rows that it sorts them all.


# What seems to be stored later than now was stored before the clock was set back.


# Asking for b.died_at would let the planner, who may not know yet that anything waits, look for the
# row through everything that does.


async def find(
    connection: asyncpg.Connection, items: Sequence[Item]
) -> tuple[dict[bytes, Known], set[bytes]]:
    """Return what the backlog holds of these messages, and which of their keys it keeps waiting.

    A statement after the one that marks them, so that it sees what that one has waited for.
    """
    rows = await connection.fetch(
        _FIND,
        [item.key for item in items],
        # What is deferred waits in any case.
        list({item.order_key for item in items if item.handler.mode == "immediate"}),
    )
    known = {row["key"]: Known(row["hash"], row["hash_version"]) for row in rows if row["key"]}
    return known, {row["order_key"] for row in rows if row["order_key"]}


async def add(connection: asyncpg.Connection, rows: Sequence[Row]) -> None:
    """Store rows in the order of their keys; what is stored already stays as it is.

    What stands behind another of its key among them is not due: it is seen together with that one,
    and is let due when that is settled.
    """
    new = []
    waiting: set[bytes] = set()
    for row in rows:
        record, decision = row.record, row.decision
        message = row.item.message if row.item else None
        key = order_key(row.consumer, record)
        mode = row.item.handler.mode if row.item else "immediate"
        new.append(
            (
                row.key,
                lane_of(key, mode),
                key,
                row.item.sequence if row.item else 0,
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
                decision.attempts,
                decision.waited,
                None if decision.due_in == 0.0 and key in waiting else decision.due_in,
                decision.is_dead,
                decision.holds,
                decision.error,
                decision.traceback,
            )
        )
        if not decision.is_dead or decision.holds:
            waiting.add(key)
    await connection.execute(_ADD, HASH_VERSION, new)


def lane_of(order_key: bytes, mode: str) -> int:
    """Return the lane of a key. What a handler takes in each of its modes has lanes of its own."""
    return order_key[0] % LANES + _FIRST_LANES[mode]


def makes_calls(lane: int) -> bool:
    """Whether the lane's worker makes calls to the outside."""
    return lane >= _FIRST_LANES["effect"]


def called(handlers: Handlers, events: Iterable[StagedEvent]) -> list[Row]:
    """Return the rows of effects: each takes the event as if it were a record of a topic.

    They stand in the order in which they are stored, which is that of the transactions for those
    who hold a lock on what they tell of.
    """
    rows: list[Row] = []
    now = datetime.now(UTC)
    for event in events:
        headers = event_headers(event._asdict() | {"created_at": now, "sequence": None})
        # One without a key has its own, so that it stands for itself.
        key = event.event_id.encode() if event.key is None else event.key
        milliseconds = int(now.timestamp() * 1000)
        record = StoredRecord(event.topic, 0, _NEXT, milliseconds, key, event.payload, headers, 0.0)
        found = items_of(handlers, record, validates=False)
        assert not isinstance(found, Undecoded)  # we have written it ourselves
        rows += [Row(one.key, one.consumer, record, DEFERRED, one) for one in found]
    return rows


def row_of(item: Item, decision: Decision) -> Row:
    """Return the row of a message that is not applied now."""
    return Row(item.row or item.key, item.consumer, item.record, decision, item)


def undecoded_row(one: Undecoded) -> Row:
    """Return the dead letter of a record that can't be given to any handler."""
    record = one.record
    digest = blake2b(f"{record.topic}:{record.partition}:{record.offset}".encode(), digest_size=16)
    # A topic that was created anew has other records at the same places.
    for part in (record.key, record.value):
        digest.update(b"-" if part is None else b"%d:%b" % (len(part), part))
    return Row(digest.digest(), "", record, dead(Policy(), one.reason, one.error))


def mismatch_row(item: Item, error: IdentityMismatch) -> Row:
    """Return the dead letter of a message that has the identity of another one.

    It does not hold its key: in the order stands the other one.
    """
    decision = dead(Policy(), "identity mismatch", error)
    key = item.row or mismatch_key(item)
    return Row(key, item.consumer, item.record, decision, item, error.remembered)


def dead_letter(row: Row, topic: str) -> StagedEvent:
    """Return the record of a dead row, for a topic of such: as it came, and why in headers."""
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
        # A name that is not UTF-8 can't be sent again.
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
    """Return the key of the row of a message that has the identity of another one."""
    return blake2b(item.key + item.message.hash, digest_size=16).digest()
