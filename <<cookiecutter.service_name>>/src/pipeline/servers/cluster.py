"""The epoch: whether transaction ids in outbox and cursor are those of this database cluster.

After a dump is restored they are another cluster's: the cursor would skip events, or hold them back
until this cluster's ids have caught up. A physical restore or a failover keeps them true.
"""

import asyncpg

IS_OURS = """EXISTS (
       SELECT FROM pipeline.outbox_epoch JOIN pg_control_system() AS cluster
         ON cluster.system_identifier = outbox_epoch.system_identifier)"""
"""SQL condition: the outbox was filled in this cluster, and is not being reset."""

_SECONDS = 86_400.0
"""A reset rewrites the whole outbox."""

# The owners stay: who takes their shards has to know whom to fence.
_TAKE_SHARDS = """
UPDATE pipeline.outbox_cursor SET token = token + 1, lease_until = clock_timestamp()
"""

_CLOSE_EPOCH = "UPDATE pipeline.outbox_epoch SET system_identifier = NULL"

_FORGET_PROGRESS = """
UPDATE pipeline.outbox_cursor
   SET seen = pg_current_snapshot(), target = NULL, last_id = 0, high_id = 0
"""

_RENEW_EVENTS = "UPDATE pipeline.outbox SET xid = DEFAULT"

# By which transaction they were closed means nothing any more; this one comes after all of them.
_CLOSE_DAYS_AGAIN = "UPDATE pipeline.outbox_closed SET xid = DEFAULT"

# Logical replication carries rows over and leaves sequences behind.
_RAISE_SEQUENCE = """
SELECT setval('pipeline.outbox_id_seq', newest)
  FROM (SELECT max(id) AS newest FROM pipeline.outbox) AS outbox
 WHERE newest > COALESCE(pg_sequence_last_value('pipeline.outbox_id_seq'), 0)
"""

_OPEN_EPOCH = """
UPDATE pipeline.outbox_epoch
   SET system_identifier = (SELECT system_identifier FROM pg_control_system()),
       reset_xid = CASE WHEN $1 THEN reset_xid ELSE pg_current_xact_id() END
"""


class OtherEpoch(Exception):
    """The outbox holds transaction ids of another database cluster."""

    def __init__(self) -> None:
        super().__init__(
            "the outbox comes from another database cluster, as after a dump is restored: its"
            " transaction ids mean nothing here, and nothing is published. `service relay reset`"
            " publishes everything in it again, with the same event ids; after pg_upgrade, which"
            " carries transaction ids over: `service relay reset --keep-progress`"
        )


async def is_ours(connection: asyncpg.Connection) -> bool:
    """Whether the outbox is this cluster's, so that nothing has to be reset."""
    return bool(await connection.fetchval(f"SELECT {IS_OURS}"))


async def count(connection: asyncpg.Connection) -> int:
    """Return how many events a reset would publish again."""
    return int(await connection.fetchval("SELECT count(*) FROM pipeline.outbox", timeout=_SECONDS))


async def reset(connection: asyncpg.Connection, *, keep_progress: bool) -> int:
    """Make this cluster the outbox's own; every event in it is published again, in order.

    Returns how many those are.

    With `keep_progress` relays go on where they were: for a cluster that has kept the ids. Relays
    that run lose their shards. Cut short, it leaves them refusing: run it again.
    """
    async with connection.transaction():
        # Nobody claims a shard with a look at the epoch from before.
        await connection.execute("LOCK TABLE pipeline.outbox_cursor IN ACCESS EXCLUSIVE MODE")
        await connection.execute(_TAKE_SHARDS)
        if not keep_progress:
            await connection.execute(_CLOSE_EPOCH)
            await connection.execute(_FORGET_PROGRESS)
    renewed = 0
    # Apart, so that its own transaction id comes after the snapshot.
    async with connection.transaction():
        if not keep_progress:
            done = await connection.execute(_RENEW_EVENTS, timeout=_SECONDS)
            renewed = int(done.split()[-1])
            await connection.execute(_CLOSE_DAYS_AGAIN)
            await connection.execute(_RAISE_SEQUENCE, timeout=_SECONDS)
        await connection.execute(_OPEN_EPOCH, keep_progress)
    return renewed
