"""Guilt: what fails in a transaction, and what happens to its messages then.

    What fails                        What happens
    --------------------------------  -----------------------------------------------------------
    a server or the network           An outage: the transaction is repeated until it succeeds.
    the connection, during COMMIT     It is repeated as well. If it was committed, the position has
                                      moved, or the rows are gone.
    the object store                  An outage for a single record; many are halved.
    the source, which another         `SourceLost`: its messages are left to that process.
    process owns
    the handler of a message, or a    The message is retried later, parked or dead by its policy.
    server that only it uses          The others are applied without it.
    a further handler in the same     "undecided": it may have failed because of the first one.
    session                           The message is stored, and tried alone.
    a call that exceeds its time      The message is tried once more, because its connection may
    limit, or leaves a statement      have been dead. Then as any failure of a handler.
    under way
    a handler that uses the session   Each message of its consumer gets a session of its own, and
    that messages share               the transaction is repeated.
    a handler of batches, a flush,    The messages are halved. A single record is tried once more.
    the COMMIT, a lock, the time      Then it has failed as by its handler, or is "undecided" for
    limit of the transaction          each of its handlers if it has several.
    key after key of a consumer with  `BreakerOpen`: nothing is stored, and the source waits.
    one type of error

`is_guilty`, `of_transaction`, `judge` and `blame` decide it, `Breaker.observe` recognizes the last
case, and `ConsumeTransactions.apply` repeats the transaction accordingly.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from opentelemetry.context import Context

from pipeline.errors import (
    StoreUnavailable,
    is_contention,
    is_infrastructure,
    is_of_the_database,
    sqlstate_of,
)
from pipeline.handlers.policy import Decision, Park, Reject, as_decision, undecided
from pipeline.observe.traces import traceparent
from pipeline.servers.guard import HandlerFault

from .attempt import Attempt
from .breaker import Breaker, FailedMessage
from .item import Item
from .outcome import BatchOutcome
from .source import Source, is_single, without_decision

_CONTENTIONS = 3
"""Deadlocks and lock time-outs in a row after which the messages are at fault."""
_READ_ONLY = "25006"
"""PostgreSQL's code for a read-only transaction. The transaction has written before, so the cause
is a handler's `SET TRANSACTION`, not a failover."""


class NeedsOwnSession(Exception):
    """A handler has used the shared session, so its messages need sessions of their own."""

    def __init__(self, consumer: str) -> None:
        super().__init__(consumer)
        self.consumer = consumer


@dataclass(frozen=True)
class MessagesFailed:
    """Some messages have failed, and the others can be applied without them."""

    decisions: dict[bytes, Decision]
    """Decisions by marker key; none on a message that is tried once more."""
    error: BaseException
    """That of the first of them."""


@dataclass(frozen=True)
class CulpritUnknown:
    """The transaction has failed as a whole, and any of its messages may be at fault."""

    reason: str
    error: BaseException
    trace: str | None = None
    """`traceparent` of the latest call of a handler."""


Failure = NeedsOwnSession | MessagesFailed | CulpritUnknown


class CallFailed(Exception):
    """A handler has failed on a message. Rolls back the message's savepoint or session."""

    def __init__(self, error: BaseException, context: Context | None = None) -> None:
        super().__init__()
        self.error = as_decision(error)
        self.trace = traceparent(context)


class MessageFailure(NamedTuple):
    """A message that has failed."""

    item: Item
    error: BaseException
    trace: str | None = None
    """`traceparent` of the call."""
    is_cut_off: bool = False
    """Whether the call was cut off, with a statement under way perhaps."""


@dataclass
class FailedCalls:
    """The calls of a transaction that have failed."""

    failed: list[MessageFailure] = field(default_factory=list)
    """The first has failed by itself, the others maybe because of it."""
    in_batch: BaseException | None = None
    """Error of a handler that had several messages at once, any of which may be at fault."""
    are_certain: bool = False
    """Whether each message that failed has failed by itself."""

    def __bool__(self) -> bool:
        return bool(self.failed or self.in_batch)


def is_guilty(error: BaseException, attempt: Attempt, *, is_alone: bool) -> bool:
    """Whether the message whose handling has raised an error is at fault for it.

    An error of the database may be an outage, or be caused by an earlier message whose changes are
    flushed. `is_alone`: only this message has changes to be flushed, in a session of its own.
    """
    if isinstance(error, HandlerFault):
        attempt.is_cut_off = True
        return True
    if sqlstate_of(error) == _READ_ONLY:
        return True
    if is_alone:
        return not is_infrastructure(error)
    return not (is_of_the_database(error) or attempt.driver.is_closed())


def of_transaction(
    error: Exception, attempt: Attempt, source: Source, decisions: Mapping[bytes, Decision]
) -> Failure | None:
    """Count contention; return the failure of a transaction that has raised an error, None for an
    outage.

    An error of the infrastructure is an outage, unless locks are in the way again and again; of a
    single record, after handlers were called. Or the transaction has exceeded its time limit: then
    it was cut off, and its messages may be too many or too slow. The database is slow, which is an
    outage, if the engine's own statements on one message take most of the limit. An error of the
    object store may be caused by too much data, unless there is only one message.
    """
    if isinstance(error, NeedsOwnSession):
        return error.with_traceback(None)  # it refers to the batch
    trace = traceparent(attempt.context)
    if isinstance(error, StoreUnavailable):
        return None if is_single(source) else CulpritUnknown("takes too long", error, trace)
    may_hold = attempt.handlers_began_at < math.inf or not is_single(source)
    attempt.memory.contentions += may_hold and is_contention(error)
    if not _may_be_cause(source, decisions):
        return None
    if attempt.memory.contentions > _CONTENTIONS:
        return CulpritUnknown("locked out", error, trace)
    own_seconds = attempt.handlers_began_at - attempt.began_at
    is_slow = len(source.items) == 1 and own_seconds > attempt.time_limit / 2
    if is_infrastructure(error) and (not attempt.is_late or is_slow):
        return None
    if not attempt.is_late:
        return CulpritUnknown("transaction failed", error, trace)
    reserved = attempt.reserved
    text = f"the transaction takes longer than {attempt.time_limit - reserved:g} s"
    if reserved:
        text += f" and leaves the object store less than {reserved:g} s"
    late = TimeoutError(text)
    late.__cause__ = error
    return CulpritUnknown("takes too long", late, trace)


def judge(
    source: Source, calls: FailedCalls, outcome: BatchOutcome, breaker: Breaker, attempt: Attempt
) -> Failure | None:
    """Return the failure of the calls of handlers, or None.

    Raises `BreakerOpen` if the breaker is open for a consumer that failed.
    """
    if calls.in_batch is not None:
        return CulpritUnknown("failed", calls.in_batch, traceparent(attempt.context))
    readable, failed = source.decoded
    outcome.succeeded = readable | {item.consumer for item in outcome.applied}
    failed += [
        _failed(item, item.fault)
        for item, decision in outcome.decided
        if item.fault is not None and decision.is_dead
    ]
    failed += [
        _failed(one.item, one.error)
        for one in calls.failed
        if not isinstance(one.error, Park | Reject)  # those are decisions
    ]
    breaker.observe(failed, succeeded=outcome.succeeded)
    if not calls.failed:
        return None
    decisions = {}
    for number, (item, error, trace, is_cut_off) in enumerate(calls.failed):
        if is_cut_off and item.key not in attempt.memory.cut_off:
            attempt.memory.cut_off.add(item.key)
        elif number == 0 or calls.are_certain:
            decisions[item.key] = _after_failure(item, error, "failed", trace)
        else:
            decisions[item.key] = replace(undecided(error), trace=trace)
    return MessagesFailed(decisions, calls.failed[0].error)


def blame(
    source: Source, decisions: Mapping[bytes, Decision], failure: CulpritUnknown, breaker: Breaker
) -> dict[bytes, Decision]:
    """Return decisions on the messages of one record, one of which must be at fault.

    Raises `BreakerOpen` if the breaker is open for their consumer.
    """
    items, error = without_decision(source, decisions), failure.error
    breaker.observe(_failed(item, error) for item in items)
    if len(items) > 1:
        return {item.key: undecided(error) for item in items}
    return {item.key: _after_failure(item, error, failure.reason, failure.trace) for item in items}


def _may_be_cause(source: Source, decisions: Collection[bytes]) -> bool:
    """Whether messages may be at fault: there are several records, or a message to handle."""
    return not is_single(source) or bool(without_decision(source, decisions))


def _failed(item: Item, error: BaseException) -> FailedMessage:
    return FailedMessage(item.consumer, item.order_key, error, item.last_error)


def _after_failure(item: Item, error: BaseException, reason: str, trace: str | None) -> Decision:
    decision = item.handler.policy.after_failure(
        error, attempts=item.attempts, waited=item.waited, reason=reason
    )
    return replace(decision, trace=trace)
