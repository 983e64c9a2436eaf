"""Decisions on a message whose handler fails: retried later, parked, or dead."""

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeGuard

from onceward.errors import (
    MISSING,
    OncewardError,
    as_raised,
    describe_error,
    format_traceback,
    is_infrastructure,
    leaves,
)

log = logging.getLogger(__name__)

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
MOST_LOSSES = 3
"""Losses of its connection after which a message has failed."""


class _Later(Exception):
    """Postpones a message."""

    after: float | None = None
    """Also for a subclass that sets it, or whose `__init__` does not call this one."""

    def __init__(self, text: str = "", *, after: float | None = None) -> None:
        super().__init__(text)
        if after is not None:
            if not isinstance(after, int | float):
                raise ValueError(f"after is a number of seconds from now, not {after!r}")
            if is_delay(after):
                self.after = after
                return
            # A server may say anything: that is no failure of the call that it has answered.
            used = "the policy's schedule"
            if -math.inf <= after <= math.inf:  # a number, and not NaN
                self.after = min(max(0.0, after), _LONGEST)
                used = f"{self.after:.0f}"
            log.warning("after=%r is not between 0 s and 100 years: %s is used", after, used)


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


class ProcessDied(OncewardError):
    """The process has died every time it handled this message: out of memory, or in a loop."""


class History(NamedTuple):
    """What is known of a message from earlier transactions, whatever it waits for now.

    A decision that spends no attempt adds to it and removes nothing.
    """

    attempts: int = 0
    waited: float = 0.0
    """Seconds of waiting so far that count for the policy's `max_age`."""
    deaths: int = 0
    """Processes that have died while they handled it, since its last attempt with an end. If there
    are any, it is tried while its process does nothing else."""
    losses: int = 0
    """Connections lost while it was alone, since its last attempt with an end."""
    is_redriven: bool = False
    """Whether an operator has redriven it, so that it does not die of a gap in its sequence."""


NEW = History()
"""That of a message which no transaction has handled yet."""


@dataclass(frozen=True)
class Policy:
    """Limits and schedule of retries, and the effect of a dead message on its key."""

    attempts: int = 6
    """Attempts in all; after the last one the message is dead."""
    max_age: float = 86_400.0
    """Limit, in seconds, of the sum of a message's delays. The time that it waits for an outage, an
    open breaker or earlier messages does not count, nor does a change of the clock. The delays of a
    message over which connections are lost again and again in an outage do."""
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
        history: History,
        *,
        reason: str,
        is_free: bool = False,
    ) -> "Decision":
        """Return the decision on a message that has failed.

        `history` is that before this attempt. `is_free`: it spends none, because locks or servers
        were in the way; nor does one whose error is what the catalog lacks, which waits for its
        migration. The delays of such messages grow.
        """
        error = as_decision(error)
        is_parked = isinstance(error, Park)
        grows = is_free or all(isinstance(as_raised(one), MISSING) for one in leaves(error))
        if is_parked or not grows:
            history = history._replace(deaths=0, losses=0)  # its handler has ended
        is_free = is_parked or grows
        attempts = history.attempts + (not is_free)
        history = history._replace(attempts=attempts)
        if isinstance(error, Reject):
            return dead(self, "rejected", error, history)
        delay = (_longer if grows else _delay)(self, history)
        if isinstance(error, _Later) and is_delay(error.after):
            delay = error.after
        if attempts >= self.attempts and not is_free:
            return dead(self, "attempts used up", error, history)
        if history.waited + delay > self.max_age:
            return dead(self, "waited too long", error, history)
        delay *= random.uniform(1 - _JITTER, 1 + _JITTER)
        if is_parked:
            delay = max(delay, SHORTEST)
        return Decision(
            PARKED if is_parked else reason,
            history._replace(waited=history.waited + delay),
            due_in=delay,
            error=describe_error(error),
            traceback=None if is_parked else _traceback(error),
        )

    def disconnected(self, error: BaseException, history: History) -> "Decision":
        """Return the decision on a message that was alone when its connection was lost.

        The third loss in a row is its failure.
        """
        history = history._replace(losses=history.losses + 1)
        if history.losses >= MOST_LOSSES:
            return self.after_failure(error, history, reason="failed")
        return Decision(LOST, history, _SHORTEST_FOR_MIGRATION, error=describe_error(error))


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on a message that is not applied now."""

    reason: str
    """Why it waits, or is dead."""
    history: History = NEW
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
    def attempts(self) -> int:
        """Attempts so far."""
        return self.history.attempts

    @property
    def is_decided(self) -> bool:
        """Whether it results from the message itself, not from earlier messages of its key."""
        return (self.due_in != 0.0 or self.attempts > 0) and not self.is_undecided

    @property
    def is_undecided(self) -> bool:
        """Whether the message is to be tried by itself."""
        return self.reason in TRIED_ALONE

    @property
    def is_dead(self) -> bool:
        """Whether the message is a dead letter, which only an operator can redrive or discard."""
        return self.due_in is None


LOST = "connection lost"
"""Reason of a message whose connection was lost while it was alone; the third loss counts."""
LOCKED_OUT = "locked out"
"""Reason of a message that was alone when locks were in its way, which counts as no attempt."""
DIED = "process died"
"""Reason of a message that is tried alone; its attempt is counted before it begins."""
UNDECIDED = "undecided"
"""Reason of a message that a time limit has cut off, or whose handler was not called any more."""
ISOLATED = "failed in a batch"
"""Reason of a message that has failed as a run of its own, and maybe because of another."""
TRIED_ALONE = UNDECIDED, ISOLATED
"""Reasons of messages that are tried at once, each in a transaction of its own."""
PARKED = "parked by its handler"
"""Reason of a message whose handler has raised `Park`."""
REDRIVEN = "redriven"
"""Reason of a dead letter that an operator has redriven."""
CORRECTION = "correction"
"""Reason of a message that a command has handed to a correction."""
GAP = "sequence gap"
"""Reason of a message that came before its predecessors in the sequence of its subject."""
UNKNOWN = "outcome unknown"
"""Reason of a call that may have taken place and must not be repeated."""
FORGOTTEN = "subject forgotten"
"""Reason of a message that can't be decrypted any more."""
PAUSED = "paused"
"""Reason of the row at the head of a key that a person has paused."""
FOLLOWER = Decision("follows another")
"""Decision on a message of whose key an earlier one waits or has failed."""
DEFERRED = Decision("deferred")
"""Decision on a message whose handler is called later: a deferred one or a call."""


def undecided(
    error: BaseException, history: History, reason: str = UNDECIDED, trace: str | None = None
) -> Decision:
    """Return the decision on a message that has failed beside others, and maybe because of one.

    It is tried by itself, at once; what has happened, or the death of processes (`DIED`), counts as
    no attempt.
    """
    return Decision(reason, history, error=describe_error(error), trace=trace)


def dead(policy: Policy, reason: str, error: BaseException, history: History = NEW) -> Decision:
    """Return the decision that makes a message a dead letter."""
    return Decision(
        reason,
        history,
        due_in=None,
        holds=policy.after_death == "hold",
        error=describe_error(error),
        traceback=_traceback(error),
    )


def assumed(policy: Policy, history: History) -> Decision:
    """Return the decision that is stored before a risky attempt: it counts, as a death.

    The row keeps waiting, even if that was its last attempt: if it were dead while it is tried, a
    later message of its key could overtake it. When it is taken again with all attempts used up,
    it dies.
    """
    attempts, waited, deaths, *_ = history
    if deaths and attempts >= policy.attempts:
        error = ProcessDied(f"a process began with it (attempt {attempts}) and died")
        return dead(policy, "attempts used up", error, history)
    error = ProcessDied(f"a process began with it (attempt {attempts + 1}) and died")
    history = history._replace(attempts=attempts + 1, deaths=deaths + 1)
    delay = max(_delay(policy, history), SHORTEST)
    history = history._replace(waited=waited + delay)
    return Decision(DIED, history, delay, error=describe_error(error), is_assumed=True)


def unchanged(reason: str, history: History, error: str | None) -> Decision:
    """Return the decision that undoes `assumed`: the attempt was not made."""
    return Decision(reason, history, SHORTEST, error=error, is_assumed=True)


def _delay(policy: Policy, history: History) -> float:
    return policy.schedule[min(max(history.attempts, 1), len(policy.schedule)) - 1]


def _longer(policy: Policy, history: History) -> float:
    """Return a delay in seconds that grows with the time waited, where no attempts are counted."""
    shortest = max(_delay(policy, history), _SHORTEST_FOR_MIGRATION)
    return max(shortest, min(history.waited, _LONGEST_FOR_MIGRATION))


def _traceback(error: BaseException) -> str:
    text = format_traceback(error)[-_TRACEBACK:]
    return text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()
