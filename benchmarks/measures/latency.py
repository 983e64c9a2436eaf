"""Latency: from a record's sending to its event's arrival, at a slow pace."""

import asyncio
from functools import partial

from benchmarks.bench import Bench
from benchmarks.marks import Values, ratios
from benchmarks.rig import BARE, OURS, Contestant, process_seconds, running
from benchmarks.runs import latency as measured
from benchmarks.runs import ready


async def latency(bench: Bench) -> None:
    """Compare ours with bare in one process; look at ours with a relay of its own."""
    await bench.rounds(
        "latency",
        {
            "bare": partial(_latency, bench, BARE),
            "ours": partial(_latency, bench, OURS),
            "ours, relay apart": partial(_apart, bench),
        },
    )
    ours, apart = bench.found("latency", "ours"), bench.found("latency", "ours, relay apart")
    bench.mark("latency, p99", ratios(ours, bench.found("latency", "bare"), of="p99"))
    bench.mark("latency, p50", [one["p50"] for one in ours])
    bench.mark("relay apart, p50", [one["p50"] for one in apart])
    bench.mark("relay apart, idle", [one["idle"] for one in apart])


async def _latency(bench: Bench, who: Contestant) -> Values:
    rig = bench.rig
    async with rig.fresh_topic() as input_, rig.site(who, input_) as site:
        service = rig.process(site)
        async with running(service):
            await ready(site, [service])
            return await measured(rig, site, [service], bench.options.seconds)


async def _apart(bench: Bench) -> Values:
    rig, seconds = bench.rig, bench.options.seconds
    async with rig.fresh_topic() as input_, rig.site(OURS, input_) as site:
        both = [rig.process(site, command=command) for command in ("consume", "relay")]
        async with running(*both):
            await ready(site, both)
            values = await measured(rig, site, both, seconds)
            relay = both[1].pid or 0
            before = process_seconds(relay)
            await asyncio.sleep(seconds)
            share = (process_seconds(relay) - before) / seconds * 100
            return {**values, "idle": round(share, 3)}
