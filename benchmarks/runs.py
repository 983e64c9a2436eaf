"""The runs that several measures are made of."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from math import ceil

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
    connected,
    guarded,
    running,
)
from demo.evidence import MOVED
from demo.processes import ProcessFailed, Service

PER_SECOND = 100
"""Records a second, where latency is measured."""
_WARM_UP_SECONDS = 2
_POLL_SECONDS = 0.01
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999, "most": 1.0}


def rate(samples: Sequence[Sample], messages: int) -> dict[str, float]:
    """Return messages a second, and CPU seconds for 1,000 of them by who spent them.

    All from the beginning of the work to its end: who does one half of it first and then the other
    is not measured by the second.
    """
    begin, end = samples[0], samples[-1]
    spent = {name: cpu - begin.cpu.get(name, 0.0) for name, cpu in end.cpu.items()}
    return {
        "rate": messages / (end.at - begin.at),
        **{f"cpu_{name}": seconds / messages * 1_000 for name, seconds in spent.items()},
    }


@asynccontextmanager
async def asking(site: Site, question: str, *arguments: object) -> AsyncIterator[Count]:
    """Lend a way to ask the site's database for a number."""
    async with connected(site.database) as connection:

        async def count() -> int:
            return await connection.fetchval(question, *arguments)  # type: ignore[no-any-return]

        yield count


def parcels(site: Site) -> AbstractAsyncContextManager[Count]:
    """Lend a way to see whether a handler has taken effect: 0 or 1, for any contestant."""
    return asking(site, "SELECT count(*) FROM (SELECT FROM parcel LIMIT 1) AS one")


def positions(site: Site) -> AbstractAsyncContextManager[Count]:
    """Lend a way to count what our service has consumed."""
    # Offsets begin at 0 and have no gaps: the benchmark alone has written the topic.
    return asking(
        site,
        "SELECT COALESCE(sum(next_offset), 0)::bigint FROM pipeline.position"
        " WHERE consumer_group = $1",
        site.group,
    )


@dataclass(frozen=True)
class Throughput:
    """A load that is there before the contestant starts, and worked off as fast as it can."""

    contestant: Contestant
    load: Load
    partitions: int = PARTITIONS
    processes: int = 1
    settings: Mapping[str, str] | None = None
    begun: Callable[[Site], AbstractAsyncContextManager[Count]] = parcels
    """Sees whether the first record has been consumed."""

    async def __call__(self, rig: Rig) -> Values:
        """Run it on fresh tables. Raises `CheckFailed`."""
        input_ = await rig.input(self.load, self.partitions)
        async with rig.site(self.contestant, input_, self.partitions) as site:
            return await self.at(rig, site)

    async def at(self, rig: Rig, site: Site) -> Values:
        """Run it at a site whose topic for events is empty. Raises `CheckFailed`."""
        services = [rig.process(site, settings=self.settings) for _ in range(self.processes)]
        async with (
            running(*services),
            rig.counted(site.output) as count,
            self.begun(site) as begun,
        ):
            samples = await rig.watch(services, count, self.load.events, begun=begun)
            # One of several may still be starting, and could not end properly.
            await ready(site, services)
        await rig.check(site, self.load)
        return rate(samples, len(self.load.scans))


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


def records(seconds: float, per_second: float = PER_SECOND) -> int:
    """Return how many `latency` sends to measure for so long: those that warm up, and more."""
    return ceil(_WARM_UP_SECONDS * per_second) + ceil(seconds * per_second)


async def latency(
    rig: Rig,
    site: Site,
    services: Sequence[Service],
    load_: Load,
    *,
    per_second: float = PER_SECOND,
) -> Values:
    """Send records at a slow pace; return the milliseconds until their events arrive, as quantiles.

    The processes run already, and have seen none of the load. What comes in its first seconds warms
    up every connection and does not count.
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
        listening = asyncio.gather(*map(self._listen, self._consumers))
        try:
            began = time.monotonic()
            for place, scan in enumerate(self._load.scans):
                due = began + place / self._per_second
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await self._send(scan.number, place)
            await self._all_arrived()
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        warm = self._load.scans[records(0, self._per_second) :]
        took = [(self._arrived[scan.number] - self._sent[scan.number]) * 1_000 for scan in warm]
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

    async def _all_arrived(self) -> None:
        count = len(self._load.scans)
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
