"""Sweeping: payloads whose events were never committed, or were published long ago, are deleted.

A row of `pipeline.claim` is committed together with the event that refers to the object of its
name. What has been in the store for longer than any transaction can take, and has no row, is an
orphan.
"""

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta

import asyncpg

from onceward.object_store import Store
from onceward.settings import CLOCK_MARGIN

log = logging.getLogger(__name__)

_AT_ONCE = 1_000
_A_ROUND = 100_000
"""Objects that a round looks at, about; the next one goes on."""

_NOW = "SELECT clock_timestamp()"

# What the relays may not have published yet begins at the oldest that any of them waits for. All in
# one statement: an event goes from one of these places to the next in a transaction.
_NOTE_PUBLISHED = """
WITH waiting AS MATERIALIZED (
    SELECT event_id FROM pipeline.outbox
     WHERE dataref IS NOT NULL
       AND xid >= (SELECT pg_snapshot_xmin(seen) FROM pipeline.outbox_cursor
                    ORDER BY pg_snapshot_xmin(seen) LIMIT 1)
     UNION ALL
    SELECT event_id FROM pipeline.outbox_rejected
     WHERE dataref IS NOT NULL AND discarded_at IS NULL
     UNION ALL
    SELECT event_id FROM pipeline.scheduled WHERE dataref IS NOT NULL)
UPDATE pipeline.claim SET published_at = clock_timestamp()
 WHERE published_at IS NULL
   AND NOT EXISTS (SELECT FROM waiting WHERE waiting.event_id = claim.event_id)
"""

_OLD = """
SELECT count(*) FROM pipeline.claim
 WHERE published_at < clock_timestamp() - make_interval(secs => $1)
"""

_DELETE_OLD = """
DELETE FROM pipeline.claim
 WHERE name = ANY (ARRAY(
       SELECT name FROM pipeline.claim
        WHERE published_at < clock_timestamp() - make_interval(secs => $1)
        ORDER BY published_at LIMIT $2))
RETURNING name
"""

_WITHOUT_A_ROW = """
SELECT name FROM unnest($1::text[]) AS there (name)
 WHERE NOT EXISTS (SELECT FROM pipeline.claim WHERE claim.name = there.name)
"""


@dataclass
class Swept:
    """What a sweep has done, or would do."""

    old: int = 0
    """Payloads deleted whose events were published long ago."""
    orphans: int = 0
    """Payloads deleted whose events were never committed."""
    seen: int = 0
    """Objects looked at in search of orphans."""


class Sweep:
    """Goes through the store in rounds of bounded work; a round goes on where the last one ended.

    Any number of processes may do so at once: what another one has deleted is skipped.
    """

    def __init__(self, store: Store, folder: str, *, grace: float, age: float) -> None:
        """`folder` holds nothing but payloads of this service, in a folder for each day; `grace`
        and `age` are in seconds, see `ClaimSettings`."""
        self._store = store
        self._folder = folder
        self._grace = timedelta(seconds=grace)
        self._age = age
        self._after = ""
        """The folder that the last round ended with; empty: it has listed all."""

    async def round(self, connection: asyncpg.Connection) -> Swept:
        """Delete old payloads, and some orphans. Raises `StoreUnavailable`."""
        done = Swept()
        await connection.execute(_NOTE_PUBLISHED)
        await self._delete_old(connection, done)
        before = await self._latest(connection)
        for folder in await self._store.folders(self._folder):
            if folder <= self._after:
                continue
            await self._delete_orphans(connection, folder, before, done, dry_run=False)
            self._after = folder
            if done.seen >= _A_ROUND:
                break
        else:
            self._after = ""
        if done.old or done.orphans:
            log.info(
                "object store: deleted %s old payloads, and %s without an event",
                done.old,
                done.orphans,
            )
        return done

    async def all(self, connection: asyncpg.Connection, *, dry_run: bool) -> Swept:
        """Delete all old payloads and orphans; a dry run only counts them.

        Raises `StoreUnavailable`.
        """
        done = Swept()
        if dry_run:
            done.old = await connection.fetchval(_OLD, self._age)
        else:
            await connection.execute(_NOTE_PUBLISHED)
            await self._delete_old(connection, done)
        before = await self._latest(connection)
        for folder in await self._store.folders(self._folder):
            await self._delete_orphans(connection, folder, before, done, dry_run=dry_run)
        return done

    async def _delete_old(self, connection: asyncpg.Connection, done: Swept) -> None:
        names = [""]
        while names and done.old < _A_ROUND:
            rows = await connection.fetch(_DELETE_OLD, self._age, _AT_ONCE)
            names = [row["name"] for row in rows]
            # A process that dies before this leaves orphans.
            await self._store.delete(names)
            done.old += len(names)

    async def _latest(self, connection: asyncpg.Connection) -> datetime:
        """Return when an orphan was stored at the latest; the clocks may be some time apart."""
        now: datetime = await connection.fetchval(_NOW)
        return now - self._grace - CLOCK_MARGIN

    async def _delete_orphans(
        self,
        connection: asyncpg.Connection,
        folder: str,
        before: datetime,
        done: Swept,
        *,
        dry_run: bool,
    ) -> None:
        async for page in self._store.pages(folder):
            old = [name for name, stored_at in page.items() if stored_at < before]
            rows = await connection.fetch(_WITHOUT_A_ROW, old)
            orphans = [row["name"] for row in rows]
            if not dry_run:
                await self._store.delete(orphans)
            done.orphans += len(orphans)
            done.seen += len(page)
