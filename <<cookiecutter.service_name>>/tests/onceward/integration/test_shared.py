"""What the messages of a batch share, as the page of delivery guarantees says."""

import asyncio
from typing import Any

import asyncpg
import sqlalchemy as sa

from onceward import Transaction

from .test_session import Habits, habits
from .test_versions import Numbered, Sum

__all__ = ["habits"]

COUNT = """
CREATE TABLE written (rows int);
CREATE FUNCTION count_rows() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO written SELECT count(*) FROM new_rows; RETURN NULL; END $$;
CREATE TRIGGER counted AFTER {event} ON {table}
    REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION count_rows();
"""


async def test_time_and_id_of_the_transaction(habits: Habits) -> None:
    seen: list[Any] = []
    clock = "SELECT now(), pg_current_xact_id()::text, clock_timestamp()"

    async def look(tx: Transaction, key: str) -> None:
        seen.append((await tx.session.execute(sa.text(clock))).one())

    habits.habits = dict.fromkeys((1, 2, 3), look)
    await habits.together(1, 2)
    await habits.together(3)
    first, second, later = seen
    assert first[:2] == second[:2]
    assert first[2] < second[2]
    assert first[0] < later[0]
    assert first[1] != later[1]


async def test_locks_are_held_until_the_last_message_is_handled(
    habits: Habits, db: asyncpg.Connection
) -> None:
    free: list[bool] = []

    async def lock(tx: Transaction, key: str) -> None:
        await tx.session.execute(sa.text("SELECT pg_advisory_xact_lock(1)"))

    async def look(tx: Transaction, key: str) -> None:
        free.append(await db.fetchval("SELECT pg_try_advisory_xact_lock(1)"))

    habits.habits = {1: lock, 2: look, 3: look}
    await habits.together(1, 2)
    await habits.together(3)
    assert free == [False, True]


async def test_equal_notifications_are_sent_once(habits: Habits, db: asyncpg.Connection) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    await db.add_listener("shared", lambda *heard_of: heard.put_nowait(heard_of[-1]))

    async def notify(tx: Transaction, key: str) -> None:
        await tx.session.execute(sa.text("NOTIFY shared, 'equal'"))

    async def notify_otherwise(tx: Transaction, key: str) -> None:
        await tx.session.execute(sa.text("NOTIFY shared, 'other'"))

    habits.habits = {1: notify, 2: notify, 3: notify_otherwise}
    await habits.together(1, 2, 3)
    await db.execute("NOTIFY shared, 'end'")
    assert [await heard.get() for _ in range(3)] == ["equal", "other", "end"]
    await db.execute("UNLISTEN shared")


async def test_a_trigger_for_each_statement_fires_once(
    habits: Habits, db: asyncpg.Connection
) -> None:
    await db.execute(COUNT.format(event="INSERT", table="versions_numbered"))

    async def add(tx: Transaction, key: str) -> None:
        tx.add(Numbered(text=key))

    habits.habits = {1: add}
    await habits.apply(1, "a", "b", "c")
    await habits.apply(1, "d")
    assert await rows_written(db) == [3, 1]


async def test_a_row_is_written_once_unless_the_database_judges_it(
    habits: Habits, db: asyncpg.Connection
) -> None:
    await db.execute(COUNT.format(event="UPDATE", table="versions_sum"))

    async def add(tx: Transaction, key: str) -> None:
        row = await tx.load_or_create(Sum, key)
        row.lines += 1

    habits.habits = {1: add}
    for _ in range(2):
        await habits.apply(1, "a")
        await habits.apply(1, "a", "a", "a")
        await db.execute("ALTER TABLE versions_sum ADD CHECK (lines > 0)")
    assert await db.fetchval("SELECT lines FROM versions_sum") == 8
    assert await rows_written(db) == [1, 1, 1, 1, 1]


async def rows_written(db: asyncpg.Connection) -> list[int]:
    """Return the number of rows that each statement has written."""
    return [row["rows"] for row in await db.fetch("SELECT * FROM written")]
