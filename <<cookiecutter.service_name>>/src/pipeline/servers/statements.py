"""SQL about a database as a whole: whose it is, whether it is migrated, and whether it is written.

Parameters are described where a statement is executed; a name in braces is put in there.
"""

from pipeline.schema import FIRST_LANE_OF_CALLS

IS_OURS = """EXISTS (
       SELECT FROM pipeline.outbox_cluster
         JOIN pg_control_system() AS cluster USING (system_identifier)
         JOIN pg_database ON pg_database.oid = database_oid
        WHERE datname = current_database())"""
"""SQL condition: the database is the one that was filled, or was adopted."""

COMPARE_CLUSTER = f"SELECT {IS_OURS}"
"""Return whether the database is the one that was filled, and has not to be adopted.

Locks: none.
Plan: a scan of one row; the catalog of databases.
"""

READ_BROKERS = "SELECT kafka_cluster FROM pipeline.outbox_cluster"
"""Return the id of the brokers with which the database is used.

Locks: none.
Plan: a scan of one row.
"""

STORE_BROKERS = """
UPDATE pipeline.outbox_cluster SET kafka_cluster = $1 WHERE kafka_cluster IS NULL
"""
"""Store the id of the brokers, if the database has none.

Locks: one row, if it has none.
Plan: a scan of one row.
"""

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

REMOVE_LIMITS = """
SELECT set_config(name, '0', true) FROM pg_settings
 WHERE name IN ('statement_timeout', 'lock_timeout', 'transaction_timeout')
"""
"""Remove limits of time from a transaction.

A role or database may have limits that are meant for shorter work.

Locks: none.
Plan: the server's settings.
"""

READ_SNAPSHOT_TO_ADOPT = "SELECT pg_current_snapshot()"
"""Return the snapshot from which on relays publish.

It is read before the transaction has an id, so that its own changes are not visible in it.

Locks: none.
Plan: reads no table.
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

CLOSE_DAYS_AGAIN = "UPDATE pipeline.outbox_closed SET xid = DEFAULT"
"""Give closed days the transaction id of this transaction.

The transactions that closed them were another cluster's; this one comes after all of them.

Locks: all rows of `outbox_closed`.
Plan: a scan of `outbox_closed`.
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

PROBE_WRITING = """
INSERT INTO pipeline.backlog (key, lane, order_key, consumer, topic, partition, "offset", timestamp,
                              headers, hash_version, reason, attempts, waited, holds)
VALUES ('\\x{key}', 0, '\\x{key}', '', '', 0, 0, 0, '[]', 0, 'probe', 0, 0, false);
DELETE FROM pipeline.backlog WHERE key = '\\x{key}'
"""
"""Insert a row into the backlog, and delete it.

One transaction, so that nobody else sees the row.

Locks: the new row.
Plan: `backlog_pkey`.
"""

READ_DATABASE = """
SELECT obj_description(to_regnamespace('pipeline'), 'pg_namespace') AS owner,
       current_setting('server_encoding') AS encoding, version() AS version,
       to_regclass('sys.iam_pg_role_mappings') IS NOT NULL AS is_dsql,
       to_regclass('pg_dist_partition') IS NOT NULL AS has_citus
"""
"""Return for which service the schema was created, and what kind of server this is.

The service is named by the schema's comment.

Locks: none.
Plan: the catalogs.
"""

FIND_DISTRIBUTED_TABLE = """
SELECT min(relname) FROM pg_dist_partition JOIN pg_class ON pg_class.oid = logicalrelid
 WHERE relnamespace = to_regnamespace('pipeline') AND (partmethod <> 'n' OR repmodel = 't')
"""
"""Return a table of the engine that Citus has distributed; executed only where there is Citus.

Local tables of Citus are not distributed.

Locks: none.
Plan: the catalogs.
"""

LIST_APPLIED_REVISIONS = "SELECT version_num FROM alembic_version"
"""Return the revisions that the database was migrated to.

Locks: none.
Plan: a scan of a few rows.
"""

FIND_WRONG_COLUMNS = """
SELECT format('%s has the default partition %s, beside which none can be attached or detached:'
              ' detach it and insert its rows again', partrelid::regclass, partdefid::regclass)
  FROM pg_partitioned_table JOIN pg_class ON pg_class.oid = partrelid
 WHERE relnamespace = to_regnamespace('pipeline') AND partdefid <> 0
 UNION ALL
(SELECT format('column pipeline.%s.%s is %s', relation, name,
              COALESCE(format_type(atttypid, atttypmod) || ' and not ' || type, 'missing'))
  FROM (SELECT one.key AS relation, field.key AS name, field.value AS type
          FROM json_each($1::text::json) AS one, json_each_text(one.value) AS field) AS needed
  LEFT JOIN pg_attribute ON attname = name AND NOT attisdropped
   AND attrelid = to_regclass('pipeline.' || relation)
 WHERE format_type(atttypid, atttypmod) IS DISTINCT FROM type
 ORDER BY relation, name)
"""
"""Return default partitions, and columns that are missing or of another type.

The catalogue is read because it needs no privileges of the tables.

Locks: none.
Plan: the catalogs.
"""

FIND_MISSING_COLUMNS = """
SELECT schema, name, array_agg(field ORDER BY place) AS fields
  FROM unnest($1::text[], $2::text[], $3::text[]) WITH ORDINALITY
       AS declared (schema, name, field, place)
 WHERE NOT EXISTS (
       SELECT FROM pg_namespace AS space
         JOIN pg_class AS relation ON relation.relnamespace = space.oid
         JOIN pg_attribute AS attribute ON attribute.attrelid = relation.oid
        WHERE nspname = COALESCE(schema, nspname) AND relname = name AND attname = field
          AND NOT attisdropped)
 GROUP BY schema, name ORDER BY min(place)
"""
"""Return the columns of the service's tables that are missing.

Reads the catalogue, which needs no privileges. A table without a schema is searched in all schemas:
the service's role may have another search path than this connection.

Locks: none.
Plan: the catalogs.
"""

FIND_SHARED_DEFAULTS = r"""
SELECT fullname, format('%s of %s (default %s)', attname, relname, expression)
  FROM unnest($1::text[], $2::text[], $3::text[]) AS declared (schema, name, fullname)
  JOIN pg_namespace AS space ON nspname = COALESCE(schema, nspname)
  JOIN pg_class AS relation ON relnamespace = space.oid AND relname = name
  JOIN pg_index ON indrelid = relation.oid
  JOIN pg_attribute ON attrelid = indrelid
   AND (attnum = ANY ((indkey::smallint[])[0:indnkeyatts - 1])
        OR indexprs IS NOT NULL AND EXISTS (
               SELECT FROM pg_depend
                WHERE classid = 'pg_class'::regclass AND objid = indexrelid
                  AND refclassid = classid AND refobjid = indrelid AND refobjsubid = attnum))
  LEFT JOIN pg_attrdef ON adrelid = indrelid AND adnum = attnum,
       LATERAL COALESCE($4::text::json -> fullname ->> attname::text, pg_get_expr(adbin, adrelid))
            AS expression
 WHERE indisunique
   AND expression ~* '\m((now|transaction_timestamp|txid_current|pg_current_xact_id)\('
                     '|current_(time|date)|localtime)'
 GROUP BY fullname, indrelid, relname, attnum, attname, expression ORDER BY 2
"""
"""Return the columns of unique keys whose default is the same for all rows of a transaction.

Messages of a transaction get the same value of such a default, of the database or SQLAlchemy's.
What an index of expressions depends on are the columns in them.

Locks: none.
Plan: the catalogs.
"""
