"""Report edits of the engine: `python dev/engine.py` lists files that differ from the template's.

`.engine.sha256` has the checksums of its files; `sha256sum --check .engine.sha256` reads it, too.
Edits are allowed, as the engine belongs to the service: the exit code is 0.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

CHECKSUMS = ".engine.sha256"
TESTS = "tests/pipeline"

WARNING = """warning: the engine was edited:
{differences}
The contract suite (tests/contract) tests its promises, but not all its details. Add the engine's
own tests: make update ANSWERS="engine_tests=yes". If the edit was a mistake, restore these files.
"""


def differences(root: Path) -> list[str]:
    """Return a line for each file of the engine that is changed, added or missing."""
    lines = (root / CHECKSUMS).read_text("utf-8").splitlines()
    written = {path: checksum for checksum, path in (line.split("  ", 1) for line in lines)}
    folders = {"/".join(path.split("/")[:2]) for path in written}
    found = {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in folders
        for path in (root / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }
    what = {
        "changed": {one for one in written.keys() & found if written[one] != found[one]},
        "added": found.keys() - written,
        "missing": written.keys() - found,
    }
    return [f"  {kind:7}  {path}" for kind, paths in what.items() for path in sorted(paths)]


def main(root: Path) -> None:
    """Print a warning if the engine was edited and the service does not have the engine's tests."""
    if (root / TESTS).exists():
        return
    if not (root / CHECKSUMS).exists():
        print(f"{CHECKSUMS} is missing: edits of the engine can't be detected", file=sys.stderr)
    elif found := differences(root):
        print(WARNING.format(differences="\n".join(found)), end="", file=sys.stderr)


if __name__ == "__main__":
    main(Path(__file__).resolve().parents[1])
