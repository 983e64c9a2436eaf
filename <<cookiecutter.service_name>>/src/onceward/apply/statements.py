"""SQL of the consume transaction: the inbox, positions, the backlog, turns, pauses and throttles.

Parameters are described where a statement is executed. What people pause is in the statements of
the room `operators`. `service sql` prints all statements with the text below each.
"""

from sqlalchemy.ext.asyncio import AsyncConnection

from onceward.handlers.policy import DEFERRED, FOLLOWER
from onceward.settings import Settings

GENERATION_LOCK = 0x1B0C5
"""Advisory lock: shared by every consume transaction, exclusive while a generation is closed."""
KEPT = """generation = ANY (ARRAY(
           SELECT generate_series(oldest, current) FROM pipeline.inbox_generation))"""
"""The condition of markers that are kept, in SQL."""
_TRANSACTION_TIMEOUT_SINCE = (17,)
"""Version of PostgreSQL."""
PAUSES = "(paused)"
"""Stands for the topic of rows for which a key waits; no topic has such a name."""
LATE_SECONDS = 1.0
"""What was not taken for so long may be taken later, so that a loop that looks now and then reaches
the rate."""
_KEYS = 1_000
"""Paused keys that are looked at: they are only told, as no loop needs to know of them."""

SHARE_GENERATIONS = f"SELECT pg_advisory_xact_lock_shared({GENERATION_LOCK})"
"""Keep generations from being closed until the transaction ends.

The lock is granted after its statement's snapshot was taken, so what the lock protects must be read
by a later statement. It is sent with BEGIN, behind the limits of time (`set_limits`).

Locks: the advisory lock, shared, until the transaction ends. It waits for a transaction that closes
a generation, and behind one that waits to do so.
Plan: reads no table.
"""

REGISTER_CONSUMERS = """
WITH named AS (
    INSERT INTO pipeline.release (name) SELECT $2::text WHERE $2::text <> ''
        ON CONFLICT DO NOTHING
)
INSERT INTO pipeline.inbox_consumer (consumer, generation)
SELECT new.consumer, current
  FROM unnest($1::text[]) AS new (consumer), pipeline.inbox_generation
    ON CONFLICT DO NOTHING
"""
"""Store the generation in which each consumer begins, and the release that runs them.

Locks: the new rows. A name that another process is inserting is waited for; names are sorted.
Plan: `inbox_consumer_pkey` and `release_pkey` find what is stored already.
"""

FIND_CONSUMERS_SINCE = """
SELECT consumer FROM pipeline.inbox_consumer WHERE consumer = ANY ($1) AND generation >= $2
"""
"""Return those of the consumers that have begun in this generation or a later one.

Locks: none.
Plan: `inbox_consumer_pkey`, or a scan of the table, which has a row for each consumer.
"""

FIND_MARKERS_IN_CLOSED_GENERATIONS = """
SELECT key, hash, hash_version
  FROM pipeline.inbox
 WHERE generation >= $1 AND generation < $2 AND key = ANY ($3)
"""
"""Return the markers with these keys in generations that take no new ones.

Locks: none.
Plan: `inbox_pkey` of each closed generation that is kept, for each key. Partitions of others are
pruned, with a generic plan when it is executed.
"""

INSERT_MARKERS = """
INSERT INTO pipeline.inbox
       (generation, key, hash, hash_version, consumer, source, id, type,
        topic, partition, "offset", traceparent, record_key)
SELECT $1, key, hash, $2, consumer, source, id, type, topic, partition, "offset", traceparent,
       record_key
  FROM unnest($3::pipeline.new_inbox_row[])
    ON CONFLICT DO NOTHING
RETURNING key
"""
"""Insert markers; returns the keys of those that are new.

An array of rows, not one of each column: asyncpg encodes each element of an array by itself, and a
row at once.

Locks: the new rows. A key that another transaction has inserted is waited for until that one ends;
keys are sorted, so that two transactions do not deadlock.
Plan: `inbox_pkey` of the current generation finds the keys that exist.
"""

FIND_MARKERS_IN_CURRENT_GENERATION = """
SELECT key, hash, hash_version
  FROM pipeline.inbox
 WHERE generation = $1 AND key = ANY ($2)
"""
"""Return the markers with keys that `INSERT_MARKERS` has found to exist.

Locks: none.
Plan: `inbox_pkey` of the current generation, for each key.
"""

STORE_RESULTS = """
UPDATE pipeline.inbox AS marker
   SET result = returned.result::json
  FROM unnest($2::bytea[], $3::text[]) AS returned (key, result)
 WHERE marker.generation = $1 AND marker.key = returned.key
"""
"""Store what handlers have returned in the markers that this transaction has inserted.

Locks: the markers, which no other transaction can see yet.
Plan: `inbox_pkey` of the current generation, for each key.
"""

DELETE_MARKERS = "DELETE FROM pipeline.inbox WHERE generation = $1 AND key = ANY ($2)"
"""Delete markers that this transaction has inserted.

Locks: the markers, which no other transaction can see yet.
Plan: `inbox_pkey` of the current generation, for each key.
"""

MOVE_POSITIONS = """
WITH moved AS (
    UPDATE pipeline.position AS position
       SET next_offset = move.next_offset,
           anchor_offset = COALESCE(move.anchor_offset, position.anchor_offset),
           anchor_time = COALESCE(move.anchor_time, position.anchor_time),
           anchor_hash = COALESCE(move.anchor_hash, position.anchor_hash),
           starts = 0,
           moved_at = clock_timestamp()
      FROM unnest($2::text[], $3::int[], $4::bigint[], $5::bigint[], $6::bigint[],
                  $7::timestamptz[], $8::bytea[])
           AS move (topic, partition, fetched_from, next_offset, anchor_offset, anchor_time,
                    anchor_hash)
     WHERE position.consumer_group = $1
       AND position.topic = move.topic
       AND position.partition = move.partition
       AND position.next_offset = move.fetched_from
    RETURNING 1
)
SELECT current, oldest, since, moved.number
  FROM (SELECT count(*) AS number FROM moved) AS moved, pipeline.inbox_generation
"""
"""Move positions over their batches, and read the generations of the inbox.

A position is moved only from where its batch was fetched: the number of those that were moved is
returned.

Locks: the positions, until the transaction ends. They are sorted, so that two processes with the
same partitions do not deadlock. Where the plan scans the table, the order is the table's: a
deadlock is then possible for as long as both believe that they have the partitions.
Plan: `position_pkey`, for each partition, or a scan if there are few. No index has a column that is
set, so that updates are HOT. `inbox_generation` has one row.
"""

COUNT_DUPLICATES = """
UPDATE pipeline.position AS position
   SET duplicates = duplicates + found.number
  FROM unnest($2::text[], $3::int[], $4::bigint[]) AS found (topic, partition, number)
 WHERE position.consumer_group = $1
   AND position.topic = found.topic
   AND position.partition = found.partition
"""
"""Add to the counts of duplicates.

Locks: the positions, which `MOVE_POSITIONS` has locked before.
Plan: `position_pkey`, for each partition, or a scan.
"""

COUNT_START = """
UPDATE pipeline.position SET starts = starts + 1
 WHERE consumer_group = $1 AND topic = $2 AND partition = $3 AND next_offset = $4
RETURNING starts
"""
"""Count a process that begins at this position; returns how many have not ended regularly.

Locks: the position.
Plan: `position_pkey`, or a scan.
"""

FORGIVE_START = """
UPDATE pipeline.position SET starts = GREATEST(starts - 1, 0)
 WHERE consumer_group = $1 AND topic = $2 AND partition = $3 AND next_offset = $4
"""
"""Undo `COUNT_START` after a regular end, unless the position has moved.

Locks: the position.
Plan: `position_pkey`.
"""

READ_POSITION = """
SELECT next_offset, anchor_offset, anchor_time, anchor_hash
  FROM pipeline.position
 WHERE consumer_group = $1 AND topic = $2 AND partition = $3
"""
"""Return the position of a partition and its anchor.

Locks: none.
Plan: `position_pkey`, or a scan.
"""

INSERT_POSITION = """
INSERT INTO pipeline.position (consumer_group, topic, partition, next_offset)
VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING
"""
"""Store the first position of a partition; one that is stored already stays.

Locks: the new row.
Plan: `position_pkey` finds a row that exists.
"""

FIND_IN_BACKLOG = """
SELECT b.key, NULL::bytea AS order_key, b.hash, b.hash_version
  FROM pipeline.backlog b WHERE b.key = ANY ($1)
UNION ALL
SELECT NULL, wanted.key, NULL, NULL
  FROM unnest($2::bytea[]) AS wanted (key)
 WHERE EXISTS (SELECT FROM pipeline.backlog b
                WHERE b.order_key = wanted.key AND (b.died_at IS NULL OR b.holds))
"""
"""Return which messages have rows, by marker key, and which order keys have rows that wait.

It follows `INSERT_MARKERS`, so that it sees the rows of transactions for which that has waited.

Locks: none.
Plan: `backlog_pkey` for each marker key, `backlog_order_idx` for each order key.
"""

ADD_TO_BACKLOG = """
INSERT INTO pipeline.backlog
       (key, lane, order_key, sequence, consumer, topic, partition, "offset", timestamp,
        record_key, value, headers, source, id, type, hash, hash_version, remembered_hash,
        traceparent, reason, attempts, waited, due_at, died_at, holds, error, traceback)
SELECT key, lane, order_key, sequence, consumer, topic, partition,
       COALESCE("offset", nextval('pipeline.backlog_call_seq')), timestamp, record_key, value,
       headers, source, id, type, hash, $1, remembered_hash, traceparent,
       reason, attempts, waited, clock_timestamp() + make_interval(secs => due_in),
       CASE WHEN is_dead THEN clock_timestamp() END, holds, error, traceback
  FROM unnest($2::pipeline.new_backlog_row[])
    ON CONFLICT DO NOTHING
RETURNING key
"""
"""Store messages that are not applied now; returns the keys of those that are new.

An array of rows, as in `INSERT_MARKERS`.

Locks: the new rows. A key that another transaction has inserted is waited for until that one ends.
Rows with a marker wait for no other: their transactions have waited at `INSERT_MARKERS`. Those
without are in the order of their keys, so that two transactions do not deadlock.
Plan: `backlog_pkey` finds the keys that exist.
"""

COUNT_DUE = f"""
SELECT count(*)
  FROM generate_series(0, $1::integer) AS its (lane) CROSS JOIN unnest($3::text[]) AS of (consumer)
 CROSS JOIN LATERAL (
       SELECT reason FROM pipeline.backlog b
        WHERE b.lane = its.lane AND b.consumer = of.consumer AND due_at <= statement_timestamp()
        ORDER BY due_at DESC LIMIT $2) AS latest
 WHERE reason NOT IN ('{DEFERRED.reason}', '{FOLLOWER.reason}')
"""
"""Count rows of consumers that are due after a failure, at most `$2` of each lane and consumer.

Of the latest, among which are those that failures add: messages that were only stored, while their
consumer was paused, are due for longer.

Locks: none.
Plan: `backlog_due_idx`, backwards, for each of the lanes 0 to `$1` and each consumer. It reads at
most `$2` entries of each, with their rows, for the reason.
"""

TAKE_TURN = """
SELECT set_config('idle_in_transaction_session_timeout', $2, true),
       set_config('lock_timeout', '0', true), pg_advisory_xact_lock($1)
"""
"""Wait for the turn among the transactions of consumers that have deadlocked.

Locks: the advisory lock `$1`, until its own transaction ends. It waits without a limit for locks:
the process cancels it. A process that has stopped loses the lock after `$2`.
Plan: reads no table.
"""

READ_STOPS = f"""
SELECT kind, CASE kind WHEN 'key' THEN topic ELSE subject END AS name,
       min(per_second) AS per_second,
       COALESCE(max(extract(epoch FROM next_at - clock_timestamp())), -{LATE_SECONDS})::float
           AS rests,
       max(extract(epoch FROM clock_timestamp() - since)) FILTER (WHERE until IS NULL)::float
           AS age
  FROM (SELECT * FROM pipeline.throttle WHERE kind IN ('topic', 'consumer', 'events')
         UNION ALL
        (SELECT * FROM pipeline.throttle
          WHERE kind = 'key' AND (until IS NULL OR until > clock_timestamp())
          LIMIT {_KEYS})) AS asked
 WHERE until IS NULL OR until > clock_timestamp()
 GROUP BY 1, 2
"""
"""Return the rate of each topic, consumer and destination of events, and for how long it rests.

Also the age of its pause, if that has no end; and the topics of keys that are paused. Each process
asks once a second.

Locks: none.
Plan: `throttle_pkey` by its first column, or a scan of `throttle`. Keys are read up to a limit, and
those whose pauses have ended until the next pause or resumption deletes them.
"""

NOTE_TAKEN = f"""
UPDATE pipeline.throttle
   SET next_at = GREATEST(next_at, clock_timestamp() - interval '{LATE_SECONDS} s')
                 + make_interval(secs => $3::float / per_second)
 WHERE kind = $1 AND subject = $2 AND per_second > 0
RETURNING extract(epoch FROM next_at - clock_timestamp())::float
"""
"""Note how many were taken of what is throttled; returns for how many seconds it rests.

Locks: its row, until the statement ends; all processes that take of it update that one. No index
has the column, so that updates are HOT.
Plan: `throttle_pkey` by its first two columns, or a scan of `throttle`.
"""


def set_limits(connection: AsyncConnection, settings: Settings, *, handler: str = "") -> str:
    """Return the statement that sets the limits of a transaction.

    `handler` is the value of the setting `pipeline.handler`, see `AT_WORK` in
    `handlers/statements.py`. The default of the columns `release` reads `pipeline.release`.
    """
    milliseconds = round(settings.transaction_timeout * 1000)
    limits = {
        "idle_in_transaction_session_timeout": f"{milliseconds}ms",
        "lock_timeout": f"{round(settings.lock_timeout * 1000)}ms",
        "pipeline.handler": handler,
        "pipeline.release": settings.release,
    }
    if (connection.dialect.server_version_info or (0,)) >= _TRANSACTION_TIMEOUT_SINCE:
        limits["transaction_timeout"] = f"{milliseconds}ms"
    set_each = (f"set_config('{name}', '{value}', true)" for name, value in limits.items())
    return f"SELECT {', '.join(set_each)}"
