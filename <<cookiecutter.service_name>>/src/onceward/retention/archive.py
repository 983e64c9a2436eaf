"""The interface to an archive, which keeps days of the outbox before their tables are dropped."""

import socket
from collections.abc import Awaitable, Callable
from datetime import date
from time import monotonic
from typing import Protocol

import asyncpg

from onceward.errors import describe_error

from . import statements

Report = Callable[[str], Awaitable[None]]

_REPORT_SECONDS = 10.0
"""How often the progress of archiving a day is reported."""

_NO_ARCHIVE = (
    "it is not archived: the process on {host} has no archive in its settings. Run retention with"
    " the settings of the others; or, to drop the day without archiving it, `service retention"
    " skip-archive {day}`"
)


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
        await connection.execute(statements.NOTE_ARCHIVING)


async def lacking(connection: asyncpg.Connection, archive: Archive | None, day: date) -> str | None:
    """Return why this process may not drop the day, if days are archived and it has no archive."""
    if archive and archive.is_on:
        return None
    if not await connection.fetchval(statements.MUST_ARCHIVE_DAY, day):
        return None
    why = _NO_ARCHIVE.format(host=socket.gethostname(), day=day)
    await connection.execute(statements.NOTE_DAY_NOT_ARCHIVED, day, why)
    return why


async def archive_day(
    connection: asyncpg.Connection,
    archive: Archive | None,
    table: str,
    day: date,
    report: Callable[[str], None],
) -> str | None:
    """Archive a day, if days are archived; returns why it may not be dropped, and records that."""
    if archive is None or not await connection.fetchval(statements.MUST_ARCHIVE_DAY, day):
        return None
    report_at = monotonic() + _REPORT_SECONDS

    async def report_progress(progress: str) -> None:
        nonlocal report_at
        await connection.execute(statements.CONTINUE_ROUND)
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
    await connection.execute(statements.NOTE_DAY_NOT_ARCHIVED, day, why)
    return why
