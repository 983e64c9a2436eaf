"""Time to recover: from the end of a fault until events are published again, and all of them are.

Faults overlap, so a figure holds what others did at the same time. Nothing here does I/O.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from chaos.poison import Given

RETRIED_FOR = 10.0
"""Seconds after a poisoned scan in which others of its parcel may wait for it."""
MEETS_FOR = 1.0
"""Seconds after a fault in which a scan may come that meets what it has left, such as a connection
that is broken."""


class Ended(NamedTuple):
    """A fault that took effect and is over."""

    kind: str
    began: float
    """Seconds since 1970."""
    at: float
    """When it was over; seconds since 1970."""
    under_way: int = 0
    """Calls to the outside that it may have made late: those that were under way when it began."""
    unsaid: int = 0
    """Lanes that workers may have lost by it without a line in their log, at most."""


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


def first_sent(given: Iterable[Given]) -> dict[tuple[str, str], float]:
    """Return when each scan was sent first."""
    return {one.identity: one.sent_at for one in sorted(given, key=lambda one: -one.sent_at)}


def met(ended: Sequence[Ended], published: Collection[tuple[float, float]]) -> Counter[str]:
    """Count, by kind, the faults that met a scan under way: sent, and its event not yet seen.

    `published` is as in `measure`.
    """
    return Counter(
        fault.kind
        for fault in ended
        if any(sent <= fault.at + MEETS_FOR and seen >= fault.began for sent, seen in published)
    )


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
