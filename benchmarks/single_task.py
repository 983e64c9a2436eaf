"""The engine's parts in one task, batch after batch: what `layers` times and `probe` counts."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import asyncpg  # type: ignore[import-untyped]
from aiokafka import ConsumerRecord  # type: ignore[import-untyped]

from onceward.apply import batch, positions
from onceward.apply.breaker import Breaker
from onceward.apply.positions import Slot
from onceward.apply.transactions import ConsumeTransactions, Signals
from onceward.consume.partition_source import PartitionBatch, PartitionSource
from onceward.handlers.registry import Handlers
from onceward.observe import exporters
from onceward.observe.health import Health
from onceward.relay import window
from onceward.relay.publisher import Publisher
from onceward.relay.window import Progress
from onceward.runtime import _collect_seldom
from onceward.schema import SHARDS
from onceward.servers import clients
from onceward.servers.consumer import _FETCH_BYTES, KafkaConsumer
from onceward.servers.database import autocommitting, create_engine
from onceward.servers.retrying import Retrying
from onceward.settings import Settings

TOPIC = os.environ["BENCH_INPUT"]


@dataclass
class SingleTask:
    """Consume transactions and a relay, for batches of a single partition."""

    group: str
    settings: Settings
    handlers: Handlers
    driver: asyncpg.Connection
    consume: ConsumeTransactions
    publisher: Publisher
    progress: Progress

    async def handle(self, records: Sequence[ConsumerRecord]) -> None:
        """Apply the records in a transaction, and publish the events."""
        slot = Slot(self.group, TOPIC, records[0].partition)
        start = records[0].offset
        await positions.start_at(self.driver, slot, start)
        read = await batch.read(self.handlers, start, records)
        attempts = Retrying("the batch", "PostgreSQL", unless=lambda: False, report=print)
        await self.consume.apply(PartitionSource([PartitionBatch(slot, read)]), attempts)
        page = await window.fresh(
            self.driver, self.progress, list(range(SHARDS)), self.settings.relay_batch_events
        )
        await self.publisher.look_up({event["topic"] for event in page.events})
        await self.publisher.send(page.events, lambda: True)
        self.progress = page.then


def consumer_of(settings: Settings) -> KafkaConsumer:
    """Return a consumer of the input topic, which is not started."""
    return KafkaConsumer(
        TOPIC,
        **clients.connection_options(settings),
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        max_partition_fetch_bytes=_FETCH_BYTES,
    )


@asynccontextmanager
async def single_task(
    group: str, settings: Settings, handlers: Handlers
) -> AsyncIterator[SingleTask]:
    """Yield the engine's parts, set up as in a service."""
    _collect_seldom(settings.gc_threshold)
    shut_exporters_down = exporters.configure(
        service_name=group,
        otlp_endpoint=settings.otlp_endpoint,
        sample_ratio=settings.trace_sample_ratio,
    )
    engine = create_engine(settings, name=group, check=None)
    publisher = Publisher(settings, client_id=group, owner=group)
    try:
        consume = ConsumeTransactions(
            engine,
            group=group,
            source=f"/{group}",
            settings=settings,
            breaker=Breaker(keys=20, pause=1.0, health=Health(stall_after=60)),
            handlers=handlers,
            signals=Signals(),
        )
        async with autocommitting(engine) as driver:
            snapshot = await driver.fetchval("SELECT pg_current_snapshot()")
            progress = Progress(snapshot, None, 0, 0)
            yield SingleTask(group, settings, handlers, driver, consume, publisher, progress)
    finally:
        await publisher.discard()
        await engine.dispose()
        shut_exporters_down(5)
