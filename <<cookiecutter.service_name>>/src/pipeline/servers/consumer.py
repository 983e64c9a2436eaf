"""A consumer of aiokafka that lets brokers gather records, and answers what the engine asks it.

aiokafka sends a fetch as soon as the one before is answered. At some hundred records a second each
has a record or two, at the cost of one with fifty, and of a transaction.
"""

import asyncio
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from itertools import chain
from typing import Any, ClassVar

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.client import ConnectionGroup
from aiokafka.consumer import consumer, fetcher
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.errors import ConsumerStoppedError, KafkaError, for_code
from aiokafka.protocol.commit import OffsetFetchRequest
from aiokafka.protocol.metadata import MetadataRequest

from .record_batches import FetchedBatches, FetchedRecords

MAX_WAIT_MS, IDLE_MAX_WAIT_MS = 100, 1000
"""How long a broker waits for records before it answers that there are none. A partition whose
records were just taken waits for the fetch that is under way."""
_SILENCE_SECONDS = 2 * IDLE_MAX_WAIT_MS / 1_000
"""A partition may be another one after an answer that is later by this than the one before took."""
_BUSY_SECONDS = 2.0
"""A consumer is idle after this long without records."""

_GATHER_SECONDS = 0.025
"""Longest pause between two fetches, in which the brokers gather records."""
_UNGATHERED = 100
"""Records a second up to which a fetch is sent at once."""
_COUNTING_SECONDS = 0.5
"""How long records are counted to compute their rate."""

_FETCH_BYTES = 4 * 2**20
"""Largest fetch of a partition: several batches of small records. Its last batch is only partly
full, and applying that takes too little time to decode a full one meanwhile."""

fetcher.MemoryRecords, fetcher.PartitionRecords = FetchedBatches, FetchedRecords


class Fetcher(fetcher.Fetcher):  # type: ignore[misc]  # it has no types
    """A fetcher that lets the brokers gather records while many arrive, one by one."""

    awaited: ClassVar[dict[asyncio.Future[None], TopicPartition]] = {}
    """The partition whose records each waiting reader wants, of whatever fetcher."""
    _pause = 0.0
    _rests_until = 0.0
    _counted = 0
    _counted_since = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.answers: dict[TopicPartition, tuple[float, float, float]] = {}
        """Since when each partition has been answered without a gap, when last, how long it took.

        A gap is an error, a failed request, or a silence: of the brokers, of a process that was
        stopped or busy.
        """

    def count(self, records: int) -> None:
        """Count records that have arrived; the pause between two fetches grows with their rate."""
        self._counted += records
        now = self._loop.time()
        if (seconds := now - self._counted_since) > _COUNTING_SECONDS:
            rate = self._counted / seconds
            self._pause = _GATHER_SECONDS * max(0.0, 1 - _UNGATHERED / rate)
            self._counted, self._counted_since = 0, now

    def _notify(self, future: asyncio.Future[None]) -> None:
        awaited = self.awaited.get(future)
        if self._closed or awaited is None or awaited in self._records:
            super()._notify(future)

    async def _proc_fetch_request(self, assignment: Any, node_id: int, request: Any) -> bool:
        if (rest := self._rests_until - self._loop.time()) > 0:
            try:
                await asyncio.sleep(rest)
            except asyncio.CancelledError:
                return False  # as it does while it waits for the broker
        asked = [TopicPartition(topic, one) for topic, its in request.topics for one, *_ in its]
        for one in asked:
            assignment.state_value(one).timestamp = None
        sent = self._loop.time()
        has_records: bool = await super()._proc_fetch_request(assignment, node_id, request)
        now = self._loop.time()
        for one in asked:
            since, last, took = self.answers.get(one, (now, now, 0.0))
            is_silence = now - last > _SILENCE_SECONDS + took
            has_gap = is_silence or assignment.state_value(one).timestamp is None
            self.answers[one] = now if has_gap else since, now, now - sent
        # The brokers rest together, so that their records arrive together.
        if has_records and now > self._rests_until:
            self._rests_until = now + self._pause
        return has_records


consumer.Fetcher = Fetcher


class Coordinator(GroupCoordinator):  # type: ignore[misc]  # it has no types
    """A member that is fenced if another process takes its `group.instance.id`."""

    member_id: str
    _joined_again = ""
    """The member id with which it joined once more, to learn whether it leads the group."""

    def reset_generation(self) -> None:
        member_id = self.member_id
        super().reset_generation()
        if self._group_instance_id and self._heartbeat_task is not None:
            # With its member id the broker rejects a member that was replaced; without, it would
            # replace its successor.
            self.member_id = member_id

    async def _do_rejoin_group(self, subscription: Any) -> bool:
        before = self._joined_again
        has_joined: bool = await super()._do_rejoin_group(subscription)
        return has_joined and self._joined_again == before

    async def _on_join_complete(self, generation: int, member_id: str, *assigned: Any) -> None:
        is_follower = self._group_subscription is None
        if self._group_instance_id and is_follower and member_id != self._joined_again:
            # The broker tells a leader that has restarted that it leads only when it joins again.
            self._joined_again = member_id
            self.request_rejoin()
        else:
            await super()._on_join_complete(generation, member_id, *assigned)


consumer.GroupCoordinator = Coordinator


class KafkaConsumer(AIOKafkaConsumer):  # type: ignore[misc]  # it has no types
    """A consumer that polls less often while no records come, which is most of its cost then."""

    _busy_until = 0.0

    def hold(self, share: int) -> None:
        """Fetch no more than a share of each partition, or one larger batch.

        The lock `exceeding` is for those that hold more of a partition.
        """
        self.share, self.exceeding = share, asyncio.Lock()
        self._fetcher._max_partition_fetch_bytes = min(share, _FETCH_BYTES)

    @contextmanager
    def resting(self, partition: TopicPartition) -> Iterator[None]:
        """Hold and fetch nothing of the partition in the block; then go on where it was."""
        with suppress(Exception):  # it may be revoked
            self.pause(partition)
        self._fetcher._records.pop(partition, None)
        yield
        with suppress(Exception):
            self.resume(partition)
        self._fetcher._notify(self._fetcher._wait_consume_future)

    def link(self, partition: TopicPartition) -> object:
        """Return the leader of the partition, the connection to it, and since when it has answered
        without a gap."""
        node = self._client.cluster.leader_for_partition(partition)
        connection = self._client._conns.get((node, ConnectionGroup.DEFAULT))
        since, *_ = self._fetcher.answers.get(partition, (None,))
        return node, connection, since

    async def arrival(self, partition: TopicPartition, until: float) -> FetchedBatches | None:
        """Wait for batches of the partition; `take` unpacks them, this doesn't.

        It is woken only by those of its own partition. Returns None after `until`, a time of the
        event loop, and if `take` will raise an error.
        """
        fetching = self._fetcher
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while partition not in fetching._records and not fetching._closed:
                    waiter = fetching._create_fetch_waiter()
                    fetching.awaited[waiter] = partition
                    try:
                        await waiter  # raises why the group rejects the member
                    finally:
                        del fetching.awaited[waiter]
        arrived = fetching._records.get(partition)
        if not isinstance(arrived, fetcher.FetchResult):
            return None
        batches: FetchedBatches = arrived._partition_records._records
        return batches

    async def take(self, partition: TopicPartition, most: int) -> list[ConsumerRecord]:
        """Return records of the partition that have arrived, so many at most; it does not wait.

        It stands in for `getmany`, which libraries for tracing wrap: they fail over some headers.
        """
        if self._closed:
            raise ConsumerStoppedError
        self._coordinator.check_errors()
        with self._subscription.fetch_context():
            fetched = await self._fetcher.fetched_records([partition], 0, most)
        found: list[ConsumerRecord] = fetched.get(partition, [])
        if found:
            self._busy_until = time.monotonic() + _BUSY_SECONDS
            self._fetcher.count(len(found))
        is_busy = time.monotonic() < self._busy_until
        self._fetcher._fetch_max_wait_ms = MAX_WAIT_MS if is_busy else IDLE_MAX_WAIT_MS
        return found

    async def end_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the offset in each partition at which the next record will be written."""
        return await self._ends(partitions, fetcher.READ_UNCOMMITTED)

    async def stable_offsets(
        self, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Return the offset in each partition before which no producer's transaction is open.

        `read_committed` reads up to there. If no transaction is open it is the end.
        """
        return await self._ends(partitions, fetcher.READ_COMMITTED)

    async def _ends(
        self, partitions: Sequence[TopicPartition], level: int
    ) -> dict[TopicPartition, int]:
        asking = copy(self._fetcher)  # the fetcher itself goes on reading at its own level
        asking._isolation_level = level
        found: dict[TopicPartition, int] = await asking.end_offsets(
            partitions, self._request_timeout_ms
        )
        return found

    @property
    def hidden_topics(self) -> set[str]:
        """Topics of the subscription that the user may not describe, whether they exist or not."""
        hidden: set[str] = self._client.cluster.unauthorized_topics
        return hidden

    async def offset_metadata(self, topics: Collection[str]) -> set[str]:
        """Return the texts beside the offsets that the group has committed of these topics."""
        group = self._coordinator
        await group.ensure_coordinator_known()
        response = await group._send_req(OffsetFetchRequest(group.group_id, None))
        if response.error_code:
            group.coordinator_dead()
            raise for_code(response.error_code)(group.group_id)
        found = (partitions for topic, partitions in response.topics if topic in topics)
        return {metadata for _, _, metadata, _ in chain.from_iterable(found)}

    async def cluster_id(self) -> str | None:
        """Return the id of the brokers' cluster; None if it has none."""
        node = self._client.get_random_node()
        answer = await self._client.send(node, MetadataRequest([], False))
        return getattr(answer, "cluster_id", None)

    def raise_if_ended(self) -> None:
        """Raise the error with which the task of the fetcher or the coordinator has ended."""
        if self._fetcher.error_future.done():
            self._fetcher.error_future.result()
        if (coordinating := self._coordinator._coordination_task).done():
            coordinating.result()

    def rejection(self) -> KafkaError | None:
        """Return why the group has rejected this member since the last call; it tries again."""
        try:
            self._coordinator.check_errors()
        except KafkaError as error:
            return error
        return None

    def problem(self, partitions: Iterable[TopicPartition], patience: float) -> str | None:
        """Return why the brokers can't be used, from the state of the client; None if they can.

        `patience`: seconds since the last answer after which they count as unavailable, of a client
        that has joined its group. While it joins it does not notice that they are.
        """
        cluster = self._client.cluster
        silence = time.time() - cluster._last_successful_refresh_ms / 1_000
        if silence > patience:
            return f"the brokers have not answered for {silence:.0f} s{self._client.reasons}"
        if self._coordinator.coordinator_id is None:
            return f"the group has no coordinator{self._client.reasons}"
        leaderless = [f"{one.topic}/{one.partition}" for one in self.without_leader(partitions)]
        return f"no leader for {', '.join(sorted(leaderless))}" if leaderless else None

    def without_leader(self, partitions: Iterable[TopicPartition]) -> set[TopicPartition]:
        """Return the partitions that have no leader, as far as the client knows."""
        leader = self._client.cluster.leader_for_partition
        return {one for one in partitions if leader(one) in (None, -1)}
