"""The lease on retention: one process at a time does the work for all."""

import socket
from datetime import datetime
from uuid import uuid4

import asyncpg

_RELEASE_SECONDS = 2.0

# A lease that would last for longer was taken before the clock was set back.
_LEASE = """
UPDATE pipeline.retention_lease
   SET owner = $1, lease_until = clock_timestamp() + make_interval(secs => $2)
 WHERE owner IS NULL OR owner = $1 OR lease_until < clock_timestamp()
    OR lease_until > clock_timestamp() + make_interval(secs => $2)
RETURNING owner
"""

_OWNER = "SELECT COALESCE(owner, 'none') FROM pipeline.retention_lease"

_FINISHED = """
UPDATE pipeline.retention_lease
   SET finished_at = clock_timestamp(), held = $2 WHERE owner = $1
RETURNING finished_at
"""

_END_LEASE = "UPDATE pipeline.retention_lease SET owner = NULL WHERE owner = $1"


class TakenOver(Exception):
    """Another process has the lease."""

    def __init__(self, owner: str) -> None:
        super().__init__(f"another process has taken over retention: {owner}")
        self.owner = owner


class Lease:
    """The lease, as one process acquires it for one round."""

    def __init__(self, connection: asyncpg.Connection, seconds: float) -> None:
        self.owner = f"{socket.gethostname()}:{uuid4().hex[:12]}"
        self._connection = connection
        self._seconds = seconds

    async def take(self) -> None:
        """Acquire or renew the lease. Raises `TakenOver`."""
        if not await self._connection.fetchval(_LEASE, self.owner, self._seconds):
            raise TakenOver(await self._connection.fetchval(_OWNER))

    async def finish(self, held: int) -> datetime:
        """Record that a round is complete; returns the time. Raises `TakenOver`."""
        at: datetime | None = await self._connection.fetchval(_FINISHED, self.owner, held)
        if at is None:
            raise TakenOver(await self._connection.fetchval(_OWNER))
        return at

    async def end(self) -> None:
        """Release the lease."""
        await self._connection.execute(_END_LEASE, self.owner, timeout=_RELEASE_SECONDS)
