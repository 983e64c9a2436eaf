"""Retention: what is old enough goes as a whole, what somebody still needs stays."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta

import asyncpg
import pytest

from onceward import Park, Reject
from onceward.apply import statements
from onceward.cli.commands import command_line
from onceward.operators import adopting
from onceward.retention import days, generations, partition_statements, partitions
from onceward.retention import statements as retention_statements
from onceward.retention.maintenance import Round, begin_round, run_retention
from onceward.retention.partitions import Partition, State
from onceward.servers.cluster import NotAdopted
from onceward.servers.database import autocommitting, create_engine
from onceward.settings import CLOCK_MARGIN, Settings

from .applier import Applier
from .bank import Bank
from .conftest import Command
from .outgoing import (
    IN_OLD,
    LARGE,
    OLD,
    allow,
    are_dead,
    event,
    make_old_day,
    publish_all,
    relaying,
    stage,
    stage_long_ago,
    waits,
)
from .outgoing import redrive as redrive_events
from .test_dead import redrive
from tests.contract.bank import Deposit, histories
from tests.servers.topics import create_topic, following, ids_in
from tests.servers.waiting import eventually

# They hold transactions open and wait for those of others.
pytestmark = pytest.mark.together

Connect = Callable[[], Awaitable[asyncpg.Connection]]


async def names(db: asyncpg.Connection, pattern: str) -> list[str]:
    """Return the tables that are partitions, or were some."""
    return [one.name for one in await partitions.like(db, pattern)]


async def close_generation(db: asyncpg.Connection, age: timedelta = timedelta()) -> None:
    """Close the current generation, so long ago."""
    current = await db.fetchval("SELECT current FROM pipeline.inbox_generation")
    await partitions.attach(db, "inbox", f"inbox_g{current + 1}", f"IN ({current + 1})")
    assert await generations.close_generation(db, current=current)
    await db.execute("UPDATE pipeline.inbox_closed SET closed_at = closed_at - $1::interval", age)


@pytest.fixture
async def old_day(db: asyncpg.Connection, settings: Callable[..., Settings]) -> asyncpg.Connection:
    """Return a connection to a database that holds an event of long ago, in a closed day."""
    await make_old_day(db)
    await stage_long_ago(db, 1)
    await run_retention(db, settings())
    return db


async def test_a_generation_goes_when_it_was_closed_long_enough_ago(
    db: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    chosen = settings(inbox_age=7_200)
    await close_generation(db, timedelta(minutes=121))
    await close_generation(db)
    assert (await run_retention(db, chosen)).dropped == ["inbox_g1"]
    assert "inbox_g1" not in await names(db, generations.PATTERN)
    kept = await db.fetchrow("SELECT oldest, current, since FROM pipeline.inbox_generation")
    assert kept is not None
    assert (kept["oldest"], kept["current"]) == (2, 3)
    age = datetime.now(UTC) - kept["since"] + CLOCK_MARGIN
    assert timedelta(minutes=121) <= age < timedelta(minutes=122), "when it was closed"
    assert (await run_retention(db, chosen)).dropped == []


async def test_only_messages_of_a_dropped_generation_are_too_old(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    """Trap 10."""
    _, applier = ledger
    first = Deposit(1, timestamp=_milliseconds(days=-9))
    await applier.apply(first)
    await close_generation(db, timedelta(days=9) - timedelta(minutes=1))
    await applier.apply(Deposit(2))
    await close_generation(db)
    assert (await run_retention(db, settings())).dropped == ["inbox_g1"]
    await applier.apply(first, Deposit(2))
    assert await histories(db) == {"ada": [1, 2]}
    dead = await db.fetch("SELECT id, reason FROM pipeline.backlog WHERE died_at IS NOT NULL")
    assert [(row["id"], row["reason"]) for row in dead] == [("1", "too old")]


def _milliseconds(**change: float) -> int:
    return round((datetime.now(UTC) + timedelta(**change)).timestamp() * 1_000)


async def test_parked_and_dead_messages_outlive_their_generation_and_are_applied_once(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    bank, applier = ledger
    bank.errors = {1: Park("no order yet", after=3_600), 2: Reject("no")}
    long_ago = _milliseconds(days=-9)
    sent = [Deposit(1, timestamp=long_ago), Deposit(2, account="bob", timestamp=long_ago)]
    for one in sent:
        await applier.apply(one)
    reasons = {("deposit", 0): "parked by its handler", ("deposit", 1): "rejected"}
    assert await applier.park() == reasons
    await close_generation(db, timedelta(days=9) - timedelta(minutes=1))
    assert (await run_retention(db, settings())).dropped == ["inbox_g1"]

    bank.errors = {}
    again = await applier.apply(*sent)
    assert [one.is_new for one in again] == [False, False]
    assert await applier.park() == reasons, "nor are they too old"
    assert await histories(db) == {}

    await redrive(applier)
    await applier.make_due()
    await applier.work_off()
    assert await histories(db) == {"ada": [1], "bob": [2]}
    assert await applier.backlog() == []
    again = await applier.apply(*sent)
    assert [one.is_new for one in again] == [False, False], "their markers are of today"
    assert await applier.park() == {}
    assert await histories(db) == {"ada": [1], "bob": [2]}


async def test_what_kafka_refuses_is_published_once_after_its_day_has_gone(
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
    missing: str,
    quick: Callable[..., Settings],
) -> None:
    """Both what is dead and what waits."""
    small = await new_topic(**{"max.message.bytes": "4000"})
    chosen = quick()
    await make_old_day(db)
    await stage_long_ago(db, "dead", small, payload=LARGE)
    await stage_long_ago(db, "waits", missing)
    async with relaying(chosen):
        await eventually(are_dead(db, ["dead"]))
        await eventually(waits(db, ["waits"]))

        async def is_dropped() -> bool:
            return OLD in (await run_retention(db, chosen)).dropped

        await eventually(is_dropped)
        await create_topic(kafka, missing)
        await allow(kafka, small, 100_000)
        async with following(kafka, small) as first, following(kafka, missing) as second:
            assert len(await redrive_events(db)) == 1
            await first.until_ids(["dead"])
            await second.until_ids(["waits"])
            await eventually(waits(db, []))
    assert await ids_in(kafka, small) == ["dead"]
    assert await ids_in(kafka, missing) == ["waits"]
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox_rejected") == 0


async def test_a_clock_that_is_ahead_lets_nothing_take_effect_twice(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    """The record says that it came after the generation was closed that remembers it."""
    _, applier = ledger
    early = Deposit(1, timestamp=_milliseconds(days=-9, minutes=50))
    await applier.apply(early)
    await close_generation(db, timedelta(days=9))
    assert (await run_retention(db, settings())).dropped == ["inbox_g1"]
    await applier.apply(early)
    assert await histories(db) == {"ada": [1]}


async def test_a_generation_into_which_a_transaction_looks_stays(
    db: asyncpg.Connection,
    connect: Connect,
    settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generations, "_ATTEMPTS", 2)
    await close_generation(db, timedelta(days=9))
    busy = await connect()
    async with busy.transaction():
        await busy.execute("SELECT pg_advisory_xact_lock_shared($1)", statements.GENERATION_LOCK)
        assert (await run_retention(db, settings())).dropped == []
        assert "inbox_g1" in await names(db, generations.PATTERN)
    assert (await run_retention(db, settings())).dropped == ["inbox_g1"]


async def test_a_day_is_dropped_only_when_old_enough_and_published(
    old_day: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    chosen = settings()
    (held,) = (await run_retention(old_day, chosen)).held
    due_at = datetime(2020, 1, 2, tzinfo=UTC) + timedelta(seconds=chosen.outbox_age)
    assert (held.name, held.due_at) == (OLD, due_at)
    assert "no relay publishes 64 shards" in str(held.needed_by)
    await publish_all(old_day)
    assert (await run_retention(old_day, chosen)).dropped == [OLD]
    assert OLD not in await names(old_day, days.PATTERN)
    assert await run_retention(old_day, chosen) == Round()
    assert await old_day.fetchval("SELECT count(*) FROM pipeline.outbox_closed") == 0


async def test_a_day_that_is_not_old_enough_stays(
    old_day: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    await publish_all(old_day)
    done = await run_retention(old_day, settings(outbox_age=10 * 365 * 86_400.0))
    assert (done.dropped, done.held) == ([], [])
    assert OLD in await names(old_day, days.PATTERN)


async def test_a_relay_that_runs_lets_days_go(
    old_day: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    """Also where nothing is published for a long time: the progress is stored all the same."""
    chosen = settings(relay_lease=1.5)
    async with relaying(chosen):

        async def is_dropped() -> bool:
            return OLD in (await run_retention(old_day, chosen)).dropped

        await eventually(is_dropped)


async def test_an_event_that_is_not_committed_yet_holds_its_day(
    old_day: asyncpg.Connection, connect: Connect, settings: Callable[..., Settings]
) -> None:
    """Trap 29. It lies above the xmax of a snapshot: a running transaction that none names."""
    other, writer = await connect(), await connect()
    async with other.transaction():
        await other.execute("SELECT pg_current_xact_id()")
        while True:
            transaction = writer.transaction()
            await transaction.start()
            await stage_long_ago(writer, 2)
            mine = await writer.fetchval("SELECT pg_current_xact_id()")
            xmax = await old_day.fetchval("SELECT pg_snapshot_xmax(pg_current_snapshot())")
            if mine >= xmax:
                break
            await transaction.rollback()  # another test's, begun later, has ended
        await old_day.execute("DELETE FROM pipeline.outbox_closed")
        for _ in range(2):
            (held,) = (await run_retention(old_day, settings())).held
            assert held.name == OLD
            await other.execute("COMMIT; BEGIN")
            await publish_all(old_day)
        await transaction.commit()
        (held,) = (await run_retention(old_day, settings())).held
        assert held.name == OLD, "it is committed, and not yet published"
        assert await old_day.fetchval("SELECT count(*) FROM pipeline.outbox") == 2
    await publish_all(old_day)
    assert (await run_retention(old_day, settings())).dropped == [OLD]


async def test_an_event_that_came_into_a_closed_day_holds_it(
    old_day: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    """As when the database's clock was set back for a while."""
    await publish_all(old_day)
    await stage_long_ago(old_day, 2)
    (held,) = (await run_retention(old_day, settings())).held
    assert held.name == OLD
    await publish_all(old_day)
    assert (await run_retention(old_day, settings())).dropped == [OLD]


async def test_a_day_is_closed_by_an_id_above_its_possible_writers(
    old_day: asyncpg.Connection, connect: Connect
) -> None:
    """Trap 29, and why the id is not a snapshot's xmax: running transactions may lie above it."""
    await old_day.execute("DELETE FROM pipeline.outbox_closed")
    writer = await connect()
    async with writer.transaction():
        await stage_long_ago(writer, 2)
        mine = await writer.fetchval("SELECT pg_current_xact_id()")
        # Nobody else may have ended meanwhile: databases share the ids.
        await old_day.execute(retention_statements.CLOSE_DAYS, [IN_OLD.date()])
        assert await old_day.fetchval("SELECT xid FROM pipeline.outbox_closed") > mine


async def test_who_holds_a_day_is_named(
    old_day: asyncpg.Connection, connect: Connect, settings: Callable[..., Settings]
) -> None:
    slow = await connect()
    await old_day.execute(
        "UPDATE pipeline.outbox_cursor SET owner = 'me', lease_until = now() + interval '1 minute'"
    )
    async with slow.transaction():
        await slow.execute("SELECT pg_current_xact_id()")
        pid = await slow.fetchval("SELECT pg_backend_pid()")
        await old_day.execute("DELETE FROM pipeline.outbox_closed")
        await run_retention(old_day, settings())
        await publish_all(old_day)
        (held,) = (await run_retention(old_day, settings())).held
        assert f"the relay waits for process {pid} of " in str(held.needed_by)
    await publish_all(old_day)
    assert (await run_retention(old_day, settings())).held == []


async def _another_old_day(db: asyncpg.Connection, chosen: Settings) -> str:
    """Let there be two days that may go, and return the name of the second one."""
    name, bounds = "outbox_p20200102", "FROM ('2020-01-02 00:00+00') TO ('2020-01-03 00:00+00')"
    await partitions.attach(db, "outbox", name, bounds)
    await run_retention(db, chosen)
    await publish_all(db)
    return name


async def test_a_day_that_somebody_has_locked_holds_up_no_other(
    old_day: asyncpg.Connection,
    connect: Connect,
    settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait = retention_statements.LIMIT_WAIT_FOR_DAY.replace("2s", "100ms")
    monkeypatch.setattr(retention_statements, "LIMIT_WAIT_FOR_DAY", wait)
    other = await _another_old_day(old_day, settings())
    vacuuming = await connect()
    async with vacuuming.transaction():
        await vacuuming.execute(f"LOCK TABLE pipeline.{OLD} IN ACCESS EXCLUSIVE MODE")
        pid = await vacuuming.fetchval("SELECT pg_backend_pid()")
        round_ = await run_retention(old_day, settings())
    (held,) = round_.held
    assert held.name == OLD
    assert f"process {pid} of " in str(held.needed_by)
    assert round_.dropped == [other]
    assert (await run_retention(old_day, settings())).dropped == [OLD]


async def test_days_of_a_restored_dump_stay_until_outbox_reset_and_republication(
    old_day: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    await run_retention(old_day, settings())
    await publish_all(old_day)
    await old_day.execute("UPDATE pipeline.outbox_cluster SET system_identifier = 1")
    engine = create_engine(settings(), name="bank")
    with pytest.raises(NotAdopted):
        async with autocommitting(engine) as driver:
            await run_retention(driver, settings())
    await engine.dispose()
    await adopting.adopt(old_day, keep_progress=False)
    (held,) = (await run_retention(old_day, settings())).held
    assert "no relay" in str(held.needed_by), "all of it is to be published again"
    await publish_all(old_day)
    assert (await run_retention(old_day, settings())).dropped == [OLD]


@asynccontextmanager
async def reading(connect: Connect) -> AsyncIterator[asyncpg.Connection]:
    """Hold a transaction that has read the whole outbox and the whole inbox."""
    connection = await connect()
    async with connection.transaction():
        await connection.fetch("SELECT FROM pipeline.outbox")
        await connection.fetch("SELECT FROM pipeline.inbox")
        yield connection


async def test_dropping_waits_for_users_of_a_table_without_blocking_others(
    old_day: asyncpg.Connection,
    connect: Connect,
    settings: Callable[..., Settings],
) -> None:
    """A plain DROP or DETACH would let every insert wait behind the reader."""
    keeper, writer = await connect(), await connect()
    await close_generation(old_day, timedelta(days=9))
    await publish_all(old_day)
    async with reading(connect):
        dropping = asyncio.create_task(run_retention(keeper, settings()))
        await eventually(lambda: _is_pending(old_day, "inbox_g1"))
        # A statement that had to wait would end with an error.
        await writer.execute("SET lock_timeout = '1ms'")
        for number in range(20):
            await stage(writer, [event("t", number)])
            await writer.execute(
                "INSERT INTO pipeline.inbox (generation, key, hash, hash_version, consumer, source,"
                ' id, type, topic, partition, "offset")'
                " VALUES (2, $1, 'h', 1, 'c', '/s', 'i', 't', 't', 0, 0)",
                str(number).encode(),
            )
            await writer.fetch("SELECT FROM pipeline.outbox")
            await writer.fetch("SELECT FROM pipeline.inbox WHERE generation >= 1 AND key = 'x'")
        assert not dropping.done()
    assert (await dropping).dropped == ["inbox_g1", OLD]


async def _is_pending(db: asyncpg.Connection, name: str) -> bool:
    return Partition(name, State.PENDING) in await partitions.like(db, name)


async def test_an_interrupted_drop_is_completed_in_the_next_round(
    old_day: asyncpg.Connection, connect: Connect, settings: Callable[..., Settings]
) -> None:
    """Trap 37: a pending detach hides the rows, so what must be checked is checked before."""
    keeper = await connect()
    await publish_all(old_day)
    async with reading(connect):
        dropping = asyncio.create_task(run_retention(keeper, settings()))
        await eventually(lambda: _is_pending(old_day, OLD))
        dropping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dropping
        await keeper.execute("SELECT")  # the server has cut it off by then
        keeper.terminate()
    assert await partitions.like(old_day, OLD) == [Partition(OLD, State.PENDING)]
    assert (await run_retention(old_day, settings())).dropped == [OLD]


async def test_what_is_detached_and_not_dropped_goes_in_the_next_round(
    old_day: asyncpg.Connection, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish_all(old_day)
    with monkeypatch.context() as patch:
        patch.setattr(partition_statements, "LIMIT_WAIT_FOR_LOCK", "SELECT 1 / 0")
        (held,) = (await run_retention(old_day, settings())).held
        assert held.needed_by == "division by zero"
    assert await partitions.like(old_day, OLD) == [Partition(OLD, State.DETACHED)]
    assert (await run_retention(old_day, settings())).dropped == [OLD]


async def test_a_day_stays_that_is_adopted_between_the_look_and_its_detaching(
    old_day: asyncpg.Connection,
    settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await publish_all(old_day)
    detach = partitions.detach

    async def late(connection: asyncpg.Connection, parent: str, one: Partition) -> None:
        await adopting.adopt(connection, keep_progress=False)
        await detach(connection, parent, one)

    monkeypatch.setattr(partitions, "detach", late)
    (held,) = (await run_retention(old_day, settings())).held
    assert "attach it again" in str(held.needed_by)
    assert await old_day.fetchval(f"SELECT count(*) FROM pipeline.{OLD}") == 1


async def test_a_day_that_a_person_has_detached_stays(
    old_day: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    """A relay does not see what it holds, and goes past it all the same."""
    await old_day.execute(f"ALTER TABLE pipeline.outbox DETACH PARTITION pipeline.{OLD}")
    async with relaying(settings(relay_lease=1)):
        await eventually(lambda: _relays_are_past(old_day))
    (held,) = (await run_retention(old_day, settings())).held
    assert "it was not detached by retention" in str(held.needed_by)
    assert await old_day.fetchval(f"SELECT count(*) FROM pipeline.{OLD}") == 1


async def _relays_are_past(db: asyncpg.Connection) -> bool:
    return bool(
        await db.fetchval(
            "SELECT bool_and(pg_snapshot_xmin(seen) > xid) FROM pipeline.outbox_cursor,"
            " pipeline.outbox_closed"
        )
    )


async def test_what_cannot_be_dropped_is_told_of_and_the_others_go(
    old_day: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    await close_generation(old_day, timedelta(days=9))
    await publish_all(old_day)
    await old_day.execute("CREATE VIEW mine AS SELECT * FROM pipeline.inbox_g1")
    done = await run_retention(old_day, settings())
    assert done.dropped == [OLD]
    assert [one.name for one in done.held] == ["inbox_g1"]
    assert "other objects depend on it" in str(done.held[0].needed_by)
    await old_day.execute("DROP VIEW mine")
    assert (await run_retention(old_day, settings())).dropped == ["inbox_g1"]


async def test_two_at_once_do_no_harm(
    old_day: asyncpg.Connection,
    connect: Connect,
    settings: Callable[..., Settings],
) -> None:
    """As when a person runs it meanwhile."""
    others = [f"outbox_p2020010{number}" for number in range(2, 8)]
    for number, day in enumerate(others, 2):
        bounds = f"FROM ('2020-01-0{number} 00:00+00') TO ('2020-01-0{number + 1} 00:00+00')"
        await partitions.attach(old_day, "outbox", day, bounds)
    for _ in range(3):
        await close_generation(old_day, timedelta(days=9))
    await run_retention(old_day, settings())
    await publish_all(old_day)
    keepers = [await connect() for _ in range(4)]
    rounds = await asyncio.gather(*(run_retention(one, settings()) for one in keepers))
    assert {name for one in rounds for name in one.dropped} <= {OLD, *others}
    await run_retention(old_day, settings())
    assert not {OLD, *others}.intersection(await names(old_day, days.PATTERN))


async def test_a_long_used_partition_is_reported_and_the_others_are_dropped(
    old_day: asyncpg.Connection,
    connect: Connect,
    settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partitions, "_DETACH_SECONDS", 0.5)
    await close_generation(old_day, timedelta(days=9))
    await publish_all(old_day)
    reader = await connect()
    async with reader.transaction():
        await reader.fetch("SELECT FROM pipeline.inbox")
        done = await run_retention(old_day, settings())
        assert done.dropped == [OLD]
        assert [one.name for one in done.held] == ["inbox_g1"]
        assert "uses it since" in str(done.held[0].needed_by)
    assert (await run_retention(old_day, settings())).dropped == ["inbox_g1"]


async def test_processes_take_turns_whatever_the_clock_was(
    old_day: asyncpg.Connection, connect: Connect
) -> None:
    others = [await connect() for _ in range(4)]
    begun = await asyncio.gather(*(begin_round(one, 50) for one in others))
    assert sorted(begun) == [False, False, False, True]
    began = "UPDATE pipeline.retention_round SET started_at = now() + $1::interval"
    await old_day.execute(began, timedelta(seconds=-40))
    assert not await begin_round(old_day, 50)
    await old_day.execute(began, timedelta(seconds=-60))
    assert await begin_round(old_day, 50)
    await old_day.execute(began, timedelta(days=1))
    assert await begin_round(old_day, 50), "the clock was set back"


async def test_a_day_that_is_not_over_any_more_is_opened_again(
    old_day: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    """As after the clock was ahead for a while. Records of days that are gone go, too."""
    today = datetime.now(UTC).date()
    gone = date(2019, 12, 31)
    await old_day.execute(
        "INSERT INTO pipeline.outbox_closed (day) SELECT unnest($1::date[])", [today, gone]
    )
    await run_retention(old_day, settings())
    closed = await old_day.fetch("SELECT day FROM pipeline.outbox_closed")
    assert [row["day"] for row in closed] == [date(2020, 1, 1)]


async def test_discarded_dead_letters_are_deleted_when_nobody_can_send_their_message_again(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    _, applier = ledger
    for amount in range(3):
        await applier.apply(Deposit(amount, value=b"rubbish"))
    assert await db.fetchval("SELECT count(*) FROM pipeline.backlog WHERE died_at < now()") == 3
    for offset, age in (1, 40), (2, 20):
        await db.execute(
            'UPDATE pipeline.backlog SET discarded_at = now() - $1::interval WHERE "offset" = $2',
            timedelta(days=age),
            offset,
        )
    assert (await run_retention(db, settings())).discarded == 0, "all is remembered"
    await close_generation(db, timedelta(days=45))
    assert (await run_retention(db, settings())).discarded == 0, "it stays as long as a marker"
    await close_generation(db, timedelta(days=10))
    assert (await run_retention(db, settings())).discarded == 1
    kept = await db.fetch('SELECT "offset" FROM pipeline.backlog ORDER BY "offset"')
    assert [row["offset"] for row in kept] == [0, 2], "a person has not decided, or lately"


async def test_tables_of_others_are_left_alone(
    db: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    await close_generation(db, timedelta(days=9))
    for name in (
        "outbox_p2020",
        "outbox_p20200101_copy",
        "outbox_p20201399",
        "inbox_g1_copy",
        "inbox_gx",
    ):
        await db.execute(f"CREATE TABLE pipeline.{name} ()")
    done = await run_retention(db, settings())
    assert (done.dropped, done.held) == (["inbox_g1"], [])


async def test_commands_show_until_when_partitions_are_kept_and_what_holds_them(
    old_day: asyncpg.Connection, unborn: Bank, commands: Callable[..., Command]
) -> None:
    service = commands(command_line(unborn.service), "retention")
    kept = await service("status")
    assert kept.exit_code == 0
    today = datetime.now(UTC)
    assert f"outbox_p{today:%Y%m%d}  until {today + timedelta(days=3):%Y-%m-%d} 00:00Z" in (
        kept.stdout
    )
    assert "inbox_g1          takes new markers\n" in kept.stdout
    assert "inbox_g2          created ahead\n" in kept.stdout
    held = f"{OLD}  due since 2020-01-04 00:00Z: no relay publishes 64 shards"
    assert held in kept.stdout
    done = await service("run")
    assert f"held     {held}" in done.stdout
    told = map(json.loads, (await service("status", "--json")).stdout.splitlines())
    assert {one["table"] for one in told} == {"inbox", "outbox"}
    (one,) = json.loads((await service("run", "--json")).stdout)["held"]
    assert one["partition"] == [OLD, "attached"]
