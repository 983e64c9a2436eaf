"""The position of a partition: what was read before it, starts of processes, why it is blocked."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from traceback import clear_frames
from typing import TypeVar

from aiokafka import ConsumerRecord, TopicPartition

from onceward.apply import positions
from onceward.apply.positions import Anchor, PositionMoved, Slot
from onceward.apply.transactions import ConsumeTransactions
from onceward.errors import (
    Paused,
    StoreUnavailable,
    describe_error,
    is_infrastructure,
    summarize_error,
)
from onceward.events.message import seconds_of
from onceward.servers.database import autocommitting
from onceward.servers.member import Arrived, Bound, GroupMember
from onceward.servers.record_batches import UnreadableBatch
from onceward.servers.retrying import Retrying

from .blockage import Blocked

T = TypeVar("T")

_ANSWER_SECONDS = 5.0
_UNDO_SECONDS = 1.0

KAFKA_FAILED = "Kafka failed"
UNEXPECTED = "unexpected error"
"""Reasons for which a partition is blocked."""


class PartitionPosition:
    """Where a process reads a partition, and how many processes have died where it begins.

    Each process counts its start at a position before it unpacks the records behind it, and undoes
    that when it ends cleanly. A start that is left over means that a process died over them.

    A topic may be created anew; an unclean election or a restored disk loses records, and others
    may be in their place. So the record that was read last, the anchor, is read again after a gap
    in the brokers' answers, and behind another leader, connection or leader epoch.
    """

    def __init__(
        self,
        slot: Slot,
        client: GroupMember,
        consume: ConsumeTransactions,
        attempts: Callable[[str], Retrying],
    ) -> None:
        """`attempts` returns the retry policy for the operation that its argument describes."""
        self._slot = slot
        self._client = client
        self._partition = TopicPartition(slot.topic, slot.partition)
        self._engine = consume.engine
        self._settings = consume.settings
        self._attempts = attempts
        self.counted_at: int | None = None
        """Where the start of this process is counted, if it is to be undone on a clean end."""
        self._starts = 0
        self._anchor: Anchor | None = None
        self._last: Anchor | None = None
        """The last records that were read: before `fetch_from`, and since then."""
        self._has_read = False
        """Whether anything has arrived since `fetch_from`."""
        self._link: object = None
        self._epoch = -1
        """The leader epoch of the latest records."""

    @property
    def suspected_deaths(self) -> int:
        """Number of processes that have died at the position, once they are enough to suspect its
        records; 0 before."""
        return self._starts - 1 if self._starts > self._settings.unclean_starts else 0

    @property
    def is_deadly(self) -> bool:
        """Whether processes have died more than 2 * `unclean_starts` times at this position.

        The second half of them have decoded one record at a time: only the first can be the cause.
        """
        return self._starts > 2 * self._settings.unclean_starts

    @property
    def anchored_at(self) -> float | None:
        """When the record before the position was written, in seconds, if that is known."""
        return seconds_of(1e3 * self._anchor.time.timestamp()) if self._anchor else None

    async def locate(self) -> int:
        """Return the stored position, and make the client fetch from there.

        The first position of a new partition is stored before its first fetch, so that it does not
        depend on when that succeeds. Raises `Blocked` if the position is outside of the topic.
        """
        # Read before the offsets: another process may move it at any time.
        asked = self._attempts("reading the position")
        stored: positions.StoredPosition | None = await asked(self._query, positions.position)
        first = await self._offset("first")
        end = await self._offset("end")
        if stored is None:
            start = first if self._settings.consumer_start == "earliest" else end
            await self._attempts("storing the start")(self._query, positions.start_at, start)
            return await self.locate()
        position, anchor = stored
        if position < first:
            raise self.changed(
                position,
                f"the brokers have deleted what is before {first}:"
                f" {first - position} offsets are lost to this service",
            )
        if position > end:
            raise self.changed(position, f"it ends at {end} (created anew, or its end lost)")
        self._anchor = anchor if anchor and first <= anchor.offset < position else None
        self._last, self._epoch = None, -1
        self.fetch_from(position)
        return position

    def fetch_from(self, start: int, *, compares: bool = True) -> None:
        """Make the client fetch from `start` on; if it `compares`, from the anchor before it."""
        last = self._last or self._anchor
        self._anchor = last if compares else None
        self._last, self._has_read = None, False
        self._client.seek(self._partition, self._anchor.offset if self._anchor else start)

    def may_have_lost(self, batches: Arrived | None) -> bool:
        """Return whether the partition had a gap, or another epoch, since it was last read."""
        link, epoch = self._link, self._epoch
        self._link = self._client.link(self._partition)
        if batches:
            # The anchor's may be an earlier one.
            self._epoch = max(batches.epoch, -1 if self._has_read else epoch)
        return self._has_read and (self._link != link or epoch not in (-1, self._epoch))

    def recognized(
        self, records: list[ConsumerRecord], start: int, batches: Arrived | None
    ) -> list[ConsumerRecord]:
        """Return the records from `start` on; raises `Blocked` if the anchor is another record."""
        anchor, before = self._anchor, [record for record in records if record.offset < start]
        if anchor:
            # Compaction may have removed it, but not out of a batch that has all its records.
            is_due = batches and not self._has_read and anchor.offset in batches.whole
            found = [(record.offset, Anchor.of(record).hash) for record in before]
            if (found or is_due) and found != [(anchor.offset, anchor.hash)]:
                raise self.changed(
                    start,
                    f"it does not hold the record of {anchor.time:%Y-%m-%d %H:%M:%S}Z that was"
                    f" read at {anchor.offset} (created anew, or its end lost)",
                )
        self._last = Anchor.of(records[-1]) if records else self._last
        self._has_read = self._has_read or batches is not None
        return records[len(before) :]

    def changed(self, position: int, what: str) -> Blocked:
        """Return the error for a topic without the position: created anew, or records deleted."""
        return Blocked(
            position,
            "topic changed",
            f"{self._slot.topic}/{self._slot.partition} is read from {position}, but {what}."
            " Nothing is read until the position is set, for instance by:"
            f" {self._seek('earliest')}",
        )

    def unreadable(self, position: int, batch: UnreadableBatch, deaths: int) -> Blocked:
        """Return the error for a producer's batch that holds the partition until it is skipped.

        `deaths`: processes that have died while they read the batch.
        """
        # The frames would keep what was unpacked of the batch in memory.
        for error in filter(None, (batch, batch.__cause__)):
            clear_frames(error.__traceback__)
        advice = ""
        if batch.is_too_large and deaths:
            advice = (
                f"Processes have died here ({deaths}): give them more memory, and let one try to"
                f" read it: {self._seek(position)}. "
            )
        elif batch.is_too_large:
            advice = "To read it, raise PIPELINE_UNPACKED_MEBIBYTES, and memory to 6 times that. "
        text = (
            f"{batch}. Nothing is read until it can be. {advice}To go on behind it, without what it"
            f" holds: {self._seek(batch.next)}"
        )
        return Blocked(position, "unreadable batch", text)

    def blocked_by(self, position: int, error: Exception, deaths: int) -> Blocked:
        """Return why the partition is blocked before a position, by an error of reading it.

        `deaths`: processes that have died while they read what is there.
        """
        text = summarize_error(error) or describe_error(error)
        match error:
            case Blocked():
                return error
            case Paused():
                return Blocked(position, error.reason, text)
            case StoreUnavailable():
                return Blocked(position, "store failed", text)
            case UnreadableBatch():
                return self.unreadable(position, error, deaths)
        if is_infrastructure(error):
            return Blocked(position, KAFKA_FAILED, text)
        return Blocked(position, UNEXPECTED, text, error)

    async def check(self, applied: int, start: int) -> None:
        """Raise `PositionMoved` if a command has moved the position, as far as is known.

        While a batch is applied, maybe in parts, the position is from `applied` to `start`.
        """
        try:
            stored = await self._query(positions.position)
        except Exception as error:
            if not is_infrastructure(error):
                raise
            return
        if stored is not None and not applied <= stored.next_offset <= start:
            raise PositionMoved(f"{self._slot.topic}/{self._slot.partition} is not at {start}")

    async def count_start(self, position: int) -> None:
        """Count a start of this process at the position, unless it is counted already."""
        if self.counted_at != position:
            self.counted_at = position
            counting = self._attempts("counting the start")
            self._starts = await counting(self._query, positions.count_start, position)

    async def undo_start(self, position: int | None) -> None:
        """Undo the start count on a clean end, unless the position has moved since.

        If that fails it stays counted: this process does not count it twice.
        """
        if position is None or self.counted_at != position:
            self.counted_at = None
            return
        with suppress(Exception):
            async with asyncio.timeout(_UNDO_SECONDS):
                await self._query(positions.forgive_start, position)
            self.counted_at = None

    async def _query(self, statement: Callable[..., Awaitable[T]], *arguments: object) -> T:
        # Without a time-out a lost connection would be noticed much later.
        async with asyncio.timeout(_ANSWER_SECONDS), autocommitting(self._engine) as driver:
            return await statement(driver, self._slot, *arguments)

    async def _offset(self, bound: Bound) -> int:
        # The client itself waits for most of a minute on a dead connection.
        asked = self._client.offsets(bound, [self._partition])
        found = await asyncio.wait_for(asked, _ANSWER_SECONDS)
        return found[self._partition]

    def _seek(self, to: int | str) -> str:
        slot = self._slot
        return f"service topics seek {slot.topic} --partition {slot.partition} --to {to}"
