"""Our contestant: the baked service, its worked example as it is, on topics of the benchmark.

`python -m benchmarks.ours <command>` is the command `service`. BENCH_HANDLER says which handler:
`orm` is the worked example's own, `deferred` the same through the backlog.
"""

import os

from parcel_tracker.events import (  # type: ignore[import-not-found]
    ParcelDelayed,
    ParcelMoved,
    ScanRecorded,
)
from parcel_tracker.handlers import record_scan  # type: ignore[import-not-found]
from parcel_tracker.tables import Base, Parcel  # type: ignore[import-not-found]

from pipeline import Handlers, Service  # type: ignore[import-not-found]
from pipeline.commands import command_line  # type: ignore[import-not-found]

KIND = os.environ["BENCH_HANDLER"]

handlers = Handlers()
handlers.on(
    ScanRecorded,
    topic=os.environ["BENCH_INPUT"],
    consumer="record-scan",
    loads=Parcel.by("parcel_id"),
    mode="deferred" if KIND == "deferred" else "immediate",
)(record_scan)

for event in (ParcelMoved, ParcelDelayed):
    event.event_topic = os.environ["BENCH_OUTPUT"]

main = command_line(Service(os.environ["BENCH_NAME"], handlers=handlers, metadata=Base.metadata))

if __name__ == "__main__":
    main()
