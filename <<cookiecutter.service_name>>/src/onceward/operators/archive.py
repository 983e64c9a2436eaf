"""Days of the outbox that people let be dropped without being archived."""

from collections.abc import Sequence
from datetime import date

import asyncpg

from . import audit, statements
from .audit import Change


async def skip(
    connection: asyncpg.Connection, days: Sequence[date] | None, change: Change
) -> list[date]:
    """Let days be dropped without being archived; return those that are closed.

    None: all that are closed, and those to come too, unless a process still has an archive.
    """
    async with audit.changing(connection, change) as subjects:
        if days is None:
            await connection.execute(statements.NOTE_NO_ARCHIVING)
            subjects.append("all days of the outbox")
        skipped = sorted(
            [row["day"] for row in await connection.fetch(statements.SKIP_ARCHIVE, days)]
        )
        subjects.extend(f"day {day} of the outbox" for day in skipped)
    return skipped
