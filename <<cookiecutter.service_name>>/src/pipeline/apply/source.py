"""Sources of the consume transaction: what a partition and a lane of the backlog both answer."""

from collections.abc import Sequence
from typing import Protocol, Self

import asyncpg

from pipeline.handlers.policy import Decision

from .backlog import Row
from .breaker import Failed
from .inbox import Generations
from .item import Item, Known
from .outcome import BatchOutcome


class Source(Protocol):
    """Messages for one transaction, and the place that moves with them."""

    @property
    def items(self) -> Sequence[Item]:
        """The messages, in order."""
        ...

    @property
    def decisions(self) -> dict[bytes, Decision]:
        """Decisions that need no handler: what is parked or dead from the start, by marker key."""
        ...

    @property
    def decoded(self) -> tuple[set[str], list[Failed]]:
        """What the decoder could read, and what not: the breaker treats it as a consumer."""
        ...

    async def begin(self, connection: asyncpg.Connection) -> Generations:
        """Move the position over the messages, or hold the lane, to the end of the transaction.

        Raises `SourceLost` if another process has the source.
        """
        ...

    async def find(
        self, connection: asyncpg.Connection, items: Sequence[Item]
    ) -> tuple[dict[bytes, Known], set[bytes]]:
        """Return which messages are in the backlog, and the order keys that wait there."""
        ...

    async def settle(self, connection: asyncpg.Connection, outcome: BatchOutcome) -> Sequence[Row]:
        """Write what is not applied to the backlog, and delete what is; returns the dead rows."""
        ...

    def halves(self) -> Sequence[Self]:
        """Return smaller sources, to be applied in turn; only itself if it can't be divided."""
        ...

    def record_metrics(self, group: str, applied: Sequence[Item], seconds: float) -> None:
        """Record the committed transaction, which has taken so many seconds."""
        ...


def is_single(source: Source) -> bool:
    """Whether the messages are those of one record."""
    places = {(one.record.topic, one.record.partition, one.record.offset) for one in source.items}
    return len(places) <= 1
