"""Messages of a key take effect in their order, and so do the events that they cause."""

import asyncio
import signal

from .bank import Deposit, histories
from .ledger import Ledger
from tests.servers.processes import Start
from tests.servers.waiting import eventually


async def test_order_is_kept_while_consumers_come_and_go(ledger: Ledger, start: Start) -> None:
    async with ledger.traffic():
        first = await start("run")
        await ledger.progresses()
        others = await asyncio.gather(start("run"), start("run"))
        for process in others:
            await eventually(process.is_ready)
        await ledger.progresses()
        first.send(signal.SIGTERM)
        assert await first.ended() == 0
        await ledger.progresses()


async def test_a_retried_message_is_not_overtaken_within_its_key(
    ledger: Ledger, start: Start
) -> None:
    await ledger.send(
        Deposit(1, "ada", partition=0, failures=3),
        Deposit(2, "bob", partition=0),
        Deposit(3, "ada", partition=0),
        Deposit(4, "ada", partition=0, failures=1),
        Deposit(5, "bob", partition=0),
    )
    process = await start("run")
    await process.says("1 fails 3 times")
    await ledger.send(Deposit(6, "ada", partition=0))
    await ledger.check()
    assert await histories(ledger.db) == {"ada": [1, 3, 4, 6], "bob": [2, 5]}
