"""A batch of a topic partition, as a source of the consume transaction."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import asyncpg

from pipeline.apply import backlog, positions
from pipeline.apply.backlog import Row
from pipeline.apply.batch import Batch
from pipeline.apply.breaker import FailedMessage
from pipeline.apply.item import Item, Known, order_key
from pipeline.apply.outcome import BatchOutcome
from pipeline.apply.positions import Generations, Slot
from pipeline.handlers.policy import DEFERRED, Decision, ProcessDied, suspected
from pipeline.observe import metrics


@dataclass(frozen=True)
class PartitionSource:
    """A batch of a topic partition; the partition's position moves with it."""

    slot: Slot
    batch: Batch
    deaths: int = 0
    """Processes that have died over the batch. If any, its messages are parked as suspects."""

    @property
    def items(self) -> Sequence[Item]:
        """The messages, in order."""
        return self.batch.items

    @property
    def decisions(self) -> dict[bytes, Decision]:
        """Decisions to park messages without a call: of deferred handlers, or all suspects."""
        if self.deaths:
            error = ProcessDied(f"{self.deaths} processes have begun with its batch and died")
            return {item.key: suspected(error) for item in self.items}
        return {item.key: DEFERRED for item in self.items if item.handler.mode == "deferred"}

    @property
    def decoded(self) -> tuple[set[str], list[FailedMessage]]:
        """What the decoder could read, and what not."""
        decoder = f"the decoder of {self.slot.topic}"
        readable = bool(self.batch.items or self.batch.skipped)
        failed = [
            FailedMessage(decoder, order_key("", one.record), one.error)
            for one in self.batch.undecoded
        ]
        return ({decoder} if readable else set()), failed

    async def begin(self, connection: asyncpg.Connection) -> Generations:
        """Move the position. Raises `PositionMoved`."""
        return await positions.move_position(
            connection,
            self.slot,
            fetched_from=self.batch.start,
            next_offset=self.batch.end,
            anchor=self.batch.anchor,
        )

    async def find(
        self, connection: asyncpg.Connection, items: Sequence[Item]
    ) -> tuple[dict[bytes, Known], set[bytes]]:
        """Return which messages are in the backlog, and the order keys that wait there."""
        return await backlog.find(connection, items)

    async def settle(self, connection: asyncpg.Connection, outcome: BatchOutcome) -> Sequence[Row]:
        """Write what is not applied to the backlog; returns the dead rows."""
        if outcome.duplicates:
            await positions.count_duplicates(connection, self.slot, len(outcome.duplicates))
        undecoded = [backlog.undecoded_row(one) for one in self.batch.undecoded]
        outcome.undecoded += undecoded
        rows = [
            *(backlog.row_of(item, decision) for item, decision in outcome.decided),
            *(backlog.mismatch_row(item, error) for item, error in outcome.mismatched),
            *undecoded,
        ]
        if rows and outcome.encryption:
            rows = await outcome.encryption.encrypt(connection, rows)
        if rows:
            await backlog.add(connection, rows)
        return [row for row in rows if row.decision.is_dead]

    def halves(self) -> Sequence[Self]:
        """Divide the batch in the middle of its records."""
        offsets = self.batch.offsets
        if len(offsets) < 2:
            return [self]
        start, middle, end = self.batch.start, offsets[len(offsets) // 2], self.batch.end
        parts = (start, middle), (middle, end)
        return [replace(self, batch=self.batch.between(*part)) for part in parts]

    def record_metrics(self, group: str, applied: Sequence[Item], seconds: float) -> None:
        """Record the committed transaction."""
        if skipped := len(self.batch.skipped):
            metrics.processed(self.slot.topic, "", "skipped", skipped, group)
        metrics.batch_applied(self.slot.topic, group, len(self.batch.items) + skipped, seconds)
