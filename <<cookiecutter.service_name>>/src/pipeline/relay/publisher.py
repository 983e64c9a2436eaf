"""The publisher: sends a page of outbox events to Kafka, in order, and tells what is refused."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import asyncpg
from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    KafkaError,
    MessageSizeTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
from aiokafka.partitioner import murmur2
from aiokafka.producer.message_accumulator import BatchBuilder

from pipeline.errors import describe_error
from pipeline.events.message import LONGEST_KEPT_KEY, event_headers, headers_of
from pipeline.observe import metrics, traces
from pipeline.servers import clients
from pipeline.servers.tasks import in_background
from pipeline.settings import Settings

from .rejection import Chain, Page, Refused, refusal_of

log = logging.getLogger(__name__)

_BATCH_BYTES = 128 * 1024
"""A larger event is a batch by itself; topics accept 1 MB by default."""
_DEPARTURE_SECONDS = 0.001
"""After this long a batch is on its way, and the next one is filled."""
_METADATA_SECONDS = 5.0
_ASKS = 5
"""So often the brokers are asked for a topic that is new to the producer, before it is missing."""
_ASK_SECONDS = 0.1
_LOOK_SECONDS = 1.0
"""After this long without an acknowledgement: is the topic still there?"""
_STOP_SECONDS = 5.0
_FENCE_SECONDS = 1.0
"""Our own shards wait meanwhile."""


_Filled = tuple[BatchBuilder, int]
"""A batch, and how many events are in it."""


class LeaseExpired(Exception):
    """The relay's time ran out before the send: another one may own the shards by now."""


class NotSent(Exception):
    """Kafka has not answered for all events; the text says of which topic and why."""


class Publisher:
    """An idempotent producer that is thrown away after a failure, and after a refusal.

    A batch that is refused, or expires in the client, has used up a sequence number, and a later
    one might then overtake it, or be taken for it. A new producer starts with a clean slate.
    """

    def __init__(self, settings: Settings, *, client_id: str, owner: str) -> None:
        self._settings = settings
        self._client_id = client_id
        self._owner = owner
        self._producer: AIOKafkaProducer | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self._unfenced: set[str] = set()

    async def send(self, events: Sequence[asyncpg.Record], may_send: Callable[[], bool]) -> Refused:
        """Send the events; those that are not returned are acknowledged by all replicas in sync.

        Events of one Kafka partition are sent in the order given, one batch unacknowledged at a
        time. Behind one that Kafka refuses none of its key is sent, and none of its topic where the
        refusal is the topic's. After an error nothing is known about any of them: send them all
        again. `may_send` is asked before every batch.

        Raises `NotSent`, and `LeaseExpired` when `may_send` says no.
        """
        page = Page()
        try:
            chains = await self._chains(events, page)
            while chains:
                await self._send_round(chains, page, may_send)
                chains = page.left(chains)
        except BaseException:
            # What it has begun, the next one with its transactional id aborts.
            await self.discard()
            raise
        return page.refused

    async def _send_round(
        self, chains: Sequence[Chain], page: Page, may_send: Callable[[], bool]
    ) -> None:
        """Send every chain to its end, or to its first refusal: what is behind needs a new round.

        In a transaction a refusal takes everything back, for the next round to send again.
        """
        producer = await self._started()
        await _ask_for_topics(producer, {chain.topic for chain in chains})
        transactional = self._settings.relay_transactional
        page.is_void = False
        if transactional:
            await producer.begin_transaction()
        sending = (self._send_chain(producer, chain, page, may_send) for chain in chains)
        # All of them end before an error is raised: none may go on behind our back.
        outcomes = await asyncio.gather(*sending, return_exceptions=True)
        is_refused = any(outcome is True for outcome in outcomes)
        for outcome in outcomes:
            # A refusal makes the rest of its transaction fail, which the next round will show.
            if isinstance(outcome, BaseException) and not (
                is_refused and isinstance(outcome, NotSent)
            ):
                raise outcome
        if is_refused:
            self._producer = None
            self._stop_beside(producer)
        elif transactional:
            await _commit(producer)
        for chain in chains:
            if is_refused and transactional:
                chain.take_back()
            metrics.published(chain.topic, sum(map(len, chain.taken)))
            chain.taken = []

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
                    self._stop_beside(producer)
        except (KafkaError, TimeoutError) as error:
            if owner not in self._unfenced:
                log.warning(
                    "relay: %s can't be fenced, its shards wait: %s", owner, describe_error(error)
                )
            self._unfenced.add(owner)
            return False
        self._unfenced.discard(owner)
        return True

    def _stop_beside(self, producer: AIOKafkaProducer) -> None:
        """Stop a producer that nobody needs to wait for."""
        stopping = asyncio.create_task(clients.stop(producer, _STOP_SECONDS))
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)

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
            **clients.connection_options(self._settings),
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

    async def _chains(self, events: Sequence[asyncpg.Record], page: Page) -> list[Chain]:
        producer = await self._started()
        counts = dict.fromkeys((event["topic"] for event in events), 0)
        await _ask_for_topics(producer, counts)
        errors: dict[str, KafkaError] = {}
        for topic in counts:
            try:
                counts[topic] = _partitions(producer, topic)
            except KafkaError as error:
                errors[topic] = error
        runs: defaultdict[tuple[str, int], list[asyncpg.Record]] = defaultdict(list)
        for event in events:
            topic = event["topic"]
            if topic in errors:
                page.refused[event["id"]] = refusal_of(errors[topic], event)
                continue
            partition = partition_of(event["key"], event["id"], counts[topic])
            runs[topic, partition].append(event)
        return [Chain(topic, partition, [run]) for (topic, partition), run in runs.items()]

    async def _send_chain(
        self,
        producer: AIOKafkaProducer,
        chain: Chain,
        page: Page,
        may_send: Callable[[], bool],
    ) -> bool:
        """Send until all is acknowledged, or something is refused; says which."""
        topic, events = chain.topic, list(chain.events())
        with traces.sending(
            topic, chain.partition, len(events), (event["traceparent"] for event in events)
        ) as operation:
            following: _Filled | None = None
            while chain.runs:
                (batch, count), following = following or _filled(producer, chain.runs[0]), None
                size = batch.size()
                is_sent = not page.is_too_large(topic, size)
                try:
                    if not is_sent:
                        raise MessageSizeTooLargeError
                    if not may_send():
                        raise LeaseExpired("the lease ended before all events were sent")
                    async with in_background(_send_batch(producer, batch, chain, page)) as sent:
                        if rest := chain.runs[0][count:]:
                            await asyncio.wait({sent}, timeout=_DEPARTURE_SECONDS)
                            following = _filled(producer, rest)
                        await sent
                    chain.take(count)
                except KafkaError as error:
                    if is_sent:
                        metrics.not_published(topic, count, error)
                        operation.failed(error)
                    refusal = refusal_of(error, chain.runs[0][0])
                    if refusal is None:
                        raise NotSent(
                            f"{topic}/{chain.partition}: {describe_error(error)}"
                        ) from error
                    following = None
                    page.blame(chain, refusal, count, size)
                    if is_sent:
                        page.is_void = self._settings.relay_transactional
                        return True
        return False


async def _commit(producer: AIOKafkaProducer) -> None:
    try:
        await producer.commit_transaction()
    except KafkaError as error:
        raise NotSent(f"Kafka did not commit the events: {describe_error(error)}") from error


async def _ask_for_topics(producer: AIOKafkaProducer, topics: Iterable[str]) -> None:
    """Let the client know the topics, or know that the brokers don't."""
    client = producer.client
    are_new = [not client.add_topic(topic).done() for topic in topics]
    # The first answer may be to an earlier question, and a broker may not know the newest topics.
    for ask in range(_ASKS if any(are_new) else 1):
        if ask > 1:
            await asyncio.sleep(_ASK_SECONDS)
        if all(client.cluster.partitions_for_topic(topic) for topic in topics):
            return
        try:
            answered = await asyncio.wait_for(client.force_metadata_update(), _METADATA_SECONDS)
        except TimeoutError:
            answered = False
        if not answered:
            raise NotSent("the brokers do not say which topics there are")


def _partitions(producer: AIOKafkaProducer, topic: str) -> int:
    """Return how many there are; raises what `refusal_of` knows where there is no topic for us."""
    cluster = producer.client.cluster
    partitions = cluster.partitions_for_topic(topic)
    if partitions:
        return len(partitions)
    if topic in cluster.unauthorized_topics:
        raise TopicAuthorizationFailedError(topic)
    raise UnknownTopicOrPartitionError


async def _send_batch(
    producer: AIOKafkaProducer, batch: BatchBuilder, chain: Chain, page: Page
) -> None:
    """Send a batch and wait for its acknowledgement."""
    # The client would wait for a topic that has gone until it comes back.
    if chain.partition >= _partitions(producer, chain.topic):
        raise NotSent(f"{chain.topic} has lost partitions")
    sent = await producer.send_batch(batch, chain.topic, partition=chain.partition)
    try:
        while not sent.done():
            await asyncio.wait({sent}, timeout=_LOOK_SECONDS)
            if not sent.done():
                looked = producer.client.force_metadata_update()
                await asyncio.wait(
                    {sent, looked}, timeout=_METADATA_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                _partitions(producer, chain.topic)
                if page.is_void:
                    raise NotSent("its transaction can't be committed")
        sent.result()
    finally:
        sent.cancel()


def _filled(producer: AIOKafkaProducer, events: Sequence[asyncpg.Record]) -> _Filled:
    """Return a batch, and how many events have found room in it: the first one always does."""
    batch = producer.create_batch()
    for count, event in enumerate(events):
        added = batch.append(
            timestamp=None, key=event["key"], value=event["payload"], headers=_headers(event)
        )
        if added is None:
            return batch, count
    return batch, len(events)


def _headers(event: asyncpg.Record) -> Sequence[tuple[str, bytes | None]]:
    if event["headers"] is not None:
        return headers_of(event["headers"])
    headers = event_headers(
        id=event["event_id"],
        source=event["source"],
        type=event["type"],
        time=event["created_at"],
        subject=event["subject"],
        sequence=event["sequence"],
        content_type=event["content_type"],
        traceparent=event["traceparent"],
        tracestate=event["tracestate"],
        baggage=event["baggage"],
    )
    if event["dataref"] is None:
        return headers
    names = "dataref", "datalength", "datachecksum"
    return [*headers, *((f"ce_{name}", str(event[name]).encode()) for name in names)]


def partition_of(key: bytes | None, id: int, partitions: int) -> int:
    """Return the partition that every Kafka client's default partitioner chooses for the key.

    Events without a key take turns.
    """
    if key is None:
        return id % partitions
    found = _kept_partition if len(key) <= LONGEST_KEPT_KEY else _partition_of_key
    return found(key, partitions)


def _partition_of_key(key: bytes, partitions: int) -> int:
    return int(murmur2(key) & 0x7FFFFFFF) % partitions


_kept_partition = lru_cache(maxsize=65_536)(_partition_of_key)
