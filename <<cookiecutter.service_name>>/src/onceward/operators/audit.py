"""The audit: what people change, by a command or on the page. Its rows are only added."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import asyncpg

from . import stop_statements


class Change(NamedTuple):
    """Who does what, and why."""

    who: str
    action: str
    why: str | None = None


@asynccontextmanager
async def changing(connection: asyncpg.Connection, change: Change) -> AsyncIterator[list[str]]:
    """Begin the transaction of a person's change, whose block adds the names of what it changes.

    The audit gets a row for each of them. So nothing is changed without a row, and no row says what
    was rolled back.
    """
    subjects: list[str] = []
    async with connection.transaction():
        yield subjects
        for one in subjects:
            await note(connection, change, one)


async def note(connection: asyncpg.Connection, change: Change, subject: str) -> None:
    """Write down a change of the subject: before one that takes several transactions."""
    await connection.execute(
        stop_statements.ADD_TO_AUDIT, change.who, change.action, subject, change.why
    )


def entries(kind: str, keys: Sequence[bytes | int]) -> list[str]:
    """Return the name of some entries, with the ids that commands list: none if there are none.

    It has all of them, so that the timeline of each key finds what was done to its entries.
    """
    ids = [one.hex()[:16] if isinstance(one, bytes) else str(one) for one in keys]
    return [f"{kind} {', '.join(ids)}"] if ids else []
