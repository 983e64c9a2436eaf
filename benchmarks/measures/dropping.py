"""Dropping: whether a service at work notices that retention drops what is large.

One round of the service's own retention finds a generation and a day that are due. Somebody
reads both in a long transaction, for which it has to wait.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from functools import partial
from itertools import pairwise

import asyncpg  # type: ignore[import-untyped]

from benchmarks import load
from benchmarks.bench import Bench
from benchmarks.marks import Values
from benchmarks.measures.old_tables import OUTBOX, Past
from benchmarks.rig import OURS, PATIENCE, Sample, Site, connected, guarded, running
from benchmarks.runs import positions
from demo.processes import ProcessFailed

_SHARE = 0.5
"""A window, by the time that latencies are measured: 10 s of 20."""
_AT_MOST = 25_000
"""Messages a second for which the load must last; a faster service fails the run."""
_WINDOWS = 3.5
"""Before, during, after, and some for the start."""
_AT_LEAST = 50_000
"""Messages, however short the windows are."""
_DUE = 1.5
"""Windows after the start of the service, and as many later: the rounds of its retention."""
_LET_GO = 1.0
"""Windows after the first message, when both may go: in the next round they do."""
_READ = 0.3
"""Of a window somebody still reads both."""
_LOOK_SECONDS = 0.02

_MARKERS = 1_000_000
"""In the generation that is dropped."""
_OLD = date(2020, 1, 1)
_NEXT_DAY = datetime(2020, 1, 2, tzinfo=UTC)
_TOO_EARLY = 2**62
"""A transaction id past which no relay is: the day waits for it."""
_HOLD = "INSERT INTO pipeline.outbox_closed (day, xid) VALUES ($1, $2::text::xid8)"
_FREE_DAY = "UPDATE pipeline.outbox_closed SET xid = '3' WHERE day = $1"
_FREE_GENERATION = """
INSERT INTO pipeline.inbox_closed (generation, closed_at) VALUES ($1, '2020-01-01')
"""
_READ_BOTH = """
SELECT (SELECT count(*) FROM (SELECT FROM pipeline.inbox WHERE generation = $1 LIMIT 1) AS one),
       (SELECT count(*) FROM (SELECT FROM pipeline.outbox WHERE created_at < $2 LIMIT 1) AS one)
"""
_NO_ROUND = "SELECT finished_at >= started_at FROM pipeline.retention_round"
_ARE_THERE = """
SELECT count(*) FROM unnest($1::text[]) AS name WHERE to_regclass('pipeline.' || name) IS NOT NULL
"""


async def dropping(bench: Bench) -> None:
    """Compare the rate while a generation and a day are dropped with that before and after.

    And that with the same of a service that drops nothing meanwhile: rates fall and rise by
    themselves, too.
    """
    await bench.rounds(
        "dropping",
        {
            "ours": partial(_run, bench, drops=True),
            "nothing": partial(_run, bench, drops=False),
        },
        warm_up=False,
    )
    ours, nothing = bench.found("dropping", "ours"), bench.found("dropping", "nothing")
    pairs = zip(map(share_of, ours), map(share_of, nothing), strict=True)
    bench.mark(
        "dropping under load",
        [one / other if other else 0.0 for one, other in pairs],
        [one["during"] for one in nothing],
    )


def share_of(one: Values) -> float:
    """Return the rate meanwhile over that around it; 0 where nothing was seen.

    Windows of the shortest runs may lie within one transaction: they show nothing.
    """
    around = (one["before"] + one["after"]) / 2
    return one["during"] / around if around else 0.0


async def _run(bench: Bench, *, drops: bool) -> Values:
    rig = bench.rig
    seconds = _SHARE * bench.options.seconds
    work = load.make(1_000, max(_AT_LEAST, round(_WINDOWS * seconds * _AT_MOST)))
    who = replace(OURS, settings={"PIPELINE_RETENTION_INTERVAL": str(_DUE * seconds)})
    async with rig.site(who, await rig.input(work)) as site:
        generation = await _fill(bench, site)
        service = rig.process(site)
        async with (
            running(service),
            positions(site) as consumed,
            rig.counted(site.output) as published,
        ):
            consuming = asyncio.create_task(rig.watch([service], consumed, len(work.scans)))
            publishing = asyncio.create_task(rig.watch([service], published, work.events))
            try:
                began, took = await guarded(
                    _drop(site, generation, seconds, drops=drops), [service]
                )
                samples, sent = await consuming, await publishing
            finally:
                consuming.cancel()
                publishing.cancel()
        await rig.check(site, work)
    if samples[-1].at < began + 2 * seconds:
        raise ProcessFailed(f"the load was over too soon: more than {_AT_MOST:,} messages a second")
    values = {"seconds": took}
    for name, begin in {
        "before": began - seconds,
        "during": began,
        "after": began + seconds,
    }.items():
        end = begin + seconds
        values[name] = (_at(samples, end) - _at(samples, begin)) / seconds
        values[f"{name}_published"] = (_at(sent, end) - _at(sent, begin)) / seconds
        values[f"{name}_pause_ms"] = longest_pause(samples, begin, end) * 1_000
        values[f"{name}_published_pause_ms"] = longest_pause(sent, begin, end) * 1_000
    return values


async def _fill(bench: Bench, site: Site) -> int:
    """Write a generation and a day that are due, and held; returns the generation's number."""
    async with connected(site.database) as connection:
        past = Past(connection)
        generation = await past.close_generations(1, bench.scaled(_MARKERS))
        await past.fill_day(_OLD, bench.scaled(OUTBOX))
        await past.publish()
        await connection.execute(_HOLD, _OLD, str(_TOO_EARLY))
        await past.settle()
    return generation


async def _drop(site: Site, generation: int, seconds: float, *, drops: bool) -> tuple[float, float]:
    """Let both go in the middle of the work; returns when the round began that drops them.

    Also after how many seconds both were gone. If nobody `drops` them, the round finds nothing.
    """
    names = [f"inbox_g{generation}", f"outbox_p{_OLD:%Y%m%d}"]
    async with connected(site.database) as connection, connected(site.database) as reader:
        while not await connection.fetchval("SELECT count(*) FROM parcel"):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)
        await asyncio.sleep(_LET_GO * seconds)
        async with reader.transaction():
            await reader.fetchrow(_READ_BOTH, generation, _NEXT_DAY)
            if drops:
                await connection.execute(_FREE_DAY, _OLD)
                await connection.execute(_FREE_GENERATION, generation)
            began = await _while(connection, _NO_ROUND)
            await asyncio.sleep(_READ * seconds)
        return began, await _while(connection, _ARE_THERE, names) - began if drops else 0.0


async def _while(connection: asyncpg.Connection, question: str, *values: object) -> float:
    """Wait as long as the answer is yes; returns when it was no. Raises `ProcessFailed`."""
    limit = time.monotonic() + PATIENCE
    while await connection.fetchval(question, *values):
        if time.monotonic() > limit:
            raise ProcessFailed(f"not dropped within {PATIENCE:g} s: {question.strip()}")
        await asyncio.sleep(_LOOK_SECONDS)
    return time.monotonic()


def _at(samples: Sequence[Sample], time: float) -> int:
    return next((one.count for one in samples if one.at >= time), samples[-1].count)


def longest_pause(samples: Sequence[Sample], begin: float, end: float) -> float:
    """Return for how many seconds there was no progress at most, as seen between two times."""
    progress = [
        two.at for one, two in pairwise(samples) if two.count > one.count and begin < two.at < end
    ]
    return max(two - one for one, two in pairwise([begin, *progress, end]))
