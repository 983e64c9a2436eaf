"""The cursor: how far each shard of the outbox is published, stored under leases.

A lease ends by the database's clock and, for this process, by its own monotonic clock. Every write
compares the token of the lease, so that a relay that lost a shard changes nothing of its progress.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from time import monotonic

import asyncpg

from onceward.errors import SourceLost
from onceward.observe import metrics
from onceward.schema import SHARDS
from onceward.servers.cluster import NotAdopted
from onceward.settings import Settings

from . import statements
from .window import Page, Progress

log = logging.getLogger(__name__)

Fence = Callable[[Sequence[str]], Awaitable[list[str]]]
"""Makes the brokers reject further events of the relays named; returns those that were fenced."""


class LeaseExpired(SourceLost):
    """The lease ended before the step under it: another relay may own the shards."""


class ServerChanged(SourceLost):
    """The pooler now leads to another server: only its cursor says which events were published."""

    def __init__(self) -> None:
        super().__init__("the database server was restarted or replaced: reading the cursor again")


class Cursor:
    """The shards that one relay owns, and how far it has published each."""

    def __init__(self, settings: Settings, owner: str) -> None:
        self._settings = settings
        self.owner = owner
        self.progress: dict[int, Progress] = {}
        self.published = 0
        """Events acknowledged since the process began."""
        self.server: datetime | None = None
        """When the server that holds the cursor was started."""
        self.turn = asyncio.Lock()
        """Guards the connection while a page is sent: leases are extended, pages read meanwhile."""
        self._tokens: dict[int, int] = {}
        self._lease_ends = 0.0
        self._extend_at = 0.0
        self._renew_at = 0.0
        self._write_at = 0.0
        self._unwritten: set[int] = set()

    def forget(self) -> None:
        """Drop all shards from memory, for a new connection: `renew` is to be called first on it.

        The database is not changed: their leases expire.
        """
        self.progress.clear()
        self._tokens.clear()
        self._unwritten.clear()
        self.server = None
        self._renew_at = 0.0
        metrics.relay_shards.set(0)

    def holds_lease(self) -> bool:
        """Whether no other relay can own the shards yet."""
        return monotonic() < self._lease_ends

    @property
    def is_renewal_due(self) -> bool:
        """Whether it is time for `renew`."""
        return monotonic() >= self._renew_at

    @property
    def seconds_to_extension(self) -> float:
        """Seconds until the lease is to be extended; 0 if that is due."""
        return max(0.0, self._extend_at - monotonic())

    def advance(self, page: Page) -> None:
        """Set the progress of the page's shards, to be stored by the next write if it has moved."""
        self.progress.update(dict.fromkeys(page.shards, page.then))
        if page.events or page.then.target is not None:
            self._unwritten.update(page.shards)

    async def renew(self, driver: asyncpg.Connection, fence: Fence) -> bool:
        """Extend the leases, and claim or release shards up to an even share of all relays.

        Returns whether some were claimed. Raises `NotAdopted` and `ServerChanged`.
        """
        lease = self._settings.relay_lease
        await self.extend(driver)
        alive, first_ends, is_ours, server = await driver.fetchrow(statements.COUNT_RELAYS, lease)
        if not is_ours:
            raise NotAdopted
        if self.server not in (None, server):
            raise ServerChanged
        self.server = server
        share = math.ceil(SHARDS / max(1, alive))
        known = sorted(self.progress)
        if len(known) > share:
            await self.write(driver, self.of(known[share:]), keep=False)
        elif len(known) < share:
            gone, until = await driver.fetchrow(statements.FIND_EXPIRED_RELAYS, self.owner, lease)
            fenced = await fence(gone or [])
            wanted = share - len(known)
            for row in await driver.fetch(
                statements.CLAIM_SHARDS, self.owner, lease, wanted, known, fenced, until, server
            ):
                shard, token, *progress = row
                self._tokens[shard], self.progress[shard] = token, Progress(*progress)
        # A live relay extends its leases early, so the first one to end belongs to a dead relay.
        self._renew_at = monotonic() + min(lease / 3, first_ends or math.inf)
        metrics.relay_shards.set(len(self.progress))
        return len(self.progress) > len(known)

    async def extend_if_due(self, driver: asyncpg.Connection) -> bool:
        """Extend the leases if a third of their time has passed; returns whether it has."""
        if monotonic() < self._extend_at:
            return False
        if await self.extend(driver):
            raise LeaseExpired("lost the lease of shards before all events were sent")
        return True

    async def extend(self, driver: asyncpg.Connection) -> list[int]:
        """Extend the leases; returns the shards that went to another relay."""
        lease = self._settings.relay_lease
        # Taken before the first statement, so that this clock ends the lease before the database's.
        begun = monotonic()
        async with self.turn:
            await driver.execute(statements.ANNOUNCE_RELAY, self.owner, lease, self.published)
            lost = await self.write(driver, self.progress)
        self._lease_ends = begun + lease
        metrics.lease_extended(self._lease_ends)
        self._extend_at = begun + lease / 3
        return lost

    async def write(
        self, driver: asyncpg.Connection, progress: Mapping[int, Progress], *, keep: bool = True
    ) -> list[int]:
        """Store the progress of shards and extend their leases, or release them.

        Returns the shards that another relay has claimed meanwhile.
        """
        lost: list[int] = []
        for one, members in grouped(progress).items():
            rows = await driver.fetch(
                statements.WRITE_PROGRESS,
                members,
                [self._tokens[shard] for shard in members],
                one.seen,
                one.target,
                one.last_id,
                one.high_id,
                keep,
                self._settings.relay_lease,
                self.server,
            )
            still_ours = {row["shard"] for row in rows}
            for shard in members:
                self._unwritten.discard(shard)
                if not keep or shard not in still_ours:
                    del self.progress[shard], self._tokens[shard]
            lost += [shard for shard in members if shard not in still_ours]
        if lost:
            log.warning("relay: lost the lease of shards %s", lost)
        self._write_at = monotonic() + self._settings.relay_cursor_interval
        return lost

    async def write_if_due(self, driver: asyncpg.Connection) -> None:
        """Store progress, unless the last write was a moment ago: each updates the same rows."""
        if self._unwritten and monotonic() >= self._write_at:
            await self.write_moved(driver)

    async def write_moved(self, driver: asyncpg.Connection) -> None:
        """Store the progress of the shards that have moved since the last write."""
        await self.write(driver, self.of(self._unwritten))

    @asynccontextmanager
    async def writing(
        self, driver: asyncpg.Connection, progress: Mapping[int, Progress]
    ) -> AsyncIterator[None]:
        """Store the progress and what the block writes together. Raises `LeaseExpired`."""
        async with self.turn, driver.transaction():
            if await self.write(driver, progress):
                raise LeaseExpired("lost the lease of shards before rejections were stored")
            yield

    async def release(self, driver: asyncpg.Connection) -> None:
        """Store all progress and release the shards."""
        await self.write(driver, self.progress, keep=False)
        await driver.execute(statements.DELETE_RELAY, self.owner)

    def of(self, shards: Iterable[int]) -> dict[int, Progress]:
        """Return the progress of some shards."""
        return {shard: self.progress[shard] for shard in sorted(shards)}


def grouped(progress: Mapping[int, Progress]) -> dict[Progress, list[int]]:
    """Return the shards by their progress: those with the same are read and written together."""
    groups: dict[Progress, list[int]] = {}
    for shard, one in progress.items():
        groups.setdefault(one, []).append(shard)
    return groups
