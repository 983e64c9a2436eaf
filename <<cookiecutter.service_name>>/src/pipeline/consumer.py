"""The consumer: Kafka's partitions, each read by a task of its own from the position stored."""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError
from sqlalchemy.ext.asyncio import AsyncEngine
from tenacity import AsyncRetrying

from . import inbox, telemetry
from .batch import Batch, Consume, Stuck, read
from .database import autocommitting
from .failures import is_infrastructure, patiently
from .handlers import Handlers
from .health import Health
from .inbox import PositionMoved, Slot
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
        self._engine = engine
        self._consume = consume
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
            await self._stop_readers(self._settings.shutdown_grace)
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
                away=lambda reason: self._health.not_ready("consumer", reason),
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
            reader = Reader(
                self._client,
                partition,
                engine=self._engine,
                consume=self._consume,
                handlers=self._handlers,
                group=self._group,
                settings=self._settings,
                health=self._health,
            )
            self._readers[partition] = reader
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


class Reader:
    """One assigned partition: reads batches and hands them on, one after the other."""

    def __init__(
        self,
        client: AIOKafkaConsumer,
        partition: TopicPartition,
        *,
        engine: AsyncEngine,
        consume: Consume,
        handlers: Handlers,
        group: str,
        settings: Settings,
        health: Health,
    ) -> None:
        self._client = client
        self._partition = partition
        self._slot = Slot(group, partition.topic, partition.partition)
        self._engine = engine
        self._consume = consume
        self._handlers = handlers
        self._settings = settings
        self._health = health
        self._part = f"partition {partition.topic}/{partition.partition}"
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._held: Stuck | None = None
        self.position: int | None = None
        """The offset after the last record that took effect."""

    def start(self) -> None:
        """Begin to read, in a task."""
        self._task = asyncio.create_task(self._run(), name=self._part)

    async def stop(self, grace: float) -> None:
        """Let the running batch finish within `grace` seconds, then roll it back."""
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=grace)
            self._task.cancel()
            await asyncio.wait({self._task})
        self._release()
        self._health.forget(self._part)

    async def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._locate()
                await self._read_on()
            except PositionMoved as moved:
                log.warning("%s: %s; reading the position again", self._part, moved)
            except Stuck as stuck:
                await self._hold(stuck)
            except Exception as error:
                if not self._stopping.is_set():
                    reason = "Kafka failed" if is_infrastructure(error) else "unexpected error"
                    await self._hold(Stuck(self.position or 0, reason, error))

    async def _locate(self) -> None:
        """Find out where to go on, and make the client fetch from there and nowhere else."""
        async for attempt in self._patiently("reading the position"):
            with attempt:
                self.position = await self._stored_position()
        assert self.position is not None
        if self._held is None or self.position > self._held.offset:
            self._release()
            self._health.ready(self._part)
        self._client.seek(self._partition, self.position)

    async def _stored_position(self) -> int:
        async with autocommitting(self._engine) as driver:
            stored = await inbox.position(driver, self._slot)
            if stored is None:
                # Stored before the first fetch, so that the start can't move under our feet.
                await inbox.start_at(driver, self._slot, await self._beginning())
                stored = await inbox.position(driver, self._slot)
        assert stored is not None
        return stored

    async def _beginning(self) -> int:
        earliest = self._settings.consumer_start == "earliest"
        ask = self._client.beginning_offsets if earliest else self._client.end_offsets
        return int((await ask([self._partition]))[self._partition])

    async def _read_on(self) -> None:
        assert self.position is not None
        following = asyncio.create_task(self._fetch(self.position))
        try:
            while (batch := await self._unless_stopped(following)) is not None:
                # The next batch is fetched and decoded while this one takes effect.
                following = asyncio.create_task(self._fetch(batch.end))
                if batch.end > batch.start:
                    attempts = self._patiently("the consume transaction")
                    await self._consume.apply(self._slot, batch, attempts)
                    self._advance(batch.end)
                if batch.stuck:
                    raise batch.stuck
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _fetch(self, start: int) -> Batch:
        """Wait for the records from `start` on, and decode them."""
        records: list[ConsumerRecord] = []
        while not records:
            fetched = await self._client.getmany(
                self._partition, timeout_ms=1_000, max_records=self._settings.batch_size
            )
            records = fetched.get(self._partition, [])
        if records[0].offset < start:
            raise PositionMoved(f"{self._part} returned {records[0].offset} for {start}")
        return read(self._handlers, self._partition.topic, start, records)

    def _advance(self, position: int) -> None:
        self.position = position
        self._health.ready(self._part)
        if self._held and position > self._held.offset:
            log.info("%s goes on at offset %s", self._part, position)
            self._release()

    async def _hold(self, stuck: Stuck) -> None:
        """Stand still before a record that can't be handled, visibly; then try it again."""
        partition = self._partition
        if self._held is None or str(self._held) != str(stuck):
            log.error(
                "%s stands still, nothing is skipped: %s",
                self._part,
                stuck,
                exc_info=stuck.error,
                extra={"topic": partition.topic, "partition": partition.partition}
                | {"offset": stuck.offset, "reason": stuck.reason},
            )
            telemetry.processed(partition.topic, "", "stuck", 1, self._slot.group)
        self._held = stuck
        telemetry.set_stuck(partition.topic, partition.partition, is_stuck=True)
        self._health.not_ready(self._part, str(stuck))
        # What is buffered here would keep the client from fetching for the others.
        with suppress(Exception):
            self._client.pause(partition)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), self._settings.retry_pause)
        with suppress(Exception):
            self._client.resume(partition)

    def _release(self) -> None:
        if self._held is not None:
            self._held = None
            telemetry.set_stuck(self._partition.topic, self._partition.partition, is_stuck=False)

    def _patiently(self, what: str) -> AsyncRetrying:
        return patiently(
            f"{self._part}: {what}",
            unless=self._stopping.is_set,
            away=lambda reason: self._health.not_ready(self._part, reason),
        )

    async def _unless_stopped(self, task: asyncio.Task[Batch]) -> Batch | None:
        """Wait for the task, but no longer than until `stop`: None."""
        stop = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        return None if self._stopping.is_set() else task.result()
