"""What the database does with the versions of a row, as far as only its catalog knows."""

from contextlib import suppress

import asyncpg
import pytest
from sqlalchemy import Text, insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Mapped, mapped_column

from onceward import Aggregate, Transaction

from .test_session import (
    Habit,
    Habits,
    Wallet,
    add_cents,
    errors_of,
    executing,
    habits,
    wallet_of,
)
from .test_versions import AUDIT, ON_WALLET, Line, adding, history_of
from tests.contract.bank import Base, Deposit

__all__ = ["habits"]

DEFERRED = """
ALTER TABLE versions_line DROP CONSTRAINT versions_line_wallet_id_fkey;
ALTER TABLE versions_line ADD CONSTRAINT "its wallet"
    FOREIGN KEY (wallet_id) REFERENCES wallet DEFERRABLE INITIALLY DEFERRED
"""

CODES = """
ALTER TABLE catalog_coded ADD UNIQUE (code);
INSERT INTO catalog_coded (id, code, version) VALUES ('ada', 'old', 0);
INSERT INTO catalog_referring (id, code, version) VALUES ('one', 'old', 0);
ALTER TABLE catalog_referring ADD FOREIGN KEY (code) REFERENCES catalog_coded (code)
"""
"""Makes a row refer to the code of another; to be continued."""


class Quoted(Aggregate, Base):
    """A row of a table whose name has to be quoted."""

    __tablename__ = "catalog: 100% \\ 'of' \"them\""

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    cents: Mapped[int] = mapped_column(default=0)


class Coded(Aggregate, Base):
    """A row with a code that others may refer to."""

    __tablename__ = "catalog_coded"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    code: Mapped[str] = mapped_column(Text, default="old")


class Referring(Aggregate, Base):
    """A row that refers to such a code."""

    __tablename__ = "catalog_referring"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    code: Mapped[str] = mapped_column(Text)


def coding(code: str) -> Habit:
    """Return a handler that changes the code."""

    async def recode(tx: Transaction, key: str) -> None:
        row = await tx.load(Coded, "ada")
        assert row is not None
        row.code = code

    return recode


async def together(habits: Habits, *steps: Habit) -> set[int]:
    """Have messages of different keys handled in a batch; return the places of those that wait."""
    habits.habits = dict(enumerate(steps))
    first = await habits.applier.position()
    await habits.applier.apply(
        *(Deposit(n, account=f"{n}", id=f"{first} {n}") for n in range(len(steps)))
    )
    return {row["offset"] - first for row in await habits.applier.backlog() if not row["died_at"]}


async def line(tx: Transaction, key: str) -> None:
    """Add a line to bob's wallet."""
    tx.add(Line(wallet_id="bob"))


async def own_line(tx: Transaction, key: str) -> None:
    """Do so in a session of the message's own."""
    tx.session.add(Line(wallet_id="bob"))


async def bob(tx: Transaction, key: str) -> None:
    """Add bob's wallet."""
    await add_cents(tx, "bob", 1)


@pytest.mark.parametrize("habit", [line, own_line])
async def test_a_constraint_that_is_deferred_is_checked_after_each_message(
    habits: Habits, db: asyncpg.Connection, habit: Habit
) -> None:
    await db.execute(DEFERRED)
    assert await together(habits, habit, bob, habit) == {0}
    [waiting] = await habits.applier.backlog()
    assert waiting["reason"] == "failed in a batch"
    assert await errors_of(habits.applier) == {}  # it is there by now
    assert await db.fetchval("SELECT count(*) FROM versions_line") == 2


SETTING = 'SET CONSTRAINTS "its wallet" {}'
FUNCTION = f"""
CREATE FUNCTION catalog_set() RETURNS void LANGUAGE plpgsql AS
$$ BEGIN {SETTING} ; END $$
"""


async def child_before_parent(tx: Transaction, key: str) -> None:
    """Add a line before its wallet, as a deferred constraint allows."""
    await tx.session.execute(insert(Line).values(wallet_id=key))
    await tx.session.execute(insert(Wallet).values(id=key, cents=0, version=0))


async def child_without_parent(tx: Transaction, key: str) -> None:
    """Try to add a line without its wallet, which an immediate constraint rejects at once."""
    with suppress(IntegrityError):
        async with tx.session.begin_nested():
            await tx.session.execute(insert(Line).values(wallet_id="nobody"))


@pytest.mark.parametrize(
    ("initially", "mode", "habit"),
    [
        ("DEFERRED", "IMMEDIATE", child_before_parent),
        ("IMMEDIATE", "DEFERRED", child_without_parent),
    ],
)
@pytest.mark.parametrize("by", ["SELECT catalog_set()", f"DO $$ BEGIN {SETTING}; END $$"])
async def test_a_mode_set_by_a_function_or_block_fails_no_other_message(
    habits: Habits, db: asyncpg.Connection, initially: str, mode: str, habit: Habit, by: str
) -> None:
    """Some are repeated alone, and none has spent an attempt."""
    await db.execute(DEFERRED.replace("INITIALLY DEFERRED", f"INITIALLY {initially}"))
    await db.execute(FUNCTION.format(mode))
    step = executing(by.format(mode))
    await together(habits, step, habit, habit, step, habit)
    waiting = await habits.applier.backlog()
    assert {(row["reason"], row["attempts"]) for row in waiting} <= {("failed in a batch", 0)}
    assert await errors_of(habits.applier) == {}
    added = ["1", "2", "4"] if habit is child_before_parent else []
    rows = await db.fetch("SELECT wallet_id FROM versions_line ORDER BY wallet_id")
    assert [row["wallet_id"] for row in rows] == added


async def test_a_constraint_of_the_same_name_may_come_and_go(
    habits: Habits, db: asyncpg.Connection
) -> None:
    await db.execute(DEFERRED)
    assert await together(habits, bob, line, line) == set()
    await db.execute('ALTER TABLE tagged ADD CONSTRAINT "its wallet" CHECK (true)')
    for _ in range(2):
        assert await together(habits, bob, line, line) == set()
    await db.execute('ALTER TABLE tagged DROP CONSTRAINT "its wallet"')
    assert await together(habits, bob, line, line) == set()
    await db.execute("DELETE FROM versions_line; DELETE FROM wallet")
    assert await together(habits, line, bob, line) == {0}


async def test_a_row_that_others_refer_to_is_checked_after_each_message(
    habits: Habits, db: asyncpg.Connection
) -> None:
    await db.execute(f"{CODES} DEFERRABLE INITIALLY DEFERRED")
    assert await together(habits, coding("new"), coding("old"), coding("old")) == {0}


async def test_what_follows_a_row_that_it_refers_to_is_read_again(
    habits: Habits, db: asyncpg.Connection
) -> None:
    await db.execute(f"{CODES} ON UPDATE CASCADE")
    found = []

    async def look(tx: Transaction, key: str) -> None:
        row = await tx.load(Referring, "one")
        found.append(row and row.code)

    assert await together(habits, look, coding("new"), look, coding("newest"), look) == set()
    assert found[-3:] == ["old", "new", "newest"]


@pytest.mark.parametrize(
    "change",
    [
        """
        CREATE TABLE catalog_parts (LIKE wallet INCLUDING DEFAULTS) PARTITION BY LIST (owner);
        CREATE TABLE catalog_part PARTITION OF catalog_parts FOR VALUES IN (NULL, 'bob');
        ALTER TABLE wallet RENAME TO former; ALTER TABLE catalog_parts RENAME TO wallet
        """,
        """
        CREATE DOMAIN catalog_letters AS text CHECK (VALUE <> 'nobody');
        ALTER TABLE wallet ADD more catalog_letters[] GENERATED ALWAYS AS (ARRAY[owner]) STORED
        """,
        """
        ALTER TABLE wallet ADD share integer
            GENERATED ALWAYS AS (100 / CASE owner WHEN 'nobody' THEN 0 ELSE 1 END) STORED
        """,
    ],
    ids=["partitions", "a domain in an array", "a generated column"],
)
async def test_what_a_version_may_not_be_is_rejected(
    habits: Habits, db: asyncpg.Connection, change: str
) -> None:
    await db.execute(f"ALTER TABLE wallet DROP CONSTRAINT wallet_cents_check; {change}")
    assert await together(habits, adding(1), adding(2, "nobody"), adding(4, "bob")) == {1}
    assert (await wallet_of(db, "shared"))["cents"] == 5


CHILD = """
CREATE TABLE catalog_child () INHERITS (wallet);
INSERT INTO catalog_child (id, cents, version) VALUES ('shared', 0, 0);
"""
"""A child of the table, with the row that messages change."""


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE wallet ALTER owner SET NOT NULL",
        f"{CHILD} ALTER TABLE catalog_child ADD CHECK (owner IS NOT NULL) NOT VALID",
        f"{CHILD} UPDATE wallet SET owner = ''; ALTER TABLE catalog_child ALTER owner SET NOT NULL",
    ],
    ids=["not null", "a child", "a child's not null"],
)
@pytest.mark.parametrize("is_late", [False, True], ids=["", "while it runs"])
async def test_a_none_that_only_the_database_knows_is_rejected(
    habits: Habits, db: asyncpg.Connection, change: str, *, is_late: bool
) -> None:
    await db.execute("ALTER TABLE wallet DROP CONSTRAINT wallet_cents_check")
    if is_late:
        assert await together(habits, bob, bob) == set()
    await db.execute("UPDATE wallet SET owner = ''; " + change)
    assert await together(habits, adding(1, "ann"), adding(2), adding(4, "bob")) == {1}
    assert (await wallet_of(db, "shared"))["cents"] == 5


@pytest.mark.parametrize("other", ["CHECK (true)", "UNIQUE (text) DEFERRABLE"])
@pytest.mark.parametrize("habit", [line, own_line])
async def test_a_deferred_constraint_is_checked_beside_another_of_its_name(
    habits: Habits, db: asyncpg.Connection, habit: Habit, other: str
) -> None:
    await db.execute(f'{DEFERRED}; ALTER TABLE tagged ADD CONSTRAINT "its wallet" {other}')
    assert await together(habits, habit, bob, habit) == {0}


async def test_a_row_that_moves_to_another_partition_is_an_insertion(
    habits: Habits, db: asyncpg.Connection
) -> None:
    on_insert = ON_WALLET.replace("INSERT OR UPDATE", "INSERT")
    await db.execute(f"""
        {AUDIT}
        ALTER TABLE wallet RENAME TO former;
        CREATE TABLE wallet (LIKE former INCLUDING DEFAULTS) PARTITION BY LIST (owner);
        CREATE TABLE catalog_part PARTITION OF wallet FOR VALUES IN ('bob');
        CREATE TABLE catalog_rest PARTITION OF wallet DEFAULT;
        INSERT INTO wallet (id, cents, version) VALUES ('shared', 0, 0);
        {on_insert}""")
    assert await together(habits, adding(1, "bob"), adding(1), adding(1, "bob")) == set()
    assert await history_of(db) == [("INSERT", "shared", cents) for cents in (1, 2, 3)]


async def test_a_table_is_found_whatever_its_name_is(
    habits: Habits, db: asyncpg.Connection
) -> None:
    name = Quoted.__tablename__.replace('"', '""')
    await db.execute(f'ALTER TABLE "{name}" ADD CHECK (cents > 0) NOT VALID')

    def add(cents: int) -> Habit:
        async def habit(tx: Transaction, key: str) -> None:
            row = await tx.load_or_create(Quoted, "shared")
            row.cents += cents

        return habit

    assert await together(habits, add(1), add(-2), add(3)) == {1}
    assert habits.applier.consume._catalog.reacting == set()


async def test_a_row_is_loaded_that_the_handler_has_dropped_from_its_session(
    habits: Habits, db: asyncpg.Connection
) -> None:
    async def drop(tx: Transaction, key: str) -> None:
        wallet = await tx.load_or_create(Wallet, key)
        await tx.session.flush()
        tx.session.expunge(wallet)
        again = await tx.load_or_create(Wallet, key)
        again.cents += 1

    assert await together(habits, drop, drop) == set()
    assert (await wallet_of(db, "0"))["cents"] == 1
