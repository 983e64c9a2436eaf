"""A request as a source of the consume transaction.

It has no position, and is never parked: if it is not applied nothing is stored, and the caller gets
the error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import asyncpg

from onceward.apply.backlog import Stored
from onceward.apply.breaker import FailedMessage
from onceward.apply.item import Item, Row
from onceward.apply.outcome import BatchOutcome
from onceward.apply.positions import Generations
from onceward.apply.throttles import Resting, Throttles
from onceward.errors import OncewardError, SourceLost
from onceward.handlers.policy import Decision
from onceward.handlers.statements import GUARD_COMMIT

_BEGIN = f"""
WITH guarded AS ({GUARD_COMMIT})
SELECT pg_try_advisory_xact_lock($1), current, oldest, since
  FROM pipeline.inbox_generation
"""

_RESULT = """
SELECT result::text FROM pipeline.inbox WHERE generation = ANY ($1::int[]) AND key = $2
"""


class InvalidKey(OncewardError, ValueError):
    """The request's idempotency key, or its scope, is missing or malformed."""


class UnderWay(SourceLost):
    """Another request with this key is being applied now: repeat it, to get that one's answer."""

    def __init__(self, key: str) -> None:
        super().__init__(f"a request with the key {key!r} is under way: repeat it in a moment")


class KeyReused(SourceLost):
    """The key belongs to an earlier request with another event: a new request needs a new key."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"the key {key!r} belongs to an earlier request with other content: give each request"
            " a key of its own, and repeat a request as it was"
        )


@dataclass
class RequestSource:
    """A request, as a source of the consume transaction."""

    item: Item
    event_hash: bytes
    """Hash of its event, which version 1.0.0 has stored in place of that of what was sent."""
    throttles: Throttles
    answer: str | None = None
    """The stored result of a repeated request, as JSON."""
    has_lease: ClassVar[bool] = False
    _generations: list[int] = field(default_factory=list)
    _is_taken: bool = False

    @property
    def items(self) -> Sequence[Item]:
        """The request."""
        return [self.item]

    @property
    def decisions(self) -> dict[bytes, Decision]:
        """Return nothing: a request is applied or fails."""
        return {}

    @property
    def decoded(self) -> tuple[set[str], list[FailedMessage]]:
        """Return nothing: its event is decoded."""
        return set(), []

    @property
    def patience(self) -> float:
        """A few seconds, as a client waits for the answer."""
        return 4.0

    async def check(self, connection: asyncpg.Connection) -> None:
        """Take the request, once. Raises `Resting` if its consumer is paused, or took too many."""
        consumer = "consumer", self.item.consumer
        await self.throttles.look()
        left = self.throttles.left(*consumer)
        if left == math.inf or (left and not self._is_taken):
            raise Resting
        if not self._is_taken:
            self._is_taken = True
            await self.throttles.took({consumer: 1})

    async def begin(self, connection: asyncpg.Connection) -> Generations:
        """Lock the key until the transaction ends. Raises `UnderWay` if another request has it.

        The marker would make the other wait: for the whole transaction, and with a connection.
        """
        lock = int.from_bytes(self.item.key[:8], signed=True)
        is_free, *rest = await connection.fetchrow(_BEGIN, lock)
        if not is_free:
            raise UnderWay(self.item.message.id)
        generations = Generations(*rest)
        self._generations = [*range(generations.oldest, generations.current + 1)]
        return generations

    async def find(self, connection: asyncpg.Connection, items: Sequence[Item]) -> Stored:
        """Return nothing: requests are not in the backlog, and have no order with what is."""
        return Stored()

    async def settle(self, connection: asyncpg.Connection, outcome: BatchOutcome) -> Sequence[Row]:
        """Read the answer of a repeated request. Raises `KeyReused`."""
        if any(row.remembered != self.event_hash for row in outcome.letters):
            raise KeyReused(self.item.message.id)
        outcome.duplicates += [self.item for _ in outcome.letters]
        outcome.letters.clear()
        if outcome.duplicates:
            key = self.item.key
            self.answer = await connection.fetchval(_RESULT, self._generations, key)
        return ()

    @property
    def is_alone(self) -> bool:
        """Always: a request has a transaction for itself."""
        return True

    def pieces(self, records: float) -> Sequence[Self]:
        """Return itself."""
        return [self]

    def record_metrics(self, group: str, applied: Sequence[Item], seconds: float) -> None:
        """Record nothing: a server of requests measures them."""
