"""Statements that commands execute on dead rows of the backlog: redrive and discard."""

from collections.abc import Sequence

import asyncpg

from pipeline.apply.backlog import has_calls
from pipeline.handlers.policy import DIED, REDRIVEN

_FENCE = """
UPDATE pipeline.backlog_lane
   SET token = token + 1, owner = NULL, lease_until = NULL,
       starts = starts - CASE WHEN lease_until > clock_timestamp() THEN 1 ELSE 0 END
 WHERE lane = $1
"""


_SHARE = "SELECT FROM pipeline.backlog_lane WHERE lane = $1 FOR NO KEY UPDATE"


_REDRIVE = """
UPDATE pipeline.backlog
   SET reason = CASE WHEN error LIKE 'ProcessDied:%' THEN $2 ELSE $3 END,
       attempts = 0, waited = 0, due_at = NULL, died_at = NULL, holds = false
 WHERE key = ANY ($1)
"""


_DISCARD = """
UPDATE pipeline.backlog
   SET discarded_at = clock_timestamp(), discarded_by = $2, discarded_why = $3, holds = false
 WHERE key = ANY ($1)
"""


async def fence_lane(connection: asyncpg.Connection, lane: int) -> None:
    """Lock the lane to the end of the transaction, to change its dead rows.

    Waits for the transaction of the worker that holds the lane, whose later transactions raise
    `LaneLost`. That worker has not died, so its start is not left over in the lane's count. A
    worker of calls keeps the lane: it has to store how its calls end, and has read no dead row.
    """
    await connection.execute(_SHARE if has_calls(lane) else _FENCE, lane)


async def redrive(connection: asyncpg.Connection, keys: Sequence[bytes]) -> None:
    """Make dead rows wait to be tried again, with a new budget of attempts.

    Call `fence_lane` before, and `lanes.schedule_heads` after.
    """
    await connection.execute(_REDRIVE, keys, DIED, REDRIVEN)


async def discard(
    connection: asyncpg.Connection, keys: Sequence[bytes], *, operator: str, why: str
) -> None:
    """Close dead rows. They are kept for a while, so that their message is recognised if it comes
    again. Call `fence_lane` before.
    """
    await connection.execute(_DISCARD, keys, operator, why)
