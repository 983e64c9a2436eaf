"""Apache Kafka from its Maven jars, in KRaft mode, tuned to start fast and stay small."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from servers.console import StackError, run_step, say
from servers.network import LOOPBACK, kafka_answers
from servers.process import LocalServer
from servers.state import wait_for_lock

KAFKA_VERSION = "4.3.0"
OLDEST_JAVA = 17
KAFKA_POM = f"""\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>local</groupId>
  <artifactId>kafka-server</artifactId>
  <version>{KAFKA_VERSION}</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_2.13</artifactId>
      <version>{KAFKA_VERSION}</version>
    </dependency>
    <!-- Kafka logs through SLF4J 1; without this bridge its log would stay empty. -->
    <dependency>
      <groupId>org.apache.logging.log4j</groupId>
      <artifactId>log4j-slf4j-impl</artifactId>
      <version>2.25.4</version>
      <scope>runtime</scope>
    </dependency>
  </dependencies>
</project>
"""
KAFKA_LOGGING = """\
rootLogger.level=info
rootLogger.appenderRef.stdout.ref=stdout
appender.stdout.type=Console
appender.stdout.name=stdout
appender.stdout.layout.type=PatternLayout
appender.stdout.layout.pattern=%d %p %m (%c)%n
"""

KAFKA_SETTINGS = """\
process.roles=broker,controller
node.id=1
listeners=PLAINTEXT://{client},CONTROLLER://{controller}
advertised.listeners=PLAINTEXT://{client}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=PLAINTEXT
controller.listener.names=CONTROLLER
# Read at each start, unlike the voters that `format --standalone` stores: the port may change.
controller.quorum.voters=1@{controller}
log.dirs={data}

auto.create.topics.enable=false
num.partitions=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=4

# Consumers get their partitions at once, and tests may declare them dead early.
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
# A killed broker is admitted again only when its last session has expired.
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500

num.network.threads=2
num.io.threads=4
log.segment.bytes=67108864
log.index.size.max.bytes=1048576
log.cleaner.dedupe.buffer.size=8388608
# Compacted topics are compacted at once, and not only every 15 seconds.
log.cleaner.backoff.ms=500
"""

INSTALL_HINT = """\
  Debian, Ubuntu:  sudo apt-get install openjdk-17-jre-headless maven
                   (default-jre-headless where there is no openjdk-17)
  Fedora:          sudo dnf install java-21-openjdk-headless maven
  macOS:           brew install openjdk maven
                   export JAVA_HOME="$(brew --prefix openjdk)"
or start Docker, which is used instead when its engine answers."""


class Kafka(LocalServer):
    title = "Kafka"
    port_count = 2  # for clients, and for its controller
    stop_signals = (signal.SIGTERM, signal.SIGKILL)

    def check_requirements(self) -> None:
        self.java = require_java()
        self.jars = require_kafka_jars(self.directory.path / "maven.log")

    def java_command(self, main_class: str, *arguments: str) -> list[str]:
        return [
            str(self.java),
            "-Xmx512m",
            # Half the time to start and a smaller process, for a lower peak throughput.
            "-XX:TieredStopAtLevel=1",
            "-XX:+UseSerialGC",
            f"-Dlog4j2.configurationFile={self.home / 'log4j2.properties'}",
            "-cp",
            f"{self.jars}/*",
            main_class,
            *arguments,
        ]

    def prepare(self) -> None:
        self.home.mkdir(exist_ok=True)
        (self.home / "log4j2.properties").write_text(KAFKA_LOGGING)
        properties = self.home / "server.properties"
        port, controller_port = self.record.ports
        properties.write_text(
            KAFKA_SETTINGS.format(
                client=f"{LOOPBACK}:{port}",
                controller=f"{LOOPBACK}:{controller_port}",
                data=self.home / "data",
            )
        )
        if (self.home / "initialised").exists():
            return
        say("creating the Kafka data directory")
        shutil.rmtree(self.home / "data", ignore_errors=True)
        run_step(
            self.java_command("kafka.tools.StorageTool", "format",
                "--cluster-id=MkU3OEVBNTcwNTJENDM2Qk", f"--config={properties}"),
            self.log,
            "The Kafka data directory could not be created.",
            **self.process_options,
        )  # fmt: skip
        (self.home / "initialised").touch()

    def command(self) -> list[str]:
        return self.java_command("kafka.Kafka", str(self.home / "server.properties"))

    def answers(self) -> bool:
        return kafka_answers(LOOPBACK, self.port, with_brokers=True)


def apt_install(*alternatives: str) -> None:
    """Install the first of these packages there is, if this is Debian or its kin and we may.

    Whether it helped is for the caller to see.
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

    say(f"installing {alternatives[0]} with apt-get, as it is missing")
    apt_get("update")
    for package in alternatives:
        if subprocess.run(["apt-cache", "show", package], capture_output=True).returncode == 0:
            apt_get("install", "-y", "--no-install-recommends", package)
            return


def find_java() -> Path | None:
    """The `java` to run: named by JAVA_HOME or on PATH, and new enough for Kafka."""
    candidates = [shutil.which("java")]
    if home := os.environ.get("JAVA_HOME"):
        candidates.insert(0, shutil.which("java", path=f"{home}/bin"))
    for candidate in filter(None, candidates):
        # Asks for the settings, as `java` may be a launcher script that starts another one.
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
            f"Kafka needs a Java runtime, version {OLDEST_JAVA} or newer, and none was found on "
            f"PATH or in JAVA_HOME. Install one:\n{INSTALL_HINT}"
        )
    return java


def require_kafka_jars(log: Path) -> Path:
    """The folder of Kafka's jars, shared by all projects of this user."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dev-stack"
    jars = caches / f"kafka-{KAFKA_VERSION}"
    if jars.exists():
        return jars
    caches.mkdir(parents=True, exist_ok=True)
    with (caches / "lock").open("w") as lock:
        wait_for_lock(lock, "waiting for another download of Kafka to finish")
        if not jars.exists():
            for leftover in caches.glob("download-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix="download-", dir=caches) as work:
                download_kafka(Path(work), log)
                # The folder gets its name only when complete: a broken download is not found.
                (Path(work) / "jars").rename(jars)
    return jars


def download_kafka(work: Path, log: Path) -> None:
    if shutil.which("mvn") is None:
        apt_install("maven")
    maven = shutil.which("mvn")
    if maven is None:
        raise StackError(
            "Maven is needed once, to download Kafka, and `mvn` is not on PATH. Install it:\n"
            + INSTALL_HINT
        )
    say(f"downloading Kafka {KAFKA_VERSION} with Maven (about 45 MB, once for all projects)")
    (work / "pom.xml").write_text(KAFKA_POM)
    log.write_bytes(b"")
    start = shown = time.monotonic()

    def progress() -> None:
        nonlocal shown
        if time.monotonic() - shown >= 3:
            shown = time.monotonic()
            files = log.read_text(errors="replace").count("Downloaded from")
            say(f"  {files} files after {shown - start:.0f} s")

    run_step(
        [maven, "-B", "-f", str(work / "pom.xml"), "dependency:copy-dependencies",
         "-DincludeScope=runtime", f"-DoutputDirectory={work / 'jars'}"],
        log,
        "Maven could not download Kafka. Check the network and Maven's settings, then try again.",
        progress=progress,
    )  # fmt: skip
