"""Brokers: what they know of topics, and whether they acknowledge a batch.

Errors that say something of an event or its topic are those of `rejection_of`; `NotSent` is raised
for the others.
"""

import asyncio
from collections.abc import Collection
from time import monotonic

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    KafkaTimeoutError,
    LeaderNotAvailableError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
from aiokafka.producer.message_accumulator import BatchBuilder

from onceward.errors import OncewardError

from .batches import Chain

_METADATA_SECONDS = 5.0
_LOOKUPS = 5
"""Requests for a topic that is new to the producer, before it counts as missing."""
_LOOKUP_SECONDS = 0.1
_ACKNOWLEDGEMENT_SECONDS = 1.0
"""Time without an acknowledgement after which the topic is looked up again."""
_ACKNOWLEDGED_WITHIN = 10.0
"""Seconds in which brokers answer, but don't acknowledge a batch, after which it is refused."""
REPLICATED_WITHIN = 4.0
"""Seconds after which a broker answers a request although a topic of it lacks replicas.

It answers the next one only then: less than `_METADATA_SECONDS`, or it would look silent.
"""


class NotSent(OncewardError):
    """Kafka has not acknowledged all events; the text gives the topic and the error."""


async def look_up_topics(producer: AIOKafkaProducer, topics: Collection[str]) -> None:
    """Refresh the client's metadata until it has the topics, or twice if partitions lack leaders.

    Raises `NotSent`.
    """
    client, cluster = producer.client, producer.client.cluster
    are_new = [not client.add_topic(topic).done() for topic in topics]
    # The first response may be to an earlier request, and a broker may not know a new topic yet.
    for lookup in range(_LOOKUPS if any(are_new) else 2):
        if lookup > 1:
            await asyncio.sleep(_LOOKUP_SECONDS)
        known = [cluster.partitions_for_topic(topic) for topic in topics]
        led = [cluster.available_partitions_for_topic(topic) for topic in topics]
        if all(known) and (led == known or lookup > 1):
            return
        try:
            answered = await asyncio.wait_for(client.force_metadata_update(), _METADATA_SECONDS)
        except TimeoutError:
            answered = False
        if not answered:
            raise NotSent(f"the brokers do not answer requests for metadata{client.reasons}")


def partitions_of(producer: AIOKafkaProducer, topic: str) -> int:
    """Return the number of partitions; raises an error for `rejection_of` if there are none."""
    cluster = producer.client.cluster
    partitions = cluster.partitions_for_topic(topic)
    if partitions:
        return len(partitions)
    if topic in cluster.unauthorized_topics:
        raise TopicAuthorizationFailedError(topic)
    raise UnknownTopicOrPartitionError


def check_leader(producer: AIOKafkaProducer, chain: Chain) -> None:
    """Raise an error for `rejection_of` if the brokers say that the partition has no leader.

    The client would wait for one without a limit, and so would the end of its transaction.
    """
    partitions_of(producer, chain.topic)
    if chain.partition not in producer.client.cluster.available_partitions_for_topic(chain.topic):
        raise LeaderNotAvailableError


async def send_batch(producer: AIOKafkaProducer, batch: BatchBuilder, chain: Chain) -> None:
    """Send a batch and wait for its acknowledgement, while the client repeats what failed.

    Raises an error for `rejection_of` if it takes too long though brokers answer. The batch may
    still arrive then, as a repeat.
    """
    ends_at = monotonic() + _ACKNOWLEDGED_WITHIN
    sent = await producer.send_batch(batch, chain.topic, partition=chain.partition)
    try:
        while not sent.done():
            check_leader(producer, chain)
            if monotonic() > ends_at:
                raise KafkaTimeoutError("no acknowledgement")
            await asyncio.wait({sent}, timeout=_ACKNOWLEDGEMENT_SECONDS)
            if not sent.done():
                looked = producer.client.force_metadata_update()
                await asyncio.wait(
                    {sent, looked}, timeout=_METADATA_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if not (looked.done() and looked.result()):  # silence
                    ends_at = monotonic() + _ACKNOWLEDGED_WITHIN
        sent.result()
    finally:
        sent.cancel()
