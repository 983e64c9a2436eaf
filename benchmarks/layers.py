"""Where a message's microseconds go: CPU of the service's process, layer by layer.

`python -m benchmarks.layers` fetches scans, applies them batch after batch and publishes what came
of it, with the engine's own parts, one after the other in one task: whatever is spent while a part
is at work is that part's. It prints JSON: microseconds a message by layer, the median of the
batches. The clocks add some of them to the layers that are called for each message.
"""

import asyncio
import json

import uvloop
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Session

from onceward.apply import batch, calls, inbox, limits, positions
from onceward.apply.transactions import ConsumeTransactions
from onceward.consume.partition_source import PartitionSource
from onceward.events import cloudevents, codec
from onceward.handlers.rows import Rows
from onceward.handlers.staging import Outbox
from onceward.handlers.transaction import UnitOfWork
from onceward.observe import metrics, traces
from onceward.relay import window
from onceward.relay.publisher import Publisher
from onceward.settings import Settings

from benchmarks.clock import Clock, fetched
from benchmarks.ours import handlers
from benchmarks.single_task import consumer_of, single_task

GROUP = "layers"


async def layers() -> dict[str, float]:
    """Do the work, and return what was spent."""
    settings = Settings()
    clock = Clock()
    watch(clock)
    async with single_task(GROUP, settings, handlers) as task:
        fetch, batches = await fetched(consumer_of(settings), settings.batch_size)
        for records in batches:
            await task.handle(records)
            clock.turn(len(records))
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
    clock.note(Outbox, "write", "outbox")
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
