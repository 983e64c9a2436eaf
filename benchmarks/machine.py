"""What the figures were taken on, and of what; and what the machine gives just now."""

import os
import platform
import re
import subprocess
import time
from pathlib import Path
from statistics import median

import asyncpg  # type: ignore[import-untyped]

from demo.flights import ROOT
from demo.processes import Stack

_POSTGRES = ("server_version", "shared_buffers", "fsync", "synchronous_commit", "max_wal_size")


ADDRESSES = ("PIPELINE_DATABASE_URL", "PIPELINE_KAFKA_BOOTSTRAP_SERVERS")
"""What names servers that are there already."""
TIMES = Path("/proc/stat")
_BURSTS = 5
_STEPS = 200_000


def speed() -> float:
    """Return how fast a core is just now: millions of steps a second of a fixed computation."""
    took = []
    for _ in range(_BURSTS):
        began, number = time.perf_counter(), 0
        for step in range(_STEPS):
            number = (number * 31 + step) & 0xFFFF
        took.append(time.perf_counter() - began)
    return round(_STEPS / median(took) / 1e6, 2)


def stolen() -> float:
    """Return the seconds of the cores that the hypervisor has given to others; 0 off Linux."""
    steal = _first(TIMES, r"cpu +(?:\d+ ){7}(\d+)")
    return int(steal or 0) / os.sysconf("SC_CLK_TCK")


def source() -> dict[str, object]:
    """Return the commit of this template, and whether the files differ from it."""
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    return {"commit": commit, "dirty": commit is None or bool(changes)}


async def facts(stack: Stack, project: Path) -> dict[str, object]:
    """Return what a reader of the figures has to know."""
    connection = await asyncpg.connect(stack.database)
    try:
        postgres = {name: await connection.fetchval(f"SHOW {name}") for name in _POSTGRES}
    finally:
        await connection.close()
    return {
        "processor": _first(Path("/proc/cpuinfo"), r"model name\s*: (.+)") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "postgresql": postgres,
        "kafka": _first(project / "dev" / "servers" / "kafka.py", r'KAFKA_VERSION = "(.+)"'),
        "servers": _first(stack.state / "state.json", r'"mode": "(.+)"') or "elsewhere",
        "settings": {
            name: value
            for name, value in os.environ.items()
            if name.startswith("PIPELINE_") and name not in ADDRESSES
        },
    }


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _first(file: Path, pattern: str) -> str | None:
    """Return what the first match in a file holds."""
    found = re.search(pattern, file.read_text()) if file.exists() else None
    return found[1] if found else None
