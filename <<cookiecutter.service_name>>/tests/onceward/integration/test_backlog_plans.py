"""How the backlog's statements are planned on 200,000 rows, half of them behind one key.

Each is asked with a plan for its arguments and with a generic plan, with the statistics of a table
that was nearly empty, and with new ones, on each major version. Trap 20.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime

import asyncpg
import pytest
from sqlalchemy import make_url

from onceward.apply import backlog
from onceward.apply.backlog import lane_of
from onceward.apply.batch import read
from onceward.apply.item import Item, Row, order_key
from onceward.handlers.policy import Decision, History
from onceward.plain import Plain, Position
from onceward.retry import lanes
from onceward.retry.lane_source import take
from onceward.retry.lanes import Lease

from .bank import Bank
from .plans import MAJOR_VERSIONS, Explaining, connected, execute, only, server_of
from tests.contract.bank import Base, Deposit
from tests.servers.databases import built, migrations_of_the_engine

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # with what is filled

BANK = Bank(deposits="t", balances="balances", name="bank")
BANK.handlers.topic("t", codec=Plain("deposited", Position()))

HOT, NEW, DEAD = (
    order_key("deposit", Deposit(1, account=name).record("t", 0)) for name in ("hot", "new", "dead")
)
"""Keys whose followers are told to wait, or are not yet; and one that has had many dead letters."""

CONSUMERS = {"", "deposit"}

FAR = datetime(2100, 1, 1, tzinfo=UTC)

_LOAD = """
ALTER TABLE pipeline.backlog SET (autovacuum_enabled = off);

-- Of each key the first row is due, unless it has died; of some the others as well.
CREATE PROCEDURE fill(name text, hash bytea, rows integer, is_due boolean, is_dead boolean)
LANGUAGE sql AS $$
    INSERT INTO pipeline.backlog
           (key, lane, order_key, consumer, topic, partition, "offset", timestamp, record_key,
            value, headers, hash_version, reason, attempts, waited, holds, due_at, died_at)
    SELECT decode(md5(name || n), 'hex'), get_byte(hash, 0) % 32, hash, 'deposit', 't', 0, n, 0,
           name::bytea, '{"account": "x", "amount": 1, "note": "some bytes of a payload"}', '[]',
           1, 'follows another', 0, 0, false,
           CASE WHEN NOT is_dead AND (is_due OR n = 1) THEN now() - n * interval '1 ms' END,
           CASE WHEN is_dead THEN now() END
      FROM generate_series(1, rows) AS n;
$$;

-- Keys with one row each. Two thirds have to wait for their time, in the deferred lanes all.
CREATE PROCEDURE fill_others(first integer, last integer) LANGUAGE sql AS $$
    INSERT INTO pipeline.backlog
           (key, lane, order_key, consumer, topic, partition, "offset", timestamp, record_key,
            value, headers, hash_version, reason, attempts, waited, holds, due_at)
    SELECT decode(md5('row' || n), 'hex'), get_byte(hash, 0) % 32 + 32 * (n % 2), hash, 'deposit',
           't', 1, n, 0, ('key' || n)::bytea, '{"account": "x", "amount": 1}', '[]', 1, 'failed', 1,
           30, false, now() + (n % 3 - 0.5 + 3 * (n % 2)) * interval '1 hour'
      FROM generate_series(first, last) AS n, decode(md5('key' || n), 'hex') AS hash;
$$;
"""


@pytest.fixture(scope="module", params=MAJOR_VERSIONS)
def stored(server_url: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """Fill a database once, of each server, and return its URL."""
    server = server_of(request.param, server_url)
    with server as url, built(url, migrations_of_the_engine(), Base.metadata) as name:
        database = make_url(url).set(drivername="postgresql", database=name)
        yield _load(database.render_as_string(hide_password=False))


def _load(url: str) -> str:
    fill = "CALL fill('{}', '\\x{}', {}, {}, {})".format
    asyncio.run(
        execute(
            url,
            _LOAD,
            "CALL fill_others(1, 100)",
            "ANALYZE",
            fill("hot", HOT.hex(), 100_000, "false", "false"),
            fill("new", NEW.hex(), 30_000, "true", "false"),
            fill("dead", DEAD.hex(), 10_000, "false", "true"),
            "CALL fill_others(101, 60000)",
        )
    )
    return url


@pytest.fixture(scope="module", params=["before ANALYZE", "after ANALYZE"])
def url(stored: str, request: pytest.FixtureRequest) -> str:
    """Return it with the statistics of a nearly empty one, and then with its own."""
    if request.param == "after ANALYZE":
        asyncio.run(execute(stored, "ANALYZE"))
    return stored


@pytest.fixture(params=["force_custom_plan", "force_generic_plan"])
async def asked(url: str, request: pytest.FixtureRequest) -> AsyncIterator[Explaining]:
    """Return a connection to it; what is done on it is undone."""
    async with connected(url) as connection:
        await connection.execute(f"SET plan_cache_mode = {request.param}")
        await connection.execute("SET jit = off")
        transaction = connection.transaction()
        await transaction.start()
        yield Explaining(connection)
        await transaction.rollback()


def lane(key: bytes) -> Lease:
    """Return the lane of a key as its worker holds it."""
    return Lease([lane_of(key, "immediate")], [0], 1, datetime.now(UTC), 10.0)


async def items(*accounts: str) -> list[Item]:
    """Return new messages for the accounts, which are keys."""
    deposits = (Deposit(1, account=name).record("t", n) for n, name in enumerate(accounts))
    return list((await read(BANK.handlers, 0, list(deposits))).items)


async def rows_of(db: asyncpg.Connection, key: bytes, count: int) -> list[bytes]:
    """Return the first rows of a key that is alive."""
    rows = await db.fetch(
        'SELECT key FROM pipeline.backlog WHERE order_key = $1 ORDER BY "offset" LIMIT $2',
        key,
        count,
    )
    return [row["key"] for row in rows]


async def test_the_look_up_of_a_batch(asked: Explaining) -> None:
    batch = await items("hot", "new", "dead", *(f"unknown {n}" for n in range(500)))
    known, waiting, _ = await backlog.find(asked, batch)
    assert (known, waiting) == ({}, {HOT, NEW})
    assert only(asked).indexes <= {"backlog_pkey", "backlog_order_idx"}
    assert only(asked).scanned == set()
    # Each of them once in two indexes, of three or four levels.
    assert only(asked).blocks < 503 * 2 * 5


async def test_whether_much_is_to_be_tried_again(asked: Explaining) -> None:
    """Of each lane and consumer it looks at the latest rows that are due."""
    await backlog.is_full(asked, CONSUMERS)
    assert (only(asked).indexes, only(asked).scanned) == ({"backlog_due_idx"}, set())
    assert only(asked).blocks < len(CONSUMERS) * 32 * 5 + 2 * (backlog._MOST_DUE + 10_000)


async def test_new_rows_of_a_batch(asked: Explaining) -> None:
    decision = Decision("follows another")
    rows = [
        Row(one.key, "deposit", one.record, decision, one)
        for one in await items("hot", *(f"unknown {n}" for n in range(499)))
    ]
    await backlog.add(asked, rows, None)
    assert only(asked).scanned == set()
    assert only(asked).blocks < 500 * 25


async def test_the_claim_of_a_lane(asked: Explaining) -> None:
    assert await lanes.claim(asked, "owner", 10.0, CONSUMERS) is not None
    assert (only(asked).indexes, only(asked).scanned) == ({"backlog_due_idx"}, set())
    assert only(asked).blocks < len(CONSUMERS) * 64 * 5


async def test_the_claim_of_a_lane_when_every_row_has_to_wait(asked: Explaining) -> None:
    await asked._db.execute(
        "UPDATE pipeline.backlog_lane SET lease_until = now() + interval '1 minute' WHERE lane < 32"
    )
    assert await lanes.claim(asked, "owner", 10.0, CONSUMERS) is None
    assert only(asked).scanned == set()
    assert only(asked).blocks < len(CONSUMERS) * 64 * 5


@pytest.mark.parametrize("key", [HOT, NEW], ids=["hot", "new"])
@pytest.mark.parametrize("limit", [10, 1_000])
@pytest.mark.parametrize("before", [None, FAR])
async def test_what_is_due_in_a_lane(
    asked: Explaining, key: bytes, limit: int, before: datetime | None
) -> None:
    taken = await take(asked, lane(key), CONSUMERS, limit, before=before)
    assert 0 < len(taken) <= limit
    assert (only(asked).indexes, only(asked).scanned) == (
        {"backlog_due_idx", "backlog_order_idx"},
        set(),
    )
    assert only(asked).blocks < 100 + limit * 10


@pytest.mark.parametrize("key", [HOT, NEW], ids=["hot", "new"])
async def test_what_a_run_of_a_key_leaves_behind(asked: Explaining, key: bytes) -> None:
    first, second, *done = await rows_of(asked._db, key, 500)
    record = Deposit(1).record("deposits", 0)
    failed = Row(first, "deposit", record, Decision("failed", History(attempts=1), due_in=30.0))
    done = [second, *done]
    await lanes.settle(
        asked, lane(key), done=done, changed=[failed], keys=[key], keys_with_progress=[key]
    )
    delete, change, schedule_heads = asked.plans
    assert (delete.indexes, delete.scanned) == ({"backlog_pkey"}, set())
    assert delete.blocks < 500 * 6
    assert (change.indexes, change.scanned) == ({"backlog_pkey"}, set())
    assert change.blocks < 100
    assert schedule_heads.scanned == set()
    # Of the followers only those are looked at that are due, and of these not all at once.
    assert schedule_heads.blocks < (100 if key == HOT else 10_000 * 25)


async def test_the_heads_of_many_keys(asked: Explaining) -> None:
    rows = await asked._db.fetch(
        "SELECT order_key FROM pipeline.backlog WHERE lane = 3 AND partition = 1 LIMIT 500"
    )
    keys = [row["order_key"] for row in rows]
    await lanes.schedule_heads(asked, [3], keys)
    assert only(asked).scanned == set()
    assert only(asked).blocks < 500 * 25


_FLOOD = """
INSERT INTO pipeline.backlog
       (key, lane, order_key, consumer, topic, partition, "offset", timestamp, record_key,
        value, headers, hash_version, reason, attempts, waited, holds, due_at)
SELECT hash, 32 + get_byte(hash, 0) % 32, hash, 'deposit', 't', 0, n, 0, hash, '{}', '[]',
       1, 'deferred', 0, 0, false, now() - n * interval '1 ms'
  FROM generate_series($1::integer, $2) AS n, decode(md5('key' || n), 'hex') AS hash
"""


@pytest.fixture(params=["before ANALYZE", "after ANALYZE"])
async def flooded(db: asyncpg.Connection, request: pytest.FixtureRequest) -> asyncpg.Connection:
    """Return a database with as many keys as rows, which are all deferred and due."""
    await db.execute("ALTER TABLE pipeline.backlog SET (autovacuum_enabled = off)")
    await db.execute(_FLOOD, 1, 40_000)
    if request.param == "after ANALYZE":
        await db.execute("ANALYZE")
    return db


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_the_claim_of_a_lane_when_much_is_due_in_others(
    flooded: asyncpg.Connection, mode: str
) -> None:
    """Trap 20: half of the lanes have nothing, and those that have much have workers."""
    await flooded.execute(f"SET plan_cache_mode = {mode}")
    asked = Explaining(flooded)
    lane = await lanes.claim(asked, "owner", 10.0, CONSUMERS)
    assert lane is not None
    await flooded.execute(
        "UPDATE pipeline.backlog_lane SET lease_until = now() + interval '60 s' WHERE lane >= 32"
    )
    assert await lanes.claim(asked, "owner", 10.0, CONSUMERS, {"another"}) is None
    for plan in asked.plans:
        assert plan.scanned == set()
        assert plan.blocks < 64 * 10


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_the_heads_of_few_keys_in_a_lane_with_many_due(
    flooded: asyncpg.Connection, mode: str
) -> None:
    """Trap 20: what is due of other keys is not looked at."""
    await flooded.execute(f"SET plan_cache_mode = {mode}")
    rows = await flooded.fetch("SELECT order_key FROM pipeline.backlog WHERE lane = 40 LIMIT 10")
    asked = Explaining(flooded)
    await lanes.schedule_heads(asked, [40], [row["order_key"] for row in rows])
    assert only(asked).scanned == set()
    assert only(asked).blocks < 10 * 25


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_rows_that_wait_for_an_open_breaker_are_not_looked_at(
    flooded: asyncpg.Connection, mode: str
) -> None:
    await flooded.execute("UPDATE pipeline.backlog SET consumer = 'paused'")
    await flooded.execute("VACUUM pipeline.backlog")  # both versions of a row are in the index
    await flooded.execute(f"SET plan_cache_mode = {mode}")
    asked, consumers = Explaining(flooded), CONSUMERS | {*map(str, range(20))}
    assert await lanes.claim(asked, "owner", 10.0, consumers) is None
    await flooded.execute(_FLOOD, 40_001, 40_010)
    found = await lanes.claim(asked, "owner", 10.0, consumers)
    assert found is not None
    assert len(await take(asked, found, consumers, 500)) > 0
    for plan in asked.plans:
        assert plan.scanned == set()
        assert plan.blocks < len(consumers) * 64 * 5


_WAYS = 256 * 5 + (96 + 32 + 5) * 5 * 2
"""Blocks on the way to the first row of each slice of the keys, of each lane and consumer."""


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_rows_of_one_consumer_are_counted_by_index_among_many_others(
    flooded: asyncpg.Connection, mode: str
) -> None:
    await flooded.execute(
        "UPDATE pipeline.backlog SET consumer = 'other' WHERE \"offset\" % 8000 = 0"
    )
    await flooded.execute(f"SET plan_cache_mode = {mode}")
    asked = Explaining(flooded)
    found = {one.consumer: one.waiting for one in await lanes.waiting(asked, 10, 300.0)}
    assert found == {"deposit": 32 * 100, "other": 5}
    assert only(asked).scanned == set()
    # Each row that is read, and the way to the first ones.
    assert only(asked).blocks < 2 * 32 * 100 + _WAYS


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_the_age_of_each_topics_oldest_row_reads_no_further_block(
    flooded: asyncpg.Connection, mode: str
) -> None:
    await flooded.execute(
        "UPDATE pipeline.backlog SET topic = 'other', received_at = now() - interval '1 hour'"
        ' WHERE "offset" % 8 = 0'
    )
    await flooded.execute("VACUUM pipeline.backlog")  # both versions of a row are in the index
    await flooded.execute(f"SET plan_cache_mode = {mode}")
    asked = Explaining(flooded)
    (found,) = await lanes.waiting(asked, 1_000, 300.0)
    assert found.waiting >= 32 * 100
    assert found.oldest_by_topic.keys() == {"t", "other"}
    assert found.oldest == found.oldest_by_topic["other"] > 3_500 > found.oldest_by_topic["t"]
    assert only(asked).scanned == set()
    assert only(asked).blocks < 2 * (32 * 100 + 1_000) + _WAYS


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_the_count_reads_as_much_beside_many_rows_that_are_kept(
    db: asyncpg.Connection, mode: str
) -> None:
    """Trap 20: the statistics are those of a table in which all of them waited."""
    await db.execute("ALTER TABLE pipeline.backlog SET (autovacuum_enabled = off)")
    await db.execute(_FLOOD, 1, 200_000)
    await db.execute("ANALYZE")
    bury = "UPDATE pipeline.backlog SET due_at = NULL, died_at = now()"
    await db.execute(f'{bury}, discarded_at = now() WHERE "offset" > 300')
    await db.execute(f'{bury} WHERE "offset" <= 20')
    await db.execute("VACUUM pipeline.backlog")  # both versions of a row are in the indexes
    await db.execute(f"SET plan_cache_mode = {mode}")
    asked = Explaining(db)
    (found,) = await lanes.waiting(asked, 100_000, 300.0)
    assert (found.consumer, found.waiting, found.dead) == ("deposit", 280, 20)
    assert only(asked).scanned == set()
    assert only(asked).blocks < 3 * 300 + _WAYS
