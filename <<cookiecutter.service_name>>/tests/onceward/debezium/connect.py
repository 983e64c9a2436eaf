"""Kafka Connect with Debezium, from their Maven artifacts."""

import asyncio
import json
import signal
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from servers.java import Jars, require_jars, require_java
from servers.kafka import KAFKA_LOGGING, KAFKA_VERSION
from servers.network import LOOPBACK
from servers.process import LocalServer

from onceward.debezium.connector import PASSWORD

from tests.servers.waiting import eventually

DEBEZIUM_VERSION = "3.7.0.Final"
CONNECT_JARS = Jars(
    "Connect",
    f"{KAFKA_VERSION}-debezium-{DEBEZIUM_VERSION}",
    megabytes=90,
    artifacts=(
        f"org.apache.kafka:connect-runtime:{KAFKA_VERSION}",
        f"org.apache.kafka:connect-transforms:{KAFKA_VERSION}",
        "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4",
        f"io.debezium:debezium-connector-postgres:{DEBEZIUM_VERSION}:plugin",
    ),
)
_REBALANCES = 409
"""Status of answers while the cluster shares its work anew."""
WORKER = """\
bootstrap.servers={kafka}
listeners=http://{address}
rest.advertised.host.name=127.0.0.1
group.id={group}
config.storage.topic={group}-configs
offset.storage.topic={group}-offsets
status.storage.topic={group}-status
config.storage.replication.factor=1
offset.storage.replication.factor=1
status.storage.replication.factor=1
offset.storage.partitions=1
status.storage.partitions=1
key.converter=org.apache.kafka.connect.json.JsonConverter
value.converter=org.apache.kafka.connect.json.JsonConverter
plugin.path={plugins}
plugin.discovery=service_load
config.providers=env
config.providers.env.class=org.apache.kafka.common.config.provider.EnvVarConfigProvider
offset.flush.interval.ms={flush}
# A killed worker is soon gone, and its successor begins at once.
session.timeout.ms=3000
heartbeat.interval.ms=1000
scheduled.rebalance.max.delay.ms=0
"""


class Connect(LocalServer):
    """A cluster of one worker, which runs connectors that are given to it by HTTP."""

    title = "Kafka Connect"
    port_count = 1
    stop_signals = (signal.SIGTERM, signal.SIGKILL)
    kafka: str
    group = "connect"
    password: str
    """Of the connector's role in PostgreSQL."""
    flush_milliseconds = 2_000
    java_options: tuple[str, ...] = ("-XX:TieredStopAtLevel=1",)

    def check_requirements(self) -> None:
        """Find Java, and download the jars once."""
        self.java = require_java()
        self.jars = require_jars(CONNECT_JARS, self.directory.path / "maven.log")

    @property
    def process_options(self) -> dict[str, Any]:
        """Where it runs, and the variable that the connector's configuration names."""
        options = super().process_options
        return {**options, "env": {**options["env"], PASSWORD: self.password}}

    def prepare(self) -> None:
        """Write the worker's settings."""
        plugins = self.home / "plugins"
        plugins.mkdir(parents=True, exist_ok=True)
        for folder in self.jars.iterdir():
            if folder.is_dir() and not (plugins / folder.name).exists():
                (plugins / folder.name).symlink_to(folder)
        (self.home / "log4j2.properties").write_text(KAFKA_LOGGING)
        (self.home / "worker.properties").write_text(
            WORKER.format(
                kafka=self.kafka,
                address=f"{LOOPBACK}:{self.port}",
                group=self.group,
                plugins=plugins,
                flush=self.flush_milliseconds,
            )
        )

    def command(self) -> list[str]:
        """Return the command of a worker."""
        return [
            str(self.java),
            "-Xmx512m",
            *self.java_options,
            "-XX:+UseSerialGC",
            f"-Dlog4j2.configurationFile={self.home / 'log4j2.properties'}",
            "-cp",
            f"{self.jars}/*",
            "org.apache.kafka.connect.cli.ConnectDistributed",
            str(self.home / "worker.properties"),
        ]

    def answers(self) -> bool:
        """Whether it has started, and can take connectors."""
        try:
            self._request("GET", "/health")
        except OSError:
            return False
        return True

    async def put(self, name: str, config: Mapping[str, str]) -> None:
        """Create a connector, or change its configuration."""

        async def is_put() -> bool:
            try:
                await asyncio.to_thread(self._request, "PUT", f"/connectors/{name}/config", config)
            except urllib.error.HTTPError as error:
                if error.code != _REBALANCES:
                    raise AssertionError(error.read().decode()) from error
                return False
            return True

        await eventually(is_put)

    async def delete(self, name: str) -> None:
        """Delete a connector."""
        with suppress(urllib.error.HTTPError):  # there is none of that name, or it is under way
            await asyncio.to_thread(self._request, "DELETE", f"/connectors/{name}")

    async def restart(self, name: str) -> None:
        """Start the connector's failed tasks again."""
        path = f"/connectors/{name}/restart?includeTasks=true&onlyFailed=false"
        await asyncio.to_thread(self._request, "POST", path, {})

    async def forget_offsets(self, name: str) -> None:
        """Stop the connector, delete its offsets, and let it go on."""
        await asyncio.to_thread(self._request, "PUT", f"/connectors/{name}/stop")
        await eventually(lambda: self._is_in(name, "STOPPED"))
        await asyncio.to_thread(self._request, "DELETE", f"/connectors/{name}/offsets")
        await asyncio.to_thread(self._request, "PUT", f"/connectors/{name}/resume")

    async def _is_in(self, name: str, state: str) -> bool:
        found = await asyncio.to_thread(self._request, "GET", f"/connectors/{name}/status")
        return bool(found["connector"]["state"] == state and not found["tasks"])

    async def state(self, name: str) -> tuple[str, str]:
        """Return the state of the connector's task, and the error that it has failed with."""
        try:
            found = await asyncio.to_thread(self._request, "GET", f"/connectors/{name}/status")
        except urllib.error.HTTPError:  # it has not been started since the worker was
            return "", ""
        tasks = found["tasks"]
        return (tasks[0]["state"], tasks[0].get("trace", "")) if tasks else ("", "")

    def _request(self, method: str, path: str, body: object = None) -> Any:
        request = urllib.request.Request(
            f"http://{LOOPBACK}:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            content = response.read()
        return json.loads(content) if content else None
