"""Habits of handlers on tables that the database judges or reacts to: a batch is as one by one.

The batch and plain SQLAlchemy, message by message, are compared in rows, in the versions that
triggers have seen, in events, in markers, and in which messages have failed and how often.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import count
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Text
from sqlalchemy.orm import Mapped, mapped_column

from onceward import Aggregate, Event, Handlers, Reject, Transaction
from onceward.handlers import policy

from . import test_habits
from .applier import NewApplier
from .test_habits import (
    ALONE,
    LOST,
    Before,
    Broken,
    ByHand,
    Lose,
    Trial,
    befores,
    drawing,
    loses,
    nothing_is_lost,
    shares,
)
from .test_session import TOPIC, events_of
from .test_versions import Watched
from tests.contract.bank import Base, Deposit, Deposited

KEYS = ("a", "b", "c")
NOWHERE = "nowhere"
TOO_MUCH = 40
_numbers = count(1)


class Purse(Aggregate, Base):
    """A row that is judged by its server, which fills a column of it."""

    __tablename__ = "reacting_purse"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    cents: Mapped[int] = mapped_column(default=0)
    made_by: Mapped[str | None] = mapped_column(Text)
    """The message that has changed it last."""
    seal: Mapped[str | None] = mapped_column(Text, unique=True)
    """A value that a purse keeps."""
    badge: Mapped[str | None] = mapped_column(Text, unique=True)
    """A value that purses give up and take."""
    twice: Mapped[int | None] = mapped_column()


class PursePosting(Base):
    """A row that refers to a purse.

    SQLAlchemy inserts rows without a relationship in the order of their classes' names: after
    `Purse`, also if no load has flushed that before.
    """

    __tablename__ = "reacting_posting"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    purse_id: Mapped[str] = mapped_column(sa.ForeignKey("reacting_purse.id"))


class Vow(Base):
    """A row that may refer to a purse before that is there."""

    __tablename__ = "reacting_vow"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    purse_id: Mapped[str] = mapped_column(
        sa.ForeignKey("reacting_purse.id", deferrable=True, initially="DEFERRED")
    )


class Total(Aggregate, Base):
    """A row that a trigger of another table writes."""

    __tablename__ = "reacting_total"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    postings: Mapped[int] = mapped_column(default=0)


CHECK = f"ALTER TABLE reacting_purse ADD CHECK (cents < {TOO_MUCH});"
HISTORY = """
CREATE TABLE reacting_history (id int GENERATED ALWAYS AS IDENTITY, purse text, by text, cents int,
                               seal text, badge text, twice int);
CREATE FUNCTION keep_purse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO reacting_history (purse, by, cents, seal, badge, twice)
    VALUES (NEW.id, NEW.made_by, NEW.cents, NEW.seal, NEW.badge, NEW.twice);
    RETURN NULL;
END $$;
"""
AUDIT = """
CREATE TRIGGER audit AFTER INSERT OR UPDATE ON reacting_purse
    FOR EACH ROW EXECUTE FUNCTION keep_purse();
"""
TWICE = """
CREATE FUNCTION twice_purse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN NEW.twice := 2 * NEW.cents; RETURN NEW; END $$;
CREATE TRIGGER twice BEFORE INSERT OR UPDATE ON reacting_purse
    FOR EACH ROW EXECUTE FUNCTION twice_purse();
"""
ELSEWHERE = """
CREATE FUNCTION total_postings() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO reacting_total AS t (id, postings, version) VALUES (NEW.purse_id, 1, 0)
        ON CONFLICT (id) DO UPDATE SET postings = t.postings + 1;
    RETURN NULL;
END $$;
CREATE TRIGGER totals AFTER INSERT ON reacting_posting
    FOR EACH ROW EXECUTE FUNCTION total_postings();
"""
REACTIONS = {
    "nothing": "",
    "check": CHECK,
    "audit": CHECK + AUDIT,
    "before": CHECK + TWICE,
    "elsewhere": CHECK + ELSEWHERE,
    "all": CHECK + AUDIT + TWICE + ELSEWHERE,
}


class PurseChanged(Event, type="purse.changed", topic="purses"):
    """A purse has changed."""

    cents: int


Tx = Any
Habit = Callable[[Tx, str, int, str], Awaitable[None]]


async def put(tx: Tx, key: str, cents: int, by: str) -> None:
    purse = await tx.load_or_create(Purse, key)
    purse.cents += cents
    purse.made_by = by
    tx.publish(PurseChanged(cents=purse.cents), of=purse)


async def empty(tx: Tx, key: str, cents: int, by: str) -> None:
    if purse := await tx.load(Purse, key):
        purse.cents, purse.made_by = 0, by


async def put_too_much_and_back(tx: Tx, key: str, cents: int, by: str) -> None:
    purse = await tx.load_or_create(Purse, key)
    before, purse.cents = purse.cents, TOO_MUCH + cents
    purse.cents, purse.made_by = before + 1, by


async def double(tx: Tx, key: str, cents: int, by: str) -> None:
    if purse := await tx.load(Purse, key):
        purse.cents, purse.made_by = (purse.twice or 0) % 20, by


async def seal(tx: Tx, key: str, cents: int, by: str) -> None:
    purse = await tx.load_or_create(Purse, key)
    if purse.seal is None:
        purse.seal, purse.made_by = f"{key.split()[0]} {key.split()[1]} {cents % 2}", by


async def lay_down(tx: Tx, key: str, cents: int, by: str) -> None:
    if (purse := await tx.load(Purse, key)) and purse.badge:
        purse.badge, purse.made_by = None, by


async def take_free(tx: Tx, key: str, cents: int, by: str) -> None:
    others, own = key.rsplit(" ", 1)
    purses = [await tx.load(Purse, f"{others} {one}") for one in KEYS if one != own]
    free = {f"{others} 0", f"{others} 1"} - {one.badge for one in purses if one}
    purse = await tx.load_or_create(Purse, key)
    if free:
        purse.badge, purse.made_by = (max if cents % 2 else min)(free), by


async def swap(tx: Tx, key: str, cents: int, by: str) -> None:
    others, own = key.rsplit(" ", 1)
    other = KEYS[(KEYS.index(own) + 1) % len(KEYS)]
    purses = [await tx.load(Purse, f"{others} {one}") for one in (own, other)]
    if None in purses:
        return
    badges = [one.badge for one in purses]
    for purse in purses:
        purse.badge, purse.made_by = None, by
    await tx.session.flush()
    for purse, badge in zip(purses, reversed(badges), strict=True):
        purse.badge = badge


async def post(tx: Tx, key: str, cents: int, by: str) -> None:
    await put(tx, key, 1, by)
    tx.add(PursePosting(id=f"{by} {key} {cents} {next(_numbers)}", purse_id=key))


async def post_nowhere(tx: Tx, key: str, cents: int, by: str) -> None:
    tx.add(PursePosting(id=f"{by} {key} {cents} {next(_numbers)}", purse_id=NOWHERE))


async def vow(tx: Tx, key: str, cents: int, by: str) -> None:
    tx.add(Vow(id=f"{by} {key} {cents} {next(_numbers)}", purse_id=key))
    await put(tx, key, 1, by)


async def vow_nowhere(tx: Tx, key: str, cents: int, by: str) -> None:
    tx.add(Vow(id=f"{by} {key} {cents} {next(_numbers)}", purse_id=NOWHERE))


async def count_postings(tx: Tx, key: str, cents: int, by: str) -> None:
    total = await tx.load(Total, key)
    purse = await tx.load_or_create(Purse, key)
    purse.cents, purse.made_by = (total.postings if total else 0) % 20, by


async def watch(tx: Tx, key: str, cents: int, by: str) -> None:
    row = await tx.load_or_create(Watched, key)
    row.cents += cents


async def wait(tx: Tx, key: str, cents: int, by: str) -> None:
    await asyncio.sleep(0)


async def use_threads(tx: Tx, key: str, cents: int, by: str) -> None:
    loop = asyncio.get_running_loop()

    def load() -> Any:
        return asyncio.run_coroutine_threadsafe(tx.load_or_create(Purse, key), loop).result()

    purse = await loop.run_in_executor(None, load)  # which has no context variables
    purse.cents, purse.made_by = purse.cents + 1, by
    await asyncio.to_thread(partial(tx.publish, PurseChanged(cents=purse.cents), of=purse))


async def load_in_tasks(tx: Tx, key: str, cents: int, by: str) -> None:
    if isinstance(tx, ByHand):
        await tx.load(Purse, key)
        await tx.load(Watched, key)
    else:
        async with asyncio.TaskGroup() as group:
            group.create_task(tx.load(Purse, key))
            group.create_task(tx.load(Watched, key))


async def reject(tx: Tx, key: str, cents: int, by: str) -> None:
    raise Reject("not this one")


async def fail(tx: Tx, key: str, cents: int, by: str) -> None:
    raise Broken


async def by_text(tx: Tx, key: str, cents: int, by: str) -> None:
    await tx.session.execute(
        sa.text(
            "UPDATE reacting_purse SET cents = (cents + :cents) % 20, made_by = :by WHERE id = :id"
        ),
        {"id": key, "cents": cents, "by": by},
    )


def shared(habit: test_habits.Habit) -> Habit:
    """Return a habit that needs no row."""

    @wraps(habit)
    async def with_by(tx: Tx, key: str, cents: int, by: str) -> None:
        await habit(tx, key, cents)

    return with_by


swallow_a_cancellation = shared(test_habits.swallow_a_cancellation)
SHARED = (
    *(put, put, put, empty, put_too_much_and_back, double, seal, post, post, vow),
    *(lay_down, lay_down, take_free, take_free, take_free, count_postings, watch, wait),
    *(use_threads, load_in_tasks, swallow_a_cancellation),
)
OWN = by_text, swap, swap, shared(test_habits.blame_the_server_and_go_on)
LAST = (
    *(reject, reject, fail, post_nowhere, vow_nowhere, shared(test_habits.set_constraints)),
    *(shared(one) for one in (test_habits.blame_the_server, test_habits.roll_back_in_a_thread)),
    *(shared(one) for one in (*test_habits.CANCELLING, *test_habits.DEADLY)),
)


@dataclass
class Message:
    """What the handler of a message does."""

    key: str
    habits: list[tuple[Habit, int]]
    loses: int | None = None
    """The habit before which the connection is lost, once, to something else."""

    async def run(self, tx: Tx, key: str, by: str, lose: Lose) -> None:
        for place, (habit, cents) in enumerate(self.habits):
            if place == self.loses:
                await lose()
            await habit(tx, key, cents, by)

    def names(self) -> Iterable[str]:
        """Yield the names of what the message does."""
        if self.loses is not None and self.loses < len(self.habits):
            yield LOST
        for habit, _ in self.habits:
            yield habit.__name__

    def __repr__(self) -> str:
        habits = ", ".join(f"{habit.__name__} {cents}" for habit, cents in self.habits)
        return f"{self.key}: {habits}{'' if self.loses is None else f', loses {self.loses}'}"


def drawn(habits: tuple[Habit, ...], least: int, most: int) -> Any:
    one = st.tuples(st.sampled_from(habits), st.integers(1, 12))
    return st.lists(one, min_size=least, max_size=most)


messages = st.builds(
    lambda key, first, then, loses: Message(key, first + then, loses),
    st.sampled_from(KEYS),
    drawn(SHARED, 1, 3) | drawn(SHARED, 1, 3) | drawn((*SHARED, *OWN), 1, 3),
    st.just([]) | st.just([]) | st.just([]) | drawn(LAST, 1, 1),
    loses,
)
batches = st.lists(messages, min_size=1, max_size=7)


@dataclass
class World:
    """The engine's batch, and what plain SQLAlchemy makes of the same messages."""

    trial: Trial
    running: dict[str, Message] = field(default_factory=dict)

    async def compare(self, before: Before, batch: list[Message]) -> None:
        """Raise `AssertionError` for a difference."""
        number, db = next(_numbers), self.trial.db
        self.running = {f"{number} {place}": message for place, message in enumerate(batch)}
        deposits = [
            Deposit(place, account=f"{number} ours {message.key}", id=f"{number} {place}")
            for place, message in enumerate(batch)
        ]

        async def run(place: int, tx: ByHand) -> None:
            key, by = f"{number} hand {batch[place].key}", f"{number} {place}"
            await batch[place].run(tx, key, by, nothing_is_lost)

        names = [name for message in batch for name in message.names()]
        hand = await self.trial.compare(before, deposits, names, run)
        for key in KEYS:
            ours, theirs = (f"{number} {who} {key}" for who in ("ours", "hand"))
            for entity in (Purse, Total, Watched, PursePosting, Vow):
                mine, hands = [await self._rows(entity, one) for one in (ours, theirs)]
                assert mine == hands, (entity, key)
            assert await self._history(ours) == await self._history(theirs), key
            published = [
                (sequence, f'{{"cents":{cents}}}')
                for one, sequence, cents in hand.events
                if one == theirs
            ]
            assert await events_of(db, ours) == published, key

    async def _rows(self, entity: type[Base], key: str) -> list[dict[str, Any]]:
        column = "purse_id" if entity in (PursePosting, Vow) else "id"
        table = entity.__tablename__
        rows = await self.trial.db.fetch(f"SELECT * FROM {table} WHERE {column} = $1", key)
        unique = {"seal", "badge"}  # begin with number and who
        return [
            {k: v and v[-1] if k in unique else v for k, v in row.items() if k not in IDS}
            for row in rows
        ]

    async def _history(self, key: str) -> list[tuple[Any, ...]]:
        """Return the last version that each message has made of a purse."""
        rows = await self.trial.db.fetch(
            "SELECT by, cents, right(seal, 1), right(badge, 1), twice FROM reacting_history"
            " WHERE purse = $1 ORDER BY id",
            key,
        )
        last = {row["by"]: tuple(row) for row in rows if row["by"] is not None}
        return [*last.values()]


IDS = {"id", "purse_id"}


@pytest.fixture(params=REACTIONS)
async def world(
    new_applier: NewApplier,
    db: asyncpg.Connection,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> World:
    """Return an applier whose handler does what a message says, beside tables that react."""
    # Otherwise a message whose connection was lost is due again on a slow machine.
    monkeypatch.setattr(policy, "_SHORTEST_FOR_MIGRATION", 3_600.0)
    await db.execute(HISTORY + REACTIONS[request.param])
    handlers = Handlers()
    applier = await new_applier(handlers, topic=TOPIC, breaker_keys=1_000_000)
    trial = Trial(applier, applier.engine, db, "purse")
    world = World(trial)

    @handlers.on(Deposited, topic=TOPIC, consumer="purse", policy=ALONE)
    async def purse(event: Deposited, tx: Transaction) -> None:
        id = tx.message.id
        await world.running[id].run(tx, event.account, id, partial(trial.lose, id))

    return world


def test_each_habit_is_drawn_in_one_of_a_hundred_batches() -> None:
    found = shares(batches)
    for habit in (*SHARED, *OWN, *LAST):
        assert found[habit.__name__] >= 5, (habit, found)
    assert found[LOST] >= 25


@drawing(15)
@given(before=befores, batch=batches)
async def test_a_batch_is_as_one_by_one_beside_tables_that_react(
    world: World, before: Before, batch: list[Message]
) -> None:
    await world.compare(before, batch)


@pytest.mark.full
@pytest.mark.timeout(1_800)
@drawing(200)
@given(before=befores, batch=batches)
async def test_many_batches_are_as_one_by_one_beside_tables_that_react(
    world: World, before: Before, batch: list[Message]
) -> None:
    await world.compare(before, batch)
