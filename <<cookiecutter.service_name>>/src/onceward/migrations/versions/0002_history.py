"""What is known of a message in the backlog is stored beside the reason for which it waits.

The database whose outbox it is, and its brokers, are stored beside the cluster. Rows that are due
are found by their consumer. Each row names the release that has written it, and markers have the
key of their record: both are found by an index. One process counts the backlog for all. Events that
wait for a topic are found by their shard. `throttle` holds what people have paused, `audit` what
they have changed. The table `inbox_filter` is used by processes of version 1.0.0 only.

Revision ID: pipeline_0002
Revises: pipeline_0001
"""

from alembic import op

from onceward.migrations import alter_in_turns
from onceward.migrations.first_outbox import SHARD

revision = "pipeline_0002"
down_revision = "pipeline_0001"
branch_labels = None
depends_on = None

# Of a database of version 1.0.0. Relays read the shard that is stored, so days may differ: events
# without a key stay in one shard on the days that it has, and on older servers. One of those days
# that is rejected has another shard, whose relay finds it as it finds redriven events.
_SET = f"ALTER COLUMN shard SET EXPRESSION AS ({SHARD})"


_RELEASED = ("inbox", "backlog", "scheduled", "outbox_rejected", "outbox")
"""Tables whose rows name their release, in the order in which transactions lock them."""

_KEYED = {"inbox": ("record_key", 500), "outbox": ("key", 300)}
"""Tables that are searched by a key: its column, and how many rows a range of 16 pages has."""


def _name_release(table: str) -> str:
    """Return statements after which a table's rows name the release that has written them.

    The release is a setting of the transaction, see `apply/limits.py`, which the default reads. Of
    a local setting that has ended an empty text is left.
    """
    return f"""
        ALTER TABLE pipeline.{table} ADD COLUMN release text;
        ALTER TABLE pipeline.{table} ALTER COLUMN release
          SET DEFAULT NULLIF(current_setting('pipeline.release', true), '');
    """


def _find_by_key(table: str) -> str:
    """Return statements that index a table by key, time and release; it must be locked.

    A message costs such an index next to nothing, and a search reads its summaries, which a round
    of retention writes, and the ranges that may have the key. Partitions that have rows get none:
    that would take as long as it takes to read them.
    """
    key, rows = _KEYED[table]
    index = (
        f"USING brin ({key} bytea_bloom_ops (n_distinct_per_range = {rows}), created_at, release)"
        " WITH (pages_per_range = 16)"
    )
    return f"""
        CREATE INDEX {table}_find_idx ON ONLY pipeline.{table} {index};
        DECLARE
            part text;
            has_rows boolean;
        BEGIN
            FOR part IN
                SELECT relname FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
                 WHERE inhparent = 'pipeline.{table}'::regclass AND NOT inhdetachpending
            LOOP
                EXECUTE format('SELECT EXISTS (SELECT FROM pipeline.%I)', part) INTO has_rows;
                IF NOT has_rows THEN
                    EXECUTE format('CREATE INDEX %I ON pipeline.%I {index}',
                                   part || '_find_idx', part);
                    EXECUTE format('ALTER INDEX pipeline.{table}_find_idx'
                                   ' ATTACH PARTITION pipeline.%I', part || '_find_idx');
                END IF;
            END LOOP;
        END;
    """


def upgrade() -> None:
    """Add tables and columns, and find due rows by consumer, markers and events by key.

    Processes of version 1.0.0 can go on. Consumers wait while the index of due rows is created, and
    then look at all that is due in a lane to find a lane. What relays read is altered last. From
    PostgreSQL 17 on events without a key are spread over the shards.
    """
    op.execute("""
        CREATE TABLE pipeline.throttle (
            kind       text NOT NULL,
            subject    text NOT NULL,
            topic      text NOT NULL DEFAULT '',
            record_key bytea NOT NULL DEFAULT '',
            per_second double precision NOT NULL
                CHECK (per_second = 0 OR per_second BETWEEN 0.001 AND 1e6),
            until      timestamptz,
            next_at    timestamptz,
            since      timestamptz NOT NULL DEFAULT clock_timestamp(),
            who        text NOT NULL,
            why        text NOT NULL,
            CONSTRAINT throttle_pkey PRIMARY KEY (kind, subject, topic, record_key)
        )
    """)
    op.execute("""
        CREATE TABLE pipeline.audit (
            id      bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT audit_pkey PRIMARY KEY,
            at      timestamptz NOT NULL DEFAULT clock_timestamp(),
            who     text NOT NULL,
            action  text NOT NULL,
            subject text NOT NULL,
            why     text
        )
    """)
    op.execute("""
        CREATE TABLE pipeline.backlog_count (
            singleton  boolean PRIMARY KEY CHECK (singleton),
            counted_at timestamptz NOT NULL DEFAULT '-infinity',
            counts     json NOT NULL DEFAULT '[]'
        )
    """)
    op.execute("""
        COMMENT ON TABLE pipeline.backlog_count IS
        'One row: when a process last counted the backlog, and what it has counted.'
    """)
    op.execute("INSERT INTO pipeline.backlog_count VALUES (true)")
    op.execute("""
        CREATE TABLE pipeline.release (
            name     text NOT NULL CONSTRAINT release_pkey PRIMARY KEY,
            first_at timestamptz NOT NULL DEFAULT clock_timestamp()
        )
    """)
    op.execute("""
        COMMENT ON TABLE pipeline.release IS 'When a consumer of each release was first started.'
    """)
    # As `new_marker`, which processes of version 1.0.0 use, with the key.
    op.execute("""
        CREATE TYPE pipeline.new_inbox_row AS (
            key bytea, hash bytea, consumer text, source text, id text, type text,
            topic text, partition integer, "offset" bigint, traceparent text, record_key bytea)
    """)
    alter_in_turns(
        "pipeline.backlog",
        f"""
        ALTER TABLE pipeline.inbox ADD COLUMN record_key bytea;
        {_name_release("inbox")}
        {_find_by_key("inbox")}
        ALTER TABLE pipeline.backlog
            ADD COLUMN deaths integer NOT NULL DEFAULT 0,
            ADD COLUMN losses integer NOT NULL DEFAULT 0,
            ADD COLUMN is_redriven boolean NOT NULL DEFAULT false;
        DROP INDEX pipeline.backlog_due_idx;
        CREATE INDEX backlog_due_idx ON pipeline.backlog (lane, consumer, due_at)
         WHERE due_at IS NOT NULL;
        {"".join(map(_name_release, _RELEASED[1:]))}
        {_find_by_key("outbox")}
        ALTER TABLE pipeline.outbox_cluster
            ADD COLUMN database_oid oid, ADD COLUMN kafka_cluster text;
        UPDATE pipeline.outbox_cluster SET database_oid = oid
          FROM pg_database WHERE datname = current_database();
        IF current_setting('server_version_num')::integer >= 170000 AND EXISTS (
            SELECT FROM pg_attrdef
             WHERE adrelid = 'pipeline.outbox'::regclass
               AND pg_get_expr(adbin, adrelid) LIKE '%COALESCE(key,%'
        ) THEN
            EXECUTE 'ALTER TABLE ONLY pipeline.outbox {_SET}';
            EXECUTE 'ALTER TABLE pipeline.outbox_rejected {_SET}';
        END IF;
        DROP INDEX pipeline.outbox_rejected_waiting_idx;
        CREATE INDEX outbox_rejected_waiting_idx ON pipeline.outbox_rejected (topic, shard, id)
         WHERE died_at IS NULL;
        """,
    )


def downgrade() -> None:
    """Remove the tables and the columns, and find due rows as before.

    Keys are not paused any more, and corrections that wait are lost, also those that have failed:
    they would stop their keys.
    """
    # Workers with a lane let rows wait for the first one of their key.
    op.execute("SELECT FROM pipeline.backlog_lane ORDER BY lane FOR NO KEY UPDATE")
    op.execute("""
        WITH correction AS (
            SELECT substr(subject, length('consumer ') + 1) AS consumer
              FROM pipeline.audit WHERE action = 'correct'
        ), ended AS (
            DELETE FROM pipeline.backlog
             WHERE topic = '(paused)' OR reason = 'correction'
                OR consumer IN (SELECT consumer FROM correction) AND (died_at IS NULL OR holds)
            RETURNING key, order_key
        )
        UPDATE pipeline.backlog SET due_at = clock_timestamp()
         WHERE order_key IN (SELECT order_key FROM ended) AND key NOT IN (SELECT key FROM ended)
           AND due_at IS NULL AND died_at IS NULL
    """)
    op.execute("DROP TABLE pipeline.throttle, pipeline.audit, pipeline.backlog_count")
    op.execute("""
        ALTER TABLE pipeline.outbox_cluster DROP COLUMN database_oid, DROP COLUMN kafka_cluster
    """)
    for table in _RELEASED:  # and with the columns the indexes that have them
        op.execute(f"ALTER TABLE pipeline.{table} DROP COLUMN release")
    op.execute("ALTER TABLE pipeline.inbox DROP COLUMN record_key")
    op.execute("DROP TYPE pipeline.new_inbox_row")
    op.execute("DROP TABLE pipeline.release")
    op.execute("""
        ALTER TABLE pipeline.backlog
            DROP COLUMN deaths, DROP COLUMN losses, DROP COLUMN is_redriven
    """)
    op.execute("DROP INDEX pipeline.backlog_due_idx")
    op.execute("""
        CREATE INDEX backlog_due_idx ON pipeline.backlog (lane, due_at) WHERE due_at IS NOT NULL
    """)
    op.execute("DROP INDEX pipeline.outbox_rejected_waiting_idx")
    op.execute("""
        CREATE INDEX outbox_rejected_waiting_idx ON pipeline.outbox_rejected (topic, id)
         WHERE died_at IS NULL
    """)
