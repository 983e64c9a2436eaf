"""The engine's tables, in the PostgreSQL schema `pipeline`.

The migrations in `pipeline.migrations` create them; a test holds the two against each other.
"""

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.types import UserDefinedType

SCHEMA = "pipeline"
SHARDS = 64
"""Virtual shards of the outbox; fixed, because every row's shard is stored."""

LANES = 32
"""Lanes of the backlog, as many for deferred messages, and for calls; every row has one."""

metadata = sa.MetaData(schema=SCHEMA)


class Xid8(UserDefinedType[int]):
    """PostgreSQL's 64-bit transaction id."""

    cache_ok = True

    def get_col_spec(self, **kw: object) -> str:
        """Name of the type in DDL."""
        return "xid8"


class Snapshot(UserDefinedType[str]):
    """PostgreSQL's set of transactions visible at a moment: `xmin:xmax:running,…`."""

    cache_ok = True

    def get_col_spec(self, **kw: object) -> str:
        """Name of the type in DDL."""
        return "pg_snapshot"


def _shard() -> sa.Column[int]:
    """Return the column that says to which shard of the outbox an event belongs, by its key."""
    return sa.Column(
        "shard",
        sa.SmallInteger,
        sa.Computed(
            f"(get_byte(sha256(COALESCE(key, '\\x'::bytea)), 0) % {SHARDS})::smallint",
            persisted=True,
        ),
        nullable=False,
    )


def _event() -> list[sa.Column[Any]]:
    """Return the columns that hold an event, wherever it is stored."""
    return [
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("key", pg.BYTEA),
        sa.Column("payload", pg.BYTEA),
        sa.Column("event_id", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("subject", sa.Text),
        sa.Column("sequence", sa.BigInteger, comment="version of the aggregate after this event"),
        sa.Column("content_type", sa.Text, nullable=False),
        sa.Column("traceparent", sa.Text),
        sa.Column("tracestate", sa.Text),
        sa.Column("baggage", sa.Text),
        sa.Column("headers", sa.Text, comment="of a dead letter: all of them, as JSON"),
        sa.Column("dataref", sa.Text, comment="where the payload is, if it is not here"),
        sa.Column("datalength", sa.BigInteger, comment="bytes of the payload that is elsewhere"),
        sa.Column("datachecksum", sa.Text, comment="its SHA-256, in hexadecimal digits"),
    ]


position = sa.Table(
    "position",
    metadata,
    sa.Column("consumer_group", sa.Text, primary_key=True),
    sa.Column("topic", sa.Text, primary_key=True),
    sa.Column("partition", sa.Integer, primary_key=True),
    sa.Column("next_offset", sa.BigInteger, nullable=False),
    sa.Column("anchor_offset", sa.BigInteger, comment="the last record before the position"),
    sa.Column("anchor_time", sa.DateTime(timezone=True)),
    sa.Column("anchor_hash", pg.BYTEA, comment="tells whether the topic still holds that record"),
    sa.Column(
        "starts",
        sa.Integer,
        nullable=False,
        server_default="0",
        comment="processes that began here and have neither moved it nor ended in order",
    ),
    sa.Column("moved_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
    sa.Column(
        "duplicates",
        sa.BigInteger,
        nullable=False,
        server_default="0",
        comment="messages that came here and had come before",
    ),
    comment="The offset that each partition goes on from; moved by the consume transaction itself.",
)

generation = sa.Table(
    "inbox_generation",
    metadata,
    sa.Column("singleton", sa.Boolean, sa.CheckConstraint("singleton"), primary_key=True),
    sa.Column("current", sa.Integer, nullable=False),
    sa.Column("oldest", sa.Integer, nullable=False),
    sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
    sa.Column(
        "since", sa.DateTime(timezone=True), comment="what is older is not remembered; null: all is"
    ),
    sa.Column(
        "opening",
        sa.Uuid,
        nullable=False,
        server_default=sa.func.gen_random_uuid(),
        comment="names the rotation that opened the current one",
    ),
    comment="One row: which generation takes new markers, and the oldest still remembered.",
)

inbox_closed = sa.Table(
    "inbox_closed",
    metadata,
    sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("closed_at", sa.DateTime(timezone=True), nullable=False),
    comment="When each closed generation that is still remembered was closed.",
)

inbox_consumer = sa.Table(
    "inbox_consumer",
    metadata,
    sa.Column("consumer", sa.Text, primary_key=True),
    sa.Column(
        "generation",
        sa.Integer,
        nullable=False,
        comment="its oldest marker is in this one or a later one",
    ),
    comment="Since which generation each consumer has taken messages.",
)

inbox = sa.Table(
    "inbox",
    metadata,
    sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("key", pg.BYTEA, primary_key=True, comment="hash of (consumer, source, id)"),
    sa.Column("hash", pg.BYTEA, nullable=False, comment="hash of type and data"),
    sa.Column("hash_version", sa.SmallInteger, nullable=False),
    sa.Column("consumer", sa.Text, nullable=False),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("id", sa.Text, nullable=False),
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("topic", sa.Text, nullable=False),
    sa.Column("partition", sa.Integer, nullable=False),
    sa.Column("offset", sa.BigInteger, nullable=False),
    sa.Column("traceparent", sa.Text),
    sa.Column("result", pg.JSON, comment="what the handler returned"),
    sa.Column("xid", Xid8, nullable=False, server_default=sa.text("pg_current_xact_id()")),
    sa.Column(
        "created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()
    ),
    comment="A marker for every event that took effect.",
    postgresql_partition_by="LIST (generation)",
)

inbox_filter = sa.Table(
    "inbox_filter",
    metadata,
    sa.Column("first_generation", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("last_generation", sa.Integer, nullable=False),
    sa.Column("keys", sa.BigInteger, nullable=False, comment="how many were added"),
    sa.Column("capacity", sa.BigInteger, nullable=False, comment="full with so many; 0: too many"),
    sa.Column("digest", pg.BYTEA, nullable=False, comment="of all of the row"),
    sa.Column("format", sa.Text, nullable=False, comment="which bits a key sets"),
    sa.Column("bits", pg.BYTEA, nullable=False),
    comment="Bloom filters of the keys of closed generations; may be deleted at any time.",
)

backlog = sa.Table(
    "backlog",
    metadata,
    sa.Column(
        "key", pg.BYTEA, primary_key=True, comment="the marker's, where there is an identity"
    ),
    sa.Column("lane", sa.SmallInteger, nullable=False),
    sa.Column("order_key", pg.BYTEA, nullable=False, comment="hash of (consumer, topic, key)"),
    sa.Column(
        "sequence",
        sa.BigInteger,
        nullable=False,
        server_default="0",
        comment="0: by partition and offset",
    ),
    sa.Column("consumer", sa.Text, nullable=False, comment="empty: a record that is nobody's yet"),
    sa.Column("topic", sa.Text, nullable=False),
    sa.Column("partition", sa.Integer, nullable=False),
    sa.Column("offset", sa.BigInteger, nullable=False),
    sa.Column("timestamp", sa.BigInteger, nullable=False, comment="the record's, in milliseconds"),
    sa.Column("record_key", pg.BYTEA),
    sa.Column("value", pg.BYTEA),
    sa.Column("headers", sa.Text, nullable=False, comment="JSON pairs; a byte is a character"),
    sa.Column("source", sa.Text),
    sa.Column("id", sa.Text),
    sa.Column("type", sa.Text),
    sa.Column("hash", pg.BYTEA, comment="hash of type and data"),
    sa.Column("hash_version", sa.SmallInteger, nullable=False),
    sa.Column("remembered_hash", pg.BYTEA, comment="the other payload's, of an identity mismatch"),
    sa.Column("traceparent", sa.Text),
    sa.Column(
        "received_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()
    ),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("waited", sa.Double, nullable=False, comment="seconds its policy has let it wait"),
    sa.Column("due_at", sa.DateTime(timezone=True), comment="null: behind another, or dead"),
    sa.Column("died_at", sa.DateTime(timezone=True), comment="since when it is a dead letter"),
    sa.Column("holds", sa.Boolean, nullable=False, comment="dead, and its key waits for a person"),
    sa.Column("error", sa.Text),
    sa.Column("traceback", sa.Text),
    sa.Column("discarded_at", sa.DateTime(timezone=True)),
    sa.Column("discarded_by", sa.Text),
    sa.Column("discarded_why", sa.Text),
    sa.Index(
        "backlog_order_idx",
        "order_key",
        "sequence",
        "partition",
        "offset",
        postgresql_where=sa.text("died_at IS NULL OR holds"),
    ),
    sa.Index("backlog_due_idx", "lane", "due_at", postgresql_where=sa.text("due_at IS NOT NULL")),
    sa.Index("backlog_due_key_idx", "order_key", postgresql_where=sa.text("due_at IS NOT NULL")),
    sa.Index("backlog_died_idx", "died_at", postgresql_where=sa.text("died_at IS NOT NULL")),
    sa.Index(
        "backlog_dead_idx",
        "lane",
        "order_key",
        "sequence",
        "partition",
        "offset",
        postgresql_where=sa.text("died_at IS NOT NULL AND discarded_at IS NULL"),
    ),
    sa.Index(
        "backlog_discarded_idx",
        "discarded_at",
        postgresql_where=sa.text("discarded_at IS NOT NULL"),
    ),
    comment="Messages to be handled later, in the order of their key, and dead letters.",
)

backlog_lane = sa.Table(
    "backlog_lane",
    metadata,
    sa.Column("lane", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("token", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("owner", sa.Text),
    sa.Column("lease_until", sa.DateTime(timezone=True)),
    sa.Column(
        "starts",
        sa.Integer,
        nullable=False,
        server_default="0",
        comment="workers that began and have not given it back",
    ),
    sa.Column(
        "released_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()
    ),
    comment="Shares of the backlog's order keys, and which worker has each.",
)

outbox = sa.Table(
    "outbox",
    metadata,
    # CACHE 1 (the default): a cached sequence hands out ids that break the order of a key.
    sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False),
    sa.Column("xid", Xid8, nullable=False, server_default=sa.text("pg_current_xact_id()")),
    _shard(),
    sa.Column(
        "created_at",
        sa.DateTime(timezone=True),
        nullable=False,
        server_default=sa.func.clock_timestamp(),
    ),
    *_event(),
    sa.Index("outbox_id_idx", "id"),
    sa.Index("outbox_xid_idx", "xid"),
    comment="Events of committed transactions; append-only, published by the relay.",
    postgresql_partition_by="RANGE (created_at)",
)

scheduled = sa.Table(
    "scheduled",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("due_at", sa.DateTime(timezone=True), nullable=False),
    sa.Column(
        "scheduled_at",
        sa.DateTime(timezone=True),
        nullable=False,
        server_default=sa.func.clock_timestamp(),
    ),
    *_event(),
    sa.Index("scheduled_due_idx", "due_at", "scheduled_at", "name"),
    comment="Events that are put into the outbox when they are due.",
)

claim = sa.Table(
    "claim",
    metadata,
    sa.Column("name", sa.Text, primary_key=True, comment="of the object, below the store's URL"),
    sa.Column("event_id", sa.Text, nullable=False),
    sa.Column(
        "published_at",
        sa.DateTime(timezone=True),
        comment="since when its event is known to wait for nobody here",
    ),
    sa.Index("claim_published_idx", "published_at"),
    comment="Payloads in the object store; what is there and not here is nobody's.",
)

outbox_closed = sa.Table(
    "outbox_closed",
    metadata,
    sa.Column("day", sa.Date, primary_key=True),
    sa.Column(
        "xid",
        Xid8,
        nullable=False,
        server_default=sa.text("pg_current_xact_id()"),
        comment="who has put an event into it began before this transaction",
    ),
    sa.Column(
        "is_published",
        sa.Boolean,
        nullable=False,
        server_default="false",
        comment="found before it was detached; after that nobody could tell",
    ),
    sa.Column("not_archived", sa.Text, comment="why that failed the last time"),
    sa.Column(
        "goes_unarchived",
        sa.Boolean,
        nullable=False,
        server_default="false",
        comment="a person has decided that",
    ),
    comment="Days of the outbox to which nobody adds an event any more.",
)

outbox_unsent = sa.Table(
    "outbox_unsent",
    metadata,
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
    _shard(),
    sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    *_event(),
    sa.Column("queue", pg.BYTEA, nullable=False, comment="who waits for it: see unsent.py"),
    sa.Column(
        "parked_at",
        sa.DateTime(timezone=True),
        nullable=False,
        server_default=sa.func.clock_timestamp(),
    ),
    sa.Column("attempts", sa.Integer, nullable=False, comment="how often it was refused itself"),
    sa.Column("reason", sa.Text, comment="null: it waits behind another"),
    sa.Column("error", sa.Text),
    sa.Column("died_at", sa.DateTime(timezone=True), comment="it is a dead letter since then"),
    sa.Column("discarded_at", sa.DateTime(timezone=True)),
    sa.Column("discarded_by", sa.Text),
    sa.Column("discarded_why", sa.Text),
    sa.Index(
        "outbox_unsent_queue_idx",
        "topic",
        "queue",
        "id",
        postgresql_where=sa.text("died_at IS NULL"),
    ),
    sa.Index(
        "outbox_unsent_dead_idx",
        "shard",
        "id",
        postgresql_where=sa.text("died_at IS NOT NULL AND discarded_at IS NULL"),
    ),
    sa.Index(
        "outbox_unsent_discarded_idx",
        "discarded_at",
        postgresql_where=sa.text("discarded_at IS NOT NULL"),
    ),
    comment="The outbound backlog: events that Kafka refuses, and those that wait behind them.",
)

outbox_cursor = sa.Table(
    "outbox_cursor",
    metadata,
    sa.Column("shard", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("seen", Snapshot, nullable=False, comment="all that is visible in it is published"),
    sa.Column("target", Snapshot, comment="set while a window larger than a page is published"),
    sa.Column("last_id", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("high_id", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("token", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("owner", sa.Text),
    sa.Column("lease_until", sa.DateTime(timezone=True)),
    comment="How far each shard of the outbox is published, and which relay owns it.",
)

outbox_epoch = sa.Table(
    "outbox_epoch",
    metadata,
    sa.Column("singleton", sa.Boolean, sa.CheckConstraint("singleton"), primary_key=True),
    sa.Column("system_identifier", sa.BigInteger, comment="null while the outbox is reset"),
    sa.Column("reset_xid", Xid8, comment="the transaction that older rows of the outbox carry"),
    comment="One row: the database cluster whose transaction ids outbox and cursor hold.",
)

outbox_relay = sa.Table(
    "outbox_relay",
    metadata,
    sa.Column("owner", sa.Text, primary_key=True),
    sa.Column("lease_until", sa.DateTime(timezone=True), nullable=False),
    sa.Column(
        "published",
        sa.BigInteger,
        nullable=False,
        server_default="0",
        comment="events that Kafka has taken from it since it was started, as it said last",
    ),
    comment="The relays that are alive; they share the shards evenly.",
)

retention_lease = sa.Table(
    "retention_lease",
    metadata,
    sa.Column("singleton", sa.Boolean, sa.CheckConstraint("singleton"), primary_key=True),
    sa.Column("owner", sa.Text),
    sa.Column("lease_until", sa.DateTime(timezone=True)),
    sa.Column(
        "finished_at",
        sa.DateTime(timezone=True),
        nullable=False,
        server_default=sa.text("clock_timestamp()"),
        comment="when that was done the last time, to its end",
    ),
    sa.Column(
        "held",
        sa.Integer,
        nullable=False,
        server_default="0",
        comment="partitions that were due then, and needed by somebody",
    ),
    sa.Column(
        "archives",
        sa.Boolean,
        nullable=False,
        server_default="false",
        comment="days are archived, by whoever knows where; nobody else drops them",
    ),
    comment="One row: the process that does what one does for all, as to drop what is too old.",
)
