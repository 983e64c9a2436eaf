"""Scheduled events, as people list, count and cancel them."""

from dataclasses import dataclass
from datetime import datetime

import asyncpg

from onceward.handlers.statements import CANCEL_SCHEDULED

from . import audit, statements
from .audit import Change


@dataclass(frozen=True)
class Waiting:
    """A scheduled event that is not published yet."""

    name: str
    due_at: datetime
    scheduled_at: datetime
    topic: str
    key: str | None
    type: str
    event_id: str
    size: int
    """Size of the payload, in bytes."""


async def waiting(connection: asyncpg.Connection, limit: int) -> list[Waiting]:
    """Return scheduled events, the next to be due first."""
    return [Waiting(**row) for row in await connection.fetch(statements.LIST_SCHEDULED, limit)]


async def count(connection: asyncpg.Connection, most: int) -> tuple[int, datetime | None]:
    """Return how many events are scheduled, up to a number, and when the first is due."""
    found, next_due = await connection.fetchrow(statements.COUNT_SCHEDULED, most)
    return found, next_due


async def cancel(
    connection: asyncpg.Connection, names: list[str], *, operator: str, why: str | None = None
) -> list[str]:
    """Cancel scheduled events; returns the names of those that were still waiting."""
    async with audit.changing(connection, Change(operator, "cancel", why)) as subjects:
        cancelled = sorted([row["name"] for row in await connection.fetch(CANCEL_SCHEDULED, names)])
        subjects.extend(f"scheduled event {name}" for name in cancelled)
    return cancelled
