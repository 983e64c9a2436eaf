"""What the figures were taken on."""

import os
import platform
import re
from pathlib import Path

import asyncpg  # type: ignore[import-untyped]

from demo.processes import SETTINGS, Stack

_POSTGRES = ("server_version", "shared_buffers", "fsync", "synchronous_commit", "max_wal_size")


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
        "python": platform.python_version(),
        "postgresql": postgres,
        "kafka": _first(project / "dev" / "servers" / "kafka.py", r'KAFKA_VERSION = "(.+)"'),
        "servers": _first(stack.state / "state.json", r'"mode": "(.+)"') or "elsewhere",
        "settings": SETTINGS,
    }


def _first(file: Path, pattern: str) -> str | None:
    """Return what the first match in a file holds."""
    found = re.search(pattern, file.read_text()) if file.exists() else None
    return found[1] if found else None
