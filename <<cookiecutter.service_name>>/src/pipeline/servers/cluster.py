"""Whether the transaction ids in the outbox and its cursor are those of this database cluster.

After a dump is restored they are another cluster's: the cursor would skip events, or hold them back
until this cluster's ids have caught up. They stay valid after a physical restore or a failover.
"""

import asyncpg

from . import sequences

IS_OURS = """EXISTS (
       SELECT FROM pipeline.outbox_cluster JOIN pg_control_system() AS cluster
         ON cluster.system_identifier = outbox_cluster.system_identifier)"""
"""SQL condition: the outbox was filled in this cluster, and is not being reset."""

_SECONDS = 86_400.0
"""Time-out of a statement that reads or rewrites the whole outbox."""

# A role or database may have limits that are meant for shorter work.
_SET_NO_LIMITS = """
SELECT set_config(name, '0', true) FROM pg_settings
 WHERE name IN ('statement_timeout', 'lock_timeout', 'transaction_timeout')
"""

# The owners are kept: the relay that takes their shards has to know which one to fence.
_TAKE_SHARDS = """
UPDATE pipeline.outbox_cursor SET token = token + 1, lease_until = clock_timestamp()
"""

_FORGET_PROGRESS = """
UPDATE pipeline.outbox_cursor
   SET seen = $1, target = NULL, last_id = 0, high_id = 0
"""

_RENEW_EVENTS = "UPDATE pipeline.outbox SET xid = DEFAULT"

# The transactions that closed them were another cluster's; this one comes after all of them.
_CLOSE_DAYS_AGAIN = "UPDATE pipeline.outbox_closed SET xid = DEFAULT"

_SET_CLUSTER = """
UPDATE pipeline.outbox_cluster
   SET system_identifier = (SELECT system_identifier FROM pg_control_system()),
       reset_xid = CASE WHEN $1 THEN reset_xid ELSE pg_current_xact_id() END
"""


class OtherCluster(Exception):
    """The outbox holds transaction ids of another database cluster."""

    def __init__(self) -> None:
        super().__init__(
            "the outbox comes from another database cluster, as after a dump is restored: its"
            " transaction ids mean nothing here, and nothing is published. `service relay reset`"
            " publishes everything in it again, with the same event ids; after pg_upgrade, which"
            " carries transaction ids over: `service relay reset --keep-progress`"
        )


async def is_ours(connection: asyncpg.Connection) -> bool:
    """Return whether the outbox is this cluster's, so that nothing has to be reset."""
    return bool(await connection.fetchval(f"SELECT {IS_OURS}"))


async def count(connection: asyncpg.Connection) -> int:
    """Return how many events a reset would publish again."""
    return int(await connection.fetchval("SELECT count(*) FROM pipeline.outbox", timeout=_SECONDS))


async def reset(connection: asyncpg.Connection, *, keep_progress: bool) -> int:
    """Make the outbox this cluster's; return how many events are published again, in order.

    With `keep_progress` relays go on where they were: for a cluster that has kept the ids. Running
    relays wait, and lose their shards. If it fails, nothing has changed.
    """
    async with connection.transaction():
        # Read before the transaction has an id, so that its own changes are not visible in it.
        seen = await connection.fetchval("SELECT pg_current_snapshot()")
        await connection.execute(_SET_NO_LIMITS)
        # No relay may claim a shard after it has checked the former cluster.
        await connection.execute("LOCK TABLE pipeline.outbox_cursor IN ACCESS EXCLUSIVE MODE")
        await connection.execute(_TAKE_SHARDS)
        renewed = 0
        if not keep_progress:
            await connection.execute(_FORGET_PROGRESS, seen)
            done = await connection.execute(_RENEW_EVENTS, timeout=_SECONDS)
            renewed = int(done.split()[-1])
            await connection.execute(_CLOSE_DAYS_AGAIN)
        await sequences.advance(connection, _SECONDS)
        await connection.execute(_SET_CLUSTER, keep_progress)
    return renewed
