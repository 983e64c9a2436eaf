"""Retention: partitions and generations stand ready before anything needs them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import asyncpg
import pytest

from onceward.apply import statements
from onceward.observe.health import Health
from onceward.retention import generations, maintenance
from onceward.retention.maintenance import run_retention
from onceward.retention.partitions import _LOCK
from onceward.runtime import Part, serve
from onceward.servers.revisions import NotMigrated
from onceward.settings import Settings

from .applier import Applier
from .bank import Bank
from .outgoing import event, stage
from tests.conftest import Running
from tests.contract.bank import Deposit, histories
from tests.servers.databases import empty_database
from tests.servers.waiting import PATIENCE, eventually

Connect = Callable[[], Awaitable[asyncpg.Connection]]


async def made(db: asyncpg.Connection, parent: str) -> dict[str, str]:
    """Return the partitions that are attached, with their bounds."""
    rows = await db.fetch(
        "SELECT relname, pg_get_expr(relpartbound, oid) AS bounds FROM pg_inherits"
        " JOIN pg_class ON oid = inhrelid WHERE inhparent = $1::regclass ORDER BY relname",
        f"pipeline.{parent}",
    )
    return {row["relname"]: row["bounds"] for row in rows}


@pytest.fixture
async def bare(db: asyncpg.Connection) -> asyncpg.Connection:
    """Return a connection to a database that is migrated, and has no partitions yet."""
    for parent in ("outbox", "inbox"):
        for name in await made(db, parent):
            await db.execute(f"DROP TABLE pipeline.{name}")
    return db


def days(ahead: int) -> list[str]:
    today = datetime.now(UTC).date()
    return [f"outbox_p{today + timedelta(days=n):%Y%m%d}" for n in range(ahead + 1)]


async def test_days_and_generations_are_made_ahead(
    bare: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    await run_retention(bare, settings(outbox_days_ahead=3, inbox_generations_ahead=4))
    assert list(await made(bare, "outbox")) == days(3)
    assert await made(bare, "inbox") == {
        f"inbox_g{number}": f"FOR VALUES IN ({number})" for number in range(1, 6)
    }


async def test_days_follow_without_gaps_whatever_the_session_time_zone(
    bare: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    await bare.execute("SET timezone = 'America/St_Johns'")
    await run_retention(bare, settings(outbox_days_ahead=3))
    await bare.execute("SET timezone = 'UTC'")
    today = datetime.now(UTC).date()
    edges = [f"'{today + timedelta(days=n)} 00:00:00+00'" for n in range(5)]
    assert list((await made(bare, "outbox")).values()) == [
        f"FOR VALUES FROM ({start}) TO ({end})" for start, end in pairwise(edges)
    ]


async def test_a_second_round_changes_nothing_and_a_longer_horizon_adds_partitions(
    bare: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    await run_retention(bare, settings(outbox_days_ahead=2))
    before = await made(bare, "outbox")
    await run_retention(bare, settings(outbox_days_ahead=2))
    assert await made(bare, "outbox") == before
    await run_retention(bare, settings(outbox_days_ahead=5))
    assert list(await made(bare, "outbox")) == days(5)


_IS_HALF_DETACHED = "SELECT EXISTS (SELECT FROM pg_inherits WHERE inhdetachpending)"


@pytest.mark.parametrize("is_cut_short", [False, True], ids=["detached", "half detached"])
async def test_a_day_that_is_needed_and_was_detached_is_attached_again(
    db: asyncpg.Connection,
    connect: Connect,
    settings: Callable[..., Settings],
    is_cut_short: bool,
) -> None:
    """As after a jump of the clock, by which it was old for a while."""
    (today,) = days(0)
    await stage(db, [event("t", 1)])
    detach = f"ALTER TABLE pipeline.outbox DETACH PARTITION pipeline.{today}"
    if is_cut_short:
        reader = await connect()
        async with reader.transaction():
            await reader.fetch("SELECT FROM pipeline.outbox")
            detaching = asyncio.create_task(db.execute(f"{detach} CONCURRENTLY"))
            await eventually(lambda: reader.fetchval(_IS_HALF_DETACHED))
            detaching.cancel()
            await asyncio.wait({detaching})
    else:
        await db.execute(detach)
    with pytest.raises(asyncpg.CheckViolationError):
        await stage(db, [event("t", 2)])
    await run_retention(db, settings())
    await stage(db, [event("t", 2)])
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox") == 2


async def test_many_processes_at_once_make_each_partition_once(
    bare: asyncpg.Connection, connect: Connect, settings: Callable[..., Settings]
) -> None:
    connections = [await connect() for _ in range(6)]
    await asyncio.gather(*(run_retention(one, settings()) for one in connections))
    assert list(await made(bare, "outbox")) == days(7)
    assert list(await made(bare, "inbox")) == ["inbox_g1", "inbox_g2", "inbox_g3"]


async def test_a_process_that_waited_for_another_sees_the_partitions_it_made(
    bare: asyncpg.Connection, connect: Connect, settings: Callable[..., Settings]
) -> None:
    first, second = await connect(), await connect()
    chosen = settings(outbox_days_ahead=1, inbox_generations_ahead=1)
    async with first.transaction():
        await first.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
        waiting = asyncio.create_task(run_retention(second, chosen))
        await eventually(lambda: _somebody_waits(bare))
        await run_retention(first, chosen)
    await waiting
    assert list(await made(bare, "outbox")) == days(1)


async def _somebody_waits(db: asyncpg.Connection) -> bool:
    return bool(
        await db.fetchval(
            "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'advisory'"
        )
    )


async def test_partitions_are_made_while_transactions_use_the_table_and_block_none(
    db: asyncpg.Connection, connect: Connect, settings: Callable[..., Settings]
) -> None:
    busy, reading, keeper = [await connect() for _ in range(3)]
    async with busy.transaction(), reading.transaction():
        await busy.execute("SELECT pg_advisory_xact_lock_shared($1)", statements.GENERATION_LOCK)
        await busy.execute(_INSERT, "1")
        await reading.fetch("SELECT FROM pipeline.outbox")
        # A statement that had to wait would end with an error.
        for connection in (keeper, db):
            await connection.execute("SET lock_timeout = '1ms'")
        await run_retention(keeper, settings(outbox_days_ahead=9, inbox_generations_ahead=9))
        async with keeper.transaction():
            await run_retention(keeper, settings(outbox_days_ahead=10))
            # While the new partition is being attached, others go on writing.
            await db.execute(_INSERT, "2")
            await db.execute(_MARK)
            await busy.execute(_INSERT, "3")
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox") == 3
    # The first ones may have been made before midnight.
    assert list(await made(db, "outbox"))[-11:] == days(10)


_INSERT = """
INSERT INTO pipeline.outbox (topic, event_id, source, type, content_type)
VALUES ('t', $1, '/bank', 'x', 'y')
"""

_MARK = """
INSERT INTO pipeline.inbox
       (generation, key, hash, hash_version, consumer, source, id, type, topic, partition, "offset")
VALUES (1, 'k', 'h', 1, 'c', '/s', 'i', 't', 't', 0, 0)
"""


async def test_ids_xids_and_shards_are_filled_in_in_attached_partitions(
    bare: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    await run_retention(bare, settings())
    before = datetime.now(UTC) - timedelta(minutes=1)
    async with bare.transaction():
        xid = await bare.fetchval("SELECT pg_current_xact_id()")
        await stage(bare, [event("t", 1, "ada"), event("t", 2, None)])
    await stage(bare, [event("t", 3, "ada")])
    one, two, three = await bare.fetch("SELECT * FROM pipeline.outbox ORDER BY id")
    assert one["id"] < two["id"] < three["id"]
    assert one["xid"] == two["xid"] == xid < three["xid"]
    # The first byte of sha256, or without a key the id, modulo 64; fixed for ever, because cursors
    # depend on it.
    assert (one["shard"], two["shard"], three["shard"]) == (0xFD % 64, two["id"] % 64, 0xFD % 64)
    assert before < one["created_at"] < datetime.now(UTC) + timedelta(minutes=1)


async def test_nobody_can_choose_ids_and_shards_of_their_own(db: asyncpg.Connection) -> None:
    columns = "topic, event_id, source, type, content_type"
    for column in ("id", "shard"):
        with pytest.raises(asyncpg.GeneratedAlwaysError):
            await db.execute(
                f"INSERT INTO pipeline.outbox ({columns}, {column})"
                " VALUES ('t', 'e', '/bank', 'x', 'y', 1)"
            )


async def test_a_message_without_a_partition_waits_and_no_record_is_blamed(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    _, applier = ledger
    await applier.apply(Deposit(1))
    for name in await made(db, "outbox"):
        await db.execute(f"DROP TABLE pipeline.{name}")
    applying = asyncio.create_task(applier.apply(Deposit(2)))
    await eventually(lambda: len(applier.outages) > 3)
    assert "no partition of relation" in applier.outages[0]
    await run_retention(db, settings())
    await applying
    assert await histories(db) == {"ada": [1, 2]}
    assert await applier.backlog() == []


async def test_a_service_misses_a_partition_before_the_next_round(
    bank: Bank, db: asyncpg.Connection, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceward.retention.worker._AHEAD_SECONDS", 0.1)
    async with running(bank.service, Part.RELAY, retention_interval=3_600) as health:
        await eventually(lambda: "retention" not in health.reasons)
        today = days(0)[0]
        await db.execute(f"DROP TABLE pipeline.{today}")

        async def is_there() -> bool:
            return today in await made(db, "outbox")

        await eventually(is_there)


async def test_a_generation_is_closed_when_it_is_old_enough_and_not_before(
    db: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    await run_retention(db, settings(inbox_generation_age=3_600))
    assert await _generations(db) == (1, 1)
    await db.execute("UPDATE pipeline.inbox_generation SET opened_at = now() - interval '2 hours'")
    await run_retention(db, settings(inbox_generation_age=3_600))
    assert await _generations(db) == (2, 1)
    await run_retention(db, settings(inbox_generation_age=3_600))
    assert await _generations(db) == (2, 1)
    assert list(await made(db, "inbox"))[-1] == "inbox_g4"


async def test_a_generation_in_use_stays_open_without_long_waits(
    db: asyncpg.Connection, connect: Connect, settings: Callable[..., Settings]
) -> None:
    """Who wants to close it waits for those who are at it, and lets the next ones wait behind."""
    busy, following = await connect(), await connect()
    enter = "SELECT pg_advisory_xact_lock_shared($1)"
    # Far longer than it may let them wait, and than `busy` is at it.
    await following.execute(f"SET lock_timeout = '{PATIENCE}s'")
    async with busy.transaction():
        await busy.execute(enter, statements.GENERATION_LOCK)
        closing = asyncio.create_task(run_retention(db, settings(inbox_generation_age=0.001)))
        while not closing.done():
            await following.execute(enter, statements.GENERATION_LOCK)
        await closing
        assert await _generations(db) == (1, 1)
    await run_retention(db, settings(inbox_generation_age=0.001))
    assert await _generations(db) == (2, 1)


async def test_a_generation_is_closed_also_where_transactions_are_long_and_overlap(
    db: asyncpg.Connection,
    connect: Connect,
    settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no moment in which none of them runs."""
    monkeypatch.setattr(generations, "_LONGER_WAIT_SECONDS", PATIENCE)
    done = asyncio.Event()

    async def consume(one: asyncpg.Connection, delay: float) -> None:
        await asyncio.sleep(delay)
        while not done.is_set():
            async with one.transaction():
                await one.execute(
                    "SELECT pg_advisory_xact_lock_shared($1)", statements.GENERATION_LOCK
                )
                await asyncio.sleep(0.6)

    async with asyncio.TaskGroup() as tasks:
        for n in range(3):
            tasks.create_task(consume(await connect(), n * 0.2))
        await asyncio.sleep(0.5)
        await run_retention(db, settings(inbox_generation_age=0.001))
        done.set()
    assert await _generations(db) == (2, 1)


async def test_a_generation_that_cannot_be_closed_is_told_of(
    db: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    async def held() -> list[tuple[str, str | None]]:
        rows = [one async for one in maintenance.list_partitions(db, settings())]
        return [(one.name, one.needed_by) for one in rows if one.is_due]

    await run_retention(db, settings())
    assert await held() == []
    await db.execute("UPDATE pipeline.inbox_generation SET opened_at = now() - interval '9 days'")
    assert await held() == [("inbox_g1", generations._KEPT_OPEN)]
    await db.execute("UPDATE pipeline.inbox_generation SET opened_at = now() + interval '3 days'")
    assert await held() == [("inbox_g1", generations._KEPT_OPEN)]
    assert [one.name for one in (await run_retention(db, settings())).held] == ["inbox_g1"]
    assert await _generations(db) == (1, 1)


async def test_two_processes_close_a_generation_once(
    db: asyncpg.Connection, connect: Connect, settings: Callable[..., Settings]
) -> None:
    await db.execute("UPDATE pipeline.inbox_generation SET opened_at = now() - interval '1 year'")
    connections = [await connect() for _ in range(4)]
    await asyncio.gather(*(run_retention(one, settings()) for one in connections))
    assert await _generations(db) == (2, 1)


async def _generations(db: asyncpg.Connection) -> tuple[int, int]:
    row = await db.fetchrow("SELECT current, oldest FROM pipeline.inbox_generation")
    assert row is not None
    return row["current"], row["oldest"]


@pytest.fixture
async def empty(server_url: str, used_databases: list[str]) -> AsyncIterator[asyncpg.Connection]:
    """Return a connection to a database without tables."""
    url = await empty_database(server_url, used_databases)
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    yield connection
    await connection.close()


async def test_a_database_without_the_engines_tables_is_told_to_be_migrated(
    empty: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    with pytest.raises(NotMigrated, match="service migrate"):
        await run_retention(empty, settings())
    await empty.execute("CREATE SCHEMA pipeline")
    with pytest.raises(NotMigrated, match="service migrate"):
        await run_retention(empty, settings())


async def test_an_error_that_nobody_expects_when_partitions_are_made_ends_the_service(
    bank: Bank, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be found out when those made ahead are used up, days later."""
    original = maintenance.make_ahead
    calls: list[None] = []

    async def fail(connection: asyncpg.Connection, settings: Settings, **_: object) -> None:
        calls.append(None)
        if len(calls) > 1:
            raise RuntimeError("no partition for you")
        await original(connection, settings)

    monkeypatch.setattr("onceward.retention.worker.make_ahead", fail)
    health, stopping = Health(stall_after=3_600), asyncio.Event()
    serving = serve(bank.service, settings(), Part.RELAY, health=health, stopping=stopping)
    with pytest.raises(RuntimeError, match="no partition"):
        await asyncio.wait_for(serving, PATIENCE)


async def test_an_error_while_dropping_old_partitions_is_logged_and_ends_nothing(
    bank: Bank,
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rounds: list[None] = []

    async def fail(*_: object, **__: object) -> None:
        rounds.append(None)
        raise RuntimeError("nothing goes")

    monkeypatch.setattr("onceward.retention.worker.run_retention", fail)
    async with running(bank.service, Part.RELAY, retention_interval=0.05) as health:
        await eventually(lambda: len(rounds) > 3)
        assert "retention" not in health.reasons
    assert "a round of retention failed: RuntimeError: nothing goes" in caplog.text
