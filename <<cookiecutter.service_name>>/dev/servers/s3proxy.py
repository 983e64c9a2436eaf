"""S3Proxy from its Maven jars: an S3-compatible object store on a local folder, for tests."""

from __future__ import annotations

import signal
import socket

from servers.java import Jars, link_jars, require_jars, require_java
from servers.network import LOOPBACK
from servers.process import LocalServer

S3PROXY_VERSION = "2.9.0"
S3PROXY_JARS = Jars(
    "S3Proxy", S3PROXY_VERSION, megabytes=43, artifacts=(f"org.gaul:s3proxy:{S3PROXY_VERSION}",)
)
IDENTITY, CREDENTIAL = "local", "local-secret"

# Clients send a checksum with deletions, in a header that S3Proxy does not support.
SETTINGS = """\
s3proxy.endpoint=http://{address}
s3proxy.authorization=aws-v4
s3proxy.identity={identity}
s3proxy.credential={credential}
s3proxy.ignore-unknown-headers=true
jclouds.provider=filesystem-nio2
"""
LOGGING = """\
<configuration>
  <appender name="OUT" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%d %p %m \\(%c\\)%n</pattern></encoder>
  </appender>
  <root level="info"><appender-ref ref="OUT"/></root>
</configuration>
"""


class S3Proxy(LocalServer):
    title = "S3Proxy"
    port_count = 1
    stop_signals = (signal.SIGTERM, signal.SIGKILL)

    def check_requirements(self) -> None:
        self.java = require_java()
        self.jars = require_jars(S3PROXY_JARS, self.directory.path / "maven.log")

    def prepare(self) -> None:
        (self.home / "data").mkdir(parents=True, exist_ok=True)
        (self.home / "logback.xml").write_text(LOGGING)
        (self.home / "s3proxy.conf").write_text(
            SETTINGS.format(
                address=f"{LOOPBACK}:{self.port}",
                identity=IDENTITY,
                credential=CREDENTIAL,
            )
        )
        link_jars(self.home, self.jars)

    def command(self) -> list[str]:
        return [
            str(self.java),
            "-Xmx256m",
            "-XX:TieredStopAtLevel=1",
            "-XX:+UseSerialGC",
            "-Dlogback.configurationFile=logback.xml",
            # Absolute, as listings of a relative one are empty; a file of properties has escapes.
            f"-Djclouds.filesystem.basedir={self.home / 'data'}",
            "-cp",
            "jars/*",
            "org.gaul.s3proxy.Main",
            "--properties",
            "s3proxy.conf",
        ]

    def answers(self) -> bool:
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=1) as connection:
                connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
                return connection.recv(5) == b"HTTP/"
        except OSError:
            return False

    def bucket(self, name: str) -> str:
        """Create a bucket if it does not exist, and return its URL."""
        (self.home / "data" / name).mkdir(exist_ok=True)
        return f"s3://{name}"

    def environment(self) -> dict[str, str]:
        """Environment variables with the address and credentials for S3 clients."""
        return {
            "AWS_ENDPOINT_URL": f"http://{LOOPBACK}:{self.port}",
            "AWS_ACCESS_KEY_ID": IDENTITY,
            "AWS_SECRET_ACCESS_KEY": CREDENTIAL,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
