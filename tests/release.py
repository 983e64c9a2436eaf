"""`make release`: the last commit of a release, with a dump of its database, and its tag.

The version is that of `cookiecutter.json` and of the changelog's first heading. Tags do not travel
with every clone, so the next commit adds the release to `releases.json`. Neither is pushed or
tested: docs/contributing.md says what comes before and after. A release whose figures of throughput
and latency are of an older engine is refused.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import engine

from tests.baked import RAW, ROOT

DUMPS = ROOT / "tests" / "releases"
CHANGELOG = ROOT / "CHANGELOG.md"
RELEASES = ROOT / "releases.json"
REPORT = ROOT / "docs" / "performance" / "report.json"
REQUIRED = ("throughput", "latency")
"""The measures that a release must have of its own engine, nearly."""


def git(*arguments: str) -> str:
    """Run git in this repository, and return what it wrote."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"git {arguments[0]} failed")
    return done.stdout.strip()


def dumps(*arguments: str | Path) -> str:
    """Run `tests/releases/dumps.py` with the engine of the raw tree, and return what it wrote."""
    paths = os.pathsep.join(map(str, (RAW / "src", RAW / "dev", RAW)))
    done = subprocess.run(
        [sys.executable, DUMPS / "dumps.py", *arguments],
        cwd=RAW,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode != 0:
        print(done.stdout)
        raise SystemExit(f"dumps.py {' '.join(map(str, arguments))} failed")
    return done.stdout


def with_day(version: str, changelog: str, day: str) -> str:
    """Return the changelog with the day of the release. Raises `SystemExit` if it has another."""
    heading = f"\n## {version} (unreleased)\n"
    if changelog.count(heading) != 1:
        raise SystemExit(
            f"CHANGELOG.md has no heading `{heading.strip()}`, with the version of"
            " cookiecutter.json: begin the next version in both files"
        )
    return changelog.replace(heading, f"\n## {version} ({day})\n")


def released() -> list[dict[str, str]]:
    """Return version, commit and day of each release, the oldest first."""
    listed: list[dict[str, str]] = json.loads(RELEASES.read_text("utf-8"))
    return listed


def unlisted(listed: Sequence[Mapping[str, str]], changelog: str) -> list[str]:
    """Return the changelog's newest version, if it has a day and is not listed.

    So it is at the commit of a release, which the next commit lists.
    """
    newest = re.search(r"(?m)^## (\S+) \((.+)\)$", changelog)
    assert newest is not None
    version, day = newest.groups()
    is_listed = version in {one["version"] for one in listed}
    return [] if is_listed or day == "unreleased" else [version]


def require_figures(report: Mapping[str, Any], root: Path = ROOT) -> None:
    """Raise `SystemExit` if a required measure is missing, or of an engine that is too old."""
    for name in REQUIRED:
        commit = report["measured"].get(name, {}).get("commit")
        changes = engine.changes_since(commit, root) if commit else None
        if commit is None:
            fault = f"{name} was not measured"
        elif changes is None:
            fault = (
                f"{name} was measured on {commit[:7]}, which is not in the history of this commit"
            )
        elif changes > engine.OLDEST:
            fault = (
                f"{name} was measured on {commit[:7]}: {changes} commits have changed the engine"
                f" since, at most {engine.OLDEST} may"
            )
        else:
            continue
        raise SystemExit(f"{fault}; run make bench ONLY={','.join(REQUIRED)} KEEP_PLOTS=1")


def main() -> None:
    """Make the release."""
    version = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))["_template_version"]
    if git("status", "--porcelain"):
        raise SystemExit("there are changes that are not committed")
    if version in {one["version"] for one in released()}:
        raise SystemExit(f"{RELEASES.name} has version {version} already")
    if git("tag", "--list", f"v{version}"):
        raise SystemExit(f"there is a tag v{version} already")
    require_figures(json.loads(REPORT.read_text("utf-8")))
    day = f"{datetime.now(UTC):%Y-%m-%d}"
    changelog = with_day(version, CHANGELOG.read_text("utf-8"), day)
    (DUMPS / f"{version}.sql").write_text(dumps("make", version), "utf-8")
    CHANGELOG.write_text(changelog, "utf-8")
    git("add", "CHANGELOG.md", "tests/releases")
    git("commit", "--quiet", "--message", f"Release {version}")
    git("tag", "--annotate", f"v{version}", "--message", f"Release {version}")
    entry = {"version": version, "commit": git("rev-parse", "HEAD"), "day": day}
    RELEASES.write_text(json.dumps([*released(), entry], indent=4) + "\n", "utf-8")
    git("commit", "--quiet", "--message", f"List release {version}", RELEASES.name)
    print(f"Release {version} is committed, tagged v{version} and listed, and not pushed.")


if __name__ == "__main__":
    main()
