"""What the contestants are fed with: topics full of scans, with the keys of one kind or another."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import islice

from aiokafka import AIOKafkaProducer  # type: ignore[import-untyped]

from benchmarks.work import partition_of
from demo import evidence, feed, flights
from demo.evidence import LATE, Effect
from demo.flights import Scan

FLIGHTS = "flights"
"""The keys of the flights of 2013, as skewed as aircraft are busy."""
Keys = int | str
Record = tuple[bytes, bytes, list[tuple[str, bytes]]]
"""Key, payload and headers."""
SAMPLED = 100
"""One trace in so many is recorded, where records carry a trace."""
_BATCH_BYTES = 256 * 1024
_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
_LATE_ONES = 14
"""One scan in so many is late, about as many as among the flights."""
_SCANNERS = 50
_PLACES = 300
_ANY_SCAN = 145
"""Bytes of a payload without padding, about."""


@dataclass(frozen=True)
class Load:
    """Scans, and what a service that does its work makes of them."""

    name: str
    scans: Sequence[Scan]
    traced: bool = False
    """Whether each record carries a trace of its own, of which a few are recorded."""

    def records(self) -> Iterator[Record]:
        """Yield the records of the scans."""
        return ((one.parcel_id.encode(), one.payload(), self.headers(one)) for one in self.scans)

    @cached_property
    def per_parcel(self) -> Counter[str]:
        """How many scans each parcel has."""
        return Counter(scan.parcel_id for scan in self.scans)

    @cached_property
    def events_per_parcel(self) -> Counter[str]:
        """How many events are published of each parcel."""
        late = (one.parcel_id for one in self.scans if (one.minutes_late or 0) > LATE)
        return self.per_parcel + Counter(late)

    @cached_property
    def effects_per_parcel(self) -> Mapping[str, Sequence[Effect]]:
        """What the events of each parcel tell, in the order of its scans."""
        effects = defaultdict[str, list[Effect]](list)
        for scan in self.scans:
            effects[scan.parcel_id] += (effect for effect, _ in evidence.effects(scan))
        return effects

    @cached_property
    def last_seen(self) -> Mapping[str, tuple[str, datetime]]:
        """Where each parcel was seen last, and when; of two scans at one time by the later one."""
        seen: dict[str, tuple[str, datetime]] = {}
        for scan in self.scans:
            if scan.parcel_id not in seen or scan.scanned_at >= seen[scan.parcel_id][1]:
                seen[scan.parcel_id] = scan.place, scan.scanned_at
        return seen

    @cached_property
    def events(self) -> int:
        """How many events are published."""
        return self.events_per_parcel.total()

    def headers(self, scan: Scan) -> list[tuple[str, bytes]]:
        """Return the headers of a scan's record."""
        headers = feed.headers(scan)
        # The padding of a scanner belongs to the payload alone: it would lengthen every marker.
        headers = [
            (name, value[: len("/scanners/scanner-00")] if name == "ce_source" else value)
            for name, value in headers
        ]
        if self.traced:
            number, flag = scan.number + 1, int(scan.number % SAMPLED == 0)
            headers.append(("traceparent", b"00-%032x-%016x-%02x" % (number, number, flag)))
        return headers


def make(
    keys: Keys,
    count: int,
    *,
    seed: int = 1,
    first: int = 0,
    payload: int = 0,
    traced: bool = False,
) -> Load:
    """Return a load of so many scans over so many parcels, or over those of the flights.

    Numbers count from `first`. `payload` is the size of each payload in bytes, about, if it is to
    be larger than it is by itself.
    """
    if keys == FLIGHTS:
        return Load(FLIGHTS, list(islice(flights.scans(), count)))
    chance = random.Random(seed)
    padding = max(0, payload - _ANY_SCAN)
    scanners = [
        f"scanner-{number:02}" + chance.randbytes((padding + 1) // 2).hex()
        for number in range(_SCANNERS)
    ]
    parcels = [f"parcel-{number:06}" for number in range(int(keys))]
    places = [f"place-{number:03}" for number in range(_PLACES)]
    scans = [
        Scan(
            scanner=chance.choice(scanners),
            number=number,
            parcel_id=chance.choice(parcels),
            place=places[number % _PLACES],
            scanned_at=_BEGIN + timedelta(seconds=number),
            minutes_late=90 if number % _LATE_ONES == 0 else 5,
        )
        for number in range(first, first + count)
    ]
    size = f"-{payload}-bytes" if payload else ""
    return Load(f"{keys}-keys{size}{'-traced' if traced else ''}", scans, traced)


async def fill(producer: AIOKafkaProducer, topic: str, records: Iterable[Record]) -> None:
    """Write records to a topic, each key to the partition that every client chooses for it."""
    partitions = len(await producer.partitions_for(topic))
    batches = [producer.create_batch() for _ in range(partitions)]

    async def send(partition: int) -> None:
        await (await producer.send_batch(batches[partition], topic, partition=partition))

    for key, value, headers in records:
        partition = partition_of(key, partitions)
        while not batches[partition].append(key=key, value=value, timestamp=None, headers=headers):
            await send(partition)
            batches[partition] = producer.create_batch()
    for partition, batch in enumerate(batches):
        if batch.record_count():
            await send(partition)


def producer(bootstrap_servers: str) -> AIOKafkaProducer:
    """Return a producer that writes large batches."""
    return AIOKafkaProducer(
        bootstrap_servers=bootstrap_servers, enable_idempotence=True, max_batch_size=_BATCH_BYTES
    )
