"""SQL of what people look up and change: positions, dead letters, scheduled events, relays, days.

Parameters are described where a statement is executed. Pauses, and the audit, are in
`stop_statements.py`; the adoption of a database is in `adopt_statements.py`.
"""

from onceward.events.message import FIRST_MILLISECOND

READ_POSITIONS_OF_GROUP = f"""
SELECT topic, partition, next_offset AS position, moved_at, duplicates,
       CASE WHEN anchor_time >= to_timestamp({FIRST_MILLISECOND} / 1000) THEN anchor_time
       END AS written_at
  FROM pipeline.position
 WHERE consumer_group = $1 ORDER BY topic, partition
"""
"""Return all positions of a group.

Locks: none.
Plan: `position_pkey` by its first column, or a scan of the table, which has a row for each
partition.
"""

SET_POSITION = """
INSERT INTO pipeline.position (consumer_group, topic, partition, next_offset)
VALUES ($1, $2, $3, $4)
    ON CONFLICT (consumer_group, topic, partition) DO UPDATE
   SET next_offset = excluded.next_offset, anchor_offset = NULL, anchor_time = NULL,
       anchor_hash = NULL, starts = 0, moved_at = clock_timestamp()
"""
"""Set a position, for an operator's command.

Locks: the position. It waits for a batch that is under way, as the next one of that partition does
for it.
Plan: `position_pkey`.
"""

SET_POSITION_BACK = """
UPDATE pipeline.position
   SET next_offset = $4, anchor_offset = NULL, anchor_time = NULL, anchor_hash = NULL, starts = 0,
       moved_at = clock_timestamp()
 WHERE consumer_group = $1 AND topic = $2 AND partition = $3 AND next_offset > $4
"""
"""Set a position to an offset that is before it, for an operator's command.

Locks: the position, as `SET_POSITION` does.
Plan: `position_pkey`, or a scan.
"""

READ_ROW = "SELECT * FROM pipeline.backlog WHERE key = $1"
"""Return a row.

Locks: none.
Plan: `backlog_pkey`.
"""

LOCK_LANE = "SELECT FROM pipeline.backlog_lane WHERE lane = $1 FOR NO KEY UPDATE"
"""Lock a lane, to change its rows.

Locks: the lane, until the transaction ends. It waits for the transaction of the worker, and the
worker for it.
Plan: `backlog_lane_pkey`, or a scan.
"""

REDRIVE_ROWS = """
UPDATE pipeline.backlog
   SET reason = CASE WHEN error LIKE 'ProcessDied:%' THEN $2 ELSE $3 END,
       attempts = 0, waited = 0, due_at = NULL, died_at = NULL, holds = false
 WHERE key = ANY ($1)
"""
"""Make dead rows wait to be tried again, with a new budget of attempts.

Locks: the rows, in a lane that is locked.
Plan: `backlog_pkey`, for each row.
"""

DISCARD_ROWS = """
UPDATE pipeline.backlog
   SET discarded_at = clock_timestamp(), discarded_by = $2, discarded_why = $3, holds = false
 WHERE key = ANY ($1)
"""
"""Close dead rows; they are kept for a while.

Locks: the rows, in a lane that is locked.
Plan: `backlog_pkey`, for each row.
"""

COUNT_WAITING_EVENTS = """
WITH RECURSIVE waiting (topic) AS (
    (SELECT topic FROM pipeline.outbox_rejected WHERE died_at IS NULL ORDER BY topic LIMIT 1)
    UNION ALL
    SELECT following.topic FROM waiting, LATERAL (
           SELECT topic FROM pipeline.outbox_rejected AS stored
            WHERE died_at IS NULL AND stored.topic > waiting.topic
            ORDER BY topic LIMIT 1) AS following)
SELECT topic, string_agg(DISTINCT reason, ', ') AS reasons, count(*) AS count,
       extract(epoch FROM clock_timestamp() - min(parked_at))::float AS oldest,
       bool_or(error IS NOT NULL) AS rejects
  FROM waiting, LATERAL (
       SELECT shard, id, reason, parked_at, error FROM pipeline.outbox_rejected AS stored
        WHERE died_at IS NULL AND stored.topic BETWEEN waiting.topic AND waiting.topic
        ORDER BY topic, shard, id LIMIT $1) AS first
 GROUP BY topic ORDER BY topic
"""
"""Count the events that wait, by topic and up to a limit for each, with the reasons and the oldest.

The first event of a topic is tried, and has the error of that.

Locks: none.
Plan: `outbox_rejected_waiting_idx`, to the first entry of each topic, and from there up to the
limit.
"""

COUNT_DEAD_EVENTS = """
SELECT count(*) FROM (SELECT FROM pipeline.outbox_rejected
                       WHERE died_at IS NOT NULL AND discarded_at IS NULL LIMIT $1) AS few
"""
"""Count the dead events that no operator has discarded, up to a limit.

Locks: none.
Plan: `outbox_rejected_dead_idx`, or a scan, up to the limit.
"""

HOLD_SHARD = "SELECT FROM pipeline.outbox_cursor WHERE shard = $1 FOR UPDATE"
"""Keep the relay of a shard from storing rejected events until the transaction ends.

Locks: the shard, until the transaction ends. It waits for the transaction in which the relay writes
its progress, and the relay for it.
Plan: `outbox_cursor_pkey`, or a scan.
"""

REDRIVE_EVENTS = """
UPDATE pipeline.outbox_rejected
   SET died_at = NULL, parked_at = clock_timestamp(), reason = 'redriven', error = NULL
 WHERE id = ANY ($1)
"""
"""Make dead events wait to be tried again.

Locks: the rows, in a shard that is locked.
Plan: `outbox_rejected_pkey`, for each event.
"""

DISCARD_EVENTS = """
UPDATE pipeline.outbox_rejected
   SET died_at = COALESCE(died_at, clock_timestamp()), discarded_at = clock_timestamp(),
       discarded_by = $2, discarded_why = $3
 WHERE id = ANY ($1)
"""
"""Close events; their rows are kept for a while.

One that its relay is sending is published all the same, and its row deleted.

Locks: the rows, in a shard that is locked.
Plan: `outbox_rejected_pkey`, for each event.
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
 ORDER BY due_at, scheduled_at, name LIMIT $1
"""
"""Return scheduled events, the next to be due first, as they are published.

Locks: none.
Plan: `scheduled_due_idx`, from its beginning; those of the same moments are sorted by name.
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

HAS_ANY_RELAY_BEGUN = "SELECT EXISTS (SELECT FROM pipeline.outbox_cursor WHERE token > 0)"
"""Return whether any relay has ever held a shard.

Locks: none.
Plan: a scan of `outbox_cursor`.
"""

COUNT_UNPUBLISHED = """
SELECT topic, count(*) AS count,
       GREATEST(extract(epoch FROM clock_timestamp() - min(created_at)), 0)::float AS oldest
  FROM (SELECT topic, created_at
          FROM pipeline.outbox JOIN pipeline.outbox_cursor USING (shard)
         WHERE xid >= (SELECT pg_snapshot_xmin(seen) FROM pipeline.outbox_cursor
                        ORDER BY pg_snapshot_xmin(seen) LIMIT 1)
           AND NOT pg_visible_in_snapshot(xid, seen)
           AND (target IS NULL OR id > last_id OR NOT pg_visible_in_snapshot(xid, target))
         ORDER BY xid LIMIT $1) AS unpublished
 GROUP BY topic
"""
"""Count events that are not published, up to a limit, and for how long each topic's oldest waits.

It also counts what a relay has published in the quarter of a second since it wrote its cursor.

Locks: none.
Plan: `outbox_xid_idx` of each day, from the oldest progress; a scan of `outbox_cursor`. Published
events above that are read, too: while a transaction runs for long, or a shard has no relay, all
since then. Only commands execute it.
"""

NOTE_NO_ARCHIVING = "UPDATE pipeline.retention_round SET archives = false"
"""Store that days are not archived.

Locks: one row.
Plan: a scan of one row.
"""

SKIP_ARCHIVE = """
UPDATE pipeline.outbox_closed SET skips_archive = true, not_archived = NULL
 WHERE $1::date[] IS NULL OR day = ANY ($1)
RETURNING day
"""
"""Let closed days be dropped without being archived; returns them.

Locks: the rows of the days.
Plan: a scan of `outbox_closed`.
"""
