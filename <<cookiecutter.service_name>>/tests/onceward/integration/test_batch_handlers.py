"""Handlers that take many events at once, and write by sets in SQL of their own."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa
from opentelemetry import context as otel

from onceward import Event, EventBatch, Handlers, Park, Policy, Reject, Transaction
from onceward.handlers.staging import event_id

from .desk import Desk, NewDesk
from tests.contract.bank import Deposit, Deposited, histories

TOPIC = "deposits"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"

READ = sa.text("""
SELECT id, balance, history, version FROM account
 WHERE id = ANY (CAST(:ids AS text[])) ORDER BY id FOR UPDATE
""")
WRITE = sa.text("""
INSERT INTO account (id, balance, history, version)
SELECT * FROM unnest(CAST(:ids AS text[]), CAST(:balances AS integer[]),
                     CAST(:histories AS text[]), CAST(:versions AS bigint[]))
    ON CONFLICT (id) DO UPDATE SET balance = excluded.balance, history = excluded.history,
       version = excluded.version
""")


class Balance(Event, type="balance", topic="balances"):
    """What an account holds after a deposit."""

    account: str
    amount: int


class Noted(Event, type="noted"):
    """An event for a handler that takes one at a time."""

    account: str
    amount: int


@dataclass
class Books:
    """Handlers of a bank that books by sets."""

    errors: dict[int, Exception] = field(default_factory=dict)
    """What the handler raises when such an amount is among those it is handed."""
    waits: dict[int, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    calls: list[list[int]] = field(default_factory=list)
    """Amounts that the handlers were called with, together."""
    options: dict[str, object] = field(default_factory=dict)
    handlers: Handlers = field(default_factory=Handlers)

    def __post_init__(self) -> None:
        on_batch = self.handlers.on_batch(
            Deposited,
            topic=TOPIC,
            consumer="book",
            **self.options,  # type: ignore[arg-type]
        )
        on_batch(self.book)

    async def book(self, batch: EventBatch[Deposited]) -> None:
        self.calls.append([event.amount for event, _ in batch])
        ids = sorted({event.account for event, _ in batch})
        accounts: dict[str, list[Any]] = {id: [id, 0, "", 0] for id in ids}
        found = await batch.session.execute(READ, {"ids": ids})
        accounts |= {row.id: list(row) for row in found}
        for event, tx in batch:
            if event.amount in self.waits:
                await self.waits[event.amount]()
            if event.amount in self.errors:
                raise self.errors[event.amount]
            account = accounts[event.account]
            account[1] += event.amount
            account[2] += f"{event.amount},"
            account[3] += 1
            balance = Balance(account=event.account, amount=event.amount)
            tx.publish(balance, key=event.account, sequence=account[3])
        columns = map(list, zip(*accounts.values(), strict=True))
        names = ("ids", "balances", "histories", "versions")
        await batch.session.execute(WRITE, dict(zip(names, columns, strict=True)))


async def published(db: asyncpg.Connection) -> list[tuple[str, int, int]]:
    """Return (key, amount, sequence) of every event, in the order of staging."""
    rows = await db.fetch("SELECT key, payload, sequence FROM pipeline.outbox ORDER BY id")
    return [(r["key"].decode(), json.loads(r["payload"])["amount"], r["sequence"]) for r in rows]


@pytest.fixture
async def books(new_desk: NewDesk) -> tuple[Books, Desk]:
    """Return the books, and the desk of their one partition."""
    books = Books()
    return books, await new_desk(books.handlers, topic=TOPIC)


async def test_all_of_a_batch_are_handed_over_together_in_order(
    books: tuple[Books, Desk], db: asyncpg.Connection
) -> None:
    book, desk = books
    await desk.apply(Deposit(1), Deposit(2, account="bob"), Deposit(3), Deposit(1))
    await desk.apply(Deposit(4))
    assert book.calls == [[1, 2, 3], [4]], "a duplicate is not handed over"
    assert await histories(db) == {"ada": [1, 3, 4], "bob": [2]}
    assert await published(db) == [("ada", 1, 1), ("bob", 2, 1), ("ada", 3, 2), ("ada", 4, 3)]


async def test_an_event_that_it_publishes_has_the_id_and_the_trace_of_the_message_that_causes_it(
    books: tuple[Books, Desk], db: asyncpg.Connection
) -> None:
    _, desk = books
    headers = (("traceparent", TRACE.encode()), ("baggage", b"tenant=7"))
    first, second = [(await desk.read(one, start=0)).items[0] for one in (Deposit(1), Deposit(2))]
    await desk.apply(Deposit(1, headers=headers), Deposit(2))
    told = await db.fetch("SELECT event_id, traceparent, baggage FROM pipeline.outbox ORDER BY id")
    ids = [event_id(one.key, one.message.hash, 0) for one in (first, second)]
    assert [tuple(row) for row in told] == [(ids[0], TRACE, "tenant=7"), (ids[1], None, None)]
    assert otel.get_current() == otel.Context()


@pytest.mark.parametrize("at_fault", [[1], [4], [8], [2, 3], [1, 8], [1, 2, 3, 4, 5, 6, 7, 8]])
async def test_those_at_fault_are_found_among_their_neighbours(
    books: tuple[Books, Desk], db: asyncpg.Connection, at_fault: list[int]
) -> None:
    book, desk = books
    book.errors = {amount: ValueError(f"not {amount}") for amount in at_fault}
    amounts = range(1, 9)
    await desk.apply(*(Deposit(amount, account=f"of {amount}") for amount in amounts))
    innocent = [amount for amount in amounts if amount not in at_fault]
    assert await desk.park() == {("book", amount - 1): "failed" for amount in at_fault}
    assert {row["attempts"] for row in await desk.backlog()} == {1}
    assert await histories(db) == {f"of {amount}": [amount] for amount in innocent}
    assert await published(db) == [(f"of {amount}", amount, 1) for amount in innocent]
    assert await desk.position() == 8


async def test_what_stands_behind_one_at_fault_waits_for_it_and_follows_in_order(
    books: tuple[Books, Desk], db: asyncpg.Connection
) -> None:
    book, desk = books
    book.errors = {2: ValueError("not yet")}
    await desk.apply(Deposit(1), Deposit(2), Deposit(3), Deposit(9, account="bob"))
    assert await desk.park() == {("book", 1): "failed", ("book", 2): "follows another"}
    book.errors.clear()
    await desk.make_due()
    await desk.work_off()
    assert await histories(db) == {"ada": [1, 2, 3], "bob": [9]}
    assert book.calls[-2:] == [[2], [3]], "a message that has failed is a run by itself"


async def test_decisions_hold_for_the_one_message_that_they_are_about(new_desk: NewDesk) -> None:
    books = Books(options={"policy": Policy(attempts=2)})
    desk = await new_desk(books.handlers, topic=TOPIC)
    books.errors = {2: Reject("never"), 3: Park("later", after=60)}
    await desk.apply(*(Deposit(amount, account=f"of {amount}") for amount in range(1, 5)))
    assert await desk.park() == {("book", 1): "rejected", ("book", 2): "parked by its handler"}


async def test_a_call_that_takes_too_long_is_ended_and_the_slow_one_found(
    new_desk: NewDesk, db: asyncpg.Connection
) -> None:
    books = Books(options={"timeout": 0.3})
    desk = await new_desk(books.handlers, topic=TOPIC)
    books.waits = {3: asyncio.Event().wait}  # type: ignore[dict-item]
    await desk.apply(*(Deposit(amount, account=f"of {amount}") for amount in range(1, 5)))
    assert await desk.park() == {("book", 2): "undecided"}
    await desk.work_off()
    (row,) = await desk.backlog()
    assert (row["reason"], row["attempts"]) == ("failed", 1)
    assert "TimeoutError" in row["error"]
    assert sorted(await histories(db)) == ["of 1", "of 2", "of 4"]


async def test_an_error_of_the_network_in_it_is_its_own_and_no_outage(
    books: tuple[Books, Desk],
) -> None:
    book, desk = books
    book.errors = {2: ConnectionRefusedError("another service")}
    await desk.apply(*(Deposit(amount, account=f"of {amount}") for amount in range(1, 5)))
    assert await desk.park() == {("book", 1): "failed"}
    assert desk.outages == []


async def test_one_that_takes_single_events_of_the_same_consumer_has_its_turn_in_between(
    books: tuple[Books, Desk], db: asyncpg.Connection
) -> None:
    book, desk = books

    @book.handlers.on(Noted, topic=TOPIC, consumer="book")
    async def note(event: Noted, tx: Transaction) -> None:
        book.calls.append([-event.amount])

    await desk.apply(Deposit(1), Deposit(2), Deposit(3, type="noted"), Deposit(4))
    assert book.calls == [[1, 2], [-3], [4]]
    assert await histories(db) == {"ada": [1, 2, 4]}


async def test_a_batch_is_tried_without_those_behind_one_that_has_failed_before_it(
    books: tuple[Books, Desk], db: asyncpg.Connection
) -> None:
    book, desk = books

    @book.handlers.on(Noted, topic=TOPIC, consumer="book")
    async def note(event: Noted, tx: Transaction) -> None:
        raise ValueError("never")

    await desk.apply(Deposit(1, type="noted"), Deposit(2), Deposit(3, account="bob"))
    assert await desk.park() == {("book", 0): "failed", ("book", 1): "follows another"}
    assert await histories(db) == {"bob": [3]}


async def test_two_consumers_of_a_type_have_their_batches_each(new_desk: NewDesk) -> None:
    books, calls = Books(), list[list[int]]()

    @books.handlers.on_batch(Deposited, topic=TOPIC, consumer="count")
    async def count(batch: EventBatch[Deposited]) -> None:
        calls.append([event.amount for event, _ in batch])
        if 3 in calls[-1]:
            raise ValueError("three")

    @books.handlers.on(Deposited, topic=TOPIC, consumer="note")
    async def note(event: Deposited, tx: Transaction) -> None: ...

    desk = await new_desk(books.handlers, topic=TOPIC)
    await desk.apply(*(Deposit(amount, account=f"of {amount}") for amount in range(1, 5)))
    assert (books.calls[0], calls[0]) == ([1, 2, 3, 4], [1, 2, 3, 4])
    assert await desk.park() == {("count", 2): "failed"}


@pytest.mark.parametrize("sequence", [-1, 2**63, "7", 1.5, True])
async def test_a_sequence_that_is_none_is_refused_where_it_is_staged(
    books: tuple[Books, Desk], sequence: int
) -> None:
    book, desk = books

    @book.handlers.on(Noted, topic=TOPIC, consumer="note")
    async def note(event: Noted, tx: Transaction) -> None:
        tx.publish(Balance(account="ada", amount=1), key="ada", sequence=sequence)

    await desk.apply(Deposit(1, type="noted"), Deposit(2))
    assert await desk.park() == {("note", 0): "failed"}
    (row,) = await desk.backlog()
    assert "Unpublishable" in row["error"]


def test_a_registration_that_can_t_be_meant_is_refused() -> None:
    async def book(batch: EventBatch[Deposited]) -> None: ...

    handlers = Handlers()
    handlers.on_batch(Deposited, topic=TOPIC, consumer="book")(book)
    with pytest.raises(TypeError, match="already takes"):
        handlers.on_batch(Deposited, topic=TOPIC, consumer="book")(book)
    with pytest.raises(ValueError, match="timeout"):
        handlers.on_batch(Deposited, topic=TOPIC, consumer="other", timeout=0)(book)
