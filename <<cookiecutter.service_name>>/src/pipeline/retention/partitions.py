"""Partitions of a table: attached and dropped so that nobody who uses the table waits.

A plain `CREATE … PARTITION OF`, `DROP` or `DETACH` queues behind open transactions, and everybody
else queues behind it. A partition is a table of the schema `pipeline` with a name of its own.
"""

import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import NamedTuple

import asyncpg

log = logging.getLogger(__name__)

HOUSEKEEPING_LOCK = 0x1B0C6
"""Advisory lock: one process makes partitions at a time."""

_DETACH_SECONDS = 30.0
"""How long a detach waits for those who have begun with the table; they don't wait for it."""

BEGIN = "SELECT set_config('lock_timeout', '2s', true), pg_advisory_xact_lock($1)"
"""Begins a transaction that changes partitions: waits for no lock for long, this one the first."""

# What is made belongs to whom its table belongs to, whoever of its members makes it.
_AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true)
  FROM pg_class WHERE oid = ('pipeline.' || $1)::regclass
"""

_IS_OWNER = """
SELECT current_user AS who, pg_get_userbyid(relowner) AS owner,
       pg_has_role(relowner, 'USAGE') AS is_owner
  FROM pg_class WHERE oid = 'pipeline.outbox'::regclass
"""

_WAIT_SHORTLY = "SELECT set_config('lock_timeout', '2s', true)"

# Not `to_regclass`: it answers from the session's cache, which behind a lock that was waited for
# does not know yet what the other process has made.
_EXISTS = """
SELECT EXISTS (
       SELECT FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
        WHERE nspname = 'pipeline' AND relname = $1)
"""

# What is half done comes first: a table has one at most, and no other can follow before it is done.
_NAMED_LIKE = """
SELECT relname AS name,
       CASE WHEN inhrelid IS NULL THEN 'detached'
            WHEN inhdetachpending THEN 'pending' ELSE 'attached' END AS state
  FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
       LEFT JOIN pg_inherits ON inhrelid = pg_class.oid
 WHERE nspname = 'pipeline' AND relkind = 'r' AND relname ~ $1
 ORDER BY inhdetachpending DESC NULLS LAST, length(relname), relname
"""

_WHO_USES = """
SELECT format('process %s of %s uses it since %s', pid,
              COALESCE(NULLIF(application_name, ''), usename, '?'), xact_start)
  FROM pg_locks JOIN pg_stat_activity USING (pid)
 WHERE locktype = 'relation' AND granted AND pid <> pg_backend_pid()
   AND relation IN (to_regclass('pipeline.' || $1), to_regclass('pipeline.' || $2))
 ORDER BY xact_start LIMIT 1
"""


class State(Enum):
    """How far a partition is from being dropped."""

    ATTACHED = "attached"
    PENDING = "pending"
    """Its detach was cut short: its table hides it, and the detach must be finalized."""
    DETACHED = "detached"


class Partition(NamedTuple):
    """A table that is a partition, or was one."""

    name: str
    state: State


class StillNeeded(Exception):
    """The partition can't be dropped now; what is begun goes on the next time."""


class NotOwner(PermissionError):
    """The role may not make partitions, nor drop them. It can be tried again: another one may."""


async def must_own(connection: asyncpg.Connection) -> None:
    """Raise `NotOwner` unless the connection's role owns partitions, or is a member of who does."""
    who, owner, is_owner = await connection.fetchrow(_IS_OWNER)
    if not is_owner:
        raise NotOwner(
            f"role {who} can neither make nor drop partitions: run `service retention run` every"
            f" hour as a member of their owner {owner}"
        )


async def exists(connection: asyncpg.Connection, table: str) -> bool:
    """Whether the schema has such a table."""
    return bool(await connection.fetchval(_EXISTS, table))


async def like(connection: asyncpg.Connection, pattern: str) -> list[Partition]:
    """Return the partitions, attached or not, whose whole names match."""
    rows = await connection.fetch(_NAMED_LIKE, f"^{pattern}$")
    return [Partition(row["name"], State(row["state"])) for row in rows]


async def attach(connection: asyncpg.Connection, parent: str, name: str, bounds: str) -> None:
    """Make a partition, unless it is there. One that was detached is attached again.

    Raises `NotOwner` where it is not there, and another role has to make it.
    """
    there = {one.name: one.state for one in await like(connection, name)}
    if there.get(name) is State.ATTACHED:
        return
    await must_own(connection)
    if there.get(name) is State.PENDING:
        await _finalize(connection, parent, name)
    async with connection.transaction():
        await connection.execute(BEGIN, HOUSEKEEPING_LOCK)
        if [*await like(connection, name)] == [Partition(name, State.ATTACHED)]:
            return
        await connection.execute(_AS_OWNER, parent)
        await connection.execute(
            f"CREATE TABLE IF NOT EXISTS pipeline.{name}"
            f" (LIKE pipeline.{parent} INCLUDING ALL EXCLUDING IDENTITY)"
        )
        await connection.execute(
            f"ALTER TABLE pipeline.{parent} ATTACH PARTITION pipeline.{name} FOR VALUES {bounds}"
        )
    log.info("made partition %s", name)


async def drop(
    connection: asyncpg.Connection,
    parent: str,
    partition: Partition,
    *,
    first: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Detach a partition and drop it, from whatever state it is in. Nobody may need it any more.

    `first` is called in between, when nobody writes to it, and what that raises keeps it. Can be
    cut off at any point, called again, and by two at once. Raises `Held` where it can't go.
    """
    name = partition.name
    try:
        match partition.state:
            case State.ATTACHED:
                # In no transaction: it waits, in one of its own, until nobody sees the partition.
                await connection.execute(
                    f"ALTER TABLE pipeline.{parent} DETACH PARTITION pipeline.{name} CONCURRENTLY",
                    timeout=_DETACH_SECONDS,
                )
            case State.PENDING:
                await _finalize(connection, parent, name)
            case State.DETACHED:
                pass
        if first is not None:
            await first()
        async with connection.transaction():
            await connection.execute(_WAIT_SHORTLY)
            # Since it was detached much time may have passed: somebody may have attached it again.
            await connection.execute(f"LOCK TABLE pipeline.{name} IN ACCESS EXCLUSIVE MODE")
            if await like(connection, name) != [Partition(name, State.DETACHED)]:
                raise StillNeeded("somebody has attached it again")
            await connection.execute(f"DROP TABLE pipeline.{name}")
    except (TimeoutError, asyncpg.QueryCanceledError, asyncpg.LockNotAvailableError) as error:
        raise StillNeeded(await used_by(connection, parent, name)) from error
    except asyncpg.UndefinedTableError:
        # Another process is at it: what is left of it is seen in the next round.
        if await exists(connection, name):
            raise StillNeeded("another process is dropping it") from None
    except asyncpg.PostgresError as error:
        raise StillNeeded(str(error)) from error
    log.info("dropped partition %s", name)


async def used_by(connection: asyncpg.Connection, parent: str, name: str) -> str:
    """Say who uses a partition, for whom somebody has waited in vain."""
    return await connection.fetchval(_WHO_USES, parent, name) or "somebody has used it for too long"


async def _finalize(connection: asyncpg.Connection, parent: str, name: str) -> None:
    """End a detach that was cut short. Who reads the partition since then must have ended."""
    async with connection.transaction():
        await connection.execute(_WAIT_SHORTLY)
        await connection.execute(
            f"ALTER TABLE pipeline.{parent} DETACH PARTITION pipeline.{name} FINALIZE",
            timeout=_DETACH_SECONDS,
        )
