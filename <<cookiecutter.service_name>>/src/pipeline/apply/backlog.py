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

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from typing import NamedTuple

import asyncpg

from pipeline.events.cloudevents import event_headers
from pipeline.events.message import Record, headers_as_json, headers_of, printable
from pipeline.events.payload import HASH_VERSION
from pipeline.handlers.policy import (
    DEFERRED,
    DIED,
    GAP,
    REDRIVEN,
    UNKNOWN,
    Decision,
    Policy,
    after_failure,
    dead,
)
from pipeline.handlers.registry import Handlers
from pipeline.handlers.staging import StagedEvent
from pipeline.schema import LANES
from pipeline.servers.database import lease_ended
from pipeline.servers.tasks import TimeSlice

from .batch import Item, Quarantined, items_of, order_key, validated
from .inbox import Generations, IdentityMismatch, Known

_RUN_BYTES = 16 * 2**20
"""What the rows of one transaction may take in memory, about."""
_FIRST_LANES = {"immediate": 0, "deferred": LANES, "effect": 2 * LANES}
"""Of each mode's lanes the one with the lowest number."""
_NEXT = -1
"""Offset of what is not stored yet and stands behind all that is: effects have no other place."""
_DEMOTED = 10_000
"""Rows of a key that one statement stops from being due, so that none takes long."""


class LaneLost(Exception):
    """The lane's lease is not ours any more: another worker, or a person, has taken it."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane as its worker holds it."""

    number: int
    token: int
    starts: int
    """Workers that have begun and not come back, this one included."""
    claimed_at: datetime
    """By the database's clock: those have seen nothing that was stored since."""


class StoredRecord(NamedTuple):
    """A record as it was read from Kafka."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    stored_for: float
    """Seconds that it has been in the backlog."""


class Row(NamedTuple):
    """A message or record to be stored, and what becomes of it."""

    key: bytes
    """The marker's key where there is an identity: nothing is stored twice."""
    consumer: str
    """Empty for a record that could not be decoded, which is nobody's yet."""
    record: Record
    fate: Decision
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
        if self.item is None or self.item.trace != self.item.marker.message.traceparent:
            return None
        return self.fate.trace


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

_CLAIM = f"""
UPDATE pipeline.backlog_lane
   SET owner = $1, token = token + 1, starts = starts + 1,
       lease_until = clock_timestamp() + make_interval(secs => $2)
 WHERE lane = (
       SELECT lane FROM pipeline.backlog_lane l
        WHERE (lease_until IS NULL OR {lease_ended("$2")})
          AND (SELECT true FROM pipeline.backlog b
                WHERE b.lane = l.lane AND due_at <= statement_timestamp()
                  AND COALESCE(consumer = ANY ($3), false)
                ORDER BY due_at LIMIT 1)
        ORDER BY released_at LIMIT 1
          FOR UPDATE SKIP LOCKED)
RETURNING lane, token, starts, clock_timestamp()
"""
# Written so that the planner, whatever it knows, asks the index for one row of each lane: EXISTS is
# a join with everything that is due, or looks through the table for a lane that has nothing; and
# without COALESCE it expects so few rows that it sorts them all.

_HOLD = """
WITH held AS (
    UPDATE pipeline.backlog_lane
       SET lease_until = clock_timestamp() + make_interval(secs => $3)
     WHERE lane = $1 AND token = $2
    RETURNING 1
)
SELECT current, oldest, since, opening, EXISTS (SELECT FROM held) AS ours
  FROM pipeline.inbox_generation
"""

_RELEASE = """
UPDATE pipeline.backlog_lane
   SET owner = NULL, lease_until = NULL, starts = 0, released_at = clock_timestamp()
 WHERE lane = $1 AND token = $2
"""

_TAKE = """
WITH due AS MATERIALIZED (
    SELECT order_key, min(due_at) AS due_at
      FROM (SELECT order_key, due_at FROM pipeline.backlog
             WHERE lane = $1 AND due_at <= statement_timestamp() AND consumer = ANY ($2)
               AND COALESCE(received_at <= $5 OR received_at > statement_timestamp(), true)
             ORDER BY due_at LIMIT $3) AS first
     GROUP BY order_key
)
SELECT key, order_key, consumer, topic, partition, "offset", timestamp, record_key, value, headers,
       type, hash, hash_version, traceparent, reason, attempts, waited, error,
       date_part('epoch', clock_timestamp() - received_at) AS stored_for,
       COALESCE(due_at > clock_timestamp(), died_at IS NOT NULL) AS must_wait
  FROM (SELECT due.due_at AS key_due_at, b.*,
               sum(octet_length(value)) OVER (
                   ORDER BY due.due_at, b.order_key, sequence, partition, "offset"
                   ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before
          FROM due CROSS JOIN LATERAL (
               SELECT * FROM pipeline.backlog b
                WHERE b.order_key = due.order_key AND (b.died_at IS NULL OR b.holds)
                ORDER BY sequence, partition, "offset"
                LIMIT GREATEST(1, $3 / (SELECT count(*) FROM due))) AS b) AS run
 WHERE bytes_before < $4 OR bytes_before IS NULL
 ORDER BY key_due_at, order_key, sequence, partition, "offset"
"""
# What seems to be stored later than now was stored before the clock was set back.

_DELETE = "DELETE FROM pipeline.backlog WHERE key = ANY ($1)"

_SET = """
UPDATE pipeline.backlog AS b
   SET reason = new.reason, attempts = new.attempts, waited = new.waited, holds = new.holds,
       error = new.error, traceback = new.traceback,
       remembered_hash = new.remembered_hash,
       traceparent = COALESCE(new.traceparent, b.traceparent),
       due_at = clock_timestamp() + make_interval(secs => new.due_in),
       died_at = CASE WHEN new.due_in IS NULL THEN clock_timestamp() END
  FROM unnest($1::bytea[], $2::text[], $3::integer[], $4::float[], $5::float[], $6::boolean[],
              $7::text[], $8::text[], $9::bytea[], $10::text[])
       AS new (key, reason, attempts, waited, due_in, holds, error, traceback, remembered_hash,
               traceparent)
 WHERE b.key = new.key
"""

_ONLY_HEADS_ARE_DUE = """
WITH head AS MATERIALIZED (
    SELECT wanted.key AS order_key, b.key, b.died_at
      FROM unnest($1::bytea[]) AS wanted (key) CROSS JOIN LATERAL (
           SELECT key, died_at FROM pipeline.backlog b
            WHERE b.order_key = wanted.key AND (b.died_at IS NULL OR b.holds)
            ORDER BY sequence, partition, "offset" LIMIT 1) AS b
), behind AS MATERIALIZED (
    SELECT b.key FROM head CROSS JOIN LATERAL (
           SELECT key FROM pipeline.backlog b
            WHERE b.order_key = head.order_key AND b.due_at <= statement_timestamp()
              AND b.lane = ANY ($2) AND b.key <> head.key) AS b
     LIMIT $3
), demoted AS (
    UPDATE pipeline.backlog SET due_at = NULL WHERE key IN (SELECT key FROM behind)
)
UPDATE pipeline.backlog AS b SET due_at = clock_timestamp()
  FROM head
 WHERE b.key = head.key AND head.died_at IS NULL
   AND (b.due_at IS NULL OR b.reason = $4 AND b.order_key = ANY ($5))
"""
# Asking for b.died_at would let the planner, who may not know yet that anything waits, look for the
# row through everything that does.

_SEIZE = """
UPDATE pipeline.backlog_lane
   SET token = token + 1, owner = NULL, lease_until = NULL,
       starts = starts - CASE WHEN lease_until > clock_timestamp() THEN 1 ELSE 0 END
 WHERE lane = $1
"""

_SHARE = "SELECT FROM pipeline.backlog_lane WHERE lane = $1 FOR NO KEY UPDATE"

_REDRIVE = """
UPDATE pipeline.backlog
   SET reason = CASE WHEN error LIKE 'ProcessDied:%' THEN $2 ELSE $3 END,
       attempts = 0, waited = 0, due_at = NULL, died_at = NULL, holds = false
 WHERE key = ANY ($1)
"""

_DISCARD = """
UPDATE pipeline.backlog
   SET discarded_at = clock_timestamp(), discarded_by = $2, discarded_why = $3, holds = false
 WHERE key = ANY ($1)
"""

_COUNT = """
SELECT consumer, count(*) FILTER (WHERE died_at IS NULL),
       count(*) FILTER (WHERE died_at IS NOT NULL AND discarded_at IS NULL),
       COALESCE(extract(epoch FROM clock_timestamp()
                        - min(received_at) FILTER (WHERE died_at IS NULL)), 0)::float
  FROM pipeline.backlog GROUP BY consumer
"""


async def find(
    connection: asyncpg.Connection, items: Sequence[Item]
) -> tuple[dict[bytes, Known], set[bytes]]:
    """Return what the backlog holds of these messages, and which of their keys it keeps waiting.

    A statement after the one that marks them, so that it sees what that one has waited for.
    """
    rows = await connection.fetch(
        _FIND,
        [item.marker.key for item in items],
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
        record, fate = row.record, row.fate
        message = row.item.marker.message if row.item else None
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
                fate.trace or (message and message.traceparent),
                fate.reason,
                fate.attempts,
                fate.waited,
                None if fate.due_in == 0.0 and key in waiting else fate.due_in,
                fate.is_dead,
                fate.holds,
                fate.error,
                fate.traceback,
            )
        )
        if not fate.is_dead or fate.holds:
            waiting.add(key)
    await connection.execute(_ADD, HASH_VERSION, new)


def lane_of(order_key: bytes, mode: str) -> int:
    """Return the lane of a key. What a handler takes in each of its modes has lanes of its own."""
    return order_key[0] % LANES + _FIRST_LANES[mode]


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
        assert not isinstance(found, Quarantined)  # we have written it ourselves
        rows += [Row(one.marker.key, one.marker.consumer, record, DEFERRED, one) for one in found]
    return rows


def quarantined(one: Quarantined) -> Row:
    """Return the dead letter of a record that can't be given to any handler."""
    record = one.record
    digest = blake2b(f"{record.topic}:{record.partition}:{record.offset}".encode(), digest_size=16)
    # A topic that was created anew has other records at the same places.
    for part in (record.key, record.value):
        digest.update(b"-" if part is None else b"%d:%b" % (len(part), part))
    return Row(digest.digest(), "", record, dead(Policy(), one.reason, one.error))


def identity_mismatch(item: Item, error: IdentityMismatch) -> Row:
    """Return the dead letter of a message that has the identity of another one.

    It does not hold its key: in the order stands the other one.
    """
    fate = dead(Policy(), "identity mismatch", error)
    key = item.row or impostor_key(item)
    return Row(key, item.marker.consumer, item.record, fate, item, error.remembered)


def dead_letter(row: Row, topic: str) -> StagedEvent:
    """Return the record of a dead row, for a topic of such: as it came, and why in headers."""
    record, fate = row.record, row.fate
    why = {
        "id": row.key.hex(),
        "reason": fate.reason,
        "error": fate.error or "",
        "attempts": fate.attempts,
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
        traceparent=row.item.marker.message.traceparent if row.item else None,
        tracestate=None,
        baggage=None,
        headers=headers_as_json(headers),
    )


def impostor_key(item: Item) -> bytes:
    """Return the key of the row of a message that has the identity of another one."""
    return blake2b(item.marker.key + item.marker.message.hash, digest_size=16).digest()


async def claim(
    connection: asyncpg.Connection, owner: str, lease: float, consumers: Collection[str]
) -> Lane | None:
    """Take a lane that has something due for these consumers; the one that waits longest first.

    A lane of a worker that died is free when its lease, in seconds, has run out.
    """
    row = await connection.fetchrow(_CLAIM, owner, lease, list(consumers))
    return Lane(*row) if row else None


async def hold(connection: asyncpg.Connection, lane: Lane, lease: float) -> Generations:
    """Hold the lane to the end of the transaction. Raises `LaneLost`."""
    row = await connection.fetchrow(_HOLD, lane.number, lane.token, lease)
    if row is None or not row["ours"]:
        raise LaneLost(f"backlog lane {lane.number} went to somebody else")
    return Generations(row["current"], row["oldest"], row["since"], row["opening"])


async def release(connection: asyncpg.Connection, lane: Lane) -> None:
    """Give the lane back, in order."""
    await connection.execute(_RELEASE, lane.number, lane.token)


@dataclass(frozen=True, slots=True)
class Taken:
    """Rows of a lane whose turn it is, the first ones of each key, in its order."""

    items: Sequence[Item]
    """Messages to handle; those that may kill the process are not validated yet."""
    redecoded: Mapping[bytes, Sequence[Item]]
    """What records that were nobody's turn out to be now, by their row's key."""
    hopeless: Sequence[Row]
    """Rows that can't be given to any handler of this process."""
    keys: Sequence[bytes]
    """Order keys of all rows seen, also of those that turned out not to be due."""


class NoHandler(Exception):
    """No handler of the consumer takes the message any more."""


async def take(
    connection: asyncpg.Connection,
    lane: Lane,
    handlers: Handlers,
    consumers: Collection[str],
    limit: int,
    *,
    before: datetime | None = None,
) -> Taken:
    """Read what is due; keys take turns, and share the `limit`.

    With `before`, only keys of which a row is due that may have been stored by then.
    """
    rows = await connection.fetch(_TAKE, lane.number, list(consumers), limit, _RUN_BYTES, before)
    keys: list[bytes] = []
    items: list[Item] = []
    redecoded: dict[bytes, Sequence[Item]] = {}
    hopeless: list[Row] = []
    waiting: set[bytes] = set()
    turn = TimeSlice()
    for row in rows:
        if turn.is_over:
            await turn.end()
        key = row["order_key"]
        if not keys or keys[-1] != key:
            keys.append(key)
        if row["must_wait"]:
            waiting.add(key)
        if key in waiting:
            continue
        found = _read(handlers, row, validates=lane.starts <= 1 and row["reason"] != DIED)
        if isinstance(found, Row):
            hopeless.append(found)
            if not found.fate.is_dead:
                waiting.add(key)
        elif row["consumer"]:
            items += found
        else:
            redecoded[row["key"]] = found
    return Taken(items, redecoded, hopeless, keys)


def _read(handlers: Handlers, row: asyncpg.Record, *, validates: bool) -> Sequence[Item] | Row:
    """Decode the row as the service reads it now, for its consumer or, if it is nobody's, all."""
    record = stored_record(row, stored_for=row["stored_for"])
    consumer = row["consumer"]
    hash = row["hash"] if row["hash_version"] == HASH_VERSION else None
    found = items_of(handlers, record, validates=False, hash=hash)
    if isinstance(found, Quarantined):
        fate = dead(Policy(), found.reason, found.error, attempts=row["attempts"])
        return Row(row["key"], consumer, record, fate)
    if not consumer and found:
        return [item._replace(was_young=True) for item in found]
    for item in found:
        if item.marker.consumer == consumer:
            return [
                (validated(item) if validates else item)._replace(
                    attempts=row["attempts"],
                    waited=row["waited"],
                    row=row["key"],
                    stored=Known(row["hash"], row["hash_version"]),
                    was_young=True,
                    reason=row["reason"],
                    last_error=row["error"],
                    trace=row["traceparent"],
                )
            ]
    who = consumer or "the service"
    error = NoHandler(f"{who} has no handler for {row['type'] or 'this'!r} of {record.topic}")
    if not consumer:
        return Row(row["key"], consumer, record, dead(Policy(), "no handler", error))
    # In the middle of a deployment another process may have one.
    fate = after_failure(
        Policy(), error, attempts=row["attempts"], waited=row["waited"], reason="no handler"
    )
    if row["reason"] == UNKNOWN:  # and so it stays
        fate = replace(fate, reason=UNKNOWN)
    return Row(row["key"], consumer, record, fate)


def stored_record(row: asyncpg.Record, *, stored_for: float) -> StoredRecord:
    """Return the record of a row that has been stored for so many seconds."""
    return StoredRecord(
        row["topic"],
        row["partition"],
        row["offset"],
        row["timestamp"],
        row["record_key"],
        row["value"],
        headers_of(row["headers"]),
        stored_for,
    )


async def settle(
    connection: asyncpg.Connection,
    lane: Lane,
    *,
    done: Collection[bytes],
    changed: Sequence[Row],
    keys: Collection[bytes],
    went_on: Collection[bytes],
) -> None:
    """Delete the rows that are done and change others, by their keys, then let heads be due.

    `went_on` are the order keys of which something was done.
    """
    if done:
        await connection.execute(_DELETE, list(done))
    if changed:
        await connection.execute(
            _SET,
            [row.key for row in changed],
            [row.fate.reason for row in changed],
            [row.fate.attempts for row in changed],
            [row.fate.waited for row in changed],
            [row.fate.due_in for row in changed],
            [row.fate.holds for row in changed],
            [row.fate.error for row in changed],
            [row.fate.traceback for row in changed],
            [row.remembered for row in changed],
            [row.first_trace for row in changed],
        )
    await schedule_heads(connection, [lane.number], keys, went_on)


async def count(connection: asyncpg.Connection) -> list[tuple[str, int, int, float]]:
    """Return by consumer: messages that wait, dead letters, seconds since the oldest was stored."""
    return [tuple(row) for row in await connection.fetch(_COUNT)]


async def fence_lane(connection: asyncpg.Connection, lane: int) -> None:
    """Hold the lane to the end of the transaction, as nobody's worker, to change what is dead.

    Waits for the transaction of the worker that has it, whose later ones raise `LaneLost`. That
    worker has not died, so it is not counted among those that did. One that makes calls keeps the
    lane: it knows how they end, and has read only what is alive.
    """
    makes_calls = lane >= _FIRST_LANES["effect"]
    await connection.execute(_SHARE if makes_calls else _SEIZE, lane)


async def redrive(connection: asyncpg.Connection, keys: Sequence[bytes]) -> None:
    """Let dead rows be tried again, with a new budget.

    Seize their lane before, and let heads be due after.
    """
    await connection.execute(_REDRIVE, keys, DIED, REDRIVEN)


async def discard(
    connection: asyncpg.Connection, keys: Sequence[bytes], *, operator: str, why: str
) -> None:
    """Close dead rows; they stay for long, to be known again. Seize their lane before."""
    await connection.execute(_DISCARD, keys, operator, why)


async def schedule_heads(
    connection: asyncpg.Connection,
    lanes: Collection[int],
    keys: Collection[bytes],
    went_on: Collection[bytes] = (),
) -> None:
    """Make the first row of each order key the only one that is due. Hold the lanes before.

    One that waits for another of its sequence may be the next, where its key `went_on`.
    """
    await connection.execute(
        _ONLY_HEADS_ARE_DUE, list(keys), list(lanes), _DEMOTED, GAP, list(went_on)
    )
