"""Throughput: consume, transaction, published, by every contestant and with keys of every kind."""

from functools import partial

from benchmarks import load
from benchmarks.bench import Bench, Runner
from benchmarks.load import FLIGHTS, Keys, Load
from benchmarks.rig import BARE, BARE_ORM, OURS, OURS_SQL, USUAL, Contestant
from benchmarks.runs import Throughput

USUAL_SCANS = 2_000
"""As many as take the usual way some seconds; a tenth of the others' if these are few."""
KEYS: tuple[Keys, ...] = (1_000, 10, 1, FLIGHTS)
AGAIN = " (again)"


def named(keys: Keys) -> str:
    """Return how people call the keys."""
    return FLIGHTS if keys == FLIGHTS else f"{keys:,} key{'' if keys == 1 else 's'}"


async def throughput(bench: Bench) -> None:
    """Compare ours with bare and usual."""
    few = min(USUAL_SCANS, max(1, bench.options.events // 10))
    loads = {keys: load.make(keys, bench.options.events) for keys in KEYS}

    def run(who: Contestant, what: Load) -> Runner:
        return partial(Throughput(who, what), bench.rig)

    # Neighbours are compared. Two of ours are run twice, so that each pair is one of neighbours.
    groups: list[dict[str, Runner]] = []
    for keys, one in loads.items():
        of = named(keys)
        groups.append(
            {
                f"ours, {of}": run(OURS, one),
                f"bare, {of}": run(BARE, one),
                f"ours-sql, {of}": run(OURS_SQL, one),
            }
        )
    thousand, single = loads[1_000], loads[1]
    groups[0]["bare-orm, 1,000 keys"] = run(BARE_ORM, thousand)
    groups.append(
        {
            "usual, 1,000 keys": run(USUAL, load.make(1_000, few)),
            f"ours, 1,000 keys{AGAIN}": run(OURS, thousand),
            f"ours, 1 key{AGAIN}": run(OURS, single),
        }
    )
    await bench.rounds("throughput", *groups)
    for of in map(named, KEYS):
        bench.compare(f"SQL handler, {of}", f"ours-sql, {of}", f"bare, {of}")
    bench.compare("ORM handler, 1,000 keys", "ours, 1,000 keys", "bare-orm, 1,000 keys")
    bench.compare("hot key", f"ours, 1 key{AGAIN}", f"ours, 1,000 keys{AGAIN}")
