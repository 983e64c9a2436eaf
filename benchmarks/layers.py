"""Where a message's microseconds go: CPU of the service's process, layer by layer.

`python -m benchmarks.layers` fetches scans, applies them batch after batch and publishes what came
of it, with the engine's own parts, one after the other in one task: whatever is spent while a part
is at work is that part's. It prints JSON: microseconds a message by layer, the median of the
batches. The clocks add some of them to the layers that are called for each message.
"""

import asyncio
import json
import os

import uvloop
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Session

from pipeline.apply import batch, calls, inbox, limits, positions
from pipeline.apply.breaker import Breaker
from pipeline.apply.filters import Filters
from pipeline.apply.positions import Slot
from pipeline.apply.transactions import ConsumeTransactions, Signals
from pipeline.consume.consumer import _FETCH_BYTES
from pipeline.consume.partition_source import PartitionBatch, PartitionSource
from pipeline.events import cloudevents, codec
from pipeline.handlers.rows import Rows
from pipeline.handlers.staging import Outbox
from pipeline.handlers.transaction import UnitOfWork
from pipeline.observe import exporters, metrics, traces
from pipeline.observe.health import Health
from pipeline.relay import window
from pipeline.relay.publisher import Publisher
from pipeline.relay.window import Progress
from pipeline.runtime import _collect_seldom
from pipeline.schema import SHARDS
from pipeline.servers import clients
from pipeline.servers.consumer import KafkaConsumer
from pipeline.servers.database import autocommitting, create_engine
from pipeline.servers.retrying import Attempts
from pipeline.settings import Settings

from benchmarks.clock import Clock, fetched
from benchmarks.ours import handlers

GROUP = "layers"


async def layers() -> dict[str, float]:
    """Do the work, and return what was spent."""
    settings = Settings()
    _collect_seldom(settings.gc_threshold)
    shut_exporters_down = exporters.configure(
        service_name=GROUP,
        otlp_endpoint=settings.otlp_endpoint,
        sample_ratio=settings.trace_sample_ratio,
    )
    topic = os.environ["BENCH_INPUT"]
    clock = Clock()
    watch(clock)
    consumer = KafkaConsumer(
        topic,
        **clients.connection_options(settings),
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        max_partition_fetch_bytes=_FETCH_BYTES,
    )
    engine = create_engine(settings, name=GROUP)
    publisher = Publisher(settings, client_id=GROUP, owner=GROUP)
    try:
        fetch, batches = await fetched(consumer, settings.batch_size)
        breaker = Breaker(keys=20, pause=1.0, health=Health(stall_after=60))
        consume = ConsumeTransactions(
            engine,
            group=GROUP,
            source=f"/{GROUP}",
            settings=settings,
            breaker=breaker,
            filters=Filters(mebibytes=settings.inbox_filter_mebibytes),
            handlers=handlers,
            signals=Signals(),
        )
        attempts = Attempts("the batch", "PostgreSQL", unless=lambda: False, report=print)
        async with autocommitting(engine) as driver:
            snapshot = await driver.fetchval("SELECT pg_current_snapshot()")
            progress = Progress(snapshot, None, 0, 0)
            for records in batches:
                slot = Slot(GROUP, topic, records[0].partition)
                start = records[0].offset
                await positions.start_at(driver, slot, start)
                read = await batch.read(handlers, start, records)
                work = PartitionSource([PartitionBatch(slot, read)])
                await consume.apply(work, attempts)
                page = await window.fresh(
                    driver, progress, list(range(SHARDS)), settings.relay_batch_events
                )
                await publisher.send(page.events, lambda: True)
                progress = page.then
                clock.turn(len(records))
    finally:
        await publisher.discard()
        await engine.dispose()
        shut_exporters_down(5)
    return {"fetch": round(fetch, 2), **clock.medians()}


def watch(clock: Clock) -> None:
    """Name the layers, along the way of a message."""
    clock.note(cloudevents, "payload_hash", "hash")
    clock.note(codec, "decode", "decode")
    clock.note(batch, "_validated", "validate")
    clock.note(batch, "read", "match with handlers")
    clock.note(limits, "begin", "begin, position")
    clock.note(positions, "move_positions", "begin, position")
    clock.note(inbox, "mark", "markers")
    clock.note(PartitionSource, "find", "backlog")
    clock.note(Rows, "lock", "load")
    clock.note(UnitOfWork, "publish", "stage")
    clock.note(calls, "_handle", "handlers", for_each=True)
    # Within SQLAlchemy's greenlet it waits for PostgreSQL.
    clock.note(Session, "flush", "flush", waits=True)
    clock.note(Outbox, "write", "COPY")
    clock.note(AsyncConnection, "commit", "commit")
    clock.note(ConsumeTransactions, "apply", "the rest")
    clock.note(window, "fresh", "relay: read")
    clock.note(Publisher, "send", "relay: send")
    clock.note(traces.ProcessSpans, "of", "telemetry")
    for name in ("creation_context", "sending"):
        clock.note(traces, name, "telemetry")
    for name in ("received", "processed", "handled", "batch_applied", "published"):
        clock.note(metrics, name, "telemetry")


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(layers())))
