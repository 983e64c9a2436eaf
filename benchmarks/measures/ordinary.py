"""Ordinary traffic: what a message costs, and how long it takes, far below full load."""

from functools import partial

from benchmarks import load
from benchmarks.bench import Bench
from benchmarks.marks import Values
from benchmarks.rig import BARE_ORM, OURS, USUAL, Contestant, running
from benchmarks.runs import asking, latency, ready, records, stream

RATES = (30, 100, 300, 1_000, 3_000)
FEW, MANY = 1, 12
"""Partitions."""
CONTESTANTS = (OURS, BARE_ORM, USUAL)
SIDES = (
    *((USUAL, FEW), (BARE_ORM, FEW), (OURS, FEW)),
    *((OURS, MANY), (BARE_ORM, MANY), (USUAL, MANY)),
)
"""Who runs, on how many partitions; neighbours are compared."""
_MOST_OF_USUAL = 100
"""Messages a second that `usual` can keep up with."""
_FIRST_SECONDS = 0.1
"""In addition to those in which connections warm up."""
_P99_BEFORE = 10.0
"""Milliseconds at 100/s, when each transaction was of one partition."""
_COMMITS = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"


async def ordinary(bench: Bench) -> None:
    """Compare ours with the others at several rates, on one partition and on a dozen."""
    await bench.rounds(
        "ordinary",
        *(
            {
                named(who, rate, partitions): partial(_measured, bench, who, rate, partitions)
                for who, partitions in SIDES
                if who is not USUAL or rate <= _MOST_OF_USUAL
            }
            for rate in RATES
        ),
        warm_up=False,
    )
    hold_against_goals(bench)


def hold_against_goals(bench: Bench) -> None:
    """Note what came of the goals; all are of a dozen partitions."""
    for rate in (300, 1_000):
        ours = named(OURS, rate, MANY)
        bench.compare(f"{rate:,}/s, CPU", ours, named(OURS, rate, FEW), of="cpu")
        bare = named(BARE_ORM, rate, MANY)
        bench.compare(f"{rate:,}/s, CPU against bare-orm", ours, bare, of="cpu")
    for rate, of in (
        (300, "core"),
        (1_000, "commits"),
        (1_000, "p50"),
        (3_000, "p50"),
        (100, "p50"),
    ):
        bench.mark_figure(f"{rate:,}/s, {of}", named(OURS, rate, MANY), of)
    bench.compare(
        "100/s, p99",
        named(OURS, 100, MANY),
        named(BARE_ORM, 100, MANY),
        of="p99",
        at_least=_P99_BEFORE,
    )


def named(who: Contestant, rate: int, partitions: int) -> str:
    """Return the name of a contestant's runs."""
    return f"{who.name} at {rate}/s on {partitions}"


async def _measured(bench: Bench, who: Contestant, rate: int, partitions: int) -> Values:
    """Return quantiles in ms, CPU in ms and commits for a message, and the share of a core.

    What the start takes does not count: some messages have been handled before.
    """
    rig, first = bench.rig, load.make(1_000, records(_FIRST_SECONDS, rate))
    sent = load.make(1_000, records(bench.options.seconds, rate), first=len(first.scans))
    async with (
        rig.fresh_topic(partitions) as input_,
        rig.site(who, input_, partitions) as site,
        asking(site, _COMMITS) as commits,
    ):
        service = rig.process(site)
        async with running(service):
            await ready(site, [service])
            await latency(rig, site, [service], first, per_second=rate)

            committed, number = await commits(), len(sent.scans)
            streamed = await stream(rig, site, [service], sent, per_second=rate)
            committed = await commits() - committed
        await rig.check(site, first, sent)
    counted = len(streamed.sent)
    cpu = {f"cpu_{name}": spent / counted * 1_000 for name, spent in streamed.cpu.items()}
    if "cpu_postgres" in cpu:  # a container's is unknown
        cpu["cpu"] = cpu["cpu_python"] + cpu["cpu_postgres"]
    core = streamed.cpu["python"] / counted * rate
    return {**streamed.values(), **cpu, "core": core, "commits": committed / number}
