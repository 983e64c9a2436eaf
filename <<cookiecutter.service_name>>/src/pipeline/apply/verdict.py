"""Which messages are at fault for what has failed, and what becomes of them."""

from collections.abc import Sequence
from dataclasses import replace

from pipeline.handlers.policy import (
    NOT_DONE,
    Decision,
    Park,
    Reject,
    after_failure,
    undecided,
    unknown,
)

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
        item.key: decision_on(item, error, "failed")
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
    return {item.key: replace(decision_on(item, error, failure.reason), trace=failure.trace)}


def decision_on(item: Item, error: BaseException, reason: str) -> Decision:
    """Return what becomes of a message whose handling has failed with an error of its own."""
    policy, effect = item.handler.policy, item.handler.effect
    attempts, waited = item.attempts, item.waited
    if effect and not effect.is_repeatable and not isinstance(error, NOT_DONE):
        can_ask = effect.ask is not None
        return unknown(policy, error, attempts=attempts, waited=waited, can_ask=can_ask)
    return after_failure(policy, error, attempts=attempts, waited=waited, reason=reason)
