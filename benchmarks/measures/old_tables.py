"""Old tables: a service that has run for long, beside one whose tables are empty."""

from dataclasses import replace
from datetime import UTC, date, timedelta
from functools import partial

import asyncpg  # type: ignore[import-untyped]

from benchmarks import load
from benchmarks.bench import Bench
from benchmarks.check import CheckFailed
from benchmarks.load import Load
from benchmarks.marks import Values
from benchmarks.rig import OURS, Site, connected
from benchmarks.runs import Throughput

GENERATIONS = 2
"""That are closed and kept, by default."""
MARKERS = 5_000_000
"""In each closed generation."""
OUTBOX = 5_000_000
DAYS = 5
"""Over which the rows of the outbox are spread; today is the last of them."""
KEEPING = {"PIPELINE_OUTBOX_AGE": str(30 * 86_400)}
"""Settings with which retention leaves them there."""
_AT_ONCE = 1_000

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
_PAST = """
SELECT (SELECT count(*) FROM pipeline.inbox, pipeline.inbox_generation WHERE generation < current),
       (SELECT count(*) FROM pipeline.outbox WHERE topic = 'events')
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
    rig, who = bench.rig, replace(OURS, settings=KEEPING)
    input_ = await rig.input(one)
    async with rig.site(who, input_) as empty, rig.site(who, input_) as old:
        bench.say("old_tables", "filling")
        await fill(old, markers=bench.scaled(MARKERS), events=bench.scaled(OUTBOX) // DAYS)
        past = await _kept(old)
        await bench.rounds(
            "old_tables",
            {
                "empty": partial(_again, bench, empty, one),
                "old": partial(_again, bench, old, one),
            },
        )
        if (left := await _kept(old)) != past:
            raise CheckFailed(f"old_tables: of {past} markers and events {left} are left")
    bench.compare("old tables", "old", "empty")


async def _kept(site: Site) -> tuple[int, int]:
    """Return how many markers and events the past has."""
    async with connected(site.database) as connection:
        return tuple(await connection.fetchrow(_PAST))


async def fill(site: Site, *, markers: int, events: int) -> None:
    """Write the past, as the engine would have left it: so much in a generation, and in a day."""
    async with connected(site.database) as connection:
        past = Past(connection)
        await past.close_generations(GENERATIONS, markers)
        today = (await connection.fetchval("SELECT now()")).astimezone(UTC).date()
        for ago in reversed(range(DAYS)):
            await past.fill_day(today - timedelta(days=ago), events)
        await past.publish()
        await past.settle()


class Past:
    """Writes what a service has left behind that has run for long."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def close_generations(self, count: int, markers: int) -> int:
        """Fill so many generations and close them; returns the number of the first."""
        connection = self._connection
        first: int = await connection.fetchval(_CURRENT)
        for number in range(first, first + count + 1):
            if not await connection.fetchval(_EXISTS, f"inbox_g{number}"):
                await connection.execute(_MAKE_GENERATION.format(number=number))
        for number in range(first, first + count):
            await connection.execute(_FILL_GENERATION.format(number=number, count=markers))
        await connection.execute(_CLOSE_GENERATIONS.format(current=first + count))
        return first

    async def fill_day(self, day: date, events: int) -> None:
        """Write so many events into a day of the outbox."""
        connection = self._connection
        days = {"name": f"{day:%Y%m%d}", "day": day, "next": day + timedelta(days=1)}
        await connection.execute(_MAKE_DAY.format(**days))
        await connection.execute(_SPEND_TRANSACTIONS.format(count=events // _AT_ONCE + 1))
        await connection.execute(_FILL_DAY.format(day=day, count=events, size=_AT_ONCE))

    async def publish(self) -> None:
        """Let all that is in the outbox be published."""
        await self._connection.execute(_ALL_IS_PUBLISHED)

    async def settle(self) -> None:
        """Clean up behind all of it."""
        await self._connection.execute("VACUUM (FREEZE, ANALYZE)")
        await self._connection.execute("CHECKPOINT")


async def _again(bench: Bench, site: Site, load_: Load) -> Values:
    """Run once more on the same tables, as if nothing of this load had been seen."""
    rig = bench.rig
    # The statistics are of the run before, on empty tables as on old ones.
    await rig.execute("ANALYZE", _FORGET, "CHECKPOINT", database=site.database)
    async with rig.fresh_topic() as output:
        return await Throughput(OURS, load_).at(rig, replace(site, output=output))
