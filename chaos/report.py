"""The report of a round: the verdict, and what is needed to run it again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from chaos.plan import Plan


@dataclass(frozen=True)
class Report:
    """What `report.json` holds."""

    sent: int
    """Scans in the input topic, whatever was wrong with them, each counted once."""
    duplicates: int
    """Records of the input topic that are copies."""
    applied: int
    """By the service's own handler."""
    parked: int
    """Messages that wait at the end: behind a dead letter, for a person."""
    dead: int
    """Dead letters."""
    dead_by_reason: Mapping[str, int]
    consumers: Mapping[str, Mapping[str, int]]
    """What became of the scans at each consumer: all of them, and each once."""
    published: int
    """Events, each counted once."""
    repeats: int
    """Records of the output that repeat an event, byte for byte: allowed after a crash."""
    lost: int
    doubled: int
    reordered: int
    misjudged: int
    """Messages that became what they should not, or attempts that were spent on no failure."""
    stuck: Sequence[str]
    """What did not go on by itself when all was healed, with the reasons of each process."""
    findings: Sequence[Mapping[str, object]]
    """The first ones of what is lost, doubled or reordered."""
    faults: Mapping[str, int]
    """What was broken, by kind: of the schedule, the faults that took effect."""
    unmet: Sequence[str]
    """Kinds of the schedule that took no effect while a scan was under way: not tested."""
    recovery: Mapping[str, Mapping[str, float]]
    """Seconds, by kind, from its end until events were published again, and all of them were."""
    errands: Mapping[str, int]
    """What scans had the service do besides, and what it has forgotten and dropped, by name."""
    payments: Mapping[str, int]
    """What the payments service has handled, written and published, by name."""
    migrations: Mapping[str, int]
    """Of the releases that came out meanwhile: `expand` before its processes, `contract` behind."""
    rates: Mapping[str, float]
    """Scans applied a second, by phase."""
    seconds: float
    """From the first scan to the last event."""
    plan: Plan
    """What was to be done: it runs the round again."""

    @property
    def holds(self) -> bool:
        """Whether the results are right, and every kind of fault was tested."""
        return self.is_right and not self.unmet

    @property
    def is_right(self) -> bool:
        """Whether every scan became what it should, once and in order, and nothing was stuck."""
        events = self.plan.events
        return (
            all(sum(counts.values()) == events for counts in self.consumers.values())
            and events == self.sent
            and not (self.lost or self.doubled or self.reordered or self.misjudged)
            and not self.stuck
        )

    def as_json(self) -> str:
        """Return the content of `report.json`."""
        return json.dumps({"holds": self.holds, **asdict(self)}, indent=2) + "\n"
