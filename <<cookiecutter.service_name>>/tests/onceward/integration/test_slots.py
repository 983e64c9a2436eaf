"""Transactions of a process that may run at once: workers hold a lease and wait for no reader."""

import asyncio
from contextlib import AsyncExitStack

import asyncpg
import pytest

from onceward.apply.limits import ConcurrencyLimit
from onceward.consume.partition_source import PartitionBatch, PartitionSource
from onceward.servers.retrying import Retrying

from .applier import NewApplier
from .bank import Bank
from .test_interrupted import Gate
from tests.contract.bank import Deposit
from tests.servers.waiting import eventually


async def test_a_worker_waits_for_no_reader(new_applier: NewApplier) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank", options={"timeout": 300})
    applier = await new_applier(bank.handlers, topic=bank.deposits, concurrency=1)
    bank.refused = {1}
    await applier.apply(Deposit(1))
    bank.refused = set()
    await applier.make_due()
    gate = Gate()
    bank.waits = {2: gate.wait}
    reading = asyncio.create_task(applier.apply(Deposit(2, account="bob")))
    await gate.reached.wait()
    await applier.work_off()
    assert await applier.backlog() == []
    assert not reading.done()
    gate.open.set()
    await reading


async def test_what_runs_alone_waits_for_what_runs_and_not_for_what_waits() -> None:
    slots = ConcurrencyLimit(readers=2, workers=1)
    running = asyncio.Event()
    began: list[str] = []

    async def read(name: str) -> None:
        async with slots.one(waits=True):
            began.append(name)
            await running.wait()

    async def be_alone() -> None:
        async with slots.all():
            began.append("alone")
            await asyncio.sleep(0.1)
            began.append("alone no more")

    tasks = [asyncio.create_task(read(str(number))) for number in range(8)]
    await eventually(lambda: began == ["0", "1"])
    tasks.append(asyncio.create_task(be_alone()))
    await asyncio.sleep(0)
    running.set()
    await asyncio.gather(*tasks)
    assert began[:4] == ["0", "1", "alone", "alone no more"]
    assert len(began) == 10


@pytest.mark.parametrize("deaths", [0, 1], ids=["beside one that is alone", "to be alone"])
async def test_a_lease_lasts_while_its_worker_waits_for_others_of_its_process(
    new_applier: NewApplier, db: asyncpg.Connection, deaths: int
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank", options={"timeout": 300})
    limits = {"lock_timeout": 1, "transaction_timeout": 2, "backlog_lease": 3}
    applier = await new_applier(bank.handlers, topic=bank.deposits, **limits)
    bank.refused = {1}
    await applier.apply(Deposit(1))
    bank.refused = set()
    await db.execute("UPDATE pipeline.backlog SET deaths = $1, due_at = now()", deaths)
    async with AsyncExitStack() as running:
        slots = applier.consume._slots
        await running.enter_async_context(slots.all() if not deaths else slots.one(waits=True))
        working = asyncio.create_task(applier.work_off())
        first = "SELECT lease_until FROM pipeline.backlog_lane WHERE owner IS NOT NULL"
        await eventually(lambda: _is_true(db, f"SELECT EXISTS ({first})"))
        claimed_until = await db.fetchval(first)
        extended = f"SELECT ({first}) > $1"
        await eventually(lambda: _is_true(db, extended, claimed_until))
        assert not working.done()
    await working
    assert await db.fetchval("SELECT max(starts) FROM pipeline.backlog_lane") == 0
    assert await applier.backlog() == []


async def _is_true(db: asyncpg.Connection, question: str, *values: object) -> bool:
    return bool(await db.fetchval(question, *values))


async def test_a_batch_that_waits_for_a_slot_has_not_begun(
    new_applier: NewApplier,
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    applier = await new_applier(bank.handlers, topic=bank.deposits, concurrency=1)
    begun: list[str] = []
    batch = await applier.read(Deposit(1), start=await applier.position())
    part = PartitionBatch(applier.slot, batch, begun=lambda: begun.append("it"))
    attempts = Retrying(
        "the test", "PostgreSQL", unless=lambda: False, report=applier.outages.append
    )
    async with applier.consume._slots.one(waits=True):
        applying = asyncio.create_task(applier.consume.apply(PartitionSource([part]), attempts))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not begun
    await applying
    assert begun == ["it"]
