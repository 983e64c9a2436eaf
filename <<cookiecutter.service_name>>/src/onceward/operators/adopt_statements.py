"""SQL of the adoption of a database, which is a copy, or has moved to another cluster.

Parameters are described where a statement is executed; a name in braces is put in there.
"""

from onceward.schema import FIRST_LANE_OF_CALLS

COUNT_WHAT_WAITS = f"""
SELECT (SELECT count(*) FROM pipeline.backlog WHERE lane >= {FIRST_LANE_OF_CALLS}
           AND died_at IS NULL) AS calls,
       (SELECT count(*) FROM pipeline.scheduled) AS scheduled,
       (SELECT count(*) FROM pipeline.outbox WHERE NOT $1) AS events
"""
"""Count calls and scheduled events that wait, and the events that `adopt` publishes again.

Locks: none.
Plan: scans of whole tables.
"""

READ_SNAPSHOT_TO_ADOPT = "SELECT pg_current_snapshot()"
"""Return the snapshot from which on relays publish.

It is read before the transaction has an id, so that its own changes are not visible in it.

Locks: none.
Plan: reads no table.
"""

REMOVE_LIMITS = """
SELECT set_config(name, '0', true) FROM pg_settings
 WHERE name IN ('statement_timeout', 'lock_timeout', 'transaction_timeout')
"""
"""Remove limits of time from a transaction.

A role or database may have limits that are meant for shorter work.

Locks: none.
Plan: the server's settings.
"""

LOCK_CURSOR = "LOCK TABLE pipeline.outbox_cursor IN ACCESS EXCLUSIVE MODE"
"""Keep relays from claiming shards after they have compared the former cluster.

Locks: `outbox_cursor` in the mode ACCESS EXCLUSIVE, until the transaction ends. It waits for a
minute at most, and from then on statements that only read the table wait, too.
Plan: none.
"""

END_LEASES = """
UPDATE pipeline.outbox_cursor SET token = token + 1, lease_until = clock_timestamp()
"""
"""End the leases of all shards.

The owners are kept: the relay that takes their shards has to know which one to fence.

Locks: all rows of `outbox_cursor`, which is locked.
Plan: a scan of `outbox_cursor`.
"""

FORGET_PROGRESS = """
UPDATE pipeline.outbox_cursor
   SET seen = $1, target = NULL, last_id = 0, high_id = 0
"""
"""Let relays publish everything that is visible after a snapshot.

Locks: all rows of `outbox_cursor`, which is locked.
Plan: a scan of `outbox_cursor`.
"""

RENEW_EVENTS = "UPDATE pipeline.outbox SET xid = DEFAULT"
"""Give all events the transaction id of this transaction, so that they are published again.

Locks: all rows of the outbox.
Plan: a scan of the outbox, of which each row is written.
"""

CLOSE_DAYS_AGAIN = "UPDATE pipeline.outbox_closed SET xid = DEFAULT, is_published = false"
"""Give closed days the transaction id of this transaction; their events are published again.

The transactions that closed them were another cluster's; this one comes after all of them.

Locks: all rows of `outbox_closed`.
Plan: a scan of `outbox_closed`.
"""

LIST_SEQUENCES = f"""
SELECT name, highest, has_sequence_privilege(name, 'SELECT, USAGE') AS is_readable
  FROM (VALUES ('pipeline.outbox_id_seq', 'max(id) FROM pipeline.outbox_rejected'),
               ('pipeline.backlog_call_seq',
                'max("offset") FROM pipeline.backlog WHERE lane >= {FIRST_LANE_OF_CALLS}')
         UNION ALL
        SELECT pg_get_serial_sequence(attrelid::regclass::text, attname),
               format('max(%I) FROM %s', attname, attrelid::regclass)
          FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
         WHERE attidentity <> '' AND NOT relispartition
           AND relnamespace = 'pipeline'::regnamespace) AS numbered (name, highest)
 ORDER BY name, highest
"""
"""Return the sequences of the engine, and where their highest number is.

Logical replication carries rows over and leaves sequences behind: those of identity columns, and
that of calls. A rejected event keeps its number, also when its day of the outbox is dropped.

Locks: none.
Plan: scans of the catalogs.
"""

IS_SEQUENCE_BEHIND = "SELECT (SELECT {highest}) > COALESCE(pg_sequence_last_value('{name}'), 0)"
"""Return whether a sequence is behind the rows that it numbers.

Locks: none.
Plan: an index on the numbered column, or a scan.
"""

ADVANCE_SEQUENCE = "SELECT setval('{name}', GREATEST(nextval('{name}'), (SELECT {highest})))"
"""Set a sequence to the highest number of its rows.

Or to its next number, if that is higher. What other processes take between the two calls is given
again then, so none may number rows meanwhile.

Locks: the sequence in the mode ROW EXCLUSIVE, which keeps nobody from taking numbers.
Plan: an index on the numbered column, or a scan.
"""

STORE_CLUSTER = """
UPDATE pipeline.outbox_cluster
   SET system_identifier = (SELECT system_identifier FROM pg_control_system()),
       database_oid = (SELECT oid FROM pg_database WHERE datname = current_database()),
       kafka_cluster = NULL,
       reset_xid = CASE WHEN $1 THEN reset_xid ELSE pg_current_xact_id() END
"""
"""Store that the database is this one.

Locks: one row.
Plan: a scan of one row; the catalog of databases.
"""
