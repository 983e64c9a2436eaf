"""Why a transaction was rolled back, where its messages may be at fault."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter

from pipeline.errors import StoreSlow, is_infrastructure
from pipeline.handlers.policy import Decision
from pipeline.handlers.staging import Outbox

from .source import Source, is_single


@dataclass(frozen=True)
class NeedsOwnSession:
    """A handler has used its session, so each message of its consumer needs one of its own."""

    consumer: str


@dataclass(frozen=True)
class MessagesFailed:
    """Some messages have failed, and the others can be applied without them."""

    decisions: dict[bytes, Decision]
    """What becomes of those that failed, by marker key."""
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
    storing: Mapping[str, bytes] = field(default_factory=dict)
    """Payloads, by event id, that the object store had not stored when the time was up."""


Failure = NeedsOwnSession | MessagesFailed | CulpritUnknown


class Progress:
    """How far a transaction has come."""

    def __init__(self, limit: float) -> None:
        """`limit` is the time limit in seconds, which begins now."""
        self._limit = limit
        self._started = perf_counter()
        self.handlers_since = math.inf
        """When the engine's own statements were done, and those of handlers began."""
        self.outbox: Outbox | None = None
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
        return self.seconds >= self._limit

    def classify(self, source: Source, error: Exception, *, may_be_guilty: bool) -> Failure | None:
        """Return the failure that an error means; None if no message is at fault.

        An error of the infrastructure is an outage, unless the transaction has exceeded its time
        limit: then it was cut off, and its messages may be too many or too slow. A database that
        takes most of the limit for the engine's own statements on one message is slow.
        """
        is_slow = len(source.items) == 1 and (self.handlers_since - self._started > self._limit / 2)
        is_too_much = isinstance(error, StoreSlow) and not is_single(source)
        is_outage = is_infrastructure(error) and (not self.is_late or is_slow)
        if (is_outage and not is_too_much) or not may_be_guilty:
            return None
        if is_too_much:
            return CulpritUnknown("takes too long", error, self.trace)
        if not self.is_late:
            return CulpritUnknown("transaction failed", error, self.trace)
        late = TimeoutError(f"the transaction takes longer than {self._limit} s")
        late.__cause__ = error
        storing = self.outbox.storing if self.outbox else {}
        return CulpritUnknown("takes too long", late, self.trace, storing=storing)
