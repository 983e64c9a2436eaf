"""Scheduled events: published when they are due, once, in order, unless they are taken back."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from onceward import Event, Handlers, Reject, Transaction
from onceward.cli.commands import command_line
from onceward.events.event import Unpublishable
from onceward.operators import scheduled
from onceward.relay import scheduled as moving
from onceward.relay import statements as relay_statements
from onceward.relay.scheduled import Scheduled
from onceward.retention.maintenance import run_retention
from onceward.settings import Settings

from .applier import Applier, NewApplier
from .bank import Bank
from .clock import Clock
from .conftest import Command
from .outgoing import Running, event, relaying, stage
from tests.contract.bank import Account, Deposit, Deposited
from tests.servers.topics import Tail, following
from tests.servers.waiting import eventually

Connect = Callable[[], Awaitable[asyncpg.Connection]]
Act = Callable[[Transaction], None]

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


class Reminded(Event, type="reminded", topic="reminders"):
    """Something that is to be said later."""

    what: str


@pytest.fixture
async def applier(new_applier: NewApplier) -> Applier:
    """Return an applier whose handler does what `acts` says of a deposit's amount."""
    handlers = Handlers()

    @handlers.on(Deposited, topic="deposits", consumer="remind", loads=Account.by("account"))
    async def remind(event: Deposited, tx: Transaction) -> None:
        acts[event.amount](tx)

    return await new_applier(handlers, topic="deposits")


acts: dict[int, Act] = {}
"""What the handler does, by amount."""


async def names(db: asyncpg.Connection) -> list[str]:
    """Return the names of what waits, the next to be due first."""
    return [one.name for one in await scheduled.waiting(db, 1_000_000)]


async def published(db: asyncpg.Connection) -> list[str]:
    """Return what the events in the outbox say, in their order."""
    rows = await db.fetch("SELECT payload FROM pipeline.outbox ORDER BY id")
    return [json.loads(row["payload"])["what"] for row in rows]


async def move_all(db: asyncpg.Connection) -> None:
    """Move all that is due."""
    while await Scheduled().move(db):
        pass


async def test_an_event_is_published_when_it_is_due_and_not_before(
    applier: Applier, db: asyncpg.Connection
) -> None:
    acts[1] = lambda tx: tx.publish(Reminded(what="later"), key="ada", after=HOUR)
    acts[2] = lambda tx: tx.publish(Reminded(what="now"), key="ada", at=LONG_AGO)
    await applier.apply(Deposit(1), Deposit(2))
    (now, later) = await scheduled.waiting(db, 10)
    assert (now.due_at, now.key, now.type, now.topic) == (LONG_AGO, "ada", "reminded", "reminders")
    assert abs(later.due_at - later.scheduled_at - HOUR) < timedelta(seconds=1)
    await move_all(db)
    assert await published(db) == ["now"]
    assert await names(db) == [later.event_id], "without a name it has that of its id"
    await db.execute("UPDATE pipeline.scheduled SET due_at = now()")
    await move_all(db)
    assert await published(db) == ["now", "later"]
    assert await names(db) == []
    row = await db.fetchrow("SELECT * FROM pipeline.outbox ORDER BY id DESC LIMIT 1")
    assert row is not None
    assert (row["event_id"], row["source"], row["subject"]) == (later.event_id, "/applier", "ada")
    assert datetime.now(UTC) - row["created_at"] < timedelta(minutes=1), "its time"


@pytest.fixture
async def relayed(
    kafka: str, new_topic: Callable[..., Awaitable[str]], settings: Callable[..., Settings]
) -> AsyncIterator[tuple[str, Tail, Running]]:
    """Return a topic, what comes there, and a relay that runs."""
    topic = await new_topic()
    async with following(kafka, topic) as tail, relaying(settings()) as relay:
        yield topic, tail, relay


async def test_a_relay_publishes_it(
    db: asyncpg.Connection, relayed: tuple[str, Tail, Running]
) -> None:
    topic, tail, _ = relayed
    await schedule(db, topic, [("soon", datetime.now(UTC) + timedelta(seconds=1))])
    await tail.until_ids(["soon"])
    assert tail.records[0].timestamp >= 0


async def test_what_keeps_due_events_back_holds_up_no_others(
    db: asyncpg.Connection, relayed: tuple[str, Tail, Running]
) -> None:
    topic, tail, relay = relayed
    await db.execute("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE undefined_table USING MESSAGE = 'not now'; END $$;
        CREATE TRIGGER refuse BEFORE DELETE ON pipeline.scheduled
           FOR EACH ROW EXECUTE FUNCTION refuse()
    """)
    await schedule(db, topic, [("due", LONG_AGO)])
    await stage(db, [event(topic, "other")])
    await tail.until_ids(["other"])
    await eventually(lambda: "not now" in relay.health.reasons.get("scheduled events", ""))
    await stage(db, [event(topic, "another")])
    await tail.until_ids(["other", "another"])
    await db.execute("DROP TRIGGER refuse ON pipeline.scheduled")
    await tail.until_ids(["other", "another", "due"])
    await eventually(lambda: relay.health.is_ready)


async def schedule(
    db: asyncpg.Connection, topic: str, due: list[tuple[str, datetime]], key: str = "ada"
) -> None:
    """Schedule events whose ids are their names."""
    await db.executemany(
        "INSERT INTO pipeline.scheduled (name, due_at, topic, key, payload, event_id, source, type,"
        " content_type) VALUES ($1, $2, $3, $4, '{}', $1, '/bank', 'reminded', 'application/json')",
        [(name, at, topic, key.encode()) for name, at in due],
    )


async def test_what_is_rolled_back_or_sent_twice_is_scheduled_never_or_once(
    applier: Applier, db: asyncpg.Connection
) -> None:
    def refuse(tx: Transaction) -> None:
        tx.publish(Reminded(what="refused"), after=HOUR, name="refused")
        raise Reject("no")

    acts[1] = refuse
    acts[2] = lambda tx: tx.publish(Reminded(what="twice"), after=HOUR)
    await applier.apply(Deposit(1), Deposit(2))
    await applier.apply(Deposit(2))
    (one,) = await scheduled.waiting(db, 10)
    assert one.name != "refused"


async def test_cancelled_and_replaced_scheduled_events_are_not_published(
    applier: Applier, db: asyncpg.Connection
) -> None:
    def change_its_mind(tx: Transaction) -> None:
        tx.publish(Reminded(what="first"), at=LONG_AGO, name="a")
        tx.cancel("a")
        tx.publish(Reminded(what="second"), at=LONG_AGO, name="b")
        tx.publish(Reminded(what="third"), at=LONG_AGO, name="b")
        tx.cancel("c")
        tx.publish(Reminded(what="fourth"), at=LONG_AGO, name="c")

    acts[1] = change_its_mind
    acts[2] = lambda tx: tx.cancel("c")
    acts[3] = lambda tx: tx.publish(Reminded(what="fifth"), after=HOUR, name="b")
    await applier.apply(Deposit(1))
    assert await names(db) == ["b", "c"]
    await applier.apply(Deposit(2))
    assert await names(db) == ["b"]
    await applier.apply(Deposit(3))
    await move_all(db)
    assert await published(db) == [], "its time was put off"
    await db.execute("UPDATE pipeline.scheduled SET due_at = now()")
    await move_all(db)
    assert await published(db) == ["fifth"]
    await applier.apply(Deposit(2, id="again"))
    assert await published(db) == ["fifth"], "too late"


@pytest.mark.parametrize("due", [{"at": LONG_AGO}, {"after": timedelta()}])
async def test_events_due_at_the_same_time_keep_their_staging_order(
    applier: Applier, db: asyncpg.Connection, due: dict[str, Any]
) -> None:
    for number, name in enumerate("cdab", start=1):
        acts[number] = partial(stage_twice, what=f"{number}", name=name, **due)
    await applier.apply(*(Deposit(number) for number in range(1, 5)))
    await move_all(db)
    assert await published(db) == ["1", "2", "3", "4", "4, the last"]


def stage_twice(tx: Transaction, what: str, name: str, **due: Any) -> None:
    """Schedule an event, and once more one whose place is taken by the next message's."""
    tx.publish(Reminded(what=what), key="ada", name=name, **due)
    tx.publish(Reminded(what=f"{what}, the last"), key="ada", name="last", **due)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (TypeError, {"at": datetime(2030, 1, 1)}),  # noqa: DTZ001
        (TypeError, {"at": LONG_AGO, "after": HOUR}),
        (TypeError, {"name": "no time"}),
        (TypeError, {"after": HOUR, "sequence": 7}),
        (Unpublishable, {"after": HOUR, "name": ""}),
        (Unpublishable, {"after": HOUR, "name": "a\x00b"}),
        (Unpublishable, {"after": HOUR, "name": "ä" * 251}),
    ],
)
async def test_what_cannot_be_meant_is_the_handlers_error(
    applier: Applier, db: asyncpg.Connection, error: type[Exception], arguments: dict[str, object]
) -> None:
    raised: list[type[Exception]] = []

    def try_it(tx: Transaction) -> None:
        with pytest.raises((TypeError, Unpublishable)) as info:
            tx.publish(Reminded(what="never"), **arguments)  # type: ignore[arg-type]
        raised.append(info.type)

    acts[1] = try_it
    await applier.apply(Deposit(1))
    assert raised == [error]
    assert await names(db) == []


async def test_racing_and_dying_relays_publish_each_scheduled_event_once_in_order(
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
    settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moving, "_AT_ONCE", 20)
    monkeypatch.setattr(moving, "_LOOK_SECONDS", 0.01)
    topic = await new_topic()
    keys = [f"key-{number}" for number in range(5)]
    for key in keys:
        due = [(f"{key}/{number:03}", LONG_AGO + number * HOUR) for number in range(200)]
        await schedule(db, topic, due[::-1], key)
    chosen = settings(relay_lease=3)
    async with following(kafka, topic) as tail:
        for _ in range(4):
            async with relaying(chosen) as one, relaying(chosen):
                await asyncio.sleep(0.1)
                await one.kill()
        async with relaying(chosen), relaying(chosen):
            await eventually(lambda: len(set(tail.ids)) == 1_000)
        assert tail.first_ids() == {
            key.encode(): [f"{key}/{number:03}" for number in range(200)] for key in keys
        }
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox") == 1_000


async def test_many_that_are_due_at_once_hold_up_no_other_event(
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
    settings: Callable[..., Settings],
) -> None:
    topic = await new_topic()
    await db.execute(
        "INSERT INTO pipeline.scheduled (name, due_at, topic, key, payload, event_id, source, type,"
        " content_type) SELECT n, now(), $1, n::text::bytea, '{}', n, '/bank', 'reminded', 'x'"
        " FROM generate_series(1, 20000) AS n",
        topic,
    )
    async with following(kafka, topic) as tail, relaying(settings()):
        await tail.until(lambda: len(tail.records) > 100)
        await stage(db, [event(topic, "other", "other")])
        before = 20_000 - await db.fetchval("SELECT count(*) FROM pipeline.scheduled")
        # Where a lease ends too early, some come twice.
        await tail.until(lambda: len(tail.records) > 20_000 and len(set(tail.ids)) == 20_001)
    # Behind what had been moved by then, and a few moves.
    assert list(dict.fromkeys(tail.ids)).index("other") < before + 10 * moving._AT_ONCE


async def test_a_process_stopped_during_a_move_does_not_block_the_others(
    db: asyncpg.Connection, connect: Connect
) -> None:
    """Trap 35."""
    await schedule(db, "t", [("a", LONG_AGO), ("b", LONG_AGO)])
    stopped = await connect()
    transaction = stopped.transaction()
    await transaction.start()
    # As far as `move` comes before it is stopped.
    assert await stopped.fetchval(relay_statements.LOCK_MOVE, moving.MOVE_LOCK)
    await stopped.execute(relay_statements.MOVE_SCHEDULED, 10)

    async def others_have_moved_them() -> bool:
        await move_all(db)
        return not await names(db)

    await eventually(others_have_moved_them)
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox") == 2


async def test_one_that_is_being_taken_back_is_not_waited_for(
    db: asyncpg.Connection, connect: Connect
) -> None:
    await schedule(db, "t", [("a", LONG_AGO), ("b", LONG_AGO)])
    other = await connect()
    transaction = other.transaction()
    await transaction.start()
    assert await scheduled.cancel(other, ["a"], operator="ann", why="a test") == ["a"]
    audited = await other.fetchrow("SELECT who, action, subject, why FROM pipeline.audit")
    assert tuple(audited) == ("ann", "cancel", "scheduled event a", "a test")
    await move_all(db)
    assert await names(db) == ["a"]
    await transaction.rollback()
    await move_all(db)
    assert await names(db) == []
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox") == 2


async def test_clock_changes_lose_no_event_and_publish_none_twice(
    db: asyncpg.Connection, connect: Connect, clock: Clock, settings: Callable[..., Settings]
) -> None:
    """By up to six hours, either way, while two relays look."""
    rng = random.Random(7)
    other = await connect()
    due: dict[str, datetime] = {}
    seen: list[str] = []
    # Days are there for as far back as it goes.
    await clock.set(-6 * HOUR)
    await run_retention(db, settings())
    for number in range(60):
        await clock.set(rng.uniform(-6, 6) * HOUR)
        name, at = f"{number:02}", datetime.now(UTC) + rng.uniform(-6, 6) * HOUR
        due[name] = at
        await schedule(db, "t", [(name, at)])
        await asyncio.gather(Scheduled().move(db), Scheduled().move(other))
        now = await db.fetchval("SELECT clock_timestamp()")
        ids = await staged(db)
        assert ids[: len(seen)] == seen, "none is taken back"
        assert {one for one in ids[len(seen) :] if due[one] > now} == set()
        assert not {one for one, at in due.items() if at <= now} - set(ids), "what is due is there"
        seen = ids
    await clock.set(12 * HOUR)
    await move_all(db)
    assert sorted(await staged(db)) == sorted(due)
    assert await names(db) == []


async def staged(db: asyncpg.Connection) -> list[str]:
    """Return the ids of the events in the outbox, in their order."""
    rows = await db.fetch("SELECT event_id FROM pipeline.outbox ORDER BY id")
    return [row["event_id"] for row in rows]


async def test_what_is_due_is_found_by_an_index_however_much_waits(db: asyncpg.Connection) -> None:
    """Trap 20."""
    await db.execute(
        "INSERT INTO pipeline.scheduled (name, due_at, topic, event_id, source, type, content_type)"
        " SELECT n, now() + n * interval '1 s', 't', n, '/s', 'x', 'y'"
        " FROM generate_series(1, 200000) AS n"
    )
    for statistics in ("SELECT", "ANALYZE pipeline.scheduled"):
        await db.execute(statistics)
        for statement, arguments in (
            (relay_statements.IS_SCHEDULED_DUE, ()),
            (relay_statements.MOVE_SCHEDULED, (1_000,)),
        ):
            plan = await db.fetchval(
                f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", *arguments
            )
            text = json.dumps(json.loads(plan))
            assert "scheduled_due_idx" in text
            assert json.loads(plan)[0]["Plan"]["Shared Hit Blocks"] < 500, "of 3,000"


async def test_the_commands_list_what_waits_and_take_it_back(
    db: asyncpg.Connection, unborn: Bank, commands: Callable[..., Command]
) -> None:
    service = commands(command_line(unborn.service), "scheduled")
    assert "No event is scheduled." in (await service("list")).stdout
    name = f"reminder-{uuid4().hex[:6]}"
    await schedule(db, "t", [(name, LONG_AGO), ("other", LONG_AGO + HOUR)])
    listed = (await service("list")).stdout.splitlines()
    assert [line.split() for line in listed[:2]] == [
        ["due", "name", "type", "topic", "key"],
        ["2020-01-01", "00:00:00Z", name, "reminded", "t", "ada"],
    ]
    assert len(listed) == 3
    (one,) = (await service("list", "--json", "--limit", "1")).stdout.splitlines()
    assert json.loads(one)["name"] == name
    done = await service("cancel", name, "unknown")
    assert done.exit_code == 1
    assert f"cancelled {name}" in done.output
    assert "not scheduled, or published already: unknown" in done.output
    assert await names(db) == ["other"]


def later(name: str) -> Act:
    return lambda tx: tx.publish(Reminded(what=name), after=HOUR, name=name)


@pytest.mark.parametrize("second", [later, lambda name: lambda tx: tx.cancel(name)])
async def test_names_are_locked_in_their_order_whatever_is_done(
    applier: Applier, db: asyncpg.Connection, connect: Connect, second: Callable[[str], Act]
) -> None:
    """Two transactions with the same names wait for each other without a deadlock."""
    acts.update({1: later("b"), 2: later("a"), 3: lambda tx: tx.cancel("b"), 4: second("a")})
    await applier.apply(Deposit(1))
    await applier.apply(Deposit(2), start=1)
    other = await connect()
    async with other.transaction():
        await other.execute("SELECT FROM pipeline.scheduled WHERE name = 'a' FOR UPDATE")
        waiting = asyncio.create_task(applier.apply(Deposit(3), Deposit(4), start=2))
        blocked = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"
        await eventually(lambda: db.fetchval(blocked))
        free = "SELECT name FROM pipeline.scheduled ORDER BY name FOR UPDATE SKIP LOCKED"
        assert [row["name"] for row in await db.fetch(free)] == ["b"]
    await waiting
    assert "b" not in await names(db)
