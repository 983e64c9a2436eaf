"""The publisher: sends a page of outbox events to Kafka, in order; returns what is rejected."""

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence

import asyncpg
from aiokafka.errors import KafkaError, MessageSizeTooLargeError

from onceward.errors import describe_error
from onceward.observe import metrics, traces
from onceward.servers.clients import KafkaProducer, connection_options
from onceward.servers.patches import limit_wait_for_replicas
from onceward.servers.tasks import in_background
from onceward.settings import Settings

from .batches import Chain, Filled, Sending, partition_of
from .brokers import (
    REPLICATED_WITHIN,
    NotSent,
    check_leader,
    look_up_topics,
    partitions_of,
    send_batch,
)
from .cursor import LeaseExpired
from .rejections import Rejection, Rejections, rejection_of

log = logging.getLogger(__name__)

_BATCH_BYTES = 128 * 1024
"""A larger event is a batch by itself; topics accept 1 MB by default."""
_FILL_NEXT_BATCH_AFTER_SECONDS = 0.001
"""A pause in which the producer sends a batch, before the event loop is used to fill the next."""
_START_SECONDS = 5.0
"""Time-out of starting a producer: its transactional id may be busy."""
_STOP_SECONDS = 5.0
_FENCE_SECONDS = 1.0
"""Time-out of fencing another relay, while the relay's own shards wait."""

_PAGES = ("", "-2")
"""Endings of the transactional ids of a relay, which uses one at a time.

A transaction that has to be aborted keeps its id busy until its topics have leaders and replicas.
"""
TRIALS = ("-3",)
"""Those for events of topics that have refused some."""


class Publisher:
    """A producer that is replaced after a failure, and after a rejection.

    A batch that is rejected, or expires in the client, has used up a sequence number. A later batch
    could then overtake it, or be dropped as its duplicate. A new producer has new numbers.
    """

    def __init__(
        self, settings: Settings, *, client_id: str, owner: str, endings: Sequence[str] = _PAGES
    ) -> None:
        self._settings = settings
        self._client_id = client_id
        self._owner = owner
        self._endings = deque(endings if settings.relay_transactional else endings[:1])
        compression = settings.relay_compression
        self._compression = None if compression == "none" else compression
        self._producer: KafkaProducer | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self._unfenced: set[str] = set()

    async def look_up(self, topics: Collection[str]) -> None:
        """Start a producer and look topics up, so that `send` waits for neither.

        That may take long: read what you send afterwards. Raises `NotSent`.
        """
        try:
            await look_up_topics(await self._started(), topics)
        except BaseException:
            await self.discard()
            raise

    async def send(
        self, events: Sequence[asyncpg.Record], may_send: Callable[[], bool]
    ) -> Rejections:
        """Send the events; those that are not rejected are acknowledged by all replicas in sync.

        Call `look_up` for their topics just before: one that is not known is taken for missing.
        Events of one Kafka partition are sent in the order given, one batch unacknowledged at a
        time. Events behind a rejected one are still sent, unless their topic accepts none. After
        an error it is unknown which were sent: send all of them again. `may_send` is called before
        every batch. Events that `Encryption.decrypt` has returned as erased are rejected.

        Raises `NotSent`, and `LeaseExpired` when `may_send` returns False.
        """
        is_transactional = self._settings.relay_transactional
        sending = Sending(is_transactional, self._compression is not None, may_send)
        try:
            chains = await self._chains(events, sending)
            while chains:
                await self._send_round(chains, sending)
                if chains := sending.left(chains):  # the rest needs a new producer
                    topics = {chain.topic for chain in chains}
                    await look_up_topics(await self._started(), topics)
        except BaseException:
            # The next producer with its transactional id aborts what this one has begun.
            await self.discard()
            raise
        return sending.rejections

    async def _send_round(self, chains: Sequence[Chain], sending: Sending) -> None:
        """Send every chain up to its end or first rejection.

        In a transaction a rejection undoes all of the round; the next round sends it again.
        """
        producer = await self._started()
        sending.is_void = False
        if sending.is_transactional:
            await producer.begin_transaction()
        each = (_send_chain(producer, chain, sending) for chain in chains)
        # An error is raised when all have ended: none may keep sending in the background.
        outcomes = await asyncio.gather(*each, return_exceptions=True)
        is_rejected = any(outcome is True for outcome in outcomes)
        for outcome in outcomes:
            # A rejection makes other sends of its transaction fail; the next round repeats them.
            if isinstance(outcome, BaseException) and not (
                is_rejected and isinstance(outcome, NotSent)
            ):
                raise outcome
        if is_rejected:
            self._producer = None
            # What it has not sent yet is not to arrive later.
            self._stop_beside(producer, 0.0)
        elif sending.is_transactional:
            try:
                await producer.commit_transaction()
            except KafkaError as error:
                raise NotSent(f"Kafka did not commit: {describe_error(error)}") from error
        for chain in chains:
            if not (is_rejected and sending.is_transactional):
                metrics.published(chain.topic, chain.sent)
                del chain.events[: chain.sent]
            chain.sent = 0

    async def fence(self, owners: Sequence[str]) -> list[str]:
        """Make the brokers reject further events of these relays, before their shards are claimed.

        Returns the relays that were fenced; the shards of the others wait for the next attempt.
        Without `relay_transactional` nothing is done, and their late events arrive as repeats.
        """
        if not self._settings.relay_transactional:
            return list(owners)
        outcomes = await asyncio.gather(*(self._fence(owner) for owner in owners))
        return [owner for owner, is_fenced in zip(owners, outcomes, strict=True) if is_fenced]

    async def _fence(self, owner: str) -> bool:
        try:
            async with asyncio.timeout(_FENCE_SECONDS):
                each = (self._fence_id(owner + ending) for ending in (*_PAGES, *TRIALS))
                outcomes = await asyncio.gather(*each, return_exceptions=True)
                for error in filter(None, outcomes):
                    raise error
        except (KafkaError, TimeoutError) as error:
            if owner not in self._unfenced:
                log.warning(
                    "relay: cannot fence %s; its shards are paused: %s",
                    owner,
                    describe_error(error),
                )
            self._unfenced.add(owner)
            return False
        self._unfenced.discard(owner)
        return True

    async def _fence_id(self, owner: str) -> None:
        # A new producer with the same transactional id fences the old one.
        producer = await self._new_producer(owner)
        try:
            await producer.begin_transaction()
        finally:
            self._stop_beside(producer)

    def _stop_beside(self, producer: KafkaProducer, seconds: float = _STOP_SECONDS) -> None:
        stopping = asyncio.create_task(producer.stop(seconds))
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)

    async def discard(self) -> None:
        """Close the producer; the next `send` starts another."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await producer.stop(_STOP_SECONDS)
        await asyncio.gather(*self._stopping)

    async def _started(self) -> KafkaProducer:
        if self._producer is not None:
            return self._producer
        for _ in range(len(self._endings)):
            try:
                async with asyncio.timeout(_START_SECONDS):
                    self._producer = await self._new_producer(self._owner + self._endings[0])
                    return self._producer
            except TimeoutError:
                self._endings.rotate()
        raise NotSent("no producer can start: brokers are silent, or a transaction has not ended")

    async def _new_producer(self, owner: str) -> KafkaProducer:
        transactional = self._settings.relay_transactional
        producer = KafkaProducer(
            **connection_options(self._settings),
            client_id=self._client_id,
            transactional_id=f"{self._client_id}-{owner}" if transactional else None,
            enable_idempotence=self._settings.relay_idempotent,
            acks="all",
            compression_type=self._compression,
            max_batch_size=min(_BATCH_BYTES, self._settings.max_event_bytes),
            max_request_size=2 * self._settings.max_event_bytes,
            metadata_max_age_ms=30_000,
        )
        limit_wait_for_replicas(producer, REPLICATED_WITHIN)
        try:
            await producer.start()
        except BaseException:
            await producer.stop(_STOP_SECONDS)
            raise
        return producer

    async def _chains(self, events: Sequence[asyncpg.Record], sending: Sending) -> list[Chain]:
        producer = await self._started()
        counts = dict.fromkeys((event["topic"] for event in events), 0)
        errors: dict[str, KafkaError] = {}
        for topic in counts:
            try:
                counts[topic] = partitions_of(producer, topic)
            except KafkaError as error:
                errors[topic] = error
        placed: defaultdict[tuple[str, int], list[asyncpg.Record]] = defaultdict(list)
        for event in events:
            topic = event["topic"]
            if erased := event.get("erased"):
                sending.rejections[event["id"]] = Rejection("subject forgotten", erased)
            elif topic not in errors:
                partition = partition_of(event["key"], event["id"], counts[topic])
                placed[topic, partition].append(event)
            elif rejection := rejection_of(errors[topic], event):
                sending.rejections[event["id"]] = rejection
        return [Chain(*place, found) for place, found in placed.items()]


async def _send_chain(producer: KafkaProducer, chain: Chain, sending: Sending) -> bool:
    """Send until all is acknowledged or a rejection ends it.

    Returns whether a batch was rejected that was sent: what is left needs a new producer.
    """
    topic = chain.topic
    traceparents = [event["traceparent"] for event in chain.events]
    with traces.sending(topic, chain.partition, len(traceparents), traceparents) as operation:
        following: Filled | None = None
        while chain.sent < len(chain.events):
            (batch, count), following = following or chain.fill(producer), None
            size = batch.size()
            is_sent = False
            try:
                if sending.is_too_large(topic, size, count):
                    raise MessageSizeTooLargeError
                check_leader(producer, chain)
                if sending.is_void:
                    raise NotSent("its transaction can't be committed")
                if not sending.may_send():
                    raise LeaseExpired("the lease ended before all events were sent")
                is_sent = True
                async with in_background(send_batch(producer, batch, chain)) as sent:
                    if chain.sent + count < len(chain.events):
                        await asyncio.wait({sent}, timeout=_FILL_NEXT_BATCH_AFTER_SECONDS)
                        following = chain.fill(producer, skipped=count)
                    await sent
                chain.take(count)
            except KafkaError as error:
                if is_sent:
                    metrics.published(topic, count, error)
                    operation.failed(error)
                rejection = rejection_of(error, chain.events[chain.sent])
                if rejection is None:
                    raise NotSent(f"{topic}/{chain.partition}: {describe_error(error)}") from error
                following = None
                sending.reject(chain, rejection, count, size)
                if is_sent:
                    sending.is_void = sending.is_transactional
                    return True
                if rejection.of_topic:
                    return False
    return False
