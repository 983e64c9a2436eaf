"""What becomes of a message whose handler fails: tried again later, set aside, or dead."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.errors import format_traceback, is_infrastructure, leaves, summarize_error

_JITTER = 0.1
"""Share of a delay by which it differs, so that what failed together does not come back at once."""
SHORTEST = 0.01
"""Seconds; without an attempt to count, what is parked for no time would never end."""
_LONGEST = 100 * 365 * 86_400.0
"""Seconds that anything may be put off; PostgreSQL's time ends somewhere."""
_TRACEBACK = 20_000
"""Characters of a traceback that are kept."""


class _Later(Exception):
    """Puts a message off."""

    def __init__(self, text: str = "", *, after: float | None = None) -> None:
        super().__init__(text)
        if after is not None and not is_delay(after):
            raise ValueError(f"after is a number of seconds from now, not {after!r}")
        self.after = after


class Retry(_Later):
    """Raised by a handler: try this message again later; it counts as an attempt.

    `after` is in seconds; without it the policy's schedule decides.
    """


class Park(_Later):
    """Raised by a handler: what this message needs is not there yet; set it aside.

    It is tried again `after` seconds (by the policy's schedule without). That is no failure and
    counts as no attempt, but is bounded by the policy's `max_age`.
    """


class Reject(Exception):
    """Raised by a handler: this message can never be applied. It is dead at once."""


NOT_DONE = (Retry, Park, Reject)
"""What a handler raises to say that it has done nothing: of a call, that it did not take place."""
_STRONGEST_FIRST = (Reject, Park, Retry)


def as_decision(error: BaseException) -> BaseException:
    """Return the strongest of the decisions that an exception group contains, else the error.

    A group is what it contains: where something failed beside the decisions, it is a failure. An
    outage is none.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    found = [one for one in leaves(error) if not is_infrastructure(one)]
    if not all(isinstance(one, NOT_DONE) for one in found):
        return error
    decisions = (one for kind in _STRONGEST_FIRST for one in found if isinstance(one, kind))
    return next(decisions, error)


def is_delay(seconds: object) -> bool:
    """Whether anything may be put off for so long."""
    return isinstance(seconds, int | float) and 0 <= seconds <= _LONGEST


class ProcessDied(Exception):
    """The process has died every time it handled this message: out of memory, or in a loop."""


@dataclass(frozen=True)
class Policy:
    """How often, how long and when a failed message is tried again, and what its death does."""

    attempts: int = 6
    """Attempts in all; after the last one the message is dead."""
    max_age: float = 86_400.0
    """Seconds that a message waits for its attempts, summed up. An outage, an open breaker and the
    queue before it don't count, whatever a clock says."""
    schedule: Sequence[float] = (30.0, 120.0, 480.0, 1_920.0, 3_600.0)
    """Seconds to the next attempt, after the first, second, …; the last one repeats."""
    after_death: Literal["go on", "hold"] = "go on"
    """Whether later messages of the key go on, or wait until a person has decided."""

    def __post_init__(self) -> None:
        if not (self.attempts >= 1 and self.max_age > 0 and self.schedule):
            raise ValueError("a policy has at least one attempt, an age and a schedule in seconds")
        if not all(map(is_delay, self.schedule)):
            raise ValueError(f"a schedule is made of seconds, not {self.schedule!r}")
        if self.after_death not in ("go on", "hold"):
            raise ValueError(f"after_death is 'go on' or 'hold', not {self.after_death!r}")


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a message that is not applied now."""

    reason: str
    attempts: int = 0
    waited: float = 0.0
    """Seconds that its policy has let it wait so far."""
    due_in: float | None = 0.0
    """Seconds until it is tried; None: it is dead."""
    holds: bool = False
    """Whether a dead one keeps the later ones of its key waiting."""
    error: str | None = None
    traceback: str | None = None
    is_assumed: bool = False
    """Whether it is stored only in case that nobody comes back to store another."""
    trace: str | None = None
    """`traceparent` of the attempt that has led to it, if there was one."""

    @property
    def is_decided(self) -> bool:
        """Whether it is what its own handling has led to, and not where it stands."""
        return self.due_in != 0.0 or self.attempts > 0

    @property
    def is_undecided(self) -> bool:
        """Whether it is to be tried by itself."""
        return self.reason == UNDECIDED

    @property
    def is_dead(self) -> bool:
        """Whether only a person can do more for it."""
        return self.due_in is None


DIED = "process died"
"""Reason of a message that is tried alone, with the attempt spent beforehand."""
UNDECIDED = "undecided"
"""Reason of a message that may have failed because of another."""
PARKED = "parked by its handler"
"""Reason of a message whose handler has raised `Park`."""
REDRIVEN = "redriven"
"""Reason of what was a dead letter until a person asked for it to be tried again."""
GAP = "sequence gap"
"""Reason of a message that came before others of its subject that come before it."""
UNKNOWN = "outcome unknown"
"""Reason of an effect that may have taken place, and must not take place twice."""
FOLLOWER = Decision("follows another")
"""An earlier message of its key waits or has failed."""
DEFERRED = Decision("deferred")
"""Its handler is called later, by design."""


def undecided(error: BaseException) -> Decision:
    """Return the fate of a message that failed after another one, and maybe because of that.

    It is tried by itself, at once, and nothing is held against it until then.
    """
    return Decision(UNDECIDED, error=described(error))


def suspected(policy: Policy, error: BaseException) -> Decision:
    """Return the fate of a message over which processes have died, maybe because of others.

    It is tried alone, and nothing is held against it until then.
    """
    return Decision(DIED, due_in=max(policy.schedule[0], SHORTEST), error=described(error))


def dead(policy: Policy, reason: str, error: BaseException, *, attempts: int = 0) -> Decision:
    """Return the fate of a message that only a person can do more for."""
    return Decision(
        reason,
        attempts=attempts,
        due_in=None,
        holds=policy.after_death == "hold",
        error=described(error),
        traceback=_traceback(error),
    )


def early(error: BaseException, *, attempts: int, waited: float, due_in: float) -> Decision:
    """Return the fate of a message that waits for others, so many seconds at most."""
    return Decision(GAP, attempts, waited, max(due_in, SHORTEST), error=described(error))


def assumed(
    policy: Policy, error: BaseException, *, attempts: int, waited: float, reason: str = DIED
) -> Decision:
    """Return what is stored of a message before it is tried: its attempt, spent in vain."""
    delay = max(_delay(policy, attempts + 1), SHORTEST)
    return Decision(
        reason, attempts + 1, waited + delay, delay, error=described(error), is_assumed=True
    )


def unknown(
    policy: Policy, error: BaseException, *, attempts: int, waited: float, can_ask: bool
) -> Decision:
    """Return what becomes of an effect of which nobody knows whether it took place.

    By the schedule somebody is asked who may know; otherwise a person has to find out.
    """
    decision = after_failure(policy, error, attempts=attempts, waited=waited, reason=UNKNOWN)
    if can_ask and not decision.is_dead:
        return decision
    return dead(policy, UNKNOWN, error, attempts=decision.attempts)


def _delay(policy: Policy, attempts: int) -> float:
    return policy.schedule[min(max(attempts, 1), len(policy.schedule)) - 1]


def after_failure(
    policy: Policy, error: BaseException, *, attempts: int, waited: float, reason: str
) -> Decision:
    """Return what becomes of a message that has failed once more.

    `attempts` and `waited` are its own from before.
    """
    error = as_decision(error)
    if isinstance(error, Reject):
        return dead(policy, "rejected", error, attempts=attempts + 1)
    is_parked = isinstance(error, Park)
    attempts += not is_parked
    delay = _delay(policy, attempts)
    if isinstance(error, _Later) and error.after is not None:
        delay = error.after
    if attempts >= policy.attempts and not is_parked:
        return dead(policy, "attempts used up", error, attempts=attempts)
    if waited + delay > policy.max_age:
        return dead(policy, "waited too long", error, attempts=attempts)
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


def described(error: BaseException) -> str:
    """Return the error's type and text as PostgreSQL can store it."""
    return f"{type(error).__qualname__}: {summarize_error(error)}"


def _traceback(error: BaseException) -> str:
    text = format_traceback(error)[-_TRACEBACK:]
    return text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()
