"""xmin: a steady load while another session holds a transaction open, and after that has ended.

As long as it is open, no version of a row can be removed that an update has replaced since, in any
table. What is updated in place grows, and each look-up of such a row passes over more versions.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from math import ceil
from statistics import linear_regression, median

from benchmarks import load
from benchmarks.bench import RUN_SECONDS, Bench
from benchmarks.load import Load
from benchmarks.marks import Values
from benchmarks.rig import OURS, Count, Rig, Site, connected, running
from benchmarks.runs import latency, rate, ready, records
from demo.processes import Service

SIDES = {"open": True, "none": False}
"""The runs, and whether a transaction is open in them."""
PER_SECOND = 1_000
LENGTH = 1.5
"""Of a run, by the minutes that the memory is watched: 15 of 10."""
MOMENTS = (1, 5, 10, 12, 15)
"""Minutes of a run of full length of which the page tells."""
CLOSED = 12
"""The minute in which the transaction ends."""
TABLES = {
    "position": "position",
    "outbox_cursor": "outbox_cursor",
    "outbox_relay": "outbox_relay",
    "backlog_lane": "backlog_lane",
    "inbox": "inbox_g[0-9]+",
    "outbox": "outbox_p[0-9]+",
    "parcel": "parcel",
}
"""Those that are written to, with what their names, or those of their partitions, look like; the
last one is the handler's."""
HOT = ("position", "outbox_cursor", "outbox_relay", "backlog_lane")
"""Those of the engine whose rows are updated."""
SERIES = ("rate", "p50", "p99", "cpu_python", "cpu_postgres", "hot_bytes", "hot_dead")
"""Figures that the report has of each window."""
_WINDOW_SECONDS = 10.0
_FEWEST = 5
"""Windows of the shortest run."""
_LEAST_SECONDS = 0.1
"""Of a window, in addition to those in which connections warm up."""

_SIZES = """
SELECT name, sum(pg_total_relation_size(relid))::float AS bytes, sum(n_dead_tup)::float AS dead
  FROM unnest($1::text[], $2::text[]) AS looks (name, pattern)
  JOIN pg_stat_user_tables ON relname ~ ('^' || pattern || '$')
 WHERE schemaname = 'pipeline' OR relname = 'parcel'
 GROUP BY name
"""


async def xmin(bench: Bench) -> None:
    """Watch our service beside an open transaction, and without one."""
    seconds = LENGTH * bench.options.minutes * 60
    await bench.rounds(
        "xmin",
        {who: partial(_measured, bench, who, seconds) for who in SIDES},
        rounds=1,
        warm_up=False,
        limit=3 * seconds + RUN_SECONDS,
        again=False,
    )


async def _measured(bench: Bench, who: str, seconds: float) -> Values:
    """Send a load in windows; return each figure at the moments, and by how much it grows a minute.

    The figures of each window are noted as series.
    """
    rig = bench.rig
    works = windows(seconds)
    found: list[Values] = []
    async with rig.fresh_topic() as input_, rig.site(OURS, input_) as site:
        service = rig.process(site)
        async with running(service), rig.counted(site.output) as published, AsyncExitStack() as old:
            await ready(site, [service])
            if SIDES[who]:
                await old.enter_async_context(_open_transaction(site.database))
            for number, work in enumerate(works):
                if number == place_of(CLOSED, len(works)) + 1:
                    await old.aclose()
                found.append(await _window(rig, site, service, published, work))
        await rig.check(site, *works)
    for of in SERIES:
        bench.book.series[series_name(who, of)] = [
            (round(one["minute"], 2), round(one[of], 3))
            for one in timed(found, seconds)
            if of in one
        ]
    return summary(found, seconds)


def windows(seconds: float) -> list[Load]:
    """Return the loads of so many seconds, one for each window."""
    count = max(_FEWEST, round(seconds / _WINDOW_SECONDS))
    warm_up = records(0, PER_SECOND)
    size = max(warm_up + ceil(_LEAST_SECONDS * PER_SECOND), round(seconds / count * PER_SECOND))
    return [load.make(1_000, size, first=n * size, seed=n) for n in range(count)]


def place_of(minute: int, count: int) -> int:
    """Return which of so many windows ends in a minute of the full length."""
    return ceil(minute / MOMENTS[-1] * count) - 1


def series_name(who: str, of: str) -> str:
    """Return the name of a figure of a side over time."""
    return f"xmin, {who}: {of}"


def timed(found: Sequence[Values], seconds: float) -> list[dict[str, float]]:
    """Return the figures of windows with the minute in which each has ended."""
    each = seconds / 60 / len(found)
    return [{**one, "minute": n * each} for n, one in enumerate(found, 1)]


def summary(found: Sequence[Values], seconds: float) -> Values:
    """Return the figures at the moments, and how much they grow a minute until the last but one.

    A window in which the machine was saturated has no latencies.
    """
    before = timed(found, seconds)[: place_of(CLOSED, len(found)) + 1]
    values: dict[str, float] = {}
    for of in dict.fromkeys(of for one in found for of in one):
        for minute in MOMENTS:
            if of in (one := found[place_of(minute, len(found))]):
                values[f"{of} at {minute}"] = one[of]
        points = [(one["minute"], one[of]) for one in before if of in one]
        if len(points) > 1:
            values[f"{of} a minute"] = linear_regression(*zip(*points, strict=True)).slope
        if points and of in ("rate", "p50", "p99"):
            values[of] = median(value for _, value in points)
    return values


@asynccontextmanager
async def _open_transaction(database: str) -> AsyncIterator[None]:
    """Hold a transaction open that has a snapshot and a transaction id."""
    async with (
        connected(database) as connection,
        connection.transaction(isolation="repeatable_read"),
    ):
        await connection.execute("SELECT pg_current_xact_id()")
        yield


async def _window(rig: Rig, site: Site, service: Service, published: Count, work: Load) -> Values:
    """Send a load; return rate, latencies, CPU for a message in ms, sizes and dead rows.

    A saturated machine gives no latencies.
    """
    before = await published()

    async def count() -> int:
        return await published() - before

    watching = asyncio.create_task(rig.watch([service], count, work.events))
    try:
        took = await latency(rig, site, [service], work, per_second=PER_SECOND)
        samples = await watching
    finally:
        watching.cancel()
    return {
        **{of: took[of] for of in ("p50", "p99") if of in took},
        **rate(samples, len(work.scans)),
        **await _sizes(site),
    }


async def _sizes(site: Site) -> dict[str, float]:
    """Return bytes with indexes, and dead rows, of each table, and those of the hot ones in all."""
    async with connected(site.database) as connection:
        rows = await connection.fetch(_SIZES, [*TABLES], [*TABLES.values()])
    sizes = {f"{row['name']}_bytes": row["bytes"] for row in rows}
    sizes |= {f"{row['name']}_dead": row["dead"] for row in rows}
    return sizes | {
        f"hot_{of}": sum(sizes[f"{name}_{of}"] for name in HOT) for of in ("bytes", "dead")
    }
