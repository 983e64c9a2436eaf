"""What becomes of a message that has failed, and what an exception group is worth there."""

import asyncio
from collections.abc import Sequence

import asyncpg
import pytest

from onceward import Park, Policy, Reject, Retry
from onceward.handlers.policy import NEW, PARKED, Decision, as_decision


def group(*errors: Exception) -> ExceptionGroup[Exception]:
    """Return the errors as a nested group has them."""
    return ExceptionGroup("tasks", [ExceptionGroup("inner", errors)])


OUTAGE = asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")


@pytest.mark.parametrize(
    ("errors", "worth"),
    [
        ((Reject("a"),), Reject),
        ((Retry("a"), Park("b"), Reject("c")), Reject),
        ((Retry("a"), Park("b")), Park),
        ((Retry("a"), Retry("b")), Retry),
        ((OUTAGE, Park("a")), Park),
        ((Reject("a"), ValueError("b")), ExceptionGroup),
        ((OUTAGE,), ExceptionGroup),
        ((ValueError("a"),), ExceptionGroup),
    ],
)
def test_a_group_without_failures_has_the_strongest_of_its_decisions(
    errors: Sequence[Exception], worth: type[BaseException]
) -> None:
    assert type(as_decision(group(*errors))) is worth


@pytest.mark.parametrize("error", [Reject("a"), ValueError("b"), OUTAGE, KeyboardInterrupt()])
def test_an_error_that_is_no_group_is_itself(error: BaseException) -> None:
    assert as_decision(error) is error


def fate_of(error: BaseException) -> Decision:
    """Return what becomes of a message after its first failure."""
    return Policy().after_failure(error, NEW, reason="failed")


@pytest.mark.parametrize("waited", [0.0, 100.0, 10_000.0])
def test_a_missing_column_spends_no_attempt_and_is_retried_less_often(waited: float) -> None:
    error = group(asyncpg.UndefinedColumnError("column x does not exist"))
    policy = Policy(attempts=1, schedule=(0,), max_age=1e6)
    decision = policy.after_failure(error, NEW._replace(waited=waited), reason="failed")
    assert (decision.reason, decision.attempts) == ("failed", 0)
    assert decision.due_in == pytest.approx(min(max(waited, 1.0), 3_600.0), rel=0.1)


async def test_a_decision_out_of_a_group_of_tasks_is_a_decision() -> None:
    async def raises(error: Exception) -> None:
        raise error

    with pytest.raises(ExceptionGroup) as info:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(raises(Park("not yet", after=60)))
    decision = fate_of(info.value)
    assert (decision.reason, decision.attempts) == (PARKED, 0)
    assert decision.due_in == pytest.approx(60, rel=0.1)
    assert fate_of(group(Reject("never"))).reason == "rejected"


def test_a_failure_in_a_group_is_reported_with_the_whole_group() -> None:
    decision = fate_of(group(Reject("never"), ValueError("a bug")))
    assert (decision.reason, decision.attempts) == ("failed", 1)
    assert decision.error is not None
    assert decision.error.startswith("ExceptionGroup: tasks (1 sub-exception); ")
    assert "Reject: never" in decision.error
    assert "ValueError: a bug" in decision.error
