"""Work for a consume transaction: a batch of a partition, or rows of a lane of the backlog."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import asyncpg

from pipeline.handlers.policy import DEFERRED, Decision, ProcessDied, suspected
from pipeline.observe import metrics
from pipeline.settings import Settings

from . import backlog, inbox
from .backlog import Lane, Row, StoredRecord, Taken
from .batch import Batch, Item, order_key
from .breaker import Failure
from .inbox import Generations, Known, Slot
from .outcome import Results


class Work(Protocol):
    """What the consume transaction asks of where its messages come from."""

    @property
    def items(self) -> Sequence[Item]:
        """The messages, in order."""
        ...

    @property
    def reading(self) -> tuple[set[str], list[Failure]]:
        """Return how the decoder has fared: as a consumer of the topic's records."""
        ...

    @property
    def fates(self) -> dict[bytes, Decision]:
        """What is known beforehand not to be applied now, by marker key."""
        ...

    async def open(self, connection: asyncpg.Connection) -> Generations:
        """Make sure that the work is ours, to the end of the transaction; raises if it isn't."""
        ...

    async def find(
        self, connection: asyncpg.Connection, items: Sequence[Item]
    ) -> tuple[dict[bytes, Known], set[bytes]]:
        """Return which of the messages are in the backlog, and which order keys wait there."""
        ...

    async def settle(self, connection: asyncpg.Connection, results: Results) -> Sequence[Row]:
        """Store what was not applied, and take off what was; returns what has died."""
        ...

    def halves(self) -> "Sequence[Work]":
        """Return it in smaller parts, to do one after the other; itself if it can't be less."""
        ...

    def count(self, group: str, applied: Sequence[Item], seconds: float) -> None:
        """Record the transaction in metrics."""
        ...


_SHARE = 0.25
"""Of the time that a transaction may take, for its handlers."""
_FIRST = 100
"""Until it is known how long they take."""
_AT_LEAST = 2
"""One alone would never show that several take no longer."""


class Pace:
    """How many messages a transaction is given: no more than it can do in good time.

    What takes longer than a transaction may is rolled back and done again in halves, so slow
    handlers would be called in vain.
    """

    def __init__(self, settings: Settings) -> None:
        self._at_most = settings.batch_size
        self._seconds = _SHARE * settings.transaction_timeout
        self.limit = min(_FIRST, settings.batch_size)
        """Messages of the next transaction."""

    def learn(self, results: Sequence[Results]) -> None:
        """Adapt to work that has been done, in one transaction or in several."""
        self.limit = min(self._at_most, 2 * self.limit)
        for one in results:
            if one.applied:
                fitting = math.ceil(len(one.applied) * self._seconds / one.seconds)
                self.limit = min(self.limit, max(_AT_LEAST, fitting))
        if len(results) > 1:  # it was too much at once
            largest = max(len(one.applied) for one in results)
            self.limit = min(self.limit, max(_AT_LEAST, largest))


@dataclass(frozen=True)
class FromPartition:
    """A batch of a topic partition; its position moves with it."""

    slot: Slot
    batch: Batch
    starts: int = 0
    """What the next position is suspected of, see `inbox.move_position`."""
    deaths: int = 0
    """Processes that have died over the batch, which is a single record then."""

    @property
    def items(self) -> Sequence[Item]:
        """The messages, in order."""
        return self.batch.items

    @property
    def reading(self) -> tuple[set[str], list[Failure]]:
        """Return how the decoder has fared."""
        reader = f"the decoder of {self.slot.topic}"
        readable = bool(self.batch.items or self.batch.skipped)
        failures = [
            Failure(reader, order_key("", one.record), one.error) for one in self.batch.quarantined
        ]
        return ({reader} if readable else set()), failures

    @property
    def fates(self) -> dict[bytes, Decision]:
        """What is handled later by design, or had better not be touched."""
        if self.deaths:
            error = ProcessDied(f"{self.deaths} processes have begun with it and died")
            return {
                item.marker.key: suspected(item.handler.policy, error) for item in self.batch.items
            }
        return {
            item.marker.key: DEFERRED
            for item in self.batch.items
            if item.handler.mode == "deferred"
        }

    async def open(self, connection: asyncpg.Connection) -> Generations:
        """Move the position. Raises `PositionMoved`."""
        return await inbox.move_position(
            connection,
            self.slot,
            fetched_from=self.batch.start,
            next_offset=self.batch.end,
            anchor=self.batch.anchor,
            starts=self.starts,
        )

    async def find(
        self, connection: asyncpg.Connection, items: Sequence[Item]
    ) -> tuple[dict[bytes, Known], set[bytes]]:
        """Return which of the messages are in the backlog, and which order keys wait there."""
        return await backlog.find(connection, items)

    async def settle(self, connection: asyncpg.Connection, results: Results) -> Sequence[Row]:
        """Store what was not applied; returns what has died."""
        if results.duplicates:
            await inbox.count_duplicates(connection, self.slot, len(results.duplicates))
        rows = [_row(item, fate) for item, fate in results.fates]
        rows += [backlog.identity_mismatch(item, error) for item, error in results.impostors]
        unread = [backlog.quarantined(one) for one in self.batch.quarantined]
        results.unread += [(row.consumer, row.record, row.fate) for row in unread]
        rows += unread
        if rows:
            await backlog.add(connection, rows)
        return [row for row in rows if row.fate.is_dead]

    def halves(self) -> "Sequence[Work]":
        """Cut the batch in the middle of its records."""
        offsets = self.batch.offsets
        if len(offsets) < 2:
            return [self]
        middle = offsets[len(offsets) // 2]
        return [
            FromPartition(self.slot, self.batch.between(self.batch.start, middle), self.starts),
            FromPartition(self.slot, self.batch.between(middle, self.batch.end), self.starts),
        ]

    def count(self, group: str, applied: Sequence[Item], seconds: float) -> None:
        """Record the transaction in metrics."""
        skipped = len(self.batch.skipped)
        if skipped:
            metrics.processed(self.slot.topic, "", "skipped", skipped, group)
        metrics.batch_applied(self.slot.topic, group, len(self.batch.items) + skipped, seconds)


@dataclass(frozen=True)
class FromLane:
    """Rows of a lane, the first ones of their keys."""

    lane: Lane
    lease: float
    """Seconds that the lane stays ours after the transaction has begun."""
    taken: Taken
    assumed: Mapping[bytes, Decision] = field(default_factory=dict)
    """What is stored of its rows, by marker key, where they are not handled this time."""

    @property
    def items(self) -> Sequence[Item]:
        """The messages, in order."""
        return [
            *self.taken.items,
            *(item for one in self.taken.redecoded.values() for item in one),
        ]

    @property
    def fates(self) -> dict[bytes, Decision]:
        """What was nobody's takes its place behind the others of its key."""
        redecoded = self.taken.redecoded.values()
        return {item.marker.key: DEFERRED for items in redecoded for item in items} | dict(
            self.assumed
        )

    @property
    def reading(self) -> tuple[set[str], list[Failure]]:
        """Return nothing: what can't be read any more is dead already."""
        return set(), []

    async def open(self, connection: asyncpg.Connection) -> Generations:
        """Hold the lane. Raises `LaneLost`."""
        return await backlog.hold(connection, self.lane, self.lease)

    async def find(
        self, connection: asyncpg.Connection, items: Sequence[Item]
    ) -> tuple[dict[bytes, Known], set[bytes]]:
        """Return which are in the backlog already, other than as the rows that they come from."""
        own = {item.row for item in self.items}
        new = [item for item in items if item.marker.key not in own]
        known, _ = await backlog.find(connection, new) if new else ({}, set())
        return known, set()

    async def settle(self, connection: asyncpg.Connection, results: Results) -> Sequence[Row]:
        """Take off what was applied, and change what was not; returns what has died."""
        superseded = (item for item, _ in results.superseded)
        gone = (*results.applied, *results.duplicates, *superseded)
        unread = self.taken.hopeless
        results.unread += [(row.consumer, row.record, row.fate) for row in unread]
        # The others stay as they are: behind one that failed, or to be tried by themselves.
        judged = [
            *unread,
            *(
                _row(item, fate)
                for item, fate in results.fates
                if fate.is_judged or item.row is None
            ),
            *(backlog.identity_mismatch(item, error) for item, error in results.impostors),
        ]
        if new := [row for row in judged if row.is_new]:
            await backlog.add(connection, new)
        await backlog.settle(
            connection,
            self.lane,
            done={item.row for item in gone if item.row} | self.taken.redecoded.keys(),
            changed=[row for row in judged if not row.is_new],
            keys=self.taken.keys,
            went_on={item.order_key for item in gone},
        )
        return [row for row in judged if row.fate.is_dead]

    def halves(self) -> "Sequence[Work]":
        """Return the first half: the others have their turn again."""
        items, redecoded = self.taken.items, list(self.taken.redecoded.items())
        if max(len(items), len(redecoded)) < 2:
            return [self]
        first = replace(
            self.taken,
            items=items[: max(1, len(items) // 2)],
            redecoded=dict(redecoded[: max(1, len(redecoded) // 2)]),
        )
        return [FromLane(self.lane, self.lease, first)]

    def count(self, group: str, applied: Sequence[Item], seconds: float) -> None:
        """Record the transaction in metrics."""
        longest: dict[str, float] = {}
        for item in applied:
            if isinstance(item.record, StoredRecord):
                consumer, stored_for = item.marker.consumer, item.record.stored_for
                longest[consumer] = max(longest.get(consumer, 0.0), stored_for)
        for consumer, stored_for in longest.items():
            metrics.backlog_applied(consumer, stored_for + seconds)


def _row(item: Item, fate: Decision) -> Row:
    key = item.row or item.marker.key
    return Row(key, item.marker.consumer, item.record, fate, item)
