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

from onceward.errors import OncewardError

from . import partition_statements

log = logging.getLogger(__name__)

_LOCK = 0x1B0C6
"""Advisory lock: one process makes partitions at a time."""

_DETACH_SECONDS = 30.0
"""How long a detach waits for transactions that use the table; they don't wait for it."""


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
    role, owner, is_owner = await connection.fetchrow(partition_statements.READ_OWNER)
    if not is_owner:
        raise NotOwner(
            f"role {role} can neither make nor drop partitions: run `service retention run` every"
            f" hour as a member of their owner {owner}"
        )


async def like(connection: asyncpg.Connection, pattern: str) -> list[Partition]:
    """Return the partitions, attached or not, whose whole names match."""
    rows = await connection.fetch(partition_statements.LIST_PARTITIONS, f"^{pattern}$")
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
        await connection.execute(partition_statements.LOCK_PARTITIONS, _LOCK)
        if await like(connection, name) == attached:
            return
        await connection.execute(partition_statements.BECOME_OWNER, parent)
        for statement in (
            partition_statements.CREATE_PARTITION,
            partition_statements.ATTACH_PARTITION,
        ):
            await connection.execute(statement.format(parent=parent, name=name, bounds=bounds))
    log.info("made partition %s", name)


async def detach(connection: asyncpg.Connection, parent: str, one: Partition) -> None:
    """Detach a partition, or complete a detach that was cut short: it takes no more rows.

    Waits until no transaction uses it. Can be interrupted at any point, repeated, and done by two
    processes at once.
    """
    if one.state is State.ATTACHED:
        await connection.execute(
            partition_statements.DETACH_PARTITION.format(parent=parent, name=one.name),
            timeout=_DETACH_SECONDS,
        )
    elif one.state is State.PENDING:
        async with connection.transaction():
            await connection.execute(partition_statements.LIMIT_WAIT_FOR_LOCK)
            await connection.execute(
                partition_statements.FINALIZE_DETACH.format(parent=parent, name=one.name),
                timeout=_DETACH_SECONDS,
            )


async def drop(connection: asyncpg.Connection, name: str) -> str | None:
    """Drop the table of a detached partition; returns why not, if it was attached again."""
    async with connection.transaction():
        await connection.execute(partition_statements.LIMIT_WAIT_FOR_LOCK)
        await connection.execute(partition_statements.LOCK_PARTITION.format(name=name))
        if await like(connection, name) != [Partition(name, State.DETACHED)]:
            return "it was attached again"
        await connection.execute(partition_statements.DROP_PARTITION.format(name=name))
    log.info("dropped partition %s", name)
    return None


async def used_by(connection: asyncpg.Connection, parent: str, name: str) -> str:
    """Return which process uses a partition, after a wait for its lock has timed out."""
    found = await connection.fetchval(partition_statements.FIND_USER_OF_PARTITION, parent, name)
    return found or "it was in use for too long"
