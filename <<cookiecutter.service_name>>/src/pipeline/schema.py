"""Names and sizes of what the engine has in PostgreSQL; its migrations create the tables."""

SCHEMA = "pipeline"

SHARDS = 64
"""Virtual shards of the outbox; fixed, because every row's shard is stored."""

LANES = 32
"""Lanes of the backlog, as many for deferred messages, and for effects; every row has one."""
