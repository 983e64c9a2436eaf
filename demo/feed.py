"""The sender: scanners that report every scan, some of them twice."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaProducer  # type: ignore[import-untyped]

from demo.flights import Scan

TOPIC = "scans"
FARTHEST = 2_000
"""A scan is repeated at most so many records later."""
BURST = 200
"""Records between two looks at what else there is to do."""


class FeedFailed(Exception):
    """Kafka did not take a scan."""


def with_repeats(scans: Sequence[Scan], count: int, seed: int) -> list[Scan]:
    """Return the scans in their order and `count` of them a second time, somewhat later."""
    chance = random.Random(seed)
    repeated = chance.sample(range(len(scans)), count)
    # A repeat that falls on the place of a first send comes behind it.
    places = [(place, 0, scan) for place, scan in enumerate(scans)]
    places += [(place + chance.randint(0, FARTHEST), 1, scans[place]) for place in repeated]
    return [scan for _, _, scan in sorted(places, key=lambda place: place[:2])]


class Feed:
    """Sends a schedule of scans and keeps the record of it."""

    def __init__(self, schedule: Sequence[Scan], gates: Mapping[int, asyncio.Event]) -> None:
        """Prepare to send the schedule; before the record of a gate's place, wait for its event."""
        self.first: list[Scan] = []
        """Every scan once, in the order in which Kafka got them first."""
        self.duplicates = 0
        self.began = 0.0
        """When the first one was sent, on the monotonic clock."""
        self._schedule = schedule
        self._gates = gates
        self._failure: BaseException | None = None

    async def run(self, bootstrap_servers: str) -> None:
        """Send it all; return when all of it is acknowledged. Raises `FeedFailed`."""
        producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap_servers,
            enable_idempotence=True,  # when the client tries again, nothing doubles or overtakes
            acks="all",
            linger_ms=5,
            max_batch_size=128 * 1024,
        )
        await producer.start()
        try:
            self.began = time.monotonic()
            sent: set[tuple[str, int]] = set()
            for place, scan in enumerate(self._schedule):
                if place in self._gates:
                    await self._gates[place].wait()
                if place % BURST == 0:
                    await asyncio.sleep(0)
                    self._check()
                await self._send(producer, scan)
                identity = (scan.scanner, scan.number)
                if identity in sent:
                    self.duplicates += 1
                else:
                    sent.add(identity)
                    self.first.append(scan)
            await producer.flush()
            self._check()
        finally:
            await producer.stop()

    async def _send(self, producer: AIOKafkaProducer, scan: Scan) -> None:
        acknowledged = await producer.send(
            TOPIC, scan.payload(), key=scan.parcel_id.encode(), headers=headers(scan)
        )
        acknowledged.add_done_callback(self._note)

    def _note(self, acknowledged: asyncio.Future[Any]) -> None:
        if not acknowledged.cancelled() and (error := acknowledged.exception()):
            self._failure = error

    def _check(self) -> None:
        if self._failure:
            raise FeedFailed(f"Kafka did not take a scan: {self._failure!r}")


def headers(scan: Scan) -> list[tuple[str, bytes]]:
    """Return the CloudEvents attributes of a scan, in binary mode."""
    attributes = {
        "ce_specversion": "1.0",
        "ce_id": str(scan.number),
        "ce_source": scan.source,
        "ce_type": "scan.recorded.v1",
        "ce_time": scan.time,
        "content-type": "application/json",
    }
    return [(name, value.encode()) for name, value in attributes.items()]
