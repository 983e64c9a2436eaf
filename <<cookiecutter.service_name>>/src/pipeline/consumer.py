"""The consumer: a member of the group, with a reader for every partition assigned to it."""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import KafkaError
from sqlalchemy.ext.asyncio import AsyncEngine

from .consume import Consume
from .failures import patiently
from .handlers import Handlers
from .health import Health
from .reader import Reader
from .settings import Settings

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 3.0
"""How long brokers have for what nobody needs to wait for: offsets for tools, a farewell."""


class Consumer(ConsumerRebalanceListener):  # type: ignore[misc]  # it has no types
    """A member of the consumer group, named as the service is."""

    def __init__(
        self,
        engine: AsyncEngine,
        consume: Consume,
        *,
        handlers: Handlers,
        group: str,
        settings: Settings,
        health: Health,
    ) -> None:
        self._new_reader = partial(
            Reader,
            engine=engine,
            consume=consume,
            handlers=handlers,
            group=group,
            settings=settings,
            health=health,
        )
        self._handlers = handlers
        self._group = group
        self._settings = settings
        self._health = health
        self._readers: dict[TopicPartition, Reader] = {}
        self._committed: dict[TopicPartition, int] = {}
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Join the group and read until `stop`; then finish the running batches and leave."""
        if not self._handlers.topics:
            log.info("no handler is registered: nothing is consumed")
            await self._stopping.wait()
            return
        self._health.not_ready("consumer", "has not joined its group yet")
        self._client = client = self._new_client()
        try:
            await self._connect()
            client.subscribe(sorted(self._handlers.topics), listener=self)
            while not self._stopping.is_set():
                await self._commit_offsets()
                await self._look_for_topics()
                with suppress(TimeoutError):
                    await asyncio.wait_for(
                        self._stopping.wait(), self._settings.offset_commit_interval
                    )
            await self._stop_readers(0.4 * self._settings.shutdown_grace)
        finally:
            await self._stop_readers(0)
            with suppress(TimeoutError):
                await asyncio.wait_for(client.stop(), _ANSWER_SECONDS)
            self._health.not_ready("consumer", "has left its group")

    def stop(self) -> None:
        """Ask `run` to end."""
        self._stopping.set()

    async def _connect(self) -> None:
        try:
            async for attempt in patiently(
                "connecting to Kafka",
                unless=self._stopping.is_set,
                away=lambda reason: self._health.not_ready("consumer", f"Kafka: {reason}"),
            ):
                with attempt:
                    await self._client.start()
        except KafkaError:
            if not self._stopping.is_set():
                raise

    def _new_client(self) -> AIOKafkaConsumer:
        session_timeout = round(self._settings.kafka_session_timeout * 1000)
        return AIOKafkaConsumer(
            bootstrap_servers=self._settings.kafka_bootstrap_servers,
            group_id=self._group,
            client_id=self._group,
            enable_auto_commit=False,
            # The position in PostgreSQL decides; an offset that is gone must never be guessed.
            auto_offset_reset="none",
            isolation_level="read_committed",
            session_timeout_ms=session_timeout,
            heartbeat_interval_ms=session_timeout // 3,
            rebalance_timeout_ms=session_timeout,
            # A slow batch is ended by the transaction's time-out, not by leaving the group.
            max_poll_interval_ms=2**31 - 1,
            # A partition whose data was just taken waits for the fetch that is under way.
            fetch_max_wait_ms=100,
            metadata_max_age_ms=10_000,
        )

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Start a reader for every partition; called by aiokafka after a rebalance."""
        if self._stopping.is_set():
            return
        for partition in sorted(assigned):
            reader = self._readers[partition] = self._new_reader(self._client, partition)
            reader.start()
        self._health.ready("consumer")

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Finish or abandon the running batches; called by aiokafka before a rebalance."""
        await self._stop_readers(self._settings.transaction_timeout)

    async def _stop_readers(self, grace: float) -> None:
        readers = list(self._readers.values())
        await asyncio.gather(*(reader.stop(grace) for reader in readers))
        await self._commit_offsets()
        self._readers.clear()
        self._committed.clear()

    async def _commit_offsets(self) -> None:
        """Let Kafka's committed offsets follow the positions, for tools that show lag."""
        behind = {
            partition: reader.position
            for partition, reader in self._readers.items()
            if reader.position is not None and reader.position != self._committed.get(partition)
        }
        if behind:
            try:
                await asyncio.wait_for(self._client.commit(behind), _ANSWER_SECONDS)
            except (KafkaError, TimeoutError) as error:
                log.debug("offsets were not committed, the next ones will be: %s", error)
            else:
                self._committed |= behind

    async def _look_for_topics(self) -> None:
        topics = self._handlers.topics
        known = {topic for topic in topics if self._client.partitions_for_topic(topic)}
        if known != topics:
            # What the client has not heard of yet may exist all the same: ask the brokers.
            with suppress(KafkaError, TimeoutError):
                known |= await asyncio.wait_for(self._client.topics(), _ANSWER_SECONDS)
        for topic in topics:
            if topic in known:
                self._health.forget(f"topic {topic}")
            else:
                self._health.not_ready(
                    f"topic {topic}", "does not exist: create it, or run `service topics create`"
                )
