"""More that careless handlers do: it is done as if they were alone, or named at their message."""

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
import sqlalchemy as sa
from sqlalchemy import Text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import (
    Mapped,
    declared_attr,
    make_transient,
    make_transient_to_detached,
    mapped_column,
    relationship,
)

from onceward import Aggregate, Park, Retry, Transaction

from .test_session import (
    Changed,
    Good,
    Habit,
    Habits,
    Note,
    Part,
    Shop,
    Wallet,
    change,
    errors_of,
    events_of,
    habits,
    rating,
    row_of,
    tagging,
    wallet_of,
)
from .test_versions import AUDIT, ON_WALLET
from tests.contract.bank import Base, Deposit
from tests.servers.pooler import CANCELLING

__all__ = ["habits"]


class Account(Aggregate, Base):
    """A row that its database does not accept with all values."""

    __tablename__ = "careless_account"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    name: Mapped[str | None] = mapped_column(sa.String(5))
    small: Mapped[int] = mapped_column(sa.SmallInteger, default=0)
    must: Mapped[str] = mapped_column(Text, default="")
    share: Mapped[int | None] = mapped_column(default=7)


class Overdraft(Aggregate, Base):
    """An account with limits that the database checks."""

    __tablename__ = "careless_overdraft"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    cents: Mapped[int] = mapped_column(sa.CheckConstraint("cents >= 0"), default=0)


class Mailbox(Aggregate, Base):
    """A row with a name that no other has."""

    __tablename__ = "careless_mailbox"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    mail: Mapped[str | None] = mapped_column(Text, unique=True)


class Counted(Base):
    """A row whose versions SQLAlchemy compares."""

    __tablename__ = "careless_counted"

    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str] = mapped_column(Text)
    revision: Mapped[int] = mapped_column()

    __mapper_args__ = {"version_id_col": revision}  # noqa: RUF012  # SQLAlchemy reads it once


class Numbered(Aggregate, Base):
    """A row whose version SQLAlchemy counts."""

    __tablename__ = "careless_numbered"

    id: Mapped[str] = mapped_column(Text, primary_key=True)

    @declared_attr.directive
    @classmethod
    def __mapper_args__(cls) -> dict[str, object]:
        return {"version_id_col": cls.version}


class Parcel(Aggregate, Base):
    """A row with a UUID for its key."""

    __tablename__ = "careless_parcel"

    id: Mapped[UUID] = mapped_column(sa.Uuid, primary_key=True)


class Box(Aggregate, Base):
    """A row that others belong to."""

    __tablename__ = "careless_box"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    name: Mapped[str] = mapped_column(Text, default="")


class Thing(Aggregate, Base):
    """A row of which some have a relationship."""

    __tablename__ = "careless_thing"
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "thing"}  # noqa: RUF012

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    kind: Mapped[str] = mapped_column(Text)


class Boxed(Thing):
    """One of them."""

    __mapper_args__ = {"polymorphic_identity": "boxed", "polymorphic_load": "inline"}  # noqa: RUF012

    box_id: Mapped[str | None] = mapped_column(sa.ForeignKey("careless_box.id"))
    box: Mapped[Box | None] = relationship(lazy="selectin")


class Letter(Aggregate, Base):
    """A row with the text of a UUID for its key."""

    __tablename__ = "careless_letter"

    id: Mapped[str] = mapped_column(sa.Uuid(as_uuid=False), primary_key=True)
    cents: Mapped[int] = mapped_column(default=0)


# What the database would not accept is not accepted in a batch


def setting(entity: type[Any], name: str, value: object) -> Habit:
    """Return a habit that changes a row and publishes it."""

    async def habit(tx: Transaction, key: str) -> None:
        row = await tx.load_or_create(entity, key)
        setattr(row, name, value)
        tx.publish(Changed(cents=1), of=row)

    return habit


@pytest.mark.parametrize(
    ("entity", "name", "wrong", "right"),
    [
        (Overdraft, "cents", -1, 5),
        (Mailbox, "mail", "taken", "free"),
        (Account, "name", "too long", "short"),
        (Account, "name", "a\x00b", "ab"),
        (Account, "small", 40_000, 4),
        (Account, "must", None, "there"),
    ],
)
async def test_a_value_that_a_later_message_replaces_is_checked_nevertheless(
    habits: Habits, db: asyncpg.Connection, entity: type[Any], name: str, wrong: Any, right: Any
) -> None:
    await db.execute(
        "INSERT INTO careless_mailbox (id, mail, version) VALUES ('other', 'taken', 0)"
    )
    table = entity.__tablename__
    habits.habits = {1: setting(entity, name, right), 2: setting(entity, name, wrong)}
    habits.habits[3] = habits.habits[1]
    await habits.applier.apply(
        Deposit(1, account="ada"),
        Deposit(2, account="ada"),
        Deposit(3, account="ada"),
        Deposit(4, account="bob"),
    )
    assert set(await errors_of(habits.applier)) == {1}
    assert (await row_of(db, table, "ada"))["version"] == 1
    assert len(await events_of(db)) == 1
    assert (await wallet_of(db, "bob"))["cents"] == 1


async def forgetting_the_share(tx: Transaction, key: str) -> None:
    row = await tx.load_or_create(Account, key)
    row.name, row.share = "name", None


async def sharing(tx: Transaction, key: str) -> None:
    row = await tx.load_or_create(Account, key)
    tx.publish(Changed(cents=row.share or 0), of=row)


async def test_values_match_the_database_even_after_a_flush_for_another_row(
    habits: Habits, db: asyncpg.Connection
) -> None:
    habits.habits = {1: rating, 2: tagging, 3: forgetting_the_share, 4: sharing}
    steps = [(2, "x"), (1, "y"), (2, "x"), (1, "y"), (2, "x"), (1, "y"), (3, "z"), (4, "z")]
    together = [
        Deposit(n, account=f"{key} together", id=str(i)) for i, (n, key) in enumerate(steps)
    ]
    await habits.applier.apply(*together)
    for i, (n, key) in enumerate(steps):
        await habits.applier.apply(Deposit(n, account=f"{key} alone", id=f"alone {i}"))
    assert await errors_of(habits.applier) == {}
    assert (await wallet_of(db, "y together"))["rate"] == (await wallet_of(db, "y alone"))["rate"]
    assert await events_of(db, "z together") == await events_of(db, "z alone")


# Rows and keys


async def test_changing_a_row_loaded_with_a_subclass_row_needs_a_lock(
    habits: Habits, db: asyncpg.Connection
) -> None:
    await db.execute("INSERT INTO careless_box (id, name, version) VALUES ('b', 'old', 0)")
    await db.execute(
        "INSERT INTO careless_thing (id, kind, box_id, version) VALUES ('t', 'boxed', 'b', 0)"
    )

    async def rename(tx: Transaction, key: str) -> None:
        thing = await tx.load(Thing, "t")
        assert isinstance(thing, Boxed)
        assert thing.box is not None
        thing.box.name = "new"

    habits.habits = {2: rename}
    await habits.applier.apply(*(Deposit(n, account=str(n)) for n in (1, 2, 3)))
    assert set(await errors_of(habits.applier)) == {1}
    assert "without a lock" in (await errors_of(habits.applier))[1]
    assert await db.fetchval("SELECT name FROM careless_box") == "old"


async def test_a_row_that_came_with_another_and_is_changed_needs_a_lock(
    habits: Habits, db: asyncpg.Connection
) -> None:
    await db.execute("INSERT INTO shop (id, cents, version) VALUES ('s', 0, 0)")
    await db.execute("INSERT INTO part (id, shop_id, version) VALUES ('p', 's', 0)")

    async def sell(tx: Transaction, key: str) -> None:
        shop = await tx.load(Shop, "s")
        assert shop is not None
        shop.parts[0].shop_id = None

    habits.habits = {2: sell}
    await habits.applier.apply(*(Deposit(n, account=str(n)) for n in (1, 2, 3)))
    assert set(await errors_of(habits.applier)) == {1}
    assert "without a lock" in (await errors_of(habits.applier))[1]
    assert await db.fetchval("SELECT shop_id FROM part") == "s"


async def test_a_version_that_sqlalchemy_counts_is_refused(habits: Habits) -> None:
    async def count(tx: Transaction, key: str) -> None:
        await tx.load_or_create(Numbered, key)

    habits.habits = {2: count}
    await habits.together(1, 2)
    assert "version_id_col" in (await errors_of(habits.applier))[1]


async def test_a_text_instead_of_a_uuid_is_refused_for_new_rows(habits: Habits) -> None:
    async def send(tx: Transaction, key: str) -> None:
        await tx.load_or_create(Parcel, str(uuid4()))

    habits.habits = {2: send}
    await habits.together(1, 2)
    assert "Parcel.id holds UUID" in (await errors_of(habits.applier))[1]


async def test_two_texts_of_one_uuid_are_one_row_and_one_key(
    habits: Habits, db: asyncpg.Connection
) -> None:
    id = "0a0b0c0d-0000-4000-8000-00000000000f"

    def writing(text: str) -> Habit:
        async def write(tx: Transaction, key: str) -> None:
            letter = await tx.load_or_create(Letter, text)
            letter.cents += 1
            tx.publish(Changed(cents=letter.cents), of=letter)

        return write

    habits.habits = {n: writing(id.upper() if n % 2 else id) for n in (1, 2, 3)}
    await habits.together(1, 2, 3)
    assert await errors_of(habits.applier) == {}
    assert await events_of(db, id) == [(n, f'{{"cents":{n}}}') for n in (1, 2, 3)]


# Rows that are kept from an earlier message

KEPT: dict[str, Any] = {}
"""What the module keeps, by the name of its table."""


async def keeping(tx: Transaction, key: str) -> None:
    await change(tx, key)
    KEPT["wallet"] = await tx.load_or_create(Wallet, key)
    KEPT["part"] = await tx.load_or_create(Part, "part")
    KEPT["note"] = Note(text=key)
    tx.add(KEPT["note"])


async def keeping_a_loaded_one(tx: Transaction, key: str) -> None:
    KEPT["good"] = await tx.session.get_one(Good, 1)


async def adding(tx: Transaction, key: str) -> None:
    tx.add(KEPT["wallet"])
    KEPT["wallet"].cents = 100


async def adding_a_note(tx: Transaction, key: str) -> None:
    tx.add(KEPT["note"])


async def adding_in_silence(tx: Transaction, key: str) -> None:
    with suppress(Exception):
        tx.session.add(KEPT["wallet"])


async def merging(tx: Transaction, key: str) -> None:
    await change(tx, key)
    await tx.session.merge(KEPT["wallet"])


async def merging_by_a_relationship(tx: Transaction, key: str) -> None:
    shop = Shop(id=key)
    shop.parts = [KEPT["part"]]
    await tx.session.merge(shop)


async def deleting(tx: Transaction, key: str) -> None:
    await tx.session.delete(KEPT["note"])


async def publishing(tx: Transaction, key: str) -> None:
    tx.publish(Changed(cents=0), of=KEPT["wallet"])


async def appending(tx: Transaction, key: str) -> None:
    shop = await tx.load_or_create(Shop, key)
    shop.parts.append(KEPT["part"])


async def appending_what_was_loaded(tx: Transaction, key: str) -> None:
    shop = await tx.load_or_create(Shop, key)
    shop.goods.append(KEPT["good"])


BRINGING = (adding_in_silence, merging, merging_by_a_relationship, deleting, publishing)
REFUSAL = "is no row of this message's session|needs a row that is locked|already present"


@pytest.mark.parametrize("habit", [*BRINGING, adding, adding_a_note, appending])
async def test_a_row_that_is_kept_from_an_earlier_transaction_is_refused(
    habits: Habits, db: asyncpg.Connection, habit: Habit
) -> None:
    habits.habits = {1: keeping, 2: habit}
    await habits.together(1)
    await habits.together(2)
    assert set(errors := await errors_of(habits.applier)) == {1}
    assert re.search(REFUSAL, errors[1])
    assert await events_of(db) == [(1, '{"cents":1}')]
    assert (await wallet_of(db))["cents"] == 1
    assert await db.fetchval("SELECT count(*) FROM note") == 1


@pytest.mark.parametrize("habit", BRINGING)
async def test_a_row_kept_from_another_message_of_the_batch_is_refused(
    habits: Habits, db: asyncpg.Connection, habit: Habit
) -> None:
    habits.habits = {1: keeping, 2: habit}
    await habits.together(1, 2)
    assert set(errors := await errors_of(habits.applier)) == {1}
    assert re.search(REFUSAL, errors[1])
    assert await events_of(db) == [(1, '{"cents":1}')]
    assert (await wallet_of(db))["cents"] == 1
    assert await db.fetchval("SELECT count(*) FROM note") == 1


async def test_a_row_that_is_no_aggregate_is_refused_too(
    habits: Habits, db: asyncpg.Connection
) -> None:
    await db.execute("INSERT INTO shop (id, cents, version) VALUES ('s', 0, 0)")
    await db.execute("INSERT INTO good (id, shop_id) VALUES (1, 's')")
    habits.habits = {1: keeping_a_loaded_one, 2: appending_what_was_loaded}
    await habits.together(1)
    await habits.together(2, 3)
    assert "Good (1,) is no row of this message's session" in (await errors_of(habits.applier))[1]
    assert await db.fetchval("SELECT shop_id FROM good") == "s"


async def adding_a_copy(tx: Transaction, key: str) -> None:
    row = Wallet(id=key, cents=100, version=1)
    make_transient_to_detached(row)
    tx.session.add(row)


async def test_a_row_that_no_session_has_loaded_is_refused(habits: Habits) -> None:
    habits.habits = {2: adding_a_copy}
    await habits.together(1, 2)
    assert "may have changed since it was loaded" in (await errors_of(habits.applier))[1]


async def adding_a_counted_row(tx: Transaction, key: str) -> None:
    row = KEPT.setdefault("counted", Counted(id=1, text=""))
    tx.add(row)
    row.text += "x"


async def merging_a_counted_row(tx: Transaction, key: str) -> None:
    KEPT["counted"] = await tx.session.merge(KEPT.get("counted") or Counted(id=1, text=""))
    KEPT["counted"].text += "x"


@pytest.mark.parametrize("habit", [adding_a_counted_row, merging_a_counted_row])
async def test_a_row_with_a_version_id_may_be_kept(
    habits: Habits, db: asyncpg.Connection, habit: Habit
) -> None:
    """SQLAlchemy compares its versions."""
    KEPT.pop("counted", None)
    habits.habits = dict.fromkeys((1, 2, 3), habit)
    await habits.together(1)
    await habits.together(2)
    assert await errors_of(habits.applier) == {}
    assert await db.fetchrow("SELECT text, revision FROM careless_counted") == ("xx", 2)
    await db.execute("UPDATE careless_counted SET revision = 5")
    await habits.together(3)
    assert "StaleDataError" in (await errors_of(habits.applier))[2]


async def adding_again(tx: Transaction, key: str) -> None:
    wallet = await tx.load_or_create(Wallet, key)
    tx.add(wallet)
    note = Note(text=str(tx.message.id))
    tx.add(note)
    tx.add(note)
    wallet.cents += 1
    tx.publish(Changed(cents=wallet.cents), of=wallet)


async def merging_itself(tx: Transaction, key: str) -> None:
    wallet = await tx.load_or_create(Wallet, key)
    assert await tx.session.merge(wallet) is wallet
    wallet.cents += 1
    tx.publish(Changed(cents=wallet.cents), of=wallet)


async def expunging_and_adding(tx: Transaction, key: str) -> None:
    wallet = await tx.load_or_create(Wallet, key)
    await tx.session.flush()
    tx.session.expunge(wallet)
    tx.session.add(wallet)
    wallet.cents += 1
    tx.publish(Changed(cents=wallet.cents), of=wallet)


async def deleting_and_adding_anew(tx: Transaction, key: str) -> None:
    wallet = await tx.load_or_create(Wallet, key)
    wallet.cents += 1
    await tx.session.delete(wallet)
    await tx.session.flush()
    tx.publish(Changed(cents=wallet.cents), of=wallet)
    tx.session.add(Wallet(id=key, cents=wallet.cents, version=wallet.version))


@pytest.mark.parametrize(
    "habit", [adding_again, merging_itself, expunging_and_adding, deleting_and_adding_anew]
)
async def test_a_row_of_the_message_itself_may_be_added_and_merged(
    habits: Habits, db: asyncpg.Connection, habit: Habit
) -> None:
    habits.habits = {2: habit, 3: habit}
    await habits.together(1, 2, 3, 4)
    assert await errors_of(habits.applier) == {}
    assert await events_of(db) == [(n, f'{{"cents":{n}}}') for n in (1, 2, 3, 4)]


async def publishing_what_was_expunged(tx: Transaction, key: str) -> None:
    wallet = await tx.load_or_create(Wallet, key)
    await tx.session.flush()
    tx.session.expunge(wallet)
    tx.publish(Changed(cents=0), of=wallet)


@pytest.mark.parametrize("trigger", [False, True], ids=["", "beside a trigger"])
@pytest.mark.parametrize("habit", [publishing, publishing_what_was_expunged])
async def test_no_event_is_of_a_row_that_is_in_no_session(
    habits: Habits, db: asyncpg.Connection, habit: Habit, trigger: bool
) -> None:
    if trigger:
        await db.execute(AUDIT + ON_WALLET)
    habits.habits = {1: keeping, 2: habit}
    await habits.together(1, 2)
    assert "needs a row that is locked" in (await errors_of(habits.applier))[1]
    assert await events_of(db) == [(1, '{"cents":1}')]


async def noting_and_selecting(tx: Transaction, key: str) -> None:
    note = KEPT.setdefault(key, Note(text=key))
    tx.add(note)
    await tx.session.execute(sa.text("SELECT 1"))


async def test_a_row_of_the_call_before_is_the_messages_own(
    habits: Habits, db: asyncpg.Connection
) -> None:
    """The handler is called again with a session of its own."""
    habits.habits = {2: noting_and_selecting}
    await habits.together(1, 2, 3)
    assert await errors_of(habits.applier) == {}
    assert await db.fetchval("SELECT count(*) FROM note") == 1


async def test_adding_its_own_rows_twice_needs_no_session_of_its_own(habits: Habits) -> None:
    habits.habits = {2: adding_again}
    await habits.together(1, 2, 3)
    assert habits.calls == [1, 2, 3]


# Rows that were published


def expire(session: AsyncSession, wallet: Wallet) -> None:
    session.expire(wallet)


def expire_version(session: AsyncSession, wallet: Wallet) -> None:
    session.expire(wallet, ["version"])


def expunge(session: AsyncSession, wallet: Wallet) -> None:
    session.expunge(wallet)


def expire_all(session: AsyncSession, wallet: Wallet) -> None:
    session.expire_all()


def expunge_all(session: AsyncSession, wallet: Wallet) -> None:
    session.expunge_all()


def detach(session: AsyncSession, wallet: Wallet) -> None:
    make_transient(wallet)


Drop = Callable[[AsyncSession, Wallet], None]


async def test_a_row_with_a_published_event_is_not_dropped_before_flush(
    habits: Habits, db: asyncpg.Connection
) -> None:
    def dropping(drop: Drop, *, flushes: bool) -> Habit:
        async def habit(tx: Transaction, key: str) -> None:
            await change(tx, key)
            wallet = await tx.load_or_create(Wallet, key)
            if flushes:
                await tx.session.flush()
            drop(tx.session, wallet)

        return habit

    drops = [expire, expire_version, expunge, expire_all, expunge_all, detach]
    cases = [(drop, key) for drop in drops for key in ("old", "new")]
    # SQLAlchemy itself rejects the first two for a row that is not in the database yet, and leaves
    # it alone in expire_all.
    cases = [case for case in cases if case[1] == "old" or "expire" not in case[0].__name__]
    deposits = []
    for n, (drop, key) in enumerate(cases):
        if key == "old":
            await habits.applier.apply(Deposit(100, account=f"{n}", id=f"before {n}"))
        habits.habits |= {n: dropping(drop, flushes=False), 50 + n: dropping(drop, flushes=True)}
        deposits += [Deposit(n, account=f"{n}"), Deposit(50 + n, account=f"{n} flushed")]
    start = await habits.applier.position()
    await habits.applier.apply(*deposits)
    failed = await errors_of(habits.applier)
    assert set(failed) == set(range(start, start + len(deposits), 2))
    assert all("flush" in error for error in failed.values()), failed
    for n, (_, key) in enumerate(cases):
        assert [number for number, _ in await events_of(db, f"{n}")] == [1] * (key == "old")
        assert (await wallet_of(db, f"{n} flushed"))["version"] == 1


async def test_a_row_that_others_are_dropped_beside_is_written(
    habits: Habits, db: asyncpg.Connection
) -> None:
    async def drop(tx: Transaction, key: str) -> None:
        other = await tx.load_or_create(Wallet, "other")
        await tx.session.flush()
        await change(tx, key)
        tx.session.expire(other)
        tx.session.expunge(other)

    habits.habits = {2: drop}
    await habits.together(1, 2, 3)
    assert await errors_of(habits.applier) == {}
    assert [number for number, _ in await events_of(db)] == [1, 2, 3]


async def test_a_row_that_is_created_again_begins_a_new_sequence(
    habits: Habits, db: asyncpg.Connection
) -> None:
    async def close(tx: Transaction, key: str) -> None:
        wallet = await tx.load_or_create(Wallet, key)
        tx.publish(Changed(cents=0), of=wallet)
        await tx.session.delete(wallet)

    habits.habits = {3: close}
    await habits.together(1, 2, 3, 4)
    await habits.together(5)
    assert await errors_of(habits.applier) == {}
    assert [number for number, _ in await events_of(db)] == [1, 2, 3, 1, 2]


# Another database


@CANCELLING
async def test_an_outage_of_another_database_is_the_failure_of_the_message(
    habits: Habits, db: asyncpg.Connection
) -> None:
    url = habits.applier.engine.url
    other = create_async_engine(url, pool_size=1, max_overflow=0, pool_timeout=0.05)

    async def wait_for_another(tx: Transaction, key: str) -> None:
        async with other.connect(), other.connect():
            pass

    async def lose(tx: Transaction, key: str) -> None:
        async with other.connect() as connection:
            pid = await connection.scalar(sa.text("SELECT pg_backend_pid()"))
            await db.execute("SELECT pg_terminate_backend($1)", pid)
            await connection.execute(sa.text("SELECT 1"))

    async def lose_with_a_session(tx: Transaction, key: str) -> None:
        await tx.session.execute(sa.text("SELECT 1"))
        await lose(tx, key)

    habits.habits = {2: wait_for_another, 3: lose, 5: lose_with_a_session}
    try:
        await habits.applier.apply(*(Deposit(n, account=str(n)) for n in (1, 2, 3, 4)))
        await habits.applier.work_off()  # what was not decided
        await habits.applier.apply(*(Deposit(n, account=str(n)) for n in (5, 6)))
        await habits.applier.work_off()
    finally:
        await other.dispose()
    assert await habits.applier.park() == {("wallet", n): "failed" for n in (1, 2, 4)}
    assert "QueuePool limit" in (await errors_of(habits.applier))[1]
    assert habits.applier.outages == []


# Errors


class NotYet(Park):
    """Postpones a message, and keeps what it waits for."""

    def __init__(self, what: str) -> None:
        self.what = what


class Later(Retry):
    """Postpones a message by a minute."""

    after = 60


class Strange(Exception):
    """Has an attribute that groups have."""

    exceptions = None


@pytest.mark.parametrize(
    ("error", "reason", "text"),
    [
        (lambda: NotYet("a parcel"), "parked by its handler", "NotYet: a parcel"),
        (lambda: Later("no"), "failed", "Later: no"),
        (Strange, "failed", "Strange"),
    ],
)
async def test_an_error_of_a_custom_class_is_attributed_to_its_message(
    habits: Habits, error: Callable[[], Exception], reason: str, text: str
) -> None:
    async def fail(tx: Transaction, key: str) -> None:
        raise error()

    habits.habits = {2: fail}
    await habits.together(1, 2)
    assert await habits.applier.park() == {("wallet", 1): reason}
    assert (await errors_of(habits.applier))[1] == text


async def test_each_of_many_flushes_that_fail_is_named(
    habits: Habits, db: asyncpg.Connection
) -> None:
    async def twice(tx: Transaction, key: str) -> None:
        tx.session.add_all([Note(text="twice"), Note(text="twice")])

    habits.habits = dict.fromkeys((2, 3, 4), twice)
    await habits.applier.apply(*(Deposit(n, account=str(n)) for n in range(1, 6)))
    found = await errors_of(habits.applier)
    assert set(found) == {1, 2, 3}
    assert all("UniqueViolation" in error for error in found.values()), found
    assert (await wallet_of(db, "5"))["cents"] == 1


@pytest.mark.parametrize(
    ("habit", "text"),
    [
        (lambda tx: tx.publish(Changed(cents=1), key=5), "is no text: 5"),
        (lambda tx: tx.publish(Changed(cents=1), key=b"x"), "is no text"),
        (lambda tx: tx.publish(Changed(cents=1), key="x", after=timedelta.min), "100 years"),
    ],
)
async def test_wrong_arguments_are_named_where_they_are_given(
    habits: Habits, habit: Callable[[Any], None], text: str
) -> None:
    async def publish(tx: Transaction, key: str) -> None:
        habit(tx)

    habits.habits = {2: publish}
    await habits.together(1, 2)
    assert text in (await errors_of(habits.applier))[1]


async def test_a_temporary_table_that_always_looks_otherwise_holds_no_partition(
    habits: Habits, db: asyncpg.Connection
) -> None:
    def collecting(columns: str) -> Habit:
        async def collect(tx: Transaction, key: str) -> None:
            await tx.session.execute(sa.text(f"CREATE TEMP TABLE found AS SELECT {columns}"))
            await tx.session.execute(sa.text("SELECT * FROM found"))
            await change(tx, key)

        return collect

    habits.habits = {1: collecting("1 AS a"), 2: collecting("1 AS a, 2 AS b")}
    await habits.together(1, 2)
    assert await errors_of(habits.applier) == {}
    assert (await wallet_of(db))["cents"] == 2
