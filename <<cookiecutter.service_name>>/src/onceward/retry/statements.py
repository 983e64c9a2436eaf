"""SQL of the backlog's workers: lanes and their rows.

Parameters are described where a statement is executed. A worker changes rows of lanes that its
transaction has locked; rows are added by `ADD_TO_BACKLOG` of the room `apply`, without a lock of
their lane. `backlog_lane` has a row for each lane, less than a hundred, and is mostly scanned.
"""

from onceward.handlers.policy import DIED, LOST, REDRIVEN
from onceward.handlers.statements import GUARD_COMMIT
from onceward.servers.database import lease_ended
from onceward.servers.statements import IS_OURS

_UNANSWERED = "COALESCE(owner = ANY ($4::text[]), false)"
"""Claimed by a statement whose answer was lost: the start is counted already, and no process has
died."""

CLAIM_LANES = f"""
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
"""Claim lanes whose lease has ended and that have rows due for these consumers.

A lane whose worker has died is claimed by itself; it has read no row that was stored after its
lease. Written so that the planner, whatever its statistics are, looks up one row of each lane and
consumer in the index: rows of a consumer that the breaker pauses are not looked at. With EXISTS it
would join the lanes with everything that is due, or scan the table.

Locks: the lanes that may be claimed, at most `$5`, until the statement ends; those that others have
locked are left out.
Plan: a scan of `backlog_lane`; `backlog_due_idx`, one entry for each lane and consumer.
"""

_LOCKED = """
    SELECT lane FROM pipeline.backlog_lane
      JOIN unnest($1::integer[], $2::bigint[]) AS own (lane, token) USING (lane, token)
     WHERE owner IS NOT NULL
     ORDER BY lane
       FOR NO KEY UPDATE OF backlog_lane
"""
"""The lanes that are still held by these tokens, locked in their order."""

HOLD_LANES = f"""
WITH guarded AS ({GUARD_COMMIT}), locked AS MATERIALIZED ({_LOCKED})
SELECT current, oldest, since, (SELECT array_agg(lane) FROM locked) FROM pipeline.inbox_generation
"""
"""Lock lanes, and read the generations of the inbox.

The lanes that are still held are returned. As no row of a lane is updated, whose trigger would
reject a handler's COMMIT, a row of its own makes the database reject it.

Locks: the lanes, until the transaction ends, in their order.
Plan: `backlog_lane_pkey`, or a scan. `inbox_generation` has one row.
"""

EXTEND_LEASES = f"""
WITH locked AS MATERIALIZED ({_LOCKED})
UPDATE pipeline.backlog_lane SET lease_until = clock_timestamp() + make_interval(secs => $3)
 WHERE lane IN (SELECT lane FROM locked)
RETURNING lane
"""
"""Extend the lease of lanes, and return those that are still held.

Not in the transaction that it is for: a rollback would undo it.

Locks: the lanes, in their order, until the statement ends.
Plan: `backlog_lane_pkey`, or a scan.
"""

EXTEND_UNLOCKED_LEASES = EXTEND_LEASES.replace("OF backlog_lane", "OF backlog_lane SKIP LOCKED")
"""Extend the lease of lanes that no transaction has locked.

Locks: these lanes, until the statement ends; those that others have locked are left out.
Plan: as `EXTEND_LEASES`.
"""

RELEASE_LANES = f"""
WITH locked AS MATERIALIZED ({_LOCKED})
UPDATE pipeline.backlog_lane
   SET owner = NULL, lease_until = NULL, released_at = clock_timestamp(),
       starts = CASE WHEN $3 THEN 0 ELSE starts - 1 END
 WHERE lane IN (SELECT lane FROM locked)
"""
"""Release lanes after a regular end of their worker.

Locks: the lanes, in their order, until the statement ends.
Plan: `backlog_lane_pkey`, or a scan.
"""

READ_DUE_ROWS = f"""
WITH due AS MATERIALIZED (
    SELECT order_key, min(due_at) AS due_at, max(attempts) AS attempts
      FROM (SELECT due.* FROM unnest($1::integer[]) AS its (lane)
             CROSS JOIN unnest($2::text[]) AS of (consumer) CROSS JOIN LATERAL (
                   SELECT order_key, due_at, attempts FROM pipeline.backlog b
                    WHERE b.lane = its.lane AND b.consumer = of.consumer
                      AND due_at <= statement_timestamp()
                      AND COALESCE((received_at <= $5 OR received_at > statement_timestamp())
                                   AND topic <> ALL ($6), true)
                    ORDER BY due_at LIMIT $3) AS due
             ORDER BY due_at LIMIT $3) AS first
     GROUP BY order_key
)
SELECT key, lane, order_key, consumer, topic, partition, "offset", timestamp, record_key, value,
       headers, source, type, hash, hash_version, traceparent, reason, error,
       attempts, waited, GREATEST(deaths, (reason = '{DIED}')::integer) AS deaths,
       GREATEST(losses, (reason = '{LOST}')::integer) AS losses,
       is_redriven OR reason = '{REDRIVEN}' AS is_redriven,
       date_part('epoch', clock_timestamp() - received_at) AS stored_for,
       COALESCE(due_at > clock_timestamp(), died_at IS NOT NULL)
       OR consumer <> ALL ($2) AS must_wait
  FROM (SELECT due.due_at AS key_due_at, b.*,
               sum(octet_length(value)) OVER (
                   ORDER BY due.due_at, b.order_key, sequence, partition, "offset"
                   ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before
          FROM due CROSS JOIN LATERAL (
               SELECT * FROM pipeline.backlog b
                WHERE b.order_key = due.order_key AND (b.died_at IS NULL OR b.holds)
                ORDER BY sequence, partition, "offset"
                LIMIT CASE WHEN due.attempts > 1 THEN 1  -- it may well fail again
                           ELSE GREATEST(1, $3 / (SELECT count(*) FROM due)) END) AS b) AS run
 WHERE bytes_before < $4 OR bytes_before IS NULL
 ORDER BY key_due_at, order_key, sequence, partition, "offset"
"""
"""Return the rows of the keys that are due longest, in the order of each key.

At most `$3` rows, and `$4` bytes and one row.

A row that seems to be stored in the future was stored before the clock was set back. The reason
completes the history of a row that a consume transaction has added, a command has redriven, or a
process of version 1.0.0 has changed. A key may have rows of two consumers, a correction and that
which it corrects: rows of consumers that are not asked for wait.

Locks: none.
Plan: `backlog_due_idx` for each lane and consumer, `backlog_order_idx` for each key. Due rows of
topics in `$6`, or stored after `$5`, are read and left out: all before `$3` others.
"""

FIND_OVERTAKEN_KEYS = """
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
"""Return the keys whose first row is not as it was read, or not due any more.

A row that was decided has no marker, as one that was not tried.

Locks: none.
Plan: `backlog_order_idx`, one row of each key.
"""

DELETE_ROWS = "DELETE FROM pipeline.backlog WHERE key = ANY ($1)"
"""Delete rows that are settled.

Locks: the rows, in lanes that are locked.
Plan: `backlog_pkey`, for each row.
"""

DELETE_ENDED_PAUSES = (
    "DELETE FROM pipeline.backlog WHERE key = ANY ($1) AND due_at <= clock_timestamp()"
)
"""Delete the rows behind which keys have waited while they were paused.

Not a pause that was prolonged since it was read.

Locks: the rows, in lanes that are locked. It waits for a person who prolongs or ends one.
Plan: `backlog_pkey`, for each row.
"""

UPDATE_FAILED_ROWS = """
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
"""Store the decisions on rows that stay.

Locks: the rows, in lanes that are locked.
Plan: `backlog_pkey`, for each row.
"""

SCHEDULE_HEADS = """
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
"""Make the first row of each key the only one that is due.

A row waits only behind a head that is locked: who ends that head, in another lane, then sees that
the row waits. Behind a head that another transaction is ending rows stay due. They are demoted
before heads are updated, as a row that the statement has updated itself can't be locked.

Whatever the planner's statistics are, due rows are found by their key: OFFSET keeps what it could
read the lane's due rows by out of the inner query. The last WHERE compares head.died_at: with
b.died_at the planner could search for the head among all rows that wait.

Locks: heads with due rows behind them, for share; those that others have locked are left out. The
rows that become due, or not due, in lanes that are locked. A head may be in another lane, if the
mode of its handler has changed: then it waits for who changes that row.
Plan: `backlog_order_idx` for each head, `backlog_due_key_idx` for the due rows of its key, at most
`$3` of all, `backlog_pkey` for what is updated.
"""
