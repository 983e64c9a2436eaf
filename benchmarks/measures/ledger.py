"""Ledger: the payments example by CPU, beside bare-orm's loop with the same handlers."""

import asyncio
from dataclasses import dataclass
from functools import partial

from benchmarks import payments
from benchmarks.bench import Bench
from benchmarks.load import fill
from benchmarks.marks import Values
from benchmarks.payments import BARE_ORM, OURS, Payments
from benchmarks.rig import Contestant, Rig, running
from benchmarks.runs import rate, ready

MESSAGES = 6_000
"""Commands of a run; fewer in short runs."""
WARM_UP = 200
"""Messages that are handled before all others are written; they do not count."""


@dataclass(frozen=True)
class Side:
    """A contestant, and the example that it runs."""

    contestant: Contestant
    without: tuple[str, ...] = ()
    """What is removed from the example: entries, CHECK."""
    processes: int = 1

    @property
    def name(self) -> str:
        """Return the name of its runs."""
        processes = ", two processes" if self.processes == 2 else ""
        removed = f", without {' and '.join(self.without)}" if self.without else ""
        return f"{self.contestant.name}{processes}{removed}"


TWO = Side(OURS, processes=2)
WITHOUT: tuple[tuple[str, ...], ...] = ((), ("CHECK",), ("entries",), ("entries", "CHECK"))
SIDES = (TWO, *(Side(who, without) for without in WITHOUT for who in (OURS, BARE_ORM)))
"""Those that are compared are neighbours."""


async def ledger(bench: Bench) -> None:
    """Compare one process with two, and the example with and without entries and CHECK."""
    await payments.generate(bench.rig.folder)
    count = max(2 * WARM_UP, min(MESSAGES, bench.options.events // 10))
    load = payments.make(count)
    await bench.rounds(
        "ledger",
        {one.name: partial(_run, bench.rig, one, load) for one in SIDES},
        warm_up=False,  # the first messages of each run do, and don't count
    )
    bench.compare("ledger, two processes, CPU", TWO.name, Side(OURS).name, of="per_cpu")


async def _run(rig: Rig, side: Side, load: Payments) -> Values:
    who = payments.without(side.contestant, *side.without)
    records = list(load.records())
    async with (
        rig.fresh_topic() as input_,
        rig.producer() as producer,
        rig.site(who, input_) as site,
    ):
        await payments.prepare(rig, site, load)
        await fill(producer, input_, records[:WARM_UP])
        services = [rig.process(site) for _ in range(side.processes)]
        async with running(*services), rig.counted(site.output) as count:
            await rig.watch(services, count, WARM_UP)
            await ready(site, services)
            # A transaction may take all of a partition: CPU counts from before its first commit.
            filling = asyncio.create_task(fill(producer, input_, records[WARM_UP:]))
            samples = await rig.watch(services, count, len(records))
            await filling
        await payments.check(rig, site, load)
    return rate(samples, len(records) - WARM_UP)
