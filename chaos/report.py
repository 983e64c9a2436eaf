"""The report of a round: the verdict, and what is needed to run it again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from chaos.schedule import Fault


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
    """What was broken, by kind."""
    recovery: Mapping[str, Mapping[str, float]]
    """Seconds, by kind, from its end until events were published again, and all of them were."""
    errands: Mapping[str, int]
    """What scans had the service do besides, and what it has forgotten and dropped, by name."""
    migrations: Mapping[str, int]
    """Of the releases that came out meanwhile: `expand` before its processes, `contract` behind."""
    rates: Mapping[str, float]
    """Scans applied a second, by phase."""
    seconds: float
    """From the first scan to the last event."""
    seed: int
    events: int
    """Scans that were to be sent."""
    feed_seconds: float
    """The time in which they were to be sent."""
    poison: float
    """Share of the scans that something was wrong with."""
    schedule: Sequence[Fault]

    @property
    def holds(self) -> bool:
        """Whether every scan became what it should, once and in order, and nothing was stuck."""
        return (
            all(sum(counts.values()) == self.events for counts in self.consumers.values())
            and self.events == self.sent
            and not (self.lost or self.doubled or self.reordered or self.misjudged)
            and not self.stuck
        )

    def as_json(self) -> str:
        """Return the content of `report.json`."""
        return json.dumps({"holds": self.holds, **asdict(self)}, indent=2) + "\n"
