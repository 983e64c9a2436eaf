"""A client that is closed still opens connections, or lets requests wait without a limit.

What is wrong: `AIOKafkaClient.close` ends the task that refreshes the metadata. A later request for
a refresh waits for that task without a limit, and a later request to a broker opens a connection
that is never closed.

To see it: after `close`, await `force_metadata_update`.

The change: after `close` such requests are cancelled.
"""

import asyncio
from typing import Any

from aiokafka.client import AIOKafkaClient


class ClosedClient(AIOKafkaClient):  # type: ignore[misc]  # it has no types
    """A client that cancels requests once it is closed."""

    is_closed = False

    async def _get_conn(self, *args: Any, **options: Any) -> Any:
        connection = None if self.is_closed else await super()._get_conn(*args, **options)
        if self.is_closed:
            if connection is not None:
                connection.close()
            raise asyncio.CancelledError
        return connection

    def force_metadata_update(self) -> asyncio.Future[bool]:
        update: asyncio.Future[bool] = super().force_metadata_update()
        if self.is_closed:
            self._md_update_fut.cancel()
        return update

    async def close(self) -> None:
        self.is_closed = True
        await super().close()
