"""SQL of the first revision: outbox, relay and retention."""

_EVENT = """\
    topic        text NOT NULL,
    key          bytea,
    payload      bytea,
    event_id     text NOT NULL,
    source       text NOT NULL,
    type         text NOT NULL,
    subject      text,
    sequence     bigint,  -- version of the aggregate after this event
    content_type text NOT NULL,
    traceparent  text,
    tracestate   text,
    baggage      text,
    headers      text,  -- of a dead letter: all headers, as JSON
    -- of a payload in the object store: its URL, its size in bytes, its SHA-256 in hexadecimal
    dataref      text,
    datalength   bigint,
    datachecksum text"""

# An event without a key has no order: those events are spread over the shards by their numbers.
SHARD = "(COALESCE(get_byte(sha256(key), 0), (id % 64)::integer) % 64)::smallint"

_SHARD = f"""\
    shard        smallint NOT NULL GENERATED ALWAYS AS ({SHARD}) STORED"""

TABLES = f"""
CREATE TABLE pipeline.outbox (
    -- CACHE 1, the default: cached values would break the order of a key
    id           bigint GENERATED ALWAYS AS IDENTITY,
    xid          xid8 NOT NULL DEFAULT pg_current_xact_id(),
{_SHARD},
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
{_EVENT}
) PARTITION BY RANGE (created_at);
COMMENT ON TABLE pipeline.outbox IS
'Events of committed transactions; append-only, published by the relay.';
CREATE INDEX outbox_id_idx ON pipeline.outbox (id);
CREATE INDEX outbox_xid_idx ON pipeline.outbox (xid);

CREATE TABLE pipeline.scheduled (
    name         text NOT NULL CONSTRAINT scheduled_pkey PRIMARY KEY,
    due_at       timestamptz NOT NULL,
    scheduled_at timestamptz NOT NULL DEFAULT clock_timestamp(),
{_EVENT}
);
COMMENT ON TABLE pipeline.scheduled IS 'Events that are put into the outbox when they are due.';
CREATE INDEX scheduled_due_idx ON pipeline.scheduled (due_at, scheduled_at, name);
CREATE TYPE pipeline.new_scheduled AS (
    name text, due_at timestamptz, after interval, topic text, key bytea, payload bytea,
    event_id text, source text, type text, subject text, sequence bigint,
    content_type text, traceparent text, tracestate text, baggage text, headers text,
    dataref text, datalength bigint, datachecksum text);

CREATE TABLE pipeline.claim (
    -- name of the object, relative to the URL of the store
    name         text NOT NULL CONSTRAINT claim_pkey PRIMARY KEY,
    event_id     text NOT NULL,
    published_at timestamptz  -- when its event was first found to be published
);
COMMENT ON TABLE pipeline.claim IS
'Payloads in the object store; an object without a row here is not needed.';
CREATE INDEX claim_published_idx ON pipeline.claim (published_at);

CREATE TABLE pipeline.outbox_rejected (
    id            bigint NOT NULL CONSTRAINT outbox_rejected_pkey PRIMARY KEY,
{_SHARD},
    created_at    timestamptz NOT NULL,
{_EVENT},
    parked_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    reason        text,  -- null: it follows others that wait for its topic
    error         text,
    died_at       timestamptz,  -- null: it waits for its topic
    discarded_at  timestamptz,
    discarded_by  text,
    discarded_why text
);
COMMENT ON TABLE pipeline.outbox_rejected IS
'Events that Kafka rejects: dead ones, and those that wait for their topic.';
CREATE INDEX outbox_rejected_waiting_idx ON pipeline.outbox_rejected (topic, id)
 WHERE died_at IS NULL;
CREATE INDEX outbox_rejected_dead_idx ON pipeline.outbox_rejected (shard, id)
 WHERE died_at IS NOT NULL AND discarded_at IS NULL;
CREATE INDEX outbox_rejected_discarded_idx ON pipeline.outbox_rejected (discarded_at)
 WHERE discarded_at IS NOT NULL;

CREATE TABLE pipeline.outbox_cursor (
    shard       smallint NOT NULL CONSTRAINT outbox_cursor_pkey PRIMARY KEY,
    seen        pg_snapshot NOT NULL,  -- every event visible in it is published
    target      pg_snapshot,  -- set while a window larger than a page is published
    last_id     bigint NOT NULL DEFAULT 0,
    high_id     bigint NOT NULL DEFAULT 0,
    token       bigint NOT NULL DEFAULT 0,
    owner       text,
    lease_until timestamptz
) WITH (fillfactor = 50);
COMMENT ON TABLE pipeline.outbox_cursor IS
'How far each shard of the outbox is published, and the relay that owns it.';
INSERT INTO pipeline.outbox_cursor (shard, seen)
SELECT shard, pg_current_snapshot() FROM generate_series(0, 63) AS shard;

CREATE TABLE pipeline.outbox_cluster (
    singleton         boolean PRIMARY KEY CHECK (singleton),
    system_identifier bigint NOT NULL,
    reset_xid         xid8  -- the transaction id that older rows of the outbox carry
);
COMMENT ON TABLE pipeline.outbox_cluster IS
'One row: the database cluster whose transaction ids outbox and cursor hold.';
INSERT INTO pipeline.outbox_cluster (singleton, system_identifier)
SELECT true, system_identifier FROM pg_control_system();
CREATE TABLE pipeline.outbox_relay (
    owner       text NOT NULL CONSTRAINT outbox_relay_pkey PRIMARY KEY,
    lease_until timestamptz NOT NULL,
    -- events acknowledged by Kafka since the relay started, as last reported
    published   bigint NOT NULL DEFAULT 0
);
COMMENT ON TABLE pipeline.outbox_relay IS
'The relays that are alive; they share the shards evenly.';

CREATE TABLE pipeline.outbox_closed (
    day             date PRIMARY KEY,
    -- transactions that put an event into that day have a lower id
    xid             xid8 NOT NULL DEFAULT pg_current_xact_id(),
    -- recorded before the partition is detached; it cannot be determined afterwards
    is_published    boolean NOT NULL DEFAULT false,
    not_archived    text,  -- why archiving failed the last time
    -- a person decided that it is dropped without being archived
    skips_archive   boolean NOT NULL DEFAULT false
);
COMMENT ON TABLE pipeline.outbox_closed IS 'Days of the outbox that take no more events.';
CREATE TABLE pipeline.retention_round (
    singleton   boolean PRIMARY KEY CHECK (singleton),
    started_at  timestamptz NOT NULL DEFAULT '-infinity',
    finished_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    held        integer NOT NULL DEFAULT 0,  -- partitions that were due then, and still needed
    -- a process archives days: processes without an archive do not drop them
    archives    boolean NOT NULL DEFAULT false
);
COMMENT ON TABLE pipeline.retention_round IS
'One row: when a process last began a round of retention, and when one was last completed.';
INSERT INTO pipeline.retention_round VALUES (true);
"""
