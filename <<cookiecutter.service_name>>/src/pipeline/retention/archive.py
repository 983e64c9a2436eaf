"""The interface to an archive, which keeps days of the outbox before their tables are dropped."""

import socket
from collections.abc import Awaitable, Callable, Sequence
from datetime import date
from time import monotonic
from typing import Protocol

import asyncpg

from pipeline.apply import audit
from pipeline.apply.audit import Change
from pipeline.errors import describe_error

Report = Callable[[str], Awaitable[None]]

_REPORT_SECONDS = 10.0
"""How often the progress of archiving a day is reported."""

_NO_ARCHIVE = (
    "it is not archived: the process on {host} has no archive in its settings. Run retention with"
    " the settings of the others; or, to drop the day without archiving it, `service retention"
    " skip-archive {day}`"
)

_ARCHIVES = "UPDATE pipeline.retention_round SET archives = true WHERE NOT archives"

_ARCHIVES_NO_LONGER = "UPDATE pipeline.retention_round SET archives = false"

_IS_ARCHIVED = """
SELECT archives AND NOT COALESCE(
           (SELECT skips_archive FROM pipeline.outbox_closed WHERE day = $1), false)
  FROM pipeline.retention_round
"""

# So that no other process begins a round meanwhile.
_CONTINUE_ROUND = "UPDATE pipeline.retention_round SET started_at = clock_timestamp()"

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


async def record_archiving(connection: asyncpg.Connection, archive: Archive | None) -> None:
    """Record whether days are archived, so that processes without an archive do not drop them."""
    if archive is not None and archive.is_on:
        await connection.execute(_ARCHIVES)


async def lacking(connection: asyncpg.Connection, archive: Archive | None, day: date) -> str | None:
    """Return why this process may not drop the day, if days are archived and it has no archive."""
    if (archive and archive.is_on) or not await connection.fetchval(_IS_ARCHIVED, day):
        return None
    why = _NO_ARCHIVE.format(host=socket.gethostname(), day=day)
    await connection.execute(_NOT_ARCHIVED, day, why)
    return why


async def archive_day(
    connection: asyncpg.Connection,
    archive: Archive | None,
    table: str,
    day: date,
    report: Callable[[str], None],
) -> str | None:
    """Archive a day, if days are archived; returns why it may not be dropped, and records that."""
    if archive is None or not await connection.fetchval(_IS_ARCHIVED, day):
        return None
    report_at = monotonic() + _REPORT_SECONDS

    async def report_progress(progress: str) -> None:
        nonlocal report_at
        await connection.execute(_CONTINUE_ROUND)
        if monotonic() >= report_at:
            report(f"archiving {table}: {progress}")
            report_at = monotonic() + _REPORT_SECONDS

    try:
        await archive.keep(connection, table, day, report_progress)
        return None
    except asyncpg.UndefinedTableError:
        raise
    except Exception as error:
        why = f"it is not archived: {describe_error(error)}"
    await connection.execute(_NOT_ARCHIVED, day, why)
    return why


async def skip(
    connection: asyncpg.Connection, days: Sequence[date] | None, change: Change
) -> list[date]:
    """Let days be dropped without being archived; return those that are closed.

    None: all that are closed, and those to come too, unless a process still has an archive.
    """
    async with audit.changing(connection, change) as subjects:
        if days is None:
            await connection.execute(_ARCHIVES_NO_LONGER)
            subjects.append("all days of the outbox")
        skipped = sorted([row["day"] for row in await connection.fetch(_SKIP_ARCHIVE, days)])
        subjects.extend(f"day {day} of the outbox" for day in skipped)
    return skipped
