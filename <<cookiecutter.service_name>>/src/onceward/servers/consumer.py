"""The engine's `GroupMember` by aiokafka: a consumer that lets brokers gather records."""

import asyncio
import time
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from copy import copy
from itertools import chain
from typing import Any, ClassVar

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.client import ConnectionGroup
from aiokafka.consumer import fetcher
from aiokafka.errors import ConsumerStoppedError, KafkaError, for_code
from aiokafka.protocol.commit import OffsetFetchRequest
from aiokafka.protocol.metadata import MetadataRequest

from .member import Bound
from .patches import Client, Coordinator, stop_within
from .record_batches import FetchedBatches, FetchedRecords
from .subclassing import using

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

_LEVELS = {"end": fetcher.READ_UNCOMMITTED, "stable": fetcher.READ_COMMITTED}

_process_fetch = using(
    fetcher.Fetcher._proc_fetch_request,
    MemoryRecords=FetchedBatches,
    PartitionRecords=FetchedRecords,
)


class Fetcher(fetcher.Fetcher):  # type: ignore[misc]  # it has no types
    """A fetcher that lets brokers gather records, wakes one reader, and times their answers.

    What is wrong: aiokafka sends a fetch as soon as the one before is answered. At some hundred
    records a second each has a record or two, at the cost of one with fifty. Records of any
    partition wake the waiters of all. And a consumer reads on at its offset if a topic was created
    again, or a leader has lost records, and others are in their place: it asks neither for the
    topic's id (KIP-516) nor where its leader epoch ends (KIP-320).

    To see it: send 500 records a second, one by one, and count the fetches; delete a topic that is
    read, and create it again.

    The change: a pause between fetches grows with the rate of records, a waiter is of one
    partition, and `answers` has the gaps behind which `PartitionPosition` compares a record.
    """

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
        has_records: bool = await _process_fetch(self, assignment, node_id, request)
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


_init = using(AIOKafkaConsumer.__init__, AIOKafkaClient=Client)


class KafkaConsumer(AIOKafkaConsumer):  # type: ignore[misc]  # it has no types
    """A consumer that polls less often without records, and reports what prevents it from reading.

    What is wrong: a consumer for which no records come polls the brokers as often as any other,
    which is most of its cost then, and does not report that its fetching task has ended, or that
    brokers do not answer. One that may not join its group reports that to a call that waits for
    records, and waits for such a call before it tries again (`_push_error_to_user`): without an
    assigned partition there is none.

    To see it: count the fetches of an idle consumer; stop its brokers; deny it its group.

    The change: the wait of a fetch depends on whether records came, and `problem` and `rejection`
    can be called at any time.
    """

    start = using(AIOKafkaConsumer.start, Fetcher=Fetcher, GroupCoordinator=Coordinator)
    _busy_until = 0.0

    def __init__(self, *topics: str, **options: Any) -> None:
        _init(self, *topics, **options)

    async def stop(self, seconds: float | None = None) -> None:
        """See `GroupMember`; without `seconds` there is no limit."""
        await stop_within(seconds, super().stop(), self._client)

    def hold(self, share: int) -> None:
        """See `GroupMember`."""
        self._fetcher._max_partition_fetch_bytes = min(share, _FETCH_BYTES)

    @contextmanager
    def resting(self, partition: TopicPartition) -> Iterator[None]:
        """See `GroupMember`."""
        with suppress(Exception):  # it may be revoked
            self.pause(partition)
        self._fetcher._records.pop(partition, None)
        yield
        with suppress(Exception):
            self.resume(partition)
        self._fetcher._notify(self._fetcher._wait_consume_future)

    def link(self, partition: TopicPartition) -> object | None:
        """Return the leader of the partition, the connection to it, and since when it has answered
        without a gap; see `GroupMember`."""
        node = self._client.cluster.leader_for_partition(partition)
        if node in (None, -1):
            return None
        connection = self._client._conns.get((node, ConnectionGroup.DEFAULT))
        since, *_ = self._fetcher.answers.get(partition, (None,))
        return node, connection, since

    async def arrival(self, partition: TopicPartition, until: float) -> FetchedBatches | None:
        """See `GroupMember`; it is woken only by batches of its own partition."""
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
        batches.stable = self.last_stable_offset(partition)
        return batches

    async def take(self, partition: TopicPartition, most: int) -> list[ConsumerRecord]:
        """See `GroupMember`.

        It replaces `getmany`, which libraries for tracing wrap: they fail at some headers.
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

    async def offsets(
        self, bound: Bound, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """See `GroupMember`."""
        found: dict[TopicPartition, int]
        if bound == "first":
            found = await self.beginning_offsets(partitions)
        else:
            asking = copy(self._fetcher)  # the fetcher itself continues to read at its level
            asking._isolation_level = _LEVELS[bound]
            found = await asking.end_offsets(partitions, self._request_timeout_ms)
        return found

    async def missing_topics(self, topics: Set[str], seconds: float) -> dict[str, bool]:
        """See `GroupMember`."""
        known = {topic for topic in topics if self.partitions_for_topic(topic)}
        if known != topics:
            # The client's metadata may be older than the topic.
            with suppress(KafkaError, TimeoutError):
                known |= await asyncio.wait_for(self.topics(), seconds)
        hidden = self._client.cluster.unauthorized_topics
        return {topic: topic in hidden for topic in topics - known}

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

    def rejection(self) -> KafkaError | None:
        """See `GroupMember`."""
        if self._fetcher.error_future.done():
            self._fetcher.error_future.result()
        if (coordinating := self._coordinator._coordination_task).done():
            coordinating.result()
        try:
            self._coordinator.check_errors()
        except KafkaError as error:
            return error
        return None

    def problem(self, partitions: Iterable[TopicPartition], patience: float) -> str | None:
        """See `GroupMember`. While it joins, it does not notice that brokers are unavailable."""
        cluster = self._client.cluster
        silence = time.time() - cluster._last_successful_refresh_ms / 1_000
        if silence > patience:
            return f"the brokers have not answered for {silence:.0f} s{self._client.reasons}"
        if self._coordinator.coordinator_id is None:
            return f"the group has no coordinator{self._client.reasons}"
        leaderless = [
            f"{one.topic}/{one.partition}" for one in partitions if self.link(one) is None
        ]
        return f"no leader for {', '.join(sorted(leaderless))}" if leaderless else None
