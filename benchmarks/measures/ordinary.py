"""Ordinary traffic: what a message costs, and how long it takes, far below full load."""

from functools import partial

from benchmarks import load
from benchmarks.bench import Bench
from benchmarks.marks import Values, ratios
from benchmarks.rig import BARE_ORM, OURS, USUAL, Contestant, process_seconds, running
from benchmarks.runs import asking, latency, ready, records

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
        found = bench.found("ordinary", named(OURS, rate, MANY))
        bench.mark(f"{rate:,}/s, {of}", [one[of] for one in found])
    bare_p99s = [one["p99"] for one in bench.found("ordinary", named(BARE_ORM, 100, MANY))]
    at_most = [max(_P99_BEFORE, one) for one in bare_p99s]
    found = bench.found("ordinary", named(OURS, 100, MANY))
    bench.mark("100/s, p99", ratios(found, [{"p99": one} for one in at_most], "p99"), at_most)


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

            def spent() -> dict[str, float]:
                return {"python": process_seconds(service.pid or 0), **rig.servers_cpu()}

            before, committed, number = spent(), await commits(), len(sent.scans)
            values = await latency(rig, site, [service], sent, per_second=rate)
            took = {name: one - before.get(name, 0.0) for name, one in spent().items()}
            committed = await commits() - committed
        await rig.check(site, first, sent)
    cpu = {f"cpu_{name}": one / number * 1_000 for name, one in took.items()}
    if "cpu_postgres" in cpu:  # in a container nobody sees it
        cpu["cpu"] = cpu["cpu_python"] + cpu["cpu_postgres"]
    core = took["python"] / number * rate
    return {**values, **cpu, "core": core, "commits": committed / number}
