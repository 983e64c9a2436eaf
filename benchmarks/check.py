"""The check that every contestant has to pass: the same work, whole, once and in order."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import zip_longest

from demo.evidence import Effect

SHOWN = 5
"""Faults that are written out."""


class CheckFailed(Exception):
    """A contestant has not done the work, and its rate means nothing."""


class Check:
    """Follows the events of a run as they lie in the topic, and says what is wrong with them."""

    def __init__(self) -> None:
        self.events = 0
        """Records so far."""
        self._last: Counter[str] = Counter()
        self._effects: defaultdict[str, list[Effect]] = defaultdict(list)
        self._faults: list[str] = []

    def add(self, key: str, sequence: int, effect: Effect | None = None) -> None:
        """Take the next record of a partition; `effect` is what it tells, and of which scan."""
        self.events += 1
        last = self._last[key]
        if sequence == last + 1:
            self._last[key] = sequence
        else:
            self._faults.append(f"event {sequence} of {key} follows upon {last}")
        if effect is not None:
            self._effects[key].append(effect)

    def faults(
        self,
        expected: Mapping[str, int],
        scans: Mapping[str, int],
        rows: Mapping[str, int],
        effects: Mapping[str, Sequence[Effect]] | None = None,
    ) -> list[str]:
        """Say what is wrong, now that all is read; nothing if all is right.

        `expected` are the events of each key, `scans` those of each parcel, and `rows` what its row
        counts. `effects` are what the events of each key tell, in the order of its scans.
        """
        faults = list(self._faults)
        if self.events != (total := sum(expected.values())):
            faults.append(f"{self.events:,} events were published, it should be {total:,}")
        faults += _unequal("events", expected, self._last)
        if len(rows) != len(scans):
            faults.append(f"{len(rows):,} parcels have a row, it should be {len(scans):,}")
        if sum(rows.values()) != sum(scans.values()):
            faults.append(
                f"the rows count {sum(rows.values()):,} scans, it should be {sum(scans.values()):,}"
            )
        faults += _unequal("scans", scans, rows)
        for key in effects or {}:
            pairs = zip_longest(self._effects[key], (effects or {})[key])
            if wrong := next((pair for pair in pairs if pair[0] != pair[1]), None):
                faults.append(f"{key} has {_said(wrong[0])} where {_said(wrong[1])} should be")
        return faults


Seen = Mapping[str, tuple[str, datetime]]
"""Where parcels were seen last, and when."""


def misplaced(expected: Seen, found: Seen) -> Iterable[str]:
    """Say which parcels are not where their latest scan has seen them."""
    for key in sorted(expected.keys() | found.keys()):
        if expected.get(key) != found.get(key):
            yield f"{key} is at {found.get(key)}, it should be {expected.get(key)}"


def _said(effect: Effect | None) -> str:
    return f"{effect.type} of {effect.scanner}'s scan {effect.number}" if effect else "nothing"


def _unequal(what: str, expected: Mapping[str, int], found: Mapping[str, int]) -> Iterable[str]:
    for key in sorted(expected.keys() | found.keys()):
        if expected.get(key, 0) != found.get(key, 0):
            yield (f"{key} has {found.get(key, 0):,} {what}, it should be {expected.get(key, 0):,}")


def require(faults: list[str], who: str) -> None:
    """Raise `CheckFailed` if there are any."""
    if faults:
        more = f"; and {len(faults) - SHOWN:,} more" if len(faults) > SHOWN else ""
        raise CheckFailed(f"{who}: {'; '.join(faults[:SHOWN])}{more}")
