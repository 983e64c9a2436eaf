"""Failures: what an error proves about the messages of a transaction.

A failure, an attempt or a decision counts only if a transaction commits it. What was rolled back is
a reason to look closer, and nothing else. `ladder.py` has the steps.

    error                         of an isolated message         of a message alone
    ----------------------------  -----------------------------  ------------------------
    `Reject`, `Park`, `Retry`     decided                        decided
    raised by Python              counts as an attempt           counts as an attempt
    of a statement, the flush, a  stored, to be tried alone      counts as an attempt
    constraint, a time limit
    deadlock, lock time-out       the transaction is repeated    waits, spends no attempt
    lost connection               the transaction is repeated    waits, spends no attempt;
                                                                 the third counts
    the same, in an outage        the transaction is repeated    likewise, if others have
                                                                 committed since the last one
    of a class of servers         as of a statement              as of a statement; of the
                                                                 classes 53 and 58: waits
    before any call               the transaction is repeated    the same: nothing counts

A lost connection, and an error of the classes 08, 25, 53, 57, 58 and XX, may be an outage: the
probe is asked first (`servers/probe.py`). While it fails, nothing is decided and nothing counts.
"""

from collections.abc import Sequence
from dataclasses import replace

from opentelemetry.context import Context

from onceward.errors import (
    QUERY_CANCELED,
    OncewardError,
    Repeat,
    StoreUnavailable,
    is_contention,
    is_of_resources,
    is_of_the_database,
    lacks_partition,
    may_be_outage,
    sqlstate_of,
)
from onceward.handlers.policy import (
    ISOLATED,
    LOCKED_OUT,
    LOST,
    Decision,
    Park,
    Reject,
    as_decision,
    undecided,
)
from onceward.observe.traces import traceparent
from onceward.servers.guard import HandlerFault

from .attempt import Attempt
from .breaker import FailedMessage
from .item import Item
from .ladder import IN_VAIN
from .outcome import BatchOutcome
from .source import Source, is_single, without_decision


class NeedsOwnSession(Repeat):
    """A handler has used the shared session, so all messages of its queue need sessions of their
    own: those of a correction and of its consumer stay in order."""

    def __init__(self, queue: str) -> None:
        super().__init__(queue)
        self.queue = queue


class TooMuch(Exception):
    """A run or a transaction has to be smaller, and is divided: it stages more events than fit into
    the memory, needs more savepoints than are quick, or fails so often that the breaker judges."""


class RolledBack(OncewardError):
    """A run or a transaction is rolled back: its flush, a statement or the COMMIT has failed."""

    reason: str = "transaction failed"
    items: Sequence[Item] = ()
    """The messages whose call has failed: one, or those that a handler of batches has had."""
    is_lost = False
    """Whether its connection was lost."""
    is_of_outage = False
    """Whether an outage was the cause, and nobody else shows that the database was well."""

    def __init__(
        self,
        error: BaseException,
        context: Context | None = None,
        *,
        has_timed_out: bool = False,
    ) -> None:
        """`context` is the trace context of the latest call."""
        super().__init__(error)
        self.error = error
        self.trace = traceparent(context)
        self.has_timed_out = has_timed_out
        """Whether the call, or the transaction, was cut off by its time limit, perhaps with a
        statement under way."""

    @property
    def may_be_outage(self) -> bool:
        """Whether the cause may be that the database can't be used now."""
        return self.is_lost or self.has_timed_out or may_be_outage(self.error)

    @property
    def why(self) -> str:
        """The reason, for metrics."""
        if is_contention(self.error):
            return LOCKED_OUT
        return LOST if self.is_lost else self.reason

    @property
    def is_certain(self) -> bool:
        """Whether a message that was alone has failed by itself: no time limit, lock, store or lost
        connection was in its way."""
        return not (self.is_lost or self.has_timed_out or is_nobodys(self.error))


class CallFailed(RolledBack):
    """The call of a handler has failed."""

    reason: str = "failed"

    def __init__(
        self,
        items: Sequence[Item],
        error: BaseException,
        context: Context | None = None,
        *,
        has_timed_out: bool = False,
    ) -> None:
        super().__init__(as_decision(error), context, has_timed_out=has_timed_out)
        self.items = items


class StatementFailed(RolledBack):
    """A statement of the engine has failed before any call, which is no message's fault."""

    may_be_outage = True
    is_certain = False


def failure_of(error: Exception) -> RolledBack:
    """Return the failure of a run: that of a call, or of what the engine has executed."""
    return error if isinstance(error, RolledBack) else RolledBack(error)


def is_nobodys(error: BaseException) -> bool:
    """Whether locks, the object store or a missing partition of the engine were in the way."""
    return is_contention(error) or isinstance(error, StoreUnavailable) or lacks_partition(error)


def rolled_back_by(error: Exception, attempt: Attempt, source: Source) -> RolledBack | None:
    """Return the failure of a transaction; None if it is no handler's: an outage."""
    failure = failure_of(error)
    for key, fault in attempt.strays():  # any statement may fail because of one
        failure = CallFailed([item for item in source.items if item.key == key], fault)
    cause = failure.error
    if lacks_partition(cause) or (isinstance(cause, StoreUnavailable) and is_single(source)):
        return None
    if attempt.contention is not None:
        return RolledBack(attempt.contention)
    is_lost = attempt.driver.is_closed()
    if isinstance(failure, CallFailed):
        is_own = failure.has_timed_out or isinstance(cause, HandlerFault)
        failure.is_lost = is_lost and not is_own
        return failure
    if not attempt.has_begun_calls:
        # Of many records they may be too much. Decisions alone are stored in one transaction, if
        # there is time for it.
        is_cut_off = attempt.is_late or sqlstate_of(cause) == QUERY_CANCELED
        called = without_decision(source, source.decisions | attempt.findings.decisions)
        divides = is_cut_off or (called and not is_nobodys(cause))
        return StatementFailed(cause) if divides and not is_single(source) else None
    is_without_answer = attempt.is_committing and attempt.is_late
    if attempt.is_late and not is_without_answer:
        late = TimeoutError(
            f"the transaction takes longer than {attempt.time_limit:g} s{attempt.lacking}"
        )
        late.__cause__ = cause
        failure = RolledBack(late, attempt.context, has_timed_out=True)
        failure.reason = "takes too long"
        return failure
    failure = RolledBack(cause, attempt.context)
    failure.is_lost = is_lost or is_without_answer
    return failure


def decide_isolated(item: Item, failure: RolledBack, outcome: BatchOutcome) -> None:
    """Decide on an isolated message that has failed; later ones of its key may wait for it."""
    # Otherwise Python raised it in its handler: it is the message's own.
    if is_of_the_database(failure.error) and not isinstance(failure.error, HandlerFault):
        decision = undecided(failure.error, item.history, ISOLATED, failure.trace)
    else:
        decision = _after_failure(item, failure)
    outcome.failed.append((item, failure.error))
    outcome.counted[item.consumer] += len(observed(outcome.failed[-1:]))
    outcome.decide(item, decision)


def decide_alone(item: Item, failure: RolledBack) -> Decision:
    """Return the decision on a message that was alone in its transaction."""
    error, policy, history = failure.error, item.handler.policy, item.history
    if failure.is_lost and not failure.is_of_outage:
        return policy.disconnected(error, history)
    if is_contention(error):
        return policy.after_failure(error, history, reason=LOCKED_OUT, is_free=True)
    if failure.is_of_outage or is_of_resources(error) or isinstance(error, StoreUnavailable):
        return policy.after_failure(error, history, reason=failure.reason, is_free=True)
    return _after_failure(item, failure)


def is_in_vain(consumer: str, outcome: BatchOutcome) -> bool:
    """Whether so many messages of a consumer have failed, and none was applied, that the breaker
    has to judge."""
    has_many = outcome.counted[consumer] > IN_VAIN
    return has_many and all(one.consumer != consumer for one in outcome.applied)


def observed(failed: Sequence[tuple[Item, BaseException]]) -> list[FailedMessage]:
    """Return failures for the breaker: none of messages that were parked or rejected, and none that
    are nobody's fault.
    """
    return [
        FailedMessage(item.consumer, item.order_key, error, item.has_failed)
        for item, error in failed
        if not isinstance(error, Park | Reject) and not is_nobodys(error)
    ]


def _after_failure(item: Item, failure: RolledBack) -> Decision:
    policy = item.handler.policy
    decision = policy.after_failure(failure.error, item.history, reason=failure.reason)
    return replace(decision, trace=failure.trace)
