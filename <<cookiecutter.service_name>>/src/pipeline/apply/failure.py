"""The reasons for which a transaction is rolled back because of its messages."""

import math
from dataclasses import dataclass
from time import perf_counter

from pipeline.errors import StoreUnavailable, is_infrastructure
from pipeline.handlers.policy import Decision

from .source import Source, is_single


@dataclass(frozen=True)
class NeedsOwnSession:
    """A handler has used its session, so each message of its consumer needs one of its own."""

    consumer: str


@dataclass(frozen=True)
class MessagesFailed:
    """Some messages have failed, and the others can be applied without them."""

    decisions: dict[bytes, Decision]
    """Decisions on those that failed, by marker key."""
    late: bytes | None
    """Marker key of the one that exceeded its time limit."""
    is_cut_off: bool
    """Whether a statement may still be under way on the connection."""


@dataclass(frozen=True)
class CulpritUnknown:
    """The transaction has failed as a whole, and any of its messages may be at fault."""

    reason: str
    error: BaseException
    trace: str | None = None
    """`traceparent` of the latest call of a handler."""
    is_cut_off: bool = False
    """Whether a statement may still be under way on the connection."""


Failure = NeedsOwnSession | MessagesFailed | CulpritUnknown


class TransactionProgress:
    """Times of a transaction, by which its failures are classified."""

    def __init__(self, limit: float) -> None:
        """`limit` is the time limit in seconds, which begins now."""
        self._limit = limit
        self._reserved = 0.0
        self._started = perf_counter()
        self.handlers_since = math.inf
        """Time at which the engine's own statements ended and the calls of handlers began."""
        self.has_own_sessions = False
        """Whether handlers may have left something on the connection."""
        self.trace: str | None = None
        """`traceparent` of the latest call of a handler."""

    def handlers_begin(self) -> None:
        """Note that the engine's own statements are done."""
        self.handlers_since = perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the transaction has begun."""
        return perf_counter() - self._started

    @property
    def is_late(self) -> bool:
        """Whether the time limit has passed."""
        return self.seconds >= self._limit - self._reserved

    def reserve(self, seconds: float) -> None:
        """Raise `TimeoutError` if less than these seconds are left, as if the limit had passed."""
        self._reserved = seconds
        if self.is_late:
            raise TimeoutError
        self._reserved = 0.0

    def classify(
        self, source: Source, error: Exception, *, messages_may_be_cause: bool
    ) -> Failure | None:
        """Return the failure for an error; None if no message is at fault.

        An error of the infrastructure is an outage, unless the transaction has exceeded its time
        limit: then it was cut off, and its messages may be too many or too slow. The database is
        slow, which is an outage, if the engine's own statements on one message take most of the
        limit. An error of the object store may be caused by too much data, unless there is only one
        message.
        """
        if isinstance(error, StoreUnavailable):
            return (
                None if is_single(source) else CulpritUnknown("takes too long", error, self.trace)
            )
        is_slow = len(source.items) == 1 and (self.handlers_since - self._started > self._limit / 2)
        is_outage = is_infrastructure(error) and (not self.is_late or is_slow)
        if is_outage or not messages_may_be_cause:
            return None
        if not self.is_late:
            return CulpritUnknown("transaction failed", error, self.trace)
        text = f"the transaction takes longer than {self._limit - self._reserved:g} s"
        if self._reserved:
            text += f" and leaves the object store less than {self._reserved:g} s"
        late = TimeoutError(text)
        late.__cause__ = error
        return CulpritUnknown("takes too long", late, self.trace)
