"""The plan: what a round is to do. A report holds it, so that its round can be run again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from pydantic import BaseModel, ValidationError

from chaos.errands import Work
from chaos.schedule import Fault

NOTICED = {"postgres": 60.0, "kafka": 40.0}
"""Seconds after which the engine gives up a connection to a server that died without a word."""
PATIENCE = 1.5 * (2 * NOTICED["postgres"] + NOTICED["kafka"])
"""Seconds without any progress after which the healed system counts as stuck.

Whoever stands still notices one after the other: the connection with the transaction, the one from
the pool that it is tried on next, and that to Kafka. A busy machine takes its time on top.
"""


@dataclass(frozen=True)
class Plan:
    """What a round is to do."""

    events: int
    """Scans to send."""
    seconds: float
    """The time in which they are to be sent."""
    seed: int
    schedule: Sequence[Fault]
    parcels: int = 0
    """Only the scans of so many parcels, the busiest ones; 0: of all."""
    repeats: float = 0.05
    """Share of the scans that come again."""
    within: int = 0
    """So many scans later at most; 0: any time later, and then nothing can be forgotten before."""
    strays: float = 0.1
    """Share of the parcels whose every scan comes in two partitions at once."""
    poison: float = 0.0
    """Share of the scans that something is wrong with."""
    kinds: Sequence[str] = ()
    """What is wrong with them; anything, if nothing is named."""
    after_death: str = "hold"
    """What a death does to its key at the deferred consumer: hold, or go on."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the service, on top of the rig's."""
    errands: Sequence[Work] = ()
    """What scans have the service do besides, beside what the faults of the schedule try."""
    payments: int = 0
    """Commands of a second service, the payments example, that come meanwhile."""
    patience: float = PATIENCE

    @property
    def work(self) -> Sequence[Work]:
        """What scans have the service do besides."""
        faults = {fault.kind for fault in self.schedule}
        return [one for one in get_args(Work) if one in self.errands or one in faults]


class _Report(BaseModel):
    """What is needed of a report."""

    plan: Plan


def from_json(report: object) -> Plan:
    """Return the plan that a report holds. Raises `ValueError` if it holds none."""
    try:
        return _Report.model_validate(report).plan
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        where = ".".join(map(str, wrong["loc"])) or "it"
        raise ValueError(f"no report of a round of this version: {where}: {wrong['msg']}") from None
