"""Where a message's microseconds go: CPU of the service's process, layer by layer.

`python -m benchmarks.layers` fetches scans, applies them batch after batch and publishes what came
of it, with the engine's own parts, one after the other in one task: whatever is spent while a part
is at work is that part's. It prints JSON: microseconds a message by layer, the median of the
batches. The clocks add some of them to the layers that are called for each message.
"""

import asyncio
import json
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import iscoroutinefunction
from statistics import median
from time import perf_counter, process_time
from typing import Any

import uvloop
from aiokafka import ConsumerRecord  # type: ignore[import-untyped]

from pipeline import (  # type: ignore[import-not-found]
    batch,
    exporters,
    handling,
    inbox,
    message,
    telemetry,
    window,
)
from pipeline.breaker import Breaker  # type: ignore[import-not-found]
from pipeline.consume import Consume  # type: ignore[import-not-found]
from pipeline.database import autocommitting, create_engine  # type: ignore[import-not-found]
from pipeline.failures import patiently  # type: ignore[import-not-found]
from pipeline.filters import Filters  # type: ignore[import-not-found]
from pipeline.health import Health  # type: ignore[import-not-found]
from pipeline.inbox import Slot  # type: ignore[import-not-found]
from pipeline.outbox import Outbox  # type: ignore[import-not-found]
from pipeline.publisher import Publisher  # type: ignore[import-not-found]
from pipeline.runtime import _collect_seldom  # type: ignore[import-not-found]
from pipeline.schema import SHARDS  # type: ignore[import-not-found]
from pipeline.settings import Settings  # type: ignore[import-not-found]
from pipeline.transaction import BatchSession, Rows, Transaction  # type: ignore[import-not-found]
from pipeline.window import Progress  # type: ignore[import-not-found]
from pipeline.work import FromPartition  # type: ignore[import-not-found]

from benchmarks.ours import handlers
from demo.witness import reading

WARM_UP = 0.05
"""The first batches, this share of all, don't count."""
GROUP = "layers"

Function = Callable[..., Any]


@dataclass
class Clock:
    """What each layer has spent, without the layers that it calls."""

    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of this batch."""
    batches: list[dict[str, float]] = field(default_factory=list)
    """Microseconds a message, of the batches before."""
    layers: dict[str, None] = field(default_factory=dict)
    """Their names, in the order in which they were noted."""
    _inner: list[float] = field(default_factory=list)

    def note(self, owner: Any, name: str, layer: str, *, for_each: bool = False) -> None:
        """Watch a function of a module or a class; `for_each` message it may not wait."""
        self.layers[layer] = None
        function = getattr(owner, name)
        is_async = iscoroutinefunction(function)
        watched = self.awaited(layer, function, perf_counter if for_each else process_time)
        setattr(owner, name, watched if is_async else self.called(layer, function))

    def called(self, layer: str, function: Function) -> Function:
        """Watch a function that is called for each message, by a clock that costs little."""

        @wraps(function)
        def watched(*args: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            begun = perf_counter()
            try:
                return function(*args, **options)
            finally:
                self._end(layer, perf_counter() - begun)

        return watched

    def awaited(
        self, layer: str, function: Callable[..., Awaitable[Any]], now: Callable[[], float]
    ) -> Callable[..., Awaitable[Any]]:
        """Watch a coroutine function; while it waits, `process_time` stands still."""

        @wraps(function)
        async def watched(*args: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            begun = now()
            try:
                return await function(*args, **options)
            finally:
                self._end(layer, now() - begun)

        return watched

    def _end(self, layer: str, took: float) -> None:
        self.spent[layer] += took - self._inner.pop()
        if self._inner:
            self._inner[-1] += took

    def turn(self, messages: int) -> None:
        """Begin with the next batch."""
        self.batches.append({layer: spent / messages * 1e6 for layer, spent in self.spent.items()})
        self.spent.clear()

    def medians(self) -> dict[str, float]:
        """Return what each layer takes of a message, in microseconds."""
        counting = self.batches[int(WARM_UP * len(self.batches)) :]
        return {
            layer: round(median(one.get(layer, 0.0) for one in counting), 2)
            for layer in self.layers
        }


async def layers() -> dict[str, float]:
    """Do the work, and return what was spent."""
    settings = Settings()
    _collect_seldom(settings.gc_threshold)
    sending = exporters.configure(
        service_name=GROUP,
        otlp_endpoint=settings.otlp_endpoint,
        sample_ratio=settings.trace_sample_ratio,
    )
    topic = os.environ["BENCH_INPUT"]
    clock = Clock()
    watch(clock)
    fetch, batches = await fetched(settings, topic)
    engine = create_engine(settings, name=GROUP)
    publisher = Publisher(settings, client_id=GROUP, owner=GROUP)
    try:
        breaker = Breaker(keys=20, pause=1.0, health=Health(stall_after=60))
        consume = Consume(
            engine,
            group=GROUP,
            source=f"/{GROUP}",
            settings=settings,
            breaker=breaker,
            filters=Filters(mebibytes=settings.inbox_filter_mebibytes),
            handlers=handlers,
            staged=lambda: None,
            parked=lambda: None,
            called=lambda: None,
        )
        attempts = patiently("the batch", "PostgreSQL", unless=lambda: False, away=print)
        async with autocommitting(engine) as driver:
            snapshot = await driver.fetchval("SELECT pg_current_snapshot()")
            progress = Progress(snapshot, None, 0, 0)
            for records in batches:
                slot = Slot(GROUP, topic, records[0].partition)
                start = records[0].offset
                await inbox.start_at(driver, slot, start)
                read = await batch.read(handlers, topic, start, records)
                work = FromPartition(slot, read)
                await consume.apply(work, attempts)
                page = await window.fresh(driver, progress, list(range(SHARDS)), 10_000)
                await publisher.send(page.events, lambda: True)
                progress = page.then
                clock.turn(len(records))
    finally:
        await publisher.discard()
        await engine.dispose()
        sending.shutdown()
    return {"fetch": round(fetch, 2), **clock.medians()}


def watch(clock: Clock) -> None:
    """Name the layers, along the way of a message."""
    clock.note(message, "payload_hash", "hash")
    clock.note(batch, "decode", "decode")
    clock.note(batch, "_validated", "validate")
    clock.note(batch, "read", "match with handlers")
    clock.note(inbox, "begin", "begin, position")
    clock.note(inbox, "move_position", "begin, position")
    clock.note(inbox, "mark", "markers")
    clock.note(FromPartition, "find", "backlog")
    clock.note(Rows, "lock", "load")
    clock.note(Transaction, "publish", "stage")
    clock.note(handling, "_handle", "handlers", for_each=True)
    clock.note(BatchSession, "flush", "flush")
    clock.note(Outbox, "write", "COPY")
    clock.note(Consume, "apply", "commit, and the rest")
    clock.note(window, "fresh", "relay: read")
    clock.note(Publisher, "send", "relay: send")
    clock.note(telemetry.ProcessSpans, "of", "telemetry")
    for name in ("creation_context", "processed", "batch_applied", "send_spans", "published"):
        clock.note(telemetry, name, "telemetry")


async def fetched(settings: Any, topic: str) -> tuple[float, list[Sequence[ConsumerRecord]]]:
    """Fetch all of the topic in batches, as the reader does; also what that took of a message."""
    batches: list[Sequence[ConsumerRecord]] = []
    async with reading(settings.kafka_bootstrap_servers, topic) as consumer:
        ends = await consumer.end_offsets(consumer.assignment())
        count, begun = 0, process_time()
        while count < sum(ends.values()):
            found = await consumer.getmany(timeout_ms=1_000, max_records=settings.batch_size)
            batches += [records for records in found.values() if records]
            count = sum(map(len, batches))
        return (process_time() - begun) / count * 1e6, batches


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(layers())))
