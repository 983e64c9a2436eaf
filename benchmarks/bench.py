"""What measures work with: the rig, the options, rounds of runs, and the book they are noted in."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from rich.console import Console

from benchmarks.marks import GOALS, Mark, Values
from benchmarks.rig import Rig
from demo.display import say
from demo.processes import ProcessFailed

EVENTS = 200_000
"""Scans of a run, unless said otherwise. Tables and backlogs shrink with it."""
RUN_SECONDS = 600.0
"""A run may take so long, unless its measure says otherwise."""
_SHOWN = (
    "in all",
    "rate",
    "p50",
    "p99",
    "share",
    "peak_mb",
    "growth",
    "cpu_python",
    "cpu_postgres",
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
    contestants: frozenset[str] = frozenset()
    """Only these are run; all of them if it is empty."""


@dataclass(frozen=True)
class Run:
    """One run of a contestant."""

    measure: str
    contestant: str
    round: int
    """From 1; 0 is the one that warms up and does not count."""
    values: Values


@dataclass
class Book:
    """All that was found out."""

    runs: list[Run] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """What was watched over time, by name."""

    def rounds(self, measure: str, contestant: str) -> list[Values]:
        """Return what the rounds that count have shown."""
        return [
            run.values
            for run in self.runs
            if (run.measure, run.contestant) == (measure, contestant) and run.round
        ]

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


class Bench:
    """A run of the benchmark, as measures see it."""

    def __init__(self, rig: Rig, options: Options, console: Console) -> None:
        self.rig = rig
        self.options = options
        self.book = Book()
        self._console = console

    def scaled(self, count: int) -> int:
        """Return a count that belongs to a run of full length, for one of the length chosen."""
        return max(1_000, min(count, count * self.options.events // EVENTS))

    async def rounds(
        self,
        measure: str,
        contestants: Mapping[str, Runner],
        *,
        rounds: int | None = None,
        warm_up: bool = True,
        limit: float = RUN_SECONDS,
    ) -> None:
        """Run the contestants in turn, round after round, in changing order; note what comes out.

        Raises `CheckFailed`, or `ProcessFailed` also when one takes longer than `limit` seconds.
        """
        wanted = self.options.contestants
        chosen = [name for name in contestants if not wanted or name in wanted]
        for number in range(0 if warm_up else 1, (rounds or self.options.rounds) + 1):
            for name in chosen if number % 2 else reversed(chosen):
                began = time.monotonic()
                try:
                    async with asyncio.timeout(limit):
                        values = await contestants[name]()
                except TimeoutError:
                    late = f"not at its end after {limit:,.0f} s"
                    raise ProcessFailed(f"{measure}, {name}: {late}") from None
                except ProcessFailed as failure:
                    raise ProcessFailed(f"{measure}, {name}: {failure}") from None
                self.book.runs.append(Run(measure, name, number, values))
                took = time.monotonic() - began
                when = f"round {number}" if number else "warm-up"
                say(self._console, measure, f"{when}  {name}: {_told(values)}  [dim]({took:.0f} s)")

    def found(self, measure: str, contestant: str) -> list[Values]:
        """Return what the rounds of a contestant have shown."""
        return self.book.rounds(measure, contestant)

    def mark(self, name: str, values: Sequence[float]) -> None:
        """Note what came of a goal."""
        goal = next(goal for goal in GOALS if goal.name == name)
        self.book.marks.append(Mark(goal, values))

    def say(self, what: str, text: str) -> None:
        """Write a line."""
        say(self._console, what, text)


def _told(values: Values) -> str:
    return ", ".join(
        f"{name} {values[name]:,.0f}" if values[name] >= 100 else f"{name} {values[name]:.3g}"
        for name in _SHOWN
        if name in values
    )
