"""Streamed: 2,000 records/s, from sending to the handler's commit and to the event's arrival."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from benchmarks import load
from benchmarks.bench import Bench
from benchmarks.marks import Values
from benchmarks.rig import BARE_ORM, OURS, Contestant, Site, connected, running
from benchmarks.runs import ready, records, stream

PER_SECOND = 2_000
PARTITIONS = 12
_LONGER = 3
"""Times as long as latencies are measured."""
_KEEP_WAL = "SELECT pg_create_physical_replication_slot($1, true)"
_RELEASE_WAL = "SELECT pg_drop_replication_slot($1)"
_POSITION = "SELECT pg_current_wal_flush_lsn()"
# A record of a commit begins with its time. An event is staged by its handler's transaction.
_COMMITS = """
WITH commit AS MATERIALIZED (
    SELECT xid::text, split_part(description, ';', 1)::timestamptz AS at
      FROM pg_get_wal_records_info($1, $2)
     WHERE resource_manager = 'Transaction' AND record_type LIKE 'COMMIT%'
)
SELECT (convert_from(payload, 'UTF8')::jsonb ->> 'number')::int AS number,
       extract(epoch FROM min(at))::float AS at
  FROM {outbox} AS event JOIN commit ON commit.xid = event.{xid}::text
 GROUP BY number
"""


async def streamed(bench: Bench) -> None:
    """Take the latencies of ours and of the loop by hand."""
    await bench.rounds(
        "streamed",
        {who.name: partial(_streamed, bench, who) for who in (OURS, BARE_ORM)},
        warm_up=False,  # the first records of each run do
    )


async def _streamed(bench: Bench, who: Contestant) -> Values:
    rig = bench.rig
    many = load.make(1_000, records(_LONGER * bench.options.seconds, PER_SECOND))
    async with (
        rig.fresh_topic(PARTITIONS) as input_,
        rig.site(who, input_, PARTITIONS) as site,
        committed(site) as commits,
    ):
        service = rig.process(site)
        async with running(service):
            await ready(site, [service])
            found = await stream(rig, site, [service], many, per_second=PER_SECOND)
        at = await commits()
        await rig.check(site, many)
    return found.values(commit=at)


@asynccontextmanager
async def committed(site: Site) -> AsyncIterator[Callable[[], Awaitable[Mapping[int, float]]]]:
    """Lend a way to find out when each scan's transaction was committed, by the scan's number.

    Times are of the wall clock, of when a commit was written to the log; its flush comes after.
    They are read from the write-ahead log, which is kept meanwhile: the server has its defaults.
    """
    async with connected(site.database) as connection:
        await connection.execute("CREATE EXTENSION pg_walinspect")
        await connection.execute("SET timezone = 'UTC'")
        await connection.fetch(_KEEP_WAL, site.group)
        try:
            begin = await connection.fetchval(_POSITION)

            async def commits() -> Mapping[int, float]:
                end = await connection.fetchval(_POSITION)
                is_ours = site.contestant.is_ours
                query = _COMMITS.format(
                    outbox="pipeline.outbox" if is_ours else "outbox",
                    xid="xid::xid" if is_ours else "xmin",
                )
                return {row[0]: row[1] for row in await connection.fetch(query, begin, end)}

            yield commits
        finally:
            await connection.fetch(_RELEASE_WAL, site.group)
