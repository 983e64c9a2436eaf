"""Bare: an expert's loop by hand, fast, and safe as far as its transaction reaches.

    python -m benchmarks.bare prepare|run        BENCH_HANDLER=sql (default) or orm

A batch of a partition is one transaction with a handful of statements; two run at a time. A relay
in the same process reads the outbox behind a cursor on its `id`.

What it can't survive:

- A second process, or an answer to a COMMIT that gets lost. Rows of the outbox must become visible
  in the order of their ids, or the cursor passes some by. A lock in this process sees to that, from
  the COPY to the commit, and knows nothing of anybody else's.
- A record that it can't read, a handler that raises, an event that Kafka refuses: the process ends,
  and ends there again. So it does when a server is away.
- Time: nobody deletes from its tables.
- A consumer that was believed dead and isn't: nothing fences it. The markers keep the effects
  single, but nothing keeps them in order.
"""

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from typing import Any, ClassVar, Protocol, Self

import asyncpg  # type: ignore[import-untyped]
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition  # type: ignore[import-untyped]
from aiokafka.producer.message_accumulator import BatchBuilder  # type: ignore[import-untyped]

from benchmarks.bare_orm import OrmHandler
from benchmarks.bare_sql import SqlHandler
from benchmarks.work import (
    Place,
    collect_hardly_ever,
    constant_headers,
    main,
    partition_of,
    until_terminated,
)

LANES = 2

BATCH_RECORDS = 3_000
PAGE_EVENTS = 5_000
BATCH_BYTES = 512 * 1024
FETCH_BYTES = 4 * 1024 * 1024
COMMIT_SECONDS = 1.0
WAIT_MS = 100

PARCELS = """
    CREATE TABLE parcel (
        id text PRIMARY KEY,
        place text NOT NULL,
        scans int NOT NULL,
        last_scanned_at timestamptz,
        version bigint NOT NULL
    ) WITH (fillfactor = 50);
"""
OWN_TABLES = """
    CREATE TABLE marker (id bytea PRIMARY KEY);
    CREATE TABLE outbox (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        created_at timestamptz NOT NULL DEFAULT now(),
        key bytea NOT NULL,
        type bytea NOT NULL,
        sequence bigint NOT NULL,
        payload bytea NOT NULL
    );
    CREATE TABLE relayed (id bigint NOT NULL);
    INSERT INTO relayed VALUES (0);
"""
MARK = """
    INSERT INTO marker SELECT unnest($1::bytea[]) ON CONFLICT DO NOTHING RETURNING id
"""
PAGE = """
    SELECT id, created_at, key, type, sequence, payload FROM outbox
    WHERE id > $1 ORDER BY id LIMIT $2
"""

Fetched = Mapping[TopicPartition, Sequence[ConsumerRecord]]


class Handler(Protocol):
    """What a lane works with."""

    connection: asyncpg.Connection
    consumes: ClassVar[Collection[bytes]]
    """Types of the events that it takes."""
    publishes: ClassVar[Collection[bytes]]

    @classmethod
    async def connect(cls, place: Place) -> Self: ...

    async def close(self) -> None: ...

    async def handle(self, records: Sequence[ConsumerRecord]) -> Sequence[tuple[Any, ...]]: ...


HANDLERS: dict[str, type[Handler]] = {"sql": SqlHandler, "orm": OrmHandler}


class Consume:
    """The lanes, which share a consumer."""

    def __init__(self, consumer: AIOKafkaConsumer, relay: "Relay") -> None:
        self._consumer = consumer
        self._relay = relay
        self._in_order = asyncio.Lock()
        self._applied: dict[TopicPartition, int] = {}

    async def lane(self, number: int, handler: Handler, stopping: asyncio.Event) -> None:
        """Apply batch after batch of every second partition."""
        fetching = asyncio.create_task(self._fetch(number))
        while not stopping.is_set():
            fetched = await fetching
            # The next records are read while the database is at work on these.
            fetching = asyncio.create_task(self._fetch(number))
            for partition, records in fetched.items():
                await self.apply(records, handler)
                self._applied[partition] = records[-1].offset + 1
        fetching.cancel()

    async def _fetch(self, number: int) -> Fetched:
        mine = [at for at in self._consumer.assignment() if at.partition % LANES == number]
        if not mine:  # to ask for none is to ask for all
            await asyncio.sleep(WAIT_MS / 1_000)
            return {}
        fetched: Fetched = await self._consumer.getmany(
            *mine, timeout_ms=WAIT_MS, max_records=BATCH_RECORDS
        )
        return fetched

    async def apply(self, records: Sequence[ConsumerRecord], handler: Handler) -> None:
        """Apply a batch in a transaction of its own."""
        connection = handler.connection
        transaction = connection.transaction()
        await transaction.start()
        taken = await _new(connection, records, handler.consumes)
        staged = await handler.handle(taken)
        async with self._in_order:
            await connection.copy_records_to_table(
                "outbox", columns=("key", "type", "sequence", "payload"), records=staged
            )
            await transaction.commit()
        self._relay.wake()

    async def commit_offsets(self) -> None:
        """Tell Kafka how far the database has come."""
        if applied := {
            partition: offset
            for partition, offset in self._applied.items()
            if partition in self._consumer.assignment()
        }:
            await self._consumer.commit(applied)


async def _new(
    connection: asyncpg.Connection, records: Sequence[ConsumerRecord], types: Collection[bytes]
) -> Sequence[ConsumerRecord]:
    """Leave markers; return the records whose markers were not there."""
    marked = []
    for record in records:
        headers = dict(record.headers)
        if headers["ce_type"] in types:
            marked.append((headers["ce_source"] + b"\0" + headers["ce_id"], record))
    ids = sorted([id for id, _ in marked])
    new = await connection.fetch(MARK, ids)
    if len(new) == len(marked):
        return [record for _, record in marked]
    left = {row[0] for row in new}
    found = []
    for id, record in marked:
        if id in left:
            left.remove(id)
            found.append(record)
    return found


class Relay:
    """Publishes the outbox in the order of its ids."""

    def __init__(
        self,
        connection: asyncpg.Connection,
        producer: AIOKafkaProducer,
        topic: str,
        types: Collection[bytes],
    ) -> None:
        self._connection = connection
        self._producer = producer
        self._topic = topic
        self._cursor: int | None = None
        self._woken = asyncio.Event()
        self._constant = {type: constant_headers("/benchmarks/bare", type) for type in types}

    def wake(self) -> None:
        """Say that there are rows."""
        self._woken.set()

    async def run(self, ending: asyncio.Event) -> None:
        """Publish page after page; after `ending`, to the last."""
        while True:
            self._woken.clear()
            is_last = ending.is_set()
            if rows := await self.read():
                await self.send(rows)
            elif is_last:
                return
            else:
                await self._woken.wait()

    async def read(self) -> Sequence[asyncpg.Record]:
        """Return the next page."""
        if self._cursor is None:
            self._cursor = await self._connection.fetchval("SELECT id FROM relayed")
        rows: Sequence[asyncpg.Record] = await self._connection.fetch(
            PAGE, self._cursor, PAGE_EVENTS
        )
        return rows

    async def send(self, rows: Sequence[asyncpg.Record]) -> None:
        """Send a page, all partitions at once; when it is acknowledged, note how far it went."""
        partitions = len(await self._producer.partitions_for(self._topic))
        batches: list[list[BatchBuilder]] = [
            [self._producer.create_batch()] for _ in range(partitions)
        ]
        last_time: datetime | None = None
        time, timestamp = b"", 0
        for id, created_at, key, type, sequence, payload in rows:
            if created_at != last_time:  # once a transaction
                last_time, time = created_at, created_at.isoformat().encode()
                timestamp = int(created_at.timestamp() * 1_000)
            headers = [
                *self._constant[type],
                ("ce_id", b"%d" % id),
                ("ce_time", time),
                ("ce_subject", key),
                ("ce_sequence", b"%020d" % sequence),
            ]
            builders = batches[partition_of(key, partitions)]
            while not builders[-1].append(
                timestamp=timestamp, key=key, value=payload, headers=headers
            ):
                builders.append(self._producer.create_batch())
        await asyncio.gather(*(self._send_all(builders, at) for at, builders in enumerate(batches)))
        self._cursor = rows[-1][0]
        await self._connection.execute("UPDATE relayed SET id = $1", self._cursor)

    async def _send_all(self, builders: Sequence[BatchBuilder], partition: int) -> None:
        for builder in builders:
            if builder.record_count():
                await (await self._producer.send_batch(builder, self._topic, partition=partition))


def producer_for(place: Place) -> AIOKafkaProducer:
    """Return a producer that is not started yet."""
    return AIOKafkaProducer(
        bootstrap_servers=place.bootstrap_servers,
        enable_idempotence=True,
        acks="all",
        max_batch_size=BATCH_BYTES,
        max_request_size=16 * BATCH_BYTES,
    )


def consumer_for(place: Place) -> AIOKafkaConsumer:
    """Return a consumer that is not started yet."""
    return AIOKafkaConsumer(
        place.input,
        bootstrap_servers=place.bootstrap_servers,
        group_id=place.name,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=FETCH_BYTES,
        # A broker is asked once at a time: a partition that has records would wait as long as
        # the empty ones do. Ours waits no longer, either.
        fetch_max_wait_ms=WAIT_MS,
    )


async def prepare(place: Place, tables: str = OWN_TABLES + PARCELS) -> None:
    """Create the tables."""
    connection = await asyncpg.connect(place.dsn)
    try:
        await connection.execute(tables)
    finally:
        await connection.close()


async def run(place: Place, kind: type[Handler] | None = None) -> None:
    """Work until SIGTERM, then finish what was begun. The handler is that of BENCH_HANDLER if no
    kind is given."""
    stopping, ending = until_terminated(), asyncio.Event()
    kind = kind or HANDLERS[os.environ.get("BENCH_HANDLER", "sql")]
    async with AsyncExitStack() as stack:
        handlers = [await kind.connect(place) for _ in range(LANES)]
        for handler in handlers:
            stack.push_async_callback(handler.close)
        # A cursor that is lost in a crash only makes repeats.
        connection = await asyncpg.connect(place.dsn, server_settings={"synchronous_commit": "off"})
        stack.push_async_callback(connection.close)
        producer = producer_for(place)
        await producer.start()
        stack.push_async_callback(producer.stop)
        consumer = consumer_for(place)
        await consumer.start()
        stack.push_async_callback(consumer.stop)

        relay = Relay(connection, producer, place.output, kind.publishes)
        consume = Consume(consumer, relay)
        collect_hardly_ever()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(relay.run(ending))
            offsets = tasks.create_task(_every(COMMIT_SECONDS, consume))
            async with asyncio.TaskGroup() as lanes:
                for number, handler in enumerate(handlers):
                    lanes.create_task(consume.lane(number, handler, stopping))
            offsets.cancel()
            await consume.commit_offsets()
            ending.set()
            relay.wake()


async def _every(seconds: float, consume: Consume) -> None:
    while True:
        await asyncio.sleep(seconds)
        await consume.commit_offsets()


if __name__ == "__main__":
    main(prepare, run)
