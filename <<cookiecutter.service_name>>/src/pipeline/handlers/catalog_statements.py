"""SQL that reads the catalog of the database: how it reacts to rows of handlers' tables.

`:names` are the names of these tables, which are a part of the text, so that PostgreSQL keeps its
plan, which takes longer than the query.
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
