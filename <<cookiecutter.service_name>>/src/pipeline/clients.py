"""Clients of Kafka, started and stopped so that nothing of them is left, whatever brokers do.

aiokafka forgets the connection that it asks for metadata when it is cancelled meanwhile. And what
still runs in a client whose stop has been cut short opens new connections, or waits for ever.
"""

import asyncio
import traceback
from contextlib import suppress
from time import monotonic
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition, conn
from aiokafka.client import AIOKafkaClient
from aiokafka.consumer import fetcher
from aiokafka.errors import KafkaConnectionError

from .record_batches import AnyMemoryRecords

_BREAK_SECONDS = 1.0
"""For what runs in a client to notice that it is cut off from the brokers."""

_MAX_WAIT_MS, _IDLE_MAX_WAIT_MS = 100, 500
"""How long a broker waits for records before it answers that there are none. A partition whose
records were just taken waits for the fetch that is under way."""
_BUSY_SECONDS = 2.0
"""After this long without records a consumer is idle."""

fetcher.MemoryRecords = AnyMemoryRecords


class _Connection(conn.AIOKafkaConnection):  # type: ignore[misc]  # it has no types
    """A way to a broker that says by an error of Kafka's that it was reset.

    uvloop raises `RuntimeError` where asyncio raises `OSError` or nothing. aiokafka does not expect
    it: what fetches would end, and the consumer would stand still, seemingly well.
    """

    def send(self, *args: Any, **options: Any) -> Any:
        try:
            return super().send(*args, **options)
        except RuntimeError as error:
            self.close(reason=conn.CloseReason.CONNECTION_BROKEN)
            raise KafkaConnectionError(f"{self} was reset: {error}") from error


conn.AIOKafkaConnection = _Connection


class KafkaConsumer(AIOKafkaConsumer):  # type: ignore[misc]  # it has no types
    """One that asks less often as long as nothing comes: to ask is most of what it costs then."""

    _busy_until = 0.0

    async def getmany(
        self, *partitions: TopicPartition, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        found: dict[TopicPartition, list[ConsumerRecord]] = await super().getmany(
            *partitions, timeout_ms=timeout_ms, max_records=max_records
        )
        if found:
            self._busy_until = monotonic() + _BUSY_SECONDS
        is_busy = monotonic() < self._busy_until
        self._fetcher._fetch_max_wait_ms = _MAX_WAIT_MS if is_busy else _IDLE_MAX_WAIT_MS
        return found


class _Client(AIOKafkaClient):  # type: ignore[misc]  # it has no types
    """What a producer or a consumer rests on. Who asks it for a broker after its end, ends too."""

    has_ended = False

    async def _get_conn(self, *args: Any, **options: Any) -> Any:
        connection = None if self.has_ended else await super()._get_conn(*args, **options)
        if self.has_ended:
            if connection is not None:
                connection.close()
            raise asyncio.CancelledError
        return connection

    def force_metadata_update(self) -> asyncio.Future[bool]:
        update: asyncio.Future[bool] = super().force_metadata_update()
        if self.has_ended:
            self._md_update_fut.cancel()
        return update

    def cut_off(self) -> None:
        """End, without waiting for a broker to read what is on its way."""
        self.has_ended = True
        if self._sync_task is not None:
            self._sync_task.cancel()
        if self._md_update_fut is not None:
            self._md_update_fut.cancel()
        for connection in self._conns.values():
            if connection.connected():
                connection._writer.transport.abort()


async def start(one: AIOKafkaProducer | AIOKafkaConsumer) -> None:
    """Start it. If that fails, start it again or stop it."""
    _client_of(one).__class__ = _Client
    try:
        await one.start()
    except BaseException as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if connection := frame.f_locals.get("bootstrap_conn"):
                connection.close()
        raise


async def stop(one: AIOKafkaProducer | AIOKafkaConsumer, seconds: float) -> None:
    """Stop it. If that takes longer than so many seconds, it is cut off from the brokers."""
    client = _client_of(one)
    stopping = asyncio.create_task(one.stop())
    try:
        await asyncio.wait({stopping}, timeout=seconds)
    finally:
        if not stopping.done():
            client.cut_off()
            await asyncio.wait({stopping}, timeout=_BREAK_SECONDS)
        if isinstance(one, AIOKafkaProducer):
            _give_up_batches(one)
        if not stopping.done():
            await asyncio.wait({stopping}, timeout=_BREAK_SECONDS)
            stopping.cancel()
        client.has_ended = True
        await client.close()
    with suppress(asyncio.CancelledError):
        await stopping


def _give_up_batches(producer: AIOKafkaProducer) -> None:
    """End what waits for the brokers to take a batch."""
    accumulator = producer._message_accumulator
    for batches in accumulator._batches.values():
        accumulator._pending_batches.update(batches)  # where a batch's own callback looks for it
    for batch in accumulator._pending_batches:
        batch.future.cancel()


def _client_of(one: AIOKafkaProducer | AIOKafkaConsumer) -> Any:
    return one.client if isinstance(one, AIOKafkaProducer) else one._client
