"""Throughput: consume, transaction, published, by every contestant and with keys of every kind."""

from functools import partial

from benchmarks import load
from benchmarks.bench import Bench
from benchmarks.load import FLIGHTS, Keys, Load
from benchmarks.marks import ratios
from benchmarks.rig import BARE, BARE_ORM, OURS, OURS_SQL, USUAL, Contestant
from benchmarks.runs import Throughput

USUAL_SCANS = 2_000
"""As many as take the usual way some seconds."""
KEYS: tuple[Keys, ...] = (1_000, 10, 1, FLIGHTS)


def named(keys: Keys) -> str:
    """Return how people call the keys."""
    return FLIGHTS if keys == FLIGHTS else f"{keys:,} key{'' if keys == 1 else 's'}"


async def throughput(bench: Bench) -> None:
    """Compare ours with bare and usual."""
    loads = {keys: load.make(keys, bench.options.events) for keys in KEYS}
    runs: dict[str, tuple[Contestant, Load]] = {}
    for keys, one in loads.items():
        runs[f"bare, {named(keys)}"] = BARE, one
        runs[f"ours, {named(keys)}"] = OURS, one
    runs["bare-orm, 1,000 keys"] = BARE_ORM, loads[1_000]
    runs["usual, 1,000 keys"] = USUAL, load.make(1_000, min(USUAL_SCANS, bench.options.events))
    runs["ours-sql, 1,000 keys"] = OURS_SQL, loads[1_000]
    await bench.rounds(
        "throughput",
        {name: partial(Throughput(who, what), bench.rig) for name, (who, what) in runs.items()},
    )
    found = partial(bench.found, "throughput")
    for keys in KEYS:
        of = named(keys)
        bench.mark(f"ORM handler, {of}", ratios(found(f"ours, {of}"), found(f"bare, {of}")))
    ours = found("ours, 1,000 keys")
    bench.mark("ORM handler, against usual", ratios(ours, found("usual, 1,000 keys")))
    bench.mark("SQL handler", ratios(found("ours-sql, 1,000 keys"), found("bare, 1,000 keys")))
    bench.mark("hot key", ratios(found("ours, 1 key"), ours))
