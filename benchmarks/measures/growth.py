"""Growth: how rate, latency and size change with what there is of everything else."""

from dataclasses import dataclass, replace
from functools import partial

from benchmarks import load
from benchmarks.bench import Bench
from benchmarks.marks import Values
from benchmarks.measures.old_tables import DAYS, GENERATIONS, KEEPING, fill
from benchmarks.rig import OURS, PARTITIONS, running
from benchmarks.runs import Throughput, latency, ready, records, sizes, written

_SHARE = 2
"""The runs are so many times shorter than those of other measures."""
_LARGE = 10_000
"""Bytes; of larger payloads there are fewer."""
SHARDS = 64
"""Of the outbox, by the engine's schema."""
# As if the schema had been made with another number.
_RESHARD = (
    *(
        f"""
        ALTER TABLE pipeline.{table} ALTER COLUMN shard SET EXPRESSION AS
              ((get_byte(sha256(COALESCE(key, '\\x'::bytea)), 0) % {{shards}})::smallint)
        """
        for table in ("outbox", "outbox_rejected")
    ),
    "DELETE FROM pipeline.outbox_cursor WHERE shard >= {shards}",
    """
    INSERT INTO pipeline.outbox_cursor (shard, seen)
    SELECT shard, pg_current_snapshot() FROM generate_series(0, {shards} - 1) AS shard
        ON CONFLICT DO NOTHING
    """,
)


@dataclass(frozen=True)
class Point:
    """A service in circumstances of which one is varied."""

    keys: int = 1_000
    payload: int = 250
    batch: int = 3_000
    partitions: int = PARTITIONS
    shards: int = SHARDS
    processes: int = 1
    rows: int = 0
    """Markers that are kept in closed generations, and half as many events of days before."""


VARIED = {
    "payload": [Point(payload=size) for size in (250, 2_000, 20_000)],
    "batch": [Point(batch=size) for size in (10, 100, 1_000, 3_000)],
    "partitions": [Point(partitions=count) for count in (1, 4, 16)],
    "shards": [Point(shards=count) for count in (1, 8, 64, 256)],
    "keys": [Point(keys=count) for count in (1, 10, 1_000, 100_000)],
    "processes": [Point(processes=count) for count in (1, 2)],
    "rows": [Point(rows=count) for count in (100_000, 1_000_000, 10_000_000)],
}


async def growth(bench: Bench) -> None:
    """Take rate, latency and size at every point; those that are the same are run once."""
    points = {name(kind, point): point for kind, all_ in VARIED.items() for point in all_}
    once = {point: run for run, point in reversed(points.items())}
    await bench.rounds(
        "growth",
        *({run: partial(_at, bench, point)} for point, run in once.items()),
        rounds=1,  # there are many points
        warm_up=False,
        again=False,
    )
    for run, point in points.items():
        if run != once[point]:
            bench.book.repeat("growth", once[point], run)


def name(kind: str, point: Point) -> str:
    """Return the name of a point of a plot."""
    return f"{kind} {getattr(point, kind)}"


async def _at(bench: Bench, point: Point) -> Values:
    rig = bench.rig
    count = bench.options.events // _SHARE
    if point.payload > _LARGE:
        count //= 5
    settings = {"PIPELINE_BATCH_SIZE": str(point.batch), "BENCH_SHARDS": str(point.shards)}
    who = replace(OURS, settings={**KEEPING, **settings})
    work = load.make(point.keys, count, payload=point.payload)
    seldom = records(bench.options.seconds / _SHARE)
    few = load.make(point.keys, seldom, first=count, payload=point.payload)
    full = await rig.input(work, point.partitions)
    async with (
        rig.site(who, full, point.partitions) as site,
        rig.fresh_topic(point.partitions) as empty,
    ):
        if point.shards != SHARDS:
            statements = (one.format(shards=point.shards) for one in _RESHARD)
            await rig.execute(*statements, database=site.database)
        if point.rows:
            rows = bench.scaled(point.rows)
            await fill(site, markers=rows // GENERATIONS, events=rows // 2 // DAYS)
        before = await written(site)
        values = await Throughput(who, work, point.partitions, point.processes).at(rig, site)
        wal = (await written(site) - before) / len(work.scans)
        values = {**values, **await sizes(site), "wal_bytes": wal}
        await rig.execute("CHECKPOINT")
        slowly = replace(site, input=empty)
        services = [rig.process(slowly) for _ in range(point.processes)]
        async with running(*services):
            await ready(slowly, services)
            slow = await latency(rig, slowly, services, few)
        await rig.check(site, work, few)
    return {**values, **slow}
