"""Rejected events, as people count, redrive and discard them."""

from collections.abc import Sequence

import asyncpg

from . import statements


async def hold_shard(connection: asyncpg.Connection, shard: int) -> None:
    """Lock the shard to the end of the transaction: its relay stores no rejected event."""
    await connection.execute(statements.HOLD_SHARD, shard)


async def redrive(connection: asyncpg.Connection, ids: Sequence[int]) -> None:
    """Make dead events wait to be tried again. Call `hold_shard` before."""
    await connection.execute(statements.REDRIVE_EVENTS, ids)


async def discard(
    connection: asyncpg.Connection, ids: Sequence[int], *, operator: str, why: str
) -> None:
    """Close events, whose rows are kept for a while. Call `hold_shard` before."""
    await connection.execute(statements.DISCARD_EVENTS, ids, operator, why)


async def count(connection: asyncpg.Connection, most: int) -> tuple[list[asyncpg.Record], int]:
    """Return by topic why events wait, how many, for how many seconds, and whether it rejects them,
    or they wait because people want it; and the number of dead events.

    At most so many of each are counted.
    """
    waiting: list[asyncpg.Record] = await connection.fetch(statements.COUNT_WAITING_EVENTS, most)
    return waiting, await connection.fetchval(statements.COUNT_DEAD_EVENTS, most)
