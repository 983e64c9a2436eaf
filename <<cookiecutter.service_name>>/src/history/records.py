"""Records of Kafka at chosen offsets, read by a client of its own, which is in no group."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from time import monotonic

from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import RequestTimedOutError

from pipeline.servers import clients
from pipeline.servers.consumer import KafkaConsumer
from pipeline.settings import Settings

_NEAR = 500
"""Offsets that are read through: with more between two records, the client seeks the second."""
_AT_ONCE = 500
_POLL_SECONDS = 0.5
_SILENCE_SECONDS = 40.0
"""Seconds without a record after which the brokers count as unavailable."""
_STOP_SECONDS = 1.0


class Records:
    """Reads records of committed transactions, of one partition after the other."""

    def __init__(self, client: KafkaConsumer) -> None:
        self._client = client

    async def between(
        self, partition: TopicPartition, start: int, beyond: int
    ) -> AsyncIterator[ConsumerRecord]:
        """Yield the records from offset `start` on, and before `beyond`.

        Ask only for offsets that the brokers have, and up to which no producer's transaction is
        open. Raises `KafkaError`.
        """
        if partition not in self._client.assignment():
            self._client.assign([partition])
        self._client.seek(partition, start)
        at, since = start, monotonic()
        while at < beyond:
            await self._client.arrival(partition, asyncio.get_running_loop().time() + _POLL_SECONDS)
            for record in await self._client.take(partition, _AT_ONCE):
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
        for start, beyond in _runs(wanted):
            async for record in self.between(partition, start, beyond):
                if record.offset in wanted:
                    yield record


def _runs(offsets: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield where to begin and to end, so that no large gap is read."""
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
        await clients.start(client)
        yield Records(client)
    finally:
        await clients.stop(client, _STOP_SECONDS)
