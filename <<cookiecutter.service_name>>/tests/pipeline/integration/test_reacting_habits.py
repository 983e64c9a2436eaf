"""Habits of handlers on tables that the database judges or reacts to: a batch is as one by one.

The batch and plain SQLAlchemy, message by message, are compared in rows, in the versions that
triggers have seen, in events, and in which messages have failed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from pipeline import Aggregate, Event, Handlers, Policy, Reject, Transaction

from .desk import Desk, NewDesk
from .test_door import TOPIC, events_of
from .test_habits import Broken, ByHand, drawing, one_by_one, savepoint
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
    twice: Mapped[int | None] = mapped_column()


class Posting(Base):
    """A row that refers to a purse."""

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
                               seal text, twice int);
CREATE FUNCTION keep_purse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO reacting_history (purse, by, cents, seal, twice)
    VALUES (NEW.id, NEW.made_by, NEW.cents, NEW.seal, NEW.twice);
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


class Hand(ByHand):
    """What a handler gets, with the defaults of new purses."""

    async def load(self, entity: type[Any], key: str) -> Any:
        return await super().load(entity, key)

    async def load_or_create(self, entity: type[Any], key: str) -> Any:
        row = await super().load_or_create(entity, key)
        for name in ("cents", "postings", "writes"):
            if hasattr(entity, name) and getattr(row, name) is None:
                setattr(row, name, 0)
        return row


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


async def post(tx: Tx, key: str, cents: int, by: str) -> None:
    await put(tx, key, 1, by)
    tx.add(Posting(id=f"{by} {key} {cents} {next(_numbers)}", purse_id=key))


async def post_nowhere(tx: Tx, key: str, cents: int, by: str) -> None:
    tx.add(Posting(id=f"{by} {key} {cents} {next(_numbers)}", purse_id=NOWHERE))


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


async def use_a_thread(tx: Tx, key: str, cents: int, by: str) -> None:
    await asyncio.to_thread(str, cents)


async def load_in_tasks(tx: Tx, key: str, cents: int, by: str) -> None:
    if isinstance(tx, Hand):
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


async def blame_the_server(tx: Tx, key: str, cents: int, by: str) -> None:
    code = ("53100", "58030", "57P01", "08006", "XX000", "25006")[cents % 6]
    await tx.session.execute(
        sa.text(f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{code}'; END $$")
    )


async def blame_the_server_and_go_on(tx: Tx, key: str, cents: int, by: str) -> None:
    with suppress(DBAPIError):
        async with savepoint(tx):
            await blame_the_server(tx, key, cents, by)


SHARED = (
    *(put, put, put, empty, put_too_much_and_back, double, seal, post, post, vow),
    *(count_postings, watch, wait, use_a_thread, load_in_tasks),
)
OWN = by_text, blame_the_server_and_go_on
LAST = reject, reject, fail, post_nowhere, vow_nowhere, blame_the_server


@dataclass
class Message:
    """What the handler of a message does."""

    key: str
    habits: list[tuple[Habit, int]]

    async def run(self, tx: Tx, key: str, by: str) -> None:
        for habit, cents in self.habits:
            await habit(tx, key, cents, by)

    def __repr__(self) -> str:
        habits = ", ".join(f"{habit.__name__} {cents}" for habit, cents in self.habits)
        return f"{self.key}: {habits}"


def drawn(habits: tuple[Habit, ...], least: int, most: int) -> Any:
    one = st.tuples(st.sampled_from(habits), st.integers(1, 9))
    return st.lists(one, min_size=least, max_size=most)


messages = st.builds(
    lambda key, first, then: Message(key, first + then),
    st.sampled_from(KEYS),
    drawn(SHARED, 1, 3) | drawn(SHARED, 1, 3) | drawn((*SHARED, *OWN), 1, 3),
    st.just([]) | st.just([]) | drawn(LAST, 0, 1),
)
batches = st.lists(messages, min_size=1, max_size=7)


@dataclass
class World:
    """The engine's batch, and what plain SQLAlchemy makes of the same messages."""

    desk: Desk
    engine: AsyncEngine
    db: asyncpg.Connection
    running: dict[str, Message] = field(default_factory=dict)

    async def compare(self, batch: list[Message]) -> None:
        """Raise `AssertionError` for a difference."""
        number = next(_numbers)
        self.running = {f"{number} {place}": message for place, message in enumerate(batch)}
        start = await self.desk.position()
        await self.desk.apply(
            *(
                Deposit(place, account=f"{number} ours {message.key}", id=f"{number} {place}")
                for place, message in enumerate(batch)
            )
        )
        rows = [row for row in await self.desk.backlog() if row["offset"] >= start]
        waiting = {row["offset"] - start for row in rows if row["died_at"] is None}
        dead = {row["offset"] - start for row in rows if row["died_at"] is not None}
        assert self.desk.outages == []

        async def run(place: int, session: AsyncSession) -> Hand:
            tx, message = Hand(session), batch[place]
            await message.run(tx, f"{number} hand {message.key}", f"{number} {place}")
            return tx

        *expected, events = await one_by_one(self.engine, [one.key for one in batch], run)
        assert [waiting, dead] == expected
        for key in KEYS:
            ours, theirs = (f"{number} {who} {key}" for who in ("ours", "hand"))
            for entity in (Purse, Total, Watched, Posting, Vow):
                mine, hands = [await self._rows(entity, one) for one in (ours, theirs)]
                assert mine == hands, (entity, key)
            assert await self._history(ours) == await self._history(theirs), key
            published = [
                (sequence, f'{{"cents":{cents}}}')
                for one, sequence, cents in events
                if one == theirs
            ]
            assert await events_of(self.db, ours) == published, key

    async def _rows(self, entity: type[Base], key: str) -> list[dict[str, Any]]:
        column = "purse_id" if entity in (Posting, Vow) else "id"
        table = entity.__tablename__
        rows = await self.db.fetch(f"SELECT * FROM {table} WHERE {column} = $1", key)
        left_out = {"id", "purse_id", "seal"}
        return [{k: v for k, v in dict(row).items() if k not in left_out} for row in rows]

    async def _history(self, key: str) -> list[tuple[Any, ...]]:
        """Return the last version that each message has made of a purse."""
        rows = await self.db.fetch(
            "SELECT by, cents, seal IS NOT NULL, twice FROM reacting_history WHERE purse = $1"
            " ORDER BY id",
            key,
        )
        last = {row["by"]: tuple(row) for row in rows if row["by"] is not None}
        return [*last.values()]


@pytest.fixture(params=REACTIONS)
async def world(new_desk: NewDesk, db: asyncpg.Connection, request: pytest.FixtureRequest) -> World:
    """Return a desk whose handler does what a message says, beside tables that react."""
    await db.execute(HISTORY + REACTIONS[request.param])
    handlers = Handlers()
    desk = await new_desk(handlers, topic=TOPIC, breaker_keys=1_000_000)
    world = World(desk, desk.engine, db)

    @handlers.on(Deposited, topic=TOPIC, consumer="purse", policy=Policy(attempts=20))
    async def purse(event: Deposited, tx: Transaction) -> None:
        await world.running[tx.message.id].run(tx, event.account, tx.message.id)

    return world


@drawing(15)
@given(batch=batches)
async def test_a_batch_is_as_one_by_one_beside_tables_that_react(
    world: World, batch: list[Message]
) -> None:
    await world.compare(batch)


@pytest.mark.full
@pytest.mark.timeout(1_800)
@drawing(200)
@given(batch=batches)
async def test_many_batches_are_as_one_by_one_beside_tables_that_react(
    world: World, batch: list[Message]
) -> None:
    await world.compare(batch)
