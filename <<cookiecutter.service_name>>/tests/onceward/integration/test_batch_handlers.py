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

from .applier import Applier, NewApplier
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
async def books(new_applier: NewApplier) -> tuple[Books, Applier]:
    """Return the books, and the applier of their one partition."""
    books = Books()
    return books, await new_applier(books.handlers, topic=TOPIC)


async def test_all_of_a_batch_are_handed_over_together_in_order(
    books: tuple[Books, Applier], db: asyncpg.Connection
) -> None:
    book, applier = books
    await applier.apply(Deposit(1), Deposit(2, account="bob"), Deposit(3), Deposit(1))
    await applier.apply(Deposit(4))
    assert book.calls == [[1, 2, 3], [4]], "a duplicate is not handed over"
    assert await histories(db) == {"ada": [1, 3, 4], "bob": [2]}
    assert await published(db) == [("ada", 1, 1), ("bob", 2, 1), ("ada", 3, 2), ("ada", 4, 3)]


async def test_events_published_by_batch_handlers_have_their_messages_ids_and_traces(
    books: tuple[Books, Applier], db: asyncpg.Connection
) -> None:
    _, applier = books
    headers = (("traceparent", TRACE.encode()), ("baggage", b"tenant=7"))
    first, second = [
        (await applier.read(one, start=0)).items[0] for one in (Deposit(1), Deposit(2))
    ]
    await applier.apply(Deposit(1, headers=headers), Deposit(2))
    told = await db.fetch("SELECT event_id, traceparent, baggage FROM pipeline.outbox ORDER BY id")
    ids = [event_id(one.key, one.message.hash, 0) for one in (first, second)]
    assert [tuple(row) for row in told] == [(ids[0], TRACE, "tenant=7"), (ids[1], None, None)]
    assert otel.get_current() == otel.Context()


@pytest.mark.parametrize("at_fault", [[1], [4], [8], [2, 3], [1, 8], [1, 2, 3, 4, 5, 6, 7, 8]])
async def test_those_at_fault_are_found_among_their_neighbours(
    books: tuple[Books, Applier], db: asyncpg.Connection, at_fault: list[int]
) -> None:
    book, applier = books
    book.errors = {amount: ValueError(f"not {amount}") for amount in at_fault}
    amounts = range(1, 9)
    await applier.apply(*(Deposit(amount, account=f"of {amount}") for amount in amounts))
    innocent = [amount for amount in amounts if amount not in at_fault]
    assert await applier.park() == {("book", amount - 1): "failed" for amount in at_fault}
    assert {row["attempts"] for row in await applier.backlog()} == {1}
    assert await histories(db) == {f"of {amount}": [amount] for amount in innocent}
    assert await published(db) == [(f"of {amount}", amount, 1) for amount in innocent]
    assert await applier.position() == 8


async def test_messages_behind_a_failed_one_wait_and_follow_in_order(
    books: tuple[Books, Applier], db: asyncpg.Connection
) -> None:
    book, applier = books
    book.errors = {2: ValueError("not yet")}
    await applier.apply(Deposit(1), Deposit(2), Deposit(3), Deposit(9, account="bob"))
    assert await applier.park() == {("book", 1): "failed", ("book", 2): "follows another"}
    book.errors.clear()
    await applier.make_due()
    await applier.work_off()
    assert await histories(db) == {"ada": [1, 2, 3], "bob": [9]}
    assert book.calls[-2:] == [[2], [3]], "a message that has failed is a run by itself"


async def test_decisions_hold_for_the_one_message_that_they_are_about(
    new_applier: NewApplier,
) -> None:
    books = Books(options={"policy": Policy(attempts=2)})
    applier = await new_applier(books.handlers, topic=TOPIC)
    books.errors = {2: Reject("never"), 3: Park("later", after=60)}
    await applier.apply(*(Deposit(amount, account=f"of {amount}") for amount in range(1, 5)))
    assert await applier.park() == {("book", 1): "rejected", ("book", 2): "parked by its handler"}


async def test_a_timed_out_batch_call_is_cancelled_and_its_slow_message_found(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    books = Books(options={"timeout": 0.3})
    applier = await new_applier(books.handlers, topic=TOPIC)
    books.waits = {3: asyncio.Event().wait}  # type: ignore[dict-item]
    await applier.apply(*(Deposit(amount, account=f"of {amount}") for amount in range(1, 5)))
    assert await applier.park() == {("book", 2): "undecided"}
    await applier.work_off()
    (row,) = await applier.backlog()
    assert (row["reason"], row["attempts"]) == ("failed", 1)
    assert "TimeoutError" in row["error"]
    assert sorted(await histories(db)) == ["of 1", "of 2", "of 4"]


async def test_a_network_error_in_a_batch_handler_is_not_an_outage(
    books: tuple[Books, Applier],
) -> None:
    book, applier = books
    book.errors = {2: ConnectionRefusedError("another service")}
    await applier.apply(*(Deposit(amount, account=f"of {amount}") for amount in range(1, 5)))
    assert await applier.park() == {("book", 1): "failed"}
    assert applier.outages == []


async def test_a_single_event_handler_of_the_consumer_runs_between_batches(
    books: tuple[Books, Applier], db: asyncpg.Connection
) -> None:
    book, applier = books

    @book.handlers.on(Noted, topic=TOPIC, consumer="book")
    async def note(event: Noted, tx: Transaction) -> None:
        book.calls.append([-event.amount])

    await applier.apply(Deposit(1), Deposit(2), Deposit(3, type="noted"), Deposit(4))
    assert book.calls == [[1, 2], [-3], [4]]
    assert await histories(db) == {"ada": [1, 2, 4]}


async def test_a_batch_is_tried_without_messages_behind_an_earlier_failure(
    books: tuple[Books, Applier], db: asyncpg.Connection
) -> None:
    book, applier = books

    @book.handlers.on(Noted, topic=TOPIC, consumer="book")
    async def note(event: Noted, tx: Transaction) -> None:
        raise ValueError("never")

    await applier.apply(Deposit(1, type="noted"), Deposit(2), Deposit(3, account="bob"))
    assert await applier.park() == {("book", 0): "failed", ("book", 1): "follows another"}
    assert await histories(db) == {"bob": [3]}


async def test_two_consumers_of_a_type_have_their_batches_each(new_applier: NewApplier) -> None:
    books, calls = Books(), list[list[int]]()

    @books.handlers.on_batch(Deposited, topic=TOPIC, consumer="count")
    async def count(batch: EventBatch[Deposited]) -> None:
        calls.append([event.amount for event, _ in batch])
        if 3 in calls[-1]:
            raise ValueError("three")

    @books.handlers.on(Deposited, topic=TOPIC, consumer="note")
    async def note(event: Deposited, tx: Transaction) -> None: ...

    applier = await new_applier(books.handlers, topic=TOPIC)
    await applier.apply(*(Deposit(amount, account=f"of {amount}") for amount in range(1, 5)))
    assert (books.calls[0], calls[0]) == ([1, 2, 3, 4], [1, 2, 3, 4])
    assert await applier.park() == {("count", 2): "failed"}


@pytest.mark.parametrize("sequence", [-1, 2**63, "7", 1.5, True])
async def test_a_sequence_that_is_none_is_refused_where_it_is_staged(
    books: tuple[Books, Applier], sequence: int
) -> None:
    book, applier = books

    @book.handlers.on(Noted, topic=TOPIC, consumer="note")
    async def note(event: Noted, tx: Transaction) -> None:
        tx.publish(Balance(account="ada", amount=1), key="ada", sequence=sequence)

    await applier.apply(Deposit(1, type="noted"), Deposit(2))
    assert await applier.park() == {("note", 0): "failed"}
    (row,) = await applier.backlog()
    assert "Unpublishable" in row["error"]


def test_a_registration_that_can_t_be_meant_is_refused() -> None:
    async def book(batch: EventBatch[Deposited]) -> None: ...

    handlers = Handlers()
    handlers.on_batch(Deposited, topic=TOPIC, consumer="book")(book)
    with pytest.raises(TypeError, match="already takes"):
        handlers.on_batch(Deposited, topic=TOPIC, consumer="book")(book)
    with pytest.raises(ValueError, match="timeout"):
        handlers.on_batch(Deposited, topic=TOPIC, consumer="other", timeout=0)(book)
