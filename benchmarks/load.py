"""What the contestants are fed with: topics full of scans, with the keys of one kind or another."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import islice

from aiokafka import AIOKafkaProducer  # type: ignore[import-untyped]
from aiokafka.partitioner import murmur2  # type: ignore[import-untyped]

from demo import flights
from demo.evidence import LATE
from demo.feed import headers
from demo.flights import Scan

FLIGHTS = "flights"
"""The keys of the flights of 2013, as skewed as aircraft are busy."""
_BATCH_BYTES = 256 * 1024
_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
_LATE_ONES = 14
"""One scan in so many is late, about as many as among the flights."""


@dataclass(frozen=True)
class Load:
    """Scans, and what a service that does its work makes of them."""

    name: str
    scans: Sequence[Scan]

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
    def events(self) -> int:
        """How many events are published."""
        return self.events_per_parcel.total()


def make(keys: int | str, count: int, *, seed: int = 1, padding: int = 0) -> Load:
    """Return a load of so many scans over so many parcels, or over those of the flights.

    `padding` are characters by which each payload is longer.
    """
    if keys == FLIGHTS:
        return Load(FLIGHTS, list(islice(flights.scans(), count)))
    chance = random.Random(seed)
    scans = [
        Scan(
            scanner=f"scanner-{chance.randrange(50):02}" + "x" * padding,
            number=number,
            parcel_id=f"parcel-{chance.randrange(int(keys)):06}",
            place=f"place-{number % 300:03}",
            scanned_at=_BEGIN + timedelta(seconds=number),
            minutes_late=90 if number % _LATE_ONES == 0 else 5,
        )
        for number in range(count)
    ]
    return Load(f"{keys}-keys", scans)


async def fill(producer: AIOKafkaProducer, topic: str, load: Load) -> None:
    """Write a load to a topic, each key to the partition that every client chooses for it."""
    partitions = len(await producer.partitions_for(topic))
    parts: list[list[Scan]] = [[] for _ in range(partitions)]
    for scan in load.scans:
        parts[(murmur2(scan.parcel_id.encode()) & 0x7FFFFFFF) % partitions].append(scan)
    for partition, scans in enumerate(parts):
        rest: Iterator[Scan] = iter(scans)
        scan = next(rest, None)
        while scan is not None:
            batch = producer.create_batch()
            while scan is not None and batch.append(
                key=scan.parcel_id.encode(),
                value=scan.payload(),
                timestamp=None,
                headers=headers(scan),
            ):
                scan = next(rest, None)
            await (await producer.send_batch(batch, topic, partition=partition))


def producer(bootstrap_servers: str) -> AIOKafkaProducer:
    """Return a producer that writes large batches."""
    return AIOKafkaProducer(
        bootstrap_servers=bootstrap_servers, enable_idempotence=True, max_batch_size=_BATCH_BYTES
    )
