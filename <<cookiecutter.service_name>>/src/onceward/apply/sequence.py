"""Applies events of a row in the order of their CloudEvents sequence."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from onceward.errors import describe_error
from onceward.handlers.ordering import (
    SequenceConflict,
    Sequenced,
    SequenceGap,
    name_of,
    sequence_of,
)
from onceward.handlers.policy import GAP, SHORTEST, Decision, dead
from onceward.handlers.rows import Rows

from .item import Item, StoredRecord
from .outcome import BatchOutcome


async def gap_before(item: Item, rows: Rows, outcome: BatchOutcome) -> int | None:
    """Return how many events are missing before the one to apply; None: it is not applied now.

    In that case the outcome has the decision. Raises `Reject` for an event without a sequence.
    """
    sequence = sequence_of(item.message)
    row = await _followed(item, rows)
    gap = sequence - ((row and row.followed) or 0) - 1
    if row is not None and gap < 0:
        if sequence == row.followed and row.followed_by not in (None, name_of(item.message)):
            error = SequenceConflict(sequence, str(row.followed_by))
            decided = dead(item.handler.policy, "sequence conflict", error, item.history)
            outcome.decide(item, decided)
        else:
            outcome.superseded.append((item, f"sequence {row.followed} of {row.followed_by!r}"))
        return None
    decision = _decide_on_early(item, gap) if gap > 0 else None
    if decision is None:
        return gap
    outcome.decide(item, decision)
    return None


async def note_applied(item: Item, rows: Rows) -> None:
    """Store in the row that the event was applied."""
    if row := await _followed(item, rows):
        row.followed, row.followed_by = item.sequence, name_of(item.message)


async def _followed(item: Item, rows: Rows) -> Sequenced | None:
    """Return the row whose events have the sequence."""
    loads = item.handler.loads[0]
    assert item.event is not None
    return cast(Sequenced | None, await rows.get(loads.entity, loads.key_of(item.event)))


def _decide_on_early(item: Item, gap: int) -> Decision | None:
    """Return the decision on an event before which others are missing; None: it is applied."""
    gaps, policy = item.handler.gaps, item.handler.policy
    assert gaps is not None
    error = SequenceGap(item.sequence, gap)
    waited = item.record.stored_for if isinstance(item.record, StoredRecord) else 0.0
    if waited < gaps.wait:
        due_in = max(gaps.wait - waited, SHORTEST)
        return Decision(GAP, item.history, due_in, error=describe_error(error))
    if gaps.then == "apply" or item.history.is_redriven:  # its operator has seen the gap
        return None
    return replace(dead(policy, GAP, error, item.history), holds=gaps.then == "hold")


def in_sequence(items: Sequence[Item]) -> Sequence[Item]:
    """Sort the events of each key by their sequence, if their handler has `gaps`."""
    places: dict[bytes, list[int]] = {}
    for place, item in enumerate(items):
        if item.handler.gaps is not None:
            places.setdefault(item.order_key, []).append(place)
    if not places:
        return items
    ordered = list(items)
    for of_key in places.values():
        in_order = sorted((items[place] for place in of_key), key=lambda item: item.sequence)
        for place, item in zip(of_key, in_order, strict=True):
            ordered[place] = item
    return ordered
