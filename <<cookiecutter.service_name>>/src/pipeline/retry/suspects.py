"""Suspects, rows over which a process may have died: what is stored before they are tried alone."""

from dataclasses import replace

from pipeline.apply.item import Item
from pipeline.handlers.policy import (
    DIED,
    GAP,
    SHORTEST,
    UNDECIDED,
    Decision,
    ProcessDied,
    assumed,
    dead,
    described,
)


def pessimistic(item: Item) -> Decision:
    """Return the decision that holds if the process dies while it handles the row.

    It counts the attempt as failed. The row keeps waiting, even if that was its last attempt: if it
    were dead while it is tried, a later message of its key could overtake it. When it is taken
    again with all attempts used up, it dies.
    """
    policy = item.handler.policy
    if item.is_suspect and item.attempts >= policy.attempts:
        error = ProcessDied(f"a process began with it (attempt {item.attempts}) and died")
        return dead(policy, "attempts used up", error, attempts=item.attempts)
    error = ProcessDied(f"a process began with it (attempt {item.attempts + 1}) and died")
    if item.reason == GAP:  # it may have to wait further, so that no handler is called: no attempt
        return replace(unchanged(item), reason=DIED, error=described(error))
    return assumed(policy, error, attempts=item.attempts, waited=item.waited)


def unchanged(item: Item) -> Decision:
    """Return the decision that undoes `pessimistic`: the attempt was not made."""
    reason = DIED if item.is_suspect else UNDECIDED
    return Decision(
        reason, item.attempts, item.waited, SHORTEST, error=item.last_error, is_assumed=True
    )
