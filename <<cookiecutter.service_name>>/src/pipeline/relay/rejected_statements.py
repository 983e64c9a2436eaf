"""SQL of rejected events: those that are dead, and those that wait for their topic.

Parameters are described where a statement is executed. A relay writes rows of shards that it owns,
in the transaction that writes its progress.
"""

from .window_statements import COLUMNS, filled

COUNT_REJECTED_BY_TOPIC = """
SELECT topic, count(*) AS waiting, 0 AS dead, bool_or(error IS NOT NULL) AS rejects
  FROM pipeline.outbox_rejected
 WHERE shard = ANY ($1) AND died_at IS NULL
 GROUP BY topic
UNION ALL
SELECT NULL, 0, count(*), true
  FROM pipeline.outbox_rejected
 WHERE shard = ANY ($1) AND died_at IS NOT NULL AND discarded_at IS NULL
"""
"""Count the events of shards that wait, by topic, and those that are dead.

Locks: none.
Plan: a scan of those that wait, by `outbox_rejected_waiting_idx` or of the table;
`outbox_rejected_dead_idx` for each shard. It has no limit: a relay looks the less often, the longer
it takes.
"""

COUNT_WAITING_EVENTS = """
SELECT topic, string_agg(DISTINCT reason, ', ') AS reasons, count(*) AS count,
       extract(epoch FROM clock_timestamp() - min(parked_at))::float AS oldest,
       (SELECT error IS NOT NULL FROM pipeline.outbox_rejected AS first
         WHERE first.topic BETWEEN few.topic AND few.topic AND died_at IS NULL
         ORDER BY first.topic, id LIMIT 1) AS rejects
  FROM (SELECT topic, reason, parked_at FROM pipeline.outbox_rejected
         WHERE died_at IS NULL LIMIT $1) AS few
 GROUP BY topic ORDER BY topic
"""
"""Count the events that wait, by topic and up to a limit, with the reasons and the oldest.

The first event of a topic is the one that is tried.

Locks: none.
Plan: a scan of those that wait, up to the limit; `outbox_rejected_waiting_idx` for the first one of
each topic.
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

Locks: the rows, in a shard that is locked.
Plan: `outbox_rejected_pkey`, for each event.
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
  FROM pipeline.outbox_rejected
 WHERE topic BETWEEN $1 AND $1 AND shard = ANY ($2) AND died_at IS NULL
 ORDER BY topic, id
 LIMIT $3""",
    columns=f"{COLUMNS}, shard",
    place="id",
    at_most="$4",
)
"""Return the next events that wait for a topic.

With `topic = $1` the planner may scan the primary key, through the events of all topics.

Locks: none.
Plan: `outbox_rejected_waiting_idx`, from the first of the topic up to the limit. Events of other
shards that are between are read, and left out.
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
