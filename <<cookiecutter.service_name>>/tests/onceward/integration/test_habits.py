"""Whatever habits handlers have: a batch comes out as plain SQLAlchemy does, message by message."""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from itertools import count
from typing import Any, Literal, NamedTuple

import asyncpg
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, assume, event, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Text
from sqlalchemy.dialects.postgresql import TIMESTAMP, insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Mapped, mapped_column
from sqlalchemy.orm.attributes import flag_modified, instance_state

from onceward import Aggregate, Handlers, Policy, Reject, Transaction
from onceward.handlers import policy
from onceward.handlers.catalog import Catalog

from .applier import Applier, NewApplier
from .test_session import TOO_MUCH, TOPIC, Changed, Tagged, Wallet, events_of, row_of
from tests.contract.bank import Base, Deposit, Deposited

KEYS = ("a", "b")
CENT = Decimal("0.01")
_numbers = count(1)


class Rounded(Aggregate, Base):
    """A row whose key the database rounds."""

    __tablename__ = "rounded"

    id: Mapped[Decimal] = mapped_column(sa.Numeric(10, 2), primary_key=True)
    cents: Mapped[int] = mapped_column(default=0)
    seen: Mapped[str | None] = mapped_column(Text)
    """The fractions of the key that messages have found."""


class Second(Aggregate, Base):
    """A row whose key the database rounds in a way that the engine refuses."""

    __tablename__ = "second"

    id: Mapped[datetime] = mapped_column(TIMESTAMP(timezone=True, precision=0), primary_key=True)


Row = Wallet | Tagged | Rounded


class ByHand:
    """What a handler gets of `Transaction`, made of nothing but SQLAlchemy."""

    def __init__(self, session: AsyncSession) -> None:
        self.session = session
        self.events: list[tuple[str, int, int]] = []
        self.is_broken = False
        """Whether the message has done what the engine refuses."""
        self.is_lost = False
        """Whether the message has ended its own connection."""
        self._loaded: dict[tuple[type[Any], Any], Any] = {}
        self._kept: list[Any] = []

    async def load(self, entity: type[Any], key: Any) -> Any:
        key = rounded(key)
        row = self._loaded.get((entity, key))
        if row is None or row in self.session.deleted or instance_state(row).expired:
            await self.session.flush()
            wanted = sa.select(entity).where(entity.id == key).with_for_update()
            row = await self.session.scalar(wanted.execution_options(populate_existing=True))
            self._loaded[entity, key] = row
        return row if row is not None and row in self.session else None

    async def load_or_create(self, entity: type[Any], key: Any) -> Any:
        row = await self.load(entity, key)
        if row is None:
            row = self._loaded[entity, rounded(key)] = entity(id=key, version=0)
            for name in ("cents", "postings", "writes"):
                if hasattr(row, name):
                    setattr(row, name, 0)
            self._kept.append(row)
            self.session.add(row)
        return row

    def add(self, row: object) -> None:
        self.session.add(row)

    def publish(self, event: Any, *, of: Any) -> None:
        of.version += 1
        self.events.append((str(rounded(of.id)), of.version, event.cents))

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


def rounded(key: Any) -> Any:
    """Return a key as the database has it."""
    return key.quantize(CENT, ROUND_HALF_UP) if isinstance(key, Decimal) else key


@asynccontextmanager
async def savepoint(tx: Any) -> Any:
    """A savepoint, as a handler makes it."""
    make = tx.savepoint if isinstance(tx, ByHand) else tx.session.begin_nested
    async with make():
        yield


class Broken(Exception):
    """What handlers raise."""


Tx = Any
Habit = Callable[[Tx, str, int], Awaitable[None]]


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


def keys_of(key: str) -> tuple[Decimal, Decimal]:
    """Return the keys of a message's `Rounded` rows, as the database has them."""
    *others, number, letter = key.split()
    whole = Decimal(4 * int(number) + 2 * len(others) + KEYS.index(letter)).quantize(CENT)
    return whole, whole + CENT


async def round_off(tx: Tx, key: str, cents: int) -> None:
    row = await tx.load_or_create(Rounded, keys_of(key)[0] + Decimal(cents) / 1_000)
    row.cents += 1
    row.seen = f"{row.seen or ''} {row.id % 1}"
    tx.publish(Changed(cents=row.cents), of=row)


async def round_a_time(tx: Tx, key: str, cents: int) -> None:
    if isinstance(tx, ByHand):
        tx.is_broken = True
    else:
        await tx.load(Second, datetime(2026, 1, 1, microsecond=cents, tzinfo=UTC))


async def use_threads(tx: Tx, key: str, cents: int) -> None:
    loop = asyncio.get_running_loop()

    def load() -> Any:
        return asyncio.run_coroutine_threadsafe(tx.load_or_create(Wallet, key), loop).result()

    wallet = await loop.run_in_executor(None, load)  # which has no context variables
    wallet.cents += cents
    await asyncio.to_thread(partial(tx.publish, Changed(cents=wallet.cents), of=wallet))


async def query_in_a_thread(tx: Tx, key: str, cents: int) -> None:
    loop, query = asyncio.get_running_loop(), sa.select(Wallet.cents).where(Wallet.id == key)

    def find() -> Any:
        return asyncio.run_coroutine_threadsafe(tx.session.scalar(query), loop).result()

    found = await loop.run_in_executor(None, find)
    wallet = await tx.load_or_create(Wallet, key)
    wallet.owner = f"found {found} in a thread"


async def expire_in_a_thread(tx: Tx, key: str, cents: int) -> None:
    await tx.session.flush()
    await asyncio.get_running_loop().run_in_executor(None, tx.session.expire_all)


async def roll_back_in_a_thread(tx: Tx, key: str, cents: int) -> None:
    if isinstance(tx, ByHand):
        tx.is_broken = True
        return
    await tx.session.execute(sa.text("SELECT 1"))  # otherwise there is nothing to roll back
    roll_back = tx.session.sync_session.rollback
    with suppress(Exception):
        await asyncio.get_running_loop().run_in_executor(None, roll_back)
    if cents % 2:
        with suppress(Exception):
            await tx.session.execute(sa.text("SELECT 1"))


def cancel_the_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def swallow_a_cancellation(tx: Tx, key: str, cents: int) -> None:
    cancel_the_task()
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


async def cancel(tx: Tx, key: str, cents: int) -> None:
    cancel_the_task()
    await asyncio.sleep(0)


async def cancel_at_the_end(tx: Tx, key: str, cents: int) -> None:
    cancel_the_task()


async def cancel_a_statement(tx: Tx, key: str, cents: int) -> None:
    cancel_the_task()
    await tx.session.execute(sa.text("SELECT 1"))


async def await_what_is_cancelled(tx: Tx, key: str, cents: int) -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


async def set_constraints(tx: Tx, key: str, cents: int) -> None:
    names = "ALL" if cents % 2 else "reacting_vow_purse_id_fkey"
    mode = "IMMEDIATE" if cents % 3 else "DEFERRED"
    if isinstance(tx, ByHand):
        tx.is_broken = True
    else:
        with suppress(RuntimeError):
            await tx.session.execute(sa.text(f"SET CONSTRAINTS {names} {mode}"))


CODES = (
    *("53100", "58030", "57P01", "08006", "XX000", "25006", "22023", "40001", "55P03", "57014"),
    *("42P01", "23505"),
)
"""Of errors that statements raise: of servers, of data, of locks, of what the catalog lacks."""
_FREE = (*("40001", "55P03", "57014"), *("42P01", "42501", "42703", "42704", "42883", "3F000"))


async def blame_the_server(tx: Tx, key: str, cents: int) -> None:
    code = CODES[cents % len(CODES)]
    await tx.session.execute(
        sa.text(f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{code}'; END $$")
    )


async def blame_the_server_and_go_on(tx: Tx, key: str, cents: int) -> None:
    with suppress(DBAPIError):
        async with savepoint(tx):
            await blame_the_server(tx, key, cents)


async def die(tx: Tx, key: str, cents: int) -> None:
    await tx.session.flush()
    if isinstance(tx, ByHand):
        tx.is_lost = True
    await tx.session.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))


async def die_and_go_on(tx: Tx, key: str, cents: int) -> None:
    await tx.session.flush()
    with suppress(DBAPIError):
        await die(tx, key, cents)


PLAIN = (
    *(change, change, change, rename, rate, tag, tag_seen, gather),
    *(round_off, round_off, use_threads, swallow_a_cancellation),
)
FREE = (
    *(by_text, by_core, by_upsert, merge, delete, refresh, expire_all, flush),
    *(no_autoflush, count_all, set_local, set_for_good),
    *(query_in_a_thread, expire_in_a_thread, blame_the_server_and_go_on),
)
CANCELLING = cancel, cancel_at_the_end, cancel_a_statement, await_what_is_cancelled
DEADLY = die, die_and_go_on
HARMFUL = (
    *(fail, swallow, break_check, commit, forget, round_a_time),
    roll_back_in_a_thread,
    *(set_constraints, blame_the_server, blame_the_server, *CANCELLING, *DEADLY),
)
LAST = (expunge_all, set_for_good)
"""After which a handler's own rows are not what they were."""


@dataclass
class Step:
    """A habit, or a savepoint around some."""

    habit: Habit | None
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

    def names(self) -> Iterable[str]:
        if self.habit is not None:
            yield self.habit.__name__
        for step in self.inner:
            yield from step.names()


cents = st.integers(1, 12)
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


Lose = Callable[[], Awaitable[None]]
"""Ends the connection of a message when it is called for the first time."""


@dataclass
class Message:
    """What the handler of a message does."""

    key: str
    steps: list[Step]
    loses: int | None = None
    """The step before which the connection is lost, once, to something else."""

    async def run(self, tx: Tx, key: str, lose: Lose) -> None:
        for place, step in enumerate(self.steps):
            if place == self.loses:
                await lose()
            await step.run(tx, key)

    def names(self) -> Iterable[str]:
        """Yield the names of what the message does."""
        if self.loses is not None and self.loses < len(self.steps):
            yield LOST
        for step in self.steps:
            yield from step.names()


LOST = "the connection is lost"
# Of many messages: the batch is repeated for each.
loses = st.sampled_from((*[None] * 30, 0, 1))

# What is kept on an object outlives a savepoint as long as somebody has the object: any answer is
# right there.
plain = st.lists(
    st.builds(Step, st.sampled_from((*PLAIN, keep_aside)), cents), min_size=1, max_size=3
)
free = st.lists(steps, min_size=1, max_size=3)
last = st.lists(st.builds(Step, st.sampled_from(HARMFUL + LAST), cents), min_size=1, max_size=1)


messages = st.builds(
    lambda key, first, then, loses: Message(key, first + then, loses),
    st.sampled_from(KEYS),
    plain | free,
    st.just([]) | st.just([]) | st.just([]) | last,
    loses,
)
batches = st.lists(messages, min_size=1, max_size=6)


class Before(NamedTuple):
    """What earlier batches have taught the process."""

    sessions: bool
    """Whether a handler has needed a session of its own lately."""
    failures: bool
    """Whether a transaction has failed lately."""
    catalog: bool
    """Whether the reactions of tables are known."""

    def teach(self, applier: Applier, consumer: str) -> None:
        """Let the applier know that, and nothing else."""
        consume = applier.consume
        consume._own_until[consumer] = math.inf if self.sessions else 0.0
        consume._careful_until |= dict.fromkeys((False, True), math.inf if self.failures else 0.0)
        consume.turns._until.clear()
        if not self.catalog:
            consume._catalog = Catalog()


NOTHING = Before(False, False, False)
befores = st.builds(Before, st.booleans(), st.booleans(), st.booleans())


@dataclass
class Ends:
    """What became of messages, by their places in the batch."""

    waiting: dict[int, int] = field(default_factory=dict)
    """Attempts of those that wait."""
    dead: dict[int, int] = field(default_factory=dict)
    """Attempts of dead ones."""
    events: list[tuple[str, int, int]] = field(default_factory=list)
    """Those of the others."""


FAILURES = Broken, Reject, asyncio.CancelledError, sa.exc.SQLAlchemyError, sa.exc.SAWarning


async def one_by_one(
    engine: AsyncEngine,
    keys: Sequence[str],
    run: Callable[[int, ByHand], Awaitable[None]],
    later: Collection[int] = (),
) -> Ends:
    """Run what the message of each key does in a transaction, by nothing but SQLAlchemy.

    Those `later` are tried after the others.
    """
    ends = Ends()
    for place in sorted(range(len(keys)), key=lambda place: (place in later, place)):
        key = keys[place]
        if any(keys[other] == key for other in ends.waiting):
            ends.waiting[place] = 0  # it follows one that waits
            continue
        async with AsyncSession(engine, expire_on_commit=False) as session:
            tx = ByHand(session)
            try:
                # A task of its own, which the message may cancel.
                await asyncio.create_task(_commit(tx, run(place, tx)))
            except FAILURES as error:
                is_decided = isinstance(error, Reject) and not (tx.is_broken or tx.is_lost)
                (ends.dead if is_decided else ends.waiting)[place] = _spent(tx, error)
                with suppress(sa.exc.SAWarning):  # of changes since a lost connection
                    await session.rollback()
            else:
                ends.events += tx.events
    return ends


async def _commit(tx: ByHand, running: Awaitable[None]) -> None:
    await running
    if tx.is_broken:
        raise Broken
    await tx.session.flush()
    await tx.session.execute(sa.text("RESET search_path"))
    await tx.session.commit()


def _spent(tx: ByHand, error: BaseException) -> int:
    """Return the attempts that a message spends which fails so while it is alone."""
    if tx.is_broken:
        return 1
    code = getattr(getattr(error, "orig", None), "sqlstate", None) or ""
    is_free = tx.is_lost or code.startswith(("53", "58")) or code in _FREE
    return int(not is_free)


KILL = """
SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity
 WHERE datname = current_database() AND application_name = 'applier' AND xact_start IS NOT NULL
"""


@dataclass
class Trial:
    """An applier that gets batches, one after the other."""

    applier: Applier
    engine: AsyncEngine
    db: asyncpg.Connection
    consumer: str
    lost: set[str] = field(default_factory=set)
    """Messages whose connection was lost to something else."""

    async def lose(self, message: str) -> None:
        """End the connection over a message, once."""
        if message not in self.lost:
            self.lost.add(message)
            await self.db.fetch(KILL)

    async def apply(
        self, before: Before, deposits: Sequence[Deposit], names: Collection[str]
    ) -> tuple[set[int], Ends, set[int]]:
        """Apply the batch, and what is to be tried alone at once.

        Returns the places of the messages that are not applied with the others, what became of all,
        and the places of the markers. `names` are those of the habits.
        """
        for name in sorted({*names}):
            event(name)
        before.teach(self.applier, self.consumer)
        await self.db.execute("DELETE FROM pipeline.backlog")  # that of an earlier batch
        start = await self.applier.position()
        await self.applier.apply(*deposits)
        failed = {row["offset"] - start for row in await self.applier.backlog()}
        ends = Ends()
        if failed:
            await self.applier.work_off()
        for row in await self.applier.backlog():
            found = ends.waiting if row["died_at"] is None else ends.dead
            found[row["offset"] - start] = row["attempts"]
        if not {LOST, *(one.__name__ for one in DEADLY)} & {*names}:
            assert self.applier.outages == []
        self.applier.outages.clear()
        marked = await self.db.fetch(
            'SELECT "offset" FROM pipeline.inbox WHERE "offset" >= $1', start
        )
        return failed, ends, {row["offset"] - start for row in marked}

    async def compare(
        self,
        before: Before,
        deposits: Sequence[Deposit],
        names: Collection[str],
        run: Callable[[int, ByHand], Awaitable[None]],
    ) -> Ends:
        """Raise `AssertionError` for a difference in failures, attempts or markers.

        `run` does by hand what the message at a place does. Returns what that has come to.
        """
        failed, ends, marked = await self.apply(before, deposits, names)
        keys = [one.account for one in deposits]
        hand = await one_by_one(self.engine, keys, run, later=failed)
        not_applied = hand.waiting.keys() | hand.dead.keys()
        # A message that was alone when its connection was lost is tried again after the others.
        again = failed - not_applied if LOST in names else set()
        assert failed == not_applied | again
        assert (ends.waiting, ends.dead) == (hand.waiting, hand.dead)
        assert marked == {*range(len(deposits))} - not_applied
        assume(len({keys[place] for place in again}) < 2)  # keys have no order then
        return hand


async def nothing_is_lost() -> None:
    """Lose no connection."""


@dataclass
class World:
    """The engine's batch and what plain SQLAlchemy makes of the same messages."""

    trial: Trial
    running: dict[str, Message] = field(default_factory=dict)

    async def compare(self, before: Before, batch: list[Message]) -> None:
        """Raise `AssertionError` for a difference in rows, events, failures, attempts, markers."""
        number, db = next(_numbers), self.trial.db
        self.running = {f"{number} {place}": message for place, message in enumerate(batch)}
        deposits = [
            Deposit(place, account=f"{number} {message.key}", id=f"{number} {place}")
            for place, message in enumerate(batch)
        ]

        async def run(place: int, tx: ByHand) -> None:
            await batch[place].run(tx, f"hand {deposits[place].account}", nothing_is_lost)

        names = [name for message in batch for name in message.names()]
        hand = await self.trial.compare(before, deposits, names, run)
        for letter in KEYS:
            key = f"{number} {letter}"
            rounded = (keys_of(key), keys_of(f"hand {key}"))
            for mine, theirs in ((key, f"hand {key}"), *zip(*rounded, strict=True)):
                tables = ("wallet", "tagged") if mine is key else ("rounded",)
                for table in tables:
                    row = await row_of(db, table, mine)
                    assert row == await row_of(db, table, theirs), (table, letter)
                published = [
                    (sequence, f'{{"cents":{cents}}}')
                    for one, sequence, cents in hand.events
                    if one == str(theirs)
                ]
                assert await events_of(db, str(mine)) == published, letter


ALONE = Policy(attempts=20, schedule=(3_600,))
"""After its first attempt a message is not due in any test."""


@pytest.fixture
async def world(
    new_applier: NewApplier, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> World:
    """Return an applier whose handler does what a message says."""
    # Otherwise a message whose connection was lost is due again on a slow machine.
    monkeypatch.setattr(policy, "_SHORTEST_FOR_MIGRATION", 3_600.0)
    handlers = Handlers()
    applier = await new_applier(handlers, topic=TOPIC, breaker_keys=1_000_000)
    trial = Trial(applier, applier.engine, db, "wallet")
    world = World(trial)

    @handlers.on(Deposited, topic=TOPIC, consumer="wallet", policy=ALONE)
    async def wallet(event: Deposited, tx: Transaction) -> None:
        id = tx.message.id
        await world.running[id].run(tx, event.account, partial(trial.lose, id))

    return world


def drawing(examples: int) -> settings:
    """Hypothesis' settings for so many examples."""
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    )


def shares(batches: st.SearchStrategy[list[Any]]) -> Counter[str]:
    """Return in how many of 500 batches each habit is drawn, always the same ones."""
    found: Counter[str] = Counter()

    @settings(drawing(500), derandomize=True, database=None, phases=[Phase.generate])
    @given(batch=batches)
    def draw(batch: list[Any]) -> None:
        found.update({name for message in batch for name in message.names()})

    draw()
    return found


def test_each_habit_is_drawn_in_one_of_a_hundred_batches() -> None:
    found = shares(batches)
    for habit in (*PLAIN, *FREE, *HARMFUL, *LAST):
        assert found[habit.__name__] >= 5, (habit, found)
    assert found[LOST] >= 25


# The attribute of the first message's row stands for a column that is not set.
KEPT = Message("b", [Step(rate, 8), Step(keep_aside, 4)])


# The row of the second message is loaded once: `change` does not see what `by_text` has changed.
ROLLED_BACK = Step(None, inner=[Step(tag, 1)], ends="rolled back")
SAVED = Step(None, inner=[Step(by_text, 1), Step(change, 1)])
LOADED_ONCE = Message("a", [Step(change, 1), ROLLED_BACK, SAVED])


@drawing(40)
@example(before=NOTHING, batch=[KEPT, Message("a", [Step(rename, 6)])])
@example(before=NOTHING, batch=[Message("a", [Step(change, 1)]), LOADED_ONCE])
@given(before=befores, batch=batches)
async def test_a_batch_comes_out_as_plain_sqlalchemy_does(
    world: World, before: Before, batch: list[Message]
) -> None:
    await world.compare(before, batch)


@pytest.mark.full
@pytest.mark.timeout(1_800)
@drawing(1_000)
@given(before=befores, batch=batches)
async def test_many_batches_come_out_as_plain_sqlalchemy_does(
    world: World, before: Before, batch: list[Message]
) -> None:
    await world.compare(before, batch)
