"""Relays, and what they have not published yet, as people look them up."""

import asyncpg

from . import statements


async def listed(connection: asyncpg.Connection) -> list[asyncpg.Record]:
    """Return owner, shards, published events and end of the lease of each relay.

    The first row has no owner if a shard has none.
    """
    rows: list[asyncpg.Record] = await connection.fetch(statements.LIST_RELAYS)
    return rows


async def has_begun(connection: asyncpg.Connection) -> bool:
    """Return whether any relay has ever held a shard."""
    return bool(await connection.fetchval(statements.HAS_ANY_RELAY_BEGUN))


async def count(connection: asyncpg.Connection, most: int) -> tuple[int, dict[str, float]]:
    """Return how many events are not published, up to a number, and the age of the oldest one of
    each topic among these, in seconds."""
    rows = await connection.fetch(statements.COUNT_UNPUBLISHED, most)
    return sum(row["count"] for row in rows), {row["topic"]: row["oldest"] for row in rows}
