"""SQL of the first revision: positions, inbox and backlog."""

# Fails the COMMIT of a transaction while a handler is running in it.
REFUSE_COMMIT = """
CREATE FUNCTION pipeline.refuse_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('pipeline.handler', true) = 'at work' THEN
        RAISE invalid_transaction_termination
        USING MESSAGE = 'a handler has sent COMMIT or SET CONSTRAINTS ALL: '
                        'the engine commits the whole batch';
    END IF;
    IF TG_OP = 'INSERT' THEN
        DELETE FROM pipeline.guarded_transaction WHERE xid = NEW.xid;
    END IF;
    RETURN NULL;
END $$
"""

_REFUSE_COMMIT_OF = """\
CREATE CONSTRAINT TRIGGER refuse_commit AFTER UPDATE ON pipeline.{}
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
WHEN (current_setting('pipeline.handler', true) = 'at work')
EXECUTE FUNCTION pipeline.refuse_commit();"""

TABLES = f"""
CREATE TABLE pipeline.position (
    consumer_group text NOT NULL,
    topic          text NOT NULL,
    partition      integer NOT NULL,
    next_offset    bigint NOT NULL,
    anchor_offset  bigint,  -- the last record before the position
    anchor_time    timestamptz,
    anchor_hash    bytea,  -- of that record: shows whether the topic still holds it
    -- processes that started here and neither moved the position nor shut down cleanly
    starts         integer NOT NULL DEFAULT 0,
    moved_at       timestamptz NOT NULL DEFAULT now(),
    duplicates     bigint NOT NULL DEFAULT 0,  -- messages of this partition that were known
    CONSTRAINT position_pkey PRIMARY KEY (consumer_group, topic, partition)
);
COMMENT ON TABLE pipeline.position IS
'The offset that each partition continues from; moved by the consume transaction itself.';
{_REFUSE_COMMIT_OF.format("position")}

CREATE UNLOGGED TABLE pipeline.guarded_transaction (
    xid xid8 NOT NULL CONSTRAINT guarded_transaction_pkey PRIMARY KEY
);
COMMENT ON TABLE pipeline.guarded_transaction IS
'Transactions that move no position and hold no lane, while a handler or a writer is running.';
CREATE CONSTRAINT TRIGGER refuse_commit AFTER INSERT ON pipeline.guarded_transaction
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION pipeline.refuse_commit();

CREATE TABLE pipeline.inbox_generation (
    singleton boolean PRIMARY KEY CHECK (singleton),
    current   integer NOT NULL,
    oldest    integer NOT NULL,
    opened_at timestamptz NOT NULL,
    since     timestamptz,  -- what is older is not remembered; null: everything is
    -- identifies the rotation that opened the current generation
    opening   uuid NOT NULL DEFAULT gen_random_uuid(),
    -- stands beside the group's offsets in Kafka, which another database must not move
    database_id uuid NOT NULL DEFAULT gen_random_uuid()
);
COMMENT ON TABLE pipeline.inbox_generation IS
'One row: the generation that takes new markers, and the oldest that is still remembered.';
INSERT INTO pipeline.inbox_generation VALUES (true, 1, 1, clock_timestamp());
CREATE TABLE pipeline.inbox_closed (
    generation integer PRIMARY KEY,
    closed_at  timestamptz NOT NULL
);
COMMENT ON TABLE pipeline.inbox_closed IS
'When each closed generation that is still remembered was closed.';
CREATE TABLE pipeline.inbox_consumer (
    consumer   text PRIMARY KEY,
    generation integer NOT NULL  -- all markers of the consumer are in this one or a later one
);
COMMENT ON TABLE pipeline.inbox_consumer IS
'The generation in which each consumer began.';

CREATE TABLE pipeline.inbox (
    generation   integer NOT NULL,
    key          bytea NOT NULL,  -- hash of (consumer, source, id)
    hash         bytea NOT NULL,  -- hash of type and data
    hash_version smallint NOT NULL,
    consumer     text NOT NULL,
    source       text NOT NULL,
    id           text NOT NULL,
    type         text NOT NULL,
    topic        text NOT NULL,
    partition    integer NOT NULL,
    "offset"     bigint NOT NULL,
    traceparent  text,
    result       json,  -- what the handler returned
    xid          xid8 NOT NULL DEFAULT pg_current_xact_id(),
    created_at   timestamptz NOT NULL DEFAULT now(),
    -- the key first: a search in several generations descends once for each key
    CONSTRAINT inbox_pkey PRIMARY KEY (key, generation)
) PARTITION BY LIST (generation);
COMMENT ON TABLE pipeline.inbox IS 'A marker for every event that took effect.';
CREATE TYPE pipeline.new_marker AS (
    key bytea, hash bytea, consumer text, source text, id text, type text,
    topic text, partition integer, "offset" bigint, traceparent text);

CREATE TABLE pipeline.inbox_filter (
    first_generation integer PRIMARY KEY,
    last_generation  integer NOT NULL,
    keys             bigint NOT NULL,  -- number of keys added
    -- number of keys at which it is full; 0: the generation has too many
    capacity         bigint NOT NULL,
    digest           bytea NOT NULL,  -- checksum of the whole row
    format           text NOT NULL,  -- how a key is mapped to bits
    bits             bytea NOT NULL
);
-- Compressing megabytes of bits takes long and saves little.
ALTER TABLE pipeline.inbox_filter ALTER COLUMN bits SET STORAGE EXTERNAL;
COMMENT ON TABLE pipeline.inbox_filter IS
'Bloom filters of the keys of closed generations; may be deleted at any time.';

CREATE TABLE pipeline.backlog (
    -- that of the inbox marker, where the message has one
    key             bytea NOT NULL CONSTRAINT backlog_pkey PRIMARY KEY,
    lane            smallint NOT NULL,
    order_key       bytea NOT NULL,  -- hash of (consumer, topic, key)
    sequence        bigint NOT NULL DEFAULT 0,  -- 0: ordered by partition and offset
    consumer        text NOT NULL,  -- empty: the record is not decoded yet
    topic           text NOT NULL,
    partition       integer NOT NULL,
    "offset"        bigint NOT NULL,
    timestamp       bigint NOT NULL,  -- of the record, in milliseconds
    record_key      bytea,
    value           bytea,
    headers         text NOT NULL,  -- JSON pairs; each byte is a character
    source          text,
    id              text,
    type            text,
    hash            bytea,  -- hash of type and data
    hash_version    smallint NOT NULL,
    remembered_hash bytea,  -- of an identity mismatch: the hash of the other payload
    traceparent     text,
    received_at     timestamptz NOT NULL DEFAULT now(),
    reason          text NOT NULL,
    attempts        integer NOT NULL,
    -- total of the delays by its retry policy, in seconds
    waited          double precision NOT NULL,
    due_at          timestamptz,  -- null: waits behind another message, or is dead
    died_at         timestamptz,
    -- dead, and later messages of its key wait until a person decides
    holds           boolean NOT NULL,
    error           text,
    traceback       text,
    discarded_at    timestamptz,
    discarded_by    text,
    discarded_why   text
);
COMMENT ON TABLE pipeline.backlog IS
'Messages to be handled later, in the order of their key, and dead letters.';
CREATE SEQUENCE pipeline.backlog_call_seq;
CREATE TYPE pipeline.new_backlog_row AS (
    key bytea, lane smallint, order_key bytea, sequence bigint, consumer text,
    topic text, partition integer, "offset" bigint, timestamp bigint,
    record_key bytea, value bytea, headers text, source text, id text, type text,
    hash bytea, remembered_hash bytea, traceparent text, reason text, attempts integer,
    waited double precision, due_in double precision, is_dead boolean, holds boolean,
    error text, traceback text);
CREATE INDEX backlog_order_idx
    ON pipeline.backlog (order_key, sequence, partition, "offset")
 WHERE died_at IS NULL OR holds;
CREATE INDEX backlog_due_idx ON pipeline.backlog (lane, due_at) WHERE due_at IS NOT NULL;
CREATE INDEX backlog_due_key_idx ON pipeline.backlog (order_key) WHERE due_at IS NOT NULL;
CREATE INDEX backlog_died_idx ON pipeline.backlog (died_at) WHERE died_at IS NOT NULL;
CREATE INDEX backlog_dead_idx
    ON pipeline.backlog (lane, order_key, sequence, partition, "offset")
 WHERE died_at IS NOT NULL AND discarded_at IS NULL;
CREATE INDEX backlog_discarded_idx ON pipeline.backlog (discarded_at)
 WHERE discarded_at IS NOT NULL;

CREATE TABLE pipeline.backlog_lane (
    lane        smallint NOT NULL CONSTRAINT backlog_lane_pkey PRIMARY KEY,
    token       bigint NOT NULL DEFAULT 0,
    owner       text,
    lease_until timestamptz,
    -- workers that acquired the lane and have not released it
    starts      integer NOT NULL DEFAULT 0,
    released_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);
COMMENT ON TABLE pipeline.backlog_lane IS
'Shares of the order keys of the backlog, and the worker that owns each.';
INSERT INTO pipeline.backlog_lane (lane) SELECT lane FROM generate_series(0, 95) AS lane;
{_REFUSE_COMMIT_OF.format("backlog_lane")}
"""
