"""SQL of relays: leases and progress, the window, what waits for its topic, and scheduled events.

Parameters are described where a statement is executed. `outbox_cursor` has a row for each shard,
and `outbox_relay` one for each relay, so both are mostly scanned. A relay writes rejected events of
shards that it owns, in the transaction that writes its progress.

The statements that return a page are executed on the primary, each by itself in READ COMMITTED or
in a read-only snapshot, so that the snapshot that they return is the one that they read with. A
snapshot's xmax is the latest *completed* transaction + 1, so rows of running ones may lie above it:
READ_WINDOW is not bounded by an id. READ_PAGE is, by the last value that the sequence had in the
snapshot of the window. `id + 0` and `xid <` keep the planner off the wrong index;
pg_sequence_last_value prevents a parallel plan, in which the head row might not come first.
"""

from onceward.handlers import staged
from onceward.servers.database import IDLE_LIMIT, lease_ended
from onceward.servers.statements import IS_OURS

COLUMNS = f"id, created_at, {staged.COLUMNS}"
"""An event, as it is sent."""


def filled(page: str, *, columns: str, place: str, at_most: str) -> str:
    """Return the statement that reads a page, cut off behind the event that fills it.

    PostgreSQL computes the size of a payload without reading it.
    """
    return f"""
SELECT {columns}
  FROM (SELECT page.*,
               sum(octet_length(payload)) OVER (
                   ORDER BY {place} ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
          FROM ({page}) AS page) AS summed
 WHERE before < {at_most} OR before IS NULL
 ORDER BY {place}
"""


def _headed(page: str, *, place: str, at_most: str) -> str:
    """Put a row before those of the page, with what is common to them."""
    rows = filled(page, columns=f"NULL, NULL, NULL, {COLUMNS}", place=place, at_most=at_most)
    return f"""
SELECT pg_postmaster_start_time() AS server, pg_current_snapshot() AS target,
       pg_sequence_last_value('pipeline.outbox_id_seq') AS high_id,
       {COLUMNS}
  FROM (SELECT (NULL::pipeline.outbox).*) AS nothing
 UNION ALL ({rows})"""


_BEGUN_SINCE = "xid >= pg_snapshot_xmax($1) AND xid < pg_snapshot_xmax(pg_current_snapshot())"
"""The condition of rows whose transaction has begun since the snapshot `$1`, in SQL."""

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
"""Delete relays whose leases have ended; count the others, and return when the first lease ends.

It also returns whether the database is the service's, and when the server was started. Relays whose
announcement has ended are deleted.

Locks: the rows that are deleted.
Plan: a scan of `outbox_relay` and of `outbox_cursor`; the server's control file.
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
INSERT INTO pipeline.outbox ({staged.COLUMNS}, release)
SELECT {staged.COLUMNS}, release FROM due ORDER BY due_at, scheduled_at, name
"""
"""Move scheduled events that are due into the outbox, in the order in which they are due.

A row that is being cancelled or replaced is locked; it is left for the next move.

Locks: the rows that are moved; those that others have locked are left out.
Plan: `scheduled_due_idx` finds the first that are due, and `scheduled_pkey` the rows to delete.
"""

READ_WINDOW = _headed(
    f"""
SELECT {COLUMNS}
  FROM (SELECT {COLUMNS}
          FROM pipeline.outbox
         WHERE {_BEGUN_SINCE} AND shard = ANY ($2)
        UNION ALL
        SELECT {COLUMNS}
          FROM pipeline.outbox
         WHERE shard = ANY ($2)
           AND xid = ANY (ARRAY(
               SELECT running FROM pg_snapshot_xip($1) AS running
                WHERE pg_visible_in_snapshot(running, pg_current_snapshot())))) AS unseen
 ORDER BY id + 0
 LIMIT $3""",
    place="id + 0",
    at_most="$4",
)
"""Return events that became visible since the snapshot `$1`, after a row with what they share.

Locks: none.
Plan: `outbox_xid_idx` of each day. A sort of the whole window by id.
"""

MEASURE_WINDOW = f"""
SELECT count(*) > $2 AS is_wide, pg_postmaster_start_time() AS server,
       pg_current_snapshot() AS target, pg_sequence_last_value('pipeline.outbox_id_seq') AS high_id
  FROM ((SELECT xid FROM pipeline.outbox WHERE {_BEGUN_SINCE} ORDER BY xid LIMIT $2 + 1)
        UNION ALL
        (SELECT ended.xid FROM pg_snapshot_xip($1) AS running, LATERAL (
                SELECT xid FROM pipeline.outbox WHERE xid BETWEEN running AND running
                 ORDER BY xid LIMIT $2 + 1) AS ended)) AS unseen
"""
"""Return whether a window has more rows than one page scans.

`READ_WINDOW` reads a whole window to sort it. This one and `FIND_LOWEST_ID` open a wide one at an
id that none in it is below.

Locks: none.
Plan: `outbox_xid_idx` of each day, up to a limit.
"""

FIND_LOWEST_ID = """
SELECT min(id) AS id, max(xid::text::bigint) AS xid, count(*) AS rows
  FROM (SELECT id, xid FROM pipeline.outbox
         WHERE xid >= $1 AND xid < $2 ORDER BY xid LIMIT $3) AS piece
"""
"""Return the lowest id of a piece of a window, the last transaction of the piece, and its rows.

The transaction is returned as a number: PostgreSQL 14 has no max(xid8).

Locks: none.
Plan: `outbox_xid_idx` of each day, up to a limit.
"""

FIND_FIRST_ID = "SELECT id FROM pipeline.outbox ORDER BY id LIMIT 1"
"""Return the lowest id of the outbox.

Locks: none.
Plan: `outbox_id_idx` of each day, to its first visible entry.
"""

READ_PAGE = _headed(
    f"""
SELECT {COLUMNS}
  FROM pipeline.outbox
 WHERE id > $3 AND id <= $4
   AND NOT pg_visible_in_snapshot(xid, $1) AND pg_visible_in_snapshot(xid, $2)
   AND shard = ANY ($5)
 ORDER BY id
 LIMIT $6""",
    place="id",
    at_most="$7",
)
"""Return the next events of an open window, after a row with what they share.

Functions instead of comparisons of xid make the planner use the index on id.

Locks: none.
Plan: `outbox_id_idx` of each day, for a range of ids.
"""

READ_SNAPSHOT = "SELECT pg_postmaster_start_time() AS server, pg_current_snapshot() AS snapshot"
"""Return the current snapshot, and when the server was started.

Locks: none.
Plan: reads no table.
"""

COUNT_REJECTED_BY_TOPIC = """
WITH RECURSIVE place (topic, shard) AS (
    (SELECT topic, shard FROM pipeline.outbox_rejected
      WHERE died_at IS NULL ORDER BY topic, shard LIMIT 1)
    UNION ALL
    SELECT following.* FROM place, LATERAL (
           SELECT topic, shard FROM pipeline.outbox_rejected AS stored
            WHERE died_at IS NULL AND (stored.topic, stored.shard) > (place.topic, place.shard)
            ORDER BY topic, shard LIMIT 1) AS following)
SELECT topic, sum(waiting)::bigint AS waiting, 0 AS dead, bool_or(rejects) AS rejects
  FROM place, LATERAL (
       SELECT count(*) AS waiting, bool_or(error IS NOT NULL) AS rejects
         FROM (SELECT error FROM pipeline.outbox_rejected AS stored
                WHERE died_at IS NULL AND stored.topic BETWEEN place.topic AND place.topic
                  AND stored.shard BETWEEN place.shard AND place.shard
                ORDER BY topic, shard, id LIMIT $2) AS first) AS counted
 WHERE shard = ANY ($1)
 GROUP BY topic
UNION ALL
SELECT NULL, 0, count(*), true
  FROM pipeline.outbox_rejected
 WHERE shard = ANY ($1) AND died_at IS NOT NULL AND discarded_at IS NULL
"""
"""Count the events of shards that wait, by topic and up to a limit, and those that are dead.

Locks: none.
Plan: `outbox_rejected_waiting_idx`, to the first entry of each topic and shard, and from there up
to the limit; `outbox_rejected_dead_idx` for each shard. A relay looks the less often, the longer it
takes.
"""

ADD_REJECTED = f"""
INSERT INTO pipeline.outbox_rejected ({COLUMNS}, release, reason, error, died_at)
SELECT {COLUMNS}, release, reason, error, CASE WHEN is_dead THEN clock_timestamp() END
  FROM unnest($1::bigint[], $2::text[], $3::text[], $4::boolean[])
       AS rejected (event, reason, error, is_dead),
       LATERAL (SELECT * FROM pipeline.outbox
                 WHERE id = event AND created_at BETWEEN $5 AND $6 LIMIT 1) AS stored
    ON CONFLICT (id) DO NOTHING
"""
"""Store events that were rejected, or that wait behind others of their topic.

After a reset, or if an older cursor was restored, an event may be stored already. Each event is
read by its id: the times only tell which days to look at.

Locks: the new rows.
Plan: `outbox_id_idx` of these days, for each event; `outbox_rejected_pkey` finds what is stored.
"""

READ_WAITING_EVENTS = filled(
    f"""
SELECT {COLUMNS}, shard
  FROM unnest($2::smallint[]) AS mine (number), LATERAL (
       SELECT {COLUMNS}, shard
         FROM pipeline.outbox_rejected
        WHERE topic BETWEEN $1 AND $1 AND shard BETWEEN number AND number AND died_at IS NULL
        ORDER BY topic, shard, id
        LIMIT $3) AS waiting
 LIMIT $3""",
    columns=f"{COLUMNS}, shard",
    place="id",
    at_most="$4",
)
"""Return the next events that wait for a topic: those of one shard after the other, each in order.

With `topic = $1` the planner may scan the primary key, through the events of all topics.

Locks: none.
Plan: `outbox_rejected_waiting_idx`, from the first of each shard up to the limit of all.
"""

DELETE_SENT_EVENTS = "DELETE FROM pipeline.outbox_rejected WHERE id = ANY ($1)"
"""Delete events that were sent.

Locks: the rows, in a shard that this relay owns.
Plan: `outbox_rejected_pkey`, for each event.
"""

UPDATE_REJECTED = """
UPDATE pipeline.outbox_rejected AS stored
   SET reason = rejected.reason, error = rejected.error,
       died_at = CASE WHEN is_dead THEN clock_timestamp() END
  FROM unnest($1::bigint[], $2::text[], $3::text[], $4::boolean[])
       AS rejected (id, reason, error, is_dead)
 WHERE stored.id = rejected.id AND died_at IS NULL
   AND (is_dead OR (stored.reason, stored.error)
                   IS DISTINCT FROM (rejected.reason, rejected.error))
"""
"""Store why events were rejected again, and which of them are dead.

The last condition avoids updates while a topic still rejects events for the same reason.

Locks: the rows, in a shard that this relay owns.
Plan: `outbox_rejected_pkey`, for each event.
"""
