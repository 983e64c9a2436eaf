"""What is shown beside `status`: rates and plots of the last looks, keys that wait."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby

import asyncpg

from operate.health import Finding, judge
from operate.status import AT_MOST, Reading, Relay, Status, format_count

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
    """Messages of one key that wait; counted are those among the first that are due."""

    consumer: str
    topic: str
    record_key: bytes | None
    count: int
    due_at: datetime | None
    reason: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Look:
    """What a look at the service has found, in numbers for tiles; None for what nobody knows."""

    status: Status
    read: float | None
    """Records a second since the look before, of all partitions together."""
    duplicates: float | None
    """Messages a second that came again, likewise."""
    published: float | None
    """Events a second that relays have published, of all together."""

    @property
    def wrong(self) -> list[Finding]:
        """What is wrong, by the checks that `service doctor` makes, too."""
        return [one for one in judge(self.status) if one.level == "wrong"]

    def _known(self, part: str, count: int) -> int | None:
        return None if part in self.status.unknown else count

    @property
    def lag(self) -> int | None:
        """Records that wait in Kafka."""
        lags = [one.lag for one in self.status.readings if one.lag is not None]
        return self._known("positions", sum(lags)) if lags else None

    @property
    def waiting(self) -> int | None:
        """Messages in the backlog that are not dead."""
        return self._known("backlog", sum(one.waiting for one in self.status.backlog.values()))

    @property
    def waiting_for(self) -> float:
        """Seconds since the oldest of them was received."""
        return max((one.oldest for one in self.status.backlog.values()), default=0.0)

    @property
    def dead(self) -> int | None:
        """Messages that a person has to decide on."""
        return self._known("backlog", sum(one.dead for one in self.status.backlog.values()))

    @property
    def outbox(self) -> int | None:
        """Events that are staged and not published."""
        return self._known("outbox", self.status.outbox_events)

    @property
    def dead_events(self) -> int | None:
        """Events that Kafka has rejected."""
        return self._known("rejected", self.status.dead_events)

    @property
    def scheduled(self) -> int | None:
        """Events that are due later."""
        return self._known("scheduled", self.status.scheduled)


@dataclass
class Course:
    """The last looks, of which plots are made."""

    looks: deque[Look] = field(default_factory=lambda: deque(maxlen=90))
    failed: str = ""
    """Why the last try to look has failed; empty if it has not."""

    def add(self, status: Status) -> None:
        """Remember a look."""
        before = self.looks[-1].status if self.looks else status
        read = _rate(before, status, lambda one: one.position)
        duplicates = _rate(before, status, lambda one: one.duplicates)
        self.looks.append(Look(status, read, duplicates, _published(self.looks, status)))
        self.failed = ""

    def values(self, name: str) -> list[float | None]:
        """Return how much there was at each look; None where it is not known."""
        return [getattr(one, name) for one in self.looks]


def _rate(old: Status, new: Status, count: Callable[[Reading], int | None]) -> float | None:
    seconds = (new.at - old.at).total_seconds()
    if seconds <= 0 or "positions" in {*old.unknown, *new.unknown}:
        return None
    before, now = _counts(old, count), _counts(new, count)
    # A partition that is new begins wherever it is to begin.
    more = sum(now[one] - before[one] for one in before.keys() & now.keys())
    return max(0.0, more / seconds)


def _counts(status: Status, count: Callable[[Reading], int | None]) -> dict[tuple[str, int], int]:
    found = {(one.topic, one.partition): count(one) for one in status.readings}
    return {place: number for place, number in found.items() if number is not None}


def _published(looks: Sequence[Look], now: Status) -> float | None:
    if "relays" in now.unknown:
        return None
    paces = [_pace(looks, owner, relay) for owner, relay in now.relays.items()]
    known = [pace for pace in paces if pace is not None]
    return sum(known) if known or not paces else None


def _pace(looks: Sequence[Look], owner: str, now: Relay) -> float | None:
    """Return a relay's rate between two times that it told of its events, however often one looks.

    When that was is known by its leases, all of which are equally long.
    """
    if now.lease_until is None:
        return None
    for look in reversed(looks):
        before = look.status.relays.get(owner)
        if before and before.lease_until and before.lease_until < now.lease_until:
            seconds = (now.lease_until - before.lease_until).total_seconds()
            return (now.published - before.published) / seconds
    return None


async def waiting(connection: asyncpg.Connection, limit: int) -> list[Key]:
    """Return keys of the backlog, those that are due next first."""
    return [Key(**row) for row in await connection.fetch(_WAITING, AT_MOST, limit)]


def number(count: int | None) -> str:
    """Return a count, and whether it was cut off."""
    return "not known" if count is None else format_count(count)


WIDTH, HEIGHT = 120, 28


def lines(values: Sequence[float | None]) -> list[str]:
    """Return the points of lines through values, the newest on the right, for SVG.

    What is not known is a gap: it would look like nothing.
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
