"""Rows that several messages of a batch write: the database gets the version of each."""

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa
from sqlalchemy import Text
from sqlalchemy.orm import Mapped, mapped_column, validates

from onceward import Aggregate, Handlers, Reject, Transaction
from onceward.settings import Settings

from .applier import NewApplier
from .test_round_trips import wiring
from .test_session import (
    TOPIC,
    Changed,
    Habit,
    Habits,
    Wallet,
    add_cents,
    change,
    errors_of,
    events_of,
    habits,
    row_of,
    wallet_of,
)
from .wire import Wire
from tests.contract.bank import Base, Deposit

__all__ = ["habits"]

AUDIT = """
CREATE TABLE history (id int GENERATED ALWAYS AS IDENTITY, tg_op text, wallet text, cents int);
CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO history (tg_op, wallet, cents) VALUES (tg_op, NEW.id, NEW.cents);
    RETURN NEW;
END $$;
"""
ON_WALLET = """
CREATE TRIGGER audit AFTER INSERT OR UPDATE ON wallet FOR EACH ROW EXECUTE FUNCTION keep()
"""


ROUND_UP = """
CREATE FUNCTION round_up() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN NEW.cents := (NEW.cents + 9) / 10 * 10; RETURN NEW; END $$;
CREATE TRIGGER rounded BEFORE INSERT OR UPDATE ON wallet FOR EACH ROW EXECUTE FUNCTION round_up()
"""


@pytest.fixture
async def wired(
    settings: Callable[..., Settings], new_applier: NewApplier
) -> AsyncIterator[tuple[Habits, Wire]]:
    """Return the same, and what passes between it and PostgreSQL."""
    wire, handlers = Wire(), Handlers()
    async with wiring(settings(), wire) as there:
        applier = await new_applier(handlers, topic=TOPIC, database_url=there)
        yield Habits(applier, handlers), wire
        await applier.engine.dispose()


class Line(Base):
    """What was added to a wallet."""

    __tablename__ = "versions_line"

    id: Mapped[int] = mapped_column(primary_key=True)
    wallet_id: Mapped[str] = mapped_column(sa.ForeignKey("wallet.id"))


class Sum(Aggregate, Base):
    """A row that a trigger writes."""

    __tablename__ = "versions_sum"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    lines: Mapped[int] = mapped_column(default=0)


class Watched(Aggregate, Base):
    """A row with an event of SQLAlchemy."""

    __tablename__ = "versions_watched"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    cents: Mapped[int] = mapped_column(default=0)
    writes: Mapped[int] = mapped_column(default=0)


@sa.event.listens_for(Watched, "before_insert")
@sa.event.listens_for(Watched, "before_update")
def _count(mapper: object, connection: object, row: Watched) -> None:
    row.writes = (row.writes or 0) + 1


class Numbered(Aggregate, Base):
    """A row whose key comes from the database."""

    __tablename__ = "versions_numbered"

    id: Mapped[int] = mapped_column(sa.BigInteger, sa.Identity(), primary_key=True)
    text: Mapped[str] = mapped_column(Text)


class Kind(Aggregate, Base):
    """A row of two kinds."""

    __tablename__ = "versions_kind"
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "kind"}  # noqa: RUF012

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    kind: Mapped[str] = mapped_column(Text)
    cents: Mapped[float] = mapped_column(default=0.0)


class SubKind(Kind):
    """One of them."""

    __mapper_args__ = {"polymorphic_identity": "sub"}  # noqa: RUF012


class Validated(Aggregate, Base):
    """A row whose values are validated."""

    __tablename__ = "versions_validated"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    note: Mapped[str | None] = mapped_column(Text)

    @validates("note")
    def strip(self, name: str, value: str) -> str:
        """Return it without spaces around it."""
        return value.strip()


class Labelled(Aggregate, Base):
    """A row with a default that can be changed in place."""

    __tablename__ = "versions_labelled"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    labels: Mapped[dict[str, int]] = mapped_column(sa.JSON, default={})


class Equal(Aggregate, Base):
    """A row that is compared by its values, as a dataclass is: it has no hash."""

    __tablename__ = "versions_equal"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    cents: Mapped[int] = mapped_column(default=0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal) and self.cents == other.cents

    __hash__ = None  # type: ignore[assignment]


class Clock(Aggregate, Base):
    """A row with a time without a zone."""

    __tablename__ = "versions_clock"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    time: Mapped[datetime | None] = mapped_column(sa.DateTime)


async def history_of(db: asyncpg.Connection) -> list[tuple[str, str, int]]:
    """Return what the trigger has written."""
    return [tuple(row)[1:] for row in await db.fetch("SELECT * FROM history ORDER BY id")]


def adding(cents: int, owner: str | None = None) -> Habit:
    """Return a handler that adds cents to a row that messages of other keys change, too."""

    async def add(tx: Transaction, key: str) -> None:
        await add_cents(tx, "shared", cents)
        wallet = await tx.load_or_create(Wallet, "shared")
        wallet.owner = owner

    return add


@pytest.mark.parametrize("is_known", [False, True])
async def test_an_audit_trigger_sees_the_version_of_each_message(
    habits: Habits, db: asyncpg.Connection, *, is_known: bool
) -> None:
    if is_known:  # the row is not new
        await habits.applier.apply(Deposit(1, account="ada", id="earlier"))
    await db.execute(AUDIT + ON_WALLET)
    await habits.apply(1, "ada", "bob", "ada", "bob", "ada", "bob")
    assert await errors_of(habits.applier) == {}
    first = 1 if is_known else 0
    expected = [("UPDATE" if is_known else "INSERT", "ada", first + 1), ("INSERT", "bob", 1)]
    for n in (2, 3):
        expected += [("UPDATE", "ada", first + n), ("UPDATE", "bob", n)]
    assert await history_of(db) == expected
    assert [sequence for sequence, _ in await events_of(db, "bob")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("before", "comes", "goes"),
    [
        ("", ON_WALLET, "DROP TRIGGER audit ON wallet"),
        (
            ON_WALLET + "; ALTER TABLE wallet DISABLE TRIGGER audit",
            "ALTER TABLE wallet ENABLE ALWAYS TRIGGER audit",
            "ALTER TABLE wallet DISABLE TRIGGER ALL",
        ),
        (
            "CREATE TABLE another (LIKE wallet INCLUDING ALL);"
            + ON_WALLET.replace("ON wallet", "ON another"),
            """
            INSERT INTO another TABLE wallet;
            TRUNCATE history;
            ALTER TABLE wallet RENAME TO former;
            ALTER TABLE another RENAME TO wallet
            """,
            "DROP TRIGGER audit ON wallet",
        ),
        (
            """
            ALTER TABLE wallet RENAME TO former;
            CREATE TABLE wallet (LIKE former INCLUDING INDEXES) PARTITION BY LIST (id);
            CREATE TABLE another (LIKE former INCLUDING ALL);
            ALTER TABLE wallet ATTACH PARTITION former DEFAULT;
            """
            + ON_WALLET.replace("ON wallet", "ON another"),
            """
            INSERT INTO another TABLE wallet;
            TRUNCATE history;
            ALTER TABLE wallet DETACH PARTITION former;
            ALTER TABLE wallet ATTACH PARTITION another DEFAULT
            """,
            "DROP TRIGGER audit ON another",
        ),
    ],
    ids=["created", "enabled", "another table", "a partition"],
)
async def test_a_trigger_that_comes_while_the_service_runs_sees_each_version(
    habits: Habits, db: asyncpg.Connection, before: str, comes: str, goes: str
) -> None:
    await db.execute(AUDIT + before)
    for _ in range(2):
        await habits.apply(1, "ada", "ada", "ada")
    await db.execute(comes)
    for _ in range(2):
        await habits.apply(1, "ada", "ada", "ada")
    assert await history_of(db) == [("UPDATE", "ada", cents) for cents in range(7, 13)]
    await db.execute(goes)
    await habits.apply(1, "ada", "ada", "ada")
    assert (await wallet_of(db))["cents"] == 15
    assert await errors_of(habits.applier) == {}


async def test_what_a_trigger_changes_is_seen_by_the_next_message(
    habits: Habits, db: asyncpg.Connection
) -> None:
    await db.execute(ROUND_UP)
    await habits.apply(1, "ada", "ada", "ada")
    assert (await wallet_of(db))["cents"] == 30
    assert [payload for _, payload in await events_of(db)] == [
        f'{{"cents":{cents}}}' for cents in (1, 11, 21)
    ]


async def test_a_triggers_effect_is_seen_even_after_an_early_flush(
    habits: Habits, db: asyncpg.Connection
) -> None:
    await db.execute(ROUND_UP)

    async def look(tx: Transaction, key: str) -> None:
        wallet = await tx.load_or_create(Wallet, key)
        wallet.cents += 1
        await tx.load(Sum, "undeclared")  # before it the change is written

    habits.habits = {1: look}
    await habits.apply(1, "ada", "ada", "ada")
    assert (await wallet_of(db))["cents"] == 30


async def test_a_row_that_is_loaded_by_two_classes_is_one_row(
    habits: Habits, db: asyncpg.Connection
) -> None:
    await db.execute("INSERT INTO versions_kind (id, kind, cents, version) VALUES ('k','sub',0,0)")
    seen: list[tuple[float, int]] = []

    def adding_by(*entities: type[Kind]) -> Habit:
        async def add(tx: Transaction, key: str) -> None:
            rows = [await tx.load(entity, "k") for entity in entities]
            row = rows[0]
            assert row is not None
            row.cents += 1
            tx.publish(Changed(cents=int(row.cents)), of=row)
            seen.append((row.cents, row.version))

        return add

    habits.habits = {1: adding_by(SubKind), 2: adding_by(Kind, SubKind), 3: adding_by(Kind)}
    await habits.applier.apply(*(Deposit(n % 3 + 1, account=f"{n}", id=f"{n}") for n in range(9)))
    assert await errors_of(habits.applier) == {}
    assert seen == [(n, n) for n in range(1, 10)]
    assert await row_of(db, "versions_kind", "k") == {"kind": "sub", "cents": 9.0, "version": 9}


async def test_a_row_changed_by_one_class_is_checked_before_another_changes_it(
    habits: Habits, db: asyncpg.Connection
) -> None:
    await db.execute("INSERT INTO versions_kind (id, kind, cents, version) VALUES ('k','sub',0,0)")
    await db.execute("ALTER TABLE versions_kind ADD CHECK (cents >= 0)")

    def adding_by(entity: type[Kind], cents: float) -> Habit:
        async def add(tx: Transaction, key: str) -> None:
            row = await tx.load(entity, "k")
            assert row is not None
            row.cents += cents

        return add

    habits.habits = {1: adding_by(Kind, -5), 2: adding_by(SubKind, 7)}
    await habits.applier.apply(Deposit(1, account="a"), Deposit(2, account="b"))
    assert {row["offset"] for row in await habits.applier.backlog()} == {0}
    assert (await row_of(db, "versions_kind", "k"))["cents"] == 7.0


async def test_defaults_of_a_new_row_call_no_validator(
    habits: Habits, db: asyncpg.Connection
) -> None:
    async def create(tx: Transaction, key: str) -> None:
        await tx.load_or_create(Validated, key)
        tx.add(Validated(id=f"{key} added"))

    async def find(tx: Transaction, key: str) -> None:
        assert await tx.load(Validated, "another") is None
        added = await tx.load(Validated, "1 added")
        assert added is not None
        assert added.note is None

    habits.habits = {1: create, 2: find}
    await habits.applier.apply(Deposit(1, account="1"), Deposit(2, account="2"))
    assert await errors_of(habits.applier) == {}


async def test_a_row_inserted_or_changed_by_another_tables_trigger_is_found(
    habits: Habits, db: asyncpg.Connection
) -> None:
    await db.execute("""
        CREATE FUNCTION add_up() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO versions_sum (id, lines, version) VALUES (NEW.wallet_id, 1, 0)
                ON CONFLICT (id) DO UPDATE SET lines = versions_sum.lines + 1;
            RETURN NEW;
        END $$;
        CREATE TRIGGER summed AFTER INSERT ON versions_line
           FOR EACH ROW EXECUTE FUNCTION add_up()""")
    seen: list[int | None] = []

    async def add(tx: Transaction, key: str) -> None:
        total = await tx.load(Sum, key)
        seen.append(total.lines if total else None)
        await add_cents(tx, key, 1)
        tx.add(Line(wallet_id=key))

    habits.habits = {1: add}
    await habits.apply(1, "ada")
    seen.clear()
    await habits.apply(1, "ada", "ada", "ada", "bob", "bob", "bob")
    assert await errors_of(habits.applier) == {}
    assert seen == [1, 2, 3, None, 1, 2]
    assert (await row_of(db, "versions_sum", "bob"))["lines"] == 3


async def test_a_trigger_sees_what_earlier_messages_have_changed_in_other_tables(
    habits: Habits, db: asyncpg.Connection
) -> None:
    await db.execute("""
        INSERT INTO wallet (id, cents, version) VALUES ('ada', 1, 0);
        CREATE FUNCTION demand() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF (SELECT cents FROM wallet WHERE id = NEW.wallet_id) < 1 THEN
                RAISE EXCEPTION 'empty';
            END IF;
            RETURN NEW;
        END $$;
        CREATE TRIGGER demanded BEFORE INSERT ON versions_line
           FOR EACH ROW EXECUTE FUNCTION demand()""")

    async def spend(tx: Transaction, key: str) -> None:
        await add_cents(tx, "ada", -1)

    async def line(tx: Transaction, key: str) -> None:
        tx.add(Line(wallet_id="ada"))

    habits.habits = {1: line, 2: spend, 3: line, 4: change}
    await habits.applier.apply(*(Deposit(n, account=f"{n}") for n in (1, 2, 3, 4)))
    assert {row["offset"] for row in await habits.applier.backlog()} == {2}
    assert await db.fetchval("SELECT count(*) FROM versions_line") == 1
    assert (await wallet_of(db))["cents"] == 0
    assert (await wallet_of(db, "4"))["cents"] == 1


async def test_a_message_that_a_trigger_rejects_is_found_at_once(
    habits: Habits, db: asyncpg.Connection
) -> None:
    await db.execute("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN IF NEW.cents = 13 THEN RAISE EXCEPTION 'unlucky'; END IF; RETURN NEW; END $$;
        CREATE TRIGGER refused BEFORE INSERT OR UPDATE ON wallet
           FOR EACH ROW EXECUTE FUNCTION refuse()""")

    async def lose(tx: Transaction, key: str) -> None:
        await add_cents(tx, key, 13)

    habits.habits = {5: lose}
    await habits.applier.apply(*(Deposit(n, account=f"{n}") for n in range(10)))
    assert {row["offset"] for row in await habits.applier.backlog()} == {5}
    assert await db.fetchval("SELECT sum(cents) FROM wallet") == 9
    assert len(habits.calls) < 30


async def test_a_row_with_a_new_key_is_found_by_it_alone(
    habits: Habits, db: asyncpg.Connection
) -> None:
    await db.execute("INSERT INTO wallet (id, cents, version) VALUES ('a', 7, 0)")
    found: list[list[int | None]] = []

    async def rename(tx: Transaction, key: str) -> None:
        wallet = await tx.load(Wallet, "a")
        assert wallet is not None
        wallet.id = "b"

    async def look(tx: Transaction, key: str) -> None:
        rows = [await tx.load(Wallet, one) for one in ("b", "a")]
        found.append([row.cents if row else None for row in rows])

    habits.habits = {1: rename, 2: look, 3: look}
    await habits.applier.apply(*(Deposit(n, account=f"{n}") for n in (1, 2, 3)))
    assert await errors_of(habits.applier) == {}
    assert found == [[7, None], [7, None]]


async def test_an_event_of_sqlalchemy_sees_the_version_of_each_message(
    habits: Habits, db: asyncpg.Connection
) -> None:
    async def write(tx: Transaction, key: str) -> None:
        row = await tx.load_or_create(Watched, key)
        row.cents += 1

    habits.habits = {1: write}
    await habits.apply(1, "ada", "ada", "ada")
    assert await row_of(db, "versions_watched", "ada") == {"cents": 3, "writes": 3, "version": 0}


@pytest.mark.parametrize(
    ("check", "cents", "failed"),
    [
        ("CHECK (cents <> 5)", (2, 3, 1), {1}),  # the second one makes it 5, the third one 3
        ("CHECK (cents >= 0)", (-1, 3, 1), {0}),
        ("EXCLUDE USING btree (cents WITH =) WHERE (cents = 5)", (2, 3, 1), {1}),
    ],
)
async def test_a_constraint_that_the_model_does_not_know_judges_each_version(
    habits: Habits, db: asyncpg.Connection, check: str, cents: Any, failed: set[int]
) -> None:
    await db.execute("INSERT INTO wallet (id, cents, version) VALUES ('taken', 5, 0)")
    table, check = "wallet", check if "EXCLUDE" in check else f"{check} NOT VALID"
    await db.execute(f"ALTER TABLE {table} ADD {check}")
    habits.habits = {place: adding(one) for place, one in enumerate(cents)}
    await habits.applier.apply(*(Deposit(n, account=f"{n}") for n in range(len(cents))))
    assert {row["offset"] for row in await habits.applier.backlog()} == failed
    right = sum(one for place, one in enumerate(cents) if place not in failed)
    assert (await wallet_of(db, "shared"))["cents"] == right
    assert len(await events_of(db, "shared")) == 2


async def test_a_domain_and_an_expression_in_an_index_judge_each_version(
    habits: Habits, db: asyncpg.Connection
) -> None:
    await db.execute("""
        CREATE DOMAIN owner AS text CHECK (VALUE <> 'nobody');
        ALTER TABLE wallet ALTER owner TYPE owner;
        CREATE INDEX ON wallet ((100 / cents))""")
    habits.habits = {1: adding(1), 2: adding(1, "nobody"), 3: adding(-1), 4: adding(4, "bob")}
    await habits.applier.apply(*(Deposit(n, account=f"{n}") for n in (1, 2, 3, 4)))
    assert {row["offset"] for row in await habits.applier.backlog()} == {1, 2}
    assert await wallet_of(db, "shared") == {"cents": 5, "owner": "bob", "rate": None, "version": 2}


async def test_a_row_that_a_message_adds_is_found_by_the_next_ones(
    habits: Habits, db: asyncpg.Connection
) -> None:
    found: list[str] = []

    async def add(tx: Transaction, key: str) -> None:
        assert await tx.load(Wallet, "new") is None
        tx.add(Wallet(id="new", cents=1))
        assert (await tx.load(Wallet, "new")) is not None
        tx.add(Numbered(text="numbered"))

    async def find(tx: Transaction, key: str) -> None:
        wallet = await tx.load_or_create(Wallet, "new")
        wallet.cents *= 2
        found.append(f"{wallet.cents} {wallet.version}")
        tx.publish(Changed(cents=wallet.cents), of=wallet)
        number = await db.fetchval("SELECT last_value FROM versions_numbered_id_seq")
        numbered = await tx.load(Numbered, number)
        found.append(numbered.text if numbered else "none")

    habits.habits = {2: add, 3: find, 4: find}
    await habits.applier.apply(Deposit(2), Deposit(3), Deposit(4))
    assert await errors_of(habits.applier) == {}
    assert found == ["2 0", "numbered", "4 1", "numbered"]
    assert (await wallet_of(db, "new"))["cents"] == 4


@pytest.mark.parametrize("has_own_session", [False, True])
async def test_rows_without_a_hash(
    habits: Habits, db: asyncpg.Connection, *, has_own_session: bool
) -> None:
    async def add(tx: Transaction, key: str) -> None:
        for name in (key, f"{key} again"):
            row = await tx.load_or_create(Equal, name)
            row.cents += 1
            tx.publish(Changed(cents=row.cents), of=row)
        if has_own_session:
            async with tx.session.begin_nested():
                tx.session.add(Equal(id=f"new {tx.message.id}"))

    habits.habits = {1: add}
    await habits.apply(1, "a", "a", "b")
    assert await errors_of(habits.applier) == {}
    rows = await db.fetch("SELECT id, cents FROM versions_equal WHERE id !~ 'new' ORDER BY id")
    assert [tuple(row) for row in rows] == [("a", 2), ("a again", 2), ("b", 1), ("b again", 1)]


async def round_trips_of(habits: Habits, wire: Wire, *counts: int) -> list[int]:
    """Apply batches of so many messages, half of them of one key; return what each batch takes."""

    async def move(tx: Transaction, key: str) -> None:
        wallet = await tx.load_or_create(Wallet, key)
        wallet.cents += 1
        tx.add(Line(wallet_id=key))
        tx.publish(Changed(cents=wallet.cents), of=wallet)

    habits.habits = {1: move}
    taken = []
    for count in counts:
        before = wire.seen.total()
        await habits.apply(1, *("hot" if n % 2 else f"{n % 20}" for n in range(count)))
        taken.append(wire.seen.total() - before)
    assert await errors_of(habits.applier) == {}
    return taken


async def test_versions_take_as_many_round_trips_however_many_messages_there_are(
    wired: tuple[Habits, Wire], db: asyncpg.Connection
) -> None:
    await db.execute("ALTER TABLE wallet ADD CHECK (cents >= 0)")
    taken = await round_trips_of(*wired, 40, 40, 400)
    assert (await wallet_of(db, "hot"))["cents"] == 240
    assert taken[1] == taken[2]


async def test_a_message_takes_few_round_trips_beside_an_audit_trigger(
    wired: tuple[Habits, Wire], db: asyncpg.Connection
) -> None:
    """Its savepoint or flush, the rows that it reads again, and a statement for each table."""
    await db.execute(AUDIT + ON_WALLET)
    taken = await round_trips_of(*wired, 20, 20, 120)
    assert len(await history_of(db)) == 160
    tables = 2
    assert (taken[2] - taken[1]) / 100 <= 2 + tables


async def test_a_default_is_each_rows_own(habits: Habits, db: asyncpg.Connection) -> None:
    found = []

    async def fail(tx: Transaction, key: str) -> None:
        row = await tx.load_or_create(Labelled, key)
        row.labels["seen"] = 1
        raise Reject("no")

    async def look(tx: Transaction, key: str) -> None:
        found.append({**(await tx.load_or_create(Labelled, key)).labels})

    habits.habits = {1: fail, 2: look}
    await habits.applier.apply(Deposit(1, account="ada"), Deposit(2, account="bob"))
    assert found == [{}]
    assert await db.fetchval("SELECT labels FROM versions_labelled") == "{}"


@pytest.mark.parametrize("how", ["after each message", "for an undeclared row"])
async def test_what_was_written_meanwhile_is_read_again(
    habits: Habits, db: asyncpg.Connection, how: str
) -> None:
    found: list[Decimal | None] = []

    async def add(tx: Transaction, key: str) -> None:
        tx.add(Wallet(id="ada", cents=1, rate=Decimal("1.005")))

    async def change(tx: Transaction, key: str) -> None:
        (await tx.load_or_create(Wallet, "ada")).rate = Decimal("1.005")

    async def react(tx: Transaction, key: str) -> None:
        await tx.load_or_create(Watched, "another")

    async def look(tx: Transaction, key: str) -> None:
        wallet = await tx.load(Wallet, "ada")
        found.append(wallet.rate if wallet else None)

    async def load(tx: Transaction, key: str) -> None:
        await tx.load(Wallet, "another")

    habits.habits = {1: add, 2: change, 3: react, 4: look, 5: load}
    if how == "after each message":
        await habits.together(3)
        await habits.together(2, 4)
    else:
        await habits.together(1, 5, 4)
    assert await errors_of(habits.applier) == {}
    assert found == [Decimal("1.01")]


async def test_a_new_row_that_gets_another_key_is_found_by_that(
    habits: Habits, db: asyncpg.Connection
) -> None:
    found = []

    async def create(tx: Transaction, key: str) -> None:
        wallet = await tx.load_or_create(Wallet, "a")
        wallet.id = "b"

    async def look(tx: Transaction, key: str) -> None:
        found.append([await tx.load(Wallet, one) is not None for one in ("a", "b")])

    habits.habits = {1: create, 2: look}
    await habits.applier.apply(Deposit(1, account="a"), Deposit(2, account="b"))
    assert await errors_of(habits.applier) == {}
    assert found[-1] == [False, True]


async def test_a_time_with_a_zone_is_rejected_by_a_column_without(
    habits: Habits, db: asyncpg.Connection
) -> None:
    def at(time: datetime) -> Habit:
        async def habit(tx: Transaction, key: str) -> None:
            (await tx.load_or_create(Clock, "shared")).time = time

        return habit

    now = datetime(2026, 1, 1, tzinfo=UTC)
    habits.habits = {1: at(now), 2: at(now.replace(tzinfo=None))}
    await habits.applier.apply(Deposit(1, account="a"), Deposit(2, account="b"))
    assert {row["offset"] for row in await habits.applier.backlog()} == {0}


async def test_a_table_with_a_trigger_can_be_read_without_further_statements(
    wired: tuple[Habits, Wire], db: asyncpg.Connection
) -> None:
    habits, wire = wired
    await db.execute(
        f"{AUDIT} CREATE TRIGGER audit AFTER UPDATE ON versions_validated"
        " FOR EACH ROW EXECUTE FUNCTION keep()"
    )
    await db.execute("INSERT INTO versions_validated (id, version) VALUES ('ada', 0)")

    async def read(tx: Transaction, key: str) -> None:
        assert await tx.load(Validated, "ada") is not None
        await add_cents(tx, key, 1)

    habits.habits = {1: read}
    taken = []
    for count in (30, 30, 300):
        before = wire.seen.total()
        await habits.apply(1, *(f"{n % 5}" for n in range(count)))
        taken.append(wire.seen.total() - before)
    assert taken[1] == taken[2]
