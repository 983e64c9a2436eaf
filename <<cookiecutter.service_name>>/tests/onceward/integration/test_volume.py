"""A transaction that stays open beside a million others, and one of a million events."""

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable

import asyncpg
import psutil
import pytest
from aiokafka import AIOKafkaConsumer

from onceward.handlers import staging
from onceward.relay import statements as relay_statements
from onceward.relay import window
from onceward.relay.window import Progress

from .bank import Bank
from .outgoing import ALL_SHARDS, all_is_written, numbered, read, read_all, start_of
from .processes import starting
from tests.servers.processes import Process
from tests.servers.waiting import PATIENCE, eventually

pytestmark = pytest.mark.full

Connect = Callable[[], Awaitable[asyncpg.Connection]]

# Each takes a transaction id, one of ten writes an event.
_COMMIT = """
DO $$
BEGIN
    FOR number IN 1 .. %d LOOP
        IF number %% 10 = 0 THEN
            INSERT INTO pipeline.outbox (topic, key, payload, event_id, source, type, content_type)
            VALUES ('t', 'ada', '{}', number, '/bank', 'balance.changed', 'application/json');
        ELSE
            PERFORM pg_current_xact_id();
        END IF;
        COMMIT;
    END LOOP;
END $$
"""


async def blocks_of_a_poll(db: asyncpg.Connection, statement: str, progress: Progress) -> int:
    """Return how many blocks the server looks at for the statement."""
    plan = await db.fetchval(
        f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}",
        progress.seen,
        ALL_SHARDS,
        5_001,
        window.PAGE_BYTES,
    )
    (one,) = json.loads(plan)
    return int(one["Plan"]["Shared Hit Blocks"] + one["Plan"]["Shared Read Blocks"])


async def test_a_million_commits_behind_an_open_transaction_do_not_slow_polls(
    connect: Connect, db: asyncpg.Connection
) -> None:
    """Trap 2."""
    progress = await start_of(db)
    late, writers = await connect(), [await connect(), await connect()]
    for writer in writers:
        await writer.execute("SET synchronous_commit = off")
    transaction = late.transaction()
    await transaction.start()
    await staging.append(late, numbered("t", ["late"]))
    await asyncio.gather(*(writer.execute(_COMMIT % 1_000) for writer in writers))
    _, progress = await read_all(db, progress, 5_000)
    before = await blocks_of_a_poll(db, relay_statements.READ_WINDOW, progress)
    await asyncio.gather(*(writer.execute(_COMMIT % 500_000) for writer in writers))
    ids, progress = await read_all(db, progress, 5_000)
    assert len(ids) == 100_000
    after = await blocks_of_a_poll(db, relay_statements.READ_WINDOW, progress)
    assert progress.seen[1] - progress.seen[0] > 1_000_000, "this test needs a million commits"
    assert after < 2 * before + 20
    # Not so for who remembers the oldest running transaction and sorts out what it has seen.
    naive = relay_statements.READ_WINDOW.replace(
        "xid >= pg_snapshot_xmax($1)",
        "xid >= pg_snapshot_xmin($1) AND NOT pg_visible_in_snapshot(xid, $1)",
    )
    assert await blocks_of_a_poll(db, naive, progress) > 20 * after
    await transaction.commit()
    assert [row["event_id"] for row in (await read(db, progress, 5_000)).events] == ["late"]


MILLION = 1_000_000


@pytest.mark.timeout(900)
async def test_a_transaction_of_a_million_events_is_published_in_ordered_pages(
    bank: Bank,
    db: asyncpg.Connection,
    database_url: str,
    kafka: str,
) -> None:
    common = {"database_url": database_url, "kafka_bootstrap_servers": kafka}
    async with starting(bank, **common) as start:
        relay = await start("relay")
        await eventually(relay.is_ready)
        idle = resident(relay)
        await db.execute(
            "INSERT INTO pipeline.outbox"
            "       (topic, key, payload, event_id, source, type, content_type)"
            " SELECT $1, 'ada', n::text::bytea, n, '/bank', 'balance.changed', 'text/plain'"
            "   FROM generate_series(0, $2 - 1) AS n",
            bank.balances,
            MILLION,
        )
        most = await read_a_million(kafka, bank.balances, lambda: resident(relay))
        await eventually(lambda: all_is_written(db))
        relay.send(signal.SIGTERM)
        assert await relay.ended() == 0
    # All of them would take more than a gigabyte.
    assert most - idle < 150 * 2**20


async def read_a_million(kafka: str, topic: str, measured: Callable[[], int]) -> int:
    """Read events 0, 1, 2 … of the topic; returns the highest value that was measured meanwhile.

    On a busy machine the relay may lose its lease and repeat what it has sent: none is skipped.
    """
    highest = due = 0
    async with AIOKafkaConsumer(
        topic, bootstrap_servers=kafka, auto_offset_reset="earliest"
    ) as consumer:
        while due < MILLION:
            async with asyncio.timeout(PATIENCE):
                fetched = await consumer.getmany(timeout_ms=1_000)
            for record in (one for records in fetched.values() for one in records):
                assert int(record.value) <= due
                due = max(due, int(record.value) + 1)
            highest = max(highest, measured())
    return highest


def resident(process: Process) -> int:
    """Return how much memory the process has, in bytes."""
    return int(psutil.Process(process.pid).memory_info().rss)
