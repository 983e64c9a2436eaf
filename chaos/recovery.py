"""Time to recover: from the end of a fault until events are published again, and all of them are.

Faults overlap, so a figure holds what others did at the same time. Nothing here does I/O.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from chaos.poison import Given

RETRIED_FOR = 10.0
"""Seconds after a poisoned scan in which others of its parcel may wait for it."""


class Ended(NamedTuple):
    """A fault that is over."""

    kind: str
    at: float
    """Seconds since 1970."""
    under_way: int = 0
    """Calls to the outside that it may have made late: those that were under way when it began."""


class Recovery(NamedTuple):
    """Seconds to recover from the faults of a kind."""

    next: float
    """The median until the next event."""
    next_at_most: float
    all: float
    """The median until all that had been sent when the fault ended was published."""
    all_at_most: float


def undisturbed(given: Iterable[Given]) -> dict[tuple[str, str], float]:
    """Return when each scan was sent first, of those that no poison makes wait."""
    poisoned: dict[bytes, float] = {}
    sent: dict[tuple[str, str], float] = {}
    for one in sorted(given, key=lambda one: one.sent_at):
        if one.poison:
            poisoned[one.key] = one.sent_at
        if one.sent_at - poisoned.get(one.key, 0.0) > RETRIED_FOR:
            sent.setdefault(one.identity, one.sent_at)
    return sent


def measure(
    ended: Sequence[Ended], published: Iterable[tuple[float, float]]
) -> Mapping[str, Recovery]:
    """Return the recovery from each kind of fault.

    `published` is when each scan was sent, and when its event was seen.
    """
    by_time = sorted(published)
    sent = [at for at, _ in by_time]
    latest = list(accumulate((seen for _, seen in by_time), max))
    seen = sorted(at for _, at in by_time)
    took: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for fault in ended:
        after, before = bisect_right(seen, fault.at), bisect_right(sent, fault.at)
        if before and after < len(seen):
            all_ = max(0.0, latest[before - 1] - fault.at)
            took[fault.kind].append((seen[after] - fault.at, all_))
    return {kind: _recovery(*zip(*times, strict=True)) for kind, times in sorted(took.items())}


def _recovery(next_: Sequence[float], all_: Sequence[float]) -> Recovery:
    return Recovery(
        *(round(one, 2) for one in (median(next_), max(next_), median(all_), max(all_)))
    )
