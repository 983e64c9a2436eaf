"""Lanes of the backlog and their rows: the statements of workers, and of commands on dead rows."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import NamedTuple

import asyncpg

from pipeline.apply.backlog import Row
from pipeline.apply.positions import Generations, SourceLost
from pipeline.errors import StoreUnavailable
from pipeline.handlers.policy import DIED, GAP, REDRIVEN
from pipeline.handlers.sessions import GUARD_COMMIT
from pipeline.schema import FIRST_LANE_OF_CALLS
from pipeline.servers.cluster import IS_OURS
from pipeline.servers.database import lease_ended

_FIRST = 100
"""Rows of each lane and consumer that are due and that `waiting` reads in any case."""
_DEMOTED = 10_000
"""Rows of a key whose `due_at` one statement clears at most, so that it does not take long."""


class LaneLost(SourceLost):
    """The lane's lease has ended: another worker has claimed the lane, or a command fenced it."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Lanes that a worker has claimed together."""

    lanes: Sequence[int]
    tokens: Sequence[int]
    """Of each lane."""
    starts: int
    """Workers that have claimed a lane and not released it, this one included: more than one only
    if there is a single lane."""
    ended_at: datetime
    """When the lease before has ended: its worker can't have read a row that was stored later."""
    seconds: float
    """Time for which the lease is extended before each transaction."""
    unavailable: dict[str, StoreUnavailable] = field(default_factory=dict)
    """Topics whose rows could not be decoded since, because a schema registry is unavailable."""

    def of(self, lanes: Collection[int]) -> "Lease":
        """Return the lease of these of its lanes alone."""
        kept = [one for one in zip(self.lanes, self.tokens, strict=True) if one[0] in lanes]
        return replace(self, lanes=[lane for lane, _ in kept], tokens=[token for _, token in kept])


# Claimed by a statement whose answer was lost: the start is counted already, and no process has
# died.
_UNANSWERED = "COALESCE(owner = ANY ($4::text[]), false)"

# A lane whose worker has died is claimed by itself; it has read no row that was stored after its
# lease. Written so that the planner, whatever its statistics are, looks up one row of each lane and
# consumer in the index: rows of a consumer that the breaker pauses are not looked at. With EXISTS
# it would join the lanes with everything that is due, or scan the table.
_CLAIM = f"""
WITH free AS MATERIALIZED (
       SELECT lane, starts + 1 - {_UNANSWERED}::integer AS starts,
              LEAST(COALESCE(lease_until, clock_timestamp()), clock_timestamp()) AS ended_at
         FROM pipeline.backlog_lane l
        WHERE (lease_until IS NULL OR {lease_ended("$2")} OR {_UNANSWERED})
          AND {IS_OURS}
          AND (SELECT true FROM unnest($3::text[]) AS of (consumer) CROSS JOIN LATERAL (
                      SELECT FROM pipeline.backlog b
                       WHERE b.lane = l.lane AND b.consumer = of.consumer
                         AND due_at <= statement_timestamp()
                       ORDER BY due_at LIMIT 1) AS due
                LIMIT 1)
        ORDER BY released_at LIMIT $5
          FOR UPDATE SKIP LOCKED
), chosen AS (
       SELECT * FROM free ORDER BY starts DESC
        LIMIT CASE WHEN (SELECT max(starts) FROM free) > 1 THEN 1 ELSE $5 END
)
UPDATE pipeline.backlog_lane AS l
   SET owner = $1, token = l.token + 1, starts = chosen.starts,
       lease_until = clock_timestamp() + make_interval(secs => $2)
  FROM chosen WHERE l.lane = chosen.lane
RETURNING l.lane, l.token, l.starts, chosen.ended_at
"""

_LOCKED = """
    SELECT lane FROM pipeline.backlog_lane
      JOIN unnest($1::integer[], $2::bigint[]) AS own (lane, token) USING (lane, token)
     WHERE owner IS NOT NULL
     ORDER BY lane
       FOR NO KEY UPDATE OF backlog_lane
"""

# No row of a lane is updated, whose trigger would reject a handler's COMMIT.
_HOLD = f"""
WITH guarded AS ({GUARD_COMMIT}), locked AS MATERIALIZED ({_LOCKED})
SELECT current, oldest, since, (SELECT array_agg(lane) FROM locked) FROM pipeline.inbox_generation
"""

# Not in the transaction that it is for: a rollback would undo it.
_EXTEND = f"""
WITH locked AS MATERIALIZED ({_LOCKED})
UPDATE pipeline.backlog_lane SET lease_until = clock_timestamp() + make_interval(secs => $3)
 WHERE lane IN (SELECT lane FROM locked)
RETURNING lane
"""

_EXTEND_UNLOCKED = _EXTEND.replace("OF backlog_lane", "OF backlog_lane SKIP LOCKED")

# A row that was decided has no marker, as one that was not tried.
_OVERTAKEN = """
SELECT read.order_key
  FROM unnest($1::bytea[], $2::bytea[], $3::integer[], $4::float[])
       AS read (order_key, key, attempts, waited)
  LEFT JOIN LATERAL (
       SELECT key, attempts, waited, due_at FROM pipeline.backlog b
        WHERE b.order_key = read.order_key AND (b.died_at IS NULL OR b.holds)
        ORDER BY sequence, partition, "offset" LIMIT 1) AS head ON true
 WHERE (head.key, head.attempts, head.waited)
       IS DISTINCT FROM (read.key, read.attempts, read.waited)
    OR COALESCE(head.due_at > clock_timestamp(), true)
"""

_RELEASE = f"""
WITH locked AS MATERIALIZED ({_LOCKED})
UPDATE pipeline.backlog_lane
   SET owner = NULL, lease_until = NULL, released_at = clock_timestamp(),
       starts = CASE WHEN $3 THEN 0 ELSE starts - 1 END
 WHERE lane IN (SELECT lane FROM locked)
"""

_DELETE = "DELETE FROM pipeline.backlog WHERE key = ANY ($1)"

# Not a pause that was prolonged since it was read.
_END_PAUSES = "DELETE FROM pipeline.backlog WHERE key = ANY ($1) AND due_at <= clock_timestamp()"

_SET = """
UPDATE pipeline.backlog AS b
   SET reason = new.reason, attempts = new.attempts, waited = new.waited, deaths = new.deaths,
       losses = new.losses, is_redriven = new.is_redriven, holds = new.holds,
       error = new.error, traceback = new.traceback,
       remembered_hash = new.remembered_hash,
       traceparent = COALESCE(new.traceparent, b.traceparent),
       due_at = clock_timestamp() + make_interval(secs => new.due_in),
       died_at = CASE WHEN new.due_in IS NULL THEN clock_timestamp() END
  FROM unnest($1::bytea[], $2::text[], $3::integer[], $4::float[], $5::integer[], $6::integer[],
              $7::boolean[], $8::float[], $9::boolean[], $10::text[], $11::text[], $12::bytea[],
              $13::text[])
       AS new (key, reason, attempts, waited, deaths, losses, is_redriven, due_in, holds, error,
               traceback, remembered_hash, traceparent)
 WHERE b.key = new.key
"""


# A row waits only behind a head that is locked: who ends that head, in another lane, then sees that
# the row waits. Behind a head that another transaction is ending rows stay due. They are demoted
# before heads are updated, as a row that the statement has updated itself can't be locked.
#
# Whatever the planner's statistics are, due rows are found by their key: OFFSET keeps what it could
# read the lane's due rows by out of the inner query. The last WHERE compares head.died_at: with
# b.died_at the planner could search for the head among all rows that wait.
_ONLY_HEADS_ARE_DUE = """
WITH head AS MATERIALIZED (
    SELECT wanted.key AS order_key, b.key, b.died_at
      FROM unnest($1::bytea[]) AS wanted (key) CROSS JOIN LATERAL (
           SELECT key, died_at FROM pipeline.backlog b
            WHERE b.order_key = wanted.key AND (b.died_at IS NULL OR b.holds)
            ORDER BY sequence, partition, "offset" LIMIT 1) AS b
), behind AS MATERIALIZED (
    SELECT b.key, head.key AS head_key FROM head CROSS JOIN LATERAL (
           SELECT key, lane FROM pipeline.backlog b
            WHERE b.order_key = head.order_key AND b.due_at <= statement_timestamp()
              AND b.key <> head.key
           OFFSET 0) AS b
     WHERE b.lane = ANY ($2) LIMIT $3
), locked AS MATERIALIZED (
    SELECT key, died_at, holds FROM pipeline.backlog
     WHERE key IN (SELECT head_key FROM behind)
       FOR SHARE SKIP LOCKED
), demoted AS (
    UPDATE pipeline.backlog SET due_at = NULL
     WHERE key IN (SELECT behind.key FROM behind JOIN locked ON locked.key = behind.head_key
                    WHERE locked.died_at IS NULL OR locked.holds)
    RETURNING key
)
UPDATE pipeline.backlog AS b SET due_at = clock_timestamp()
  FROM head
 WHERE b.key = head.key AND head.died_at IS NULL
   AND (b.due_at IS NULL OR b.reason = $4 AND b.order_key = ANY ($5))
   AND (SELECT count(*) FROM demoted) IS NOT NULL
"""


_FENCE = """
UPDATE pipeline.backlog_lane
   SET token = token + 1, owner = NULL, lease_until = NULL,
       starts = starts - CASE WHEN lease_until > clock_timestamp() THEN 1 ELSE 0 END
 WHERE lane = $1
"""


_LOCK_ONLY = "SELECT FROM pipeline.backlog_lane WHERE lane = $1 FOR NO KEY UPDATE"


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


# Reads so many rows that wait, so many dead ones, and the first rows of each lane and consumer that
# are or become due, however many others there are. Each is looked up by a range of an index: with
# ORDER BY alone the planner, if its statistics are old, could sort the whole table. The lanes of
# calls have workers of their own: one that holds or has just released a lane serves all.
_WAITING = """
WITH RECURSIVE of_lane AS MATERIALIZED (
    SELECT lane, lane >= $2 AS has_calls,
           max(GREATEST(lease_until, released_at)) OVER (PARTITION BY lane >= $2)
           > clock_timestamp() - $3::interval AS is_served
      FROM pipeline.backlog_lane
), part AS (
    SELECT of_lane.*, (SELECT consumer FROM pipeline.backlog b
                        WHERE b.lane = of_lane.lane AND due_at IS NOT NULL
                        ORDER BY consumer LIMIT 1) AS consumer
      FROM of_lane
    UNION ALL
    SELECT lane, has_calls, is_served,
           (SELECT b.consumer FROM pipeline.backlog b
             WHERE b.lane = part.lane AND b.consumer > part.consumer AND due_at IS NOT NULL
             ORDER BY b.consumer LIMIT 1)
      FROM part WHERE consumer IS NOT NULL
), due AS (
    SELECT part.consumer, has_calls, topic, count(*) AS waiting, min(received_at) AS first_at,
           min(due_at) FILTER (WHERE NOT is_served) AS unserved_since
      FROM part CROSS JOIN LATERAL (
           SELECT topic, received_at, due_at FROM pipeline.backlog b
            WHERE b.lane = part.lane AND b.consumer = part.consumer AND due_at IS NOT NULL
            ORDER BY due_at LIMIT $4) AS first
     GROUP BY part.consumer, has_calls, topic
), few AS (
    (SELECT b.* FROM generate_series(0, 255) AS slice CROSS JOIN LATERAL (
            SELECT consumer, lane, topic, received_at, attempts, false AS is_dead
              FROM pipeline.backlog
             WHERE died_at IS NULL
               AND order_key >= CASE slice WHEN 0 THEN '' ELSE set_byte('\\x00', 0, slice) END
               AND order_key <= set_byte(decode(repeat('ff', 64), 'hex'), 0, slice)
             ORDER BY order_key LIMIT $1) AS b
      LIMIT $1)
    UNION ALL
    (SELECT d.* FROM of_lane CROSS JOIN LATERAL (
            SELECT consumer, lane, topic, received_at, attempts, true AS is_dead
              FROM pipeline.backlog b
             WHERE b.lane = of_lane.lane AND died_at IS NOT NULL AND discarded_at IS NULL
             ORDER BY order_key LIMIT $1) AS d
      LIMIT $1)
), counted AS (
    SELECT consumer, lane >= $2 AS has_calls, topic,
           count(*) FILTER (WHERE NOT is_dead) AS waiting,
           count(*) FILTER (WHERE is_dead) AS dead,
           count(*) FILTER (WHERE NOT is_dead AND attempts > 0) AS failing,
           min(received_at) FILTER (WHERE NOT is_dead) AS first_at
      FROM few GROUP BY consumer, lane >= $2, topic
), by_topic AS (
    SELECT consumer, has_calls, topic, GREATEST(counted.waiting, due.waiting) AS waiting,
           COALESCE(dead, 0) AS dead, COALESCE(failing, 0) AS failing,
           GREATEST(extract(epoch FROM clock_timestamp()
                            - LEAST(counted.first_at, due.first_at)), 0)::float AS oldest,
           GREATEST(extract(epoch FROM clock_timestamp() - unserved_since), 0)::float AS unserved
      FROM counted FULL JOIN due USING (consumer, has_calls, topic)
)
SELECT consumer, has_calls, sum(waiting)::bigint, sum(dead)::bigint, sum(failing)::bigint,
       max(oldest), max(unserved), array_agg(topic), array_agg(oldest)
  FROM by_topic GROUP BY consumer, has_calls
"""


class Waiting(NamedTuple):
    """What the backlog holds for a consumer in the lanes of messages, or in those of calls."""

    consumer: str
    """Empty for records that no handler has seen."""
    has_calls: bool
    waiting: int
    dead: int
    failing: int
    """Those waiting that have failed before."""
    oldest: float
    """Seconds since the first of those waiting was received."""
    unserved: float
    """Seconds for which the first is due, 0 if a worker has held a lane of its kind since."""
    oldest_by_topic: dict[str, float]
    """`oldest` by topic; 0 if only dead messages of it were counted."""


async def claim(
    connection: asyncpg.Connection,
    owner: str,
    lease: float,
    consumers: Collection[str],
    unanswered: Collection[str] = (),
    most: int = 1,
) -> Lease | None:
    """Claim at most so many lanes with rows due for these consumers; None if none has.

    Those that were released first. `unanswered` are owners of earlier claims of the process whose
    answers were lost: their lanes are claimed at once, without a start. The lane of a worker that
    died can be claimed when its lease, in seconds, has run out.
    """
    rows = await connection.fetch(_CLAIM, owner, lease, list(consumers), list(unanswered), most)
    if not rows:
        return None
    numbers, tokens, starts, ended = map(list, zip(*rows, strict=True))
    return Lease(numbers, tokens, starts[0], ended[0], lease)


async def hold(connection: asyncpg.Connection, lease: Lease) -> Generations:
    """Lock the lanes to the end of the transaction. Raises `LaneLost`."""
    *generations, held = await connection.fetchrow(_HOLD, lease.lanes, lease.tokens)
    _require(lease, held or ())
    return Generations(*generations)


async def extend(connection: asyncpg.Connection, lease: Lease) -> None:
    """Extend the lease. Raises `LaneLost`, or `TimeoutError` if that takes as long as it lasts."""
    async with asyncio.timeout(lease.seconds):
        rows = await connection.fetch(_EXTEND, lease.lanes, lease.tokens, lease.seconds)
    _require(lease, [row["lane"] for row in rows])


async def extend_unlocked(connection: asyncpg.Connection, lease: Lease) -> None:
    """Extend the lease of those of the lanes that no transaction has locked."""
    await connection.execute(_EXTEND_UNLOCKED, lease.lanes, lease.tokens, lease.seconds)


def _require(lease: Lease, held: Collection[int]) -> None:
    if lost := {*lease.lanes}.difference(held):
        raise LaneLost("; ".join(f"backlog lane {lane} was taken over" for lane in sorted(lost)))


async def overtaken(
    connection: asyncpg.Connection, heads: Mapping[bytes, tuple[bytes, int, float]]
) -> Collection[bytes]:
    """Return the order keys whose first row is not as it was read, or not due any more.

    `heads` are, by order key, the key of the row, and its attempts and the time waited then.
    """
    rows = [(key, *head) for key, head in heads.items()]
    found = await connection.fetch(_OVERTAKEN, *map(list, zip(*rows, strict=True)))
    return {row["order_key"] for row in found}


async def release(connection: asyncpg.Connection, lease: Lease, *, forgets_deaths: bool) -> None:
    """Release the lanes on a clean end: the worker's start does not count any more.

    `forgets_deaths`: nor do the starts of earlier workers. It can be repeated.
    """
    await connection.execute(_RELEASE, lease.lanes, lease.tokens, forgets_deaths)


async def end_pauses(connection: asyncpg.Connection, keys: Collection[bytes]) -> None:
    """Delete the rows at the heads of keys whose pause is over. Call `settle` after."""
    await connection.execute(_END_PAUSES, list(keys))


async def delete(connection: asyncpg.Connection, keys: Collection[bytes]) -> None:
    """Delete rows by their keys. Lock their lanes before, and call `settle` after."""
    if keys:
        await connection.execute(_DELETE, list(keys))


async def settle(
    connection: asyncpg.Connection,
    lease: Lease,
    *,
    done: Collection[bytes],
    changed: Sequence[Row],
    keys: Collection[bytes],
    keys_with_progress: Collection[bytes],
) -> None:
    """Delete the rows `done` and update the rows `changed`, by their keys, then schedule heads.

    `keys` are the order keys of all rows read; for `keys_with_progress` see `schedule_heads`.
    """
    await delete(connection, done)
    if changed:
        await connection.execute(
            _SET,
            [row.key for row in changed],
            [row.decision.reason for row in changed],
            *map(list, zip(*(row.decision.history for row in changed), strict=True)),
            [row.decision.due_in for row in changed],
            [row.decision.holds for row in changed],
            [row.decision.error for row in changed],
            [row.decision.traceback for row in changed],
            [row.remembered for row in changed],
            [row.first_trace for row in changed],
        )
    await schedule_heads(connection, lease.lanes, keys, keys_with_progress)


async def waiting(connection: asyncpg.Connection, most: int, idle: float) -> list[Waiting]:
    """Return what waits and what is dead, counted among so many rows of each.

    If there are more, those of the first keys count, by their hashes, which is a fair sample, and
    the first due ones of each consumer and lane: only a topic without any of these is missing.
    `unserved` looks `idle` seconds back.
    """
    limit = timedelta(seconds=idle)
    rows = await connection.fetch(_WAITING, most, FIRST_LANE_OF_CALLS, limit, _FIRST)
    return [
        Waiting._make((*numbers, dict(zip(topics, ages, strict=True))))
        for *numbers, topics, ages in rows
    ]


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


async def fence_lane(connection: asyncpg.Connection, lane: int) -> None:
    """Lock the lane to the end of the transaction, to change its dead rows.

    Waits for the transaction of the worker that holds the lane, whose later transactions raise
    `LaneLost`. That worker has not died, so its start is not left over in the lane's count. A
    worker of calls keeps the lane: it has to store how its calls end, and has read no dead row.
    """
    await connection.execute(_LOCK_ONLY if lane >= FIRST_LANE_OF_CALLS else _FENCE, lane)


async def redrive(connection: asyncpg.Connection, keys: Sequence[bytes]) -> None:
    """Make dead rows wait to be tried again, with a new budget of attempts.

    Call `fence_lane` before, and `schedule_heads` after.
    """
    await connection.execute(_REDRIVE, keys, DIED, REDRIVEN)


async def discard(
    connection: asyncpg.Connection, keys: Sequence[bytes], *, operator: str, why: str
) -> None:
    """Close dead rows. They are kept for a while, so that their message is recognised if it comes
    again. Call `fence_lane` before.
    """
    await connection.execute(_DISCARD, keys, operator, why)
