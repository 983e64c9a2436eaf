"""The report of a round: the verdict, and what is needed to run it again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from chaos.schedule import Fault


@dataclass(frozen=True)
class Report:
    """What `report.json` holds."""

    sent: int
    """Scans in the input topic, each counted once."""
    duplicates: int
    """Records of the input topic that are copies."""
    applied: int
    parked: int
    """Always 0: a record that can't be handled stops its partition, there is no backlog yet."""
    dead: int
    """Always 0, likewise."""
    published: int
    """Events, each counted once."""
    repeats: int
    """Records of the output that repeat an event, byte for byte: allowed after a crash."""
    lost: int
    doubled: int
    reordered: int
    stuck: Sequence[str]
    """What did not go on by itself when all was healed, with the reasons of each process."""
    findings: Sequence[Mapping[str, object]]
    """The first ones of what is lost, doubled or reordered."""
    faults: Mapping[str, int]
    """What was broken, by kind."""
    seconds: float
    """From the first scan to the last event."""
    seed: int
    events: int
    """Scans that were to be sent."""
    feed_seconds: float
    """The time in which they were to be sent."""
    schedule: Sequence[Fault]

    @property
    def holds(self) -> bool:
        """Whether every scan took its full effect, once and in order, and nothing was stuck."""
        return (
            self.events == self.sent == self.applied
            and not (self.lost or self.doubled or self.reordered)
            and not self.stuck
        )

    def as_json(self) -> str:
        """Return the content of `report.json`."""
        return json.dumps({"holds": self.holds, **asdict(self)}, indent=2) + "\n"
