"""The interface to the consume transaction of what has messages: a partition, a lane, a request."""

from collections.abc import Collection, Sequence
from typing import ClassVar, Protocol, Self

import asyncpg

from onceward.handlers.policy import Decision

from .backlog import Stored
from .breaker import FailedMessage
from .item import Item, Row
from .outcome import BatchOutcome
from .positions import Generations


class Source(Protocol):
    """Messages for one transaction, and the position or lane that it changes with them."""

    has_lease: ClassVar[bool]
    """Whether its transaction holds a lease, and so must not wait for those of others."""

    @property
    def items(self) -> Sequence[Item]:
        """The messages, in order."""

    @property
    def decisions(self) -> dict[bytes, Decision]:
        """Decisions that were made before the transaction, by marker key."""

    @property
    def decoded(self) -> tuple[set[str], list[FailedMessage]]:
        """Decoders that have succeeded, and records that could not be decoded.

        The breaker treats a decoder as a consumer.
        """

    @property
    def patience(self) -> float:
        """Seconds for which the transaction may wait for its turn."""

    async def check(self, connection: asyncpg.Connection) -> None:
        """Look what is paused, when the transaction has its connection and is about to begin.

        What it writes is committed at once. Raises `Resting` if any of the messages must not be
        taken now, and `SourceLost` if another process owns it.
        """

    async def begin(self, connection: asyncpg.Connection) -> Generations:
        """Move the position over the messages, or hold the lane, to the end of the transaction.

        Raises `SourceLost` if another process owns it.
        """

    async def find(self, connection: asyncpg.Connection, items: Sequence[Item]) -> Stored:
        """Return what the backlog has of the messages, after their markers were inserted."""

    async def settle(self, connection: asyncpg.Connection, outcome: BatchOutcome) -> Sequence[Row]:
        """Store messages that are not applied in the backlog; returns the rows that are dead.

        Rows of messages that are applied are deleted.
        """

    @property
    def is_alone(self) -> bool:
        """Whether it is one message of which every failure counts, also by a time limit."""

    def pieces(self, records: float) -> Sequence[Self]:
        """Return sources of at most so many records each, to be applied in order."""

    def record_metrics(self, group: str, applied: Sequence[Item], seconds: float) -> None:
        """Record the metrics of a committed transaction that took so many seconds."""


def without_decision(source: Source, decisions: Collection[bytes]) -> Sequence[Item]:
    """Return the messages whose handlers are to be called."""
    return [item for item in source.items if item.key not in decisions]


def is_single(source: Source) -> bool:
    """Whether it is one record, also one that can't be decoded, and so can't be divided."""
    return len(source.pieces(1)) == 1
