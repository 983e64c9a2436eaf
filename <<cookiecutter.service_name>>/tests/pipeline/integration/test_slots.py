"""Transactions of a process that may run at once: workers hold a lease and wait for no reader."""

import asyncio

from pipeline.apply.slots import Slots

from .bank import Bank
from .desk import NewDesk
from .test_interrupted import Gate
from tests.contract.bank import Deposit
from tests.servers.waiting import eventually


async def test_a_worker_waits_for_no_reader(new_desk: NewDesk) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank", options={"timeout": 300})
    desk = await new_desk(bank.handlers, topic=bank.deposits, concurrency=1)
    bank.refused = {1}
    await desk.apply(Deposit(1))
    bank.refused = set()
    await desk.make_due()
    gate = Gate()
    bank.waits = {2: gate.wait}
    reading = asyncio.create_task(desk.apply(Deposit(2, account="bob")))
    await gate.reached.wait()
    await desk.work_off()
    assert await desk.backlog() == []
    assert not reading.done()
    gate.open.set()
    await reading


async def test_what_runs_alone_waits_for_what_runs_and_not_for_what_waits() -> None:
    slots = Slots(readers=2, workers=1)
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
