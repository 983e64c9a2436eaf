"""What measures work with: the rig, the options, rounds of runs, and the book they are noted in.

What is compared runs back to back, as a group. Machines change their speed: a short fixed
computation before and after each run tells it. Hypervisors give their cores to others: Linux counts
it. The groups that were disturbed most run again.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from rich.console import Console

from benchmarks.machine import speed, stolen
from benchmarks.marks import (
    GOALS,
    NOT_MEASURED,
    SATURATED,
    Goal,
    Mark,
    Values,
    is_saturated,
    ratios,
)
from benchmarks.rig import Rig
from demo.display import say
from demo.processes import ProcessFailed

EVENTS = 200_000
"""Scans of a run, unless said otherwise. Tables and backlogs shrink with it."""
FEWEST = 1_000
"""Scans of the shortest run."""
RUN_SECONDS = 600.0
"""A run may take so long, unless its measure says otherwise."""
DISTURBED = 1.1
"""A group is disturbed if the machine has done this times as much for one run as for another."""
_SHOWN = (
    "in all",
    "rate",
    "p50",
    "p99",
    "single_p50",
    "during",
    "before",
    "share",
    "peak_mb",
    "growth",
    "cpu_python",
    "cpu_postgres",
    "commit_p50",
    "commit_p99",
    "machine_idle",
)


@dataclass(frozen=True)
class Options:
    """What can be chosen."""

    events: int = EVENTS
    rounds: int = 3
    minutes: float = 10.0
    """How long the memory is watched."""
    seconds: float = 20.0
    """How long latencies are measured, and a service that idles is watched."""
    warm_up: bool = True
    """Whether a run of each comes before that does not count."""
    contestants: frozenset[str] = frozenset()
    """Only these are run; all of them if it is empty."""
    again: float = 0.3
    """So much of the time that a measure has taken, disturbed groups of it may run again."""


@dataclass
class Run:
    """One run of a contestant."""

    measure: str
    contestant: str
    round: int
    """From 1; 0 is the one that warms up and does not count."""
    values: Values
    seconds: float = 0.0
    """What it took, with setting it up and checking it."""
    speeds: tuple[float, float] = (0.0, 0.0)
    """The machine's before and after it."""
    stolen: float = 0.0
    """The share of all cores' time that others were given meanwhile."""
    counts: bool = True
    """Whether no other attempt was less disturbed."""


@dataclass
class Book:
    """All that was found out."""

    runs: list[Run] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """What was watched over time, by name."""
    interpreters: dict[str, str] = field(default_factory=dict)
    """What measures ran with, if not with the Python of the others."""

    def rounds(self, measure: str, contestant: str) -> list[Values]:
        """Return what the rounds that count have shown, in their order."""
        found = [
            run
            for run in self.runs
            if (run.measure, run.contestant) == (measure, contestant) and run.round and run.counts
        ]
        return [run.values for run in sorted(found, key=lambda run: run.round)]

    def repeat(self, measure: str, contestant: str, name: str) -> None:
        """Note the runs of a contestant under another name as well."""
        self.runs += [
            replace(run, contestant=name)
            for run in self.runs
            if (run.measure, run.contestant) == (measure, contestant)
        ]

    def as_json(self) -> dict[str, object]:
        """Return what `report.json` holds of it."""
        return {
            "marks": [mark.as_json() for mark in self.marks],
            "runs": [asdict(run) for run in self.runs],
            "series": self.series,
        }


Runner = Callable[[], Awaitable[Values]]
Group = Mapping[str, Runner]
"""Contestants that are compared, in an order in which those of a pair are neighbours."""


def disturbance(group: Sequence[Run]) -> float:
    """Return the greatest speed of the machine over the least, while these ran; and more if a part
    of its time was stolen from one of them."""
    speeds = [speed for run in group for speed in run.speeds]
    return max(speeds) / min(speeds) / (1 - max(run.stolen for run in group))


class Bench:
    """A run of the benchmark, as measures see it."""

    def __init__(self, rig: Rig, options: Options, console: Console) -> None:
        self.rig = rig
        self.options = options
        self.book = Book()
        self._console = console

    def scaled(self, count: int) -> int:
        """Return a count that belongs to a run of full length, for one of the length chosen."""
        return max(FEWEST, min(count, count * self.options.events // EVENTS))

    async def rounds(
        self,
        measure: str,
        *groups: Group,
        rounds: int | None = None,
        warm_up: bool = True,
        limit: float = RUN_SECONDS,
        again: bool = True,
    ) -> None:
        """Run group after group, round after round, in changing order; note what comes out.

        Then the groups run `again` that were disturbed, the worst first; the attempt that was
        disturbed least is the one that counts. Raises `CheckFailed`, or `ProcessFailed` also when
        a run takes longer than `limit` seconds.
        """
        wanted = self.options.contestants
        chosen = [
            {name: run for name, run in group.items() if not wanted or name in wanted}
            for group in groups
        ]
        began = time.monotonic()
        attempts: list[tuple[Group, list[Run]]] = []
        for number in range(
            0 if warm_up and self.options.warm_up else 1, (rounds or self.options.rounds) + 1
        ):
            for group in filter(None, chosen if number % 2 else reversed(chosen)):
                runs = await self._run(measure, number, group, limit)
                if number:
                    attempts.append((group, runs))
        if again:
            await self._run_again(measure, attempts, limit, time.monotonic() - began)

    async def _run_again(
        self, measure: str, attempts: list[tuple[Group, list[Run]]], limit: float, took: float
    ) -> None:
        """Run the worst disturbed groups again, as long as there is time for it."""
        until = time.monotonic() + self.options.again * took
        while attempts:
            worst = max(range(len(attempts)), key=lambda one: disturbance(attempts[one][1]))
            group, before = attempts[worst]
            expected = sum(run.seconds for run in before)
            if disturbance(before) <= DISTURBED or time.monotonic() + expected > until:
                return
            self.say(measure, f"disturbed by a factor of {disturbance(before):.2f}: once more")
            runs = await self._run(measure, before[0].round, group, limit)
            best, other = sorted((before, runs), key=disturbance)
            attempts[worst] = group, best
            for run in other:
                run.counts = False

    async def _run(self, measure: str, number: int, group: Group, limit: float) -> list[Run]:
        """Run a group, in the order of the round."""
        runs: list[Run] = []
        before = speed()
        for name in group if number % 2 else reversed(list(group)):
            began, stolen_before = time.monotonic(), stolen()
            try:
                async with asyncio.timeout(limit):
                    values = await group[name]()
            except TimeoutError:
                late = f"not at its end after {limit:,.0f} s"
                raise ProcessFailed(f"{measure}, {name}: {late}") from None
            except ProcessFailed as failure:
                raise ProcessFailed(f"{measure}, {name}: {failure}") from None
            took = time.monotonic() - began
            share = (stolen() - stolen_before) / took / (os.cpu_count() or 1)
            after = speed()
            runs.append(Run(measure, name, number, values, took, (before, after), share))
            self.book.runs.append(runs[-1])
            before = after
            when = f"round {number}" if number else "warm-up"
            taken = f"{took:.0f} s, speed {after:.3g}, {share:.0%} stolen"
            self.say(measure, f"{when}  {name}: {_told(values)}  [dim]({taken})")
        return runs

    def found(self, measure: str, contestant: str) -> list[Values]:
        """Return what the rounds of a contestant have shown."""
        return self.book.rounds(measure, contestant)

    def mark(self, name: str, values: Sequence[float], reference: Sequence[float] = ()) -> None:
        """Note what came of a goal, and what was compared with."""
        self.book.marks.append(Mark(_goal(name), values, reference))

    def mark_figure(self, name: str, contestant: str, of: str) -> None:
        """Note a goal that is a contestant's figure in each round that has it."""
        found = self.found(_goal(name).measure, contestant)
        values = [one[of] for one in found if of in one]
        self.book.marks.append(Mark(_goal(name), values, reason=_reason(found)))

    def compare(
        self, name: str, one: str, other: str, of: str = "rate", at_least: float = 0.0
    ) -> None:
        """Note a goal that is one contestant's figure over that of another, or over `at_least`."""
        measure = _goal(name).measure
        ones = self.found(measure, one)
        others = [
            found | {of: max(found[of], at_least)} if of in found else found
            for found in map(dict, self.found(measure, other))
        ]
        reference = [found[of] for found in others if of in found]
        values = ratios(ones, others, of)
        reason = _reason([*ones, *others])
        self.book.marks.append(Mark(_goal(name), values, reference if values else (), reason))

    def say(self, what: str, text: str) -> None:
        """Write a line."""
        say(self._console, what, text)


def _goal(name: str) -> Goal:
    return next(goal for goal in GOALS if goal.name == name)


def _reason(found: Sequence[Values]) -> str:
    """Return why a figure is missing in rounds that would have it."""
    return SATURATED if any(map(is_saturated, found)) else NOT_MEASURED


def _told(values: Values) -> str:
    return ", ".join(
        f"{name} {values[name]:,.0f}" if values[name] >= 100 else f"{name} {values[name]:.3g}"
        for name in _SHOWN
        if name in values
    )
