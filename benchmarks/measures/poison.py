"""Poison: a load of which some messages fail in every attempt, beside the same without failures."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from benchmarks import load
from benchmarks.bench import Bench, Group
from benchmarks.check import require
from benchmarks.load import Load
from benchmarks.marks import Values
from benchmarks.rig import OURS, Contestant, Site, connected, running
from benchmarks.runs import asking, positions, rate
from benchmarks.work import is_poison

KINDS = {"rejects": "rejected", "raises": "that raise", "flush": "that fail in the flush"}
"""What becomes of the poison, by the handler of `benchmarks.ours`."""
SHARES = (0.01, 0.1)
KEYS = (10, 1_000)
ATTEMPTS = {"rejects": 1, "raises": 6, "flush": 6}
"""Those of the default policy."""
FASTER = 6_000
"""The delays of the default schedule, more than an hour in all, are divided by so much: poison
messages of a key are tried one after the other, and with ten keys there are up to 20 of each."""
_CLEAN = 20_000
"""Scans of a run in which none fails."""
_SCANS = {
    ("rejects", 0.01): 20_000,
    ("rejects", 0.1): 5_000,
    ("raises", 0.01): 10_000,
    ("raises", 0.1): 1_000,
    ("flush", 0.01): 2_000,
    ("flush", 0.1): 500,
}
"""Scans of the other runs, which cost up to hundreds of times as much a message."""
_GOALS = {"rejects": "1 % rejected, CPU", "raises": "1 % that raise, CPU"}

_SETTLED = """
SELECT ((SELECT sum(next_offset) FROM pipeline.position WHERE consumer_group = $1) = $2
        AND NOT EXISTS (SELECT FROM pipeline.backlog WHERE died_at IS NULL))::int
"""
_BACKLOG = "SELECT id, attempts, died_at IS NOT NULL FROM pipeline.backlog ORDER BY id"


async def poison(bench: Bench) -> None:
    """Compare by CPU, until every poison message is dead and every other one is applied."""
    await bench.rounds("poison", *(_group(bench, keys) for keys in KEYS), warm_up=False)
    for kind, goal in _GOALS.items():
        bench.compare(goal, named(1_000, kind, 0.01), named(1_000), of="per_cpu")


def named(keys: int, kind: str = "", share: float = 0.0) -> str:
    """Return the name of the runs with so many keys, of which a share fails in one way."""
    return f"{f'{share * 100:g} % {KINDS[kind]}' if kind else 'none failing'}, {keys:,} keys"


def _group(bench: Bench, keys: int) -> Group:
    failing = {
        named(keys, kind, share): partial(_measured, bench, keys, kind, share)
        for kind, share in product(KINDS, SHARES)
    }
    return {named(keys): partial(_measured, bench, keys), **failing}


async def _measured(bench: Bench, keys: int, kind: str = "", share: float = 0.0) -> Values:
    """Return the CPU of a message, in ms, whether it fails or not; and messages by CPU second."""
    rig = bench.rig
    work = load.make(keys, min(bench.options.events, _SCANS.get((kind, share), _CLEAN)))
    fine = replace(work, scans=[one for one in work.scans if not is_poison(one.number, share)])
    async with rig.site(_contestant(kind, share), await rig.input(work)) as site:
        service = rig.process(site)
        async with (
            running(service),
            rig.counted(site.output) as published,
            positions(site) as consumed,
            asking(site, _SETTLED, site.group, len(work.scans)) as settled,
        ):
            samples = await rig.watch([service], published, fine.events, begun=consumed)
            samples += await rig.watch([service], settled, 1)
        await rig.check(site, fine)
        await _check_dead(site, work, share, ATTEMPTS.get(kind, 0))
    return rate(samples, len(work.scans)) | {"scans": len(work.scans)}


def _contestant(kind: str, share: float) -> Contestant:
    settings = {"BENCH_POISON": str(share), "BENCH_FASTER": str(FASTER)}
    return replace(OURS, handler=kind, settings=settings) if kind else OURS


async def _check_dead(site: Site, work: Load, share: float, attempts: int) -> None:
    """Hold the backlog against the load. Raises `CheckFailed`."""
    async with connected(site.database) as connection:
        rows = [tuple(row) for row in await connection.fetch(_BACKLOG)]
    require(undead(rows, work, share, attempts), site.contestant.name)


def undead(
    rows: Sequence[tuple[str, int, bool]], work: Load, share: float, attempts: int
) -> list[str]:
    """Say which poison is not dead once after all its attempts, and what else is in the backlog.

    A row is the number of a scan, its attempts, and whether it is dead.
    """
    expected = [str(one.number) for one in work.scans if is_poison(one.number, share)]
    faults = [
        f"scan {id} is {'dead' if is_dead else 'waiting'} after {tried} attempts"
        for id, tried, is_dead in rows
        if not is_dead or tried != attempts
    ]
    if (found := sorted(row[0] for row in rows)) != sorted(expected):
        faults.append(f"{len(found):,} scans are in the backlog, it should be {len(expected):,}")
        faults += [f"scan {id} is in one alone" for id in sorted({*found} ^ {*expected})]
    return faults
