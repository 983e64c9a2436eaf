"""Duplicates: a topic that is replayed, beside the same topic when it was new."""

from functools import partial

from benchmarks import load
from benchmarks.bench import Bench
from benchmarks.load import Load
from benchmarks.marks import Values
from benchmarks.rig import OURS, Site, running
from benchmarks.runs import positions, rate


async def duplicates(bench: Bench) -> None:
    """Compare how fast our service passes over what it knows with how fast it takes what is new."""
    one = load.make(1_000, bench.options.events)
    await bench.rounds("duplicates", {"ours": partial(_twice, bench, one)})
    found = bench.found("duplicates", "ours")
    new = [values["rate"] for values in found]
    replayed = [values["replayed_rate"] for values in found]
    bench.mark("duplicates only", [two / one for one, two in zip(new, replayed, strict=True)], new)


async def _twice(bench: Bench, load_: Load) -> Values:
    async with bench.rig.site(OURS, await bench.rig.input(load_)) as site:
        new = await _pass(bench, site, load_)
        await bench.rig.seek_to_earliest(site)
        replayed = await _pass(bench, site, load_)
    return {**new, **{f"replayed_{name}": value for name, value in replayed.items()}}


async def _pass(bench: Bench, site: Site, load_: Load) -> Values:
    """Let the service go through the whole topic, measured by its positions."""
    rig = bench.rig
    service = rig.process(site)
    async with running(service), rig.counted(site.output) as published:
        async with positions(site) as consumed:
            samples = await rig.watch([service], consumed, len(load_.scans))
        await rig.watch([service], published, load_.events)
    await rig.check(site, load_)
    return rate(samples, len(load_.scans))
