"""The stored position of a partition, the check of its topic, and the count of process starts."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from aiokafka import TopicPartition
from sqlalchemy.ext.asyncio import AsyncEngine

from pipeline.apply import positions
from pipeline.apply.positions import Slot, StoredPosition
from pipeline.errors import is_infrastructure
from pipeline.servers.database import autocommitting
from pipeline.servers.patches import KafkaConsumer
from pipeline.servers.retrying import Attempts
from pipeline.settings import Settings

from .stuck import Stuck, TopicChanged

T = TypeVar("T")
Offsets = Mapping[TopicPartition, int]

_ANSWER_SECONDS = 5.0
_UNDO_SECONDS = 1.0


class PartitionPosition:
    """Where a process begins to read a partition, and whether it suspects the records there.

    Each process counts its start at a position before it unpacks the records behind it, and undoes
    that when it ends cleanly. A start that is left over means that a process died over them.
    """

    def __init__(
        self,
        slot: Slot,
        client: KafkaConsumer,
        engine: AsyncEngine,
        settings: Settings,
        attempts: Callable[[str], Attempts],
    ) -> None:
        """`attempts` returns the retry policy for the operation that its argument describes."""
        self._slot = slot
        self._client = client
        self._engine = engine
        self._settings = settings
        self._attempts = attempts
        self._counted_at: int | None = None
        self.starts = 0
        """Processes that have started at the position and not finished, this one included."""

    @property
    def deaths(self) -> int:
        """Return how many processes have died at the position; 0 while that is too few to suspect
        its records."""
        return self.starts - 1 if self.starts > self._settings.unclean_starts else 0

    async def locate(self) -> StoredPosition:
        """Return the stored position, with the anchor if the topic can still hold that record.

        The first position of a new partition is stored before its first fetch, so that it does not
        depend on when that succeeds. Raises `Stuck` if the position is outside of the topic.
        """
        read = self._attempts("reading the position")
        stored = await read(self._query, positions.position)
        if stored is None:
            start = await self._new_start()
            await self._attempts("storing the start")(self._query, positions.start_at, start)
            stored = await read(self._query, positions.position)
        assert stored is not None
        position, anchor = stored
        first = await self._offset(self._client.beginning_offsets)
        end = await self._offset(self._client.end_offsets)
        if position < first:
            raise self.changed(
                position,
                f"the brokers have deleted what is before {first}:"
                f" {first - position} offsets are lost to this service",
            )
        if position > end:
            raise self.changed(position, f"it ends at {end} (created anew, or its data lost)")
        return StoredPosition(position, anchor if anchor and anchor.offset >= first else None)

    def changed(self, position: int, what: str) -> Stuck:
        """Return the error for a topic that is not the one in which the position was reached."""
        return Stuck(position, "topic changed", TopicChanged(self._slot, position, what))

    async def was_moved(self, applied: int, start: int) -> bool:
        """Return whether a command has moved the position; False if the database is unavailable.

        While a batch is applied, maybe in parts, the position is from `applied` to `start`.
        """
        try:
            stored = await self._query(positions.position)
        except Exception as error:
            if not is_infrastructure(error):
                raise
            return False
        return stored is not None and not applied <= stored.next_offset <= start

    async def count_start(self, position: int) -> None:
        """Count a start of this process at the position, unless it is counted already."""
        if self._counted_at != position:
            self._counted_at = position
            counting = self._attempts("counting the start")
            self.starts = await counting(self._query, positions.count_start, position)

    def keep_start(self) -> None:
        """Keep the start counted: `undo_start` does nothing from now on.

        Called when the event loop ends over an error in a task, which counts as a death.
        """
        self._counted_at = None

    async def undo_start(self, position: int | None, *, moved: bool) -> None:
        """Undo the start count on a clean shutdown. `moved`: the count moved with the position."""
        counted_at, self._counted_at = self._counted_at, None
        if counted_at is not None and (counted_at == position or moved):
            with suppress(Exception):
                async with asyncio.timeout(_UNDO_SECONDS):
                    await self._query(positions.forgive_start, position or 0)

    async def _query(self, statement: Callable[..., Awaitable[T]], *arguments: object) -> T:
        # Without a time-out a lost connection would be noticed much later.
        async with asyncio.timeout(_ANSWER_SECONDS), autocommitting(self._engine) as driver:
            return await statement(driver, self._slot, *arguments)

    async def _new_start(self) -> int:
        if self._settings.consumer_start == "earliest":
            return await self._offset(self._client.beginning_offsets)
        return await self._offset(self._client.end_offsets)

    async def _offset(self, offsets: Callable[[list[TopicPartition]], Awaitable[Offsets]]) -> int:
        # The client itself waits for most of a minute on a dead connection.
        partition = TopicPartition(self._slot.topic, self._slot.partition)
        return (await asyncio.wait_for(offsets([partition]), _ANSWER_SECONDS))[partition]
