"""The marks: what each measure is to reach, and whether it does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Literal

Values = Mapping[str, float]
"""What one run has shown."""
LEAST_IDLE = 0.15
"""With a smaller idle share of the machine, a latency says how long processes wait for a core."""
NOT_MEASURED = "not measured"
SATURATED = "saturated"


@dataclass(frozen=True)
class Goal:
    """What a figure is to be."""

    measure: str
    """By which it is taken, as ONLY names it."""
    name: str
    sign: Literal["≥", "≤", "<"]
    bound: float
    unit: str

    @property
    def text(self) -> str:
        """The goal as people read it."""
        return f"{self.sign} {self.bound:g} {self.unit}"

    def is_met_by(self, value: float | None) -> bool:
        """Whether a value is as it should be; what was not measured is not."""
        if value is None:
            return False
        match self.sign:
            case "≥":
                return value >= self.bound
            case "≤":
                return value <= self.bound
            case "<":
                return value < self.bound


GOALS = (
    Goal("throughput", "ORM handler, 1,000 keys", "≥", 0.23, "of bare-orm"),
    Goal("throughput", "SQL handler, 1,000 keys", "≥", 0.25, "of bare"),
    Goal("throughput", "SQL handler, 10 keys", "≥", 0.25, "of bare"),
    Goal("throughput", "SQL handler, 1 key", "≥", 0.25, "of bare"),
    Goal("throughput", "SQL handler, flights", "≥", 0.25, "of bare"),
    Goal("throughput", "hot key", "≥", 0.9, "of 1,000 keys"),
    Goal("peers", "against the best peer", "≥", 10, "times the best peer"),
    Goal("relay", "relay alone", "≥", 0.9, "of producer"),
    Goal("latency", "latency, p99", "≤", 3, "times bare"),
    Goal("latency", "latency, p50", "≤", 10, "ms"),
    Goal("latency", "relay apart, p50", "≤", 25, "ms"),
    Goal("latency", "relay apart, idle", "<", 2, "% of a core"),
    Goal("ordinary", "300/s, CPU", "≤", 1.2, "of that on 1 partition"),
    Goal("ordinary", "300/s, CPU against bare-orm", "<", 1, "of bare-orm"),
    Goal("ordinary", "1,000/s, CPU", "≤", 1.2, "of that on 1 partition"),
    Goal("ordinary", "1,000/s, CPU against bare-orm", "<", 1, "of bare-orm"),
    Goal("ordinary", "300/s, core", "≤", 0.35, "of a core"),
    Goal("ordinary", "1,000/s, commits", "≤", 0.1, "a message"),
    Goal("ordinary", "1,000/s, p50", "≤", 30, "ms"),
    Goal("ordinary", "3,000/s, p50", "≤", 30, "ms"),
    Goal("ordinary", "100/s, p50", "≤", 8, "ms"),
    Goal("ordinary", "100/s, p99", "≤", 1, "of bare-orm, or of 10 ms"),
    Goal("duplicates", "duplicates only", "≥", 2, "times new messages"),
    Goal("deferred", "deferred mode", "≥", 0.6, "of inline"),
    Goal("poison", "1 % rejected, CPU", "≥", 0.6, "of none failing"),
    Goal("poison", "1 % that raise, CPU", "≥", 0.3, "of none failing"),
    Goal("ledger", "ledger, two processes, CPU", "≥", 0.75, "of one process"),
    Goal("old_tables", "old tables", "≥", 0.95, "of empty"),
    Goal(
        "dropping",
        "dropping under load",
        "≥",
        0.95,
        "of before and after",
    ),
    Goal("telemetry", "telemetry on, sampled 1 %", "≥", 0.95, "of off"),
    Goal("idle", "idle service", "<", 1, "% of a core"),
    Goal("memory", "memory over time", "≤", 1, "% in 10 minutes"),
    Goal("memory", "memory behind", "≤", 1.3, "times a short backlog"),
)


@dataclass(frozen=True)
class Mark:
    """A goal, and what came of it."""

    goal: Goal
    values: Sequence[float]
    """One of each round; none where it was not measured."""
    reference: Sequence[float] = ()
    """What it is compared with, of each round, if with something: messages/s, ms, MB."""
    reason: str = NOT_MEASURED
    """Why there are no values, if there are none."""

    @property
    def value(self) -> float | None:
        """The median of the rounds."""
        return median(self.values) if self.values else None

    @property
    def is_met(self) -> bool:
        """Whether it is as it should be; what was not measured is not."""
        return self.goal.is_met_by(self.value)

    def as_json(self) -> dict[str, object]:
        """Return what `report.json` says of it."""
        return {
            "name": self.goal.name,
            "value": None if self.value is None else round(self.value, 4),
            "goal": self.goal.text,
            "met": self.is_met,
            "unit": self.goal.unit,
            "least": min(self.values, default=None),
            "most": max(self.values, default=None),
            "reference": round(median(self.reference), 2) if self.reference else None,
            "remark": "" if self.values else self.reason,
        }


def ratios(ones: Sequence[Values], others: Sequence[Values], of: str = "rate") -> list[float]:
    """Return one side over the other, round by round: both have run one after the other.

    Nothing where only one side was measured, or the figure was not.
    """
    if not ones or not others:
        return []
    pairs = zip(ones, others, strict=True)
    return [one[of] / other[of] for one, other in pairs if of in one and of in other]


def is_saturated(values: Values) -> bool:
    """Return whether the machine was too busy in a run for its latencies to count."""
    return values.get("machine_idle", 1.0) < LEAST_IDLE


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that so large a share of the values does not exceed."""
    # Rounded, because 0.99 times 100 may be a little more than 99.
    return sorted(values)[max(0, ceil(round(share * len(values), 6)) - 1)]
