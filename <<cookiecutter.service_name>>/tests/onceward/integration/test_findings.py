"""What the status finds in PostgreSQL, and what it makes of what it could not measure."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from onceward.cli import health, status
from onceward.cli.health import Finding
from onceward.cli.status import Reading, Status
from onceward.settings import Settings

from .bank import Bank
from .outgoing import event, set_back, stage

BANK = Bank(deposits="deposits", balances="balances", name="bank")
NOON = datetime(2030, 1, 2, 12, tzinfo=UTC)
PARTS = ("positions", "topics", "readers", "backlog", "outbox", "relays", "rejected", "scheduled")

_STORE = """
INSERT INTO pipeline.backlog (key, lane, order_key, consumer, topic, partition, "offset", timestamp,
       headers, hash_version, reason, attempts, waited, holds, received_at, due_at)
SELECT sha256(($1 || n)::bytea), $2 + n % 32, sha256(($1 || n)::bytea), $1, 't', 0, n, 0, '[]', 1,
       'failed', 0, 0, false, clock_timestamp() - $4::interval, clock_timestamp() - $5::interval
  FROM generate_series(1, $3::integer) AS n
"""

Look = Callable[[], Awaitable[Status]]


@pytest.fixture
def look(db: asyncpg.Connection, settings: Callable[..., Settings], unused_tcp_port: int) -> Look:
    """Return the status, with no brokers."""

    async def ask() -> Status:
        nowhere = settings(kafka_bootstrap_servers=f"127.0.0.1:{unused_tcp_port}")
        return await status.look(db, BANK.service, nowhere)

    return ask


def judged(found: Status) -> dict[str, Finding]:
    """Return what is not well, by check."""
    return {one.check: one for one in health.judge(found) if one.level != "ok"}


async def store(
    db: asyncpg.Connection,
    consumer: str,
    count: int,
    *,
    lane: int = 0,
    received: timedelta = timedelta(0),
    due: timedelta = timedelta(0),
) -> None:
    """Store messages of as many keys, which were received so long ago and due so long ago."""
    await db.execute(_STORE, consumer, lane, count, received, due)


@pytest.mark.parametrize("part", [*PARTS, "memory", "retention", "stops"])
def test_unknown_values_are_findings_and_nothing_depending_on_them_is_ok(part: str) -> None:
    known = Status("bank", NOON, ahead_until=NOON.date() + timedelta(days=7))
    well = {one.check for one in health.judge(known) if one.level == "ok"}
    assert well == {one.check for one in health.judge(known)}
    known.unknown[part] = "PostgreSQL has not answered in 5 s"
    found = list(health.judge(known))
    (unknown,) = [one for one in found if one.level != "ok"]
    assert (unknown.level, unknown.check) == ("warning", part)
    assert unknown.found == "not known: PostgreSQL has not answered in 5 s"
    assert len(found) - 1 < len(well)


def test_readers_are_not_ok_while_a_group_is_in_a_rebalance() -> None:
    found = Status("bank", NOON, unknown={"readers": "the group bank is in a rebalance"})
    assert "readers" not in {one.check for one in health.judge(found) if one.level == "ok"}


async def test_waiting_events_are_wrong_if_it_is_unknown_whether_relays_run(
    look: Look,
    db: asyncpg.Connection,
    connect: Callable[[], Awaitable[asyncpg.Connection]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status, "_SECONDS", 2.0)
    await stage(db, [event(BANK.balances, 1)])
    await set_back(db, timedelta(minutes=10))
    other = await connect()
    async with other.transaction():
        await other.execute("LOCK TABLE pipeline.outbox_relay IN ACCESS EXCLUSIVE MODE")
        found = judged(await look())
    assert found["relays"].found == "not known: PostgreSQL has not answered in 2 s"
    assert found["outbox"].level == "wrong"
    assert "(it is not known whether they have relays) for 60" in found["outbox"].found


def stalled(behind: timedelta, moved: timedelta) -> Status:
    """Return the status of a partition that is a record behind, and of one that is read."""
    one = Reading("deposits", 0, 7, 0, 8, 1, NOON - moved, NOON - behind)
    other = Reading("deposits", 1, 8, 0, 8, 0, NOON, NOON, reader="10.0.0.1 8a1f02bc")
    found = Status("bank", NOON, readings=[one, other], are_readers_known=True)
    found.stages += status.topic_stages(found)
    return found


def test_lag_counts_from_its_beginning_not_from_the_last_position_change() -> None:
    found = judged(stalled(behind=timedelta(seconds=5), moved=timedelta(days=3)))
    assert "reads" not in found
    found = judged(stalled(behind=timedelta(seconds=65), moved=timedelta(days=3)))
    assert found["reads"].level == "wrong"


async def test_a_consumer_is_counted_however_many_rows_another_one_has(
    look: Look, db: asyncpg.Connection
) -> None:
    await store(db, "deposit", 20_000, lane=32)
    await store(db, "other", 5, lane=64, received=timedelta(hours=3))
    found = await look()
    backlog = {one.subject: one for one in found.of("backlog", "calls")}
    assert found.is_cut_off
    assert (backlog["deposit"].waiting or 0) > 0.9 * status.AT_MOST
    assert backlog["other"].waiting == 5
    assert 10_800 < backlog["other"].oldest < 11_100
    findings = judged(found)
    assert findings["calls"].found.startswith("calls of consumer other wait: 5, one for 10,")
    assert findings["consumers"].found.startswith("this service has no consumer other")


async def test_scheduled_events_that_are_not_moved_are_wrong(
    look: Look, db: asyncpg.Connection
) -> None:
    await db.execute(
        "INSERT INTO pipeline.scheduled (name, due_at, topic, event_id, source, type, content_type)"
        " VALUES ('a', now() - interval '10 s', 't', 'a', '/s', 'x', 'y')"
    )
    assert "scheduled" not in judged(await look()), "it has just become due"
    await db.execute("UPDATE pipeline.scheduled SET due_at = now() - interval '2 min'")
    found = judged(await look())["scheduled"]
    assert found.level == "wrong"
    assert found.found.startswith("no process has taken scheduled events for 12")
    assert "`service relay`" in found.advice


@pytest.mark.parametrize(("lane", "what"), [(0, "messages"), (32, "messages"), (64, "calls")])
async def test_work_that_no_worker_takes_is_wrong(
    look: Look, db: asyncpg.Connection, lane: int, what: str
) -> None:
    check = "calls" if lane == 64 else "backlog"
    await store(db, "deposit", 3, lane=lane, due=timedelta(minutes=10))
    await db.execute("UPDATE pipeline.backlog_lane SET released_at = now()")
    assert check not in judged(await look()), "its lanes have just been released"
    await db.execute("UPDATE pipeline.backlog_lane SET released_at = now() - interval '1 h'")
    found = judged(await look())[check]
    assert found.level == "wrong"
    assert found.found.startswith(f"no process has taken {what} of consumer deposit for 60")
    assert "`service consume`" in found.advice
    # A worker that is busy with other lanes takes them later.
    lease = "UPDATE pipeline.backlog_lane SET lease_until = now() + interval '9 s' WHERE lane = $1"
    await db.execute(lease, 1 if lane == 64 else 65)
    assert check in judged(await look()), "a worker of the other kind"
    await db.execute(lease, 95 if lane == 64 else 63)
    assert check not in judged(await look())


async def test_work_just_due_or_without_a_consumer_needs_no_worker(
    look: Look, db: asyncpg.Connection
) -> None:
    await db.execute("UPDATE pipeline.backlog_lane SET released_at = now() - interval '1 h'")
    await store(db, "deposit", 3, due=timedelta(seconds=5))
    await store(db, "gone", 3, due=timedelta(hours=1))
    assert judged(await look()).keys() == {"topics", "consumers", "processes"}
