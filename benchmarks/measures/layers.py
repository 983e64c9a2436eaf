"""Layers: where a message's microseconds go, with a handler of each kind."""

import json
from dataclasses import replace
from functools import partial

from benchmarks import load
from benchmarks.bench import Bench
from benchmarks.marks import Values
from benchmarks.rig import OURS, OURS_SQL, Contestant

EVENTS = 100_000
MODULE = "benchmarks.layers"


async def layers(bench: Bench) -> None:
    """Note what each layer takes; nothing is compared."""
    count = bench.scaled(EVENTS)
    await bench.rounds(
        "layers",
        {who.name: partial(_layers, bench, who, count) for who in (OURS, OURS_SQL)},
        warm_up=False,
    )


async def _layers(bench: Bench, who: Contestant, count: int) -> Values:
    rig = bench.rig
    input_ = await rig.input(load.make(1_000, count))
    async with rig.site(OURS, input_) as site:
        watched = rig.process(replace(site, contestant=replace(who, module=MODULE)))
        told: dict[str, float] = json.loads((await watched.ask()).splitlines()[-1])
        return {**told, "in all": round(sum(told.values()), 1)}
