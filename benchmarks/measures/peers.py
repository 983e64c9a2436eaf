"""Peers: other packages for inbox and outbox beside ours, in an environment of their own."""

import os
import shutil
import sys
from collections.abc import Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path

from benchmarks import load
from benchmarks.bench import Bench, Book, Runner
from benchmarks.marks import Values, ratios
from benchmarks.measures.throughput import USUAL_SCANS
from benchmarks.rig import OURS, Contestant
from benchmarks.runs import Throughput
from demo.processes import ProcessFailed, run

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
    """Compare ours with the fastest of them."""
    try:
        python = await installed(bench.rig.folder)
    except ProcessFailed as failure:
        bench.say("peers", f"left out: {failure}")
        bench.mark("against the best peer", [])
        return
    few = load.make(KEYS, min(USUAL_SCANS, max(1, bench.options.events // 10)))
    group: dict[str, Runner] = {
        "ours": partial(Throughput(OURS, load.make(KEYS, bench.options.events)), bench.rig)
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


async def installed(folder: Path) -> Path:
    """Return the Python of an environment that has the peers. Raises `ProcessFailed`."""
    log = folder / "peers.txt"
    environment = folder / "peers"
    python = environment / "bin" / "python"
    await run([await _found(log), "-m", "venv", environment], log=log)
    wanted = PEERS | {name: version(name) for name in SAME}
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    await run([*pip, *(f"{name}=={one}" for name, one in wanted.items())], log=log)
    return python


async def _found(log: Path) -> str:
    """Return a Python that is new enough. Raises `ProcessFailed` if there is none."""
    check = f"import sys; sys.exit(sys.version_info < {_OLDEST})"
    for python in _pythons():
        try:
            await run([python, "-c", check], log=log)
        except (ProcessFailed, OSError):
            continue
        return python
    raise ProcessFailed(f"no Python {'.'.join(map(str, _OLDEST))} or newer was found")


def _pythons() -> Iterable[str]:
    """Yield ours, those that are called by their version, and those of pyenv."""
    yield sys.executable
    yield from filter(None, (shutil.which(f"python3.{minor}") for minor in (14, 13, 12)))
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, pyenv.glob("versions/3.*/bin/python"))
