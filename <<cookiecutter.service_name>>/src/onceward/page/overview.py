"""Figures that the page adds to `status`: rates, plots, and waiting keys."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby

import asyncpg

from onceward.cli.health import PAUSED, Finding, judge
from onceward.cli.status import AT_MOST, Reading, Relay, Status

_WAITING = """
SELECT consumer, topic, record_key, count(*) AS count, min(due_at) AS due_at,
       (array_agg(reason ORDER BY due_at NULLS LAST))[1] AS reason, max(attempts) AS attempts
  FROM (SELECT * FROM pipeline.backlog
         WHERE died_at IS NULL ORDER BY due_at NULLS LAST LIMIT $1) AS few
 GROUP BY order_key, consumer, topic, record_key
 ORDER BY min(due_at) NULLS LAST LIMIT $2
"""


@dataclass(frozen=True, slots=True)
class Key:
    """Waiting messages of one key, counted among the `AT_MOST` messages that are due first."""

    consumer: str
    topic: str
    record_key: bytes | None
    count: int
    due_at: datetime | None
    reason: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A service's status at one time, with figures for tiles."""

    status: Status
    figures: Mapping[str, float | None]
    """By name: how much waits or is dead; records `read`, `duplicates` and events `published` per
    second since the previous snapshot. None: not known."""

    @property
    def wrong(self) -> list[Finding]:
        """Findings of level `wrong`, by the checks of `service doctor`."""
        return [one for one in judge(self.status) if one.level == "wrong"]

    @property
    def is_forgotten(self) -> bool:
        """Whether something is paused without an end, and for long."""
        return any(one.until is None and one.seconds > PAUSED for one in self.status.stops)


@dataclass
class History:
    """The latest snapshots, for plots."""

    snapshots: deque[Snapshot] = field(default_factory=lambda: deque(maxlen=90))
    error: str = ""
    """Why the latest query of the status failed; empty if it succeeded."""

    def add(self, status: Status) -> None:
        """Append a snapshot."""
        before = self.snapshots[-1].status if self.snapshots else status
        figures: Mapping[str, float | None] = {
            "lag": status.waiting("reads"),
            "read": _rate(before, status, lambda one: one.position),
            "duplicates": _rate(before, status, lambda one: one.duplicates),
            "waiting": status.waiting("backlog"),
            "calls": None if "backlog" in status.unknown else status.waiting("calls"),
            "dead": status.dead("backlog", "calls"),
            "outbox": status.waiting("outbox"),
            "published": _published(self.snapshots, status),
            "dead_events": status.dead("rejected"),
            "scheduled": status.waiting("scheduled"),
            "paused": None if "stops" in status.unknown else len(status.stops),
        }
        self.snapshots.append(Snapshot(status, figures))
        self.error = ""

    def values(self, name: str) -> list[float | None]:
        """Return a figure of each snapshot; None where it is unknown."""
        return [one.figures[name] for one in self.snapshots]


def _rate(old: Status, new: Status, count: Callable[[Reading], int | None]) -> float | None:
    seconds = (new.at - old.at).total_seconds()
    if seconds <= 0 or "positions" in {*old.unknown, *new.unknown}:
        return None
    before, now = _counts(old, count), _counts(new, count)
    # Partitions without an earlier position are left out: they may begin at any offset.
    more = sum(now[one] - before[one] for one in before.keys() & now.keys())
    return max(0.0, more / seconds)


def _counts(status: Status, count: Callable[[Reading], int | None]) -> dict[tuple[str, int], int]:
    found = {(one.topic, one.partition): count(one) for one in status.readings}
    return {place: number for place, number in found.items() if number is not None}


def _published(snapshots: Sequence[Snapshot], now: Status) -> float | None:
    if "relays" in now.unknown:
        return None
    rates = [_relay_rate(snapshots, owner, relay) for owner, relay in now.relays.items()]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known or not rates else None


def _relay_rate(snapshots: Sequence[Snapshot], owner: str, now: Relay) -> float | None:
    """Return a relay's events per second between the last two times that it stored its count.

    A relay stores it when it renews its lease. All leases are equally long, so their ends give the
    time between.
    """
    if now.lease_until is None:
        return None
    for snapshot in reversed(snapshots):
        before = snapshot.status.relays.get(owner)
        if before and before.lease_until and before.lease_until < now.lease_until:
            seconds = (now.lease_until - before.lease_until).total_seconds()
            return (now.published - before.published) / seconds
    return None


async def waiting(connection: asyncpg.Connection, limit: int) -> list[Key]:
    """Return keys of the backlog in the order in which they are due."""
    return [Key(**row) for row in await connection.fetch(_WAITING, AT_MOST, limit)]


WIDTH, HEIGHT = 120, 28


def lines(values: Sequence[float | None]) -> list[str]:
    """Return the points of SVG polylines through values, the newest on the right.

    An unknown value is a gap, as zero would be wrong.
    """
    top = max([1e-9, *(value for value in values if value is not None)])
    step = WIDTH / max(1, len(values) - 1)
    found = []
    for is_known, run in groupby(enumerate(values), lambda one: one[1] is not None):
        points = [
            f"{place * step:.1f},{HEIGHT - 1 - (value or 0) / top * (HEIGHT - 2):.1f}"
            for place, value in run
        ]
        if is_known and len(points) > 1:
            found.append(" ".join(points))
    return found
