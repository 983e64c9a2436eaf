"""`stop` waits for brokers that are unavailable without a limit (aiokafka #1101).

What is wrong: a producer waits until its batches are sent or expire, and a transactional one until
its transaction can end; a consumer waits until the broker answers that it has left the group.

To see it: stop a producer whose batch the broker does not acknowledge.

The change: `stop` has a limit, after which it aborts connections, and cancels requests and batches.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.client import AIOKafkaClient

_CANCEL_SECONDS = 1.0
"""How long the tasks of a client have to end after it was cut off from the brokers."""


async def stop_within(
    seconds: float | None,
    stop: Coroutine[Any, Any, None],
    client: AIOKafkaClient,
    cancel: Callable[[], None] = lambda: None,
) -> None:
    """Await aiokafka's `stop`; after `seconds` abort connections and requests. None: no limit.

    `cancel` cancels what is left then.
    """
    stopping = asyncio.create_task(stop)
    try:
        await asyncio.wait({stopping}, timeout=seconds)
    finally:
        if not stopping.done():
            cut_off(client)
            await asyncio.wait({stopping}, timeout=_CANCEL_SECONDS)
        cancel()
        if not stopping.done():
            await asyncio.wait({stopping}, timeout=_CANCEL_SECONDS)
            stopping.cancel()
        await client.close()
    with suppress(asyncio.CancelledError):
        await stopping


def cut_off(client: AIOKafkaClient) -> None:
    """Cancel all requests, without waiting for a broker to read what was written."""
    client.is_closed = True
    if client._sync_task is not None:
        client._sync_task.cancel()
    if client._md_update_fut is not None:
        client._md_update_fut.cancel()
    for connection in client._conns.values():
        if connection.connected():
            connection._writer.transport.abort()


def cancel_batches(producer: AIOKafkaProducer) -> None:
    """Cancel the batches that wait for a broker to acknowledge them."""
    accumulator = producer._message_accumulator
    for batches in accumulator._batches.values():
        accumulator._pending_batches.update(batches)  # where a batch's own callback looks for it
    for batch in accumulator._pending_batches:
        batch.future.cancel()
