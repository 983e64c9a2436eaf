"""SQL of handlers: what guards their sessions, the events that they stage, and the catalog.

Parameters are described where a statement is executed. `:names` are the names of handlers' tables,
which are a part of the text, so that PostgreSQL keeps its plan, which takes longer than the query.
"""

from .staged import COLUMNS, StagedEvent

AT_WORK = "at work"
"""Value of the setting `pipeline.handler` while handlers have sessions of their own: the database
then rejects COMMIT, see `pipeline.refuse_commit`."""


def _guard(setting: str) -> str:
    return f"""
INSERT INTO pipeline.guarded_transaction SELECT pg_current_xact_id() WHERE {setting} = '{AT_WORK}'
"""


GUARD_COMMIT = _guard("current_setting('pipeline.handler')")
"""Make the database reject COMMIT, in a transaction that moves no position.

It inserts nothing unless handlers have sessions of their own.

Locks: the new row. A deferred trigger deletes it in the COMMIT, so that each leaves a dead one.
Plan: finds no row.
"""

GUARD_WRITER = _guard(f"set_config('pipeline.handler', '{AT_WORK}', true)")
"""Begin the transaction of a writer, whose COMMIT the database rejects until `END_GUARD`.

Locks: the new row. A deferred trigger deletes it in the COMMIT, so that each leaves a dead one.
Plan: finds no row.
"""

END_GUARD = "SELECT set_config('pipeline.handler', '', true)"
"""Let the database accept COMMIT: the handlers have returned.

Locks: none.
Plan: reads no table.
"""

CHECK_GUARD = f"""
SELECT 1 / (COALESCE(current_setting('pipeline.handler', true), '') = '{AT_WORK}'
            AND current_setting('transaction_read_only') = 'off')::int
"""
"""Fail if the transaction is read-only, or not the one that the engine has begun.

A local setting ends with its transaction.

Locks: none.
Plan: reads no table.
"""

CHECK_DEFERRED = """
SAVEPOINT pipeline_check; SELECT set_config('pipeline.handler', '', true);
SET CONSTRAINTS ALL IMMEDIATE; ROLLBACK TO pipeline_check; RELEASE pipeline_check
"""
"""Fail as COMMIT would.

By the rollback constraints are deferred as before, and checked again.

Locks: what the constraints lock that are checked, such as rows to which foreign keys refer, until
the savepoint is rolled back.
Plan: those of the constraints.
"""

RESET_SESSION = """
RESET ALL; RESET SESSION AUTHORIZATION; RESET ROLE; CLOSE ALL; UNLISTEN *; DISCARD TEMP;
SELECT pg_advisory_unlock_all()
"""
"""Reset the session of a connection after a handler has used it.

Locks: none; it releases advisory locks of the session.
Plan: reads no table.
"""

INSERT_EVENTS = f"""
INSERT INTO pipeline.outbox ({COLUMNS})
SELECT {COLUMNS} FROM unnest($1::pipeline.new_scheduled[])
"""
"""Insert events into the outbox, in order.

No COPY: no time limit ends a session that waits for its data, and its locks would be held for as
long as its process is stopped. An array of rows is no slower.

Locks: the new rows.
Plan: finds no row.
"""

SCHEDULE_EVENTS = f"""
WITH moment AS MATERIALIZED (SELECT clock_timestamp() AS at)
INSERT INTO pipeline.scheduled (name, due_at, scheduled_at, {COLUMNS})
SELECT name, COALESCE(due_at, at + after), at + place * interval '1 microsecond', {COLUMNS}
  FROM moment, unnest($1::pipeline.new_scheduled[]) WITH ORDINALITY AS new (
           name, due_at, after, {COLUMNS}, place)
 ORDER BY name
    ON CONFLICT (name) DO UPDATE
   SET due_at = excluded.due_at, scheduled_at = excluded.scheduled_at,
       {", ".join(f"{name} = excluded.{name}" for name in (*StagedEvent._fields, "release"))}
"""
"""Store events that are due later, in place of those of the same names.

Sorted by name, so that two statements wait for each other without a deadlock; transactions of
several runs may deadlock, and are tried again. `scheduled_at`
keeps the order of staging among events that are due at the same time.

Locks: the rows, by name. It waits for transactions that store, cancel or move one of the same name.
Plan: `scheduled_pkey` finds those that exist.
"""

CANCEL_SCHEDULED = "DELETE FROM pipeline.scheduled WHERE name = ANY ($1) RETURNING name"
"""Delete scheduled events by their names.

Locks: the rows, in the order of the plan. A handler's transaction has locked them by name before; a
command, whose role may not lock rows, may deadlock with it, and is then repeated by its user.
It waits for transactions that store, cancel or move them.
Plan: `scheduled_pkey`, for each name.
"""

LOCK_SCHEDULED = "SELECT FROM pipeline.scheduled WHERE name = ANY ($1) ORDER BY name FOR UPDATE"
"""Lock scheduled events by name, before some are deleted and others stored, for the same order.

A name that is not stored yet has no row to be locked: two transactions of which one stores it anew
and cancels another may still deadlock, and are tried again.

Locks: the rows, by name. It waits for transactions that store, cancel or move them.
Plan: `scheduled_pkey`, for each name.
"""

READ_REACTIONS = """
WITH RECURSIVE of_name (name, id) AS (
    SELECT name, to_regclass(name)::oid FROM unnest((:names)::text[]) AS name
     UNION
    SELECT name, inhrelid FROM of_name JOIN pg_inherits ON inhparent = id
), part (name, id, kind, may_reject) AS (
    SELECT name, id, relkind, relkind = 'p' OR relispartition OR relrowsecurity
      FROM of_name JOIN pg_class ON oid = id
)
SELECT name,
       bool_or(may_reject
               OR EXISTS (SELECT FROM pg_constraint
                           WHERE conrelid = id AND contype IN ('c', 'f', 'x'))
               OR EXISTS (SELECT FROM pg_index
                           WHERE indrelid = id
                             AND (indisunique AND NOT indisprimary OR indexprs IS NOT NULL
                                  OR indpred IS NOT NULL))
               OR EXISTS (SELECT FROM pg_attribute
                            JOIN pg_type AS own ON own.oid = atttypid
                            LEFT JOIN pg_type AS of ON of.oid = own.typelem
                           WHERE attrelid = id AND (attgenerated = 's' OR own.typtype IN ('c', 'd')
                                                    OR of.typtype IN ('c', 'd')))) AS judges,
       bool_or(kind IN ('v', 'f') OR fires & 4 > 0 OR rules) AS to_insert,
       bool_or(kind IN ('v', 'f') OR fires & 24 > 0 OR rules OR cascades) AS to_update,
       ARRAY(SELECT DISTINCT attname::text
               FROM part AS one
               JOIN pg_attribute ON attrelid = one.id
              WHERE one.name = part.name AND attnotnull) AS not_null,
       ARRAY(SELECT DISTINCT CASE WHEN EXISTS (
                         SELECT FROM pg_constraint AS other
                          WHERE other.conname = its.conname AND NOT other.condeferred
                            AND other.connamespace = its.connamespace)
                    THEN 'ALL' ELSE format('%I.%I', nspname, conname) END
               FROM part AS one
               JOIN pg_trigger ON tgrelid = one.id
               JOIN pg_constraint AS its ON its.oid = tgconstraint
               JOIN pg_namespace ON pg_namespace.oid = connamespace
              WHERE one.name = part.name AND condeferred
                AND (its.conrelid = one.id OR NOT EXISTS (
                         SELECT FROM pg_constraint AS key
                          WHERE key.conrelid = one.id AND key.contype = 'p'
                            AND key.conkey @> its.confkey))
              ORDER BY 1) AS deferred
  FROM part,
       LATERAL (SELECT COALESCE(bit_or(tgtype), 0) AS fires
                  FROM pg_trigger
                 WHERE tgrelid = id AND NOT tgisinternal AND tgenabled <> 'D' AND tgtype & 1 > 0
               ) AS triggers,
       LATERAL (SELECT count(*) > 0 AS cascades
                  FROM pg_trigger JOIN pg_constraint AS key ON key.oid = tgconstraint
                 WHERE tgrelid = id AND confrelid = id AND confupdtype IN ('c', 'n', 'd')
                   AND NOT EXISTS (SELECT FROM pg_constraint AS its
                                    WHERE its.conrelid = id AND its.contype = 'p'
                                      AND its.conkey @> key.confkey)) AS keys,
       LATERAL (SELECT count(*) > 0 AS rules
                  FROM pg_rewrite
                 WHERE ev_class = id AND ev_type <> '1') AS rewrites
 GROUP BY name
"""
"""Return how the database reacts to rows of each table.

A table has the constraints and triggers of its partitions and children, too. In `tgtype`, 1 is a
trigger for each row, 4 is INSERT, 8 is DELETE, 16 is UPDATE. A view has a rule for SELECT ('1'). A
foreign key that refers to a unique column, and changes its rows with that, has a trigger here, too.
SET CONSTRAINTS goes by name: it fails if one of that name is not deferrable.

Locks: none.
Plan: indexes of the catalogs.
"""

READ_CATALOG_STATE = """
WITH RECURSIVE one (id) AS (
    SELECT to_regclass(name)::oid FROM unnest((:names)::text[]) AS name
     UNION
    SELECT inhrelid FROM one JOIN pg_inherits ON inhparent = id
), part (ids) AS (
    SELECT array_agg(id) FROM one
)
SELECT hashtextextended(string_agg(concat_ws(' ', id, state), ',' ORDER BY id, state::text), 0)
  FROM (SELECT id, NULL FROM one
         UNION ALL
        SELECT attrelid, pg_attribute.xmin
          FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
         WHERE attrelid = ANY ((SELECT ids FROM part)::oid[]) AND NOT relispartition
         UNION ALL
        SELECT oid, xmin FROM pg_class WHERE oid = ANY ((SELECT ids FROM part)::oid[])
         UNION ALL
        SELECT indrelid, xmin FROM pg_index WHERE indrelid = ANY ((SELECT ids FROM part)::oid[])
         UNION ALL
        SELECT conrelid, xmin
          FROM pg_constraint WHERE conrelid = ANY ((SELECT ids FROM part)::oid[])
         UNION ALL
        SELECT other.oid, other.xmin
          FROM pg_trigger
          JOIN pg_constraint AS its ON its.oid = tgconstraint
          JOIN pg_constraint AS other ON other.conname = its.conname
           AND other.connamespace = its.connamespace
         WHERE tgrelid = ANY ((SELECT ids FROM part)::oid[]) AND tginitdeferred
         UNION ALL
        SELECT tgrelid, xmin FROM pg_trigger WHERE tgrelid = ANY ((SELECT ids FROM part)::oid[])
         UNION ALL
        SELECT ev_class, xmin FROM pg_rewrite WHERE ev_class = ANY ((SELECT ids FROM part)::oid[])
         UNION ALL
        SELECT inhparent, xmin
          FROM pg_inherits WHERE inhparent = ANY ((SELECT ids FROM part)::oid[])
       ) AS states (id, state)
"""
"""Return a number that changes with the definition of one of the tables.

Each of these rows is another one after a change.

Locks: none.
Plan: indexes of the catalogs.
"""
