"""Our contestant: the baked service, its worked example as it is, on topics of the benchmark.

`python -m benchmarks.ours <command>` is the command `service`. BENCH_HANDLER says which handler:
`orm` is the worked example's own, `deferred` the same through the backlog, `sql` one that does the
same by sets. `rejects`, `raises` and `flush` are the worked example's, but fail for a share of the
scans, BENCH_POISON: they raise `Reject`, or an error, or let the flush fail. The delays of their
retries are those of the default policy, divided by BENCH_FASTER.
"""

import os
import sys
from dataclasses import replace

import sqlalchemy as sa
from parcel_tracker.events import ParcelDelayed, ParcelMoved, ScanRecorded  # type: ignore[import-not-found]
from parcel_tracker.handlers import LATE, record_scan  # type: ignore[import-not-found]
from parcel_tracker.tables import Base, Parcel  # type: ignore[import-not-found]

from onceward import EventBatch, Handlers, Policy, Reject, Service, Transaction
from onceward.cli.commands import command_line
from onceward.relay import cursor
from onceward.retention import days

from benchmarks.work import is_poison

FAILING = ("rejects", "raises", "flush")
KINDS = ("orm", "deferred", "sql", *FAILING)
KIND = os.environ["BENCH_HANDLER"]
if KIND not in KINDS:
    sys.exit(f"BENCH_HANDLER is {KIND!r}; there are {', '.join(KINDS)}")
TOPIC = os.environ["BENCH_INPUT"]
CONSUMER = "record-scan"

READ = sa.text("""
SELECT id, place, scans, last_scanned_at, version FROM parcel
 WHERE id = ANY (CAST(:ids AS text[])) ORDER BY id FOR UPDATE
""")
WRITE = sa.text("""
INSERT INTO parcel (id, place, scans, last_scanned_at, version)
SELECT * FROM unnest(CAST(:ids AS text[]), CAST(:places AS text[]), CAST(:scans AS integer[]),
                     CAST(:times AS timestamptz[]), CAST(:versions AS bigint[]))
    ON CONFLICT (id) DO UPDATE
   SET place = excluded.place, scans = excluded.scans,
       last_scanned_at = excluded.last_scanned_at, version = excluded.version
""")

handlers = Handlers()


async def record_scans(batch: EventBatch[ScanRecorded]) -> None:
    """Do what the worked example does, with one statement that reads and one that writes."""
    ids = sorted({scan.parcel_id for scan, _ in batch})
    parcels = {id: [id, "", 0, None, 0] for id in ids}
    parcels |= {row[0]: list(row) for row in await batch.session.execute(READ, {"ids": ids})}
    for scan, tx in batch:
        parcel = parcels[scan.parcel_id]
        parcel[2] += 1
        if parcel[3] is None or scan.scanned_at >= parcel[3]:
            parcel[1], parcel[3] = scan.place, scan.scanned_at
        parcel[4] += 1
        moved = ParcelMoved(
            parcel_id=scan.parcel_id,
            place=parcel[1],
            scans=parcel[2],
            scanner=scan.scanner,
            number=scan.number,
        )
        tx.publish(moved, key=scan.parcel_id, sequence=parcel[4])
        if scan.minutes_late is not None and scan.minutes_late > LATE:
            parcel[4] += 1
            delayed = ParcelDelayed(
                parcel_id=scan.parcel_id,
                minutes_late=scan.minutes_late,
                scanner=scan.scanner,
                number=scan.number,
            )
            tx.publish(delayed, key=scan.parcel_id, sequence=parcel[4])
    columns = zip(*parcels.values(), strict=True)
    names = ("ids", "places", "scans", "times", "versions")
    await batch.session.execute(WRITE, dict(zip(names, map(list, columns), strict=True)))


async def record_or_fail(scan: ScanRecorded, tx: Transaction) -> None:
    """Do what the worked example does; then fail if the scan is one of those that do."""
    await record_scan(scan, tx)
    if not is_poison(scan.number, float(os.environ["BENCH_POISON"])):
        return
    if KIND == "flush":  # in a row of its own, which no other scan can put right
        nowhere = Parcel(f"of scan {scan.number}")
        nowhere.place = None
        tx.add(nowhere)
        return
    raise Reject("poison") if KIND == "rejects" else ValueError("poison")


def faster(policy: Policy) -> Policy:
    """Return the policy with shorter delays."""
    schedule = [delay / float(os.environ["BENCH_FASTER"]) for delay in policy.schedule]
    return replace(policy, schedule=schedule)


if KIND == "sql":
    handlers.on_batch(ScanRecorded, topic=TOPIC, consumer=CONSUMER)(record_scans)
else:
    handlers.on(
        ScanRecorded,
        topic=TOPIC,
        consumer=CONSUMER,
        loads=Parcel.by("parcel_id"),
        mode="deferred" if KIND == "deferred" else "immediate",
        policy=faster(Policy()) if KIND in FAILING else Policy(),
    )(record_or_fail if KIND in FAILING else record_scan)

for event in (ParcelMoved, ParcelDelayed):
    event.__event_topic__ = os.environ["BENCH_OUTPUT"]

if "BENCH_SHARDS" in os.environ:  # of a database that was made for as many
    cursor.SHARDS = days.SHARDS = int(os.environ["BENCH_SHARDS"])

main = command_line(Service(os.environ["BENCH_NAME"], handlers=handlers, metadata=Base.metadata))

if __name__ == "__main__":
    main()
