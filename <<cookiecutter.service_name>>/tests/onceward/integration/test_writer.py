"""Writers without a lock: a conflict is done again on the new row, and nothing is overwritten."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa
from sqlalchemy import Text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Mapped, mapped_column
from tenacity import RetryError, retry, stop_after_attempt, wait_none

from onceward import (
    Aggregate,
    Conflict,
    Event,
    Handlers,
    Service,
    Transaction,
    Versioned,
    Writer,
    Writing,
)
from onceward.observe import metrics
from onceward.operators import adopting
from onceward.servers import cluster
from onceward.servers.database import create_engine, driver_of
from onceward.servers.guard import HandlerFault
from onceward.servers.revisions import WrongDatabase
from onceward.servers.service_code import CancelledItself
from onceward.settings import Settings

from .applier import NewApplier
from .calling import take_calls
from .test_blocked import Slow
from .test_session import ENDED, ENDINGS, REFUSED, SAVEPOINTS
from tests.contract.bank import Base, Deposit, Deposited
from tests.onceward.blocking import interrupting
from tests.servers.pooler import POOLED


class Seat(Versioned, Base):
    """A seat, and who wants it."""

    __tablename__ = "seat"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    wanted_by: Mapped[int] = mapped_column(default=0)


class SeatWanted(Event, type="seat.wanted", topic="seats"):
    """Somebody wants it."""

    wanted_by: int


@pytest.fixture
async def engine(settings: Callable[..., Settings]) -> AsyncIterator[AsyncEngine]:
    """Return the engine of an API."""
    engine = create_engine(settings(concurrency=10), name="api")
    yield engine
    await engine.dispose()


@pytest.fixture
def writer(engine: AsyncEngine) -> Writer:
    """Return a writer."""
    return Writer(engine, source="/api", max_event_bytes=100_000)


async def want(writing: Writing) -> int:
    """Want the seat, after some thought."""
    seat = await writing.session.get(Seat, "1A")
    if seat is None:
        seat = Seat(id="1A", wanted_by=0)
        writing.session.add(seat)
    await asyncio.sleep(0.01)
    seat.wanted_by += 1
    writing.publish(SeatWanted(wanted_by=seat.wanted_by), of=seat)
    return seat.wanted_by


async def told(db: asyncpg.Connection) -> list[tuple[Any, ...]]:
    """Return sequence and payload of the events, in their order."""
    rows = await db.fetch(
        "SELECT sequence, convert_from(payload, 'UTF8'), convert_from(key, 'UTF8')"
        " FROM pipeline.outbox ORDER BY id"
    )
    return [tuple(row) for row in rows]


async def test_concurrent_writers_lose_nothing_and_events_follow_the_row_versions(
    engine: AsyncEngine, db: asyncpg.Connection, conflicts: list[int]
) -> None:
    """Trap 3."""
    writer = Writer(engine, source="/api", max_event_bytes=100_000, attempts=1_000)
    await writer.write(want)
    results = await asyncio.gather(*(writer.write(want) for _ in range(30)))
    assert sorted(results) == list(range(2, 32))
    assert conflicts, "there was no race"
    assert await db.fetchval("SELECT wanted_by FROM seat") == 31
    assert await told(db) == [(n, f'{{"wanted_by":{n}}}', "1A") for n in range(1, 32)]
    sources = await db.fetch("SELECT DISTINCT source FROM pipeline.outbox")
    assert [row["source"] for row in sources] == ["/api"]


@pytest.fixture
def conflicts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return what is counted as a conflict."""
    counted: list[int] = []
    monkeypatch.setattr(metrics.conflicts, "add", counted.append)
    return counted


async def test_who_always_comes_too_late_writes_nothing_and_is_told(
    engine: AsyncEngine, db: asyncpg.Connection, conflicts: list[int]
) -> None:
    await Writer(engine, source="/api", max_event_bytes=100_000).write(want)

    async def outrun(writing: Writing) -> None:
        seat = await writing.session.get_one(Seat, "1A")
        await db.execute("UPDATE seat SET version = version + 1, wanted_by = 100")
        seat.wanted_by = 0
        writing.publish(SeatWanted(wanted_by=0), of=seat)

    with pytest.raises(Conflict, match="each of 3 attempts"):
        await Writer(engine, source="/api", max_event_bytes=100_000, attempts=3).write(outrun)
    assert len(conflicts) == 3
    assert await db.fetchval("SELECT wanted_by FROM seat") == 100
    assert len(await told(db)) == 1


async def test_conflicting_writers_pause_for_random_times_of_at_most_a_second(
    engine: AsyncEngine, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(engine, source="/api", max_event_bytes=100_000, attempts=10)
    await writer.write(want)
    sleep, pauses = asyncio.sleep, list[float]()

    async def note(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        await sleep(0)

    async def outrun(writing: Writing) -> None:
        seat = await writing.session.get_one(Seat, "1A")
        await db.execute("UPDATE seat SET version = version + 1")
        seat.wanted_by = 0

    monkeypatch.setattr(asyncio, "sleep", note)
    for _ in range(2):
        with pytest.raises(Conflict):
            await writer.write(outrun)
    assert len(pauses) == 18
    assert max(pauses) <= 1
    assert not set(pauses[:9]) & set(pauses[9:]), "without jitter they meet again"


async def test_what_the_work_raises_is_not_tried_again_and_leaves_nothing(
    writer: Writer, db: asyncpg.Connection
) -> None:
    calls: list[None] = []

    async def fail(writing: Writing) -> None:
        calls.append(None)
        await want(writing)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await writer.write(fail)
    assert len(calls) == 1
    assert await db.fetchval("SELECT count(*) FROM seat") == 0
    assert await told(db) == []


async def test_work_that_cancels_itself_fails_with_an_ordinary_error(
    writer: Writer, db: asyncpg.Connection
) -> None:
    async def cancel(writing: Writing) -> None:
        await want(writing)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1)

    async def await_what_is_cancelled(writing: Writing) -> None:
        await want(writing)
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    for work in (cancel, await_what_is_cancelled):
        with pytest.raises(CancelledItself):
            await writer.write(work)
    assert await writer.write(want) == 1
    assert len(await told(db)) == 1


async def test_work_that_blocks_the_event_loop_fails_with_an_ordinary_error(
    writer: Writer, db: asyncpg.Connection
) -> None:
    async def at_once(writing: Writing) -> None:
        await want(writing)
        block()

    async def in_a_statement(writing: Writing) -> None:
        await want(writing)
        await writing.session.execute(sa.select(sa.bindparam("value", block, Slow)))

    async def and_suppresses_it(writing: Writing) -> None:
        with suppress(BaseException):
            block()
        await want(writing)

    with interrupting() as block:
        for work in (at_once, in_a_statement, and_suppresses_it):
            with pytest.raises(HandlerFault, match="the work blocks the event loop: await, or"):
                await writer.write(work)
    assert await writer.write(want) == 1
    assert len(await told(db)) == 1


async def test_a_retry_error_of_the_work_is_no_conflict(writer: Writer) -> None:
    @retry(stop=stop_after_attempt(2), wait=wait_none())
    async def call() -> None:
        raise ConnectionError

    async def work(writing: Writing) -> None:
        await call()

    with pytest.raises(RetryError):
        await writer.write(work)


async def test_an_event_is_told_of_a_row_that_is_written_and_once(writer: Writer) -> None:
    await writer.write(want)

    async def only_look(writing: Writing) -> None:
        seat = await writing.session.get_one(Seat, "1A")
        writing.publish(SeatWanted(wanted_by=0), of=seat)

    async def say_it_twice(writing: Writing) -> None:
        seat = await writing.session.get_one(Seat, "1A")
        seat.wanted_by += 1
        writing.publish(SeatWanted(wanted_by=1), of=seat)
        writing.publish(SeatWanted(wanted_by=2), of=seat)

    with pytest.raises(TypeError, match="is added or changed here"):
        await writer.write(only_look)
    with pytest.raises(TypeError, match="is called once"):
        await writer.write(say_it_twice)


async def test_an_event_may_be_of_no_row(writer: Writer, db: asyncpg.Connection) -> None:
    async def say(writing: Writing) -> None:
        writing.publish(SeatWanted(wanted_by=7), key="2B")

    await writer.write(say)
    assert await told(db) == [(None, '{"wanted_by":7}', "2B")]


async def test_a_deadlock_is_tried_again_also_where_the_driver_tells_of_it(writer: Writer) -> None:
    """As it does of the statement that writes the events."""
    both_have_one = asyncio.Barrier(2)
    attempts = 0

    async def lock(first: int, second: int) -> None:
        is_first = True

        async def work(writing: Writing) -> None:
            nonlocal attempts, is_first
            attempts += 1
            driver = await driver_of(await writing.session.connection())
            await driver.execute("SELECT pg_advisory_xact_lock($1)", first)
            if is_first:
                is_first = False
                await both_have_one.wait()
            await driver.execute("SELECT pg_advisory_xact_lock($1)", second)

        await writer.write(work)

    await asyncio.gather(lock(1, 2), lock(2, 1))
    assert attempts == 3


class Purse(Aggregate, Base):
    """What handlers and writers change."""

    __tablename__ = "purse"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    cents: Mapped[int] = mapped_column(default=0)


class PurseChanged(Event, type="purse.changed", topic="purses"):
    """The purse has changed."""

    cents: int


class Paid(Event, type="paid", topic="payments"):
    """Something is to be paid outside."""

    cents: int


async def pay(writing: Writing) -> int:
    """Add a cent, as a handler would."""
    purse = await writing.load_or_create(Purse, "ada")
    purse.cents += 1
    writing.publish(PurseChanged(cents=purse.cents), of=purse)
    return purse.cents


async def test_writers_and_handlers_share_an_aggregate_and_its_sequence(
    writer: Writer, new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    handlers = Handlers()

    @handlers.on(Deposited, topic="deposits", consumer="purse", loads=Purse.by("account"))
    async def deposit(event: Deposited, tx: Transaction) -> None:
        purse = await tx.load_or_create(Purse, event.account)
        purse.cents += 1
        tx.publish(PurseChanged(cents=purse.cents), of=purse)

    applier = await new_applier(handlers, topic="deposits")
    await writer.write(pay)
    await asyncio.gather(
        *(writer.write(pay) for _ in range(10)),
        applier.apply(*(Deposit(n) for n in range(10))),
    )
    assert await told(db) == [(n, f'{{"cents":{n}}}', "ada") for n in range(1, 22)]
    assert await db.fetchval("SELECT version FROM purse") == 21


async def test_the_work_may_be_any_awaitable(writer: Writer, db: asyncpg.Connection) -> None:
    assert await writer.write(lambda writing: asyncio.ensure_future(pay(writing))) == 1
    assert await told(db) == [(1, '{"cents":1}', "ada")]


async def test_a_handler_that_writes_by_a_writer_is_told_what_to_do(
    writer: Writer, new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    handlers = Handlers()

    @handlers.on(Deposited, topic="deposits", consumer="purse")
    async def deposit(event: Deposited, tx: Transaction) -> None:
        await writer.write(pay)

    applier = await new_applier(handlers, topic="deposits")
    await applier.apply(Deposit(1))
    (row,) = await applier.backlog()
    assert "use tx.session" in row["error"]
    assert await told(db) == []


async def test_a_row_that_is_neither_locked_nor_versioned_is_refused(
    writer: Writer, db: asyncpg.Connection
) -> None:
    await writer.write(pay)

    async def unlocked(writing: Writing) -> None:
        purse = await writing.session.get_one(Purse, "ada")
        purse.cents += 1
        writing.publish(PurseChanged(cents=purse.cents), of=purse)

    async def anything(writing: Writing) -> None:
        writing.publish(PurseChanged(cents=0), of="ada")  # type: ignore[arg-type]

    for work in (unlocked, anything):
        with pytest.raises(TypeError, match="locked"):
            await writer.write(work)
    assert len(await told(db)) == 1


async def test_an_aggregate_that_a_writer_changes_without_a_lock_is_refused(
    writer: Writer, db: asyncpg.Connection
) -> None:
    await writer.write(pay)

    async def unlocked(writing: Writing) -> None:
        purse = await writing.session.get_one(Purse, "ada")
        purse.cents += 1

    with pytest.raises(HandlerFault, match="without a lock"):
        await writer.write(unlocked)
    assert await db.fetchval("SELECT cents FROM purse") == 1


async def test_a_writer_calls_schedules_and_cancels(
    engine: AsyncEngine, db: asyncpg.Connection
) -> None:
    handlers = Handlers()

    take_calls(handlers, Paid, "pay")
    writer = Writer(engine, source="/api", max_event_bytes=100_000, handlers=handlers)

    async def work(writing: Writing) -> None:
        writing.call(Paid(cents=1), key="ada")
        for name in ("kept", "cancelled"):
            writing.publish(Paid(cents=2), key="ada", after=timedelta(days=1), name=name)
        writing.cancel("cancelled")

    await writer.write(work)
    assert await db.fetchval("SELECT array_agg(name) FROM pipeline.scheduled") == ["kept"]
    assert await db.fetchval("SELECT array_agg(consumer) FROM pipeline.backlog") == ["pay"]


async def test_what_a_writers_savepoint_staged_goes_with_it(
    writer: Writer, db: asyncpg.Connection
) -> None:
    async def work(writing: Writing) -> None:
        await want(writing)
        for change in (pay, want):
            with pytest.raises(ZeroDivisionError):
                async with writing.session.begin_nested():
                    if change is pay:
                        await pay(writing)
                    else:
                        other = Seat(id="other", wanted_by=0)
                        writing.session.add(other)
                        writing.publish(SeatWanted(wanted_by=0), of=other)
                    raise ZeroDivisionError
        await pay(writing)

    await writer.write(work)
    assert await told(db) == [(1, '{"wanted_by":1}', "1A"), (1, '{"cents":1}', "ada")]


async def swallowing(writing: Writing) -> None:
    await pay(writing)
    with suppress(DBAPIError):
        await writing.session.execute(sa.text("SELECT 1 / 0"))


async def test_work_that_goes_on_after_an_error_writes_nothing_and_says_so(
    writer: Writer, db: asyncpg.Connection
) -> None:
    with pytest.raises(HandlerFault, match="begin_nested"):
        await writer.write(swallowing)
    assert await db.fetchval("SELECT count(*) FROM purse") == 0
    assert await told(db) == []


@pytest.mark.parametrize(
    "swallows", [False, pytest.param(True, marks=pytest.mark.full)], ids=["", "swallowed"]
)
@pytest.mark.parametrize("end", [*ENDINGS, *SAVEPOINTS])
async def test_work_that_ends_its_transaction_writes_nothing_and_says_so(
    writer: Writer, db: asyncpg.Connection, end: Callable[..., Awaitable[None]], swallows: bool
) -> None:
    async def work(writing: Writing) -> None:
        await pay(writing)
        await writing.session.flush()
        with suppress(Exception) if swallows else nullcontext():
            await end(writing, "ada")

    with pytest.raises(ENDED, match=REFUSED):
        await writer.write(work)
    assert await db.fetchval("SELECT count(*) FROM purse") == 0
    assert await db.fetchval("SELECT count(*) FROM note") == 0
    assert await told(db) == []
    await writer.write(pay)
    assert await db.fetchval("SELECT count(*) FROM pipeline.guarded_transaction") == 0


async def test_what_a_writer_publishes_after_its_work_has_ended_is_refused(writer: Writer) -> None:
    kept: list[Writing] = []

    async def work(writing: Writing) -> None:
        kept.append(writing)

    await writer.write(work)
    with pytest.raises(HandlerFault, match="has ended"):
        kept[0].publish(SeatWanted(wanted_by=1), key="1A")
    with pytest.raises(HandlerFault, match="has ended"):
        _ = kept[0].session


async def test_a_service_lends_a_writer_that_needs_no_kafka(
    database_url: str, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_DATABASE_URL", database_url)
    monkeypatch.setenv("PIPELINE_DATABASE_POOLER", str(POOLED))
    monkeypatch.delenv("PIPELINE_KAFKA_BOOTSTRAP_SERVERS", raising=False)
    service = Service("bank", handlers=Handlers(), metadata=Base.metadata)
    async with service.writer() as writer:
        assert await writer.write(pay) == 1
    assert len(await told(db)) == 1
    assert await db.fetchval("SELECT source FROM pipeline.outbox") == "/bank"


async def test_a_writer_writes_nothing_into_the_database_of_another_service(
    settings: Callable[..., Settings], db: asyncpg.Connection
) -> None:
    await db.execute("COMMENT ON SCHEMA pipeline IS 'another'")
    service = Service("bank", handlers=Handlers(), metadata=Base.metadata)
    async with service.writer(settings()) as writer:
        for _ in range(2):
            with pytest.raises(WrongDatabase, match="is that of service another, and this is"):
                await writer.write(pay)
        assert await db.fetchval("SELECT count(*) FROM purse") == 0
        assert await told(db) == []
        await db.execute("COMMENT ON SCHEMA pipeline IS 'bank'")
        assert await writer.write(pay) == 1


@pytest.mark.parametrize("another", ["system_identifier = 1", "database_oid = 1"])
async def test_a_writer_writes_nothing_into_a_database_that_is_not_adopted(
    settings: Callable[..., Settings], db: asyncpg.Connection, another: str
) -> None:
    await db.execute(f"UPDATE pipeline.outbox_cluster SET {another}")
    service = Service("bank", handlers=Handlers(), metadata=Base.metadata)
    async with service.writer(settings()) as writer:
        with pytest.raises(cluster.NotAdopted):
            await writer.write(pay)
        assert await db.fetchval("SELECT count(*) FROM purse") == 0
        await adopting.adopt(db, keep_progress=True)
        assert await writer.write(pay) == 1
