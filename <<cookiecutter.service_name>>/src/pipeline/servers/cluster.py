"""Whether this database is the service's own, or a copy that it has not adopted.

In another cluster the transaction ids in the outbox and its cursor mean nothing; they stay valid
after a physical restore or a failover. What a copy publishes, calls or deletes may be what its
original does at the same time. So each new connection is asked. As data can be replaced under an
open one, leases are given, and rounds of retention begun, only where the database is the service's.
"""

from contextlib import suppress

import asyncpg

from pipeline.errors import OncewardError
from pipeline.schema import FIRST_LANE_OF_CALLS

from . import revisions

IS_OURS = """EXISTS (
       SELECT FROM pipeline.outbox_cluster
         JOIN pg_control_system() AS cluster USING (system_identifier)
         JOIN pg_database ON pg_database.oid = database_oid
        WHERE datname = current_database())"""
"""SQL condition: the database is the one that was filled, or was adopted."""

_SECONDS = 86_400.0
"""Time-out of a statement that reads or rewrites a whole table."""

_COUNT_WAITING = f"""
SELECT (SELECT count(*) FROM pipeline.backlog WHERE lane >= {FIRST_LANE_OF_CALLS}
           AND died_at IS NULL) AS calls,
       (SELECT count(*) FROM pipeline.scheduled) AS scheduled,
       (SELECT count(*) FROM pipeline.outbox WHERE NOT $1) AS events
"""

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
       database_oid = (SELECT oid FROM pg_database WHERE datname = current_database()),
       kafka_cluster = NULL,
       reset_xid = CASE WHEN $1 THEN reset_xid ELSE pg_current_xact_id() END
"""

_BROKERS = "SELECT kafka_cluster FROM pipeline.outbox_cluster"
_STORE_BROKERS = """
UPDATE pipeline.outbox_cluster SET kafka_cluster = $1 WHERE kafka_cluster IS NULL
"""

# Logical replication carries rows over and leaves sequences behind: those of identity columns, and
# that of calls. A rejected event keeps its number, also when its day of the outbox is dropped.
_SEQUENCES = f"""
SELECT name, highest, has_sequence_privilege(name, 'SELECT, USAGE') AS is_readable
  FROM (VALUES ('pipeline.outbox_id_seq', 'max(id) FROM pipeline.outbox_rejected'),
               ('pipeline.backlog_call_seq',
                'max("offset") FROM pipeline.backlog WHERE lane >= {FIRST_LANE_OF_CALLS}')
         UNION ALL
        SELECT pg_get_serial_sequence(attrelid::regclass::text, attname),
               format('max(%I) FROM %s', attname, attrelid::regclass)
          FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
         WHERE attidentity <> '' AND NOT relispartition
           AND relnamespace = 'pipeline'::regnamespace) AS numbered (name, highest)
 ORDER BY name, highest
"""

_IS_BEHIND = "SELECT (SELECT {highest}) > COALESCE(pg_sequence_last_value('{name}'), 0)"

# The next number may be higher by the time that it is set.
_ADVANCE = "SELECT setval('{name}', GREATEST(nextval('{name}'), (SELECT {highest})))"


class NotAdopted(OncewardError, ConnectionError):
    """The database may be a copy: as in an outage, work waits until an operator has decided."""

    def __init__(self) -> None:
        super().__init__(
            "the database is not adopted: its cluster, oid, brokers or transaction ids are not"
            " those that it was used with, as in a copy, after pg_upgrade, or with new brokers."
            " Nothing is consumed, published, called or deleted before `service adopt`"
            " (docs/incidents.md#a-copy-of-the-database)"
        )


async def is_ours(connection: asyncpg.Connection) -> bool:
    """Return whether the database is the one that was filled, and has not to be adopted."""
    return bool(await connection.fetchval(f"SELECT {IS_OURS}"))


async def check_brokers(
    connection: asyncpg.Connection, brokers: str | None, *, stores: bool = False
) -> None:
    """Raise `NotAdopted` if the database was used with other brokers than those of this id.

    `stores` the id if the database has none: at first, or since `adopt`.
    """
    if stores and brokers:
        await connection.execute(_STORE_BROKERS, brokers)
    used = await connection.fetchval(_BROKERS)
    if used != brokers and None not in (used, brokers):
        raise NotAdopted


async def gate(connection: asyncpg.Connection, service: str) -> None:
    """Raise `WrongDatabase` as `revisions.check_database`, and `NotAdopted`.

    A database that is to be migrated passes: nothing works in it before.
    """
    await revisions.check_database(connection, service)
    with suppress(asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError):
        if not await is_ours(connection):
            raise NotAdopted


async def count(connection: asyncpg.Connection, *, keep_progress: bool) -> tuple[int, int, int]:
    """Return how many calls and scheduled events wait, and events `adopt` publishes again."""
    row = await connection.fetchrow(_COUNT_WAITING, keep_progress, timeout=_SECONDS)
    return row["calls"], row["scheduled"], row["events"]


async def sequences_behind(connection: asyncpg.Connection) -> list[tuple[str, str]]:
    """Return the sequences that are behind their rows, each with the statement that advances it.

    Those that the role may not read are left out: nothing is known of them.
    """
    return [
        (one["name"], _ADVANCE.format(**one))
        for one in await connection.fetch(_SEQUENCES)
        if one["is_readable"]
        and await connection.fetchval(_IS_BEHIND.format(**one), timeout=_SECONDS)
    ]


async def adopt(connection: asyncpg.Connection, *, keep_progress: bool) -> int:
    """Make the database the service's; return how many events are published again, in order.

    With `keep_progress` relays go on where they were: for a cluster that has kept the ids. Running
    relays wait, and lose their shards. If it fails, nothing has changed.
    """
    async with connection.transaction():
        # Read before the transaction has an id, so that its own changes are not visible in it.
        seen = await connection.fetchval("SELECT pg_current_snapshot()")
        await connection.execute(_SET_NO_LIMITS)
        # No relay may claim a shard after it has compared the former cluster.
        await connection.execute("LOCK TABLE pipeline.outbox_cursor IN ACCESS EXCLUSIVE MODE")
        await connection.execute(_TAKE_SHARDS)
        renewed = 0
        if not keep_progress:
            await connection.execute(_FORGET_PROGRESS, seen)
            done = await connection.execute(_RENEW_EVENTS, timeout=_SECONDS)
            renewed = int(done.split()[-1])
            await connection.execute(_CLOSE_DAYS_AGAIN)
        for one in await connection.fetch(_SEQUENCES):
            await connection.execute(_ADVANCE.format(**one), timeout=_SECONDS)
        await connection.execute(_SET_CLUSTER, keep_progress)
    return renewed
