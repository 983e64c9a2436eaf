"""The publisher: sends a page of outbox events to Kafka, in order, and waits for all of it."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import asyncpg
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from aiokafka.partitioner import murmur2
from aiokafka.producer.message_accumulator import BatchBuilder

from . import clients, telemetry
from .failures import named
from .message import event_headers
from .settings import Settings

log = logging.getLogger(__name__)

_BATCH_BYTES = 128 * 1024
"""A larger event is a batch by itself; topics accept 1 MB by default."""
_METADATA_SECONDS = 5.0
_STOP_SECONDS = 5.0
_FENCE_SECONDS = 1.0
"""Our own shards wait meanwhile."""


class LeaseExpired(Exception):
    """The relay's time ran out before the send: another one may own the shards by now."""


class NotSent(Exception):
    """Kafka has not acknowledged all events; the text says of which topic and why."""


class Publisher:
    """An idempotent producer that is thrown away after a failure.

    A batch that expires in the client has used up a sequence number, and a later one might then
    overtake it. A new producer starts with a clean slate.
    """

    def __init__(self, settings: Settings, *, client_id: str, owner: str) -> None:
        self._settings = settings
        self._client_id = client_id
        self._owner = owner
        self._producer: AIOKafkaProducer | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self._unfenced: set[str] = set()

    async def send(self, events: Sequence[asyncpg.Record], may_send: Callable[[], bool]) -> None:
        """Send the events and return when all of them are acknowledged by all replicas in sync.

        Events of one Kafka partition are sent in the order given, one batch unacknowledged at a
        time. After an error nothing is known about any of them: send them all again. `may_send`
        is asked before every batch.

        Raises `NotSent`, and `LeaseExpired` when `may_send` says no.
        """
        producer = await self._started()
        transactional = self._settings.relay_transactional
        try:
            by_partition = await self._by_partition(producer, events)
            if transactional:
                await producer.begin_transaction()
            chains = [
                self._send_chain(producer, topic, partition, chain, may_send)
                for (topic, partition), chain in by_partition.items()
            ]
            # All of them end before the error is raised: none may go on behind our back.
            outcomes = await asyncio.gather(*chains, return_exceptions=True)
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome
            if transactional:
                await _commit(producer)
        except BaseException:
            # What it has begun, the next one with its transactional id aborts.
            await self.discard()
            raise

    async def fence(self, owners: Sequence[str]) -> list[str]:
        """Make the brokers refuse what these relays may still send: before taking their shards.

        Returns those for whom that was done; the others wait until the brokers answer for them.
        Without `relay_transactional` nothing is done: what they send arrives as repeats.
        """
        if not self._settings.relay_transactional:
            return list(owners)
        outcomes = await asyncio.gather(*(self._fence(owner) for owner in owners))
        return [owner for owner, is_fenced in zip(owners, outcomes, strict=True) if is_fenced]

    async def _fence(self, owner: str) -> bool:
        try:
            async with asyncio.timeout(_FENCE_SECONDS):
                # A new producer with its transactional id ends what the old one has open.
                producer = await self._new_producer(owner)
                try:
                    await producer.begin_transaction()
                finally:
                    stopping = asyncio.create_task(clients.stop(producer, _STOP_SECONDS))
                    self._stopping.add(stopping)
                    stopping.add_done_callback(self._stopping.discard)
        except (KafkaError, TimeoutError) as error:
            if owner not in self._unfenced:
                log.warning("relay: %s can't be fenced, its shards wait: %s", owner, named(error))
            self._unfenced.add(owner)
            return False
        self._unfenced.discard(owner)
        return True

    async def discard(self) -> None:
        """Close the producer; the next `send` starts another."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await clients.stop(producer, _STOP_SECONDS)
        await asyncio.gather(*self._stopping)

    async def _started(self) -> AIOKafkaProducer:
        if self._producer is None:
            self._producer = await self._new_producer(self._owner)
        return self._producer

    async def _new_producer(self, owner: str) -> AIOKafkaProducer:
        transactional = self._settings.relay_transactional
        producer = AIOKafkaProducer(
            bootstrap_servers=self._settings.kafka_bootstrap_servers,
            client_id=self._client_id,
            transactional_id=f"{self._client_id}-{owner}" if transactional else None,
            enable_idempotence=True,
            acks="all",
            max_batch_size=min(_BATCH_BYTES, self._settings.max_event_bytes),
            max_request_size=2 * self._settings.max_event_bytes,
            metadata_max_age_ms=30_000,
        )
        try:
            await clients.start(producer)
        except BaseException:
            await clients.stop(producer, _STOP_SECONDS)
            raise
        return producer

    async def _by_partition(
        self, producer: AIOKafkaProducer, events: Sequence[asyncpg.Record]
    ) -> dict[tuple[str, int], list[asyncpg.Record]]:
        chains: dict[tuple[str, int], list[asyncpg.Record]] = {}
        counts = {
            topic: await _partitions(producer, topic)
            for topic in {event["topic"] for event in events}
        }
        for event in events:
            topic = event["topic"]
            partition = partition_of(event["key"], event["id"], counts[topic])
            chains.setdefault((topic, partition), []).append(event)
        return chains

    async def _send_chain(
        self,
        producer: AIOKafkaProducer,
        topic: str,
        partition: int,
        events: Sequence[asyncpg.Record],
        may_send: Callable[[], bool],
    ) -> None:
        with telemetry.send_spans(
            topic, partition, len(events), (event["traceparent"] for event in events)
        ):
            for batch in _batches(producer, events):
                if not may_send():
                    raise LeaseExpired("the lease ended before all events were sent")
                try:
                    await (await producer.send_batch(batch, topic, partition=partition))
                except KafkaError as error:
                    raise NotSent(f"{topic}/{partition}: {named(error)}") from error
        telemetry.published(topic, len(events))


async def _commit(producer: AIOKafkaProducer) -> None:
    try:
        await producer.commit_transaction()
    except KafkaError as error:
        raise NotSent(f"Kafka did not commit the events: {named(error)}") from error


async def _partitions(producer: AIOKafkaProducer, topic: str) -> int:
    try:
        return len(await asyncio.wait_for(producer.partitions_for(topic), _METADATA_SECONDS))
    except (KafkaError, TimeoutError) as error:
        raise NotSent(
            f"topic {topic} is not known to the brokers: create it, or run `service topics create`"
        ) from error


def _batches(
    producer: AIOKafkaProducer, events: Sequence[asyncpg.Record]
) -> Iterator[BatchBuilder]:
    batch = producer.create_batch()
    for event in events:
        value = event["payload"]
        headers = event_headers(
            id=event["event_id"],
            source=event["source"],
            type=event["type"],
            time=event["created_at"],
            subject=event["subject"],
            sequence=None if event["sequence"] is None else f"{event['sequence']:020}",
            content_type=event["content_type"],
            traceparent=event["traceparent"],
            tracestate=event["tracestate"],
            baggage=event["baggage"],
        )
        key = event["key"]
        if batch.append(timestamp=None, key=key, value=value, headers=headers) is None:
            yield batch
            batch = producer.create_batch()
            batch.append(timestamp=None, key=key, value=value, headers=headers)
    yield batch


def partition_of(key: bytes | None, id: int, partitions: int) -> int:
    """Return the partition that every Kafka client's default partitioner chooses for the key.

    Events without a key take turns.
    """
    return id % partitions if key is None else _partition_of_key(key, partitions)


@lru_cache(maxsize=65_536)
def _partition_of_key(key: bytes, partitions: int) -> int:
    return int(murmur2(key) & 0x7FFFFFFF) % partitions
