"""Batches: turn a page of events into Kafka batches, and narrow down a rejection to its event."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import asyncpg
from aiokafka import AIOKafkaProducer
from aiokafka.partitioner import murmur2
from aiokafka.producer.message_accumulator import BatchBuilder

from onceward.events.cloudevents import sent_headers
from onceward.events.message import LONGEST_KEPT_KEY

from .rejections import Rejection

_AT_MOST = 20
"""Rejections of a partition in a page after which its topic waits: each one costs a producer."""

Filled = tuple[BatchBuilder, int]
"""A batch, and the number of its events."""


@dataclass
class Chain:
    """Events of one Kafka partition that are still to be sent, in order."""

    topic: str
    partition: int
    events: list[asyncpg.Record]
    sent: int = 0
    """How many of the first ones Kafka has acknowledged in this round."""
    at_most: int | None = None
    """Limit of events in a batch while the event at fault for a rejection is searched for."""
    rejections: int = 0

    def fill(self, producer: AIOKafkaProducer, skipped: int = 0) -> Filled:
        """Return a batch of the next events, behind those `skipped`; the first one always fits."""
        begin = self.sent + skipped
        end = len(self.events) if self.at_most is None else begin + self.at_most
        batch = producer.create_batch()
        count = 0
        for event in self.events[begin:end]:
            added = batch.append(
                timestamp=None,
                key=event["key"],
                value=event["payload"],
                headers=sent_headers(event),
            )
            if added is None:
                break
            count += 1
        return batch, count

    def take(self, count: int) -> None:
        """Count the next events as acknowledged."""
        self.sent += count
        if self.at_most is not None:
            self.at_most *= 2


@dataclass
class Sending:
    """The state of a page that is being sent."""

    is_transactional: bool
    is_compressed: bool
    may_send: Callable[[], bool]
    """Called before every batch."""
    rejections: dict[int, Rejection] = field(default_factory=dict)
    is_void: bool = False
    """Whether a rejection has made Kafka's transaction impossible to commit."""
    _closed: dict[str, Rejection] = field(default_factory=dict)
    """Topics to which nothing more of the page is sent, with the reason."""
    _limits: dict[str, int] = field(default_factory=dict)
    """Size of the smallest batch that was too large for a topic."""

    def is_too_large(self, topic: str, size: int, count: int) -> bool:
        """Whether a batch of this size or a smaller one was rejected as too large before.

        A compressed batch of one event is never skipped: another one may be compressed better.
        """
        may_fit = self.is_compressed and count == 1
        return not may_fit and topic in self._limits and size >= self._limits[topic]

    def reject(self, chain: Chain, rejection: Rejection, count: int, size: int) -> None:
        """Handle a rejected batch: close its topic, halve the batch, or reject its one event."""
        is_new = not self.is_too_large(chain.topic, size, count)
        if rejection.reason == "too large" and is_new:
            self._limits[chain.topic] = size
        chain.rejections += is_new
        if rejection.of_topic:
            self._closed[chain.topic] = rejection
        elif count > 1:
            chain.at_most = count // 2
        else:
            self.rejections[chain.events.pop(chain.sent)["id"]] = rejection
        if chain.rejections >= _AT_MOST:
            text = (
                f"topic {chain.topic} has rejected {_AT_MOST} batches of a page:"
                " see `service dead events list`"
            )
            many = Rejection("topic rejects many", text, of_topic=True, waits=True)
            self._closed.setdefault(chain.topic, many)

    def left(self, chains: Sequence[Chain]) -> list[Chain]:
        """Return the chains with events to send; events of closed topics are rejected."""
        for chain in chains:
            if rejection := self._closed.get(chain.topic):
                self.rejections |= {event["id"]: rejection for event in chain.events}
                chain.events = []
        return [chain for chain in chains if chain.events]


def partition_of(key: bytes | None, id: int, partitions: int) -> int:
    """Return the partition that the default partitioner of Kafka clients chooses for the key.

    Events without a key are spread over the partitions by their id.
    """
    if key is None:
        return id % partitions
    # Only hashes of short keys are kept, which bounds the memory.
    hash_of = _kept_hash if len(key) <= LONGEST_KEPT_KEY else murmur2
    return int(hash_of(key) & 0x7FFFFFFF) % partitions


_kept_hash = lru_cache(maxsize=65_536)(murmur2)
