"""Dead rows of the backlog, as people redrive and discard them."""

from collections.abc import Sequence

import asyncpg

from onceward.handlers.policy import DIED, REDRIVEN
from onceward.retry import lanes

from . import statements


async def lock_lane(connection: asyncpg.Connection, lane: int) -> None:
    """Lock the lane to the end of the transaction, to change its rows.

    Waits for the transaction of the worker that holds the lane. It keeps the lane: what it has read
    before, it compares with the first rows of its keys when it has locked the lane.
    """
    await connection.execute(statements.LOCK_LANE, lane)


async def redrive(connection: asyncpg.Connection, rows: Sequence[asyncpg.Record]) -> None:
    """Make dead rows wait to be tried again, with a new budget of attempts, in their keys' order.

    They have `key`, `lane` and `order_key`. Call `lock_lane` before.
    """
    keys = [row["key"] for row in rows]
    await connection.execute(statements.REDRIVE_ROWS, keys, DIED, REDRIVEN)
    await _schedule_heads_of(connection, rows)


async def discard(
    connection: asyncpg.Connection, rows: Sequence[asyncpg.Record], *, operator: str, why: str
) -> None:
    """Close dead rows, so that those that wait behind them go on. They are kept for a while, so
    that their message is recognised if it comes again.

    They have `key`, `lane` and `order_key`. Call `lock_lane` before.
    """
    keys = [row["key"] for row in rows]
    await connection.execute(statements.DISCARD_ROWS, keys, operator, why)
    await _schedule_heads_of(connection, rows)


async def _schedule_heads_of(
    connection: asyncpg.Connection, rows: Sequence[asyncpg.Record]
) -> None:
    numbers, order_keys = {row["lane"] for row in rows}, {row["order_key"] for row in rows}
    await lanes.schedule_heads(connection, numbers, order_keys)
