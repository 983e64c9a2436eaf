"""Old tables: a service that has run for long, beside one whose tables are empty."""

import asyncio
from dataclasses import replace
from datetime import UTC, timedelta
from functools import partial

import asyncpg  # type: ignore[import-untyped]

from benchmarks import load
from benchmarks.bench import Bench
from benchmarks.load import Load
from benchmarks.marks import Values, ratios
from benchmarks.rig import OURS, Rig, Site, guarded, running
from benchmarks.runs import Throughput

GENERATIONS = 10
MARKERS = 1_000_000
"""In each closed generation."""
OUTBOX = 5_000_000
DAYS = 5
"""Over which the rows of the outbox are spread; today is the last of them."""
_AT_ONCE = 1_000
_LOOK_SECONDS = 0.2

_CURRENT = "SELECT current FROM pipeline.inbox_generation"
_EXISTS = "SELECT to_regclass('pipeline.' || $1) IS NOT NULL"
_MAKE_GENERATION = """
CREATE TABLE pipeline.inbox_g{number} (LIKE pipeline.inbox INCLUDING ALL);
ALTER TABLE pipeline.inbox
      ATTACH PARTITION pipeline.inbox_g{number} FOR VALUES IN ({number})
"""
_FILL_GENERATION = """
INSERT INTO pipeline.inbox (generation, key, hash, hash_version, consumer, source, id, type,
                            topic, partition, "offset")
SELECT {number}, decode(md5('{number} ' || n), 'hex'), decode(md5(n::text), 'hex'), 1,
       'record-scan', '/scanners/scanner-' || n % 50, n::text, 'scan.recorded.v1',
       'scans', n % 4, n
  FROM generate_series(1, {count}) AS n
"""
# What `rotate` does, at once.
_CLOSE_GENERATIONS = """
UPDATE pipeline.inbox_generation
   SET current = {current}, opened_at = clock_timestamp(), opening = gen_random_uuid()
"""
_FILTERED = """
SELECT COALESCE(sum(last_generation - first_generation + 1), 0) FROM pipeline.inbox_filter
"""
_MAKE_DAY = """
CREATE TABLE IF NOT EXISTS pipeline.outbox_p{name} PARTITION OF pipeline.outbox
    FOR VALUES FROM ('{day} 00:00+00') TO ('{next} 00:00+00')
"""
# Transaction ids for them to carry: ids of transactions that are over.
_SPEND_TRANSACTIONS = """
DO $$ BEGIN
FOR one IN 1..{count} LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP;
END $$
"""
_FILL_DAY = """
INSERT INTO pipeline.outbox (xid, created_at, topic, key, payload, event_id, source, type, subject,
                             sequence, content_type)
SELECT ((pg_current_xact_id()::text::bigint - 1 - ({count} - n) / {size})::text)::xid8,
       '{day} 00:00+00'::timestamptz, 'events', convert_to(name, 'UTF8'),
       convert_to(repeat('x', 100), 'UTF8'), md5('{day}' || n), '/parcel-tracker',
       'parcel.moved.v1', name, n, 'application/json'
  FROM generate_series(1, {count}) AS n,
       LATERAL (SELECT 'parcel-' || lpad((n % 1000)::text, 6, '0')) AS parcel (name)
"""
_FORGET = """
DO $$ BEGIN
TRUNCATE parcel, pipeline.position;
EXECUTE 'TRUNCATE pipeline.inbox_g' || (SELECT current FROM pipeline.inbox_generation);
END $$
"""
_ALL_IS_PUBLISHED = """
UPDATE pipeline.outbox_cursor
   SET seen = pg_current_snapshot(), target = NULL, last_id = 0, high_id = 0
"""


async def old_tables(bench: Bench) -> None:
    """Compare the rate on tables that are full of the past with that on empty ones."""
    one = load.make(1_000, bench.options.events)
    rig = bench.rig
    async with rig.site(OURS, await rig.input(one)) as site:
        bench.say("old_tables", "filling")
        await fill(rig, site, markers=bench.scaled(MARKERS), events=bench.scaled(OUTBOX) // DAYS)
        await bench.rounds(
            "old_tables",
            {
                "empty": partial(Throughput(OURS, one), rig),
                "old": partial(_again, bench, site, one),
            },
        )
    found = partial(bench.found, "old_tables")
    bench.mark("old tables", ratios(found("old"), found("empty")))


async def fill(rig: Rig, site: Site, *, markers: int, events: int) -> None:
    """Write the past, as the engine would have left it: so much in a generation, and in a day."""
    connection = await asyncpg.connect(site.database)
    try:
        first = await connection.fetchval(_CURRENT)
        for number in range(first, first + GENERATIONS + 1):
            if not await connection.fetchval(_EXISTS, f"inbox_g{number}"):
                await connection.execute(_MAKE_GENERATION.format(number=number))
        for number in range(first, first + GENERATIONS):
            filling = _FILL_GENERATION.format(number=number, count=markers)
            await connection.execute(filling)
        await connection.execute(_CLOSE_GENERATIONS.format(current=first + GENERATIONS))
        today = (await connection.fetchval("SELECT now()")).astimezone(UTC).date()
        for day in (today - timedelta(days=ago) for ago in reversed(range(DAYS))):
            days = {"name": f"{day:%Y%m%d}", "day": day, "next": day + timedelta(days=1)}
            await connection.execute(_MAKE_DAY.format(**days))
            await connection.execute(_SPEND_TRANSACTIONS.format(count=events // _AT_ONCE + 1))
            await connection.execute(_FILL_DAY.format(day=day, count=events, size=_AT_ONCE))
        await connection.execute(_ALL_IS_PUBLISHED)
        # Its housekeeping builds the filters.
        service = rig.process(site, command="relay")
        async with running(service):
            await guarded(_all_have_filters(connection), [service])
        await connection.execute("VACUUM (FREEZE, ANALYZE)")
        await connection.execute("CHECKPOINT")
    finally:
        await connection.close()


async def _all_have_filters(connection: asyncpg.Connection) -> None:
    while await connection.fetchval(_FILTERED) < GENERATIONS:  # noqa: ASYNC110  # by a process
        await asyncio.sleep(_LOOK_SECONDS)


async def _again(bench: Bench, site: Site, load_: Load) -> Values:
    """Run once more on the old tables, as if nothing of this load had been seen."""
    rig = bench.rig
    await rig.execute(_FORGET, "CHECKPOINT", database=site.database)
    async with rig.fresh_topic() as output:
        return await Throughput(OURS, load_).at(rig, replace(site, output=output))
