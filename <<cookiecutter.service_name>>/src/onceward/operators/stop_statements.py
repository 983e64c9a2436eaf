"""SQL of what people pause, throttle and resume, and of the audit.

Parameters are described where a statement is executed. Few rows are in `throttle`: one for each
topic, consumer or key that is paused or throttled.
"""

from onceward.apply.statements import PAUSES
from onceward.handlers.policy import PAUSED

LOCK_STOPS = "SELECT pg_advisory_xact_lock($1)"
"""Wait until no other person pauses or resumes anything.

Locks: the advisory lock `$1`, until the transaction ends.
Plan: reads no table.
"""

LIST_STOPS = """
SELECT kind, subject AS name, topic, encode(record_key, 'hex') AS key, per_second, until,
       extract(epoch FROM clock_timestamp() - since)::float AS seconds, who, why
  FROM pipeline.throttle
 WHERE until IS NULL OR until > clock_timestamp()
 ORDER BY kind = 'key', since, kind, subject LIMIT $1
"""
"""Return what people have paused and throttled, the oldest first, and keys last.

Locks: none.
Plan: a scan of `throttle`, and a sort.
"""

FIND_STOPS_OF_KEY = """
SELECT kind, subject AS name, topic, record_key AS key FROM pipeline.throttle
 WHERE kind = 'key' AND record_key = $1 ORDER BY subject, topic
"""
"""Return the consumers and topics for which a key is paused.

Locks: none.
Plan: `throttle_pkey` by its first column, or a scan of `throttle`.
"""

FIND_PUBLICATION = """
SELECT quote_ident(pubname) FROM pg_publication_rel
  JOIN pg_publication AS published ON published.oid = prpubid
 WHERE prrelid = 'pipeline.outbox'::regclass AND right(pubname, 7) = '_outbox' LIMIT 1
"""
"""Return the publication by which a connector publishes events, if there is one.

One that `service debezium sql` has made. Its slot may be missing or lost for a time, in which
`service debezium follow` publishes and, as long as there is one, obeys no pause.

Locks: none.
Plan: catalogs only.
"""

STORE_STOPS = """
INSERT INTO pipeline.throttle (kind, subject, topic, record_key, per_second, until, who, why)
SELECT kind, subject, topic, record_key, $5::float, clock_timestamp() + $6::interval,
       $7::text, $8::text
  FROM unnest($1::text[], $2::text[], $3::text[], $4::bytea[])
       AS asked (kind, subject, topic, record_key)
    ON CONFLICT ON CONSTRAINT throttle_pkey DO UPDATE
   SET per_second = excluded.per_second, until = excluded.until, next_at = NULL,
       since = clock_timestamp(), who = excluded.who, why = excluded.why
"""
"""Store what is paused or throttled, in place of what was asked for the same before.

Locks: the rows. It waits for a `NOTE_TAKEN` of one of them.
Plan: `throttle_pkey` finds those that exist.
"""

DELETE_ENDED_STOPS = "DELETE FROM pipeline.throttle WHERE until <= clock_timestamp()"
"""Delete what has ended by itself.

Locks: the rows.
Plan: a scan of `throttle`.
"""

DELETE_STOPS = """
DELETE FROM pipeline.throttle
 WHERE (kind, subject, topic, record_key)
       IN (SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::bytea[]))
"""
"""Delete what is resumed.

Locks: the rows.
Plan: `throttle_pkey`, or a scan of `throttle`.
"""

HOLD_KEYS = f"""
INSERT INTO pipeline.backlog
       (key, lane, order_key, sequence, consumer, topic, partition, "offset", timestamp,
        record_key, headers, hash_version, received_at, reason, attempts, waited, due_at, holds,
        error)
SELECT key, lane, order_key, -9223372036854775808, consumer, '{PAUSES}', 0, 0, 0,
       record_key, '[]', 0, due_at, '{PAUSED}', 0, 3e9, due_at, false, $7::text
  FROM unnest($1::bytea[], $2::smallint[], $3::bytea[], $4::text[], $5::bytea[])
       AS held (key, lane, order_key, consumer, record_key),
       (SELECT clock_timestamp() + COALESCE($6::interval, '100 years') AS due_at) AS until
    ON CONFLICT (key) DO UPDATE
   SET due_at = excluded.due_at, received_at = excluded.received_at, error = excluded.error,
       reason = excluded.reason, attempts = excluded.attempts, waited = excluded.waited,
       died_at = NULL, discarded_at = NULL
"""
"""Store the rows behind which the messages of paused keys wait, or prolong them.

No earlier row of its key can come. It never is the oldest message that waits.

Locks: the rows, until the transaction ends, without their lanes. It waits for a worker that ends or
schedules one of them. Two rows that a worker ends together, while they are prolonged, may deadlock:
the worker tries again, or the command fails and has changed nothing.
Plan: `backlog_pkey` finds those that exist.
"""

RELEASE_KEYS = f"""
UPDATE pipeline.backlog SET due_at = clock_timestamp()
 WHERE key = ANY ($1::bytea[]) AND topic = '{PAUSES}' AND died_at IS NULL
"""
"""Make these rows due, so that the workers of their lanes end them.

Locks: the rows, as `HOLD_KEYS` does.
Plan: `backlog_pkey`, for each row.
"""

ADD_TO_AUDIT = "INSERT INTO pipeline.audit (who, action, subject, why) VALUES ($1, $2, $3, $4)"
"""Write down what a person has changed.

Locks: the new row.
Plan: finds no row.
"""
