"""What a handler does to its session is done as if it were alone in a batch."""

import asyncio
import contextvars
import decimal
import re
import warnings
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa
from sqlalchemy import Text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError, IntegrityError, MissingGreenlet
from sqlalchemy.ext.asyncio import AsyncConnection, async_object_session
from sqlalchemy.orm import (
    Mapped,
    Session,
    column_property,
    make_transient,
    mapped_column,
    object_session,
    relationship,
)

from onceward import Aggregate, Event, EventBatch, Handlers, Reject, Transaction
from onceward.errors import SourceLost
from onceward.servers.database import driver_of
from onceward.servers.guard import HandlerFault, watch_coroutines

from .applier import Applier, NewApplier
from .calling import take_calls
from .test_inbox import Connect
from tests.contract.bank import Base, Deposit, Deposited
from tests.servers.pooler import CANCELLING
from tests.servers.waiting import eventually

TOPIC = "deposits"
TOO_MUCH = 1_000


class Wallet(Aggregate, Base):
    """What somebody has in cents."""

    __tablename__ = "wallet"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    cents: Mapped[int] = mapped_column(default=0)
    owner: Mapped[str | None] = mapped_column(Text)
    rate: Mapped[decimal.Decimal | None] = mapped_column(sa.Numeric(12, 2))


# Unknown to the model, so that rows need not be read back between messages.
LIMIT: Any = sa.DDL(  # type: ignore[no-untyped-call]
    f"ALTER TABLE wallet ADD CHECK (cents < {TOO_MUCH})"
)
sa.event.listen(Wallet.__table__, "after_create", LIMIT)


class Tagged(Aggregate, Base):
    """A row with a value that can be changed in place."""

    __tablename__ = "tagged"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    tags: Mapped[list[str] | None] = mapped_column(sa.JSON)
    text: Mapped[str | None] = mapped_column(Text)


class Shop(Aggregate, Base):
    """A row whose relationship is loaded with it."""

    __tablename__ = "shop"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    cents: Mapped[int] = mapped_column(default=0)
    twice: Mapped[int] = column_property(cents * 2)
    goods: Mapped[list["Good"]] = relationship(lazy="selectin")
    parts: Mapped[list["Part"]] = relationship(lazy="joined")


class Good(Base):
    """What a shop sells."""

    __tablename__ = "good"

    id: Mapped[int] = mapped_column(primary_key=True)
    shop_id: Mapped[str] = mapped_column(sa.ForeignKey("shop.id"))


class Part(Aggregate, Base):
    """What a shop has."""

    __tablename__ = "part"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    shop_id: Mapped[str | None] = mapped_column(sa.ForeignKey("shop.id"))


class Note(Base):
    """Something that was noted."""

    __tablename__ = "note"

    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str] = mapped_column(Text, unique=True)


class Changed(Event, type="wallet.changed", topic="wallets"):
    """The wallet has changed."""

    cents: int


class Wired(Event, type="wired", topic="wires"):
    """Money is to be sent."""

    amount: int


Habit = Callable[[Transaction, str], Awaitable[None]]


async def add_cents(tx: Transaction, key: str, cents: int) -> None:
    """Change the wallet and publish it, as handlers do."""
    wallet = await tx.load_or_create(Wallet, key)
    wallet.cents += cents
    tx.publish(Changed(cents=wallet.cents), of=wallet)


async def change(tx: Transaction, key: str) -> None:
    """Add a cent."""
    await add_cents(tx, key, 1)


class Habits:
    """A handler that does what a test says for each amount; `change` for the others."""

    def __init__(self, applier: Applier, handlers: Handlers) -> None:
        self.applier = applier
        self.handlers = handlers
        self.habits: dict[int, Habit] = {}
        self.calls: list[int] = []

        @handlers.on(Deposited, topic=TOPIC, consumer="wallet", loads=Wallet.by("account"))
        async def wallet(event: Deposited, tx: Transaction) -> None:
            self.calls.append(event.amount)
            await self.habits.get(event.amount, change)(tx, event.account)

    async def apply(self, amount: int, *keys: str) -> None:
        """Have a batch of messages of these keys handled."""
        first = await self.applier.position()
        await self.applier.apply(
            *(Deposit(amount, account=key, id=f"{first} {n}") for n, key in enumerate(keys))
        )

    async def together(self, *amounts: int) -> None:
        """Have the messages handled in one batch."""
        await self.applier.apply(*(Deposit(n, account="ada") for n in amounts))

    async def alone(self, *amounts: int) -> None:
        """Have the messages handled one by one."""
        for n in amounts:
            await self.applier.apply(Deposit(n, account="bob", id=f"alone {n}"))


@pytest.fixture
async def habits(new_applier: NewApplier) -> Habits:
    """Return an applier with a handler that has habits."""
    handlers = Handlers()
    return Habits(await new_applier(handlers, topic=TOPIC), handlers)


async def row_of(db: asyncpg.Connection, table: str, key: object) -> dict[str, Any]:
    """Return the row of a table, without its key."""
    row = await db.fetchrow(f"SELECT * FROM {table} WHERE id = $1", key)
    return {name: value for name, value in dict(row or {}).items() if name != "id"}


async def wallet_of(db: asyncpg.Connection, key: str = "ada") -> dict[str, Any]:
    """Return the wallet, without its key."""
    return await row_of(db, "wallet", key)


async def events_of(db: asyncpg.Connection, key: str = "ada") -> list[tuple[int, str]]:
    """Return sequence and payload of the events published of the wallet."""
    rows = await db.fetch(
        "SELECT sequence, convert_from(payload, 'UTF8') AS payload FROM pipeline.outbox"
        " WHERE subject = $1 ORDER BY id",
        key,
    )
    return [(row["sequence"], row["payload"]) for row in rows]


async def errors_of(applier: Applier) -> dict[int, str]:
    """Return why messages failed, by their place, when those have been tried that are due."""
    await applier.work_off()
    return {
        row["offset"]: row["error"]
        for row in await applier.backlog()
        if row["reason"] != "follows another"
    }


# Savepoints


async def breaking_a_check(tx: Transaction, key: str) -> None:
    wallet = await tx.load_or_create(Wallet, key)
    with pytest.raises(IntegrityError):
        async with tx.session.begin_nested():
            wallet.cents = TOO_MUCH
            tx.publish(Changed(cents=TOO_MUCH), of=wallet)
            tx.publish(Changed(cents=-1), key="later", after=timedelta(days=1), name="later")
            tx.cancel("kept")
            tx.call(Wired(amount=1), key=key)
            await tx.session.flush()


async def raising(tx: Transaction, key: str) -> None:
    wallet = await tx.load_or_create(Wallet, key)
    with pytest.raises(ZeroDivisionError):
        async with tx.session.begin_nested():
            wallet.cents += 1
            tx.publish(Changed(cents=-1), of=wallet)
            async with tx.session.begin_nested():
                tx.publish(Changed(cents=-2), of=wallet)
            raise ZeroDivisionError


async def releasing(tx: Transaction, key: str) -> None:
    async with tx.session.begin_nested():
        await change(tx, key)
        with pytest.raises(ZeroDivisionError):
            async with tx.session.begin_nested():
                await change(tx, key)
                raise ZeroDivisionError
        await change(tx, key)


@pytest.mark.parametrize("habit", [breaking_a_check, raising])
async def test_what_a_savepoint_staged_goes_with_it(
    habits: Habits, db: asyncpg.Connection, habit: Habit
) -> None:
    take_calls(habits.handlers, Wired, "wire")

    async def schedule(tx: Transaction, key: str) -> None:
        tx.publish(Changed(cents=-1), key="kept", after=timedelta(days=1), name="kept")
        await change(tx, key)

    habits.habits = {1: schedule, 2: habit}
    await habits.together(1, 2, 3)
    assert await errors_of(habits.applier) == {}
    assert await events_of(db) == [(1, '{"cents":1}'), (2, '{"cents":2}')]
    assert [r["name"] for r in await db.fetch("SELECT name FROM pipeline.scheduled")] == ["kept"]
    assert (await wallet_of(db))["version"] == 2


async def test_what_a_savepoint_staged_stays_when_it_is_released(
    habits: Habits, db: asyncpg.Connection
) -> None:
    habits.habits = {1: releasing}
    await habits.together(1, 2)
    assert await errors_of(habits.applier) == {}
    assert await events_of(db) == [(n, f'{{"cents":{n}}}') for n in (1, 2, 3)]


async def test_a_row_unlocked_by_a_savepoint_is_locked_and_read_again(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    await db.execute("INSERT INTO wallet (id, cents, version) VALUES ('ada', 100, 0)")
    handlers, between = Handlers(), asyncio.Event()
    appliers = [await new_applier(handlers, topic=TOPIC, partition=number) for number in (0, 1)]
    unlocked = asyncio.Event()

    @handlers.on(Deposited, topic=TOPIC, consumer="wallet")
    async def careful(event: Deposited, tx: Transaction) -> None:
        if tx.message.partition == 0:
            with pytest.raises(ZeroDivisionError):
                async with tx.session.begin_nested():
                    await tx.load(Wallet, "ada")
                    raise ZeroDivisionError
            unlocked.set()
            await between.wait()
        await add_cents(tx, "ada", 10 if tx.message.partition else 1)

    first = asyncio.create_task(appliers[0].apply(Deposit(1)))
    await unlocked.wait()
    await appliers[1].apply(Deposit(1, id="other"))
    between.set()
    await first
    assert (await wallet_of(db))["cents"] == 111
    assert [sequence for sequence, _ in await events_of(db)] == [1, 2]


async def test_a_row_is_usable_after_a_savepoint_was_rolled_back(
    habits: Habits, db: asyncpg.Connection
) -> None:
    async def habit(tx: Transaction, key: str) -> None:
        await raising(tx, key)
        wallet = await tx.load_or_create(Wallet, key)
        tx.publish(Changed(cents=wallet.cents), of=wallet)

    habits.habits = {2: habit}
    await habits.together(1, 2)
    assert await errors_of(habits.applier) == {}
    assert await events_of(db) == [(1, '{"cents":1}'), (2, '{"cents":1}')]


async def trying_beside(tx: Transaction, key: str) -> None:
    wallet = await tx.load_or_create(Wallet, key)
    with pytest.raises(IntegrityError):
        async with tx.session.begin_nested():
            tx.session.add_all([Note(text="twice"), Note(text="twice")])
            await tx.session.flush()
    wallet.cents += 1
    tx.publish(Changed(cents=wallet.cents), of=wallet)


async def test_a_row_that_was_locked_before_a_savepoint_stays_so(
    habits: Habits, db: asyncpg.Connection
) -> None:
    habits.habits = {2: trying_beside}
    await habits.together(1, 2, 3)
    assert await errors_of(habits.applier) == {}
    assert await events_of(db) == [(n, f'{{"cents":{n}}}') for n in (1, 2, 3)]


async def getting(tx: Transaction, key: str) -> None:
    wallet = await tx.session.get_one(Wallet, key)
    wallet.cents += 1


async def selecting(tx: Transaction, key: str) -> None:
    wallet = await tx.session.scalar(sa.select(Wallet).where(Wallet.id == key))
    assert wallet is not None
    wallet.cents += 1
    await tx.session.flush()


async def merging(tx: Transaction, key: str) -> None:
    await tx.session.merge(Wallet(id=key, cents=5))


async def deleting_unlocked(tx: Transaction, key: str) -> None:
    await tx.session.delete(await tx.session.get_one(Wallet, key))


@pytest.mark.parametrize("habit", [getting, selecting, merging, deleting_unlocked])
async def test_an_aggregate_that_is_changed_without_a_lock_is_refused(
    habits: Habits, db: asyncpg.Connection, habit: Habit
) -> None:
    """Two partitions would lose each other's changes in silence."""
    handlers = habits.applier.handlers

    @handlers.on(Deposited, topic=TOPIC, consumer="undeclared")
    async def undeclared(event: Deposited, tx: Transaction) -> None:
        if event.amount == 2:
            await habit(tx, event.account)

    await habits.together(1)
    await habits.together(2, 3)
    assert "without a lock" in (await errors_of(habits.applier))[1]
    assert (await wallet_of(db))["cents"] == 3


async def forgetting_to_await_a_statement(tx: Transaction, key: str) -> None:
    tx.session.execute(sa.text("UPDATE wallet SET cents = 100"))  # type: ignore[unused-coroutine]


async def forgetting_to_await_a_row(tx: Transaction, key: str) -> None:
    tx.load(Wallet, key)  # type: ignore[unused-coroutine]


@pytest.mark.filterwarnings("ignore:.* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("habit", [forgetting_to_await_a_statement, forgetting_to_await_a_row])
async def test_a_coroutine_that_is_not_awaited_is_the_fault_of_its_message(
    habits: Habits, db: asyncpg.Connection, habit: Habit, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        watch_coroutines()
        habits.habits = {2: habit, 4: habit}
        await habits.together(1, 2)
        await habits.applier.apply(Deposit(3, account="eve"), Deposit(4, account="bob"))
    assert set(await errors_of(habits.applier)) == {1, 3}
    assert "never awaited" in (await errors_of(habits.applier))[3]
    assert (await wallet_of(db))["cents"] == 1
    assert (await wallet_of(db, "eve"))["cents"] == 1


async def core_savepoint(tx: Transaction, key: str) -> None:
    await change(tx, key)
    savepoint = await (await tx.session.connection()).begin_nested()
    await savepoint.rollback()


async def text_savepoint(tx: Transaction, key: str) -> None:
    await tx.session.execute(sa.text("SAVEPOINT mine"))
    await change(tx, key)
    await tx.session.execute(sa.text("ROLLBACK TO mine"))


async def driver_savepoint(tx: Transaction, key: str) -> None:
    driver = await driver_of(await tx.session.connection())
    await driver.execute("SAVEPOINT mine")
    await change(tx, key)
    await driver.execute("ROLLBACK TO mine")


async def hidden_savepoint(tx: Transaction, key: str) -> None:
    driver = await driver_of(await tx.session.connection())
    await change(tx, key)
    await tx.session.flush()
    undo = "UPDATE wallet SET cents = cents WHERE owner = 'a;''; ROLLBACK'; ROLLBACK TO mine"
    await driver.execute(f"/* {key} */ SAVEPOINT mine; {undo}")


def hiding_savepoint(begin: str, undo: str) -> Habit:
    """Return a handler that does so by these texts."""

    async def habit(tx: Transaction, key: str) -> None:
        await tx.session.execute(sa.text(begin))
        await change(tx, key)
        await tx.session.execute(sa.text(undo))

    return habit


async def prepared_savepoint(tx: Transaction, key: str) -> None:
    driver = await driver_of(await tx.session.connection())
    await (await driver.prepare("SAVEPOINT mine")).fetch()
    await change(tx, key)
    await tx.session.flush()
    await (await driver.prepare("ROLLBACK TO mine")).fetch()


async def savepoint_with_columns(tx: Transaction, key: str) -> None:
    await tx.session.execute(sa.text("SAVEPOINT mine").columns())
    await change(tx, key)
    await tx.session.flush()
    await tx.session.execute(sa.text("ROLLBACK TO mine").columns())


SAVEPOINTS = (
    core_savepoint,
    text_savepoint,
    driver_savepoint,
    hidden_savepoint,
    hiding_savepoint("/* a /* b */ c */ SAVEPOINT mine", "/* /**/ */ ROLLBACK TO mine"),
    hiding_savepoint("; SAVEPOINT mine", ";; ROLLBACK TO mine"),
    hiding_savepoint("-- a\rSAVEPOINT mine", "-- a\rROLLBACK TO mine"),
    prepared_savepoint,
    savepoint_with_columns,
)
"""Savepoints that the engine can't follow."""


@pytest.mark.parametrize("habit", SAVEPOINTS)
async def test_a_savepoint_that_the_engine_can_not_follow_is_refused(
    habits: Habits, db: asyncpg.Connection, habit: Habit
) -> None:
    habits.habits = {2: habit}
    await habits.together(1, 2)
    assert "tx.session.begin_nested()" in (await errors_of(habits.applier))[1]
    assert (await wallet_of(db))["cents"] == 1
    assert len(await events_of(db)) == 1


async def test_words_of_transactions_in_other_places_of_a_statement_are_allowed(
    habits: Habits, db: asyncpg.Connection
) -> None:
    async def several(tx: Transaction, key: str) -> None:
        driver = await driver_of(await tx.session.connection())
        await driver.execute(
            "DO $do$ BEGIN PERFORM 1; END; $do$; -- ; COMMIT\n SELECT '; COMMIT', E'\\'; COMMIT';"
            ' SELECT 1 AS "; ROLLBACK" /* ; END */'
        )
        await driver.execute("/* a /* b */ ; COMMIT */ SELECT 1")
        await driver.execute("SELECT E'a' -- b\n '\\'; COMMIT'; SELECT E'\\\\', $a$ $b$; END $a$")
        await change(tx, key)

    habits.habits = {2: several}
    await habits.together(1, 2, 3)
    assert await errors_of(habits.applier) == {}
    assert (await wallet_of(db))["cents"] == 3


# The connection


async def gathering(tx: Transaction, key: str) -> None:
    async def check() -> None:
        await asyncio.sleep(0.01)
        raise ValueError("no such thing")

    await asyncio.gather(tx.session.execute(sa.text("SELECT pg_sleep(2)")), check())


async def forgetting(tx: Transaction, key: str) -> None:
    asyncio.create_task(tx.session.execute(sa.text("SELECT pg_sleep(2)")))  # noqa: RUF006


async def forgetting_an_idle_one(tx: Transaction, key: str) -> None:
    async def later(session: Any) -> None:
        await asyncio.sleep(0.001)
        await session.execute(sa.text("INSERT INTO note (text) VALUES ('late')"))

    asyncio.create_task(later(tx.session))  # noqa: RUF006


async def timing_out(tx: Transaction, key: str) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await tx.session.execute(sa.text("SELECT pg_sleep(5)"))
    await change(tx, key)


@CANCELLING
@pytest.mark.parametrize(
    ("habit", "text"),
    [
        (gathering, "no such thing"),
        (forgetting, "await"),
        (timing_out, "cancelled"),
    ],
)
async def test_a_statement_under_way_is_the_fault_of_its_message(
    habits: Habits, db: asyncpg.Connection, habit: Habit, text: str
) -> None:
    habits.habits = {2: habit}
    await habits.together(1, 2)
    await habits.alone(4)
    assert text in (await errors_of(habits.applier))[1]
    assert (await wallet_of(db))["cents"] == 1
    assert (await wallet_of(db, "bob"))["cents"] == 1
    assert habits.applier.outages == []


async def test_a_session_that_is_used_after_its_handler_has_ended_does_nothing(
    habits: Habits, db: asyncpg.Connection
) -> None:
    unraised: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: unraised.append(what))
    habits.habits = {2: forgetting_an_idle_one}
    await habits.together(1, 2, 3)
    await asyncio.sleep(0.05)
    assert await db.fetchval("SELECT count(*) FROM note") == 0
    idle = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in%'"
    await eventually(lambda: _is_none(db, idle))


async def _is_none(db: asyncpg.Connection, question: str) -> bool:
    return not await db.fetchval(question)


# The transaction


async def text_commit(tx: Transaction, key: str) -> None:
    await tx.session.execute(sa.text("COMMIT"))


async def text_rollback(tx: Transaction, key: str) -> None:
    await tx.session.execute(sa.text("ROLLBACK"))


async def connection_commit(tx: Transaction, key: str) -> None:
    await (await tx.session.connection()).commit()


async def connection_rollback(tx: Transaction, key: str) -> None:
    await (await tx.session.connection()).rollback()
    await tx.session.execute(sa.text("SELECT 1"))


async def driver_commit(tx: Transaction, key: str) -> None:
    await (await driver_of(await tx.session.connection())).execute("COMMIT")


async def driver_commit_and_begin(tx: Transaction, key: str) -> None:
    await (await driver_of(await tx.session.connection())).execute("COMMIT; BEGIN")


async def driver_rollback_and_begin(tx: Transaction, key: str) -> None:
    driver = await driver_of(await tx.session.connection())
    await driver.execute("ROLLBACK")
    await driver.execute("BEGIN")


async def rolling_back_and_writing(tx: Transaction, key: str) -> None:
    await tx.session.execute(sa.text("SELECT 1"))
    driver = await driver_of(await tx.session.connection())
    await driver.execute("ROLLBACK")
    await tx.session.execute(sa.text("INSERT INTO note (text) VALUES ('outside')"))


async def session_commit(tx: Transaction, key: str) -> None:
    await tx.session.commit()


async def session_rollback(tx: Transaction, key: str) -> None:
    await tx.session.rollback()


async def session_close(tx: Transaction, key: str) -> None:
    await tx.session.close()


async def session_reset(tx: Transaction, key: str) -> None:
    await tx.session.reset()


async def session_invalidate(tx: Transaction, key: str) -> None:
    await tx.session.invalidate()


async def connection_close(tx: Transaction, key: str) -> None:
    await (await tx.session.connection()).close()


async def connection_invalidate(tx: Transaction, key: str) -> None:
    await (await tx.session.connection()).invalidate()


async def driver_close(tx: Transaction, key: str) -> None:
    await (await driver_of(await tx.session.connection())).close()


async def driver_terminate(tx: Transaction, key: str) -> None:
    (await driver_of(await tx.session.connection())).terminate()
    await tx.session.execute(sa.text("SELECT 1"))


async def driver_reset(tx: Transaction, key: str) -> None:
    await (await driver_of(await tx.session.connection())).reset()


async def raw_close(tx: Transaction, key: str) -> None:
    (await (await tx.session.connection()).get_raw_connection()).close()
    await tx.session.execute(sa.text("SELECT 1"))


async def release(tx: Transaction, key: str) -> None:
    connection = await tx.session.connection()
    await connection.run_sync(lambda sync: sync.connection.close())
    await tx.session.execute(sa.text("INSERT INTO note (text) VALUES ('outside')"))


async def session_rollback_in_a_thread(tx: Transaction, key: str) -> None:
    await tx.session.flush()
    await asyncio.get_running_loop().run_in_executor(None, tx.session.sync_session.rollback)


ENDINGS = (
    session_rollback_in_a_thread,
    text_commit,
    text_rollback,
    connection_commit,
    connection_rollback,
    driver_commit,
    driver_commit_and_begin,
    driver_rollback_and_begin,
    rolling_back_and_writing,
    session_commit,
    session_rollback,
    session_close,
    session_reset,
    session_invalidate,
    connection_close,
    connection_invalidate,
    driver_close,
    driver_terminate,
    driver_reset,
    raw_close,
    release,
)
"""What ends the transaction of a handler, a request or a writer."""
ENDED = HandlerFault, DBAPIError, asyncpg.PostgresError, MissingGreenlet
"""Errors of such an ending; the last one is that of a thread."""
REFUSED = "begin_nested|a handler has sent COMMIT|greenlet_spawn"
"""What they say."""


@pytest.mark.parametrize("swallows", [False, True], ids=["", "swallowed"])
@pytest.mark.parametrize("context", [None, contextvars.Context()], ids=["", "new context"])
@pytest.mark.parametrize("habit", ENDINGS)
async def test_who_ends_the_transaction_harms_no_neighbour_and_is_named(
    habits: Habits,
    db: asyncpg.Connection,
    habit: Habit,
    context: contextvars.Context | None,
    swallows: bool,
) -> None:
    async def end(tx: Transaction, key: str) -> None:
        await change(tx, key)
        try:
            await asyncio.create_task(habit(tx, key), context=context)  # type: ignore[arg-type]
        except Exception:
            if not swallows:
                raise

    habits.habits = {2: end}
    await habits.together(1, 2)
    await habits.alone(4)
    assert set(await errors_of(habits.applier)) == {1}, await errors_of(habits.applier)
    assert (await wallet_of(db))["cents"] == 1
    assert len(await events_of(db)) == 1
    assert (await wallet_of(db, "bob"))["cents"] == 1
    assert await db.fetchval("SELECT count(*) FROM note") == 0
    assert habits.applier.outages == []


@pytest.mark.parametrize("habit", [driver_commit, driver_commit_and_begin])
async def test_who_commits_when_a_worker_tries_it_again_is_refused_as_well(
    habits: Habits, db: asyncpg.Connection, habit: Habit
) -> None:
    """With its marker committed the message would be a duplicate, and its events lost."""
    habits.habits = {2: habit}
    await habits.together(1, 2)
    await habits.applier.make_due()
    await habits.applier.work_off()
    [row] = await habits.applier.backlog()
    assert (row["offset"], row["attempts"]) == (1, 2)
    assert await db.fetchval("SELECT count(*) FROM pipeline.inbox") == 1
    assert await db.fetchval("SELECT count(*) FROM pipeline.guarded_transaction") == 0


# The session's state

LEFT = [
    "SET search_path TO pg_catalog",
    "SET LOCAL search_path TO pg_catalog",
    "SET ROLE pg_read_all_data",
    "SET TIME ZONE 'Asia/Tokyo'",
    "CREATE TEMP TABLE left_behind (id int)",
    "SELECT pg_advisory_lock(12345)",
    "LISTEN something",
    "DECLARE kept CURSOR WITH HOLD FOR SELECT 1",
    "DO $$ BEGIN SET search_path TO pg_catalog; END $$",
    "DO $$ BEGIN EXECUTE 'SET ROLE pg_read_all_data'; END $$",
    "DO $$ BEGIN CREATE TEMP TABLE left_behind (id int); END $$",
    "DO $$ BEGIN PERFORM pg_advisory_lock(12345); END $$",
    "DO $$ BEGIN LISTEN something; END $$",
    "DO $$ BEGIN EXECUTE 'DECLARE kept CURSOR WITH HOLD FOR SELECT 1'; END $$",
]
STATE = """
SELECT current_setting('search_path'), current_user = session_user, current_setting('TimeZone'),
       to_regclass('pg_temp.left_behind'), (SELECT count(*) FROM pg_cursors),
       (SELECT count(*) FROM pg_listening_channels()),
       (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND objid = 12345),
       current_setting('lock_timeout')
"""


@pytest.mark.parametrize("statement", LEFT)
@pytest.mark.parametrize("fails", [False, True], ids=["", "and fails"])
async def test_the_state_of_the_session_ends_with_its_message(
    habits: Habits, db: asyncpg.Connection, statement: str, fails: bool
) -> None:
    seen: list[tuple[Any, ...]] = []

    async def leave(tx: Transaction, key: str) -> None:
        await tx.session.execute(sa.text(statement))
        if fails:
            raise Reject("no")

    async def look(tx: Transaction, key: str) -> None:
        seen.append(tuple((await tx.session.execute(sa.text(STATE))).one()))
        await change(tx, key)

    habits.habits = {1: look, 2: leave, 3: look, 4: look}
    await habits.together(1)
    seen.clear()
    await habits.applier.apply(Deposit(11), Deposit(1, "eve", id="x"), Deposit(2, "eve", id="y"))
    await habits.applier.apply(Deposit(3, "eva"), Deposit(4, "eva"))
    assert len(seen) >= 3
    assert seen == [seen[0]] * len(seen)
    assert set(await errors_of(habits.applier)) == ({3} if fails else set())


def executing(text: str) -> Habit:
    """Return a handler that executes a text."""

    async def execute(tx: Transaction, key: str) -> None:
        await tx.session.execute(sa.text(text))

    return execute


def executing_by_the_driver(text: str, method: str = "execute") -> Habit:
    """Return one that does so by asyncpg, and goes on if that fails."""

    async def execute(tx: Transaction, key: str) -> None:
        driver = await driver_of(await tx.session.connection())
        with suppress(RuntimeError):
            await getattr(driver, method)(text)

    return execute


def setting(name: str, *values: Any, **options: Any) -> Habit:
    """Return a handler that calls a method of asyncpg's connection, and goes on if that fails."""

    async def call(tx: Transaction, key: str) -> None:
        driver = await driver_of(await tx.session.connection())
        with suppress(RuntimeError):
            if (called := getattr(driver, name)(*values, **options)) is not None:
                await called

    return call


@pytest.mark.parametrize(
    ("habit", "text"),
    [
        (executing("PREPARE mine AS SELECT 1"), "prepared statements"),
        (executing_by_the_driver("SELECT 1; /* all */ deallocate all"), "prepared statements"),
        (executing_by_the_driver("DEALLOCATE ALL", "fetch"), "prepared statements"),
        (executing("/* a */ SET /* b */ CONSTRAINTS ALL DEFERRED"), "INITIALLY DEFERRED"),
        (executing_by_the_driver("set constraints its_wallet immediate"), "INITIALLY DEFERRED"),
        (
            setting("set_type_codec", "text", schema="pg_catalog", encoder=str, decoder=len),
            "set_type_codec",
        ),
        (setting("add_listener", "news", print), "add_listener"),
        (setting("add_query_logger", print), "add_query_logger"),
    ],
)
async def test_what_would_outlive_the_message_is_refused(
    habits: Habits, db: asyncpg.Connection, habit: Habit, text: str
) -> None:
    habits.habits = {2: habit}
    await habits.together(1, 2)
    await habits.alone(4)
    assert set(errors := await errors_of(habits.applier)) == {1}
    assert text in errors[1]
    assert (await wallet_of(db))["cents"] == 1
    assert (await wallet_of(db, "bob"))["cents"] == 1


# A message in a batch behaves as it would alone


async def by_core(tx: Transaction, key: str) -> None:
    await tx.session.execute(
        sa.update(Wallet).where(Wallet.id == key).values(cents=Wallet.cents + 5)
    )


async def by_text(tx: Transaction, key: str) -> None:
    await tx.session.execute(
        sa.text("UPDATE wallet SET cents = cents + 5 WHERE id = :id"), {"id": key}
    )


async def by_the_driver(tx: Transaction, key: str) -> None:
    driver = await driver_of(await tx.session.connection())
    await driver.execute("UPDATE wallet SET cents = cents + 5 WHERE id = $1", key)


async def by_upsert(tx: Transaction, key: str) -> None:
    row = insert(Wallet).values(id=key, cents=5, version=0)
    await tx.session.execute(
        row.on_conflict_do_update(index_elements=["id"], set_={"cents": Wallet.cents + 5})
    )


async def deleting(tx: Transaction, key: str) -> None:
    if wallet := await tx.load(Wallet, key):
        await tx.session.delete(wallet)


async def expiring_all(tx: Transaction, key: str) -> None:
    tx.session.expire_all()


async def expunging_all(tx: Transaction, key: str) -> None:
    tx.session.expunge_all()


async def expiring(tx: Transaction, key: str) -> None:
    if wallet := await tx.load(Wallet, key):
        tx.session.expire(wallet)


async def without_autoflush(tx: Transaction, key: str) -> None:
    tx.session.sync_session.autoflush = False


async def naming(tx: Transaction, key: str) -> None:
    wallet = await tx.load_or_create(Wallet, key)
    wallet.owner = f"the old owner of {len(key)}"


async def rating(tx: Transaction, key: str) -> None:
    wallet = await tx.load_or_create(Wallet, key)
    wallet.rate = (wallet.rate or decimal.Decimal(0)) + decimal.Decimal("1.005")


async def tagging(tx: Transaction, key: str) -> None:
    row = await tx.load_or_create(Tagged, key)
    if row.tags is None:
        row.tags = []
    else:
        row.tags.append("SQLAlchemy does not see this")
    row.text = str(len(row.tags))


async def renaming_the_key(tx: Transaction, key: str) -> None:
    if wallet := await tx.load(Wallet, key):
        wallet.id = f"{key} before"


async def copying(tx: Transaction, key: str) -> None:
    if wallet := await tx.load(Wallet, key):
        make_transient(wallet)
        wallet.id, wallet.version = f"{key} copy", 0
        tx.add(wallet)


async def expunging_by_the_row(tx: Transaction, key: str) -> None:
    if session := object_session(await tx.load_or_create(Wallet, key)):
        session.expunge_all()


async def counting_by_the_row(tx: Transaction, key: str) -> None:
    wallet = await tx.load_or_create(Wallet, key)
    session = async_object_session(wallet)
    assert session is not None
    wallet.owner = str(await session.scalar(sa.select(Wallet.cents).where(Wallet.id == key)))


async def adding_by_a_relationship(tx: Transaction, key: str) -> None:
    shop = await tx.load_or_create(Shop, key)
    assert await tx.load(Part, key) is None
    shop.parts.append(Part(id=key, version=0))


async def looking_at_the_part(tx: Transaction, key: str) -> None:
    part = await tx.load(Part, key)
    shop = await tx.load_or_create(Shop, key)
    shop.cents += 1 if part is None else 10
    tx.publish(Changed(cents=shop.cents), of=shop)


async def keeping_an_attribute(tx: Transaction, key: str) -> None:
    wallet = await tx.load_or_create(Wallet, key)
    wallet.cents = (wallet.cents or 0) + getattr(wallet, "seen", 0)
    wallet.seen = 1  # type: ignore[attr-defined]


async def counting(tx: Transaction, key: str) -> None:
    found = await tx.session.scalar(sa.select(sa.func.sum(Wallet.cents)).where(Wallet.id == key))
    tx.publish(Changed(cents=found or 0), key=key)


async def adding(tx: Transaction, key: str) -> None:
    tx.add(Note(text=f"{key} {tx.message.id.rpartition(' ')[2]}"))


async def executing_by_the_bind(tx: Transaction, key: str) -> None:
    session = async_object_session(await tx.load_or_create(Wallet, key))
    assert session is not None
    connection = session.bind
    assert isinstance(connection, AsyncConnection)
    await connection.execute(
        sa.text("UPDATE wallet SET cents = cents + 5 WHERE id = :key"), {"key": key}
    )


def in_a_thread(habit: Habit) -> Habit:
    """Return a habit, which does not wait, that is followed in a thread of the executor."""

    async def followed(tx: Transaction, key: str) -> None:
        def follow() -> None:
            with suppress(StopIteration):
                habit(tx, key).send(None)  # type: ignore[attr-defined]

        await asyncio.get_running_loop().run_in_executor(None, follow)

    followed.__name__ = f"{habit.__name__}_in_a_thread"
    return followed


def in_a_new_context(habit: Habit) -> Habit:
    """Return a habit that is followed by a task that inherits no context variable."""

    async def followed(tx: Transaction, key: str) -> None:
        await asyncio.create_task(habit(tx, key), context=contextvars.Context())  # type: ignore[arg-type]

    followed.__name__ = f"{habit.__name__}_in_a_new_context"
    return followed


SEQUENCES: list[list[Habit]] = [
    [change, by_core, change],
    [change, by_text, change],
    [change, by_the_driver, change],
    [by_upsert, change, by_upsert, change],
    [naming, change, deleting, change],
    [change, expiring_all, change],
    [change, expunging_all, change],
    [change, expiring, change],
    [change, without_autoflush, change, counting],
    [rating, rating, rating],
    [tagging, tagging, tagging, change],
    [keeping_an_attribute, keeping_an_attribute],
    [change, counting, change, counting],
    [adding, change, adding, counting],
    [change, renaming_the_key, change],
    [change, copying, change],
    [change, expunging_by_the_row, change],
    [change, counting_by_the_row, change, counting_by_the_row],
    [looking_at_the_part, adding_by_a_relationship, looking_at_the_part, looking_at_the_part],
    [change, executing_by_the_bind, change],
    *([change, in_a_thread(one), change] for one in (expiring_all, expunging_all)),
    *(
        [change, in_a_new_context(one), change, counting]
        for one in (
            expiring_all,
            expunging_all,
            expunging_by_the_row,
            counting_by_the_row,
            executing_by_the_bind,
            by_core,
            by_the_driver,
            deleting,
        )
    ),
]


@pytest.mark.parametrize(
    "sequence", SEQUENCES, ids=lambda one: "-".join(habit.__name__ for habit in one)
)
async def test_a_message_in_a_batch_behaves_as_it_would_alone(
    habits: Habits, db: asyncpg.Connection, sequence: list[Habit]
) -> None:
    habits.habits = dict(enumerate(sequence))
    places = range(len(sequence))
    await habits.together(*places)
    await habits.alone(*places)
    assert await errors_of(habits.applier) == {}
    for table in ("wallet", "tagged", "shop"):
        for suffix in ("", " before", " copy"):
            mine = await row_of(db, table, f"ada{suffix}")
            assert mine == await row_of(db, table, f"bob{suffix}"), table
    assert await events_of(db) == await events_of(db, "bob")


async def test_a_listener_that_queries_at_each_flush_is_allowed(
    habits: Habits, db: asyncpg.Connection
) -> None:
    def audit(session: Session, *_: object) -> None:
        if session.new or session.dirty:
            session.execute(sa.select(sa.func.count()).select_from(Note))

    sa.event.listen(Session, "before_flush", audit)
    try:
        await habits.together(1)
        await habits.together(2, 3)
    finally:
        sa.event.remove(Session, "before_flush", audit)
    assert await errors_of(habits.applier) == {}
    assert (await wallet_of(db))["cents"] == 3


async def to_a_schema(tx: Transaction, key: str) -> None:
    options = {"schema_translate_map": {None: "elsewhere"}}
    await tx.session.connection(execution_options=options)
    tx.session.add(Note(id=1, text="elsewhere"))


async def test_options_of_the_connection_end_with_their_message(
    habits: Habits, db: asyncpg.Connection
) -> None:
    await db.execute("CREATE SCHEMA elsewhere")
    for table in ("note", "wallet"):
        await db.execute(f"CREATE TABLE elsewhere.{table} (LIKE {table} INCLUDING ALL)")
    habits.habits = {2: to_a_schema}
    await habits.together(1, 2, 3)
    assert await db.fetchval("SELECT text FROM elsewhere.note") == "elsewhere"
    assert await db.fetchval("SELECT count(*) FROM elsewhere.wallet") == 0
    assert (await wallet_of(db))["cents"] == 2


async def read_only(tx: Transaction, key: str) -> None:
    await tx.session.execute(sa.text("SET TRANSACTION READ ONLY"))


async def read_only_and_writing(tx: Transaction, key: str) -> None:
    await read_only(tx, key)
    await change(tx, key)


async def too_much_of_the_disk(tx: Transaction, key: str) -> None:
    await tx.session.execute(sa.text("SET LOCAL temp_file_limit = '64kB'"))
    await tx.session.execute(sa.text("SET LOCAL work_mem = '64kB'"))
    numbers = "SELECT g FROM generate_series(1, 300000) g ORDER BY -g OFFSET 1"
    await tx.session.execute(sa.text(f"SELECT count(*) FROM ({numbers}) s"))


async def gathering_rows(tx: Transaction, key: str) -> None:
    async def check() -> None:
        await asyncio.sleep(0.01)
        raise ValueError("no such thing")

    await asyncio.gather(tx.load(Wallet, "locked"), check())


async def forgetting_a_row(tx: Transaction, key: str) -> None:
    asyncio.create_task(tx.load(Wallet, "locked"))  # noqa: RUF006
    await asyncio.sleep(0.01)


async def impatient(tx: Transaction, key: str) -> None:
    await asyncio.wait_for(tx.load(Wallet, "locked"), 0.05)


async def impatient_and_silent(tx: Transaction, key: str) -> None:
    with suppress(TimeoutError):
        await impatient(tx, key)


@pytest.mark.parametrize(
    "habit",
    [
        read_only,
        read_only_and_writing,
        too_much_of_the_disk,
        *(
            pytest.param(habit, marks=CANCELLING)
            for habit in (gathering_rows, forgetting_a_row, impatient, impatient_and_silent)
        ),
    ],
)
async def test_what_looks_like_an_outage_is_the_fault_of_its_message(
    habits: Habits, db: asyncpg.Connection, connect: Connect, habit: Habit
) -> None:
    await db.execute("INSERT INTO wallet (id, cents, version) VALUES ('locked', 0, 0)")
    habits.habits = {2: habit}
    other = await connect()
    async with other.transaction():
        await other.execute("SELECT FROM wallet WHERE id = 'locked' FOR UPDATE")
        deposits = [Deposit(n, account=name) for n, name in ((1, "ada"), (2, "bob"), (3, "eve"))]
        await habits.applier.apply(*deposits)
        assert set(await errors_of(habits.applier)) == {1}
        await habits.applier.apply(Deposit(4, account="eve"))
    assert habits.applier.outages == []
    assert [(await wallet_of(db, name))["cents"] for name in ("ada", "eve")] == [1, 2]


async def sleep_on(connection: AsyncConnection) -> None:
    await connection.execute(sa.text("SELECT pg_sleep(0.3)"))


async def close_driver(connection: AsyncConnection) -> None:
    await (await driver_of(connection)).close()


async def give_back(connection: AsyncConnection) -> None:
    await connection.run_sync(lambda sync: sync.connection.close())


@CANCELLING
@pytest.mark.parametrize("act", [sleep_on, close_driver, give_back])
async def test_a_stray_task_fails_its_own_message_and_no_other(
    habits: Habits,
    act: Callable[[AsyncConnection], Awaitable[None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks: list[asyncio.Task[None]] = []
    goes_on = asyncio.Event()

    async def stray(tx: Transaction, key: str) -> None:
        connection = await tx.session.connection()
        goes_on.clear()

        async def later() -> None:
            await asyncio.sleep(0.02)
            goes_on.set()
            await act(connection)

        tasks.append(asyncio.create_task(later()))

    async def innocent(tx: Transaction, key: str) -> None:
        session = tx.session
        await goes_on.wait()
        await asyncio.sleep(0.05)
        await session.execute(sa.text("SELECT 1"))

    habits.habits = {2: stray, 3: innocent, 4: innocent}
    deposits = [Deposit(n, account=name) for n, name in ((2, "ada"), (3, "bob"), (4, "eve"))]
    is_answered = True
    while (position := await habits.applier.position()) < len(deposits):
        # If its COMMIT was executed, and the answer was lost, a reader goes on behind it.
        try:
            await habits.applier.apply(*deposits[position:])
        except SourceLost:
            is_answered = False
    await asyncio.gather(*tasks, return_exceptions=True)
    # Alone it may end before its task begins, which is refused then; what its task breaks may be
    # its own transaction, too, and then the log says who did.
    errors = await errors_of(habits.applier)
    assert set(errors) <= {0}
    said = f"{errors.get(0)} {caplog.text}"
    assert not is_answered or re.search("has ended|begin_nested", said)
    assert await habits.applier.position() == 3


async def test_many_that_fail_with_a_session_are_found_in_few_attempts(habits: Habits) -> None:
    async def odd(tx: Transaction, key: str) -> None:
        if await tx.session.get(Wallet, key) is None and int(key) % 2:
            raise Reject("no such wallet")

    habits.habits = dict.fromkeys(range(100), odd)
    await habits.applier.apply(*(Deposit(n, account=str(n)) for n in range(100)))
    assert len(await errors_of(habits.applier)) == 50
    assert len(habits.calls) <= 400


async def test_a_sql_batch_handler_and_a_row_handler_lose_no_updates(
    habits: Habits, db: asyncpg.Connection
) -> None:
    @habits.handlers.on_batch(Deposited, topic=TOPIC, consumer="bonus")
    async def bonus(batch: EventBatch[Deposited]) -> None:
        for event, tx in batch:
            await by_upsert(tx, event.account)

    await habits.together(1, 2, 3, 4)
    await habits.together(5, 6, 7, 8)
    assert (await wallet_of(db))["cents"] == 8 + 8 * 5


async def test_an_innocent_message_is_not_blamed_for_a_neighbours_row(
    habits: Habits, db: asyncpg.Connection
) -> None:
    await db.execute("INSERT INTO note (text) VALUES ('there')")

    async def add(tx: Transaction, key: str) -> None:
        tx.add(Note(text="there"))

    async def load(tx: Transaction, key: str) -> None:
        try:
            await tx.load(Wallet, "another")
        except Exception as error:
            raise Reject("wrapped") from error

    async def query(tx: Transaction, key: str) -> None:
        try:
            await tx.session.scalar(sa.select(sa.func.count()).select_from(Note))
        except DBAPIError as error:
            raise Reject("wrapped") from error

    habits.habits = {2: add, 3: load, 4: query}
    deposits = [Deposit(n, account=str(n)) for n in (1, 2, 3, 4)]
    await habits.applier.apply(*deposits)
    assert await habits.applier.park() == {("wallet", 1): "failed in a batch"}
    await habits.applier.work_off()
    assert await habits.applier.park() == {("wallet", 1): "failed"}


async def test_a_row_that_was_added_is_found_by_later_messages(
    habits: Habits, db: asyncpg.Connection
) -> None:
    async def add(tx: Transaction, key: str) -> None:
        wallet = Wallet(id="other", cents=7, version=0)
        tx.add(wallet)
        tx.publish(Changed(cents=7), of=wallet)

    async def load(tx: Transaction, key: str) -> None:
        await change(tx, "other")

    habits.habits = {1: add, 2: load}
    await habits.together(1, 2)
    assert await errors_of(habits.applier) == {}
    assert await events_of(db, "other") == [(1, '{"cents":7}'), (2, '{"cents":8}')]


# Contexts, events, exceptions

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


async def test_each_call_has_a_context_of_its_own(habits: Habits) -> None:
    seen: list[tuple[str, int]] = []

    async def look(tx: Transaction, key: str) -> None:
        seen.append((VARIABLE.get(), decimal.getcontext().prec))
        VARIABLE.set("mine")
        decimal.getcontext().prec = 3
        await asyncio.sleep(0)
        assert VARIABLE.get() == "mine"
        await change(tx, key)

    habits.habits = dict.fromkeys((1, 2), look)
    await habits.together(1, 2)
    assert len(set(seen)) == 1
    assert (VARIABLE.get(), decimal.getcontext().prec) == seen[0]


class Bought(Event, type="deposited"):
    """Articles were bought."""

    account: str
    amount: int
    articles: list[str] = ["a", "b"]  # noqa: RUF012


async def test_each_consumer_and_each_attempt_has_an_event_of_its_own(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    handlers = Handlers()
    seen: list[tuple[str, int, int]] = []

    def on(consumer: str) -> None:
        @handlers.on(Bought, topic=TOPIC, consumer=consumer)
        async def take(event: Bought, tx: Transaction) -> None:
            seen.append((consumer, event.amount, len(event.articles)))
            while event.articles:
                event.articles.pop()
            if event.amount == 2 and consumer == "second":
                await tx.load(Wallet, "any")  # not undone in memory, so that all are called again
                raise Reject("no")

    on("first")
    on("second")
    applier = await new_applier(handlers, topic=TOPIC)
    value = b'{"account": "ada", "amount": %d, "articles": ["a", "b"]}'
    await applier.apply(*(Deposit(n, account=str(n), value=value % n) for n in (1, 2, 3)))
    assert {number for _, _, number in seen} == {2}
    assert len(seen) > 6


async def test_a_handler_can_not_swallow_the_end_of_its_time(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    handlers = Handlers()

    @handlers.on(Deposited, topic=TOPIC, consumer="deaf", timeout=0.05)
    async def deaf(event: Deposited, tx: Transaction) -> None:
        if event.amount == 2:
            try:
                await asyncio.Event().wait()
            except BaseException:
                return

    applier = await new_applier(handlers, topic=TOPIC)
    await applier.apply(*(Deposit(n, account=str(n)) for n in (1, 2, 3)))
    assert "takes longer" in (await errors_of(applier))[1]


async def test_rows_may_be_loaded_at_once(habits: Habits, db: asyncpg.Connection) -> None:
    async def load(tx: Transaction, key: str) -> None:
        await asyncio.gather(*(tx.load(Wallet, str(n)) for n in range(5)))
        await change(tx, key)

    habits.habits = {1: load, 2: load}
    await habits.together(1, 2)
    assert await errors_of(habits.applier) == {}
    assert habits.applier.outages == []


async def test_what_is_done_by_a_transaction_that_has_ended_is_refused(
    habits: Habits, db: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    late: list[Transaction] = []

    async def keep(tx: Transaction, key: str) -> None:
        late.append(tx)

    async def use(tx: Transaction, key: str) -> None:
        with pytest.raises(RuntimeError, match="has ended"):
            late[-1].publish(Changed(cents=0), key="x")
        await change(tx, key)

    habits.habits = {1: keep, 2: use}
    await habits.applier.apply(Deposit(1, account="eve"), Deposit(2, account="ada"))
    assert "has ended" in caplog.text
    assert (await wallet_of(db))["cents"] == 1
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox WHERE key = 'x'") == 0
