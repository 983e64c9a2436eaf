"""Brokers of tests with settings of their own, and users that they know."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from servers.console import run_step
from servers.kafka import Kafka
from servers.network import LOOPBACK, keep_or_pick
from servers.process import stop_all
from servers.state import StateDirectory

from tests.servers.programs import require_what_it_needs


class ConfiguredKafka(Kafka):
    """A broker that has further settings."""

    def more_settings(self, *addresses: str) -> str:
        """Return the settings; `addresses` are those of the client, the controller and others."""
        raise NotImplementedError

    def settings(self) -> str:
        """Add the settings; of what is named twice, the last counts."""
        addresses = (f"{LOOPBACK}:{port}" for port in self.record.ports)
        return super().settings() + self.more_settings(*addresses)

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


_REPLICAS = """
node.id={id}
controller.quorum.voters={voters}
min.insync.replicas=2
offsets.topic.replication.factor=3
transaction.state.log.replication.factor=3
transaction.state.log.min.isr=2
"""


class Replica(ConfiguredKafka):
    """One of three brokers, each of which is a controller and has a replica of every partition."""

    id: int
    voters: str

    def more_settings(self, *addresses: str) -> str:
        """Know the others, and have all replicated by them."""
        return _REPLICAS.format(id=self.id, voters=self.voters)


@contextmanager
def replicas() -> Iterator[Sequence[Replica]]:
    """Start a cluster of three brokers, as in production, and remove it at the block's end."""
    with TemporaryDirectory() as folder:
        brokers = []
        for id in (1, 2, 3):
            path = Path(folder) / str(id)
            path.mkdir()
            directory = StateDirectory(path)
            brokers.append(Replica(directory, "kafka", directory.state.kafka))
            brokers[-1].id = id
            brokers[-1].record.ports = keep_or_pick([], Replica.port_count)
            require_what_it_needs(brokers[-1])
        for one in brokers:
            one.voters = ",".join(f"{it.id}@{LOOPBACK}:{it.record.ports[1]}" for it in brokers)
        try:
            for one in brokers:
                one.start()
            for one in brokers:
                one.wait_until_serving()
            yield brokers
        finally:
            stop_all(brokers)
