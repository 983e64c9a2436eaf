"""One transaction takes what is ready, of however many partitions."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import asyncpg
import pytest

from onceward import Transaction
from onceward.apply.attempt import Findings
from onceward.apply.batch import read
from onceward.apply.breaker import BreakerOpen
from onceward.apply.positions import PositionMoved
from onceward.consume.gathering import Gatherer
from onceward.consume.partition_source import PartitionBatch, PartitionSource
from onceward.servers.retrying import Retrying

from .applier import Applier, NewApplier
from .bank import Bank, Refused
from tests.contract.bank import Deposit, Deposited, histories
from tests.servers.waiting import PATIENCE

Apply = Callable[..., Coroutine[Any, Any, None]]
TRANSACTIONS = "SELECT count(DISTINCT xmin::text), count(*) FROM pipeline.inbox"


@pytest.fixture
async def bank(
    new_applier: NewApplier, request: pytest.FixtureRequest
) -> tuple[Bank, Applier, Apply]:
    """Return a bank, its applier, and a function that applies a deposit of a partition.

    The parameter is another time limit of shared transactions, in seconds.
    """
    bank = Bank("deposits", "balances", "bank", options={"timeout": 2.0})
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    gatherer = Gatherer(applier.consume)
    gatherer._time_limit = getattr(request, "param", gatherer._time_limit)
    attempts = Retrying(
        "the test", "PostgreSQL", unless=lambda: False, report=applier.outages.append
    )

    async def apply(deposit: Deposit, *, topic: str = "deposits") -> None:
        slot = replace(applier.slot, topic=topic, partition=deposit.partition or 0)
        part = PartitionBatch(slot, await read(applier.handlers, 0, [deposit.record(topic, 0)]))
        findings = Findings()
        if not await gatherer.apply(part, findings):
            await applier.consume.apply(PartitionSource([part]), attempts, findings)

    return bank, applier, apply


async def assign(applier: Applier, number: int, topic: str = "deposits") -> None:
    """Store the first position of partitions, so that a batch of each is ready at the same time."""
    for partition in range(number):
        slot = replace(applier.slot, topic=topic, partition=partition)
        await replace(applier, slot=slot).position()


def deposits(number: int) -> list[Deposit]:
    """Return deposits to accounts of their own, each in a partition of its own."""
    return [Deposit(one, account=f"of {one}", partition=one) for one in range(number)]


async def stored(db: asyncpg.Connection) -> dict[int, int]:
    """Return the positions by partition."""
    rows = await db.fetch("SELECT partition, next_offset FROM pipeline.position")
    return {row["partition"]: row["next_offset"] for row in rows}


@pytest.mark.parametrize("bank", [PATIENCE], indirect=True)
async def test_the_batches_of_many_partitions_that_are_ready_are_one_transaction(
    bank: tuple[Bank, Applier, Apply], db: asyncpg.Connection
) -> None:
    _, applier, apply = bank
    await assign(applier, 12)
    await asyncio.gather(*map(apply, deposits(12)))
    transactions, markers = await db.fetchrow(TRANSACTIONS)
    assert (transactions, markers) == (1, 12)
    assert await stored(db) == dict.fromkeys(range(12), 1)
    assert await histories(db) == {f"of {one}": [one] for one in range(12)}


async def test_a_lost_partition_is_left_out_and_the_others_are_committed(
    bank: tuple[Bank, Applier, Apply], db: asyncpg.Connection
) -> None:
    _, applier, apply = bank
    await assign(applier, 6)
    await db.execute("UPDATE pipeline.position SET next_offset = 7 WHERE partition = 3")
    done = await asyncio.gather(*map(apply, deposits(6)), return_exceptions=True)
    assert [type(one) for one in done] == [type(None)] * 3 + [PositionMoved] + [type(None)] * 2
    assert await stored(db) == {0: 1, 1: 1, 2: 1, 3: 7, 4: 1, 5: 1}
    assert "of 3" not in await histories(db)


async def test_a_call_repeated_because_of_another_partition_gets_its_own_event(
    bank: tuple[Bank, Applier, Apply], db: asyncpg.Connection
) -> None:
    given, applier, apply = bank
    seen: list[str] = []

    @given.handlers.on(Deposited, topic="deposits", consumer="spoil")
    async def spoil(event: Deposited, tx: Transaction) -> None:
        seen.append(event.account)
        event.__dict__["account"] = "spoiled"

    await assign(applier, 6)
    db_lock = "LOCK TABLE pipeline.outbox IN ACCESS EXCLUSIVE MODE"
    async with asyncio.timeout(PATIENCE), db.transaction():
        await db.execute(db_lock)
        tasks = [asyncio.create_task(apply(one)) for one in deposits(6)]
        # The shared transaction is late, and its batches are applied one by one.
        while len(seen) <= 6:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.gather(*tasks)
    assert "spoiled" not in seen


async def test_a_message_that_fails_takes_no_neighbour_with_it(
    bank: tuple[Bank, Applier, Apply], db: asyncpg.Connection
) -> None:
    given, applier, apply = bank
    given.refused = {2}
    await assign(applier, 6)
    await asyncio.gather(*map(apply, deposits(6)))
    assert await stored(db) == dict.fromkeys(range(6), 1)
    assert await histories(db) == {f"of {one}": [one] for one in range(6) if one != 2}
    assert await applier.park() == {("deposit", 0): "failed"}


async def test_a_handler_that_hangs_holds_up_no_other_partition(
    bank: tuple[Bank, Applier, Apply], db: asyncpg.Connection
) -> None:
    given, applier, apply = bank
    given.waits = {2: asyncio.Event().wait}  # type: ignore[dict-item]
    await assign(applier, 6)
    hanging = asyncio.create_task(apply(deposits(6)[2]))
    others = [one for one in deposits(6) if one.amount != 2]
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*map(apply, others))
        assert not hanging.done()
        await hanging
    assert await applier.park() == {("deposit", 0): "undecided"}
    assert await stored(db) == dict.fromkeys(range(6), 1)
    given.waits = {}
    await applier.work_off()
    assert await applier.park() == {}


async def test_a_slow_server_is_neither_an_outage_nor_the_messages_fault(
    bank: tuple[Bank, Applier, Apply], db: asyncpg.Connection
) -> None:
    _, applier, apply = bank
    await assign(applier, 3)
    async with asyncio.timeout(PATIENCE), db.transaction():
        await db.execute("LOCK TABLE account IN ACCESS EXCLUSIVE MODE")
        unknown = [replace(one, type="unknown") for one in deposits(3)[1:]]
        tasks = [asyncio.create_task(apply(one)) for one in (deposits(1)[0], *unknown)]
        await asyncio.wait(tasks[1:])
        assert not tasks[0].done()
        await db.execute("SELECT")
    await asyncio.gather(*tasks)
    assert await stored(db) == dict.fromkeys(range(3), 1)
    assert not await applier.park()


async def test_an_open_breaker_holds_up_no_partition_of_another_consumer(
    bank: tuple[Bank, Applier, Apply], db: asyncpg.Connection
) -> None:
    given, applier, apply = bank

    @given.handlers.on(Deposited, topic="others", consumer="other")
    async def fail(event: Deposited, tx: Transaction) -> None:
        raise Refused("always")

    applier.consume.breaker._limit = 1
    await assign(applier, 3)
    await assign(applier, 3, "others")
    others = [apply(replace(one, id="x"), topic="others") for one in deposits(3)]
    done = await asyncio.gather(*map(apply, deposits(3)), *others, return_exceptions=True)
    assert [type(one) for one in done] == [type(None)] * 3 + [BreakerOpen] * 3
    assert await histories(db) == {f"of {one}": [one] for one in range(3)}
    assert not await applier.park()


async def test_a_revoked_partition_leaves_nothing_behind_and_the_others_continue(
    bank: tuple[Bank, Applier, Apply], db: asyncpg.Connection
) -> None:
    given, applier, apply = bank
    await assign(applier, 6)
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        reached.set()
        await go_on.wait()

    given.waits = {2: wait}
    tasks = [asyncio.create_task(apply(one)) for one in deposits(6)]
    async with asyncio.timeout(PATIENCE):
        await reached.wait()
        tasks[2].cancel()
        await asyncio.wait({tasks[2]})
        assert tasks[2].cancelled()
        go_on.set()
        await asyncio.gather(*(one for one in tasks if one is not tasks[2]))
    assert await stored(db) == {one: int(one != 2) for one in range(6)}
    assert "of 2" not in await histories(db)
