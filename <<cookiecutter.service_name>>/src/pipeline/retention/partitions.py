"""Partitions of a table: attached and dropped without holding up transactions that use the table.

A plain `CREATE … PARTITION OF`, `DROP` or `DETACH` queues behind open transactions, and all later
ones queue behind it. A partition is a table of the schema `pipeline` with a name of its own.
"""

import logging
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Literal, NamedTuple

import asyncpg

from pipeline.errors import OncewardError
from pipeline.servers.database import IDLE_LIMIT

log = logging.getLogger(__name__)

_LOCK = 0x1B0C6
"""Advisory lock: one process makes partitions at a time."""

_DETACH_SECONDS = 30.0
"""How long a detach waits for transactions that use the table; they don't wait for it."""

_WAIT_SHORTLY = f"SELECT set_config('lock_timeout', '2s', true), {IDLE_LIMIT}"

_BEGIN = f"{_WAIT_SHORTLY}, pg_advisory_xact_lock($1)"

# A partition belongs to the owner of its table, whichever member of that role makes it.
_AS_OWNER = """
SELECT set_config('role', pg_get_userbyid(relowner), true)
  FROM pg_class WHERE oid = ('pipeline.' || $1)::regclass
"""

_IS_OWNER = """
SELECT current_user AS role, pg_get_userbyid(relowner) AS owner,
       pg_has_role(relowner, 'USAGE') AS is_owner
  FROM pg_class WHERE oid = 'pipeline.outbox'::regclass
"""

# A pending detach comes first: a table has one at most, and no other can begin before it is done.
_NAMED_LIKE = """
SELECT relname AS name,
       CASE WHEN inhrelid IS NULL THEN 'detached'
            WHEN inhdetachpending THEN 'pending' ELSE 'attached' END AS state
  FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
       LEFT JOIN pg_inherits ON inhrelid = pg_class.oid
 WHERE nspname = 'pipeline' AND relkind = 'r' AND relname ~ $1
 ORDER BY inhdetachpending DESC NULLS LAST, length(relname), relname
"""

_USED_BY = """
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


@dataclass(frozen=True)
class PartitionStatus:
    """When a partition is to be dropped, and why it is not."""

    table: Literal["inbox", "outbox"]
    partition: Partition
    is_due: bool
    """Whether it has reached the age at which it is dropped."""
    due_at: datetime | None = None
    """When it reaches that age, or did; None for a generation that is not closed yet."""
    needed_by: str | None = None
    """Of one that is due: why it is not dropped; None if nothing needs it."""
    is_ahead: bool = False
    """Whether it is a generation that takes no markers yet."""

    @property
    def name(self) -> str:
        """The name of its table."""
        return self.partition.name


class NotOwner(OncewardError, PermissionError):
    """The role may neither make partitions nor drop them. Another process may do it meanwhile."""


async def must_own(connection: asyncpg.Connection) -> None:
    """Raise `NotOwner` unless the connection's role owns partitions, also as a member."""
    role, owner, is_owner = await connection.fetchrow(_IS_OWNER)
    if not is_owner:
        raise NotOwner(
            f"role {role} can neither make nor drop partitions: run `service retention run` every"
            f" hour as a member of their owner {owner}"
        )


async def like(connection: asyncpg.Connection, pattern: str) -> list[Partition]:
    """Return the partitions, attached or not, whose whole names match."""
    rows = await connection.fetch(_NAMED_LIKE, f"^{pattern}$")
    return [Partition(row["name"], State(row["state"])) for row in rows]


async def attach(connection: asyncpg.Connection, parent: str, name: str, bounds: str) -> None:
    """Make a partition, unless it is there. One that was detached is attached again.

    Raises `NotOwner` where it is not there, and another role has to make it.
    """
    attached = [Partition(name, State.ATTACHED)]
    found = await like(connection, name)
    if found == attached:
        return
    await must_own(connection)
    for one in found:
        await detach(connection, parent, one)
    async with connection.transaction():
        await connection.execute(_BEGIN, _LOCK)
        if await like(connection, name) == attached:
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


async def detach(connection: asyncpg.Connection, parent: str, one: Partition) -> None:
    """Detach a partition, or complete a detach that was cut short: it takes no more rows.

    Waits until no transaction uses it. Can be interrupted at any point, repeated, and done by two
    processes at once.
    """
    if one.state is State.ATTACHED:
        await connection.execute(
            f"ALTER TABLE pipeline.{parent} DETACH PARTITION pipeline.{one.name} CONCURRENTLY",
            timeout=_DETACH_SECONDS,
        )
    elif one.state is State.PENDING:
        async with connection.transaction():
            await connection.execute(_WAIT_SHORTLY)
            await connection.execute(
                f"ALTER TABLE pipeline.{parent} DETACH PARTITION pipeline.{one.name} FINALIZE",
                timeout=_DETACH_SECONDS,
            )


async def drop(connection: asyncpg.Connection, name: str) -> str | None:
    """Drop the table of a detached partition; returns why not, if it was attached again."""
    async with connection.transaction():
        await connection.execute(_WAIT_SHORTLY)
        await connection.execute(f"LOCK TABLE pipeline.{name} IN ACCESS EXCLUSIVE MODE")
        if await like(connection, name) != [Partition(name, State.DETACHED)]:
            return "it was attached again"
        await connection.execute(f"DROP TABLE pipeline.{name}")
    log.info("dropped partition %s", name)
    return None


async def used_by(connection: asyncpg.Connection, parent: str, name: str) -> str:
    """Return which process uses a partition, after a wait for its lock has timed out."""
    return await connection.fetchval(_USED_BY, parent, name) or "it was in use for too long"
