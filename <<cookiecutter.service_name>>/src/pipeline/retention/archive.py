"""The interface to an archive, which keeps days of the outbox before their tables are dropped."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import date
from functools import partial
from time import monotonic
from typing import Protocol

import asyncpg

from pipeline.errors import describe_error

from .lease import Lease, TakenOver
from .partitions import StillNeeded

Report = Callable[[str], Awaitable[None]]

_REPORT_SECONDS = 10.0
"""How often the progress of archiving a day is reported."""

_NO_ARCHIVE = (
    "it is not archived: process {owner} has no archive in its settings. Run retention with the"
    " settings of the others; or, to drop the day without archiving it, `service retention"
    " skip-archive {day}`"
)

# So that a process without an archive does not drop what others archive.
_ARCHIVES = "UPDATE pipeline.retention_lease SET archives = true WHERE NOT archives"

_ARCHIVES_NO_LONGER = "UPDATE pipeline.retention_lease SET archives = false"

_IS_ARCHIVED = """
SELECT archives AND NOT COALESCE(
           (SELECT skips_archive FROM pipeline.outbox_closed WHERE day = $1), false)
  FROM pipeline.retention_lease
"""

_NOT_ARCHIVED = "UPDATE pipeline.outbox_closed SET not_archived = $2 WHERE day = $1"

_SKIP_ARCHIVE = """
UPDATE pipeline.outbox_closed SET skips_archive = true, not_archived = NULL
 WHERE $1::date[] IS NULL OR day = ANY ($1)
RETURNING day
"""


class Archive(Protocol):
    """Stores the days of the outbox before their tables are dropped."""

    def check(self) -> None:
        """Raise `Misconfigured` if the settings of the archive are invalid."""

    @property
    def is_on(self) -> bool:
        """Whether the settings of this process name a place for the days."""

    async def keep(
        self, connection: asyncpg.Connection, table: str, day: date, report: Report
    ) -> None:
        """Store all rows of a table of the schema `pipeline`; return when that is durable.

        The table takes no more rows. The connection is in no transaction. `report` is to be awaited
        every few seconds, and uses the connection; what it raises ends the work. The work can be
        interrupted at any point, repeated, and done by two processes at once. After any other error
        the table is kept until the next round of retention.
        """


class Archiving:
    """Archives days in a round of retention, while this process holds the lease."""

    def __init__(
        self,
        connection: asyncpg.Connection,
        archive: Archive | None,
        lease: Lease,
        report: Callable[[str], None],
    ) -> None:
        self._connection = connection
        self._archive = archive
        self._lease = lease
        self._report = report

    async def before_drop(self, table: str, day: date) -> Callable[[], Awaitable[None]] | None:
        """Return a function that archives a day; None if none does, or the day is to be skipped.

        Raises `StillNeeded` where this process has no archive, and records the reason.
        """
        if not await self._connection.fetchval(_IS_ARCHIVED, day):
            return None
        if self._archive is None:
            why = _NO_ARCHIVE.format(owner=self._lease.owner, day=day)
            raise await self._not_archived(day, why)
        return partial(self._keep, self._archive, table, day)

    async def _keep(self, archive: Archive, table: str, day: date) -> None:
        """Archive a day. Raises `StillNeeded`, or `TakenOver`."""
        report_at = monotonic() + _REPORT_SECONDS

        async def report(progress: str) -> None:
            nonlocal report_at
            await self._lease.take()
            if monotonic() >= report_at:
                self._report(f"archiving {table}: {progress}")
                report_at = monotonic() + _REPORT_SECONDS

        try:
            await archive.keep(self._connection, table, day, report)
            # Without the lease another process may be archiving the day, and would find no table.
            await self._lease.take()
        except (TakenOver, asyncpg.UndefinedTableError):
            raise
        except Exception as error:
            why = f"it is not archived: {describe_error(error)}"
            raise await self._not_archived(day, why) from error

    async def _not_archived(self, day: date, why: str) -> StillNeeded:
        await self._connection.execute(_NOT_ARCHIVED, day, why)
        return StillNeeded(why)


async def record_archiving(connection: asyncpg.Connection) -> None:
    """Record that days are archived, so that processes without an archive do not drop them."""
    await connection.execute(_ARCHIVES)


async def skip(connection: asyncpg.Connection, days: Sequence[date] | None) -> list[date]:
    """Let days be dropped without being archived; return those that are closed.

    None: all that are closed, and those to come too, unless a process still has an archive.
    """
    if days is None:
        await connection.execute(_ARCHIVES_NO_LONGER)
    return sorted([row["day"] for row in await connection.fetch(_SKIP_ARCHIVE, days)])
