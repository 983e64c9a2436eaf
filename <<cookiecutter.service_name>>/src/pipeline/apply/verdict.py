"""Which messages are at fault for what has failed, and what becomes of them."""

from collections.abc import Sequence
from dataclasses import replace

from pipeline.handlers.policy import Decision, Park, Reject, undecided

from .breaker import Breaker, Failed
from .calls import Failures
from .failure import CulpritUnknown, Failure, MessagesFailed, NeedsOwnSession
from .item import Item
from .outcome import BatchOutcome
from .source import Source


def judge(
    source: Source, failures: Failures, outcome: BatchOutcome, breaker: Breaker, trace: str | None
) -> Failure | None:
    """Return what has failed in the calls of handlers, or None.

    Raises `BreakerOpen` if it is the consumer that fails, for whatever comes.
    """
    if failures.needs_session is not None:
        return NeedsOwnSession(failures.needs_session)
    if failures.in_batch is not None:
        return CulpritUnknown("failed", failures.in_batch, trace, is_cut_off=failures.is_cut_off)
    readable, failed = source.decoded
    outcome.succeeded = readable | {item.consumer for item in outcome.applied}
    failed += [
        Failed(item.consumer, item.order_key, item.fault, item.last_error)
        for item, decision in outcome.decided
        if item.fault is not None and decision.is_dead
    ]
    failed += [
        Failed(item.consumer, item.order_key, error, item.last_error)
        for item, error in failures.failed
        if not isinstance(error, Park | Reject)  # those are decisions
    ]
    breaker.observe(failed, succeeded=outcome.succeeded)
    if not failures.failed:
        return None
    decisions = {
        item.key: _after_failure(item, error, "failed")
        if number == 0 or failures.is_certain
        else undecided(error)
        for number, (item, error) in enumerate(failures.failed)
    }
    return MessagesFailed(
        {key: replace(one, trace=failures.traces.get(key)) for key, one in decisions.items()},
        late=failures.late and failures.late.key,
        is_cut_off=failures.is_cut_off,
    )


def blame(
    suspects: Sequence[Item], failure: CulpritUnknown, breaker: Breaker
) -> dict[bytes, Decision]:
    """Return decisions on the messages of one record, one of which must be at fault.

    Raises `BreakerOpen` if it is the consumer that fails, for whatever comes.
    """
    error = failure.error
    breaker.observe(
        Failed(item.consumer, item.order_key, error, item.last_error) for item in suspects
    )
    if len(suspects) > 1:
        return {item.key: undecided(error) for item in suspects}
    (item,) = suspects
    return {item.key: replace(_after_failure(item, error, failure.reason), trace=failure.trace)}


def _after_failure(item: Item, error: BaseException, reason: str) -> Decision:
    return item.handler.policy.after_failure(
        error, attempts=item.attempts, waited=item.waited, reason=reason
    )
