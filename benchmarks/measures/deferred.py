"""Deferred: every record through the backlog, beside the handler that runs at once."""

from dataclasses import replace
from functools import partial

from benchmarks import load
from benchmarks.bench import Bench
from benchmarks.rig import OURS
from benchmarks.runs import Throughput, positions


async def deferred(bench: Bench) -> None:
    """Compare the spans from the first record consumed to the last event published."""
    one = load.make(1_000, bench.options.events)
    later = replace(OURS, name="ours-deferred", handler="deferred")
    await bench.rounds(
        "deferred",
        {
            "inline": partial(Throughput(OURS, one, begun=positions), bench.rig),
            "deferred": partial(Throughput(later, one, begun=positions), bench.rig),
        },
    )
    bench.compare("deferred mode", "deferred", "inline")
