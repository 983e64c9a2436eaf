"""A process may be killed at any moment: nothing is lost, doubled or reordered."""

import asyncio

from .ledger import Ledger
from tests.servers.processes import Start


async def test_processes_killed_under_load_lose_double_and_reorder_nothing(
    ledger: Ledger, start: Start
) -> None:
    async with ledger.traffic():
        processes = [*await asyncio.gather(start("run"), start("run"))]
        for _ in range(2):
            await ledger.progresses()
            await processes.pop(0).kill()
            processes.append(await start("run"))
            await ledger.progresses()


async def test_a_service_whose_processes_are_all_killed_goes_on_where_it_was(
    ledger: Ledger, start: Start
) -> None:
    async with ledger.traffic():
        for _ in range(2):
            processes = await asyncio.gather(start("consume"), start("relay"))
            await ledger.progresses()
            for process in processes:
                await process.kill()
        await start("run")
