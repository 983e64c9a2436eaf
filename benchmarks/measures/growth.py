"""Growth: how rate and latency change with payload, batch, partitions, keys and processes."""

from dataclasses import dataclass, replace
from functools import partial

from benchmarks import load
from benchmarks.bench import Bench
from benchmarks.marks import Values
from benchmarks.rig import OURS, PARTITIONS, running
from benchmarks.runs import Throughput, latency, ready

_SHARE = 2
"""The runs are so many times shorter than those of other measures."""
_LARGE = 10_000
"""Bytes; of larger payloads there are fewer."""


@dataclass(frozen=True)
class Point:
    """A service in circumstances of which one is varied."""

    keys: int = 1_000
    payload: int = 250
    batch: int = 1_000
    partitions: int = PARTITIONS
    processes: int = 1


VARIED = {
    "payload": [Point(payload=size) for size in (250, 2_000, 20_000)],
    "batch": [Point(batch=size) for size in (10, 100, 1_000, 3_000)],
    "partitions": [Point(partitions=count) for count in (1, 4, 16)],
    "keys": [Point(keys=count) for count in (1, 10, 1_000, 100_000)],
    "processes": [Point(processes=count) for count in (1, 2)],
}


async def growth(bench: Bench) -> None:
    """Take rate and latency at every point; those that are the same are run once."""
    points = {name(kind, point): point for kind, all_ in VARIED.items() for point in all_}
    once = {point: run for run, point in reversed(points.items())}
    await bench.rounds(
        "growth", {run: partial(_at, bench, point) for point, run in once.items()}, warm_up=False
    )
    for run, point in points.items():
        if run != once[point]:
            bench.book.repeat("growth", once[point], run)


def name(kind: str, point: Point) -> str:
    """Return the name of a point of a plot."""
    return f"{kind} {getattr(point, kind)}"


async def _at(bench: Bench, point: Point) -> Values:
    rig = bench.rig
    count = bench.options.events // _SHARE
    if point.payload > _LARGE:
        count //= 5
    who = replace(OURS, settings={"PIPELINE_BATCH_SIZE": str(point.batch)})
    work = load.make(point.keys, count, payload=point.payload)
    values = await Throughput(who, work, point.partitions, point.processes)(rig)
    async with (
        rig.fresh_topic(point.partitions) as input_,
        rig.site(who, input_, point.partitions) as site,
    ):
        services = [rig.process(site) for _ in range(point.processes)]
        async with running(*services):
            await ready(site, services)
            slow = await latency(
                rig,
                site,
                services,
                bench.options.seconds / _SHARE,
                keys=point.keys,
                payload=point.payload,
            )
    return {**values, **slow}
