"""Whatever comes, in whatever order and how often, and whoever dies: the state is the order's."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, TypeAlias

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onceward import Gaps, Policy
from onceward.apply import backlog
from onceward.apply.item import _digest

from .applier import Applier, NewApplier
from .lives import Death, Life, Moment, lanes_of, let_leases_end
from .test_sequences import TOPIC, Following, history, numbered
from tests.contract.bank import Deposit
from tests.servers.pooler import POOLED
from tests.servers.waiting import PATIENCE

_accounts = (f"of {number}" for number in count())
_LANE = 7
MANY = Policy(attempts=20, schedule=(0,))
"""More attempts than failures and deaths can spend."""

deaths = st.lists(st.builds(Death, st.sampled_from(Moment), st.integers(1, 4)), max_size=4)
failures = st.dictionaries(st.integers(1, 5), st.integers(1, 2), max_size=3)
sizes = st.integers(1, 4)


async def begin(
    new_applier: NewApplier, service: Following, death: Death | None, partition: int
) -> Life:
    """Start a process that has a partition, and dies like this."""
    applier = await new_applier(service.handlers, topic=TOPIC, partition=partition)
    service.life = Life(applier, death)
    return service.life


def in_one_lane(number: int) -> list[str]:
    """Return accounts that nobody has had, whose workers have to take turns."""

    def lane(account: str) -> int:
        return backlog.lane_of(_digest("follow", TOPIC, b"+" + account.encode()), "immediate")

    alike = (account for account in _accounts if lane(account) == _LANE)
    return [next(alike) for _ in range(number)]


Log: TypeAlias = list[tuple[int, int]]
"""Accounts and numbers of their events, in the order of a partition."""


def numbers_of(account: int, log: Log) -> list[int]:
    """Return the numbers of one account's events, in the order in which they come."""
    return [number for one, number in log if one == account]


def records(log: Log, names: Sequence[str]) -> list[Deposit]:
    """Return the records of accounts that have these names."""
    return [one for account, n in log for one in numbered(n, account=names[account])]


@dataclass
class Street:
    """A partition, the process that has it, and what goes wrong there."""

    log: Log
    """Some events are there more than once, none is missing."""
    batches: list[int]
    """How many records the consumer takes at a time, again and again."""
    deaths: list[Death]
    """Of the process, and of those that come after it."""
    failures: dict[int, int]
    """How often the handler fails at a number."""


@st.composite
def streets(draw: st.DrawFn) -> Street:
    """Draw what may happen to the events of one or two keys."""
    events: Log = []
    for account in range(draw(st.integers(1, 2))):
        events += [(account, number + 1) for number in range(draw(st.integers(1, 5)))]
    again = draw(st.lists(st.sampled_from(events), max_size=4))
    return Street(
        draw(st.permutations(events + again)),
        draw(st.lists(sizes, min_size=1, max_size=4)),
        draw(deaths),
        draw(failures),
    )


class City:
    """Streets whose processes work at once, and share the lanes of the backlog."""

    def __init__(self, new_applier: NewApplier, db: asyncpg.Connection, gaps: Gaps | None) -> None:
        self._new_applier = new_applier
        self._db = db
        self._gaps = gaps
        self._reading = 0
        self._dead: list[Applier] = []

    async def live(self, streets: Sequence[Street]) -> list[list[str]]:
        """Let it all happen, in new accounts; returns those of each street."""
        names = [in_one_lane(2) for _ in streets]
        self._reading = len(streets)
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            for partition, street in enumerate(streets):
                group.create_task(self._live_in(partition, street, names[partition]))
        # The next city has the same lanes, and who has died last may still have one.
        await self._db.execute("UPDATE pipeline.backlog_lane SET lease_until = now()")
        return names

    async def _live_in(self, partition: int, street: Street, names: list[str]) -> None:
        log = records(street.log, names)
        failures = Counter(street.failures)
        first: int | None = None
        for death in [*street.deaths, None]:
            service = Following(self._gaps, MANY, failures)
            life = await begin(self._new_applier, service, death, partition)
            if first is None:
                first = await life.applier.position()
            reads = self._read(life.applier, street, log, first)
            if await life.survives(reads, self._work_off(life.applier)):
                await life.applier.engine.dispose()
                return
            self._dead.append(life.applier)

    async def _read(self, applier: Applier, street: Street, log: list[Deposit], first: int) -> None:
        turn = 0
        while (done := await applier.position() - first) < len(log):
            size = street.batches[turn % len(street.batches)]
            await applier.apply(*log[done : done + size])
            turn += 1
        # A process that comes after one that has read all finds nothing to read.
        if log:
            log.clear()
            self._reading -= 1

    async def _work_off(self, applier: Applier) -> None:
        """Be a worker of the lanes until nothing is left for anybody."""
        while self._reading or await applier.backlog():
            if not await applier.lanes.work_off():
                await let_leases_end(applier.engine, self._dead)
                await asyncio.sleep(0.01)


Step: TypeAlias = int | Literal["the worker works", "the deadline passes"]
"""A number: so many records are read."""


@dataclass
class Story:
    """What is in a partition, and what goes wrong, step by step."""

    steps: list[Step]
    log: Log
    """Some events are there more than once, some never come."""
    then: Literal["apply", "die", "hold"]
    deaths: list[Death]
    suspects: bool
    """Whether the process that comes after a death tries nothing that it finds in the partition."""
    failures: dict[int, int]

    @property
    def all_steps(self) -> list[Step]:
        """Its steps, and then what is left to do."""
        return [*self.steps, len(self.log), "the worker works"]


stories = st.builds(
    Story,
    st.lists(
        sizes | st.sampled_from(["the worker works", "the deadline passes"]),
        min_size=5,
        max_size=15,
    ),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=6, max_size=20),
    st.sampled_from(["apply", "die", "hold"]),
    deaths,
    st.booleans(),
    failures,
)


@dataclass
class Model:
    """What should become of the events of a key, whoever fails or dies meanwhile."""

    then: str
    applied: list[int] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    holding: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    overdue: set[int] = field(default_factory=set, compare=False)
    known: set[int] = field(default_factory=set, compare=False)

    def read(self, numbers: Sequence[int]) -> None:
        """Take a batch; what finds others waiting is left to the worker."""
        waits = self.waiting | self.holding
        self.waiting |= set(numbers) - self.known
        self.known |= set(numbers)
        if not waits:
            self.work_off()

    def let_deadline_pass(self) -> None:
        """Let all that waits be overdue, until the worker comes."""
        self.overdue |= self.waiting

    def work_off(self) -> None:
        """Go through what waits, up to the first that goes on waiting."""
        for number in sorted(self.waiting | self.holding):
            last = self.applied[-1] if self.applied else 0
            is_early = number > last + 1
            if number in self.holding or (is_early and number not in self.overdue):
                return
            self.waiting.remove(number)
            if is_early and self.then == "hold":
                self.holding.add(number)
                return
            if is_early and self.then == "die":
                self.dead.add(number)
            elif number > last:
                self.applied.append(number)


class Teller:
    """Lets a story happen, by processes that come one after the other."""

    def __init__(self, story: Story, new_applier: NewApplier, db: asyncpg.Connection) -> None:
        self._story = story
        self._new_applier = new_applier
        self._db = db
        self._names = in_one_lane(3)
        self._log = records(story.log, self._names)
        self._deaths = iter(story.deaths)
        self._failures = Counter(story.failures)
        self._dead: list[Applier] = []

    async def tell(self) -> list[Model]:
        """Let it happen to accounts of its own; returns what has become of each."""
        life = await self._born()
        first = await life.applier.position()
        done = 0
        for step in self._story.all_steps:
            if step == "the deadline passes":
                await self._db.execute(
                    "UPDATE pipeline.backlog SET received_at = received_at - interval '1 day'"
                )
            elif step == "the worker works":
                while not await life.survives(self._work_off(life.applier)):
                    life = await self._after(life)
            else:
                done = min(done + step, len(self._log))
                life = await self._read(life, first, done)
        found = [await self._found(name) for name in self._names]
        await self._db.execute("DELETE FROM pipeline.backlog")
        await life.applier.engine.dispose()
        return found

    async def _born(self) -> Life:
        service = Following(Gaps(then=self._story.then), MANY, self._failures)
        return await begin(self._new_applier, service, next(self._deaths, None), 0)

    async def _after(self, life: Life) -> Life:
        self._dead.append(life.applier)
        born = await self._born()
        await let_leases_end(born.applier.engine, self._dead)
        return born

    async def _read(self, life: Life, first: int, end: int) -> Life:
        deaths = 0
        while not await life.survives(self._apply(life.applier, first, end, deaths)):
            life = await self._after(life)
            deaths += self._story.suspects
        return life

    async def _apply(self, applier: Applier, first: int, end: int, deaths: int) -> None:
        done = await applier.position() - first
        if done < end:
            batch = await applier.read(*self._log[done:end], start=first + done)
            await applier.apply_batch(batch, deaths=deaths)

    async def _work_off(self, applier: Applier) -> None:
        await applier.make_due()
        await applier.work_off()

    async def _found(self, account: str) -> Model:
        rows = await self._db.fetch(
            "SELECT sequence, died_at, holds FROM pipeline.backlog WHERE record_key = $1",
            account.encode(),
        )
        return Model(
            self._story.then,
            await history(self._db, account),
            dead={row["sequence"] for row in rows if row["died_at"] and not row["holds"]},
            holding={row["sequence"] for row in rows if row["holds"]},
            waiting={row["sequence"] for row in rows if row["died_at"] is None},
        )


def foretold(story: Story, account: int) -> Model:
    """Return what should become of an account."""
    model, done = Model(story.then), 0
    for step in story.all_steps:
        if step == "the deadline passes":
            model.let_deadline_pass()
        elif step == "the worker works":
            model.work_off()
        else:
            model.read(numbers_of(account, story.log[done : done + step]))
            done += step
    return model


def many(examples: int) -> settings:
    """Return settings for so many examples; behind a pooler each takes several times as long."""
    return settings(
        deadline=None,
        max_examples=examples // 6 if POOLED else examples,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


@pytest.mark.full
@many(30)
@given(streets=st.tuples(streets(), streets()))
async def test_those_that_bring_their_order_along_end_in_it(
    new_applier: NewApplier, db: asyncpg.Connection, streets: Sequence[Street]
) -> None:
    names = await City(new_applier, db, Gaps()).live(streets)
    for street, accounts in zip(streets, names, strict=True):
        for place, account in enumerate(accounts):
            assert await history(db, account) == sorted(set(numbers_of(place, street.log)))


@pytest.mark.full
@many(30)
@given(streets=st.tuples(streets(), streets()))
async def test_the_others_end_in_the_order_in_which_each_came_first(
    new_applier: NewApplier, db: asyncpg.Connection, streets: Sequence[Street]
) -> None:
    names = await City(new_applier, db, None).live(streets)
    for street, accounts in zip(streets, names, strict=True):
        for place, account in enumerate(accounts):
            assert await history(db, account) == list(dict.fromkeys(numbers_of(place, street.log)))


@pytest.mark.full
@many(60)
@given(story=stories)
async def test_what_is_missing_is_waited_for_and_then_done_without(
    new_applier: NewApplier, db: asyncpg.Connection, story: Story
) -> None:
    assert await Teller(story, new_applier, db).tell() == [foretold(story, n) for n in range(3)]


@pytest.mark.parametrize("moment", Moment)
async def test_a_worker_that_dies_after_a_known_death_spends_an_attempt(
    new_applier: NewApplier, db: asyncpg.Connection, moment: Moment
) -> None:
    """What the stories rest on: a death in them is one."""
    service = Following(Gaps(), failures=Counter({1: 2}))
    life = await begin(new_applier, service, None, 0)
    await life.applier.apply(*numbered(1, 2))
    dead: list[Applier] = []
    # The second one knows, and stores its attempt in a commit of its own.
    later = Death(moment, 1 if moment is Moment.CALLED else 2)
    for starts, death in enumerate([Death(Moment.CALLED, 1), later], 1):
        service = Following(Gaps())
        life = await begin(new_applier, service, death, 0)
        await let_leases_end(life.applier.engine, dead)
        assert not await life.survives(life.applier.work_off())
        assert await lanes_of(db, life.applier) == [starts]
        dead.append(life.applier)
    rows = [(row["sequence"], row["reason"], row["attempts"]) for row in await _rows(db)]
    if moment is Moment.COMMITTED:
        assert rows == [(2, "follows another", 0)]
        assert await history(db) == [1]
    else:
        assert rows == [(1, "process died", 2), (2, "follows another", 0)]
        assert await history(db) == []


async def _rows(db: asyncpg.Connection) -> list[asyncpg.Record]:
    rows: list[asyncpg.Record] = await db.fetch("SELECT * FROM pipeline.backlog ORDER BY sequence")
    return rows
