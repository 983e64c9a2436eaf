"""Decisions on a message whose handler fails: retried later, parked, or dead."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

from pipeline.errors import (
    MISSING,
    as_raised,
    format_traceback,
    is_infrastructure,
    leaves,
    summarize_error,
)

_JITTER = 0.1
"""Random share of a delay, so that messages that failed together are not retried together."""
SHORTEST = 0.01
"""Shortest delay in seconds. Parking counts no attempt, so without a delay it would never end."""
_LONGEST = 100 * 365 * 86_400.0
"""Longest delay in seconds; it keeps due times within the range of PostgreSQL's timestamps."""
_SHORTEST_FOR_MIGRATION, _LONGEST_FOR_MIGRATION = 1.0, 3_600.0
"""Delays in seconds, in between as long as the message has waited."""
_TRACEBACK = 20_000
"""Characters of a traceback that are kept."""


class _Later(Exception):
    """Postpones a message."""

    after: float | None = None
    """Also for a subclass that sets it, or whose `__init__` does not call this one."""

    def __init__(self, text: str = "", *, after: float | None = None) -> None:
        super().__init__(text)
        if after is not None:
            if not is_delay(after):
                raise ValueError(f"after is a number of seconds from now, not {after!r}")
            self.after = after


class Retry(_Later):
    """Raised by a handler: try this message again later; it counts as an attempt.

    `after` is in seconds; without it the policy's schedule decides.
    """


class Park(_Later):
    """Raised by a handler: this message needs something that does not exist yet; park it.

    It is tried again after `after` seconds, by default by the policy's schedule. Parking is not a
    failure and counts as no attempt, but is limited by the policy's `max_age`.
    """


class Reject(Exception):
    """Raised by a handler: this message can never be applied. It is dead at once."""


NOT_DONE = (Reject, Park, Retry)
"""Raised by a handler that has done nothing; by an effect, if its call did not take place. In a
group the first of these decides."""


def as_decision(error: BaseException) -> BaseException:
    """Return the strongest of the decisions that an exception group contains, else the error.

    A group that also contains a failure is a failure. Errors of the infrastructure do not count.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    found = [one for one in leaves(error) if not is_infrastructure(one)]
    if not all(isinstance(one, NOT_DONE) for one in found):
        return error
    decisions = (one for kind in NOT_DONE for one in found if isinstance(one, kind))
    return next(decisions, error)


def is_delay(seconds: object) -> TypeGuard[float]:
    """Whether a message may be postponed by this: a number of seconds up to 100 years."""
    return isinstance(seconds, int | float) and 0 <= seconds <= _LONGEST


class ProcessDied(Exception):
    """The process has died every time it handled this message: out of memory, or in a loop."""


@dataclass(frozen=True)
class Policy:
    """Limits and schedule of retries, and the effect of a dead message on its key."""

    attempts: int = 6
    """Attempts in all; after the last one the message is dead."""
    max_age: float = 86_400.0
    """Limit, in seconds, of the sum of a message's delays. The time that it waits for an outage, an
    open breaker or earlier messages does not count, nor does a change of the clock."""
    schedule: Sequence[float] = (30.0, 120.0, 480.0, 1_920.0, 3_600.0)
    """Seconds to the next attempt, after the first, second, …; the last one repeats."""
    after_death: Literal["go on", "hold"] = "go on"
    """Whether later messages of the key go on, or wait for an operator to redrive or discard it."""

    def __post_init__(self) -> None:
        if not (self.attempts >= 1 and self.max_age > 0 and self.schedule):
            raise ValueError("a policy has at least one attempt, an age and a schedule in seconds")
        if not all(map(is_delay, self.schedule)):
            raise ValueError(f"a schedule is made of seconds, not {self.schedule!r}")
        if self.after_death not in ("go on", "hold"):
            raise ValueError(f"after_death is 'go on' or 'hold', not {self.after_death!r}")

    def after_failure(
        self,
        error: BaseException,
        *,
        attempts: int,
        waited: float,
        reason: str,
        is_free: bool = False,
    ) -> "Decision":
        """Return the decision on a message that has failed.

        `attempts` and `waited` are those before this attempt. `is_free`: it spends none, because
        locks or servers were in the way; nor does one whose error is what the catalog lacks, which
        waits for its migration. The delays of such messages grow.
        """
        error = as_decision(error)
        if isinstance(error, Reject):
            return dead(self, "rejected", error, attempts=attempts + 1)
        is_parked = isinstance(error, Park)
        grows = is_free or all(isinstance(as_raised(one), MISSING) for one in leaves(error))
        is_free = is_parked or grows
        attempts += not is_free
        delay = _longer(self, attempts, waited) if grows else _delay(self, attempts)
        if isinstance(error, _Later) and is_delay(error.after):
            delay = error.after
        if attempts >= self.attempts and not is_free:
            return dead(self, "attempts used up", error, attempts=attempts)
        if waited + delay > self.max_age:
            return dead(self, "waited too long", error, attempts=attempts)
        delay *= random.uniform(1 - _JITTER, 1 + _JITTER)
        if is_parked:
            delay = max(delay, SHORTEST)
        return Decision(
            PARKED if is_parked else reason,
            attempts=attempts,
            waited=waited + delay,
            due_in=delay,
            error=described(error),
            traceback=None if is_parked else _traceback(error),
        )

    def disconnected(
        self, error: BaseException, *, attempts: int, waited: float, reason: str
    ) -> "Decision":
        """Return the decision on a message that was alone when its connection was lost.

        The third loss in a row is its failure; `reason` is that of its stored row.
        """
        if reason == LOST_TWICE:
            return self.after_failure(error, attempts=attempts, waited=waited, reason="failed")
        reason = LOST_TWICE if reason == LOST else LOST
        return Decision(reason, attempts, waited, _SHORTEST_FOR_MIGRATION, error=described(error))


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on a message that is not applied now."""

    reason: str
    attempts: int = 0
    waited: float = 0.0
    """Seconds of waiting so far that count for the policy's `max_age`."""
    due_in: float | None = 0.0
    """Seconds until the next attempt; None: it is dead."""
    holds: bool = False
    """Whether the later messages of its key wait for this one, which is dead."""
    error: str | None = None
    traceback: str | None = None
    is_assumed: bool = False
    """Whether it is stored before a risky attempt, and holds only if the process dies in it."""
    trace: str | None = None
    """`traceparent` of the attempt that was decided on, if there was one."""

    @property
    def is_decided(self) -> bool:
        """Whether it results from the message itself, not from earlier messages of its key."""
        return self.due_in != 0.0 or self.attempts > 0

    @property
    def is_undecided(self) -> bool:
        """Whether the message is to be tried by itself."""
        return self.reason == UNDECIDED

    @property
    def is_dead(self) -> bool:
        """Whether the message is a dead letter, which only an operator can redrive or discard."""
        return self.due_in is None


LOST = "connection lost"
"""Reason of a message that was alone when its connection was lost, which counts as no attempt."""
LOST_TWICE = "connection lost twice"
"""Reason of such a message after the second loss in a row; the third is its failure."""
LOCKED_OUT = "locked out"
"""Reason of a message that was alone when locks were in its way, which counts as no attempt."""
DIED = "process died"
"""Reason of a message that is tried alone; its attempt is counted before it begins."""
UNDECIDED = "undecided"
"""Reason of a message that may have failed because of another."""
PARKED = "parked by its handler"
"""Reason of a message whose handler has raised `Park`."""
REDRIVEN = "redriven"
"""Reason of a dead letter that an operator has redriven."""
GAP = "sequence gap"
"""Reason of a message that came before its predecessors in the sequence of its subject."""
UNKNOWN = "outcome unknown"
"""Reason of a call that may have taken place and must not be repeated."""
FORGOTTEN = "subject forgotten"
"""Reason of a message that can't be decrypted any more."""
FOLLOWER = Decision("follows another")
"""Decision on a message of whose key an earlier one waits or has failed."""
DEFERRED = Decision("deferred")
"""Decision on a message whose handler is called later: a deferred one or a call."""


def undecided(error: BaseException) -> Decision:
    """Return the decision on a message that has failed beside others, and maybe because of one.

    It is tried by itself, at once; this failure counts as no attempt.
    """
    return Decision(UNDECIDED, error=described(error))


def suspected(error: BaseException) -> Decision:
    """Return the decision on a message in whose batch processes have died, maybe for others.

    It is tried alone, at once; these deaths count as no attempt.
    """
    return Decision(DIED, error=described(error))


def dead(policy: Policy, reason: str, error: BaseException, *, attempts: int = 0) -> Decision:
    """Return the decision that makes a message a dead letter."""
    return Decision(
        reason,
        attempts=attempts,
        due_in=None,
        holds=policy.after_death == "hold",
        error=described(error),
        traceback=_traceback(error),
    )


def early(error: BaseException, *, attempts: int, waited: float, due_in: float) -> Decision:
    """Return the decision on a message that waits for predecessors, `due_in` seconds at most."""
    return Decision(GAP, attempts, waited, max(due_in, SHORTEST), error=described(error))


def assumed(
    policy: Policy, error: BaseException, *, attempts: int, waited: float, reason: str = DIED
) -> Decision:
    """Return the decision that is stored before a risky attempt: the attempt counts as failed."""
    delay = max(_delay(policy, attempts + 1), SHORTEST)
    return Decision(
        reason, attempts + 1, waited + delay, delay, error=described(error), is_assumed=True
    )


def _delay(policy: Policy, attempts: int) -> float:
    return policy.schedule[min(max(attempts, 1), len(policy.schedule)) - 1]


def _longer(policy: Policy, attempts: int, waited: float) -> float:
    """Return a delay in seconds that grows with the time waited, where no attempts are counted."""
    shortest = max(_delay(policy, attempts), _SHORTEST_FOR_MIGRATION)
    return max(shortest, min(waited, _LONGEST_FOR_MIGRATION))


def described(error: BaseException) -> str:
    """Return the error's type and text as PostgreSQL can store it."""
    error = as_raised(error)
    return f"{type(error).__qualname__}: {summarize_error(error)}"


def _traceback(error: BaseException) -> str:
    text = format_traceback(error)[-_TRACEBACK:]
    return text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()
