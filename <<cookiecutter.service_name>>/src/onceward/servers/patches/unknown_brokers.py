"""A consumer ends by an `AssertionError` if the first broker that answers knows no broker yet.

What is wrong: a broker that starts may answer before it knows any broker, even itself.
`coordinator_lookup` asserts that one is known, and the error ends the consumer's coordinator.

To see it: start a consumer of a group while the only broker starts.

The change: `coordinator_lookup` raises `NodeNotReadyError`, which is retriable.
"""

from typing import Any

from aiokafka.client import AIOKafkaClient
from aiokafka.errors import NodeNotReadyError


class BrokerlessClient(AIOKafkaClient):  # type: ignore[misc]  # it has no types
    """A client whose brokers may not be known yet."""

    async def coordinator_lookup(self, *args: Any) -> Any:
        if not self.cluster.brokers():
            raise NodeNotReadyError("the brokers know of no broker yet")
        return await super().coordinator_lookup(*args)
