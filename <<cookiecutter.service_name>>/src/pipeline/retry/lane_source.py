"""Rows of a backlog lane, as a source of the consume transaction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import asyncpg

from pipeline.apply import backlog
from pipeline.apply.backlog import Row
from pipeline.apply.breaker import FailedMessage
from pipeline.apply.item import Item, Known, StoredRecord
from pipeline.apply.outcome import BatchOutcome
from pipeline.apply.positions import Generations
from pipeline.handlers.policy import DEFERRED, Decision
from pipeline.observe import metrics
from pipeline.retry import lanes

from .lanes import Lane, Taken


@dataclass(frozen=True)
class LaneSource:
    """Rows of a lane, beginning with the first one of each key."""

    lane: Lane
    lease: float
    """Seconds for which the transaction extends the lane's lease when it begins."""
    taken: Taken
    assumed: Mapping[bytes, Decision] = field(default_factory=dict)
    """Decisions to store without a call of a handler, by marker key."""

    @property
    def items(self) -> Sequence[Item]:
        """The messages, in order."""
        return [*self.taken.items, *self._redecoded]

    @property
    def _redecoded(self) -> list[Item]:
        return [item for items in self.taken.redecoded.values() for item in items]

    @property
    def decisions(self) -> dict[bytes, Decision]:
        """Decisions to store without a call: `assumed`, and to defer redecoded messages, which are
        appended to the rows of their key."""
        return {item.key: DEFERRED for item in self._redecoded} | dict(self.assumed)

    @property
    def decoded(self) -> tuple[set[str], list[FailedMessage]]:
        """Return nothing: what can't be decoded is dead already."""
        return set(), []

    async def begin(self, connection: asyncpg.Connection) -> Generations:
        """Lock the lane and extend its lease. Raises `LaneLost`."""
        return await lanes.hold(connection, self.lane, self.lease)

    async def find(
        self, connection: asyncpg.Connection, items: Sequence[Item]
    ) -> tuple[dict[bytes, Known], set[bytes]]:
        """Return which messages are in other rows of the backlog than those they were read from."""
        own = {item.row for item in self.items}
        new = [item for item in items if item.key not in own]
        known, _ = await backlog.find(connection, new) if new else ({}, set())
        return known, set()

    async def settle(self, connection: asyncpg.Connection, outcome: BatchOutcome) -> Sequence[Row]:
        """Delete the rows of applied messages, and update others; returns the dead rows."""
        superseded = (item for item, _ in outcome.superseded)
        done = (*outcome.applied, *outcome.duplicates, *superseded)
        outcome.undecoded += self.taken.unhandleable
        # Rows behind one that failed, and rows still to be tried alone, stay as they are.
        changed = [
            *self.taken.unhandleable,
            *(
                backlog.row_of(item, decision)
                for item, decision in outcome.decided
                if decision.is_decided or item.row is None
            ),
            *(backlog.mismatch_row(item, error) for item, error in outcome.mismatched),
        ]
        if new := [row for row in changed if row.is_new]:
            await backlog.add(connection, new)
        await lanes.settle(
            connection,
            self.lane,
            done={item.row for item in done if item.row} | self.taken.redecoded.keys(),
            changed=[row for row in changed if not row.is_new],
            keys=self.taken.keys,
            keys_with_progress={item.order_key for item in done},
        )
        return [row for row in changed if row.decision.is_dead]

    def halves(self) -> Sequence[Self]:
        """Return the first half; the rows of the other stay due."""
        items, redecoded = self.taken.items, list(self.taken.redecoded.items())
        if max(len(items), len(redecoded)) < 2:
            return [self]
        first = replace(
            self.taken,
            items=items[: max(1, len(items) // 2)],
            redecoded=dict(redecoded[: max(1, len(redecoded) // 2)]),
        )
        return [type(self)(self.lane, self.lease, first)]

    def record_metrics(self, group: str, applied: Sequence[Item], seconds: float) -> None:
        """Record how long the messages were stored before they were applied."""
        longest: dict[str, float] = {}
        for item in applied:
            if isinstance(item.record, StoredRecord):
                stored_for = item.record.stored_for
                longest[item.consumer] = max(longest.get(item.consumer, 0.0), stored_for)
        for consumer, stored_for in longest.items():
            metrics.backlog_applied(consumer, stored_for + seconds)
