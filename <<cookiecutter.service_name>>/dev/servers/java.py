"""Java, and its programs: jars from Maven with their dependencies."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from servers.console import LOCALE, StackError, run_step, say
from servers.state import cache_folder, wait_for_lock

OLDEST_JAVA = 17
INSTALL_HINT = """\
  Debian, Ubuntu:  sudo apt-get install openjdk-17-jre-headless maven
                   (default-jre-headless if openjdk-17 is not available)
  Fedora:          sudo dnf install java-21-openjdk-headless maven
  macOS:           brew install openjdk maven
                   export JAVA_HOME="$(brew --prefix openjdk)"
or start Docker, which is used instead if its engine answers."""

POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>local</groupId>
  <artifactId>server</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
{dependencies}
  </dependencies>
</project>
"""
DEPENDENCY = """\
    <dependency>
      <groupId>{}</groupId>
      <artifactId>{}</artifactId>
      <version>{}</version>{}
    </dependency>"""
# An archive contains its dependencies.
ARCHIVE = """
      <classifier>{}</classifier>
      <type>tar.gz</type>
      <exclusions>
        <exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion>
      </exclusions>"""


@dataclass(frozen=True)
class Jars:
    """The jars of a server."""

    name: str
    version: str
    megabytes: int
    artifacts: tuple[str, ...]  # group:artifact:version, with :classifier for a tar.gz

    def pom(self) -> str:
        dependencies = []
        for artifact in self.artifacts:
            group, name, version, *classifier = artifact.split(":")
            archive = ARCHIVE.format(*classifier) if classifier else ""
            dependencies.append(DEPENDENCY.format(group, name, version, archive))
        return POM.format(dependencies="\n".join(dependencies))


def apt_install(*alternatives: str) -> None:
    """Install the first of these packages that exists, if apt-get exists and the user is root.

    Callers check the result.
    """
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return

    def apt_get(*arguments: str) -> None:
        with tempfile.NamedTemporaryFile(suffix=".log") as log:
            run_step(
                ["apt-get", "-q", *arguments],
                Path(log.name),
                f"apt-get {arguments[0]} failed. Install by hand:\n{INSTALL_HINT}",
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )

    say(f"installing {alternatives[0]}, which is missing, with apt-get")
    apt_get("update")
    for package in alternatives:
        if subprocess.run(["apt-cache", "show", package], capture_output=True).returncode == 0:
            apt_get("install", "-y", "--no-install-recommends", package)
            return


def find_java() -> Path | None:
    """Return the `java` of JAVA_HOME or PATH that is new enough; None without one."""
    candidates = [shutil.which("java")]
    if home := os.environ.get("JAVA_HOME"):
        candidates.insert(0, shutil.which("java", path=f"{home}/bin"))
    for candidate in filter(None, candidates):
        # The settings name the real program: `java` may be a launcher script.
        shown = subprocess.run(
            [candidate, "-XshowSettings:properties", "-version"], capture_output=True, text=True
        ).stderr
        properties = dict(re.findall(r"^\s+(java\.\S+) = (.*)$", shown, re.MULTILINE))
        version = properties.get("java.specification.version", "0").partition(".")[0]
        if version.isdigit() and int(version) >= OLDEST_JAVA:
            return Path(properties["java.home"], "bin", "java")
    return None


def require_java() -> Path:
    java = find_java()
    if java is None:
        apt_install("openjdk-17-jre-headless", "default-jre-headless")
        java = find_java()
    if java is None:
        raise StackError(
            f"A Java runtime, version {OLDEST_JAVA} or newer, is required, and neither JAVA_HOME "
            f"nor PATH has one. Install one:\n{INSTALL_HINT}"
        )
    return java


def require_jars(wanted: Jars, log: Path) -> Path:
    """Return the folder of the jars, downloaded once for all projects of a user."""
    caches = cache_folder()
    jars = caches / f"{wanted.name.lower()}-{wanted.version}"
    if jars.exists():
        return jars
    caches.mkdir(parents=True, exist_ok=True)
    with (caches / "lock").open("w") as lock:
        wait_for_lock(lock, "waiting for another download to finish")
        if not jars.exists():
            for leftover in caches.glob("download-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix="download-", dir=caches) as work:
                download(wanted, Path(work), log)
                # Renamed when complete, so that an unfinished download is never used.
                (Path(work) / "jars").rename(jars)
    return jars


def link_jars(home: Path, jars: Path) -> None:
    """Make the jars a folder of a server's home, so that its command line has no absolute path."""
    link = home / "jars"
    link.unlink(missing_ok=True)
    link.symlink_to(jars)


def download(wanted: Jars, work: Path, log: Path) -> None:
    if shutil.which("mvn") is None:
        apt_install("maven")
    maven = shutil.which("mvn")
    if maven is None:
        raise StackError(
            f"Maven is required once, to download {wanted.name}, and PATH has no `mvn`. "
            f"Install it:\n{INSTALL_HINT}"
        )
    say(
        f"downloading {wanted.name} {wanted.version} with Maven (about {wanted.megabytes} MB, once"
        " for all projects)"
    )
    (work / "pom.xml").write_text(wanted.pom())
    log.write_bytes(b"")
    start = shown = time.monotonic()

    def progress() -> None:
        nonlocal shown
        if time.monotonic() - shown >= 3:
            shown = time.monotonic()
            files = log.read_text(errors="replace").count("Downloaded from")
            say(f"  {files} files after {shown - start:.0f} s")

    run_step(
        [maven, "-B", "-f", "pom.xml", "dependency:copy-dependencies",
         "-DincludeScope=runtime", "-DoutputDirectory=jars"],
        log,
        f"Maven could not download {wanted.name}. Check the network and Maven's settings, then"
        " try again.",
        progress=progress,
        cwd=work,
        env={**os.environ, **LOCALE},
    )  # fmt: skip
    for archive in (work / "jars").glob("*.tar.gz"):
        run_step(
            ["tar", "-xzf", archive, "-C", archive.parent], log, f"{archive} can't be unpacked."
        )
        archive.unlink()
