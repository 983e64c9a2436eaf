"""Ordinary traffic: what a message costs, and how long it takes, far below full load."""

import time
from functools import partial
from itertools import product

from benchmarks import load
from benchmarks.bench import Bench
from benchmarks.marks import Values
from benchmarks.rig import BARE_ORM, OURS, USUAL, Contestant, process_seconds, running
from benchmarks.runs import asking, latency, ready, records

RATES = (30, 100, 300, 1_000, 3_000)
PARTITIONS = (1, 12)
_MOST_OF_USUAL = 100
"""Messages a second that `usual` can keep up with."""
_COMMITS = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"


async def ordinary(bench: Bench) -> None:
    """Compare ours with the others at several rates, on one partition and on a dozen."""
    await bench.rounds(
        "ordinary",
        *(
            {
                _name(who, rate, partitions): partial(_measured, bench, who, rate, partitions)
                for who in (BARE_ORM, OURS, USUAL)
                if who is not USUAL or rate <= _MOST_OF_USUAL
            }
            for rate, partitions in product(RATES, PARTITIONS)
        ),
        warm_up=False,
    )


def _name(who: Contestant, rate: int, partitions: int) -> str:
    return f"{who.name} at {rate}/s on {partitions}"


async def _measured(bench: Bench, who: Contestant, rate: int, partitions: int) -> Values:
    """Return quantiles in ms, CPU in ms for 1,000 messages, and commits for one message."""
    rig, sent = bench.rig, load.make(1_000, records(bench.options.seconds, rate))
    async with (
        rig.fresh_topic(partitions) as input_,
        rig.site(who, input_, partitions) as site,
        asking(site, _COMMITS) as commits,
    ):
        service = rig.process(site)
        async with running(service):
            await ready(site, [service])

            def spent() -> dict[str, float]:
                return {"python": process_seconds(service.pid or 0), **rig.servers_cpu()}

            before, committed, began = spent(), await commits(), time.monotonic()
            values = await latency(rig, site, [service], sent, per_second=rate)
            seconds, number = time.monotonic() - began, len(sent.scans)
            took = {name: one - before.get(name, 0.0) for name, one in spent().items()}
            committed = await commits() - committed
        await rig.check(site, sent)
    cpu = {f"cpu_{name}": one / number * 1_000 for name, one in took.items()}
    mine = took["python"] + took.get("postgres", 0.0)
    return {
        **values,
        **cpu,
        "cpu": mine / number * 1_000,
        "core": took["python"] / seconds,
        "commits": committed / number,
    }
