"""Clients of Kafka, started and stopped so that nothing of them is left, whatever brokers do.

aiokafka forgets the connection that it asks for metadata when it is cancelled meanwhile. And what
still runs in a client whose stop has been cut short opens new connections, or waits for ever.
"""

import asyncio
import ssl
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from time import monotonic
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition, conn
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.consumer import fetcher
from aiokafka.errors import KafkaConnectionError, KafkaError

from pipeline.errors import describe_error
from pipeline.settings import Settings

from .record_batches import AnyMemoryRecords

_ANSWERS_WITHIN = 40.0
"""Seconds; aiokafka's own default."""

_BREAK_SECONDS = 1.0
"""For what runs in a client to notice that it is cut off from the brokers."""

_MAX_WAIT_MS, _IDLE_MAX_WAIT_MS = 100, 1000
"""How long a broker waits for records before it answers that there are none. A partition whose
records were just taken waits for the fetch that is under way."""
_BUSY_SECONDS = 2.0
"""After this long without records a consumer is idle."""

_refusals: ContextVar[dict[str, str]] = ContextVar("refusals")
"""Why brokers that are there were no use, told to who starts a client; aiokafka only logs it."""

fetcher.MemoryRecords = AnyMemoryRecords


class _Connection(conn.AIOKafkaConnection):  # type: ignore[misc]  # it has no types
    """A way to a broker that says by an error of Kafka's that it was reset.

    uvloop raises `RuntimeError` where asyncio raises `OSError` or nothing. aiokafka does not expect
    it: what fetches would end, and the consumer would stand still, seemingly well.
    """

    async def connect(self) -> Any:
        try:
            return await super().connect()
        except (KafkaError, OSError) as error:
            cause = error.__cause__ or error
            if isinstance(cause, KafkaError | ssl.SSLError):
                _refusals.get({})[f"{self.host}:{self.port}"] = describe_error(cause)
            raise

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

    async def arrival(self, partition: TopicPartition, seconds: float) -> int:
        """Wait so long for records of the partition; nothing of them is unpacked before `getmany`.

        Returns the offset before which all transactions of producers have ended; 0 if none came.
        """
        arrived = self._fetcher._records
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while partition not in arrived:
                    await self._fetcher._create_fetch_waiter()
        result = arrived.get(partition)
        if not isinstance(result, fetcher.FetchResult):  # nothing, or an error
            return 0
        return result._assignment.state_value(partition).lso or 0

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


def way(settings: Settings) -> dict[str, Any]:
    """Return what every client is made with: where the brokers are, and how they know us."""
    password = settings.kafka_password
    return {
        "bootstrap_servers": settings.kafka_bootstrap_servers,
        "security_protocol": settings.kafka_security_protocol,
        "ssl_context": settings.kafka_context(),
        "sasl_mechanism": settings.kafka_sasl_mechanism,
        "sasl_plain_username": settings.kafka_user,
        "sasl_plain_password": password.get_secret_value() if password else None,
    }


@asynccontextmanager
async def asking(settings: Settings) -> AsyncIterator[AIOKafkaConsumer]:
    """Lend a consumer that asks for offsets, and belongs to no group."""
    client = AIOKafkaConsumer(**way(settings))
    try:
        await start(client)
        yield client
    finally:
        await client.stop()


async def stable_offsets(
    client: AIOKafkaConsumer, partitions: Sequence[TopicPartition]
) -> dict[TopicPartition, int]:
    """Return the offset in each partition before which no producer's transaction is open.

    `read_committed` reads up to there. Where none is open at all it is the end.
    """
    offsets = client._fetcher
    level, offsets._isolation_level = offsets._isolation_level, fetcher.READ_COMMITTED
    try:
        found: dict[TopicPartition, int] = await client.end_offsets(partitions)
        return found
    finally:
        offsets._isolation_level = level


@asynccontextmanager
async def managing(
    settings: Settings, *, answer_within: float = _ANSWERS_WITHIN
) -> AsyncIterator[AIOKafkaAdminClient]:
    """Lend a client that asks for topics and groups, and makes topics.

    `answer_within` is the limit of each request, in seconds. Raises `KafkaError`.
    """
    admin = AIOKafkaAdminClient(**way(settings), request_timeout_ms=round(answer_within * 1_000))
    try:
        await start(admin)
        yield admin
    finally:
        await admin.close()


async def start(one: AIOKafkaProducer | AIOKafkaConsumer | AIOKafkaAdminClient) -> None:
    """Start it. If that fails, start it again or stop it.

    Raises `KafkaConnectionError`, which tells why brokers did not let us in, if they answer.
    """
    _client_of(one).__class__ = _Client
    refusals: dict[str, str] = {}
    token = _refusals.set(refusals)
    try:
        await one.start()
    except BaseException as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if connection := frame.f_locals.get("bootstrap_conn"):
                connection.close()
        if refusals and isinstance(error, KafkaConnectionError):
            told = "; ".join(f"{broker}: {reason}" for broker, reason in refusals.items())
            raise KafkaConnectionError(f"no broker lets us in: {told}") from error
        raise
    finally:
        _refusals.reset(token)


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


def _client_of(one: AIOKafkaProducer | AIOKafkaConsumer | AIOKafkaAdminClient) -> Any:
    return one.client if isinstance(one, AIOKafkaProducer) else one._client
