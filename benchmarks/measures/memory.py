"""Memory: over minutes of load, and with a long backlog in the topic."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from statistics import fmean, linear_regression

from benchmarks import load
from benchmarks.bench import RUN_SECONDS, Bench
from benchmarks.check import require
from benchmarks.load import Load
from benchmarks.marks import Values, ratios
from benchmarks.rig import OURS, guarded, running
from benchmarks.runs import ready
from benchmarks.usage import peak_resident, resident
from demo.processes import Service

PER_SECOND = 5_000
"""Records a second, a good part of what the service can do."""
BEHIND, SHORT = 1_000_000, 50_000
"""Records in the topic before the service starts."""
_CHUNK_SECONDS = 0.2
_MEGABYTE = 1_000_000
_TEN_MINUTES = 600.0

Series = list[tuple[float, float]]


async def memory(bench: Bench) -> None:
    """Watch the memory of our service."""
    seconds = bench.options.minutes * 60
    await bench.rounds(
        "memory",
        {"over time": partial(_over_time, bench, seconds)},
        rounds=1,
        warm_up=False,
        limit=seconds + RUN_SECONDS,
        again=False,
    )
    bench.mark("memory over time", [one["growth"] for one in bench.found("memory", "over time")])
    await bench.rounds(
        "memory",
        {
            f"{count:,} behind": partial(_behind, bench, bench.scaled(count))
            for count in (SHORT, BEHIND)
        },
        warm_up=False,
        again=False,
    )
    short, behind = (bench.found("memory", f"{count:,} behind") for count in (SHORT, BEHIND))
    peaks = [one["peak_mb"] for one in short]
    bench.mark("memory behind", ratios(behind, short, of="peak_mb"), peaks)


async def _over_time(bench: Bench, seconds: float) -> Values:
    """Feed the service at a steady pace."""
    rig = bench.rig
    scans, events = Counter[str](), Counter[str]()
    async with rig.fresh_topic() as input_, rig.site(OURS, input_) as site:
        service = rig.process(site)
        async with (
            rig.producer() as producer,
            running(service),
            rig.counted(site.output) as published,
        ):
            await ready(site, [service])
            async with _watched(service) as series:
                async for chunk in _chunks(seconds):
                    scans.update(chunk.per_parcel)
                    events.update(chunk.events_per_parcel)
                    await guarded(load.fill(producer, input_, chunk.records()), [service])
                await rig.watch([service], published, events.total())
            peak = peak_resident(service.pid or 0)
        check = await rig.read(site.output)
        rows = {row.id: row.scans for row in await rig.rows(site)}
        require(check.faults(events, scans, rows), "ours")
    bench.book.series["memory over time"] = series
    return {
        "growth": growth_of(series),
        "peak_mb": peak / _MEGABYTE,
        "rate": scans.total() / seconds,
    }


def growth_of(series: Series) -> float:
    """Return by how many percent the memory grows in 10 minutes; the first third is warming up.

    It is the slope of a line through all that was seen after that.
    """
    times, megabytes = zip(*series[len(series) // 3 :], strict=True)
    return linear_regression(times, megabytes).slope * _TEN_MINUTES / fmean(megabytes) * 100


async def _chunks(seconds: float) -> AsyncIterator[Load]:
    """Yield new scans, as many as are due since the last ones."""
    began, number = time.monotonic(), 0
    while (passed := time.monotonic() - began) < seconds:
        await asyncio.sleep(_CHUNK_SECONDS)
        due = int(passed * PER_SECOND) - number
        yield load.make(1_000, due, first=number, seed=number)
        number += due


@asynccontextmanager
async def _watched(service: Service) -> AsyncIterator[Series]:
    """Note what the service has in memory, second by second, in megabytes."""
    series: Series = []

    async def watch() -> None:
        began = time.monotonic()
        while True:
            megabytes = resident(service.pid or 0) / _MEGABYTE
            series.append((round(time.monotonic() - began, 1), round(megabytes, 1)))
            await asyncio.sleep(1.0)

    watching = asyncio.create_task(watch())
    try:
        yield series
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _behind(bench: Bench, count: int) -> Values:
    """Let the service start behind a topic that holds so many records."""
    rig, one = bench.rig, load.make(1_000, count)
    async with rig.site(OURS, await rig.input(one)) as site:
        service = rig.process(site)
        async with running(service), rig.counted(site.output) as published:
            await rig.watch([service], published, one.events)
            peak = peak_resident(service.pid or 0)
        await rig.check(site, one)
    return {"peak_mb": peak / _MEGABYTE}
