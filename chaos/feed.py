"""The feed, a process of its own: sends known scans at a steady rate, whatever becomes of Kafka.

A scan whose sending fails is sent again, though the first may have arrived: it is a duplicate then,
and the order of the first copies is what the input topic says, not what was meant here.
"""

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import NamedTuple, Protocol

from aiokafka import AIOKafkaProducer  # type: ignore[import-untyped]
from aiokafka.errors import KafkaError  # type: ignore[import-untyped]

from benchmarks import payments
from benchmarks.load import Record
from chaos import poison
from chaos.payments import TOPIC as PAYMENTS
from chaos.payments import orders
from chaos.poison import Poison
from chaos.talk import say, words
from demo import flights
from demo.feed import TOPIC
from demo.flights import Scan

PARTITIONS = 8
"""Of the input topic."""
TICK = 0.05
"""Seconds between two bursts."""
AGAIN_AFTER = 0.5
"""Seconds until what has failed is tried again."""
BURST_AT_MOST = 500
"""Scans that are under way at once, when the feed has fallen behind."""
KEPT = 0.05
"""Share of the scans that come slowly until no fault goes on, and those before are applied or dead:
each fault is to meet some, however long faults wait for one another."""
KEPT_FOR_CRASHES = 0.3
"""That share if scans crash the server, each time all processes begin anew."""
SLOWLY = 0.5
"""Seconds between the first two of these."""
SLOWER = 1.02
"""Factor by which each pause exceeds the one before, so that some are left however long it takes.

The pauses of a message that crashes the server double, so others always commit in between.
"""


class Outgoing(Protocol):
    """A record to be sent."""

    @property
    def partition(self) -> int | None:
        """Where it is to go, if not where its key belongs."""

    @property
    def identity(self) -> tuple[str, int]:
        """What its copies have in common."""

    def record(self) -> Record:
        """Return key, value and headers."""


class Send(NamedTuple):
    """A scan to be sent."""

    scan: Scan
    partition: int | None
    """Where it is to go, if not where its key belongs."""
    poison: Poison | None = None
    """What is wrong with it."""

    @property
    def identity(self) -> tuple[str, int]:
        """What its copies have in common."""
        return self.scan.scanner, self.scan.number

    def record(self) -> Record:
        """Return key, value and headers."""
        return self.scan.parcel_id.encode(), *poison.record(self.scan, self.poison)


def make(
    scans: Sequence[Scan],
    *,
    repeats: float,
    strays: float,
    seed: int,
    within: int = 0,
    poisoned: Mapping[Scan, Poison] = MappingProxyType({}),
) -> list[Send]:
    """Return what is to be sent.

    `repeats` is the share of the scans that come again, anything from at once to the very end
    later, or to so many scans later as `within` says. `strays` is the share of the parcels whose
    every scan is sent to two partitions at the same time: what they are counted by must be right,
    and their order is not promised. An impostor comes after the scan that it takes the identity of,
    and never to strays: they have no first.
    """
    chance = random.Random(seed)
    parcels = sorted({scan.parcel_id for scan in scans})
    stray = set(chance.sample(parcels, round(strays * len(parcels))))
    farthest = min(within or len(scans), len(scans))
    sends: list[tuple[float, Send]] = []
    for place, scan in enumerate(scans):
        wrong = poisoned.get(scan)
        impostor = wrong if wrong and wrong.kind == "impostor" else None
        send = Send(scan, None, None if impostor else wrong)
        if scan.parcel_id in stray:
            two = chance.sample(range(PARTITIONS), 2)
            sends += [(place, send._replace(partition=p)) for p in two]
            continue
        sends.append((place, send))
        if chance.random() < repeats:
            sends.append((place + farthest ** chance.random(), send))
        if impostor:
            sends.append((place + farthest ** chance.random(), Send(scan, None, impostor)))
    return [send for _, send in sorted(sends, key=lambda send: send[0])]


def reach(sends: Sequence[Send]) -> int:
    """Return how many records behind the first one of its scan a record is at most."""
    first: dict[Scan, int] = {}
    behind = (place - first.setdefault(one.scan, place) for place, one in enumerate(sends))
    return max(behind, default=0)


def of_the_busiest(scans: Sequence[Scan], parcels: int) -> Sequence[Scan]:
    """Return the scans of so many parcels, or all of them for 0."""
    if not parcels:
        return scans
    busiest = Counter(scan.parcel_id for scan in scans).most_common(parcels)
    chosen = {parcel for parcel, _ in busiest}
    return [scan for scan in scans if scan.parcel_id in chosen]


class Feed:
    """Sends at a steady rate; catches up when it had to wait."""

    def __init__(
        self,
        bootstrap_servers: str,
        topic: str,
        tell: Callable[..., None] = say,
        burst_at_most: int = BURST_AT_MOST,
        kept: float = KEPT,
    ) -> None:
        """With bursts of one, the first copies lie in the topic in the order that is meant."""
        self._bootstrap_servers = bootstrap_servers
        self._topic = topic
        self._tell = tell
        self._burst_at_most = burst_at_most
        self._kept = kept
        self._producer: AIOKafkaProducer | None = None
        self._done = 0
        self._sent: set[tuple[str, int]] = set()

    async def run(
        self, sends: Sequence[Outgoing], seconds: float, may_end: asyncio.Event | None = None
    ) -> None:
        """Send all of it within about so many seconds; return when all of it is acknowledged.

        What is kept comes slowly until it may end, and the last one not before.
        """
        steady = len(sends) - (round(self._kept * len(sends)) if may_end else 0)
        await self._send(sends[:steady], seconds * steady / max(1, len(sends)))
        if may_end:
            self._tell(slow=True)
            pause = SLOWLY
            while not may_end.is_set() and self._done + 1 < len(sends):
                await self._burst(sends[self._done : self._done + 1])
                with suppress(TimeoutError):
                    await asyncio.wait_for(may_end.wait(), pause)
                pause *= SLOWER
            await may_end.wait()
        rest = sends[self._done :]
        await self._send(rest, seconds * len(rest) / max(1, len(sends)))
        await self._discard()

    async def _send(self, sends: Sequence[Outgoing], seconds: float) -> None:
        """Send them at a steady rate."""
        began, done = time.monotonic(), 0
        while done < len(sends):
            due = len(sends) * min(1.0, (time.monotonic() - began) / seconds)
            burst = sends[done : min(round(due), done + self._burst_at_most)]
            await self._burst(burst)
            done += len(burst)
            if done + 1 > due:
                await asyncio.sleep(TICK)

    async def _burst(self, burst: Sequence[Outgoing]) -> None:
        self._tell(begun=self._done + len(burst))
        await self._deliver(burst)
        self._done += len(burst)
        self._sent.update(send.identity for send in burst)
        self._tell(sent=len(self._sent), done=self._done)

    async def _deliver(self, burst: Sequence[Outgoing]) -> None:
        while burst:
            with suppress(KafkaError):  # not even a connection
                burst = await self._try(burst)
            if burst:
                # A batch that has expired leaves a gap in the producer's numbers: begin anew.
                await self._discard()
                await asyncio.sleep(AGAIN_AFTER)

    async def _try(self, burst: Sequence[Outgoing]) -> list[Outgoing]:
        """Send them, and return those of which nobody knows whether they arrived."""
        if self._producer is None:
            producer = AIOKafkaProducer(
                bootstrap_servers=self._bootstrap_servers,
                enable_idempotence=True,
                acks="all",
                request_timeout_ms=10_000,
            )
            try:
                await producer.start()
            except BaseException:
                await producer.stop()
                raise
            self._producer = producer
        acknowledged = []
        for send in burst:
            key, value, headers = send.record()
            acknowledged.append(
                await self._producer.send(
                    self._topic, value, key=key, partition=send.partition, headers=headers
                )
            )
        outcomes = await asyncio.gather(*acknowledged, return_exceptions=True)
        return [
            send
            for send, outcome in zip(burst, outcomes, strict=True)
            if isinstance(outcome, BaseException)
        ]

    async def _discard(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            with suppress(TimeoutError, KafkaError):
                await asyncio.wait_for(producer.stop(), AGAIN_AFTER)


async def main() -> None:
    """Make ready, wait to be told the bootstrap servers, and send; end when told a second word."""
    parser = argparse.ArgumentParser(prog="python -m chaos.feed", description=__doc__)
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--parcels", type=int, required=True)
    parser.add_argument("--repeats", type=float, required=True)
    parser.add_argument("--within", type=int, required=True)
    parser.add_argument("--strays", type=float, required=True)
    parser.add_argument("--poison", type=float, required=True)
    parser.add_argument("--kinds", required=True)
    parser.add_argument("--payments", type=int, required=True)
    chosen = parser.parse_args()
    scans = of_the_busiest(list(flights.scans()), chosen.parcels)[: chosen.events]
    kinds = [kind for kind in chosen.kinds.split(",") if kind]
    sends = make(
        scans,
        repeats=chosen.repeats,
        strays=chosen.strays,
        seed=chosen.seed,
        within=chosen.within,
        poisoned=poison.spread(scans, chosen.poison, chosen.seed, kinds),
    )
    commands = orders(payments.make(chosen.payments, seed=chosen.seed), chosen.seed)
    say(ready=len(scans), sends=len(sends), reach=reach(sends), begun=0, done=0)
    said, may_end = words(), asyncio.Event()
    servers = await anext(said)
    kept = KEPT_FOR_CRASHES if "crashes" in kinds else KEPT
    async with asyncio.TaskGroup() as group:
        group.create_task(Feed(servers, TOPIC, kept=kept).run(sends, chosen.seconds, may_end))
        paying = Feed(servers, PAYMENTS, lambda **_: None, burst_at_most=1)
        group.create_task(paying.run(commands, chosen.seconds))
        await anext(said, None)
        may_end.set()


if __name__ == "__main__":
    asyncio.run(main())
