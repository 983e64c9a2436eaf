"""Latency: from a record's sending to its event's arrival, at a slow pace."""

import asyncio
from functools import partial

from benchmarks import load
from benchmarks.bench import Bench
from benchmarks.load import Load
from benchmarks.marks import Values
from benchmarks.rig import BARE, OURS, Contestant, running
from benchmarks.runs import latency as measured
from benchmarks.runs import ready, records
from benchmarks.usage import process_seconds

SELDOM = 0.7
"""Records a second where each comes after a pause: an idle relay looks less and less often."""


async def latency(bench: Bench) -> None:
    """Compare ours with bare in one process; look at ours with a relay of its own."""
    await bench.rounds(
        "latency",
        {"bare": partial(_latency, bench, BARE), "ours": partial(_latency, bench, OURS)},
        {"ours, relay apart": partial(_apart, bench)},
        warm_up=False,  # the first records of each run do
    )
    bench.compare("latency, p99", "ours", "bare", of="p99")
    bench.mark_figure("latency, p50", "ours", "p50")
    bench.mark_figure("relay apart, p50", "ours, relay apart", "p50")
    bench.mark_figure("relay apart, idle", "ours, relay apart", "idle")


async def _latency(bench: Bench, who: Contestant) -> Values:
    rig, many = bench.rig, _load(bench)
    async with rig.fresh_topic() as input_, rig.site(who, input_) as site:
        service = rig.process(site)
        async with running(service):
            await ready(site, [service])
            values = await measured(rig, site, [service], many)
        await rig.check(site, many)
    return values


async def _apart(bench: Bench) -> Values:
    rig, seconds = bench.rig, bench.options.seconds
    many = _load(bench)
    few = load.make(1_000, records(seconds, SELDOM), first=len(many.scans))
    async with rig.fresh_topic() as input_, rig.site(OURS, input_) as site:
        both = [rig.process(site, command=command) for command in ("consume", "relay")]
        async with running(*both):
            await ready(site, both)
            values = await measured(rig, site, both, many)
            relay = both[1].pid or 0
            before = process_seconds(relay)
            await asyncio.sleep(seconds)
            share = (process_seconds(relay) - before) / seconds * 100
            single = await measured(rig, site, both, few, per_second=SELDOM)
        await rig.check(site, many, few)
    singles = {f"single_{name}": single[name] for name in ("p50", "most") if name in single}
    return {**values, **singles, "idle": round(share, 3)}


def _load(bench: Bench) -> Load:
    return load.make(1_000, records(bench.options.seconds))
