"""Batches of topic partitions, as a source of the consume transaction."""

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, Self

import asyncpg

from onceward.apply import backlog, positions
from onceward.apply.backlog import Stored
from onceward.apply.batch import Batch
from onceward.apply.breaker import FailedMessage
from onceward.apply.item import Item, Row, order_key
from onceward.apply.outcome import BatchOutcome
from onceward.apply.positions import Generations, Move, Slot
from onceward.apply.source import without_decision
from onceward.handlers.policy import DEFERRED, DIED, NEW, Decision, ProcessDied, undecided
from onceward.observe import metrics

from .limits import TopicLimits


@dataclass(frozen=True)
class PartitionBatch:
    """A batch of one topic partition."""

    slot: Slot
    batch: Batch
    deaths: int = 0
    """Processes that have died over the batch. If any, its messages are parked as suspects."""
    begun: Callable[[], None] = lambda: None
    """Called when its transaction has begun, which no longer waits for others then."""
    stored: Set[str] = frozenset()
    """Consumers that are paused, or slower than others by a rate: their messages are parked."""
    limits: TopicLimits | None = None
    """What people allow to be taken of the topic; None: all."""

    @property
    def move(self) -> Move:
        """The change of the partition's position."""
        return Move(self.slot, self.batch.start, self.batch.end, self.batch.anchor)

    def cut(self, records: float) -> Sequence[Self]:
        """Return consecutive batches of at most so many records."""
        offsets, size = [one.offset for one in self.batch.records], len(self.batch.records)
        step = int(min(records, max(size, 1)))
        places = [self.batch.start, *offsets[step::step], self.batch.end]
        return [replace(self, batch=self.batch.between(*ends)) for ends in pairwise(places)]

    @property
    def decisions(self) -> dict[bytes, Decision]:
        """Decisions to park messages without a call: of deferred handlers, of consumers that are
        paused, or all suspects."""
        if self.deaths:
            error = ProcessDied(f"{self.deaths} processes have begun with its batch and died")
            tried = (item for item in self.batch.items if not item.undecoded)  # the others are dead
            return {item.key: undecided(error, NEW, DIED) for item in tried}
        return {
            item.key: DEFERRED
            for item in self.batch.items
            if item.handler.mode == "deferred" or item.consumer in self.stored
        }


@dataclass(frozen=True)
class PartitionSource:
    """Batches of one or more topic partitions; the partitions' positions move with them."""

    parts: Sequence[PartitionBatch]
    begun: Callable[[], None] = lambda: None
    """Called when a transaction has begun: it has its connection then."""
    has_lease: ClassVar[bool] = False

    @cached_property
    def items(self) -> Sequence[Item]:
        """The messages, in the order of each partition."""
        if len(self.parts) == 1:
            return self.parts[0].batch.items
        return [item for part in self.parts for item in part.batch.items]

    @property
    def decisions(self) -> dict[bytes, Decision]:
        """Decisions to park messages without a call."""
        return {key: one for part in self.parts for key, one in part.decisions.items()}

    @property
    def decoded(self) -> tuple[set[str], list[FailedMessage]]:
        """What the decoder of each topic could read, and what not."""
        readable: set[str] = set()
        failed: list[FailedMessage] = []
        for part in self.parts:
            decoder = f"the decoder of {part.slot.topic}"
            if part.batch.items or part.batch.skipped:
                readable.add(decoder)
            failed += [
                FailedMessage(decoder, order_key("", one.record), one.error)
                for one in part.batch.undecoded
            ]
        return readable, failed

    @property
    def judged(self) -> set[str]:
        """Consumers and decoders that the breaker may judge by it."""
        called = without_decision(self, self.decisions)
        return {item.consumer for item in called} | {one.consumer for one in self.decoded[1]}

    @property
    def patience(self) -> float:
        """A minute: a revocation of the partition ends the wait."""
        return 60.0

    async def check(self, connection: asyncpg.Connection) -> None:
        """Raise `Resting` if a topic is paused, or a consumer whose messages are not parked."""
        for part in self.parts:
            if part.limits:
                await part.limits.check(part.stored)

    async def begin(self, connection: asyncpg.Connection) -> Generations:
        """Move the positions. Raises `PositionMoved`."""
        for begun in (self.begun, *(part.begun for part in self.parts)):
            begun()
        return await positions.move_positions(connection, [part.move for part in self.parts])

    async def find(self, connection: asyncpg.Connection, items: Sequence[Item]) -> Stored:
        """Return which messages are in the backlog, and the order keys that wait there."""
        return await backlog.find(connection, items)

    async def settle(self, connection: asyncpg.Connection, outcome: BatchOutcome) -> Sequence[Row]:
        """Write what is not applied to the backlog; returns the dead rows. Raises `BacklogFull`."""
        if alone := {item.consumer for item, one in outcome.decided if one.is_undecided}:
            await backlog.raise_if_full(connection, alone)
        if outcome.duplicates:
            places = ((one.record.topic, one.record.partition) for one in outcome.duplicates)
            group = self.parts[0].slot.group
            await positions.count_duplicates(connection, group, Counter(places))
        outcome.letters += (
            backlog.undecoded_row(one) for part in self.parts for one in part.batch.undecoded
        )
        rows = [backlog.row_of(*decided) for decided in outcome.decided]
        # Those of mismatches are locked in one order in all partitions.
        rows += sorted(outcome.letters, key=lambda row: row.key)
        stored = await backlog.add(connection, rows, outcome.encryption)
        outcome.keep_letters(stored)
        return [row for row in stored if row.decision.is_dead]

    @property
    def is_alone(self) -> bool:
        """Never: what fails here may have failed because of its neighbours."""
        return False

    def pieces(self, records: float) -> Sequence[Self]:
        """Divide the batches between records, each partition by itself."""
        if sum(len(part.batch.records) for part in self.parts) <= records:
            return [self]
        return [replace(self, parts=[piece]) for part in self.parts for piece in part.cut(records)]

    def record_metrics(self, group: str, applied: Sequence[Item], seconds: float) -> None:
        """Record the committed transaction."""
        for part in self.parts:
            if skipped := len(part.batch.skipped):
                metrics.processed(part.slot.topic, "", "skipped", skipped, group)
            number = len(part.batch.items) + skipped
            metrics.batch_applied(part.slot.topic, group, number, seconds)
