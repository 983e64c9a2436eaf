"""Idle: what a service costs that has nothing to do, PostgreSQL's part included."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial

from benchmarks.bench import Bench
from benchmarks.marks import Values
from benchmarks.rig import OURS, running
from benchmarks.runs import ready
from benchmarks.usage import process_seconds

_SETTLE_SECONDS = 5.0
_LONGER = 1.5
"""Times as long as latencies are measured."""


async def idle(bench: Bench) -> None:
    """Compare the servers with a service that idles with the servers alone."""
    await bench.rounds(
        "idle",
        {
            "nobody": partial(_watched, bench, is_there=False),
            "ours": partial(_watched, bench, is_there=True),
        },
        warm_up=False,
    )
    rounds = zip(bench.found("idle", "ours"), bench.found("idle", "nobody"), strict=True)
    bench.mark(
        "idle service",
        [
            with_["python"] + with_["postgres"] - without["postgres"]
            for with_, without in rounds
            if "postgres" in with_  # in a container nobody sees it
        ],
    )


async def _watched(bench: Bench, *, is_there: bool) -> Values:
    """Return the share of a core that each process takes, in percent."""
    rig = bench.rig
    async with rig.fresh_topic() as input_, rig.site(OURS, input_) as site, AsyncExitStack() as run:
        service = rig.process(site)
        if is_there:
            await run.enter_async_context(running(service))
            await ready(site, [service])
        await asyncio.sleep(_SETTLE_SECONDS)

        def spent() -> dict[str, float]:
            python = process_seconds(service.pid) if service.pid else 0.0
            return {"python": python, **rig.servers_cpu()}

        before, seconds = spent(), _LONGER * bench.options.seconds
        await asyncio.sleep(seconds)
        after = spent()
        shares = {name: (after[name] - before[name]) / seconds * 100 for name in after}
        return {**shares, "share": shares["python"] + shares.get("postgres", 0.0)}
