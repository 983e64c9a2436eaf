"""How fast scans are applied, by phase of a round."""

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise

PHASES = ("while faults last", "until all is sent", "until all is done")
_SHORTEST = 1.0
"""Seconds of a phase that has a rate."""
_INTERVAL = 0.1


class Progress:
    """Notes how many scans are applied at the end of each phase."""

    def __init__(self, applied: Callable[[], int]) -> None:
        self._applied = applied
        self._moments = [(time.monotonic(), 0)]
        self._latest = self._moments[0]

    async def watch(self) -> None:
        """Note when the latest scan is applied: the last phase ends then."""
        while True:
            if (applied := self._applied()) > self._latest[1]:
                self._latest = time.monotonic(), applied
            await asyncio.sleep(_INTERVAL)

    def end_phase(self) -> None:
        """Note that a phase ends now."""
        self._moments.append((time.monotonic(), self._applied()))

    def rates(self) -> dict[str, float]:
        """Return the scans applied a second in each phase."""
        return rates([*self._moments, self._latest])


def rates(moments: list[tuple[float, int]]) -> dict[str, float]:
    """Return the rate of each phase, by the times at which phases begin and end, and the scans
    applied by then. One that is too short, or that has not been, has none.
    """
    phases = zip(PHASES, pairwise(moments), strict=False)
    return {
        phase: (after - before) / (end - begin)
        for phase, ((begin, before), (end, after)) in phases
        if end - begin >= _SHORTEST
    }
