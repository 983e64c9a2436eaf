"""SQL of a proof, in its own databases: gates, the order of commits, what is there."""

CONSUME_GATE, RELAY_GATE = 0x1B0F0, 0x1B0F1
"""Advisory locks: shared by each transaction at its end, exclusive while faults wait for one."""

WATCH = f"""
CREATE SCHEMA prove;
CREATE SEQUENCE prove.relayed;
CREATE TABLE prove.committed (
    n   bigint GENERATED ALWAYS AS IDENTITY,
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    key bytea NOT NULL
);
CREATE FUNCTION prove.commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared({CONSUME_GATE});
    INSERT INTO prove.committed (key) VALUES (NEW.key);
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER prove AFTER INSERT ON pipeline.inbox
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION prove.commit();
CREATE CONSTRAINT TRIGGER prove AFTER INSERT ON pipeline.backlog
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.died_at IS NOT NULL)
EXECUTE FUNCTION prove.commit();
CREATE CONSTRAINT TRIGGER prove_death AFTER UPDATE ON pipeline.backlog
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (OLD.died_at IS NULL AND NEW.died_at IS NOT NULL)
EXECUTE FUNCTION prove.commit();
CREATE FUNCTION prove.relay() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared({RELAY_GATE}), nextval('prove.relayed');
    RETURN NULL;
END $$;
CREATE TRIGGER prove AFTER UPDATE ON pipeline.outbox_cursor
FOR EACH ROW WHEN (OLD.last_id <> NEW.last_id OR OLD.seen::text <> NEW.seen::text)
EXECUTE FUNCTION prove.relay();
"""
"""Let transactions pass a gate and number them, when all but their commit is done.

The triggers are deferred, so they fire in the COMMIT, while the transaction still has all its
locks: of two that lock the same row, the second can't have a number before the first has ended. So
the numbers have the order of the commits wherever that can make a difference.
"""

CLOSE_GATE, OPEN_GATE = "SELECT pg_advisory_lock($1)", "SELECT pg_advisory_unlock($1)"

WAITING = """
SELECT pid FROM pg_locks JOIN pg_database AS its ON its.oid = database
 WHERE locktype = 'advisory' AND objid::bigint = $1 AND NOT granted AND datname = current_database()
"""
"""Return the sessions that wait at a gate, each with an open transaction."""
OPEN = """
SELECT count(*) FROM pg_stat_activity
 WHERE datname = current_database() AND wait_event_type = 'Lock' AND backend_xid IS NOT NULL
"""
"""Count open transactions that wait, at a gate or for a lock of one that waits there."""
END_SESSION = "SELECT pg_terminate_backend($1)"

PROGRESS = """
SELECT (SELECT COALESCE(max(n), 0) FROM prove.committed) AS consume,
       COALESCE(pg_sequence_last_value('prove.relayed'), 0) AS relay
"""

# A dead letter is also in the order: its handler saw what was committed by then.
COMMITTED = """
WITH place AS (SELECT xid, max(n) AS n FROM prove.committed GROUP BY xid)
SELECT n, consumer, topic, partition, "offset", source, id, type
  FROM pipeline.inbox JOIN place USING (xid)
 UNION ALL
SELECT (SELECT max(place.n) FROM prove.committed AS its JOIN place USING (xid)
         WHERE its.key = backlog.key), consumer, topic, partition, "offset", source, id, ''
  FROM pipeline.backlog
 WHERE died_at IS NOT NULL
"""

LEFT = """
SELECT count(*) FILTER (WHERE due_at <= clock_timestamp()) AS due,
       count(*) FILTER (WHERE due_at > clock_timestamp()) AS later,
       (SELECT count(*) FROM pipeline.scheduled) AS scheduled
  FROM pipeline.backlog
"""
POSITIONS = """
SELECT topic, partition, next_offset FROM pipeline.position WHERE consumer_group = $1
"""
SCHEDULED = "SELECT event_id FROM pipeline.scheduled"
OUTBOX = "SELECT * FROM pipeline.outbox WHERE content_type <> '' ORDER BY id"

LETTERS = """
SELECT consumer, topic, source, id, partition, "offset", reason, error,
       died_at IS NOT NULL AS is_dead
  FROM pipeline.backlog WHERE discarded_at IS NULL
"""

# Columns that a sequence fills, and those that refer to them, come out otherwise in each run.
TABLES = """
WITH filled AS (
    SELECT attrelid, attnum, attname FROM pg_attribute
      LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
     WHERE attnum > 0 AND NOT attisdropped
       AND (attidentity <> '' OR pg_get_expr(adbin, adrelid) LIKE 'nextval(%')
), referring AS (
    SELECT conrelid, mine FROM pg_constraint, unnest(conkey, confkey) AS pair (mine, its)
      JOIN filled ON attnum = its
     WHERE contype = 'f' AND attrelid = confrelid
)
SELECT nspname, relname, format('%I.%I', nspname, relname) AS name,
       ARRAY(SELECT attname FROM pg_index JOIN pg_attribute
                 ON attrelid = indrelid AND attnum = ANY (indkey)
              WHERE indrelid = c.oid AND indisprimary)::text[] AS key,
       ARRAY(SELECT attname FROM pg_attribute AS one
              WHERE one.attrelid = c.oid
                AND ((c.oid, attnum) IN (SELECT attrelid, attnum FROM filled)
                     OR (c.oid, attnum) IN (TABLE referring)))::text[] AS filled
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = relnamespace
 WHERE relkind IN ('r', 'p') AND NOT relispartition
   AND nspname NOT IN ('pg_catalog', 'information_schema', 'pipeline', 'prove')
   AND relname <> 'alembic_version'
   AND NOT EXISTS (SELECT FROM pg_depend WHERE objid = c.oid AND deptype = 'e')
 ORDER BY name
"""
