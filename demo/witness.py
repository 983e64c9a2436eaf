"""The outside observer: sees the service only by its output topic and its tables."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import asyncpg  # type: ignore[import-untyped]
from aiokafka import AIOKafkaConsumer, ConsumerRecord  # type: ignore[import-untyped]

from demo.evidence import MOVED, ParcelRow, Record

TOPIC = "parcel-events"
CONSUMER = "record-scan"
READ_WITHIN = 300.0
"""Seconds in which the whole output topic must have been read."""
PARCELS = "SELECT id, place, scans, version, last_scanned_at FROM parcel"
MARKERS = "SELECT source, id FROM pipeline.inbox WHERE consumer = $1"


class Witness:
    """Watches the output topic while it fills."""

    def __init__(self, on_news: Callable[[], None]) -> None:
        """Call `on_news` whenever an event appears that was not there before."""
        self.events: set[str] = set()
        """The ids that have been seen."""
        self.moves = 0
        """How many of them tell that a parcel moved: the scans that were applied."""
        self.latest = 0.0
        """When the last new one was seen, on the monotonic clock."""
        self._on_news = on_news
        self._news = asyncio.Condition()

    async def watch(self, bootstrap_servers: str, topic: str = TOPIC) -> None:
        """Follow the topic until cancelled."""
        async with reading(bootstrap_servers, topic) as consumer:
            while True:
                batches = await consumer.getmany(timeout_ms=200, max_records=2_000)
                before = len(self.events)
                for record in (record for batch in batches.values() for record in batch):
                    self._see(dict(record.headers))
                if len(self.events) > before:
                    self.latest = time.monotonic()
                    self._on_news()
                    async with self._news:
                        self._news.notify_all()

    async def until_moved(self, count: int) -> None:
        """Wait until so many scans have been applied."""
        await self._until(lambda: self.moves >= count)

    async def until_published(self, count: int) -> None:
        """Wait until so many different events have been seen."""
        await self._until(lambda: len(self.events) >= count)

    async def until_quiet(self, seconds: float) -> None:
        """Wait until for so long nothing new has been seen."""
        try:
            while True:
                async with asyncio.timeout(seconds), self._news:
                    await self._news.wait()
        except TimeoutError:
            return

    async def _until(self, reached: Callable[[], bool]) -> None:
        async with self._news:
            await self._news.wait_for(reached)

    def _see(self, headers: dict[str, bytes]) -> None:
        id_ = headers.get("ce_id", b"").decode()
        if id_ not in self.events:
            self.events.add(id_)
            self.moves += headers.get("ce_type") == MOVED.encode()


async def size(bootstrap_servers: str, topic: str) -> int:
    """Return how many records were ever written to a topic."""
    async with reading(bootstrap_servers, topic) as consumer:
        return sum((await consumer.end_offsets(consumer.assignment())).values())


async def read_topic(bootstrap_servers: str, topic: str = TOPIC) -> list[Record]:
    """Read a topic from its beginning to what is its end now, each partition in its order.

    Raises `TimeoutError`.
    """
    return [_record(record) for record in await read_records(bootstrap_servers, topic)]


async def read_records(bootstrap_servers: str, topic: str) -> list[ConsumerRecord]:
    """Read a topic likewise, and return all that Kafka says of every record."""
    records: list[ConsumerRecord] = []
    async with asyncio.timeout(READ_WITHIN), reading(bootstrap_servers, topic) as consumer:
        ends = await consumer.end_offsets(consumer.assignment())
        while any([await consumer.position(partition) < end for partition, end in ends.items()]):
            batches = await consumer.getmany(timeout_ms=200, max_records=5_000)
            for partition, batch in batches.items():
                records += (r for r in batch if r.offset < ends[partition])
    return records


async def read_tables(database_url: str) -> tuple[list[ParcelRow], list[tuple[str, str]]]:
    """Read the parcels, and (source, id) of the inbox markers."""
    connection = await asyncpg.connect(database_url)
    try:
        parcels = [ParcelRow(*row) for row in await connection.fetch(PARCELS)]
        markers = [(row["source"], row["id"]) for row in await connection.fetch(MARKERS, CONSUMER)]
    finally:
        await connection.close()
    return parcels, markers


@asynccontextmanager
async def reading(bootstrap_servers: str, topic: str = TOPIC) -> AsyncIterator[AIOKafkaConsumer]:
    """Lend a consumer of all partitions of the topic, each from its beginning."""
    # Without a group nothing is stored.
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap_servers,
        group_id=None,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
    )
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.stop()


def _record(record: ConsumerRecord) -> Record:
    return Record(record.partition, record.key, dict(record.headers), record.value)
