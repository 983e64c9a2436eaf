"""What the service does with each event."""

# <% if cookiecutter.worked_example == "yes" %>
from pipeline import Handlers, Transaction

from .events import ParcelDelayed, ParcelMoved, ScanRecorded
from .tables import Parcel

# <%- else %>
from pipeline import Handlers

# <%- endif +%>

handlers = Handlers()
# <%- if cookiecutter.worked_example == "yes" +%>

LATE = 60
"""Minutes from which a parcel counts as delayed."""


@handlers.on(ScanRecorded, topic="scans", consumer="record-scan", loads=Parcel.by("parcel_id"))
async def record_scan(scan: ScanRecorded, tx: Transaction) -> None:
    """Keep the parcel's place and tell the world; also when it is late."""
    parcel = await tx.load_or_create(Parcel, scan.parcel_id)
    parcel.move_to(scan.place, scan.scanned_at)
    tx.publish(
        ParcelMoved(
            parcel_id=parcel.id,
            place=parcel.place,
            scans=parcel.scans,
            scanner=scan.scanner,
            number=scan.number,
        ),
        of=parcel,
    )
    if scan.minutes_late is not None and scan.minutes_late > LATE:
        tx.publish(
            ParcelDelayed(
                parcel_id=parcel.id,
                minutes_late=scan.minutes_late,
                scanner=scan.scanner,
                number=scan.number,
            ),
            of=parcel,
        )


# <%- endif +%>
