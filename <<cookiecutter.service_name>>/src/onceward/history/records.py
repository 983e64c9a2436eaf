"""Records of Kafka at chosen offsets, read by a client of its own, which is in no group."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic

from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import RequestTimedOutError

from onceward.servers import clients
from onceward.servers.consumer import KafkaConsumer
from onceward.servers.record_batches import UnreadableBatch
from onceward.settings import Settings

_NEAR = 500
"""Offsets that are read through: with more between two records, the client seeks the second."""
_AT_ONCE = 500
_POLL_SECONDS = 0.5
_SILENCE_SECONDS = 40.0
"""Seconds without a record after which the brokers count as unavailable."""
_STOP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Offsets of a partition that were passed over, as their batch can't be read."""

    partition: TopicPartition
    start: int
    beyond: int
    """Excluded."""
    why: str

    def __str__(self) -> str:
        return f"{self.partition.topic}/{self.partition.partition}: {self.why}"


class Records:
    """Reads records of committed transactions, of one partition after the other."""

    def __init__(self, client: KafkaConsumer, room: int) -> None:
        """Make one that unpacks the batches of a fetch to at most `room` bytes together."""
        self._client = client
        self._room = room
        self.unreadable: list[Unreadable] = []
        """What was passed over, in the order of reading; who reports it may clear it."""

    async def between(
        self, partition: TopicPartition, start: int, beyond: int
    ) -> AsyncIterator[ConsumerRecord]:
        """Yield the records from offset `start` on, and before `beyond`.

        A batch that can't be read is noted in `unreadable`, and passed over. Ask only for offsets
        that the brokers have, and up to which no producer's transaction is open. Raises
        `KafkaError`.
        """
        if partition not in self._client.assignment():
            self._client.assign([partition])
        self._client.seek(partition, start)
        at, since, most = start, monotonic(), _AT_ONCE
        while at < beyond:
            until = asyncio.get_running_loop().time() + _POLL_SECONDS
            if (batches := await self._client.arrival(partition, until)) is not None:
                batches.room = self._room
            try:
                taken = await self._client.take(partition, most)
            except UnreadableBatch as error:
                if most > 1:
                    # The records before the fault went with it: they are taken one by one.
                    most = 1
                    self._client.seek(partition, at)
                    continue
                most, behind = _AT_ONCE, max(error.next, at + 1)
                self.unreadable.append(Unreadable(partition, at, behind, str(error)))
                self._client.seek(partition, behind)
                at, since = behind, monotonic()
                continue
            for record in taken:
                if record.offset >= beyond:
                    return
                yield record
            # It passes offsets without a record, too: of aborted transactions, or compacted.
            if (now := await self._client.position(partition)) > at:
                at, since = now, monotonic()
            elif monotonic() - since > _SILENCE_SECONDS:
                raise RequestTimedOutError(f"no record in {_SILENCE_SECONDS:.0f} s")

    async def at(
        self, partition: TopicPartition, offsets: Collection[int]
    ) -> AsyncIterator[ConsumerRecord]:
        """Yield those of the records at these offsets that there still are, in their order.

        What `between` asks for holds here, too. Raises `KafkaError`.
        """
        wanted = {*offsets}
        for start, beyond in runs(wanted):
            async for record in self.between(partition, start, beyond):
                if record.offset in wanted:
                    yield record


def runs(offsets: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield from where and before where to read, so that no large gap is read."""
    found: list[tuple[int, int]] = []
    for offset in sorted(offsets):
        if found and offset - found[-1][1] <= _NEAR:
            found[-1] = found[-1][0], offset + 1
        else:
            found.append((offset, offset + 1))
    yield from found


@asynccontextmanager
async def reading(settings: Settings) -> AsyncIterator[Records]:
    """Connect to the brokers. Raises `KafkaError` if that fails."""
    client = KafkaConsumer(
        **clients.connection_options(settings),
        enable_auto_commit=False,
        auto_offset_reset="none",
        isolation_level="read_committed",
    )
    try:
        await client.start()
        yield Records(client, settings.largest_batch)
    finally:
        await client.stop(_STOP_SECONDS)
