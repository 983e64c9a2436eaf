"""Writers without a lock: a conflict is done again on the new row, and nothing is overwritten."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import asyncpg
import pytest
from sqlalchemy import Text
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Mapped, mapped_column

from pipeline import Conflict, Event, Versioned, Writer, Writing
from pipeline.database import create_engine, driver_of
from pipeline.settings import Settings

from tests.contract.bank import Base


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


async def test_writers_that_race_lose_nothing_and_their_events_have_the_order_of_the_versions(
    engine: AsyncEngine, db: asyncpg.Connection, conflicts: list[None]
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
def conflicts(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return what is counted as a conflict."""
    counted: list[None] = []
    monkeypatch.setattr("pipeline.telemetry.conflicted", lambda: counted.append(None))
    return counted


async def test_who_always_comes_too_late_writes_nothing_and_is_told(
    engine: AsyncEngine, db: asyncpg.Connection, conflicts: list[None]
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


async def test_writers_that_have_met_pause_for_different_times_of_a_second_at_most(
    engine: AsyncEngine, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(engine, source="/api", max_event_bytes=100_000, attempts=10)
    await writer.write(want)
    sleep, pauses = asyncio.sleep, list[float]()

    async def note(seconds: float) -> None:
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
    with pytest.raises(TypeError, match="called once for a row"):
        await writer.write(say_it_twice)


async def test_an_event_may_be_of_no_row(writer: Writer, db: asyncpg.Connection) -> None:
    async def say(writing: Writing) -> None:
        writing.publish(SeatWanted(wanted_by=7), key="2B")

    await writer.write(say)
    assert await told(db) == [(None, '{"wanted_by":7}', "2B")]


async def test_a_deadlock_is_tried_again_also_where_the_driver_tells_of_it(writer: Writer) -> None:
    """As it does of the COPY that writes the events."""
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
