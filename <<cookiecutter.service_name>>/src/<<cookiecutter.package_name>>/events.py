"""The events that the service consumes and publishes."""
# <%- if cookiecutter.worked_example == "yes" +%>

from datetime import datetime

from pipeline import Event


class ScanRecorded(Event, type="scan.recorded.v1"):
    """A scanner has seen a parcel. A scan is identified by its scanner and its number there."""

    scanner: str
    number: int
    parcel_id: str
    place: str
    scanned_at: datetime
    minutes_late: int | None = None


class ParcelMoved(Event, type="parcel.moved.v1", topic="parcel-events"):
    """A parcel was scanned; `scans` is the number of its scans so far."""

    parcel_id: str
    place: str
    scans: int
    scanner: str
    number: int


class ParcelDelayed(Event, type="parcel.delayed.v1", topic="parcel-events"):
    """A parcel is more than an hour late."""

    parcel_id: str
    minutes_late: int
    scanner: str
    number: int


# <%- endif +%>
