"""Brokers of tests with settings of their own, and users that they know."""

from servers.console import run_step
from servers.kafka import Kafka
from servers.network import LOOPBACK


class ConfiguredKafka(Kafka):
    """A broker that has further settings."""

    def more_settings(self, *addresses: str) -> str:
        """Return the settings; `addresses` are those of the client, the controller and others."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Write its settings."""
        super().prepare()
        properties = self.home / "server.properties"
        more = self.more_settings(*(f"{LOOPBACK}:{port}" for port in self.record.ports))
        # Of what is named twice, the last counts.
        properties.write_text(properties.read_text() + more)

    def admit(self, user: str, password: str, *bits: int) -> None:
        """Give the user the password, for SCRAM with hashes of these lengths."""
        for length in bits:
            run_step(
                self.java_command("kafka.admin.ConfigCommand",
                    "--bootstrap-server", f"{LOOPBACK}:{self.port}", "--alter",
                    "--add-config", f"SCRAM-SHA-{length}=[password={password}]",
                    "--entity-type", "users", "--entity-name", user),
                self.log,
                "The user could not be made.",
                **self.process_options,
            )  # fmt: skip
