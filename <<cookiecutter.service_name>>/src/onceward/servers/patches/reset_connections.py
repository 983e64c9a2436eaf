"""A write to a connection that was reset ends the consumer in silence (aiokafka #1038).

What is wrong: uvloop raises `RuntimeError` for a write to a connection that was reset a moment ago.
`AIOKafkaConnection.send` expects `OSError`. So the connection stays open, and the error ends the
task that fetches: the consumer receives nothing more, and no call of it raises an error.

To see it: with uvloop, reset the connection of a consumer while records arrive.

The change: `send` closes the connection and raises `KafkaConnectionError`, as for `OSError`.
"""

from typing import Any

from aiokafka import conn
from aiokafka.errors import KafkaConnectionError


class ResetConnection(conn.AIOKafkaConnection):  # type: ignore[misc]  # it has no types
    """A connection that raises `KafkaConnectionError` when it was reset."""

    def send(self, *args: Any, **options: Any) -> Any:
        try:
            return super().send(*args, **options)
        except RuntimeError as error:
            self.close(reason=conn.CloseReason.CONNECTION_BROKEN)
            raise KafkaConnectionError(f"{self} was reset: {error}") from error
