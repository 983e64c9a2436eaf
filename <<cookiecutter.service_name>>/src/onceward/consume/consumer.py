"""The consumer: a member of the group, with a reader for each partition assigned to it."""

import asyncio
import logging
import math
from collections.abc import Iterable
from time import monotonic, time

from aiokafka import ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import KafkaError

from onceward.apply.transactions import ConsumeTransactions
from onceward.errors import describe_error, is_infrastructure
from onceward.observe import metrics
from onceward.observe.health import Health
from onceward.servers import clients, topics
from onceward.servers.consumer import KafkaConsumer
from onceward.servers.member import GroupMember
from onceward.servers.retrying import Retrying
from onceward.servers.tasks import sleep_or_event

from .gathering import Gatherer
from .reader import LARGEST_SHARE, Reader, Share

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 3.0
"""Time-out of requests on which no record waits: committing offsets, leaving the group."""

_MEASURE_SECONDS = 15.0
"""Time between two measurements of the lag."""

_LEAVING_SECONDS = 1.0
"""Time that is left of a rebalance for joining the group again, once the readers have stopped."""

_METADATA_SECONDS = 10.0
"""How often the client refreshes partitions and their leaders."""

_FETCHER_POLL_MS = 1_000
"""How often the fetcher wakes up although no response has arrived. aiokafka's default, five times a
second, is a tenth of the cost of an idle service."""

_HEARTBEAT_MS = 3_000
"""Longest time in which a member learns that its group rebalances; the others wait for it."""

_SLACK_SECONDS = 5.0
"""How much longer than the session time-out a request may take before it fails."""


class Consumer(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    """A member of the consumer group, whose name is the service's."""

    def __init__(self, consume: ConsumeTransactions, health: Health, stamp: str) -> None:
        self._consume = consume
        self._topics = consume.handlers.topics
        self._settings = consume.settings
        self._health = health
        self._gatherer = Gatherer(consume)
        self._readers: dict[TopicPartition, Reader] = {}
        self._committed: dict[TopicPartition, int] = {}
        self._committing: asyncio.Task[None] | None = None
        self._watching: list[asyncio.Task[None]] = []
        self._has_joined = False
        self._stamp = stamp
        self._rejection = ""
        """Why the group's coordinator has rejected this member."""
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Join the group and read until `stop`; then finish the running batches and leave."""
        if not self._topics:
            log.info("no handler is registered: nothing is consumed")
            await self._stopping.wait()
            return
        self._health.not_ready("consumer", "has not joined its group yet")
        self._client = client = self._new_client()
        try:
            await Retrying(
                "connecting to Kafka",
                self._settings.kafka,
                unless=self._stopping.is_set,
                report=lambda reason: self._health.not_ready("consumer", reason),
            )(client.start)
            client.subscribe(sorted(self._topics), listener=self)
            while not self._stopping.is_set():
                for reader in self._readers.values():
                    reader.raise_if_ended()
                self._check_brokers()
                self._commit_offsets()
                await self._check_topics()
                await sleep_or_event(self._stopping, self._settings.offset_commit_interval)
            await self._stop_readers(None)  # `run` is cancelled if that takes too long
        except Exception as error:
            if not (self._stopping.is_set() and is_infrastructure(error)):
                raise
        finally:
            try:
                await self._stop_readers(0)
            finally:
                await client.stop(_ANSWER_SECONDS)
                if self._committing is not None:
                    self._committing.cancel()
                self._health.not_ready("consumer", "has left its group")

    def stop(self) -> None:
        """Make `run` end."""
        self._stopping.set()

    def _new_client(self) -> GroupMember:
        session_timeout = round(self._settings.kafka_session_timeout * 1000)
        return KafkaConsumer(
            **clients.connection_options(self._settings),
            group_id=self._consume.group,
            group_instance_id=self._settings.kafka_group_instance_id,
            client_rack=self._settings.kafka_client_rack,
            client_id=self._consume.group,  # processes of other releases recognize this one by it
            enable_auto_commit=False,
            # The position comes from PostgreSQL. A deleted offset is an error, never replaced.
            auto_offset_reset="none",
            isolation_level="read_committed",
            session_timeout_ms=session_timeout,
            heartbeat_interval_ms=min(session_timeout // 3, _HEARTBEAT_MS),
            rebalance_timeout_ms=session_timeout,
            request_timeout_ms=session_timeout + round(_SLACK_SECONDS * 1000),
            # A slow batch is ended by the transaction time-out, not by leaving the group.
            max_poll_interval_ms=2**31 - 1,
            consumer_timeout_ms=_FETCHER_POLL_MS,
            metadata_max_age_ms=round(_METADATA_SECONDS * 1_000),
        )

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Start a reader for every partition; called by aiokafka after a rebalance."""
        if self._stopping.is_set():
            return
        partitions = sorted(assigned)
        share = Share(min(self._settings.share(len(partitions)), LARGEST_SHARE))
        self._client.hold(share.size)
        for partition in partitions:
            self._readers[partition] = Reader(
                self._client, partition, share, self._consume, self._gatherer, self._health
            )
        metrics.partitions_assigned.set(len(self._readers))
        self._has_joined = True
        self._watching = [
            asyncio.create_task(self._describe_group()),
            asyncio.create_task(self._measure()),
        ]
        self._rejection = ""
        self._health.ready("consumer")

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Finish or abandon the running batches; called by aiokafka before a rebalance.

        All readers are stopped, whatever `revoked` holds: the group rebalances eagerly, so every
        partition is revoked, and `on_partitions_assigned` is called with the whole new assignment.
        """
        await self._stop_readers(self._settings.transaction_timeout)

    async def _stop_readers(self, grace: float | None) -> None:
        for task in self._watching:
            task.cancel()
        self._health.forget("group")
        begun = monotonic()
        readers = list(self._readers.values())
        await asyncio.gather(*(reader.stop(grace) for reader in readers))
        self._commit_offsets()
        if self._committing is not None:
            # The group waits no longer for its members; offsets in Kafka are for tools.
            left = self._settings.kafka_session_timeout - _LEAVING_SECONDS - (monotonic() - begun)
            limit = max(0.0, min(left, _ANSWER_SECONDS))
            await asyncio.wait({self._committing}, timeout=limit)
        for one in self._readers:
            metrics.observe_lag(one.topic, one.partition, 0, 0.0)
        self._readers.clear()
        metrics.partitions_assigned.set(0)
        self._committed.clear()

    def _commit_offsets(self) -> None:
        """Commit the positions as offsets to Kafka, for tools that show lag, with the stamp."""
        if self._committing is not None and not self._committing.done():
            # It ends with the outage. aiokafka leaves an unretrieved exception if it is cancelled.
            return
        behind = {
            partition: reader.position
            for partition, reader in self._readers.items()
            if reader.position is not None and reader.position != self._committed.get(partition)
        }
        if behind:
            self._committing = asyncio.create_task(self._commit(behind))

    async def _commit(self, offsets: dict[TopicPartition, int]) -> None:
        try:
            await self._client.commit({one: (at, self._stamp) for one, at in offsets.items()})
        except KafkaError as error:
            log.debug("offsets were not committed, the next ones will be: %s", error)
        else:
            self._committed |= offsets

    def _check_brokers(self) -> None:
        """Report whether the brokers answer: while no records come, no error would show it.

        Raises the error with which a task of the client has ended.
        """
        patience = _METADATA_SECONDS + _SLACK_SECONDS if self._has_joined else math.inf
        if rejection := self._client.rejection():
            self._rejection = (
                f"the group {self._consume.group!r} does not accept this member, which tries again:"
                f" {describe_error(rejection)}"
            )
        elif self._readers:
            self._rejection = ""
        if problem := self._rejection or self._client.problem(self._readers, patience):
            self._health.not_ready("consumer", f"{self._settings.kafka}: {problem}")
        elif self._has_joined:
            self._health.ready("consumer")

    async def _check_topics(self) -> None:
        missing = await self._client.missing_topics(self._topics, _ANSWER_SECONDS)
        for topic in self._topics:
            if topic not in missing:
                self._health.forget(f"topic {topic}")
            else:
                self._health.not_ready(
                    f"topic {topic}",
                    topics.MAY_NOT_DESCRIBE
                    if missing[topic]
                    else "does not exist: create it, or run `service topics create`",
                )

    async def _measure(self) -> None:
        """Report now and then how far behind the readers are."""
        behind: set[TopicPartition] = set()
        while self._readers:
            readers = dict(self._readers)
            try:
                # With one that has no leader the client would return none.
                having = [one for one in readers if self._client.link(one) is not None]
                asked = self._client.offsets("stable", having)
                ends = await asyncio.wait_for(asked, _ANSWER_SECONDS)
            except Exception as error:  # an outage is reported by itself
                log.debug("the lag is not measured: %s", describe_error(error))
                ends = {}
            for one, end in ends.items():
                position, since = readers[one].position, readers[one].since
                lag = max(0, end - position) if position is not None else 0
                # The record before one that has just come to an idle partition may be very old. And
                # what is paused waits because a person wants it to.
                is_late = lag and one in behind and not readers[one].limits.is_paused
                delay = max(0.0, time() - since) if since and is_late else 0.0
                metrics.observe_lag(one.topic, one.partition, lag, delay)
                if lag:
                    behind.add(one)
                else:
                    behind.discard(one)
            await asyncio.sleep(_MEASURE_SECONDS)

    async def _describe_group(self) -> None:
        """Report partitions that other programs read: only a rebalance changes which these are."""
        while True:
            # While processes start and stop, one rebalance follows another, and ends this.
            await asyncio.sleep(self._settings.offset_commit_interval)
            try:
                readers = await topics.readers(self._settings, self._consume.group)
                break
            except Exception as error:
                if not (isinstance(error, OSError) or getattr(error, "retriable", False)):
                    log.info("other programs in the group go unnoticed: %s", describe_error(error))
                    return
        strangers = [who for one, (_, who) in readers.items() if who and one.topic in self._topics]
        if strangers:
            programs = ", ".join(sorted({*strangers})[:3])
            what = f"other programs read partitions of the service ({len(strangers)}): {programs}"
            self._health.not_ready("group", f"{what}; end them, or give them a group of their own")
