"""Rows of lanes: what was decided since they were read holds, and one row delays no other."""

from collections.abc import Collection
from typing import Any

import asyncpg

from onceward import Handlers, Policy, Reject, Retry, Transaction
from onceward.errors import StoreUnavailable
from onceward.retry.lane_source import LaneSource, read_rows, take
from onceward.servers.database import autocommitting
from onceward.servers.retrying import Retrying

from .applier import Applier, NewApplier
from .test_inbox import Connect
from tests.contract.bank import Account, Deposit, Deposited, histories

TOPIC = "deposits"


class Calls:
    """A deferred handler that does what a test says, and what it was called with."""

    def __init__(self, **options: Any) -> None:
        self.handlers = Handlers()
        self.made: list[int] = []
        self.errors: dict[int, Exception] = {}
        policy = Policy(attempts=20)
        self._register = self.handlers.on(
            Deposited, topic=TOPIC, consumer="deposit", mode="deferred", policy=policy, **options
        )
        self._register(self.deposit)

    async def deposit(self, event: Deposited, tx: Transaction) -> None:
        """Deposit, or fail."""
        self.made.append(event.amount)
        account = await tx.load_or_create(Account, event.account)
        if error := self.errors.get(event.amount):
            raise error
        account.history += f"{event.amount},"


async def read_again(applier: Applier, sources: Collection[LaneSource]) -> None:
    """Apply sources once more, as a worker does that got no answer to its COMMIT."""
    attempts = Retrying("the test", "PostgreSQL", unless=lambda: False, report=print)
    for source in sources:
        await applier.consume.apply(source, attempts)


async def due(applier: Applier) -> list[LaneSource]:
    """Claim all lanes, and read their due rows."""
    lease = await applier.lanes._claim(32)
    assert lease is not None
    async with autocommitting(applier.engine) as driver:
        rows = await take(driver, lease, {"deposit"}, 100)
    return [await read_rows(lease, applier.handlers, rows)]


async def test_a_dead_letter_is_not_called_again_after_a_lost_answer(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    calls = Calls()
    calls.errors[1] = Reject("too low")
    applier = await new_applier(calls.handlers, topic=TOPIC)
    await applier.apply(*(Deposit(n) for n in (1, 2, 3)))
    sources = await due(applier)
    await read_again(applier, sources)
    assert [row["reason"] for row in await applier.backlog()] == ["rejected"]
    calls.errors.clear()
    calls.made.clear()
    await read_again(applier, sources)
    assert [row["reason"] for row in await applier.backlog()] == ["rejected"]
    assert calls.made == []
    assert await histories(db) == {"ada": [2, 3]}
    assert await db.fetchval("SELECT count(*) FROM pipeline.inbox") == 2


async def test_a_delay_is_kept_after_a_lost_answer(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    calls = Calls()
    calls.errors[1] = Retry("later", after=3_600)
    applier = await new_applier(calls.handlers, topic=TOPIC)
    await applier.apply(Deposit(1), Deposit(2), Deposit(3, account="bob"))
    sources = await due(applier)
    await read_again(applier, sources)
    calls.errors.clear()
    calls.made.clear()
    await read_again(applier, sources)
    assert calls.made == []
    assert await histories(db) == {"bob": [3]}
    rows = {row["offset"]: row["attempts"] for row in await applier.backlog()}
    assert rows == {0: 1, 1: 0}


async def test_a_locked_row_delays_no_other_of_its_lanes(
    new_applier: NewApplier, db: asyncpg.Connection, connect: Connect
) -> None:
    calls = Calls(timeout=5.0)
    applier = await new_applier(calls.handlers, topic=TOPIC, lock_timeout=0.3)
    other = await connect()
    await other.execute(
        "INSERT INTO account (id, balance, history, version) VALUES ('of 30', 0, '', 0)"
    )
    await applier.apply(*(Deposit(n, account=f"of {n}") for n in range(60)))
    async with other.transaction():
        await other.execute("SELECT FROM account WHERE id = 'of 30' FOR UPDATE")
        await read_again(applier, await due(applier))
    assert calls.made.count(30) <= 4
    assert [row["offset"] for row in await applier.backlog()] == [30]
    found = await histories(db)
    assert found == {f"of {n}": [n] if n != 30 else [] for n in range(60)}


async def test_a_row_waits_behind_one_of_an_earlier_piece(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    calls = Calls(own_transaction=True)
    calls.errors[2] = Retry("later", after=3_600)
    applier = await new_applier(calls.handlers, topic=TOPIC)
    await applier.apply(*(Deposit(n, account="bob" if n > 3 else "ada") for n in range(1, 6)))
    await read_again(applier, await due(applier))
    assert calls.made == [1, 2, 4, 5]
    assert await histories(db) == {"ada": [1], "bob": [4, 5]}
    assert await applier.park() == {
        ("deposit", 1): "failed",
        ("deposit", 2): "deferred",
    }


async def test_a_store_that_is_unavailable_keeps_no_other_lane_waiting(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    calls = Calls()
    calls.errors[1] = StoreUnavailable("the object store is away")
    applier = await new_applier(calls.handlers, topic=TOPIC, retry_pause=0.01)
    await applier.apply(Deposit(1), Deposit(2, account="bob"), Deposit(3, account="cleo"))
    for _ in range(6):
        await applier.lanes.work_off()
    assert await histories(db) == {"bob": [2], "cleo": [3]}
    assert [(row["offset"], row["attempts"]) for row in await applier.backlog()] == [(0, 0)]
