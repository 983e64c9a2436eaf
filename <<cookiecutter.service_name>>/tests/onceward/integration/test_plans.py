"""How the hot statements are planned on a million rows: by which indexes, and how many blocks.

Each is asked as the engine asks it, with a plan for these arguments and with a generic plan, with
the statistics of a table that was nearly empty, and with new ones, on each major version.
Trap 20.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from hashlib import md5

import asyncpg
import pytest
from sqlalchemy import make_url

from onceward.apply import inbox, positions
from onceward.apply.item import Item
from onceward.apply.positions import Anchor, Generations, Move, Slot
from onceward.cli import dead_events
from onceward.cli.dead import Selection
from onceward.events.codec import CloudEvents
from onceward.observe.health import Health
from onceward.operators import statements as operator_statements
from onceward.relay import rejected, window
from onceward.relay import statements as relay_statements
from onceward.relay.cursor import Cursor
from onceward.relay.rejected import Rejected
from onceward.relay.rejections import Rejection
from onceward.relay.window import Progress
from onceward.schema import SHARDS
from onceward.settings import Settings

from .applier import store_of
from .outgoing import ALL_SHARDS, event, stage, unleased
from .plans import MAJOR_VERSIONS, Explaining, connected, execute, only, server_of
from tests.contract.bank import Base, Deposit
from tests.onceward.integration.bank import Bank
from tests.servers.databases import built, migrations_of_the_engine

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # with what is filled

_LOAD = """
-- Autovacuum of its own would decide which statistics there are.
DO $$
DECLARE part regclass;
BEGIN
    FOR part IN SELECT inhrelid FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
                 WHERE relkind = 'r' LOOP
        EXECUTE format('ALTER TABLE %s SET (autovacuum_enabled = off)', part);
    END LOOP;
    ALTER TABLE pipeline.position SET (autovacuum_enabled = off);
    ALTER TABLE pipeline.outbox_rejected SET (autovacuum_enabled = off);
    UPDATE pipeline.inbox_generation SET current = 3, oldest = 1;
END $$;

CREATE PROCEDURE fill(first integer, last integer, rows integer) LANGUAGE plpgsql AS $$
BEGIN
    FOR part IN first .. last LOOP
        INSERT INTO pipeline.outbox (topic, key, payload, event_id, source, type, content_type)
        SELECT 't', ('key-' || n % 1000)::bytea, '{"some": "payload"}', part || '/' || n,
               '/bank', 'balance.changed', 'application/json'
          FROM generate_series(1, rows) AS n;
        INSERT INTO pipeline.inbox (generation, key, hash, hash_version, consumer, source, id,
                                    type, topic, partition, "offset")
        SELECT 1 + n % 3, decode(md5(part || '/' || n), 'hex'), 'hash', 0, 'deposit', '/tests',
               part || '/' || n, 'deposited', 't', 0, n
          FROM generate_series(1, rows) AS n;
        INSERT INTO pipeline.position (consumer_group, topic, partition, next_offset)
        SELECT 'group-' || part, 't', n, 1 FROM generate_series(1, 10) AS n;
        COMMIT;
    END LOOP;
END $$;
"""
# One topic has many that wait, and another some.
_REFUSE = f"""
INSERT INTO pipeline.outbox_rejected ({relay_statements.COLUMNS})
SELECT id, created_at, CASE id % 20 WHEN 0 THEN 'large' ELSE 'missing' END, key, payload, event_id,
       source, type, subject, sequence, content_type, traceparent, tracestate, baggage, headers,
       dataref, datalength, datachecksum
  FROM pipeline.outbox WHERE id % 4 = 0 AND id < 900000
"""


CHOSEN = Settings.model_validate(
    {"database_url": "postgresql+asyncpg://", "kafka_bootstrap_servers": "unused:9092"}
)


@dataclass(frozen=True)
class Large:
    """A database with a million events and a million markers, in three generations."""

    url: str
    empty: window.Snapshot
    """When it held nothing."""
    full: window.Snapshot
    """When all but the last 100 events were there."""


@pytest.fixture(scope="module", params=MAJOR_VERSIONS)
def loaded(server_url: str, request: pytest.FixtureRequest) -> Iterator[Large]:
    """Fill a database once, of each server."""
    with (
        server_of(request.param, server_url) as url,
        built(url, migrations_of_the_engine(), Base.metadata) as name,
    ):
        database = make_url(url).set(drivername="postgresql", database=name)
        yield asyncio.run(_load(database.render_as_string(hide_password=False)))


@pytest.fixture(scope="module", params=["before ANALYZE", "after ANALYZE"])
def large(loaded: Large, request: pytest.FixtureRequest) -> Large:
    """Return it with the statistics of a nearly empty one, and then with its own."""
    if request.param == "after ANALYZE":
        asyncio.run(execute(loaded.url, "ANALYZE"))
    return loaded


async def _load(url: str) -> Large:
    await execute(url, _LOAD, "CALL fill(1, 1, 100)", "ANALYZE")
    async with connected(url) as connection:
        empty = await _now(connection)
        # One after the other: rows of two writers would lie in two places, and each step from one
        # to the other count as a block.
        await execute(url, "CALL fill(2, 1001, 1000)")
        await execute(url, _REFUSE)
        full = await _now(connection)
        await stage(connection, [event("t", number, f"key-{number}") for number in range(100)])
        return Large(url, empty, full)


async def _now(connection: asyncpg.Connection) -> window.Snapshot:
    """Return what has ended by now, as if other tests had nothing running: each costs a search."""
    _, xmax, _ = await connection.fetchval("SELECT pg_current_snapshot()")
    return (xmax, xmax, ())


@pytest.fixture(params=["force_custom_plan", "force_generic_plan"])
async def asked(large: Large, request: pytest.FixtureRequest) -> AsyncIterator[Explaining]:
    """Return a connection to the large database; what is done on it is undone."""
    async with connected(large.url) as connection:
        await connection.execute(f"SET plan_cache_mode = {request.param}")
        await connection.execute("SET jit = off")
        transaction = connection.transaction()
        await transaction.start()
        yield Explaining(connection)
        await transaction.rollback()


@pytest.mark.parametrize("limit", [7, 100, 5_000])
async def test_a_poll_that_finds_nothing(asked: Explaining, limit: int) -> None:
    now = await _now(asked._db)
    assert await window.opened(asked, Progress(now, None, 0, 0), ALL_SHARDS, unleased) is None
    page = await window.fresh(asked, Progress(now, None, 0, 0), ALL_SHARDS, limit)
    assert len(page.events) == 0
    for plan in asked.plans:
        assert plan.scanned == set()
        assert plan.indexes <= {"outbox_xid_idx"}
        assert plan.blocks < 100


async def test_a_poll_that_finds_some_new_events(asked: Explaining, large: Large) -> None:
    assert (
        await window.opened(asked, Progress(large.full, None, 0, 0), ALL_SHARDS, unleased) is None
    )
    page = await window.fresh(asked, Progress(large.full, None, 0, 0), ALL_SHARDS, 5_000)
    assert len(page.events) == 100
    for plan in asked.plans:
        assert (plan.indexes, plan.scanned) == ({"outbox_xid_idx"}, set())
        assert plan.blocks < 200  # an index-only scan reads rows that vacuum has not seen


async def test_a_poll_that_finds_a_transaction_that_took_long(
    asked: Explaining, large: Large
) -> None:
    xid = await asked._db.fetchval(
        "SELECT xid FROM pipeline.outbox WHERE id > 500000 ORDER BY xid LIMIT 1"
    )
    seen = (xid, large.full[1], (xid,))
    assert await window.opened(asked, Progress(seen, None, 0, 0), ALL_SHARDS, unleased) is None
    page = await window.fresh(asked, Progress(seen, None, 0, 0), ALL_SHARDS, 5_000)
    assert len(page.events) == 1_100
    for plan in asked.plans:
        assert (plan.indexes, plan.scanned) == ({"outbox_xid_idx"}, set())
        assert plan.blocks < 300


_IS_ANALYZED = """
SELECT bool_or(reltuples > 10000)
  FROM pg_partition_tree('pipeline.outbox') JOIN pg_class ON oid = relid
 WHERE isleaf
"""


@pytest.mark.parametrize("published", [0, 100, 900_100])
async def test_bounded_statements_open_a_wide_window_at_its_first_event(
    asked: Explaining, published: int
) -> None:
    first, xid = await asked._db.fetchrow(
        "SELECT id, xid FROM pipeline.outbox WHERE id > $1 ORDER BY id LIMIT 1", published
    )
    extended = 0

    async def extend() -> None:
        nonlocal extended
        extended += 1

    page = await window.opened(asked, Progress((xid, xid, ()), None, 0, 0), ALL_SHARDS, extend)
    assert page is not None
    assert len(page.events) == 0
    assert extended == len(asked.plans) - 1
    assert page.then.last_id == first - 1
    assert len(asked.plans) > 1 + (1_000_000 - published) // 50_000
    # With the statistics of a nearly empty table, a plan for these values sorts the whole window.
    most = 6_000 if await asked._db.fetchval(_IS_ANALYZED) else 20_000
    for plan in asked.plans:
        # By id it would go through the published ones first.
        assert (plan.indexes, plan.scanned) == ({"outbox_xid_idx"}, set())
        assert plan.blocks < most


async def test_a_page_of_a_backlog_of_a_million(asked: Explaining, large: Large) -> None:
    now = await _now(asked._db)
    progress = Progress(large.empty, now, 500_000, 1_000_000)
    page = await window.page(asked, progress, ALL_SHARDS, 5_000)
    assert len(page.events) == 5_000
    assert (only(asked).indexes, only(asked).scanned) == ({"outbox_id_idx"}, set())
    # Old statistics may choose to sort all ids that one page looks through at most.
    assert only(asked).blocks < 3_000


async def test_a_page_of_one_shard_of_a_backlog(asked: Explaining, large: Large) -> None:
    now = await _now(asked._db)
    page = await window.page(asked, Progress(large.empty, now, 500_000, 1_000_000), [7], 5_000)
    assert 0 < len(page.events) < 5_000
    assert (only(asked).indexes, only(asked).scanned) == ({"outbox_id_idx"}, set())
    assert only(asked).blocks < 3_000


async def test_a_page_of_a_window_with_few_events_among_many_published(
    asked: Explaining, large: Large
) -> None:
    now = await _now(asked._db)
    page = await window.page(asked, Progress(large.full, now, 100_000, 1_000_000), ALL_SHARDS, 500)
    assert len(page.events) == 0
    assert (only(asked).indexes, only(asked).scanned) == ({"outbox_id_idx"}, set())
    assert only(asked).blocks < 3_000


def markers(ids: Sequence[str]) -> list[Item]:
    """Return messages with the keys that the loaded markers of these ids have."""
    record = Deposit(1).record("t", 0)
    bank = Bank(deposits="t", balances="b", name="bank")
    (handler,) = bank.handlers.of("t", "deposited")
    message = CloudEvents().decode(record)
    return [Item(handler, md5(id.encode()).digest(), message, record) for id in ids]


BOTH_CLOSED = Generations(3, 1, None)


async def test_markers_of_new_events(asked: Explaining) -> None:
    new = markers([f"new/{number}" for number in range(500)])
    assert await inbox.mark(asked, BOTH_CLOSED, new) == {}
    closed, marked = asked.plans
    assert (closed.indexes, closed.scanned) == ({"inbox_pkey"}, set())
    # 500 keys, two generations, three or four levels of the index each.
    assert closed.blocks < 500 * 2 * 5
    assert marked.scanned == set()
    assert marked.blocks < 500 * 12


async def test_a_few_old_markers_among_new_ones(asked: Explaining) -> None:
    old = [f"{part}/{3 * part}" for part in range(1, 11)]
    some = markers([*old, *(f"new/{number}" for number in range(490))])
    remembered = await inbox.mark(asked, BOTH_CLOSED, some)
    assert set(remembered) == {one.key for one in markers(old)}
    closed, _ = asked.plans
    assert (closed.indexes, closed.scanned) == ({"inbox_pkey"}, set())
    assert closed.blocks < 500 * 2 * 5


@pytest.mark.parametrize(("generation", "statements"), [(1, 1), (2, 1), (3, 3)])
async def test_markers_of_duplicates(asked: Explaining, generation: int, statements: int) -> None:
    known = markers([f"{part}/{3 * part + generation - 1}" for part in range(1, 301)])
    remembered = await inbox.mark(asked, BOTH_CLOSED, known)
    assert set(remembered) == {one.key for one in known}
    assert len(asked.plans) == statements
    for plan in asked.plans:
        assert plan.scanned == set()
        assert plan.blocks < 300 * 2 * 5
    assert asked.plans[0].indexes == asked.plans[-1].indexes == {"inbox_pkey"}


async def test_the_position_of_one_of_ten_thousand_partitions(asked: Explaining) -> None:
    slot = Slot("group-7", "t", 3)
    assert await positions.position(asked, slot) == (1, None)
    anchor = Anchor.of(Deposit(1).record("t", 1))
    assert await positions.count_start(asked, slot, 1) == 1
    await positions.forgive_start(asked, slot, 1)
    await positions.move_positions(asked, [Move(slot, 1, 2, anchor)])
    await positions.count_duplicates(asked, slot.group, {("t", 3): 1, ("t", 4): 1})
    assert len(asked.plans) == 5
    for plan in asked.plans:
        assert (plan.indexes, plan.scanned) == ({"position_pkey"}, set())
        assert plan.blocks < 30


async def test_a_relay_that_claims_renews_writes_and_gives_back_its_shards(
    asked: Explaining,
) -> None:
    one = Cursor(CHOSEN, "bank")
    one.server = await asked._db.fetchval("SELECT pg_postmaster_start_time()")

    async def fence(owners: Sequence[str]) -> list[str]:
        return list(owners)

    for _ in range(2):
        await one.renew(asked, fence)
    await one.release(asked)
    # 64 rows, of which each is written; nothing else.
    plans = asked.plans
    assert len(plans) > 5
    assert [plan for plan in plans if plan.scanned or plan.indexes] == []
    # Versions that other tests' transactions may still see are read as well.
    assert max(plan.blocks for plan in plans) < 64 * 30


def new_rejected() -> Rejected:
    return Rejected(CHOSEN, Health(stall_after=3_600))


async def test_events_that_wait_are_counted_up_to_a_limit(
    asked: Explaining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejected, "_COUNTED_AT_MOST", 10)
    backlog = new_rejected()
    await backlog.look(asked, ALL_SHARDS)
    assert {backlog.is_waiting("large"), backlog.is_waiting("missing")} == {True}
    indexes = {"outbox_rejected_waiting_idx", "outbox_rejected_dead_idx"}
    assert (only(asked).indexes, only(asked).scanned) == (indexes, set())
    assert only(asked).blocks < 2 * SHARDS * 30


@pytest.mark.parametrize("shards", [ALL_SHARDS, [SHARDS - 1]], ids=["all", "the last one"])
async def test_events_that_wait_for_a_topic(asked: Explaining, shards: Sequence[int]) -> None:
    backlog = new_rejected()
    await backlog.look(asked._db, ALL_SHARDS)
    topic = backlog.next_topic(accepting=False)
    assert topic is not None
    rows = await backlog.due(asked, topic, shards)
    assert len(rows) == 100
    assert {row["shard"] for row in rows} <= set(shards)
    assert (only(asked).indexes, only(asked).scanned) == ({"outbox_rejected_waiting_idx"}, set())
    assert only(asked).blocks < 1_000


async def test_events_that_were_sent_from_a_large_backlog(asked: Explaining) -> None:
    backlog = new_rejected()
    await backlog.look(asked._db, ALL_SHARDS)
    topic = backlog.next_topic(accepting=False)
    assert topic is not None
    rows = await backlog.due(asked._db, topic, ALL_SHARDS)
    await backlog.settle(asked, rows, {})
    assert (only(asked).indexes, only(asked).scanned) == ({"outbox_rejected_pkey"}, set())
    assert only(asked).blocks < 1_000


async def test_events_that_are_rejected_from_a_large_outbox(asked: Explaining) -> None:
    events = await asked._db.fetch("SELECT * FROM pipeline.outbox WHERE id > 950000 LIMIT 500")
    why = Rejection("topic missing", "it is", of_topic=True, waits=True)
    await new_rejected().add(asked, events, {event["id"]: why for event in events})
    assert only(asked).scanned == set()
    assert only(asked).indexes <= {
        "outbox_id_idx",
        "outbox_rejected_pkey",
        "outbox_rejected_waiting_idx",
    }
    assert only(asked).blocks < 500 * 40


async def test_dead_events_that_are_redriven_or_discarded_beside_many_that_wait(
    asked: Explaining,
) -> None:
    await asked._db.execute(
        "UPDATE pipeline.outbox_rejected SET died_at = now(), reason = 'too large' WHERE id < 40000"
    )
    everything = Selection().arguments
    dead = "SELECT shard FROM pipeline.outbox_rejected WHERE died_at IS NOT NULL LIMIT 1"
    shard = await asked._db.fetchval(dead)
    chunk = dead_events.DeadEvents.chunk_statement("dead")
    ids = await asked.fetch(chunk, *everything, shard, 1_000)
    assert 50 < len(ids) < 1_000
    await asked.execute(operator_statements.REDRIVE_EVENTS, [row["id"] for row in ids])
    await asked.execute(
        operator_statements.DISCARD_EVENTS, [row["id"] for row in ids], "ann", "a test"
    )
    store = store_of(dead_events.DeadEvents, asked)
    await store._stored([row["id"] for row in ids])
    chosen, redrive, discard, became = asked.plans
    assert (chosen.indexes, chosen.scanned) == ({"outbox_rejected_dead_idx"}, set())
    assert chosen.blocks < 3 * len(ids)
    for one in (redrive, discard, became):
        assert "outbox_rejected_pkey" in one.indexes
        assert one.scanned == set()
        assert one.blocks < len(ids) * 50


async def test_that_a_statement_that_reads_everything_is_noticed(asked: Explaining) -> None:
    await asked.fetch("SELECT payload FROM pipeline.outbox WHERE id = $1", 7)
    await asked.fetch("SELECT count(payload) FROM pipeline.outbox WHERE shard = $1", 7)
    by_index, by_scan = asked.plans
    assert (by_index.indexes, by_index.scanned) == ({"outbox_id_idx"}, set())
    assert len(by_scan.scanned) == 1
    assert by_scan.blocks > 10_000
