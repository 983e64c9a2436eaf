"""How far the engine has changed since a commit: figures of an older engine must say so."""

import re
import subprocess
from pathlib import Path

from demo.flights import ROOT

ENGINE = "<<cookiecutter.service_name>>/src/onceward"
_ROOMS = re.findall(r"`(\w+)/`", (ROOT / ENGINE / "README.md").read_text("utf-8"))
_PLACES = (
    *(f"{ENGINE}/{room}" for room in _ROOMS),
    f":(glob){ENGINE}/*.py",
    "<<cookiecutter.service_name>>/src/pipeline",
)
"""Where the engine is, without the packages next to it; the last one is of version 1."""
OLDEST = 15
"""Commits of the engine after which figures are neither shown nor released."""


def changes_since(commit: str, root: Path = ROOT) -> int | None:
    """Return how many commits have changed the engine since; edits not committed count as one.

    None if the commit is not in the history of HEAD: in a shallow clone, or on another branch.
    """
    if _git(root, "merge-base", "--is-ancestor", commit, "HEAD") is None:
        return None
    count = _git(root, "rev-list", "--count", f"{commit}..HEAD", "--", *_PLACES)
    edited = _git(root, "status", "--porcelain", "--", *_PLACES)
    return None if count is None else int(count) + bool(edited)


def has_history(root: Path = ROOT) -> bool:
    """Return whether this is a repository with all of its commits."""
    return _git(root, "rev-parse", "--is-shallow-repository") == "false"


def _git(root: Path, *words: str) -> str | None:
    """Return what git writes; None if it fails."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
