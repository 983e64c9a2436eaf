"""SQL about a database as a whole: whose it is, whether it is migrated, and whether it is written.

Parameters are described where a statement is executed; a name in braces is put in there.
"""

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
