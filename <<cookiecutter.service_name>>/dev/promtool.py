"""Prometheus' own tool, which checks and tests rules: `python dev/promtool.py` prints where it is.

The one on PATH, or else built once for all projects of this user, with Go.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = "v0.313.4"
"""Of the module: Prometheus 3.13.4."""
PACKAGE = "github.com/prometheus/prometheus/cmd/promtool"
NO_GO = 3
"""Exit code where there is nothing to build it with."""


def find() -> Path:
    """Return it; builds it if need be, which takes some minutes. Exits where that is impossible."""
    if found := shutil.which("promtool"):
        return Path(found)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dev-stack"
    program = caches / f"promtool-{VERSION}"
    if program.exists():
        return program
    go = shutil.which("go")
    if go is None:
        print("There is neither promtool nor Go, which builds it, on PATH.", file=sys.stderr)
        sys.exit(NO_GO)
    caches.mkdir(parents=True, exist_ok=True)
    with (caches / "promtool-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            with tempfile.TemporaryDirectory(prefix="promtool-", dir=caches) as work:
                build(go, Path(work)).rename(program)
    return program


def build(go: str, work: Path) -> Path:
    """Build it in an empty module: `go install` refuses modules that replace others."""
    print(f"building promtool {VERSION}, once for all projects", file=sys.stderr)
    for step in (
        ["mod", "init", "promtool"],
        ["get", f"{PACKAGE}@{VERSION}"],
        ["build", "-tags", "remove_all_sd", "-o", "promtool", PACKAGE],  # it discovers nothing
    ):
        done = subprocess.run([go, *step], cwd=work, capture_output=True, text=True)
        if done.returncode != 0:
            print(done.stderr, file=sys.stderr)
            sys.exit(f"go {step[0]} failed: promtool cannot be built")
    return work / "promtool"


if __name__ == "__main__":
    print(find())
