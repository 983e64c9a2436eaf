"""Where a message's microseconds go in bare's loop, with the same clocks as ours in `layers`.

`python -m benchmarks.layers_bare` prints JSON under the names of ours. Bare does some of it
elsewhere: it looks at headers where it marks, and its handler decodes, loads and stores.
"""

import asyncio
import json
from contextlib import AsyncExitStack

import asyncpg  # type: ignore[import-untyped]
import uvloop
from asyncpg.transaction import Transaction  # type: ignore[import-untyped]

from benchmarks import bare
from benchmarks.bare_sql import SqlHandler
from benchmarks.clock import Clock, fetched
from benchmarks.work import Place, collect_hardly_ever


async def layers() -> dict[str, float]:
    """Do the work, and return what was spent."""
    place = Place.from_environment()
    collect_hardly_ever()
    clock = Clock()
    clock.note(bare, "_new", "markers")
    clock.note(SqlHandler, "handle", "handlers")
    clock.note(Transaction, "commit", "commit")
    clock.note(bare.Consume, "apply", "the rest")
    clock.note(bare.Relay, "read", "relay: read")
    clock.note(bare.Relay, "send", "relay: send")
    async with AsyncExitStack() as stack:
        consumer = bare.consumer_for(place)
        fetch, batches = await fetched(consumer, bare.BATCH_RECORDS)
        handler = await SqlHandler.connect(place)
        stack.push_async_callback(handler.close)
        connection = await asyncpg.connect(place.dsn)
        stack.push_async_callback(connection.close)
        producer = bare.producer_for(place)
        await producer.start()
        stack.push_async_callback(producer.stop)
        relay = bare.Relay(connection, producer, place.output, handler.publishes)
        consume = bare.Consume(consumer, relay)
        for records in batches:
            await consume.apply(records, handler)
            while rows := await relay.read():
                await relay.send(rows)
            clock.turn(len(records))
    return {"fetch": round(fetch, 2), **clock.medians()}


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(layers())))
