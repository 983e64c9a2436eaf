"""Deferred: every record through the backlog, beside the handler that runs at once."""

from dataclasses import replace
from functools import partial

from benchmarks import load
from benchmarks.bench import Bench
from benchmarks.rig import OURS
from benchmarks.runs import whole_span


async def deferred(bench: Bench) -> None:
    """Compare the spans from the first record consumed to the last event published."""
    one = load.make(1_000, bench.options.events)
    later = replace(OURS, name="ours-deferred", handler="deferred")
    await bench.rounds(
        "deferred",
        {
            "inline": partial(whole_span, bench.rig, OURS, one),
            "deferred": partial(whole_span, bench.rig, later, one),
        },
    )
    bench.compare("deferred mode", "deferred", "inline")
