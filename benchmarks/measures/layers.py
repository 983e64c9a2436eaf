"""Layers: where a message's microseconds go, with a handler of each kind, and in bare's loop."""

import json
from dataclasses import replace
from functools import partial

from benchmarks import load
from benchmarks.bench import Bench
from benchmarks.load import FLIGHTS, Load
from benchmarks.marks import Values
from benchmarks.measures.telemetry import traced
from benchmarks.rig import BARE, OURS, OURS_SQL, Contestant

EVENTS = 100_000


async def layers(bench: Bench) -> None:
    """Note what each layer takes; nothing is compared."""
    count = bench.scaled(EVENTS)
    one, with_traces = load.make(1_000, count), load.make(1_000, count, traced=True)
    of_flights = load.make(FLIGHTS, count)
    await bench.rounds(
        "layers",
        {
            "ours": partial(_layers, bench, OURS, one),
            "ours-sql": partial(_layers, bench, OURS_SQL, one),
            "bare": partial(_layers, bench, BARE, one),
            "ours, flights": partial(_layers, bench, OURS, of_flights),
            # The same records as the next one's: who compares `telemetry` compares these.
            "ours, traced, off": partial(_layers, bench, OURS, with_traces),
            "ours, telemetry on": partial(_traced, bench, with_traces),
        },
        warm_up=False,  # the first batches of each run do, and don't count
    )


async def _traced(bench: Bench, load_: Load) -> Values:
    async with traced() as (who, _):
        return await _layers(bench, who, load_)


async def _layers(bench: Bench, who: Contestant, load_: Load) -> Values:
    rig = bench.rig
    input_ = await rig.input(load_)
    tables, module = (
        (BARE, "benchmarks.layers_bare") if who is BARE else (OURS, "benchmarks.layers")
    )
    async with rig.site(tables, input_) as site:
        watched = rig.process(replace(site, contestant=replace(who, module=module)))
        told: dict[str, float] = json.loads((await watched.ask()).splitlines()[-1])
        await rig.check(site, load_)
        return {**told, "in all": round(sum(told.values()), 1)}
