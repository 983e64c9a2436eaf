"""Lanes of the backlog: leased by workers; their rows are read and settled in the order of keys."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import asyncpg

from pipeline.apply.backlog import Row
from pipeline.apply.batch import items_of, validated
from pipeline.apply.item import Item, Known, StoredRecord, Undecoded
from pipeline.apply.positions import Generations, SourceLost
from pipeline.events.message import headers_of
from pipeline.events.payload import HASH_VERSION
from pipeline.handlers.policy import DIED, GAP, UNKNOWN, Policy, dead
from pipeline.handlers.registry import Handlers
from pipeline.servers.database import lease_ended
from pipeline.servers.tasks import TimeSlice

_RUN_BYTES = 16 * 2**20
"""Approximate limit of the memory for the rows of one transaction."""
_DEMOTED = 10_000
"""Rows of a key whose `due_at` one statement clears at most, so that it does not take long."""


class LaneLost(SourceLost):
    """The lane's lease has ended: another worker has claimed the lane, or a command fenced it."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A claimed lane."""

    number: int
    token: int
    starts: int
    """Workers that have claimed the lane and not released it, this one included."""
    claimed_at: datetime
    """By the database's clock. Earlier workers can't have read a row that was stored later."""


# Written so that the planner, whatever its statistics are, looks up one row of each lane in the
# index. With EXISTS it would join the lanes with everything that is due, or scan the table for a
# lane in which nothing is due; without COALESCE it expects so few rows that it sorts all of them.
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


# A row that seems to be stored in the future was stored before the clock was set back.
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


# The last WHERE compares head.died_at: with b.died_at the planner, whose statistics may be older
# than the waiting rows, could search for the head among all of them.
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


_COUNT = """
SELECT consumer, count(*) FILTER (WHERE died_at IS NULL),
       count(*) FILTER (WHERE died_at IS NOT NULL AND discarded_at IS NULL),
       COALESCE(extract(epoch FROM clock_timestamp()
                        - min(received_at) FILTER (WHERE died_at IS NULL)), 0)::float
  FROM pipeline.backlog GROUP BY consumer
"""


async def claim(
    connection: asyncpg.Connection, owner: str, lease: float, consumers: Collection[str]
) -> Lane | None:
    """Claim the lane with rows due for these consumers that was released first; None if none has.

    The lane of a worker that died can be claimed when its lease, in seconds, has run out.
    """
    row = await connection.fetchrow(_CLAIM, owner, lease, list(consumers))
    return Lane(*row) if row else None


async def hold(connection: asyncpg.Connection, lane: Lane, lease: float) -> Generations:
    """Lock the lane to the end of the transaction, and extend its lease. Raises `LaneLost`."""
    row = await connection.fetchrow(_HOLD, lane.number, lane.token, lease)
    if row is None or not row["ours"]:
        raise LaneLost(f"backlog lane {lane.number} was taken over")
    return Generations(*row[:4])


async def release(connection: asyncpg.Connection, lane: Lane) -> None:
    """Release the lane on a clean end: the count of its starts becomes 0."""
    await connection.execute(_RELEASE, lane.number, lane.token)


@dataclass(frozen=True, slots=True)
class Taken:
    """Due rows of a lane: the first ones of each key, in its order."""

    items: Sequence[Item]
    """Messages to handle; those that may kill the process are not validated yet."""
    redecoded: Mapping[bytes, Sequence[Item]]
    """Messages of records that could not be decoded before and now can, by their row's key."""
    unhandleable: Sequence[Row]
    """Rows that no handler of this process takes, with the decision about them."""
    keys: Sequence[bytes]
    """Order keys of all rows read, also of those that are not due."""


class NoHandler(Exception):
    """No registered handler of the consumer takes the message."""


async def take(
    connection: asyncpg.Connection,
    lane: Lane,
    handlers: Handlers,
    consumers: Collection[str],
    limit: int,
    *,
    before: datetime | None = None,
) -> Taken:
    """Read due rows: of the keys that are due longest, which share the `limit` of rows.

    With `before`, only keys with a due row that may have been stored by then.
    """
    rows = await connection.fetch(_TAKE, lane.number, list(consumers), limit, _RUN_BYTES, before)
    keys: list[bytes] = []
    items: list[Item] = []
    redecoded: dict[bytes, Sequence[Item]] = {}
    unhandleable: list[Row] = []
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
            unhandleable.append(found)
            if not found.decision.is_dead:
                waiting.add(key)
        elif row["consumer"]:
            items += found
        else:
            redecoded[row["key"]] = found
    return Taken(items, redecoded, unhandleable, keys)


def _read(handlers: Handlers, row: asyncpg.Record, *, validates: bool) -> Sequence[Item] | Row:
    """Decode the row as the service does now, for its consumer, or for all if it has none.

    A row without a consumer could not be decoded before. Returns a row to store if no handler takes
    the message.
    """
    record = stored_record(row, stored_for=row["stored_for"])
    consumer = row["consumer"]
    hash = row["hash"] if row["hash_version"] == HASH_VERSION else None
    found = items_of(handlers, record, validates=False, hash=hash)
    if isinstance(found, Undecoded):
        decision = dead(Policy(), found.reason, found.error, attempts=row["attempts"])
        return Row(row["key"], consumer, record, decision)
    if not consumer and found:
        return [item._replace(was_young=True) for item in found]
    for item in found:
        if item.consumer == consumer:
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
    name = consumer or "the service"
    error = NoHandler(f"{name} has no handler for {row['type'] or 'this'!r} of {record.topic}")
    if not consumer:
        return Row(row["key"], consumer, record, dead(Policy(), "no handler", error))
    # During a deployment a process of another version may have a handler.
    decision = Policy().after_failure(
        error, attempts=row["attempts"], waited=row["waited"], reason="no handler"
    )
    if row["reason"] == UNKNOWN:  # the outcome of its call is still unknown
        decision = replace(decision, reason=UNKNOWN)
    return Row(row["key"], consumer, record, decision)


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
    keys_with_progress: Collection[bytes],
) -> None:
    """Delete the rows `done` and update the rows `changed`, by their keys, then schedule heads.

    `keys` are the order keys of all rows read; for `keys_with_progress` see `schedule_heads`.
    """
    if done:
        await connection.execute(_DELETE, list(done))
    if changed:
        await connection.execute(
            _SET,
            [row.key for row in changed],
            [row.decision.reason for row in changed],
            [row.decision.attempts for row in changed],
            [row.decision.waited for row in changed],
            [row.decision.due_in for row in changed],
            [row.decision.holds for row in changed],
            [row.decision.error for row in changed],
            [row.decision.traceback for row in changed],
            [row.remembered for row in changed],
            [row.first_trace for row in changed],
        )
    await schedule_heads(connection, [lane.number], keys, keys_with_progress)


async def count(connection: asyncpg.Connection) -> list[tuple[str, int, int, float]]:
    """Return per consumer: waiting messages, dead letters, seconds since the oldest was stored."""
    return [tuple(row) for row in await connection.fetch(_COUNT)]


async def schedule_heads(
    connection: asyncpg.Connection,
    lanes: Collection[int],
    keys: Collection[bytes],
    keys_with_progress: Collection[bytes] = (),
) -> None:
    """Make the first row of each order key the only one that is due. Lock the lanes before.

    If the first row waits for an earlier message of its sequence, it becomes due only if its key is
    among `keys_with_progress`, those of which a row is done: that may have been the message.
    """
    await connection.execute(
        _ONLY_HEADS_ARE_DUE, list(keys), list(lanes), _DEMOTED, GAP, list(keys_with_progress)
    )
