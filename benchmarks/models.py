"""The events as Pydantic models, and the table of parcels in SQLAlchemy."""

from datetime import datetime

from pydantic import BaseModel
from sqlalchemy import BigInteger, DateTime, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from benchmarks.work import DELAYED, LATE, MOVED


class ScanRecorded(BaseModel):
    """A parcel was scanned. Scanner and number identify the scan."""

    scanner: str
    number: int
    parcel_id: str
    place: str
    scanned_at: datetime
    minutes_late: int | None = None


class ParcelMoved(BaseModel):
    """A parcel was scanned; `scans` is the number of its scans so far."""

    parcel_id: str
    place: str
    scans: int
    scanner: str
    number: int


class ParcelDelayed(BaseModel):
    """A parcel is more than an hour late."""

    parcel_id: str
    minutes_late: int
    scanner: str
    number: int


class Base(DeclarativeBase):
    """The base of all tables."""


class Parcel(Base):
    """A parcel, with the place of its newest scan."""

    __tablename__ = "parcel"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    place: Mapped[str] = mapped_column(Text)
    scans: Mapped[int]
    last_scanned_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    version: Mapped[int] = mapped_column(BigInteger)
    """Number of events published about the parcel."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.place = ""
        self.scans = 0
        self.last_scanned_at = None
        self.version = 0

    def move_to(self, place: str, scanned_at: datetime) -> None:
        """Count a scan; the place is that of the newest one, in whatever order scans arrive."""
        self.scans += 1
        if self.last_scanned_at is None or scanned_at >= self.last_scanned_at:
            self.place = place
            self.last_scanned_at = scanned_at


def events_of(scan: ScanRecorded, parcel: Parcel) -> list[tuple[bytes, BaseModel]]:
    """Return the events to publish after a scan of the parcel, with their types."""
    moved = ParcelMoved(
        parcel_id=parcel.id,
        place=parcel.place,
        scans=parcel.scans,
        scanner=scan.scanner,
        number=scan.number,
    )
    if scan.minutes_late is None or scan.minutes_late <= LATE:
        return [(MOVED, moved)]
    delayed = ParcelDelayed(
        parcel_id=parcel.id,
        minutes_late=scan.minutes_late,
        scanner=scan.scanner,
        number=scan.number,
    )
    return [(MOVED, moved), (DELAYED, delayed)]
