"""Whether this database is the service's own, or a copy that it has not adopted.

In another cluster the transaction ids in the outbox and its cursor mean nothing; they stay valid
after a physical restore or a failover. What a copy publishes, calls or deletes may be what its
original does at the same time. So each new connection is asked. As data can be replaced under an
open one, leases are given, and rounds of retention begun, only where the database is the service's.
"""

from contextlib import suppress

import asyncpg

from pipeline.errors import OncewardError

from . import revisions, statements

_SECONDS = 86_400.0
"""Time-out of a statement that reads or rewrites a whole table."""


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
    return bool(await connection.fetchval(statements.COMPARE_CLUSTER))


async def check_brokers(
    connection: asyncpg.Connection, brokers: str | None, *, stores: bool = False
) -> None:
    """Raise `NotAdopted` if the database was used with other brokers than those of this id.

    `stores` the id if the database has none: at first, or since `adopt`.
    """
    if stores and brokers:
        await connection.execute(statements.STORE_BROKERS, brokers)
    used = await connection.fetchval(statements.READ_BROKERS)
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
