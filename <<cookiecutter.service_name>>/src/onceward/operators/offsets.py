"""Positions of partitions, as people look them up and set them."""

import asyncpg

from onceward.apply.positions import Slot

from . import audit, statements
from .audit import Change


async def of_group(connection: asyncpg.Connection, group: str) -> list[asyncpg.Record]:
    """Return each position, with its last move and record, and its number of duplicates."""
    rows: list[asyncpg.Record] = await connection.fetch(statements.READ_POSITIONS_OF_GROUP, group)
    return rows


async def seek(connection: asyncpg.Connection, slot: Slot, offset: int, change: Change) -> None:
    """Set the position of a partition, for an operator's command; the audit has it.

    A batch that is under way raises `PositionMoved` and is rolled back.
    """
    async with audit.changing(connection, change) as subjects:
        await connection.execute(statements.SET_POSITION, *slot, offset)
        subjects.append(_goes(slot, offset))


async def rewind(connection: asyncpg.Connection, slot: Slot, offset: int, change: Change) -> None:
    """Set the position of a partition back to an offset, unless it is before that already.

    The audit has it.
    """
    async with audit.changing(connection, change) as subjects:
        await connection.execute(statements.SET_POSITION_BACK, *slot, offset)
        subjects.append(_goes(slot, offset))


def _goes(slot: Slot, offset: int) -> str:
    return f"{slot.topic}/{slot.partition} to {offset}"
