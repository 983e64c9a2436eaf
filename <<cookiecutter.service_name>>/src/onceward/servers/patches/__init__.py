"""Patches of aiokafka, each as it would be sent upstream: a module with the issue's text.

The text says what is wrong, how to see it, and the change. Subclasses make the change, so other
clients of the process stay as aiokafka has them. Only the errors are added for the whole process.

Also patches are, with their issue in their docstring: `record_batches`, and in `consumer` the
classes `Fetcher` and `KafkaConsumer`. `test_patches` and `test_clients` have a test for each patch
that fails when it is no longer needed; `test_private_names` lists the private names that they use.
"""

from .bootstrapping import BootstrappingClient, Connection
from .closed_clients import ClosedClient
from .replica_waits import limit_wait_for_replicas
from .static_members import Coordinator
from .stopping import cancel_batches, cut_off, stop_within
from .unknown_brokers import BrokerlessClient
from .unknown_errors import FencedInstanceIdError, GroupIsFullError, InvalidRecordError

__all__ = [
    "Client",
    "Connection",
    "Coordinator",
    "FencedInstanceIdError",
    "GroupIsFullError",
    "InvalidRecordError",
    "cancel_batches",
    "cut_off",
    "limit_wait_for_replicas",
    "stop_within",
]


class Client(ClosedClient, BootstrappingClient, BrokerlessClient):
    """Client of a producer, a consumer or an admin client. After `close`, pending and new requests
    are cancelled."""
