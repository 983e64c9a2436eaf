"""The audit: what people change, by a command or on the page. Its rows are only added."""

from collections.abc import Sequence
from typing import NamedTuple

import asyncpg

from . import throttle_statements

_NAMED = 20
"""Ids that a row has at most."""


class Change(NamedTuple):
    """Who does what, and why."""

    who: str
    action: str
    why: str | None = None


async def note(connection: asyncpg.Connection, change: Change, subject: str) -> None:
    """Write down a change of the subject, in the transaction that makes it."""
    await connection.execute(
        throttle_statements.ADD_TO_AUDIT, change.who, change.action, subject, change.why
    )


async def note_entries(
    connection: asyncpg.Connection, change: Change, kind: str, keys: Sequence[bytes | int]
) -> None:
    """Write down a change of entries, if there are any, by the ids that commands list."""
    ids = [one.hex()[:16] if isinstance(one, bytes) else str(one) for one in keys[:_NAMED]]
    more = f" and {len(keys) - _NAMED:,} more" if len(keys) > _NAMED else ""
    if ids:
        await note(connection, change, f"{kind} {', '.join(ids)}{more}")
