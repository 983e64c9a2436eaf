"""Apache Kafka from its Maven jars, in KRaft mode, set up for a fast start and little memory."""

from __future__ import annotations

import shutil
import signal

from servers.console import run_step, say
from servers.java import Jars, link_jars, require_jars, require_java
from servers.network import LOOPBACK, kafka_answers
from servers.process import LocalServer

KAFKA_VERSION = "4.4.0"
# Kafka logs by SLF4J 1: without this bridge its log would be empty.
LOGGING_BRIDGE = "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4"
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
log.dirs=data

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

# Assign partitions without delay, and allow tests short session timeouts.
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
# A killed broker can register again only after its last session has expired.
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500

num.network.threads=2
num.io.threads=4
log.segment.bytes=67108864
log.index.size.max.bytes=1048576
log.cleaner.dedupe.buffer.size=8388608
# Compact topics without the default delay of 15 seconds.
log.cleaner.backoff.ms=500
"""


class Kafka(LocalServer):
    title = "Kafka"
    port_count = 2  # for clients, and for its controller
    stop_signals = (signal.SIGTERM, signal.SIGKILL)
    version = KAFKA_VERSION

    def check_requirements(self) -> None:
        self.java = require_java()
        kafka = f"org.apache.kafka:kafka_2.13:{self.version}"
        jars = Jars("Kafka", self.version, megabytes=45, artifacts=(kafka, LOGGING_BRIDGE))
        self.jars = require_jars(jars, self.directory.path / "maven.log")

    def java_command(self, main_class: str, *arguments: str) -> list[str]:
        return [
            str(self.java),
            "-Xmx512m",
            # Halves the start time and the memory, for a lower peak throughput.
            "-XX:TieredStopAtLevel=1",
            "-XX:+UseSerialGC",
            "-Dlog4j2.configurationFile=log4j2.properties",
            "-cp",
            "jars/*",
            main_class,
            *arguments,
        ]

    def settings(self) -> str:
        port, controller_port = self.record.ports[:2]
        return KAFKA_SETTINGS.format(
            client=f"{LOOPBACK}:{port}",
            controller=f"{LOOPBACK}:{controller_port}",
        )

    def prepare(self) -> None:
        self.home.mkdir(exist_ok=True)
        (self.home / "log4j2.properties").write_text(KAFKA_LOGGING)
        (self.home / "server.properties").write_text(self.settings())
        link_jars(self.home, self.jars)
        if (self.home / "initialised").exists():
            return
        say("creating the Kafka data directory")
        shutil.rmtree(self.home / "data", ignore_errors=True)
        run_step(
            self.java_command("kafka.tools.StorageTool", "format",
                "--cluster-id=MkU3OEVBNTcwNTJENDM2Qk", "--config=server.properties"),
            self.log,
            "The Kafka data directory could not be created.",
            **self.process_options,
        )  # fmt: skip
        (self.home / "initialised").touch()

    def command(self) -> list[str]:
        return self.java_command("kafka.Kafka", "server.properties")

    def answers(self) -> bool:
        return kafka_answers(LOOPBACK, self.port, with_groups=True)
