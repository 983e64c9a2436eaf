"""Rows that handlers change: locked for the whole batch at once, created by one, told in order."""

import asyncio
import decimal
import gc
import random
import weakref
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa
from sqlalchemy import Text
from sqlalchemy.dialects.postgresql import CITEXT
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from onceward import Aggregate, Event, Handlers, Transaction
from onceward.handlers.aggregate import Loads, canonical, record_key
from onceward.handlers.rows import Rows

from .applier import Applier, NewApplier
from .bank import Bank
from tests.contract.bank import Account, Base, Deposit, Deposited, histories
from tests.servers.waiting import PATIENCE, eventually


class Balance(Aggregate, Base):
    """What an account holds in one currency."""

    __tablename__ = "balance"

    account: Mapped[str] = mapped_column(Text, primary_key=True)
    currency: Mapped[str] = mapped_column(Text, primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)


class Priced(Aggregate, Base):
    """A row whose key the database rounds."""

    __tablename__ = "aggregates_priced"

    price: Mapped[Decimal] = mapped_column(sa.Numeric(38, 2), primary_key=True)
    messages: Mapped[int] = mapped_column(default=0)


class Vehicle(Aggregate, Base):
    """A row of which some have a part in another table, or more columns."""

    __tablename__ = "aggregates_vehicle"
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "any"}  # noqa: RUF012

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    kind: Mapped[str] = mapped_column(Text)


class Van(Vehicle):
    """One with a part in another table."""

    __tablename__ = "aggregates_van"
    __mapper_args__ = {"polymorphic_identity": "van"}  # noqa: RUF012

    id: Mapped[str] = mapped_column(sa.ForeignKey("aggregates_vehicle.id"), primary_key=True)
    load: Mapped[int] = mapped_column(default=0)


class Bus(Vehicle):
    """One with more columns."""

    __mapper_args__ = {"polymorphic_identity": "bus"}  # noqa: RUF012

    seats: Mapped[int | None] = mapped_column()


class Ship(Aggregate, Base):
    """A row that is loaded with the parts in other tables."""

    __tablename__ = "aggregates_ship"
    __mapper_args__ = {  # noqa: RUF012
        "polymorphic_on": "kind",
        "polymorphic_identity": "any",
        "with_polymorphic": "*",
    }

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    kind: Mapped[str] = mapped_column(Text)


class Ferry(Ship):
    """One with a part in another table."""

    __tablename__ = "aggregates_ferry"
    __mapper_args__ = {"polymorphic_identity": "ferry"}  # noqa: RUF012

    id: Mapped[str] = mapped_column(sa.ForeignKey("aggregates_ship.id"), primary_key=True)
    cars: Mapped[int] = mapped_column(default=0)


class Exchanged(Event, type="deposited"):
    """Money came in, of some currency."""

    account: str
    amount: int
    currency: str = "EUR"


class Moved(Event, type="moved"):
    """Money went from one account to another."""

    account: str
    other: str


class BalanceTold(Event, type="balance.told", topic="balances"):
    """What an account holds now."""

    amount: int


@pytest.fixture
def statements() -> Iterator[list[str]]:
    """Collect the statements that SQLAlchemy sends."""
    sent: list[str] = []

    def collect(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        sent.append(statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", collect)
    yield sent
    sa.event.remove(sa.Engine, "before_cursor_execute", collect)


async def test_a_batch_locks_the_rows_of_a_table_in_one_query(
    ledger: tuple[Bank, Applier], statements: list[str], db: asyncpg.Connection
) -> None:
    bank, applier = ledger

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="again", loads=Account.by("account"))
    async def again(event: Deposited, tx: Transaction) -> None:
        account = await tx.load(Account, event.account)
        assert account is not None
        account.balance += 0

    accounts = [f"account {number}" for number in range(50)]
    await applier.apply(*(Deposit(n, account=name) for n, name in enumerate(accounts)))
    statements.clear()
    await applier.apply(*(Deposit(100 + n, account=name) for n, name in enumerate(accounts)))
    assert len([one for one in statements if "FOR NO KEY UPDATE" in one]) == 1
    # Beside it, one batched update, and the catalog.
    assert len(statements) == 3
    assert await histories(db) == {name: [n, 100 + n] for n, name in enumerate(accounts)}


async def test_rows_that_refer_to_a_locked_row_are_inserted_meanwhile(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    _, applier = ledger
    await applier.apply(Deposit(1, account="a"))
    await db.execute("CREATE TABLE entry (number int, account text REFERENCES account)")
    handlers = applier.handlers = Handlers()

    @handlers.on(Deposited, topic="deposits", consumer="locks", loads=Account.by("account"))
    async def locks(event: Deposited, tx: Transaction) -> None:
        await tx.load(Account, event.account)
        await db.execute("SET lock_timeout = '100ms'")
        await db.execute("INSERT INTO entry VALUES (1, 'a')")
        with pytest.raises(asyncpg.LockNotAvailableError):
            await db.execute("UPDATE account SET balance = 0 WHERE id = 'a'")

    await applier.apply(Deposit(2, account="a"))
    assert await db.fetchval("SELECT count(*) FROM entry") == 1


async def test_rows_of_two_tables_take_one_query_each_in_name_order(
    ledger: tuple[Bank, Applier], statements: list[str], db: asyncpg.Connection
) -> None:
    _, applier = ledger
    handlers = applier.handlers = Handlers()

    @handlers.on(Exchanged, topic="deposits", consumer="b", loads=Balance.by("account", "currency"))
    async def count(event: Exchanged, tx: Transaction) -> None:
        row = await tx.load_or_create(Balance, event.account, event.currency)
        row.amount = (row.amount or 0) + event.amount

    @handlers.on(Exchanged, topic="deposits", consumer="a", loads=Account.by("account"))
    async def note(event: Exchanged, tx: Transaction) -> None:
        await tx.load_or_create(Account, event.account)

    await applier.apply(*(Deposit(n, account=str(n)) for n in range(5)))
    locks = [one for one in statements if "FOR NO KEY UPDATE" in one]
    assert ["FROM account" in locks[0], "FROM balance" in locks[1], len(locks)] == [True, True, 2]


async def test_a_key_of_two_columns_finds_its_row_and_no_other(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    _, applier = ledger
    handlers = applier.handlers = Handlers()

    @handlers.on(Exchanged, topic="deposits", consumer="b", loads=Balance.by("account", "currency"))
    async def count(event: Exchanged, tx: Transaction) -> None:
        row = await tx.load_or_create(Balance, event.account, event.currency)
        row.amount = (row.amount or 0) + event.amount
        tx.publish(BalanceTold(amount=row.amount), of=row)

    def exchanged(amount: int, account: str, currency: str) -> Deposit:
        text = f'{{"account": "{account}", "amount": {amount}, "currency": "{currency}"}}'
        return Deposit(amount, value=text.encode())

    await applier.apply(exchanged(1, "a", "EUR"), exchanged(2, "b", "USD"))
    await applier.apply(
        exchanged(10, "a", "USD"), exchanged(20, "b", "USD"), exchanged(30, "a", "EUR")
    )
    rows = await db.fetch("SELECT account, currency, amount FROM balance ORDER BY 1, 2")
    assert [tuple(row) for row in rows] == [("a", "EUR", 31), ("a", "USD", 10), ("b", "USD", 22)]
    events = await db.fetch("SELECT subject, sequence FROM pipeline.outbox ORDER BY id")
    euro, dollars, bob = '["a","EUR"]', '["a","USD"]', '["b","USD"]'
    told = [(euro, 1), (bob, 1), (dollars, 1), (bob, 2), (euro, 2)]
    assert [tuple(event) for event in events] == told


async def test_the_versions_of_a_row_are_contiguous_within_and_across_batches(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    """Trap 32."""
    _, applier = ledger
    names = ("ada", "bob")
    amounts = iter(range(1_000))
    for size in (1, 7, 20, 2):
        await applier.apply(
            *(Deposit(n, account=names[n % 2]) for n in (next(amounts) for _ in range(size)))
        )
    for number, name in enumerate(names):
        events = await db.fetch(
            "SELECT sequence, convert_from(payload, 'UTF8')::jsonb -> 'amount' AS amount"
            " FROM pipeline.outbox WHERE subject = $1 ORDER BY id",
            name,
        )
        assert [event["sequence"] for event in events] == list(range(1, 16))
        assert [int(event["amount"]) for event in events] == list(range(number, 30, 2))
        assert await db.fetchval("SELECT version FROM account WHERE id = $1", name) == 15


async def test_two_partitions_that_change_one_row_lose_no_update_and_no_version(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    """Trap 3: the row's lock is taken before the events are written."""
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    appliers = [
        await new_applier(bank.handlers, topic=bank.deposits, partition=number)
        for number in (0, 1, 2)
    ]
    await appliers[0].apply(Deposit(1_000))

    async def deposit(applier: Applier) -> None:
        for first in range(100 * applier.slot.partition, 100 * applier.slot.partition + 100, 10):
            await applier.apply(*(Deposit(n) for n in range(first, first + 10)))

    await asyncio.gather(*(deposit(applier) for applier in appliers))
    assert await db.fetchval("SELECT balance FROM account") == 1_000 + sum(range(300))
    events = await db.fetch("SELECT sequence, payload FROM pipeline.outbox ORDER BY id")
    assert [event["sequence"] for event in events] == list(range(1, 302))
    for number in range(3):
        history = (await histories(db))["ada"][1:]
        mine = [n for n in history if n // 100 == number]
        assert mine == sorted(mine)


_ACCOUNTS = """
INSERT INTO account (id, balance, history, version)
SELECT 'a' || n, 0, '', 0 FROM generate_series(0, 9) n
"""


@pytest.mark.parametrize(
    ("loads", "most"),
    [
        pytest.param((), 16, id="in the handler"),
        pytest.param([Account.by("account"), Account.by("other")], 0, id="declared"),
    ],
)
async def test_partitions_that_change_two_rows_per_message_do_not_constantly_deadlock(
    new_applier: NewApplier, db: asyncpg.Connection, loads: Sequence[Loads[Any]], most: int
) -> None:
    """Each handler locks its rows in the order of their keys; a batch locks those of many."""
    handlers = Handlers()

    @handlers.on(Moved, topic="moves", consumer="move", loads=loads)
    async def move(event: Moved, tx: Transaction) -> None:
        rows = [await tx.load(Account, id) for id in sorted({event.account, event.other})]
        for row in rows:
            assert row is not None
            row.balance += 1
        await asyncio.sleep(0.001)

    appliers = [await new_applier(handlers, topic="moves", partition=number) for number in range(4)]
    await db.execute(_ACCOUNTS)
    chosen = random.Random(1)

    def moves(applier: Applier, batch: int) -> list[Deposit]:
        accounts = [chosen.sample(range(10), 2) for _ in range(100)]
        return [
            Deposit(
                n,
                type="moved",
                id=f"{applier.slot.partition}-{batch}-{n}",
                value=b'{"account":"a%d","other":"a%d"}' % (one, other),
            )
            for n, (one, other) in enumerate(accounts)
        ]

    batches = [[moves(applier, batch) for batch in range(5)] for applier in appliers]

    async def work(applier: Applier, batches: list[list[Deposit]]) -> None:
        for batch in batches:
            await applier.apply(*batch)

    await asyncio.gather(*map(work, appliers, batches))
    assert await db.fetchval("SELECT sum(balance) FROM account") == 2 * 4 * 5 * 100
    assert not any([await applier.backlog() for applier in appliers])
    assert sum(len(applier.outages) for applier in appliers) <= most


@pytest.mark.parametrize("size", [1, 3])
async def test_two_partitions_creating_the_same_row_neither_fail_nor_lose_changes(
    new_applier: NewApplier, db: asyncpg.Connection, size: int
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    first, second = [
        await new_applier(bank.handlers, topic=bank.deposits, partition=number) for number in (0, 1)
    ]
    inside, go_on = asyncio.Event(), asyncio.Event()

    @bank.handlers.on(Deposited, topic=bank.deposits, consumer="waiting", timeout=PATIENCE)
    async def waiting(event: Deposited, tx: Transaction) -> None:
        if tx.message.partition == 0 and not go_on.is_set():
            await tx.session.flush()
            inside.set()
            await go_on.wait()

    async def waits() -> bool:
        return bool(
            await db.fetchval(
                "SELECT EXISTS (SELECT FROM pg_stat_activity"
                " WHERE datname = current_database() AND wait_event_type = 'Lock')"
            )
        )

    one = asyncio.create_task(first.apply(*(Deposit(n) for n in range(size))))
    await inside.wait()
    other = asyncio.create_task(second.apply(*(Deposit(10 + n) for n in range(size))))
    await eventually(waits)
    go_on.set()
    await asyncio.gather(one, other)
    expected = [*range(size), *range(10, 10 + size)]
    assert await histories(db) == {"ada": expected}
    assert await db.fetchval("SELECT version FROM account") == len(expected)
    assert await first.park() == {}


async def test_a_row_that_was_not_declared_is_locked_when_it_is_loaded(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    handlers = Handlers()
    first, second = [
        await new_applier(handlers, topic=bank.deposits, partition=number) for number in (0, 1)
    ]
    await db.execute("INSERT INTO account (id, balance, history, version) VALUES ('ada', 0, '', 0)")

    @handlers.on(Deposited, topic=bank.deposits, consumer="undeclared")
    async def undeclared(event: Deposited, tx: Transaction) -> None:
        account = await tx.load(Account, event.account)
        assert account is not None
        assert await tx.load(Account, event.account) is account
        assert await tx.load(Account, "nobody") is None
        account.balance += event.amount

    await asyncio.gather(
        *(
            applier.apply(*(Deposit(n, id=f"{applier.slot.partition}-{n}") for n in range(50)))
            for applier in (first, second)
        )
    )
    assert await db.fetchval("SELECT balance FROM account") == 2 * sum(range(50))


async def test_an_event_of_a_row_without_a_key_is_refused(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    """The database gives it one at the flush: before, all such rows would share the key "None"."""
    _, applier = ledger
    handlers = applier.handlers = Handlers()
    refused: list[str] = []

    @handlers.on(Deposited, topic="deposits", consumer="keyless")
    async def keyless(event: Deposited, tx: Transaction) -> None:
        row = Account("")
        row.id = None  # type: ignore[assignment]
        try:
            tx.publish(BalanceTold(amount=1), of=row)
        except (TypeError, ValueError) as error:
            refused.append(str(error))

    await applier.apply(Deposit(1))
    assert len(refused) == 1
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox") == 0


async def test_of_and_key_are_not_taken_together(ledger: tuple[Bank, Applier]) -> None:
    _, applier = ledger
    handlers = applier.handlers = Handlers()

    @handlers.on(Deposited, topic="deposits", consumer="both")
    async def both(event: Deposited, tx: Transaction) -> None:
        account = await tx.load_or_create(Account, event.account)
        with pytest.raises(TypeError, match="not both"):
            tx.publish(BalanceTold(amount=1), of=account, key="ada")
        assert account.version == 0

    await applier.apply(Deposit(1))


async def test_a_key_whose_type_differs_from_its_column_is_refused(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    _, applier = ledger
    await db.execute("INSERT INTO account VALUES ('7', 0, '', 0)")
    handlers = applier.handlers = Handlers()

    @handlers.on(Deposited, topic="deposits", consumer="deposit")
    async def deposit(event: Deposited, tx: Transaction) -> None:
        await tx.load(Account, _Text("7"))

    await applier.apply(Deposit(1))
    (row,) = await applier.backlog()
    assert "use the type that the column holds" in row["error"]


class _Text(str):
    """Binds as the text that it is, and equals nothing that comes back."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


async def test_events_of_unlocked_rows_are_refused_except_for_new_rows(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    _, applier = ledger
    await db.execute("INSERT INTO account VALUES ('old', 0, '', 0)")
    handlers = applier.handlers = Handlers()

    @handlers.on(Deposited, topic="deposits", consumer="deposit")
    async def deposit(event: Deposited, tx: Transaction) -> None:
        if event.account == "old":
            row = await tx.session.get_one(Account, "old")
        else:
            row = Account(event.account)
            tx.session.add(row)
            await tx.session.flush()
        tx.publish(BalanceTold(amount=1), of=row)

    await applier.apply(Deposit(1, account="new"))
    assert await db.fetchval("SELECT version FROM account WHERE id = 'new'") == 1
    await applier.apply(Deposit(2, account="old"))
    (row,) = await applier.backlog()
    assert "needs a row that is locked" in row["error"]
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox") == 1


async def test_what_is_published_after_the_handler_has_ended_is_refused(
    ledger: tuple[Bank, Applier],
) -> None:
    _, applier = ledger
    handlers = applier.handlers = Handlers()
    kept: list[Transaction] = []

    @handlers.on(Deposited, topic="deposits", consumer="deposit")
    async def deposit(event: Deposited, tx: Transaction) -> None:
        kept.append(tx)

    await applier.apply(Deposit(1))
    with pytest.raises(RuntimeError, match="the handler has ended"):
        kept[0].publish(BalanceTold(amount=1))


@pytest.mark.parametrize("way", ["delete", "delete_all", "flushed"])
async def test_a_deleted_row_is_absent_for_later_messages_of_the_batch(
    new_applier: NewApplier, db: asyncpg.Connection, way: str
) -> None:
    handlers, found = Handlers(), list[bool]()

    @handlers.on(Deposited, topic="deposits", consumer="close", loads=Account.by("account"))
    async def close(event: Deposited, tx: Transaction) -> None:
        account = await tx.load(Account, event.account)
        found.append(account is not None)
        if event.amount == 1:
            if way == "delete_all":
                await tx.session.delete_all([account])
            else:
                await tx.session.delete(account)
            if way == "flushed":
                await tx.session.flush()

    applier = await new_applier(handlers, topic="deposits")
    await db.execute("INSERT INTO account (id, balance, history, version) VALUES ('ada', 0, '', 0)")
    await applier.apply(Deposit(1), Deposit(2))
    assert found[-2:] == [True, False]
    assert await db.fetchval("SELECT count(*) FROM account") == 0


@pytest.mark.parametrize("refused", [set[int](), {2}], ids=["applied", "failed"])
async def test_nothing_of_a_batch_waits_for_the_collector(
    ledger: tuple[Bank, Applier], monkeypatch: pytest.MonkeyPatch, refused: set[int]
) -> None:
    """It runs seldom, and a batch may be large."""
    bank, applier = ledger
    alive = weakref.WeakSet[Rows]()
    bank.refused = refused

    class Watched(Rows):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            alive.add(self)

    monkeypatch.setattr("onceward.apply.attempt.Rows", Watched)
    await applier.apply(Deposit(9))
    gc.collect()
    gc.disable()
    try:
        await applier.apply(Deposit(1), Deposit(2))
        assert not alive
    finally:
        gc.enable()


class Region(str, Enum):  # noqa: UP042  # its str() is no value
    """Where a rate holds."""

    EU = "eu"
    US = "us"


class Rate(Aggregate, Base):
    """A row whose key has several texts in Python."""

    __tablename__ = "rate"

    region: Mapped[Region] = mapped_column(sa.Enum(Region), primary_key=True)
    name: Mapped[str] = mapped_column(Text, primary_key=True)
    since: Mapped[datetime] = mapped_column(sa.DateTime(timezone=True), primary_key=True)
    percent: Mapped[Decimal] = mapped_column(sa.Numeric(6, 2), primary_key=True)
    seen: Mapped[int] = mapped_column(default=0)


async def test_one_row_has_one_key_however_its_values_are_written(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    _, applier = ledger
    handlers = applier.handlers = Handlers()
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    keys: list[tuple[Any, ...]] = [
        (Region.EU, Region.EU, noon, Decimal("1.5")),
        ("EU", "eu", noon.astimezone(timezone(timedelta(hours=2))), Decimal("1.50")),
    ]

    @handlers.on(Deposited, topic="deposits", consumer="rate")
    async def rate(event: Deposited, tx: Transaction) -> None:
        row = await tx.load_or_create(Rate, *keys[event.amount % 2])
        row.seen += 1
        tx.publish(BalanceTold(amount=row.seen), of=row)

    await applier.apply(*(Deposit(n) for n in range(4)))
    for n in range(4, 8):
        await applier.apply(Deposit(n))
    assert await applier.park() == {}
    events = await db.fetch("SELECT subject, sequence FROM pipeline.outbox ORDER BY id")
    assert len({event["subject"] for event in events}) == 1
    assert [event["sequence"] for event in events] == list(range(1, 9))
    assert await db.fetchval("SELECT count(*) FROM rate") == 1


@pytest.mark.parametrize(
    "kind",
    [sa.CHAR(5), CITEXT(), sa.Float(), sa.Text(collation="de-x-icu"), sa.Numeric(), sa.JSON()],
    ids=str,
)
def test_a_key_that_the_database_compares_otherwise_is_refused_at_registration(
    kind: sa.types.TypeEngine[Any],
) -> None:
    class Other(DeclarativeBase):
        """Tables that are never made."""

    class Odd(Aggregate, Other):
        __tablename__ = "odd"
        account: Mapped[Any] = mapped_column(kind, primary_key=True)

    with pytest.raises(TypeError, match=r"Odd\.account"):
        Handlers().on(Deposited, topic="deposits", consumer="odd", loads=Odd.by("account"))


@pytest.mark.parametrize(
    "text",
    [
        "0.025",
        "-0.025",
        "0.015",
        "-0.001",
        "-0.00",
        "2",
        "1e3",
        "12345678901234567890123456789.005",
    ],
)
async def test_keys_are_rounded_as_the_database_does(db: asyncpg.Connection, text: str) -> None:
    expected = await db.fetchval("SELECT $1::text::numeric(38, 2)::text", text)
    with decimal.localcontext(prec=3, rounding=decimal.ROUND_FLOOR):
        assert record_key(canonical(Priced, (Decimal(text),))) == expected
    assert record_key(canonical(Priced, (2.675,))) == "2.68", "as its text is"


async def test_keys_that_the_database_rounds_to_one_are_one_row(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    handlers, prices = Handlers(), ("0.025", "0.03", "-0.001", "0")

    @handlers.on(Deposited, topic="deposits", consumer="priced")
    async def priced(event: Deposited, tx: Transaction) -> None:
        row = await tx.load_or_create(Priced, Decimal(prices[event.amount]))
        row.messages += 1
        tx.publish(BalanceTold(amount=row.messages), of=row)

    applier = await new_applier(handlers, topic="deposits")
    await applier.apply(*(Deposit(n, account=str(n)) for n in range(4)))
    assert await applier.backlog() == []
    rows = await db.fetch("SELECT price::text, messages FROM aggregates_priced ORDER BY price")
    assert [tuple(row) for row in rows] == [("0.00", 2), ("0.03", 2)]
    keys = await db.fetch("SELECT convert_from(key, 'UTF8') FROM pipeline.outbox ORDER BY id")
    assert [row[0] for row in keys] == ["0.03", "0.03", "0.00", "0.00"]


@pytest.mark.parametrize("uses_session", [False, True], ids=["", "in a session of its own"])
@pytest.mark.parametrize(
    ("entity", "row", "name"),
    [(Vehicle, Van, "load"), (Vehicle, Bus, "seats"), (Van, Van, "load"), (Ship, Ferry, "cars")],
)
async def test_a_row_in_several_tables_is_loaded_whole_and_locked(
    new_applier: NewApplier,
    db: asyncpg.Connection,
    entity: type[Any],
    row: type[Any],
    name: str,
    *,
    uses_session: bool,
) -> None:
    handlers = Handlers()

    @handlers.on(Deposited, topic="deposits", consumer="count")
    async def count(event: Deposited, tx: Transaction) -> None:
        if uses_session:
            await tx.session.execute(sa.text("SELECT 1"))
        found = await tx.load(entity, "it")
        if found is None:
            tx.add(row(id="it", version=0, **{name: 1}))
        else:
            setattr(found, name, getattr(found, name) + 1)
            tx.publish(BalanceTold(amount=1), of=found)
            await db.execute("SET lock_timeout = '50ms'")
            with pytest.raises(asyncpg.LockNotAvailableError):
                table = row.__mapper__.base_mapper.local_table.name
                await db.execute(f"SELECT FROM {table} FOR NO KEY UPDATE")

    applier = await new_applier(handlers, topic="deposits")
    await applier.apply(Deposit(0))
    for n in (1, 3):
        await applier.apply(Deposit(n), Deposit(n + 1), start=n)
    assert await applier.backlog() == []
    table = row.__table__.name
    assert await db.fetchval(f"SELECT {name} FROM {table}") == 5
