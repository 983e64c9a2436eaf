"""Apicurio Registry from its archive: a schema registry with Confluent's API, for tests."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request

from servers.java import Jars, link_jars, require_jars, require_java
from servers.network import LOOPBACK
from servers.process import LocalServer

APICURIO_VERSION = "2.6.13.Final"
APICURIO_JARS = Jars(
    "Apicurio",
    APICURIO_VERSION,
    megabytes=142,
    artifacts=(f"io.apicurio:apicurio-registry-app:{APICURIO_VERSION}:all",),
)


class Apicurio(LocalServer):
    """Has its schemas in memory: a restart removes them."""

    title = "Apicurio"
    port_count = 1
    stop_signals = (signal.SIGTERM, signal.SIGKILL)

    @property
    def url(self) -> str:
        """URL of its Confluent API."""
        return f"http://{LOOPBACK}:{self.port}/apis/ccompat/v7"

    def check_requirements(self) -> None:
        self.java = require_java()
        self.jars = require_jars(APICURIO_JARS, self.directory.path / "maven.log")

    def prepare(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        link_jars(self.home, self.jars)

    def command(self) -> list[str]:
        return [
            str(self.java),
            "-Xmx256m",
            "-XX:TieredStopAtLevel=1",
            "-XX:+UseSerialGC",
            f"-Dquarkus.http.host={LOOPBACK}",
            f"-Dquarkus.http.port={self.port}",
            "-jar",
            f"jars/apicurio-registry-app-{APICURIO_VERSION}-runner.jar",
        ]

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/subjects", timeout=5) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.URLError):
            return False
