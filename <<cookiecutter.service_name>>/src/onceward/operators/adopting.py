"""The adoption of a database; `servers/cluster.py` says what that is."""

import asyncpg

from . import adopt_statements as statements

_SECONDS = 86_400.0
"""Time-out of a statement that reads or rewrites a whole table."""


async def count(connection: asyncpg.Connection, *, keep_progress: bool) -> tuple[int, int, int]:
    """Return how many calls and scheduled events wait, and events `adopt` publishes again."""
    row = await connection.fetchrow(statements.COUNT_WHAT_WAITS, keep_progress, timeout=_SECONDS)
    return row["calls"], row["scheduled"], row["events"]


async def sequences_behind(connection: asyncpg.Connection) -> list[tuple[str, str]]:
    """Return the sequences that are behind their rows, each with the statement that advances it.

    Those that the role may not read are left out: nothing is known of them.
    """
    return [
        (one["name"], statements.ADVANCE_SEQUENCE.format(**one))
        for one in await connection.fetch(statements.LIST_SEQUENCES)
        if one["is_readable"]
        and await connection.fetchval(statements.IS_SEQUENCE_BEHIND.format(**one), timeout=_SECONDS)
    ]


async def adopt(connection: asyncpg.Connection, *, keep_progress: bool) -> int:
    """Make the database the service's; return how many events are published again, in order.

    With `keep_progress` relays go on where they were: for a cluster that has kept the ids. Running
    relays wait, and lose their shards. If it fails, nothing has changed.
    """
    async with connection.transaction():
        # Read before the transaction has an id, so that its own changes are not visible in it.
        seen = await connection.fetchval(statements.READ_SNAPSHOT_TO_ADOPT)
        await connection.execute(statements.REMOVE_LIMITS)
        # No relay may claim a shard after it has compared the former cluster.
        await connection.execute(statements.LOCK_CURSOR)
        await connection.execute(statements.END_LEASES)
        renewed = 0
        if not keep_progress:
            await connection.execute(statements.FORGET_PROGRESS, seen)
            done = await connection.execute(statements.RENEW_EVENTS, timeout=_SECONDS)
            renewed = int(done.split()[-1])
            await connection.execute(statements.CLOSE_DAYS_AGAIN)
        for one in await connection.fetch(statements.LIST_SEQUENCES):
            await connection.execute(statements.ADVANCE_SEQUENCE.format(**one), timeout=_SECONDS)
        await connection.execute(statements.STORE_CLUSTER, keep_progress)
    return renewed
