"""Names and sizes of the engine's schema in PostgreSQL; its migrations create the tables."""

SCHEMA = "pipeline"

SHARDS = 64
"""Virtual shards of the outbox; fixed, because every row's shard is stored."""

LANES = 32
"""Lanes of retried messages, as many of deferred messages, and of calls; a row is in one lane."""

FIRST_LANE_OF_CALLS = 2 * LANES
"""The lowest lane that holds calls."""
