"""Whatever habits handlers have: a batch comes out as plain SQLAlchemy does, message by message."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import count
from typing import Any, Literal

import asyncpg
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm.attributes import flag_modified, instance_state

from pipeline import Handlers, Policy, Reject, Transaction

from .desk import Desk, NewDesk
from .test_door import TOO_MUCH, TOPIC, Changed, Tagged, Wallet, events_of, row_of
from tests.contract.bank import Deposit, Deposited

Row = Wallet | Tagged
KEYS = ("a", "b")
_numbers = count(1)


class ByHand:
    """What a handler gets of `Transaction`, made of nothing but SQLAlchemy."""

    def __init__(self, session: AsyncSession) -> None:
        self.session = session
        self.events: list[tuple[str, int, int]] = []
        self.is_broken = False
        self._loaded: dict[tuple[type[Row], str], Row | None] = {}
        self._kept: list[Row] = []

    async def load(self, entity: type[Row], key: str) -> Any:
        row = self._loaded.get((entity, key))
        if row is None or row in self.session.deleted or instance_state(row).expired:
            await self.session.flush()
            wanted = sa.select(entity).where(entity.id == key).with_for_update()
            row = await self.session.scalar(wanted.execution_options(populate_existing=True))
            self._loaded[entity, key] = row
        return row if row is not None and row in self.session else None

    async def load_or_create(self, entity: type[Row], key: str) -> Any:
        row = await self.load(entity, key)
        if row is None:
            row = self._loaded[entity, key] = entity(id=key, version=0)
            if isinstance(row, Wallet):
                row.cents = 0
            self._kept.append(row)
            self.session.add(row)
        return row

    def add(self, row: object) -> None:
        self.session.add(row)

    def publish(self, event: Changed, *, of: Wallet) -> None:
        of.version += 1
        self.events.append((of.id, of.version, event.cents))

    @asynccontextmanager
    async def savepoint(self) -> Any:
        before, loaded = len(self.events), dict(self._loaded)
        try:
            async with self.session.begin_nested():
                yield
        except BaseException:
            del self.events[before:]
            # What was loaded and locked before stays so.
            self._loaded = loaded
            raise


@asynccontextmanager
async def savepoint(tx: Any) -> Any:
    """A savepoint, as a handler makes it."""
    make = tx.savepoint if isinstance(tx, ByHand) else tx.session.begin_nested
    async with make():
        yield


class Broken(Exception):
    """What handlers raise."""


Habit = tuple[Any, ...]
Tx = Any


async def change(tx: Tx, key: str, cents: int) -> None:
    wallet = await tx.load_or_create(Wallet, key)
    wallet.cents += cents
    tx.publish(Changed(cents=wallet.cents), of=wallet)


async def rename(tx: Tx, key: str, cents: int) -> None:
    if wallet := await tx.load(Wallet, key):
        wallet.owner = f"owner {cents}"


async def rate(tx: Tx, key: str, cents: int) -> None:
    wallet = await tx.load_or_create(Wallet, key)
    wallet.rate = (wallet.rate or Decimal(0)) + Decimal("1.005")


async def tag(tx: Tx, key: str, cents: int) -> None:
    row = await tx.load_or_create(Tagged, key)
    if row.tags:
        row.tags.append("unseen")
    else:
        row.tags = ["first"]
    row.text = ",".join(row.tags)


async def tag_seen(tx: Tx, key: str, cents: int) -> None:
    row = await tx.load_or_create(Tagged, key)
    row.tags = row.tags or []
    row.tags.append(str(cents))
    flag_modified(row, "tags")


async def keep_aside(tx: Tx, key: str, cents: int) -> None:
    wallet = await tx.load_or_create(Wallet, key)
    wallet.cents += getattr(wallet, "aside", 0)
    wallet.aside = cents


async def by_text(tx: Tx, key: str, cents: int) -> None:
    await tx.session.execute(
        sa.text("UPDATE wallet SET cents = cents + :cents WHERE id = :id"),
        {"id": key, "cents": cents},
    )


async def by_core(tx: Tx, key: str, cents: int) -> None:
    await tx.session.execute(
        sa.update(Wallet)
        .where(Wallet.id == key)
        .values(cents=Wallet.cents + cents)
        .execution_options(synchronize_session=False)
    )


async def by_upsert(tx: Tx, key: str, cents: int) -> None:
    row = insert(Wallet).values(id=key, cents=cents, version=0)
    await tx.session.execute(
        row.on_conflict_do_update(index_elements=["id"], set_={"cents": Wallet.cents + cents})
    )


async def merge(tx: Tx, key: str, cents: int) -> None:
    if await tx.load(Wallet, key):
        await tx.session.merge(Wallet(id=key, cents=cents, version=100 + cents))


async def delete(tx: Tx, key: str, cents: int) -> None:
    if wallet := await tx.load(Wallet, key):
        await tx.session.delete(wallet)


async def refresh(tx: Tx, key: str, cents: int) -> None:
    if wallet := await tx.load(Wallet, key):
        await tx.session.flush()
        await tx.session.refresh(wallet)
        wallet.owner = str(wallet.cents)


async def expire_all(tx: Tx, key: str, cents: int) -> None:
    await tx.session.flush()
    tx.session.expire_all()


async def expunge_all(tx: Tx, key: str, cents: int) -> None:
    if isinstance(tx, ByHand):
        rows = (*tx.session.new, *tx.session.dirty, *tx.session.deleted)
        versions = [sa.inspect(row).attrs.version for row in rows]
        # An event would be published for a change that is never written.
        tx.is_broken |= any(one.value and one.history.has_changes() for one in versions)
    tx.session.expunge_all()


async def flush(tx: Tx, key: str, cents: int) -> None:
    await tx.session.flush()


async def no_autoflush(tx: Tx, key: str, cents: int) -> None:
    tx.session.sync_session.autoflush = False


async def count_all(tx: Tx, key: str, cents: int) -> None:
    found = await tx.session.scalar(sa.select(Wallet.cents).where(Wallet.id == key))
    wallet = await tx.load_or_create(Wallet, key)
    wallet.owner = f"found {found}"


async def set_local(tx: Tx, key: str, cents: int) -> None:
    await tx.session.execute(sa.text(f"SET LOCAL TIME ZONE {cents % 12}"))
    await tx.session.execute(
        sa.text("UPDATE wallet SET owner = current_setting('TimeZone') WHERE id = :id"),
        {"id": key},
    )


async def set_for_good(tx: Tx, key: str, cents: int) -> None:
    await tx.session.execute(sa.text("SET search_path TO pg_catalog"))


async def gather(tx: Tx, key: str, cents: int) -> None:
    others = ("x", "y", "z")
    if isinstance(tx, ByHand):
        for other in others:
            await tx.load(Wallet, other)
    else:
        loads = (tx.load(Wallet, other) for other in others)
        for outcome in await asyncio.gather(*loads, return_exceptions=True):
            if isinstance(outcome, BaseException):  # the others have ended as well
                raise outcome


async def fail(tx: Tx, key: str, cents: int) -> None:
    raise Broken


async def swallow(tx: Tx, key: str, cents: int) -> None:
    with suppress(DBAPIError):
        await tx.session.execute(sa.text("SELECT 1 / 0"))
    if isinstance(tx, ByHand):
        tx.is_broken = True


async def break_check(tx: Tx, key: str, cents: int) -> None:
    await change(tx, key, TOO_MUCH)


async def commit(tx: Tx, key: str, cents: int) -> None:
    if isinstance(tx, ByHand):
        tx.is_broken = True
    else:
        with suppress(Exception):
            await tx.session.execute(sa.text("COMMIT"))


async def forget(tx: Tx, key: str, cents: int) -> None:
    if isinstance(tx, ByHand):
        tx.is_broken = True
    else:
        task = asyncio.create_task(tx.session.execute(sa.text("SELECT pg_sleep(0.2)")))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())


PLAIN = (change, change, change, rename, rate, tag, tag_seen, gather)
FREE = (
    *(by_text, by_core, by_upsert, merge, delete, refresh, expire_all, flush),
    *(no_autoflush, count_all, set_local, set_for_good),
)
HARMFUL = (fail, swallow, break_check, commit, forget)
LAST = (expunge_all, set_for_good)
"""After which a handler's own rows are not what they were."""


@dataclass
class Step:
    """A habit, or a savepoint around some."""

    habit: Callable[[Tx, str, int], Awaitable[None]] | None
    cents: int = 0
    inner: list["Step"] = field(default_factory=list)
    ends: Literal["released", "rolled back", "broken"] = "released"

    async def run(self, tx: Tx, key: str) -> None:
        if self.habit is not None:
            await self.habit(tx, key, self.cents)
            return
        with suppress(Broken, DBAPIError):
            async with savepoint(tx):
                for step in self.inner:
                    await step.run(tx, key)
                if self.ends == "rolled back":
                    raise Broken
                if self.ends == "broken":
                    await break_check(tx, key, 0)
                    await tx.session.flush()

    def __repr__(self) -> str:
        if self.habit is not None:
            return f"{self.habit.__name__}({self.cents})"
        return f"savepoint({self.inner}, {self.ends})"


cents = st.integers(1, 9)
habits = st.builds(Step, st.sampled_from(PLAIN + FREE), cents)
steps = st.recursive(
    habits,
    lambda inner: st.builds(
        Step,
        st.none(),
        inner=st.lists(inner, min_size=1, max_size=2),
        ends=st.sampled_from(["released", "rolled back", "broken"]),
    ),
    max_leaves=3,
)


@dataclass
class Message:
    """What the handler of a message does."""

    key: str
    steps: list[Step]

    async def run(self, tx: Tx, key: str) -> None:
        for step in self.steps:
            await step.run(tx, key)


# What is kept on an object outlives a savepoint as long as somebody has the object: any answer is
# right there.
plain = st.lists(
    st.builds(Step, st.sampled_from((*PLAIN, keep_aside)), cents), min_size=1, max_size=3
)
free = st.lists(steps, min_size=1, max_size=3)
last = st.lists(st.builds(Step, st.sampled_from(HARMFUL + LAST), cents), max_size=1)
messages = st.builds(
    lambda key, first, then: Message(key, first + then),
    st.sampled_from(KEYS),
    plain | free,
    st.just([]) | st.just([]) | last,
)
batches = st.lists(messages, min_size=1, max_size=6)


async def one_by_one(
    engine: AsyncEngine,
    keys: Sequence[str],
    run: Callable[[int, AsyncSession], Awaitable[ByHand]],
) -> tuple[set[int], set[int], list[tuple[str, int, int]]]:
    """Run what the message of each key does in a transaction, by nothing but SQLAlchemy.

    Returns the places of those that wait and of those that are dead, and the events of the others.
    """
    waiting: set[int] = set()
    dead: set[int] = set()
    events: list[tuple[str, int, int]] = []
    for place, key in enumerate(keys):
        if any(keys[other] == key for other in waiting):
            waiting.add(place)  # it follows one that waits
            continue
        async with AsyncSession(engine, expire_on_commit=False) as session:
            try:
                tx = await run(place, session)
                await session.flush()
                await session.execute(sa.text("RESET search_path"))
                await session.commit()
            except Reject:
                dead.add(place)
                await session.rollback()
            except (Broken, sa.exc.SQLAlchemyError, sa.exc.SAWarning):
                waiting.add(place)
                with suppress(sa.exc.SAWarning):  # of changes since a lost connection
                    await session.rollback()
            else:
                events += tx.events
    return waiting, dead, events


@dataclass
class World:
    """The engine's batch and what plain SQLAlchemy makes of the same messages."""

    desk: Desk
    engine: AsyncEngine
    db: asyncpg.Connection
    running: dict[str, Message] = field(default_factory=dict)

    async def compare(self, batch: list[Message]) -> None:
        """Raise `AssertionError` for a difference in rows, events or failures."""
        number = next(_numbers)
        names = {key: f"{number} {key}" for key in KEYS}
        self.running = {f"{number} {place}": message for place, message in enumerate(batch)}
        start = await self.desk.position()
        await self.desk.apply(
            *(
                Deposit(place, account=names[message.key], id=f"{number} {place}")
                for place, message in enumerate(batch)
            )
        )
        rows = await self.desk.backlog()
        failed = {row["offset"] - start for row in rows if row["offset"] >= start}
        assert self.desk.outages == []
        expected, events = await self._by_hand(batch, number)
        assert failed == expected
        for key, name in names.items():
            for table in ("wallet", "tagged"):
                mine = await row_of(self.db, table, name)
                assert mine == await row_of(self.db, table, f"hand {name}"), (table, key)
            published = [
                (sequence, f'{{"cents":{cents}}}')
                for one, sequence, cents in events
                if one == f"hand {name}"
            ]
            assert await events_of(self.db, name) == published, key

    async def _by_hand(
        self, batch: list[Message], number: int
    ) -> tuple[set[int], list[tuple[str, int, int]]]:
        async def run(place: int, session: AsyncSession) -> ByHand:
            tx, message = ByHand(session), batch[place]
            await message.run(tx, f"hand {number} {message.key}")
            if tx.is_broken:
                raise Broken
            return tx

        failed, _, events = await one_by_one(self.engine, [one.key for one in batch], run)
        return failed, events


@pytest.fixture
async def world(new_desk: NewDesk, db: asyncpg.Connection) -> World:
    """Return a desk whose handler does what a message says."""
    handlers = Handlers()
    desk = await new_desk(handlers, topic=TOPIC, breaker_keys=1_000_000)
    world = World(desk, desk.engine, db)

    @handlers.on(Deposited, topic=TOPIC, consumer="wallet", policy=Policy(attempts=20))
    async def wallet(event: Deposited, tx: Transaction) -> None:
        await world.running[tx.message.id].run(tx, event.account)

    return world


def drawing(examples: int) -> settings:
    """Hypothesis' settings for so many examples."""
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    )


# The attribute of the first message's row stands for a column that is not set.
KEPT = Message("b", [Step(rate, 8), Step(keep_aside, 4)])


# The row of the second message is loaded once: `change` does not see what `by_text` has changed.
ROLLED_BACK = Step(None, inner=[Step(tag, 1)], ends="rolled back")
SAVED = Step(None, inner=[Step(by_text, 1), Step(change, 1)])
LOADED_ONCE = Message("a", [Step(change, 1), ROLLED_BACK, SAVED])


@drawing(40)
@example(batch=[KEPT, Message("a", [Step(rename, 6)])])
@example(batch=[Message("a", [Step(change, 1)]), LOADED_ONCE])
@given(batch=batches)
async def test_a_batch_comes_out_as_plain_sqlalchemy_does(
    world: World, batch: list[Message]
) -> None:
    await world.compare(batch)


@pytest.mark.full
@pytest.mark.timeout(1_800)
@drawing(1_000)
@given(batch=batches)
async def test_many_batches_come_out_as_plain_sqlalchemy_does(
    world: World, batch: list[Message]
) -> None:
    await world.compare(batch)
