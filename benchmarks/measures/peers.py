"""Peers: other packages for inbox and outbox beside ours, in an environment of their own."""

from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from benchmarks import load
from benchmarks.bench import Bench, Book, Runner
from benchmarks.interpreter import Interpreter, chosen, environment
from benchmarks.marks import Values, ratios
from benchmarks.measures.throughput import USUAL_SCANS
from benchmarks.rig import OURS, Contestant
from benchmarks.runs import Throughput
from demo.processes import ProcessFailed

PEERS = {
    "omni-box": "0.3.1",
    "faststream-outbox": "0.19.0",
    "pactix": "0.2.0",
    "txoutbox": "0.2.2",
}
"""Their versions."""
SAME = ("aiokafka", "asyncpg", "cramjam", "pydantic", "sqlalchemy", "uvloop")
"""What they use of the same version as ours."""
KEYS = 1_000
_OLDEST = (3, 12)


async def peers(bench: Bench) -> None:
    """Compare ours with the fastest of them, both with the same Python."""
    try:
        interpreter = bench.rig.interpreter
        if interpreter is None or interpreter.version < _OLDEST:
            interpreter = chosen(None, _OLDEST)
        python = await installed(bench.rig.folder, interpreter)
        ours = await bench.rig.environment(interpreter)
    except ProcessFailed as failure:
        bench.say("peers", f"left out: {failure}")
        bench.mark("against the best peer", [])
        return
    bench.book.interpreters["peers"] = str(interpreter)
    bench.say("peers", str(interpreter))
    few = load.make(KEYS, min(USUAL_SCANS, max(1, bench.options.events // 10)))
    many = load.make(KEYS, bench.options.events)
    group: dict[str, Runner] = {
        "ours": partial(Throughput(replace(OURS, python=ours), many), bench.rig)
    }
    for name in PEERS:
        who = Contestant(name, f"benchmarks.peers.{name.replace('-', '_')}", python=python)
        group[name] = partial(Throughput(who, few), bench.rig)
    await bench.rounds("peers", group)
    fastest = best(bench.book)
    times = ratios(bench.found("peers", "ours"), fastest)
    bench.mark("against the best peer", times, [one["rate"] for one in fastest])


def best(book: Book) -> list[Values]:
    """Return what the fastest peer of each round has shown."""
    found = filter(None, (book.rounds("peers", name) for name in PEERS))
    return [max(ones, key=lambda one: one["rate"]) for ones in zip(*found, strict=True)]


async def installed(folder: Path, interpreter: Interpreter) -> Path:
    """Return the Python of an environment that has the peers. Raises `ProcessFailed`."""
    wanted = PEERS | {name: version(name) for name in SAME}
    words = (f"{name}=={one}" for name, one in wanted.items())
    return await environment(interpreter, folder, "peers", *words, log=folder / "peers.txt")
