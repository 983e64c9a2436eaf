"""The runs that several measures are made of."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import asyncpg  # type: ignore[import-untyped]
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer  # type: ignore[import-untyped]

from benchmarks.load import Load
from benchmarks.marks import Values, quantile
from benchmarks.rig import (
    PARTITIONS,
    PATIENCE,
    Contestant,
    Count,
    Rig,
    Sample,
    Site,
    between,
    connected,
    guarded,
    running,
)
from demo.evidence import MOVED
from demo.processes import ProcessFailed, Service

FIRST, LAST = 0.1, 0.95
"""A rate is taken between these shares of the work: beginning and end have other reasons."""
PER_SECOND = 100
"""Records a second, where latency is measured."""
_POLL_SECONDS = 0.01
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999, "most": 1.0}


def rate(samples: Sequence[Sample], messages: int) -> dict[str, float]:
    """Return messages a second, and CPU seconds for 1,000 of them by who spent them."""
    begin, end = between(samples, FIRST, LAST)
    done = (end.count - begin.count) / samples[-1].count * messages
    spent = {name: cpu - begin.cpu.get(name, 0.0) for name, cpu in end.cpu.items()}
    return {
        "rate": done / (end.at - begin.at),
        **{f"cpu_{name}": seconds / done * 1_000 for name, seconds in spent.items()},
    }


@dataclass(frozen=True)
class Throughput:
    """A load that is there before the contestant starts, and worked off as fast as it can."""

    contestant: Contestant
    load: Load
    partitions: int = PARTITIONS
    processes: int = 1
    settings: Mapping[str, str] | None = None

    async def __call__(self, rig: Rig) -> Values:
        """Run it on fresh tables. Raises `CheckFailed`."""
        input_ = await rig.input(self.load, self.partitions)
        async with rig.site(self.contestant, input_, self.partitions) as site:
            return await self.at(rig, site)

    async def at(self, rig: Rig, site: Site) -> Values:
        """Run it at a site whose topic for events is empty. Raises `CheckFailed`."""
        services = [rig.process(site, settings=self.settings) for _ in range(self.processes)]
        async with running(*services), rig.counted(site.output) as count:
            samples = await rig.watch(services, count, self.load.events)
            # One of several may still be starting, and could not end properly.
            await ready(site, services)
        await rig.check(site, self.load)
        return rate(samples, len(self.load.scans))


async def whole_span(rig: Rig, contestant: Contestant, load_: Load) -> Values:
    """Run a load from the first record consumed to the last event published.

    Raises `CheckFailed`.
    """
    async with rig.site(contestant, await rig.input(load_)) as site:
        service = rig.process(site)
        async with running(service), rig.counted(site.output) as published:
            async with Positions(site) as consumed:
                await guarded(_first(consumed), [service])
                began = time.monotonic()
            samples = await rig.watch([service], published, load_.events)
        await rig.check(site, load_)
        return rate(samples, len(load_.scans)) | {
            "rate": len(load_.scans) / (samples[-1].at - began)
        }


async def _first(count: Count) -> None:
    while not await count():  # noqa: ASYNC110  # another process: nobody tells us
        await asyncio.sleep(_POLL_SECONDS)


class Positions:
    """Counts what our service has consumed, by its positions."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def __aenter__(self) -> Count:
        """Connect."""
        self._connection = await asyncpg.connect(self._site.database)
        return self._count

    async def __aexit__(self, *_: object) -> None:
        await self._connection.close()

    async def _count(self) -> int:
        # Offsets begin at 0 and have no gaps: the benchmark alone has written the topic.
        return await self._connection.fetchval(  # type: ignore[no-any-return]
            "SELECT COALESCE(sum(next_offset), 0)::bigint FROM pipeline.position"
            " WHERE consumer_group = $1",
            self._site.group,
        )


_SIZES = """
SELECT (SELECT sum(pg_total_relation_size(inhrelid))::float FROM pg_inherits
         WHERE inhparent = 'pipeline.inbox'::regclass) / (SELECT count(*) FROM pipeline.inbox),
       (SELECT sum(pg_total_relation_size(inhrelid))::float FROM pg_inherits
         WHERE inhparent = 'pipeline.outbox'::regclass) / (SELECT count(*) FROM pipeline.outbox)
"""


async def sizes(site: Site) -> Values:
    """Return the bytes of a marker and of an event on disk, with their indexes."""
    async with connected(site.database) as connection:
        marker, event = await connection.fetchrow(_SIZES)
    return {"marker_bytes": marker, "event_bytes": event}


async def written(site: Site) -> int:
    """Return how many bytes of write-ahead log the server has written so far."""
    async with connected(site.database) as connection:
        return int(await connection.fetchval("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn"))


async def latency(
    rig: Rig,
    site: Site,
    services: Sequence[Service],
    load_: Load,
    *,
    per_second: float = PER_SECOND,
) -> Values:
    """Send records at a slow pace; return the milliseconds until their events arrive, as quantiles.

    The processes run already, and have seen none of the load. Its first record warms them up and
    does not count.
    """
    async with AsyncExitStack() as stack:
        consumers = []
        # One for each partition: what has been taken from one is fetched again only when there is
        # something in another, and would wait for that.
        for partition in await rig.partitions(site.output):
            consumer = AIOKafkaConsumer(bootstrap_servers=rig.stack.kafka, enable_auto_commit=False)
            await consumer.start()
            stack.push_async_callback(consumer.stop)
            consumer.assign([partition])
            await consumer.seek_to_end(partition)
            consumers.append(consumer)
        producer = AIOKafkaProducer(bootstrap_servers=rig.stack.kafka)
        await producer.start()
        stack.push_async_callback(producer.stop)
        talk = _Talk(consumers, producer, site.input, load_, per_second)
        return await guarded(talk.run(), services)


class _Talk:
    """Records and their events, matched by the number of the scan."""

    def __init__(
        self,
        consumers: Sequence[AIOKafkaConsumer],
        producer: AIOKafkaProducer,
        topic: str,
        load_: Load,
        per_second: float,
    ) -> None:
        self._consumers = consumers
        self._producer = producer
        self._topic = topic
        self._load = load_
        self._per_second = per_second
        self._sent: dict[int, float] = {}
        self._arrived: dict[int, float] = {}

    async def run(self) -> Values:
        first, *rest = self._load.scans
        listening = asyncio.gather(*map(self._listen, self._consumers))
        try:
            await self._send(first.number, 0)
            await self._all_arrived(1)
            began = time.monotonic()
            for place, scan in enumerate(rest, 1):
                due = began + place / self._per_second
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await self._send(scan.number, place)
            await self._all_arrived(len(self._load.scans))
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        took = [(self._arrived[scan.number] - self._sent[scan.number]) * 1_000 for scan in rest]
        return {name: quantile(took, share) for name, share in _QUANTILES.items()}

    async def _send(self, number: int, place: int) -> None:
        scan = self._load.scans[place]
        self._sent[number] = time.monotonic()
        await self._producer.send(
            self._topic,
            scan.payload(),
            key=scan.parcel_id.encode(),
            headers=self._load.headers(scan),
        )

    async def _listen(self, consumer: AIOKafkaConsumer) -> None:
        moved = ("ce_type", MOVED.encode())
        while True:
            fetched = await consumer.getmany(timeout_ms=1_000)
            now = time.monotonic()
            for records in fetched.values():
                for record in records:
                    if moved in record.headers:
                        self._arrived.setdefault(json.loads(record.value)["number"], now)

    async def _all_arrived(self, count: int) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                while len(self._arrived) < count:  # noqa: ASYNC110  # it may look between two sends
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            missing = count - len(self._arrived)
            raise ProcessFailed(f"{missing:,} of {count:,} events never came") from None


async def ready(site: Site, services: Sequence[Service]) -> None:
    """Wait until our processes say that they are ready; of others nobody knows."""
    if site.contestant.is_ours:
        for service in services:
            await guarded(service.ready(), services)
