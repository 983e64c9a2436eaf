"""Which messages are at fault for a failure, and the decisions on them."""

from collections.abc import Sequence
from dataclasses import replace

from pipeline.handlers.policy import Decision, Park, Reject, undecided

from .breaker import Breaker, FailedMessage
from .calls import FailedCalls
from .failure import CulpritUnknown, Failure, MessagesFailed, NeedsOwnSession
from .item import Item
from .outcome import BatchOutcome
from .source import Source


def judge(
    source: Source, calls: FailedCalls, outcome: BatchOutcome, breaker: Breaker, trace: str | None
) -> Failure | None:
    """Return the failure of the calls of handlers, or None.

    Raises `BreakerOpen` if the breaker is open for a consumer that failed.
    """
    if calls.needs_session is not None:
        return NeedsOwnSession(calls.needs_session)
    if calls.in_batch is not None:
        return CulpritUnknown("failed", calls.in_batch, trace, is_cut_off=calls.is_cut_off)
    readable, failed = source.decoded
    outcome.succeeded = readable | {item.consumer for item in outcome.applied}
    failed += [
        FailedMessage(item.consumer, item.order_key, item.fault, item.last_error)
        for item, decision in outcome.decided
        if item.fault is not None and decision.is_dead
    ]
    failed += [
        FailedMessage(item.consumer, item.order_key, error, item.last_error)
        for item, error in calls.failed
        if not isinstance(error, Park | Reject)  # those are decisions
    ]
    breaker.observe(failed, succeeded=outcome.succeeded)
    if not calls.failed:
        return None
    decisions = {
        item.key: _after_failure(item, error, "failed")
        if number == 0 or calls.is_certain
        else undecided(error)
        for number, (item, error) in enumerate(calls.failed)
    }
    return MessagesFailed(
        {key: replace(one, trace=calls.traces.get(key)) for key, one in decisions.items()},
        late=calls.late and calls.late.key,
        is_cut_off=calls.is_cut_off,
    )


def blame(
    suspects: Sequence[Item], failure: CulpritUnknown, breaker: Breaker
) -> dict[bytes, Decision]:
    """Return decisions on the messages of one record, one of which must be at fault.

    Raises `BreakerOpen` if the breaker is open for their consumer.
    """
    error = failure.error
    breaker.observe(
        FailedMessage(item.consumer, item.order_key, error, item.last_error) for item in suspects
    )
    if len(suspects) > 1:
        return {item.key: undecided(error) for item in suspects}
    (item,) = suspects
    return {item.key: replace(_after_failure(item, error, failure.reason), trace=failure.trace)}


def _after_failure(item: Item, error: BaseException, reason: str) -> Decision:
    return item.handler.policy.after_failure(
        error, attempts=item.attempts, waited=item.waited, reason=reason
    )
