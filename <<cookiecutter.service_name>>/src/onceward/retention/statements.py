"""SQL of retention: its rounds, days of the outbox, and generations of the inbox.

Parameters are described where a statement is executed; a name in braces is put in there. The tables
`outbox_closed`, `inbox_closed`, `inbox_generation` and `retention_round` have few rows, and are
scanned. What makes and drops partitions is in `partition_statements.py`.
"""

from onceward.servers.database import IDLE_LIMIT

BEGIN_ROUND = """
UPDATE pipeline.retention_round SET started_at = clock_timestamp()
 WHERE started_at NOT BETWEEN clock_timestamp() - make_interval(secs => $1) AND clock_timestamp()
RETURNING true
"""
"""Begin a round, unless one has begun in any process less than `$1` seconds ago.

After a clock was set back the last round began in the future.

Locks: one row.
Plan: a scan of one row.
"""

FINISH_ROUND = """
UPDATE pipeline.retention_round SET finished_at = clock_timestamp(), held = $1
RETURNING finished_at
"""
"""Store when the round has ended, and how many partitions are due and still needed.

Locks: one row.
Plan: a scan of one row.
"""

CONTINUE_ROUND = "UPDATE pipeline.retention_round SET started_at = clock_timestamp()"
"""Store that the round goes on, so that no other process begins one.

Locks: one row.
Plan: a scan of one row.
"""

DELETE_DISCARDED = """
WITH old AS (
    SELECT {key} FROM pipeline.{table}
     WHERE discarded_at < $1 ORDER BY discarded_at LIMIT $2 FOR UPDATE SKIP LOCKED)
DELETE FROM pipeline.{table} WHERE {key} = ANY (ARRAY(SELECT {key} FROM old))
"""
"""Delete dead letters, or dead events, that a person has discarded long ago.

Locks: the rows; those that others have locked are left out.
Plan: `backlog_discarded_idx` and `backlog_pkey`, or `outbox_rejected_discarded_idx` and
`outbox_rejected_pkey`.
"""

SUMMARIZE_INDEXES = """
SELECT set_config('lock_timeout', '500ms', true), brin_summarize_new_values(inhrelid)
  FROM pg_inherits JOIN pg_class ON oid = inhrelid
 WHERE inhparent IN ('pipeline.inbox_find_idx'::regclass, 'pipeline.outbox_find_idx'::regclass)
   AND pg_has_role(relowner, 'USAGE')
"""
"""Summarize the new rows of partitions that are attached, for searches by key.

What is summarized already is not read again, nor waits a round for who has locked a partition.

Locks: each of these indexes and its table, in the mode SHARE UPDATE EXCLUSIVE. It waits for half a
second at most: after `deadlock_timeout` a wait would cancel an autovacuum of the table.
Plan: reads the catalogs; then the new blocks of each partition.
"""

NOTE_ARCHIVING = "UPDATE pipeline.retention_round SET archives = true WHERE NOT archives"
"""Store that days are archived.

Locks: one row, if that is new.
Plan: a scan of one row.
"""

MUST_ARCHIVE_DAY = """
SELECT archives AND NOT COALESCE(
           (SELECT skips_archive FROM pipeline.outbox_closed WHERE day = $1), false)
  FROM pipeline.retention_round
"""
"""Return whether a day has to be archived before it is dropped.

Locks: none.
Plan: a scan of one row; `outbox_closed_pkey`, or a scan.
"""

NOTE_DAY_NOT_ARCHIVED = "UPDATE pipeline.outbox_closed SET not_archived = $2 WHERE day = $1"
"""Store why a day is not archived.

Locks: the row of the day.
Plan: `outbox_closed_pkey`, or a scan.
"""

CLOSE_DAYS = """
INSERT INTO pipeline.outbox_closed (day) SELECT unnest($1::date[]) ON CONFLICT DO NOTHING
"""
"""Close days that are over.

The row has its own transaction id, and not the snapshot's xmax, which is that of the latest
*completed* one plus one: a running transaction above it may have rows in the partition already.

Locks: the new rows.
Plan: `outbox_closed_pkey` finds those that exist.
"""

LIST_CLOSED_DAYS = "SELECT day, xid, is_published, not_archived FROM pipeline.outbox_closed"
"""Return the days that are closed.

Locks: none.
Plan: a scan of `outbox_closed`.
"""

REOPEN_DAYS = """
DELETE FROM pipeline.outbox_closed
 WHERE (day + 1)::timestamp AT TIME ZONE 'UTC' + $1::interval > clock_timestamp()
    OR to_regclass('pipeline.outbox_p' || to_char(day, 'YYYYMMDD')) IS NULL
"""
"""Delete the rows of days that are dropped, and of days that are not over.

Such as after a jump of the clock.

Locks: the rows.
Plan: a scan of `outbox_closed`.
"""

MARK_DAY_PUBLISHED = "UPDATE pipeline.outbox_closed SET is_published = true WHERE day = $1"
"""Store that all events of a day are published.

Locks: the row of the day.
Plan: `outbox_closed_pkey`, or a scan.
"""

LIMIT_WAIT_FOR_DAY = """
SELECT set_config('lock_timeout', '2s', true), set_config('statement_timeout', '10s', true)
"""
"""Limit for how long a transaction waits that looks at a day.

A day may be locked for long, as by VACUUM FULL.

Locks: none.
Plan: reads no table.
"""

LOCK_PROGRESS = "LOCK TABLE pipeline.outbox_cursor IN ACCESS SHARE MODE"
"""Wait for a reset, which takes the relays' progress back, and let a reset wait.

Locks: `outbox_cursor`, in the mode ACCESS SHARE, until the transaction ends.
Plan: none.
"""

FIND_LAST_TRANSACTION_OF_DAY = "SELECT xid FROM pipeline.{name} ORDER BY xid DESC LIMIT 1"
"""Return the last transaction that has events in a day.

Locks: none.
Plan: the last entry of the day's index on xid.
"""

FIND_UNFINISHED_SHARDS = """
SELECT count(*) AS shards,
       array_agg(shard ORDER BY shard) FILTER (WHERE is_unfinished) AS unfinished,
       bool_or(lease_until IS NULL OR lease_until < clock_timestamp())
           FILTER (WHERE is_unfinished) AS is_without_relay
  FROM (SELECT shard, lease_until,
               pg_snapshot_xmin(seen) < $1 OR pg_snapshot_xmin(seen) <= $2 AS is_unfinished
          FROM pipeline.outbox_cursor) AS cursor
"""
"""Return the shards that are not known to have published all events of a day.

Locks: none.
Plan: a scan of `outbox_cursor`.
"""

FIND_OLDEST_WRITER = """
WITH running AS (
    SELECT format('process %s of %s in %s', pid,
                  COALESCE(NULLIF(application_name, ''), usename, '?'), datname) AS writer,
           xact_start AS since, backend_xid AS xid
      FROM pg_stat_activity WHERE pid <> pg_backend_pid()
     UNION ALL
    SELECT format('the prepared transaction %s in %s', gid, database), prepared, transaction
      FROM pg_prepared_xacts)
SELECT writer, since FROM running
 WHERE age(xid) >= (SELECT max(age(pg_snapshot_xmin(seen)::xid)) FROM pipeline.outbox_cursor)
 ORDER BY age(xid) DESC LIMIT 1
"""
"""Return the transaction that holds back the oldest progress of a relay, and since when it runs.

In any database of the cluster, as snapshots hold the transactions of all. One that began after the
oldest progress holds nothing back. What a role may not see of others is null here.

Locks: none.
Plan: views of the server's processes; a scan of `outbox_cursor`.
"""

READ_GENERATION = """
SELECT current, oldest, opened_at, since, clock_timestamp() AS now, finished_at, held
  FROM pipeline.inbox_generation, pipeline.retention_round
"""
"""Return which generations there are, the database's time, and the last round.

Locks: none.
Plan: scans of two tables of one row.
"""

LIST_CLOSED_GENERATIONS = "SELECT generation, closed_at FROM pipeline.inbox_closed"
"""Return the generations that are closed.

Locks: none.
Plan: a scan of `inbox_closed`.
"""

LOCK_GENERATIONS = f"""
SELECT set_config('lock_timeout', $2, true), {IDLE_LIMIT}, pg_advisory_xact_lock($1)
"""
"""Wait until no consume transaction runs, and keep new ones from beginning.

Locks: the advisory lock `$1`, exclusively, until the transaction ends. It waits for `$2` at most.
Plan: reads no table.
"""

CLOSE_GENERATION = """
WITH opened AS (
    UPDATE pipeline.inbox_generation
       SET current = current + 1, opened_at = clock_timestamp(), opening = gen_random_uuid()
     WHERE current = $1 AND EXISTS (
           SELECT FROM pg_inherits WHERE inhparent = 'pipeline.inbox'::regclass
              AND inhrelid = to_regclass('pipeline.inbox_g' || ($1 + 1)))
    RETURNING opened_at
)
INSERT INTO pipeline.inbox_closed (generation, closed_at) SELECT $1, opened_at FROM opened
    ON CONFLICT (generation) DO UPDATE SET closed_at = excluded.closed_at
RETURNING generation
"""
"""Close the current generation and open the next one, if its partition is attached.

Processes of version 1.0.0 compare `opening`.

Locks: one row, and the new one, under the lock of `LOCK_GENERATIONS`.
Plan: a scan of one row; indexes of the catalogs; `inbox_closed_pkey`.
"""

FORGET_GENERATIONS = """
WITH forgotten AS (
    DELETE FROM pipeline.inbox_closed
     WHERE generation <= (SELECT max(generation) FROM pipeline.inbox_closed WHERE closed_at < $1)
    RETURNING generation, closed_at
)
UPDATE pipeline.inbox_generation
   SET oldest = last + 1, since = GREATEST(since, closed_at + $2::interval)
  FROM (SELECT max(generation) AS last, max(closed_at) AS closed_at FROM forgotten) AS forgotten
 WHERE oldest <= last AND last < current
RETURNING last
"""
"""Forget generations that were closed long ago.

A record may carry a time ahead of ours: what is younger than the margin took effect later, by any
clock that is not further ahead, and is remembered.

Locks: one row, and those that are deleted, under the lock of `LOCK_GENERATIONS`.
Plan: scans of `inbox_closed` and of one row.
"""
