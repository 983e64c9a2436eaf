"""Whether this database is the service's own, or a copy that it has not adopted.

In another cluster the transaction ids in the outbox and its cursor mean nothing; they stay valid
after a physical restore or a failover. What a copy publishes, calls or deletes may be what its
original does at the same time. So each new connection is asked. As data can be replaced under an
open one, leases are given, and rounds of retention begun, only where the database is the service's.
`operators/adopting.py` makes it so.
"""

from contextlib import suppress

import asyncpg

from onceward.errors import OncewardError

from . import revisions, statements


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
