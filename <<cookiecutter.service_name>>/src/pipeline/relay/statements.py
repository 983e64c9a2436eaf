"""SQL of relays: their leases and progress, and the move of scheduled events.

Parameters are described where a statement is executed. `outbox_cursor` has a row for each shard,
and `outbox_relay` one for each relay, so both are mostly scanned. What reads the outbox is in
`window_statements.py`, and what waits or is dead in `rejected_statements.py`.
"""

from pipeline.handlers.staged import COLUMNS
from pipeline.servers.database import IDLE_LIMIT, lease_ended
from pipeline.servers.statements import IS_OURS

ANNOUNCE_RELAY = """
INSERT INTO pipeline.outbox_relay (owner, lease_until, published)
VALUES ($1, clock_timestamp() + make_interval(secs => $2), $3)
    ON CONFLICT (owner)
    DO UPDATE SET lease_until = excluded.lease_until, published = excluded.published
"""
"""Store that a relay runs, until when, and how many events it has published.

Locks: its row, which it alone writes, and others delete when it has ended. No index has a column
that is set, here or in `outbox_cursor`, so that updates are HOT.
Plan: `outbox_relay_pkey` finds the row.
"""

COUNT_RELAYS = f"""
WITH gone AS (DELETE FROM pipeline.outbox_relay WHERE {lease_ended("$1")})
SELECT (SELECT count(*) FROM pipeline.outbox_relay WHERE NOT {lease_ended("$1")}) AS alive,
       (SELECT extract(epoch FROM min(lease_until) - clock_timestamp())::float
          FROM pipeline.outbox_cursor WHERE lease_until >= clock_timestamp()) AS first_ends,
       {IS_OURS} AS is_ours,
       pg_postmaster_start_time() AS server
"""
"""Count the relays that run, and return when the first of all leases ends.

It also returns whether the database is the service's, and when the server was started. Relays whose
announcement has ended are deleted.

Locks: the rows that are deleted.
Plan: a scan of `outbox_relay` and of `outbox_cursor`; the server's control file.
"""

LIST_RELAYS = """
SELECT owner, array_agg(shard ORDER BY shard) AS shards,
       COALESCE(published, 0) AS published, relay.lease_until
  FROM (SELECT shard, CASE WHEN lease_until > clock_timestamp() THEN owner END AS owner
          FROM pipeline.outbox_cursor) AS cursor
  LEFT JOIN pipeline.outbox_relay AS relay USING (owner)
 GROUP BY owner, published, relay.lease_until ORDER BY owner NULLS FIRST
"""
"""Return each relay with its shards, the events that it has published, and the end of its lease.

Locks: none.
Plan: a scan of `outbox_relay` and of `outbox_cursor`.
"""

FIND_EXPIRED_RELAYS = f"""
SELECT array_agg(DISTINCT owner) AS owners, max(lease_until) AS until
  FROM pipeline.outbox_cursor
 WHERE {lease_ended("$2")} AND owner <> $1
"""
"""Return other relays whose leases have ended, and when the last of these did.

Locks: none.
Plan: a scan of `outbox_cursor`.
"""

CLAIM_SHARDS = f"""
UPDATE pipeline.outbox_cursor
   SET owner = $1, token = token + 1, lease_until = clock_timestamp() + make_interval(secs => $2)
 WHERE shard IN (
       SELECT shard FROM pipeline.outbox_cursor
        WHERE (lease_until IS NULL OR {lease_ended("$2")}
               OR (owner = $1 AND shard <> ALL ($4)))
          AND (owner IS NULL OR owner = $1 OR (owner = ANY ($5) AND lease_until <= $6))
          AND pg_postmaster_start_time() = $7 AND {IS_OURS}
        ORDER BY shard LIMIT $3
          FOR UPDATE SKIP LOCKED)
RETURNING shard, token, seen, target, last_id, high_id
"""
"""Claim shards that have no owner, or whose owner was fenced since its lease ended.

Locks: the shards that may be claimed, until the statement ends; those that others have locked are
left out. It waits for `adopt`, which locks the table.
Plan: `outbox_cursor_pkey`, or a scan and a sort.
"""

WRITE_PROGRESS = """
UPDATE pipeline.outbox_cursor AS cursor
   SET seen = $3, target = $4, last_id = $5, high_id = $6,
       lease_until = CASE WHEN $7 THEN clock_timestamp() + make_interval(secs => $8) END,
       owner = CASE WHEN $7 THEN owner END
  FROM unnest($1::smallint[], $2::bigint[]) AS mine (shard, token)
 WHERE cursor.shard = mine.shard AND cursor.token = mine.token
   AND pg_postmaster_start_time() = $9
RETURNING cursor.shard
"""
"""Store the progress of shards and extend their leases, or release them.

The token and the server are compared, so that a relay that has lost a shard changes nothing of it.

Locks: the shards, until the transaction ends: mostly that of the statement, or the one that stores
rejected events. It waits for a command that holds one of them (`HOLD_SHARD`).
Plan: `outbox_cursor_pkey`, or a scan.
"""

DELETE_RELAY = "DELETE FROM pipeline.outbox_relay WHERE owner = $1"
"""Delete the announcement of a relay that ends.

Locks: its row.
Plan: `outbox_relay_pkey`.
"""

HAS_ANY_RELAY_BEGUN = "SELECT EXISTS (SELECT FROM pipeline.outbox_cursor WHERE token > 0)"
"""Return whether any relay has ever held a shard.

Locks: none.
Plan: a scan of `outbox_cursor`.
"""

IS_SCHEDULED_DUE = "SELECT min(due_at) <= now() FROM pipeline.scheduled"
"""Return whether a scheduled event is due.

It reads the first row only, by the index, whatever the planner estimates. Each relay asks once a
second.

Locks: none.
Plan: the first entry of `scheduled_due_idx`.
"""

LOCK_MOVE = f"SELECT pg_try_advisory_xact_lock($1) AS is_ours, {IDLE_LIMIT}"
"""Lock moves of scheduled events, unless another relay has locked them.

Locks: the advisory lock `$1`, until the transaction ends; it does not wait for it. A relay that
stops in the transaction loses the lock after five seconds.
Plan: reads no table.
"""

MOVE_SCHEDULED = f"""
WITH due AS (
    DELETE FROM pipeline.scheduled
     WHERE name IN (SELECT name FROM pipeline.scheduled
                     WHERE due_at <= now()
                     ORDER BY due_at, scheduled_at, name LIMIT $1
                       FOR UPDATE SKIP LOCKED)
    RETURNING *)
INSERT INTO pipeline.outbox ({COLUMNS}, release)
SELECT {COLUMNS}, release FROM due ORDER BY due_at, scheduled_at, name
"""
"""Move scheduled events that are due into the outbox, in the order in which they are due.

A row that is being cancelled or replaced is locked; it is left for the next move.

Locks: the rows that are moved; those that others have locked are left out.
Plan: `scheduled_due_idx` finds the first that are due, and `scheduled_pkey` the rows to delete.
"""

COUNT_SCHEDULED = """
SELECT (SELECT count(*) FROM (SELECT FROM pipeline.scheduled LIMIT $1) AS few) AS count,
       (SELECT min(due_at) FROM pipeline.scheduled) AS next_due
"""
"""Count scheduled events up to a limit, and return when the first is due.

Locks: none.
Plan: a scan up to the limit, and the first entry of `scheduled_due_idx`.
"""

LIST_SCHEDULED = """
SELECT name, due_at, scheduled_at, topic, convert_from(key, 'UTF8') AS key, type, event_id,
       COALESCE(datalength, octet_length(payload)) AS size
  FROM pipeline.scheduled
 ORDER BY due_at, name LIMIT $1
"""
"""Return scheduled events, the next to be due first.

Locks: none.
Plan: `scheduled_due_idx`, from its beginning; those of the same time are sorted by name.
"""
