"""What the engine needs of a Kafka client to consume: a member of a group, and no more.

`KafkaConsumer` is one by aiokafka, with the classic protocol of groups. Another one, such as one
with the protocol of KIP-848, has these methods; `consume` needs no change. Producers, queries about
offsets and topics, and admin requests are not part of it: neither protocol of groups changes them.

Partitions, records and errors are aiokafka's `TopicPartition`, `ConsumerRecord` and `KafkaError`.
"""

from collections.abc import Awaitable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

Bound = Literal["first", "end", "stable"]
"""The first offset that a partition has, the offset of the next record that is written, or the one
before which no producer's transaction is open, up to which `read_committed` reads."""


class Listener(Protocol):
    """What a member calls when its partitions change. It waits for either."""

    def on_partitions_revoked(self, revoked: Iterable[TopicPartition], /) -> Awaitable[None]:
        """End the work on all partitions: what follows is the whole new assignment."""

    def on_partitions_assigned(self, assigned: Iterable[TopicPartition], /) -> Awaitable[None]:
        """Begin with these partitions, which are all that the member has."""


class Arrived(Protocol):
    """Batches of a partition that have arrived, and are not unpacked yet."""

    room: int
    """Bytes to which the next batches may unpack together."""
    epoch: int
    """Leader epoch of the first batch; -1: unknown."""
    whole: range
    """Offsets of the first batch, unless compaction may have removed some."""
    stable: int | None
    """Offset of the partition before which no producer's transaction is open, if it is known."""


class GroupMember(Protocol):
    """A member of a consumer group, which reads committed records from where the engine says.

    It never commits or resets an offset by itself. It stays a member while its partitions rest, and
    joins again after an outage. Methods that wait for brokers raise `KafkaError`.
    """

    async def start(self) -> None:
        """Connect to the brokers. After an error it can be called again, or `stop` has to be."""

    async def stop(self, seconds: float) -> None:
        """Leave the group and end all tasks; after `seconds` abort connections and requests."""

    def subscribe(self, topics: Sequence[str], *, listener: Listener) -> None:
        """Join the group, and call the listener with the partitions of these topics."""

    async def commit(self, offsets: Mapping[TopicPartition, tuple[int, str]], /) -> None:
        """Commit offsets to the group, each with a text that stands next to it."""

    async def missing_topics(self, topics: Set[str], seconds: float) -> Mapping[str, bool]:
        """Return the topics that the brokers do not name; True: this user may not describe it.

        Queries the brokers for at most `seconds`. If they do not answer, what was known counts.
        """

    async def offsets(
        self, bound: Bound, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Return this offset of each partition; waits while one of them has no leader."""

    def hold(self, share: int) -> None:
        """Fetch at most this many bytes of each partition, or one larger batch."""

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Read on from the offset, and discard what was fetched before."""

    async def position(self, partition: TopicPartition) -> int:
        """Return the offset that is read next, behind gaps that were fetched."""

    def resting(self, partition: TopicPartition) -> AbstractContextManager[None]:
        """Hold and fetch nothing of the partition in the block; then read on where it was."""

    async def arrival(self, partition: TopicPartition, until: float) -> Arrived | None:
        """Wait for batches of the partition; `take` unpacks them, this does not.

        Returns None after `until`, a time of the event loop, and if `take` will raise an error.
        """

    async def take(self, partition: TopicPartition, most: int) -> list[ConsumerRecord]:
        """Return at most `most` records that have arrived, in order; does not wait.

        Raises `UnreadableBatch` for a batch that can't be unpacked in its room or has no valid
        records, and `OffsetOutOfRangeError` if the partition does not have the offset.
        """

    def link(self, partition: TopicPartition) -> object | None:
        """Return an object that differs from the one before if the partition may be another one:
        behind another leader, another connection, or a gap in the answers. None: no leader."""

    def rejection(self) -> KafkaError | None:
        """Return why the group has rejected this member since the last call; it tries again.

        Raises the error with which one of the client's own tasks has ended.
        """

    def problem(self, partitions: Iterable[TopicPartition], patience: float) -> str | None:
        """Return why the brokers can't be used, without a request; None if they can.

        `patience`: seconds since the last answer after which they count as unavailable.
        """
