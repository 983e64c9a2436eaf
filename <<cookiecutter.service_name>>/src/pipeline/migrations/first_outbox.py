"""SQL of the first revision: outbox, relay and retention."""

_EVENT = """\
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
    datachecksum text"""

_EVENT_COMMENTS = """\
COMMENT ON COLUMN pipeline.{0}.sequence IS 'version of the aggregate after this event';
COMMENT ON COLUMN pipeline.{0}.headers IS 'of a dead letter: all headers, as JSON';
COMMENT ON COLUMN pipeline.{0}.dataref IS 'URL of the payload, where it is in the object store';
COMMENT ON COLUMN pipeline.{0}.datalength IS 'size of that payload in bytes';
COMMENT ON COLUMN pipeline.{0}.datachecksum IS 'SHA-256 of that payload, in hexadecimal digits';"""

_SHARD = """\
    shard        smallint NOT NULL GENERATED ALWAYS AS (
                     (get_byte(sha256(COALESCE(key, '\\x'::bytea)), 0) % 64)::smallint
                 ) STORED"""

# The sequence of `id` keeps CACHE 1: cached values would break the order of a key.
OUTBOX = f"""
CREATE TABLE pipeline.outbox (
    id           bigint GENERATED ALWAYS AS IDENTITY,
    xid          xid8 NOT NULL DEFAULT pg_current_xact_id(),
{_SHARD},
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
{_EVENT}
) PARTITION BY RANGE (created_at);
COMMENT ON TABLE pipeline.outbox IS
'Events of committed transactions; append-only, published by the relay.';
{_EVENT_COMMENTS.format("outbox")}
CREATE INDEX outbox_id_idx ON pipeline.outbox (id);
CREATE INDEX outbox_xid_idx ON pipeline.outbox (xid);
"""

SCHEDULED = f"""
CREATE TABLE pipeline.scheduled (
    name         text NOT NULL CONSTRAINT scheduled_pkey PRIMARY KEY,
    due_at       timestamptz NOT NULL,
    scheduled_at timestamptz NOT NULL DEFAULT clock_timestamp(),
{_EVENT}
);
COMMENT ON TABLE pipeline.scheduled IS 'Events that are put into the outbox when they are due.';
{_EVENT_COMMENTS.format("scheduled")}
CREATE INDEX scheduled_due_idx ON pipeline.scheduled (due_at, scheduled_at, name);
CREATE TYPE pipeline.new_scheduled AS (
    name text, due_at timestamptz, after interval, topic text, key bytea, payload bytea,
    event_id text, source text, type text, subject text, sequence bigint,
    content_type text, traceparent text, tracestate text, baggage text, headers text,
    dataref text, datalength bigint, datachecksum text);
"""

CLAIM = """
CREATE TABLE pipeline.claim (
    name         text NOT NULL CONSTRAINT claim_pkey PRIMARY KEY,
    event_id     text NOT NULL,
    published_at timestamptz
);
COMMENT ON TABLE pipeline.claim IS
'Payloads in the object store; an object without a row here is not needed.';
COMMENT ON COLUMN pipeline.claim.name IS 'name of the object, relative to the URL of the store';
COMMENT ON COLUMN pipeline.claim.published_at IS 'when its event was first found to be published';
CREATE INDEX claim_published_idx ON pipeline.claim (published_at);
"""

OUTBOX_REJECTED = f"""
CREATE TABLE pipeline.outbox_rejected (
    id            bigint NOT NULL CONSTRAINT outbox_rejected_pkey PRIMARY KEY,
{_SHARD},
    created_at    timestamptz NOT NULL,
{_EVENT},
    parked_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    reason        text,
    error         text,
    died_at       timestamptz,
    discarded_at  timestamptz,
    discarded_by  text,
    discarded_why text
);
COMMENT ON TABLE pipeline.outbox_rejected IS
'Events that Kafka rejects: dead ones, and those that wait for their topic.';
{_EVENT_COMMENTS.format("outbox_rejected")}
COMMENT ON COLUMN pipeline.outbox_rejected.reason IS
'null: it follows others that wait for its topic';
COMMENT ON COLUMN pipeline.outbox_rejected.died_at IS 'null: it waits for its topic';
CREATE INDEX outbox_rejected_waiting_idx ON pipeline.outbox_rejected (topic, id)
 WHERE died_at IS NULL;
CREATE INDEX outbox_rejected_dead_idx ON pipeline.outbox_rejected (shard, id)
 WHERE died_at IS NOT NULL AND discarded_at IS NULL;
CREATE INDEX outbox_rejected_discarded_idx ON pipeline.outbox_rejected (discarded_at)
 WHERE discarded_at IS NOT NULL;
"""

OUTBOX_CURSOR = """
CREATE TABLE pipeline.outbox_cursor (
    shard       smallint NOT NULL CONSTRAINT outbox_cursor_pkey PRIMARY KEY,
    seen        pg_snapshot NOT NULL,
    target      pg_snapshot,
    last_id     bigint NOT NULL DEFAULT 0,
    high_id     bigint NOT NULL DEFAULT 0,
    token       bigint NOT NULL DEFAULT 0,
    owner       text,
    lease_until timestamptz
) WITH (fillfactor = 50);
COMMENT ON TABLE pipeline.outbox_cursor IS
'How far each shard of the outbox is published, and the relay that owns it.';
COMMENT ON COLUMN pipeline.outbox_cursor.seen IS 'every event visible in it is published';
COMMENT ON COLUMN pipeline.outbox_cursor.target IS
'set while a window larger than a page is published';
INSERT INTO pipeline.outbox_cursor (shard, seen)
SELECT shard, pg_current_snapshot() FROM generate_series(0, 63) AS shard;
"""

OUTBOX_RELAY = """
CREATE TABLE pipeline.outbox_cluster (
    singleton         boolean PRIMARY KEY CHECK (singleton),
    system_identifier bigint,
    reset_xid         xid8
);
COMMENT ON TABLE pipeline.outbox_cluster IS
'One row: the database cluster whose transaction ids outbox and cursor hold.';
COMMENT ON COLUMN pipeline.outbox_cluster.system_identifier IS 'null while the outbox is reset';
COMMENT ON COLUMN pipeline.outbox_cluster.reset_xid IS
'the transaction id that older rows of the outbox carry';
INSERT INTO pipeline.outbox_cluster (singleton, system_identifier)
SELECT true, system_identifier FROM pg_control_system();
CREATE TABLE pipeline.outbox_relay (
    owner       text NOT NULL CONSTRAINT outbox_relay_pkey PRIMARY KEY,
    lease_until timestamptz NOT NULL,
    published   bigint NOT NULL DEFAULT 0
);
COMMENT ON TABLE pipeline.outbox_relay IS
'The relays that are alive; they share the shards evenly.';
COMMENT ON COLUMN pipeline.outbox_relay.published IS
'events acknowledged by Kafka since the relay started, as last reported';
"""

RETENTION = """
CREATE TABLE pipeline.outbox_closed (
    day             date PRIMARY KEY,
    xid             xid8 NOT NULL DEFAULT pg_current_xact_id(),
    is_published    boolean NOT NULL DEFAULT false,
    not_archived    text,
    skips_archive   boolean NOT NULL DEFAULT false
);
COMMENT ON TABLE pipeline.outbox_closed IS 'Days of the outbox that take no more events.';
COMMENT ON COLUMN pipeline.outbox_closed.xid IS
'transactions that put an event into that day have a lower id';
COMMENT ON COLUMN pipeline.outbox_closed.is_published IS
'recorded before the partition is detached; it cannot be determined afterwards';
COMMENT ON COLUMN pipeline.outbox_closed.not_archived IS 'why archiving failed the last time';
COMMENT ON COLUMN pipeline.outbox_closed.skips_archive IS
'a person decided that it is dropped without being archived';
CREATE TABLE pipeline.retention_lease (
    singleton   boolean PRIMARY KEY CHECK (singleton),
    owner       text,
    lease_until timestamptz,
    finished_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    held        integer NOT NULL DEFAULT 0,
    archives    boolean NOT NULL DEFAULT false
);
COMMENT ON TABLE pipeline.retention_lease IS
'One row: the process that runs retention for all of them.';
COMMENT ON COLUMN pipeline.retention_lease.finished_at IS 'when a round was last completed';
COMMENT ON COLUMN pipeline.retention_lease.held IS
'partitions that were due in that round and still needed';
COMMENT ON COLUMN pipeline.retention_lease.archives IS
'a process archives days: processes without an archive do not drop them';
INSERT INTO pipeline.retention_lease VALUES (true);
"""

TABLES = (
    OUTBOX,
    SCHEDULED,
    CLAIM,
    OUTBOX_REJECTED,
    OUTBOX_CURSOR,
    OUTBOX_RELAY,
    RETENTION,
)
