"""Scheduled events: kept in a table of their own, and moved into the outbox when they are due.

One relay at a time moves them, so that two of one key keep the order in which they are due. A move
is a transaction: neither a kill nor a jump of the clock loses an event or publishes it twice.
"""

import logging
from time import monotonic

import asyncpg

from onceward.errors import describe_error
from onceward.observe.health import Health

from . import statements

log = logging.getLogger(__name__)

MOVE_LOCK = 0x1B0C8
"""Advisory lock: one relay moves scheduled events at a time."""

_PART = "scheduled events"
"""The part of the health that reports whether they are moved."""
_AT_ONCE = 1_000
_LOOK_SECONDS = 1.0
"""Time between two checks for due events."""


class Scheduled:
    """Moves scheduled events that are due into the outbox."""

    def __init__(self) -> None:
        self._look_at = 0.0

    async def move_if_due(self, connection: asyncpg.Connection, health: Health) -> bool:
        """Move events that are due, if a second has passed; returns whether there were any.

        An error of the server makes them wait, and is reported; publishing goes on.
        """
        if monotonic() < self._look_at:
            return False
        try:
            has_moved = await self.move(connection)
        except asyncpg.PostgresError as error:
            if connection.is_closed():
                raise
            reason = f"they wait: {describe_error(error)}"
            if reason != health.reasons.get(_PART):
                log.warning("relay: %s: %s", _PART, reason)
            health.not_ready(_PART, reason)
            return False
        health.ready(_PART)
        return has_moved

    async def move(self, connection: asyncpg.Connection) -> bool:
        """Move events that are due, up to a limit; returns whether there were any."""
        self._look_at = monotonic() + _LOOK_SECONDS
        moved = 0
        if await connection.fetchval(statements.IS_SCHEDULED_DUE):
            # A statement of its own after the lock, so that it sees what the last holder has moved.
            async with connection.transaction():
                if await connection.fetchval(statements.LOCK_MOVE, MOVE_LOCK):
                    done = await connection.execute(statements.MOVE_SCHEDULED, _AT_ONCE)
                    moved = int(done.split()[-1])
        if moved == _AT_ONCE:
            self._look_at = 0.0
        return moved > 0
