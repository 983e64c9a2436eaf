"""The engine's tables.

Revision ID: pipeline_0001
Revises:
"""

from alembic import op

revision = "pipeline_0001"
down_revision = None
branch_labels = ("pipeline",)
depends_on = None

_REFUSE_COMMIT = """
    CREATE CONSTRAINT TRIGGER refuse_commit AFTER UPDATE ON pipeline.{}
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (current_setting('pipeline.handler', true) = 'at work')
    EXECUTE FUNCTION pipeline.refuse_commit()"""


def upgrade() -> None:
    """Create the schema `pipeline`."""
    op.execute("CREATE SCHEMA pipeline")

    op.execute("""
        CREATE TABLE pipeline.position (
            consumer_group text NOT NULL,
            topic          text NOT NULL,
            partition      integer NOT NULL,
            next_offset    bigint NOT NULL,
            anchor_offset  bigint,
            anchor_time    timestamptz,
            anchor_hash    bytea,
            starts         integer NOT NULL DEFAULT 0,
            moved_at       timestamptz NOT NULL DEFAULT now(),
            duplicates     bigint NOT NULL DEFAULT 0,
            CONSTRAINT position_pkey PRIMARY KEY (consumer_group, topic, partition)
        )""")
    op.execute("""
        COMMENT ON COLUMN pipeline.position.anchor_offset IS
        'the last record before the position'""")
    op.execute("""
        COMMENT ON COLUMN pipeline.position.anchor_hash IS
        'tells whether the topic still holds that record'""")
    op.execute("""
        COMMENT ON COLUMN pipeline.position.starts IS
        'processes that began here and have neither moved it nor ended in order'""")
    op.execute("""
        COMMENT ON COLUMN pipeline.position.duplicates IS
        'messages that came here and had come before'""")
    op.execute("""
        COMMENT ON TABLE pipeline.position IS
        'The offset that each partition goes on from; moved by the consume transaction itself.'""")

    op.execute("""
        CREATE FUNCTION pipeline.refuse_commit() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF current_setting('pipeline.handler', true) = 'at work' THEN
                RAISE invalid_transaction_termination
                USING MESSAGE = 'a handler has sent COMMIT or SET CONSTRAINTS ALL: '
                                'the engine commits the whole batch';
            END IF;
            RETURN NULL;
        END $$""")
    op.execute("""
        COMMENT ON FUNCTION pipeline.refuse_commit IS
        'Fails the COMMIT of a transaction while a handler is at work in it.'""")
    op.execute(_REFUSE_COMMIT.format("position"))

    op.execute("""
        CREATE TABLE pipeline.inbox_generation (
            singleton boolean PRIMARY KEY CHECK (singleton),
            current   integer NOT NULL,
            oldest    integer NOT NULL,
            opened_at timestamptz NOT NULL,
            since     timestamptz,
            opening   uuid NOT NULL DEFAULT gen_random_uuid()
        )""")
    op.execute("""
        COMMENT ON COLUMN pipeline.inbox_generation.since IS
        'what is older is not remembered; null: all is'""")
    op.execute("""
        COMMENT ON COLUMN pipeline.inbox_generation.opening IS
        'names the rotation that opened the current one'""")
    op.execute("""
        COMMENT ON TABLE pipeline.inbox_generation IS
        'One row: which generation takes new markers, and the oldest still remembered.'""")
    op.execute("INSERT INTO pipeline.inbox_generation VALUES (true, 1, 1, clock_timestamp())")

    op.execute("""
        CREATE TABLE pipeline.inbox_closed (
            generation integer PRIMARY KEY,
            closed_at  timestamptz NOT NULL
        )""")
    op.execute("""
        COMMENT ON TABLE pipeline.inbox_closed IS
        'When each closed generation that is still remembered was closed.'""")

    op.execute("""
        CREATE TABLE pipeline.inbox_consumer (
            consumer   text PRIMARY KEY,
            generation integer NOT NULL
        )""")
    op.execute("""
        COMMENT ON COLUMN pipeline.inbox_consumer.generation IS
        'its oldest marker is in this one or a later one'""")
    op.execute("""
        COMMENT ON TABLE pipeline.inbox_consumer IS
        'Since which generation each consumer has taken messages.'""")

    op.execute("""
        CREATE TABLE pipeline.inbox (
            generation   integer NOT NULL,
            key          bytea NOT NULL,
            hash         bytea NOT NULL,
            hash_version smallint NOT NULL,
            consumer     text NOT NULL,
            source       text NOT NULL,
            id           text NOT NULL,
            type         text NOT NULL,
            topic        text NOT NULL,
            partition    integer NOT NULL,
            "offset"     bigint NOT NULL,
            traceparent  text,
            result       json,
            xid          xid8 NOT NULL DEFAULT pg_current_xact_id(),
            created_at   timestamptz NOT NULL DEFAULT now(),
            CONSTRAINT inbox_pkey PRIMARY KEY (generation, key)
        ) PARTITION BY LIST (generation)""")
    op.execute("""
        CREATE TYPE pipeline.new_marker AS (
            key bytea, hash bytea, consumer text, source text, id text, type text,
            topic text, partition integer, "offset" bigint, traceparent text)""")
    op.execute("COMMENT ON TABLE pipeline.inbox IS 'A marker for every event that took effect.'")
    op.execute("COMMENT ON COLUMN pipeline.inbox.key IS 'hash of (consumer, source, id)'")
    op.execute("COMMENT ON COLUMN pipeline.inbox.hash IS 'hash of type and data'")
    op.execute("COMMENT ON COLUMN pipeline.inbox.result IS 'what the handler returned'")

    op.execute("""
        CREATE TABLE pipeline.inbox_filter (
            first_generation integer PRIMARY KEY,
            last_generation  integer NOT NULL,
            keys             bigint NOT NULL,
            capacity         bigint NOT NULL,
            digest           bytea NOT NULL,
            format           text NOT NULL,
            bits             bytea NOT NULL
        )""")
    # To compress megabytes of them takes long and gains little.
    op.execute("ALTER TABLE pipeline.inbox_filter ALTER COLUMN bits SET STORAGE EXTERNAL")
    op.execute("COMMENT ON COLUMN pipeline.inbox_filter.format IS 'which bits a key sets'")
    op.execute("COMMENT ON COLUMN pipeline.inbox_filter.keys IS 'how many were added'")
    op.execute("""
        COMMENT ON COLUMN pipeline.inbox_filter.capacity IS 'full with so many; 0: too many'""")
    op.execute("COMMENT ON COLUMN pipeline.inbox_filter.digest IS 'of all of the row'")
    op.execute("""
        COMMENT ON TABLE pipeline.inbox_filter IS
        'Bloom filters of the keys of closed generations; may be deleted at any time.'""")

    op.execute("""
        CREATE TABLE pipeline.backlog (
            key             bytea NOT NULL CONSTRAINT backlog_pkey PRIMARY KEY,
            lane            smallint NOT NULL,
            order_key       bytea NOT NULL,
            sequence        bigint NOT NULL DEFAULT 0,
            consumer        text NOT NULL,
            topic           text NOT NULL,
            partition       integer NOT NULL,
            "offset"        bigint NOT NULL,
            timestamp       bigint NOT NULL,
            record_key      bytea,
            value           bytea,
            headers         text NOT NULL,
            source          text,
            id              text,
            type            text,
            hash            bytea,
            hash_version    smallint NOT NULL,
            remembered_hash bytea,
            traceparent     text,
            received_at     timestamptz NOT NULL DEFAULT now(),
            reason          text NOT NULL,
            attempts        integer NOT NULL,
            waited          double precision NOT NULL,
            due_at          timestamptz,
            died_at         timestamptz,
            holds           boolean NOT NULL,
            error           text,
            traceback       text,
            discarded_at    timestamptz,
            discarded_by    text,
            discarded_why   text
        )""")
    op.execute("CREATE SEQUENCE pipeline.backlog_call_seq")
    op.execute("""
        CREATE TYPE pipeline.new_backlog_row AS (
            key bytea, lane smallint, order_key bytea, sequence bigint, consumer text,
            topic text, partition integer, "offset" bigint, timestamp bigint,
            record_key bytea, value bytea, headers text, source text, id text, type text,
            hash bytea, remembered_hash bytea, traceparent text, reason text, attempts integer,
            waited double precision, due_in double precision, is_dead boolean, holds boolean,
            error text, traceback text)""")
    op.execute("""
        CREATE INDEX backlog_order_idx
            ON pipeline.backlog (order_key, sequence, partition, "offset")
         WHERE died_at IS NULL OR holds""")
    op.execute("""
        CREATE INDEX backlog_due_idx ON pipeline.backlog (lane, due_at) WHERE due_at IS NOT NULL""")
    op.execute("""
        CREATE INDEX backlog_due_key_idx ON pipeline.backlog (order_key)
         WHERE due_at IS NOT NULL""")
    op.execute("""
        CREATE INDEX backlog_died_idx ON pipeline.backlog (died_at) WHERE died_at IS NOT NULL""")
    op.execute("""
        CREATE INDEX backlog_dead_idx
            ON pipeline.backlog (lane, order_key, sequence, partition, "offset")
         WHERE died_at IS NOT NULL AND discarded_at IS NULL""")
    op.execute("""
        CREATE INDEX backlog_discarded_idx ON pipeline.backlog (discarded_at)
         WHERE discarded_at IS NOT NULL""")
    op.execute("""
        COMMENT ON TABLE pipeline.backlog IS
        'Messages to be handled later, in the order of their key, and dead letters.'""")
    for column, comment in (
        ("key", "the marker''s, where there is an identity"),
        ("order_key", "hash of (consumer, topic, key)"),
        ("sequence", "0: by partition and offset"),
        ("consumer", "empty: a record that is nobody''s yet"),
        ("timestamp", "the record''s, in milliseconds"),
        ("headers", "JSON pairs; a byte is a character"),
        ("hash", "hash of type and data"),
        ("remembered_hash", "the other payload''s, of an identity mismatch"),
        ("waited", "seconds its policy has let it wait"),
        ("due_at", "null: behind another, or dead"),
        ("died_at", "since when it is a dead letter"),
        ("holds", "dead, and its key waits for a person"),
    ):
        op.execute(f"COMMENT ON COLUMN pipeline.backlog.{column} IS '{comment}'")

    op.execute("""
        CREATE TABLE pipeline.backlog_lane (
            lane        smallint NOT NULL CONSTRAINT backlog_lane_pkey PRIMARY KEY,
            token       bigint NOT NULL DEFAULT 0,
            owner       text,
            lease_until timestamptz,
            starts      integer NOT NULL DEFAULT 0,
            released_at timestamptz NOT NULL DEFAULT now()
        ) WITH (fillfactor = 50)""")
    op.execute("""
        COMMENT ON TABLE pipeline.backlog_lane IS
        'Shares of the backlog''s order keys, and which worker has each.'""")
    op.execute("""
        COMMENT ON COLUMN pipeline.backlog_lane.starts IS
        'workers that began and have not given it back'""")
    op.execute("""
        INSERT INTO pipeline.backlog_lane (lane)
        SELECT lane FROM generate_series(0, 95) AS lane""")
    op.execute(_REFUSE_COMMIT.format("backlog_lane"))

    op.execute("""
        CREATE TABLE pipeline.outbox (
            id           bigint GENERATED ALWAYS AS IDENTITY,
            xid          xid8 NOT NULL DEFAULT pg_current_xact_id(),
            shard        smallint NOT NULL GENERATED ALWAYS AS (
                             (get_byte(sha256(COALESCE(key, '\\x'::bytea)), 0) % 64)::smallint
                         ) STORED,
            created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
            topic        text NOT NULL,
            key          bytea,
            payload      bytea,
            event_id     text NOT NULL,
            source       text NOT NULL,
            type         text NOT NULL,
            subject      text,
            sequence     bigint,
            content_type text NOT NULL,
            traceparent  text,
            tracestate   text,
            baggage      text,
            headers      text,
            dataref      text,
            datalength   bigint,
            datachecksum text
        ) PARTITION BY RANGE (created_at)""")
    op.execute("CREATE INDEX outbox_id_idx ON pipeline.outbox (id)")
    op.execute("CREATE INDEX outbox_xid_idx ON pipeline.outbox (xid)")
    op.execute("""
        COMMENT ON TABLE pipeline.outbox IS
        'Events of committed transactions; append-only, published by the relay.'""")

    op.execute("""
        CREATE TABLE pipeline.scheduled (
            name         text NOT NULL CONSTRAINT scheduled_pkey PRIMARY KEY,
            due_at       timestamptz NOT NULL,
            scheduled_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            topic        text NOT NULL,
            key          bytea,
            payload      bytea,
            event_id     text NOT NULL,
            source       text NOT NULL,
            type         text NOT NULL,
            subject      text,
            sequence     bigint,
            content_type text NOT NULL,
            traceparent  text,
            tracestate   text,
            baggage      text,
            headers      text,
            dataref      text,
            datalength   bigint,
            datachecksum text
        )""")
    op.execute("""
        CREATE INDEX scheduled_due_idx ON pipeline.scheduled (due_at, scheduled_at, name)""")
    op.execute("""
        CREATE TYPE pipeline.new_scheduled AS (
            name text, due_at timestamptz, after interval, topic text, key bytea, payload bytea,
            event_id text, source text, type text, subject text, sequence bigint,
            content_type text, traceparent text, tracestate text, baggage text, headers text,
            dataref text, datalength bigint, datachecksum text)""")
    op.execute("""
        COMMENT ON TABLE pipeline.scheduled IS
        'Events that are put into the outbox when they are due.'""")

    op.execute("""
        CREATE TABLE pipeline.claim (
            name         text NOT NULL CONSTRAINT claim_pkey PRIMARY KEY,
            event_id     text NOT NULL,
            published_at timestamptz
        )""")
    op.execute("CREATE INDEX claim_published_idx ON pipeline.claim (published_at)")
    op.execute("""
        COMMENT ON TABLE pipeline.claim IS
        'Payloads in the object store; what is there and not here is nobody''s.'""")
    op.execute("""
        COMMENT ON COLUMN pipeline.claim.name IS 'of the object, below the store''s URL'""")
    op.execute("""
        COMMENT ON COLUMN pipeline.claim.published_at IS
        'since when its event is known to wait for nobody here'""")

    op.execute("""
        CREATE TABLE pipeline.outbox_closed (
            day date PRIMARY KEY,
            xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
            is_published boolean NOT NULL DEFAULT false,
            not_archived text,
            goes_unarchived boolean NOT NULL DEFAULT false
        )""")
    op.execute("""
        COMMENT ON COLUMN pipeline.outbox_closed.goes_unarchived IS
        'a person has decided that'""")
    op.execute("""
        COMMENT ON COLUMN pipeline.outbox_closed.not_archived IS
        'why that failed the last time'""")
    op.execute("""
        COMMENT ON COLUMN pipeline.outbox_closed.is_published IS
        'found before it was detached; after that nobody could tell'""")
    op.execute("""
        COMMENT ON COLUMN pipeline.outbox_closed.xid IS
        'who has put an event into it began before this transaction'""")
    op.execute("""
        COMMENT ON TABLE pipeline.outbox_closed IS
        'Days of the outbox to which nobody adds an event any more.'""")

    op.execute("""
        CREATE TABLE pipeline.outbox_unsent (
            id            bigint NOT NULL CONSTRAINT outbox_unsent_pkey PRIMARY KEY,
            shard         smallint NOT NULL GENERATED ALWAYS AS (
                              (get_byte(sha256(COALESCE(key, '\\x'::bytea)), 0) % 64)::smallint
                          ) STORED,
            created_at    timestamptz NOT NULL,
            topic         text NOT NULL,
            key           bytea,
            payload       bytea,
            event_id      text NOT NULL,
            source        text NOT NULL,
            type          text NOT NULL,
            subject       text,
            sequence      bigint,
            content_type  text NOT NULL,
            traceparent   text,
            tracestate    text,
            baggage       text,
            headers       text,
            dataref       text,
            datalength    bigint,
            datachecksum  text,
            queue         bytea NOT NULL,
            parked_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
            attempts      integer NOT NULL,
            reason        text,
            error         text,
            died_at       timestamptz,
            discarded_at  timestamptz,
            discarded_by  text,
            discarded_why text
        )""")
    op.execute("""
        CREATE INDEX outbox_unsent_queue_idx ON pipeline.outbox_unsent (topic, queue, id)
         WHERE died_at IS NULL""")
    op.execute("""
        CREATE INDEX outbox_unsent_dead_idx ON pipeline.outbox_unsent (shard, id)
         WHERE died_at IS NOT NULL AND discarded_at IS NULL""")
    op.execute("""
        CREATE INDEX outbox_unsent_discarded_idx ON pipeline.outbox_unsent (discarded_at)
         WHERE discarded_at IS NOT NULL""")
    op.execute("""
        COMMENT ON TABLE pipeline.outbox_unsent IS
        'The outbound backlog: events that Kafka refuses, and those that wait behind them.'""")
    for column, comment in {
        "queue": "who waits for it: see unsent.py",
        "attempts": "how often it was refused itself",
        "reason": "null: it waits behind another",
        "died_at": "it is a dead letter since then",
    }.items():
        op.execute(f"COMMENT ON COLUMN pipeline.outbox_unsent.{column} IS '{comment}'")

    for table in ("outbox", "scheduled", "outbox_unsent"):
        op.execute(f"""
            COMMENT ON COLUMN pipeline.{table}.sequence IS
            'version of the aggregate after this event'""")
        op.execute(f"""
            COMMENT ON COLUMN pipeline.{table}.headers IS
            'of a dead letter: all of them, as JSON'""")
        for column, comment in {
            "dataref": "where the payload is, if it is not here",
            "datalength": "bytes of the payload that is elsewhere",
            "datachecksum": "its SHA-256, in hexadecimal digits",
        }.items():
            op.execute(f"COMMENT ON COLUMN pipeline.{table}.{column} IS '{comment}'")

    op.execute("""
        CREATE TABLE pipeline.outbox_cursor (
            shard       smallint NOT NULL CONSTRAINT outbox_cursor_pkey PRIMARY KEY,
            seen        pg_snapshot NOT NULL,
            target      pg_snapshot,
            last_id     bigint NOT NULL DEFAULT 0,
            high_id     bigint NOT NULL DEFAULT 0,
            token       bigint NOT NULL DEFAULT 0,
            owner       text,
            lease_until timestamptz
        ) WITH (fillfactor = 50)""")
    op.execute("""
        COMMENT ON TABLE pipeline.outbox_cursor IS
        'How far each shard of the outbox is published, and which relay owns it.'""")
    op.execute("""
        COMMENT ON COLUMN pipeline.outbox_cursor.seen IS
        'all that is visible in it is published'""")
    op.execute("""
        COMMENT ON COLUMN pipeline.outbox_cursor.target IS
        'set while a window larger than a page is published'""")
    op.execute("""
        INSERT INTO pipeline.outbox_cursor (shard, seen)
        SELECT shard, pg_current_snapshot() FROM generate_series(0, 63) AS shard""")

    op.execute("""
        CREATE TABLE pipeline.outbox_epoch (
            singleton         boolean PRIMARY KEY CHECK (singleton),
            system_identifier bigint,
            reset_xid         xid8
        )""")
    op.execute("""
        COMMENT ON TABLE pipeline.outbox_epoch IS
        'One row: the database cluster whose transaction ids outbox and cursor hold.'""")
    op.execute("""
        COMMENT ON COLUMN pipeline.outbox_epoch.system_identifier IS
        'null while the outbox is reset'""")
    op.execute("""
        COMMENT ON COLUMN pipeline.outbox_epoch.reset_xid IS
        'the transaction that older rows of the outbox carry'""")
    op.execute("""
        INSERT INTO pipeline.outbox_epoch (singleton, system_identifier)
        SELECT true, system_identifier FROM pg_control_system()""")

    op.execute("""
        CREATE TABLE pipeline.outbox_relay (
            owner       text NOT NULL CONSTRAINT outbox_relay_pkey PRIMARY KEY,
            lease_until timestamptz NOT NULL,
            published   bigint NOT NULL DEFAULT 0
        )""")
    op.execute("""
        COMMENT ON TABLE pipeline.outbox_relay IS
        'The relays that are alive; they share the shards evenly.'""")
    op.execute("""
        COMMENT ON COLUMN pipeline.outbox_relay.published IS
        'events that Kafka has taken from it since it was started, as it said last'""")

    op.execute("""
        CREATE TABLE pipeline.retention_lease (
            singleton   boolean PRIMARY KEY CHECK (singleton),
            owner       text,
            lease_until timestamptz,
            finished_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            held        integer NOT NULL DEFAULT 0,
            archives    boolean NOT NULL DEFAULT false
        )""")
    op.execute("""
        COMMENT ON COLUMN pipeline.retention_lease.archives IS
        'days are archived, by whoever knows where; nobody else drops them'""")
    op.execute("""
        COMMENT ON TABLE pipeline.retention_lease IS
        'One row: the process that does what one does for all, as to drop what is too old.'""")
    op.execute("""
        COMMENT ON COLUMN pipeline.retention_lease.finished_at IS
        'when that was done the last time, to its end'""")
    op.execute("""
        COMMENT ON COLUMN pipeline.retention_lease.held IS
        'partitions that were due then, and needed by somebody'""")
    op.execute("INSERT INTO pipeline.retention_lease VALUES (true)")


def downgrade() -> None:
    """Drop everything the engine remembers."""
    op.execute("DROP SCHEMA pipeline CASCADE")
