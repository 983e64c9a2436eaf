"""Throttles: the time before which nothing of a subject is taken, as people have asked.

Whatever the engine handles is taken by a loop, such as the records of a topic by a reader. Each
subject has one time before which nothing of it is taken; a pause sets it to never. What is not
taken stays where it is, in its order. Nothing is scheduled, so no attempt is spent.

Each process looks once a second at what people have asked, and takes nothing on a look that began
more than two seconds ago. So a process that was stopped, has just started, or is cut off from the
database knows of a pause before it takes anything. What was taken before is finished.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping
from time import monotonic

import asyncpg
from sqlalchemy.ext.asyncio import AsyncEngine

from onceward.errors import Paused, describe_error, is_infrastructure
from onceward.observe import metrics
from onceward.observe.health import Health
from onceward.servers.database import autocommitting
from onceward.servers.tasks import sleep_or_event

from . import statements
from .statements import LATE_SECONDS

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Time between two looks, and the longest that a loop sleeps while nothing is to be taken."""
_FRESH_SECONDS = 2.0
"""How long ago the look may have begun by which something is taken."""
_ANSWER_SECONDS = 5.0
"""Time-out of a look: the next one has another connection."""
_PART = "throttles"
"""The part of the health that reports whether looks succeed."""

Place = tuple[str, str]
"""The kind and the name of a subject."""


class Resting(Paused):
    """People have paused it: nothing of it is to be taken."""

    reason = "paused"


class Throttles:
    """What is not to be taken now, as of the latest look of this process."""

    def __init__(self, engine: AsyncEngine | None = None, health: Health | None = None) -> None:
        """Without an engine nobody can ask for anything, as in the test kit."""
        self._engine = engine
        self._health = health
        self._rates: dict[Place, float] = {}
        """What may be taken in a second; 0: it is paused."""
        self._until: dict[Place, float] = {}
        """Until when nothing is taken of what is throttled, by the monotonic clock."""
        self._own: dict[Place, float] = {}
        self._own_until: dict[Place, float] = {}
        """The same, of what this process is limited to."""
        self._rests: dict[Place, float] = {}
        """The same, of what this process lets rest whatever people ask: the breaker's consumers."""
        self._unnoted = ""
        """Why what is taken can't be noted, as was logged."""
        self._looked_at = -math.inf
        """When the latest look that has succeeded began, by the monotonic clock."""
        self._looked = asyncio.Event()
        """Set, and replaced, after each look."""
        self._looking = asyncio.Lock()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            begun = monotonic()
            try:
                await self._look(begun)
            except Exception as error:
                self._report(error)
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Look, unless that was done less than two seconds ago: for a process without `run`."""
        async with self._looking:
            begun = monotonic()
            if self._engine is not None and self._looked_at < begun - _FRESH_SECONDS:
                await self._look(begun)

    async def _look(self, begun: float) -> None:
        assert self._engine is not None
        async with asyncio.timeout(_ANSWER_SECONDS), autocommitting(self._engine) as driver:
            rows = await driver.fetch(statements.READ_STOPS)
        rates, until = dict[Place, float](), dict[Place, float]()
        for kind, name, rate, rests, _ in rows:
            # What this process has taken at an unchanged rate may not be stored yet.
            is_unchanged = self._rates.get((kind, name)) == rate
            noted = self._until.get((kind, name), 0.0) if is_unchanged else 0.0
            rates[kind, name], until[kind, name] = rate, max(begun + rests, noted)
        self._rates, self._until = rates, until
        self._looked_at = begun
        self._looked.set()
        self._looked = asyncio.Event()
        metrics.observe_throttles(
            [(row["kind"], row["name"], row["per_second"], row["age"]) for row in rows]
        )
        if self._health is not None:
            self._health.ready(_PART)
            words = {"key": "keys of"}
            at = {place: f" at {rate:g}/s" for place, rate in self._rates.items() if rate}
            self._health.paused = [
                f"{words.get(kind, kind)} {name}{at.get((kind, name), '')}"
                for kind, name in self._rates
            ]

    def _report(self, error: Exception) -> None:
        reason = f"it is not known what is paused, so nothing is taken: {_described(error)}"
        if self._health is not None:
            # An outage is logged by those who wait for its end.
            if self._health.reasons.get(_PART) != reason and not is_infrastructure(error):
                log.warning("%s", reason)
            self._health.not_ready(_PART, reason)

    async def fresh(self, unless: Callable[[], bool] = lambda: False) -> None:
        """Wait for a look, unless one has just begun.

        Raises `Resting` if `unless`, which says whether the process stops, returns True meanwhile.
        """
        since = monotonic() - _FRESH_SECONDS
        # One that began later counts, however long it took: else a slow server would stop all.
        while self._engine is not None and self._looked_at < since:
            if unless():
                raise Resting("it is not known what is paused, and the process stops")
            await sleep_or_event(self._looked, LOOK_SECONDS)

    def limit(self, kind: str, name: str, per_second: float) -> None:
        """Let this process take no more of a subject in a second, whatever people ask."""
        self._own[kind, name] = min(per_second, self._own.get((kind, name), math.inf))

    def rest(self, kind: str, name: str, seconds: float) -> float:
        """Let this process take nothing of a subject for so long; return until when."""
        self._rests[kind, name] = until = monotonic() + seconds
        return until

    def rest_left(self, kind: str, name: str) -> float:
        """Return for how many seconds this process lets a subject rest, whatever people ask."""
        return max(0.0, self._rests.get((kind, name), 0.0) - monotonic())

    def end_rest(self, kind: str, name: str, until: float) -> None:
        """Let it be taken again, unless it rests for another time since."""
        if self._rests[kind, name] == until:
            self.rest(kind, name, 0.0)

    def _rate(self, kind: str, name: str) -> float:
        """Return how much may be taken in a second; infinite if nobody has asked for less."""
        return min(one.get((kind, name), math.inf) for one in (self._rates, self._own))

    def left(self, kind: str, name: str) -> float:
        """Return for how many seconds nothing of a subject is to be taken; infinite: until it is
        resumed."""
        if not self._rate(kind, name):
            return math.inf
        until = max(one.get((kind, name), 0.0) for one in (self._until, self._own_until))
        return max(0.0, until - monotonic())

    def most(self, kind: str, name: str) -> float:
        """Return how much may be taken of a subject at once: that of a second, but at least one."""
        return max(1.0, self._rate(kind, name))

    def free(self, kind: str, name: str) -> float:
        """Return how much may be taken of a subject now: at most that of a second."""
        return 0.0 if self.left(kind, name) else self.most(kind, name)

    async def took(self, taken: Mapping[Place, int]) -> None:
        """Note that so much of each subject is about to be taken: those that are throttled rest.

        Call it without an `await` since it was asked what may be taken: all is noted in this
        process before it lets others ask.
        """
        now, engine = monotonic(), self._engine
        asked: dict[Place, int] = {}
        for place, number in taken.items():
            if number and (own := self._own.get(place)):
                self._own_until[place] = max(self._own_until.get(place, 0.0), now) + number / own
            if number and (rate := self._rates.get(place)):
                until = max(self._until.get(place, 0.0), now - LATE_SECONDS)
                self._until[place] = until + number / rate
                asked[place] = number
        if engine is not None:
            for place, number in asked.items():
                await self._move_on(engine, place, number)

    async def _move_on(self, engine: AsyncEngine, place: Place, number: int) -> None:
        """Let all processes know that so much is taken."""
        unnoted = ""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS), autocommitting(engine) as driver:
                rests = await driver.fetchval(statements.NOTE_TAKEN, *place, float(number))
            if rests is not None:  # others of this process may have taken since
                self._until[place] = max(self._until.get(place, 0.0), monotonic() + rests)
        except Exception as error:
            what = f"{' '.join(place)} is throttled in each process by itself"
            unnoted = f"{what}: {_described(error)}"
            if unnoted != self._unnoted:
                log.warning("%s", unnoted)
        self._unnoted = unnoted

    def asked(self, kind: str) -> set[str]:
        """Return the subjects of a kind that people have paused or throttled."""
        return {name for one, name in self._rates if one == kind}

    def limited(self, kind: str) -> set[str]:
        """Return the subjects of a kind that are throttled, and not paused."""
        places = (*self._rates, *self._own)
        return {name for one, name in places if one == kind and self._rate(kind, name)}

    def soonest(self, kind: str) -> float:
        """Return in how many seconds a throttled subject of a kind may be taken again, the first
        of those that rest."""
        found = (self.left(kind, name) for name in self.limited(kind))
        return min(filter(None, found), default=math.inf)

    def paused(self, kind: str) -> set[str]:
        """Return the subjects of a kind that are paused."""
        return {name for (one, name), rate in self._rates.items() if one == kind and not rate}

    def resting(self, kind: str) -> set[str]:
        """Return the subjects of a kind of which nothing is to be taken now."""
        names = {name for one, name in (*self._rates, *self._own, *self._rests) if one == kind}
        return {one for one in names if self.left(kind, one) or self.rest_left(kind, one)}

    async def end_if_paused(self, consumers: Collection[str]) -> None:
        """Raise `Resting` if any of the consumers is paused."""
        await self.fresh()
        if not self.paused("consumer").isdisjoint(consumers):
            raise Resting


def _described(error: Exception) -> str:
    text = describe_error(error)
    if isinstance(error, asyncpg.InsufficientPrivilegeError):
        text += ": run deploy/postgres/roles.sql again"
    return text
