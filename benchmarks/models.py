"""Events and the parcel's table, as Pydantic and SQLAlchemy have them."""

from datetime import datetime

from pydantic import BaseModel
from sqlalchemy import BigInteger, DateTime, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from benchmarks.work import DELAYED, LATE, MOVED


class ScanRecorded(BaseModel):
    """A scanner has seen a parcel. A scan is identified by its scanner and its number there."""

    scanner: str
    number: int
    parcel_id: str
    place: str
    scanned_at: datetime
    minutes_late: int | None = None


class ParcelMoved(BaseModel):
    """A parcel was scanned; `scans` counts how often by now."""

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
    """Every table derives from it."""


class Parcel(Base):
    """Where a parcel is."""

    __tablename__ = "parcel"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    place: Mapped[str] = mapped_column(Text)
    scans: Mapped[int]
    last_scanned_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    version: Mapped[int] = mapped_column(BigInteger)
    """Counts the events published of the parcel."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.place = ""
        self.scans = 0
        self.last_scanned_at = None
        self.version = 0

    def move_to(self, place: str, scanned_at: datetime) -> None:
        """Count a scan; the parcel is at the place of the newest one, whatever comes in late."""
        self.scans += 1
        if self.last_scanned_at is None or scanned_at >= self.last_scanned_at:
            self.place = place
            self.last_scanned_at = scanned_at


def events_of(scan: ScanRecorded, parcel: Parcel) -> list[tuple[bytes, BaseModel]]:
    """Return what is told of a scan that the parcel has had, with the types."""
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
