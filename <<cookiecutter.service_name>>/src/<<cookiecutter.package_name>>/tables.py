"""The tables of the service, as SQLAlchemy maps them."""

# <% if cookiecutter.worked_example == "yes" %>
from datetime import datetime

from sqlalchemy import DateTime, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pipeline import Aggregate

# <%- else %>
from sqlalchemy.orm import DeclarativeBase

# <%- endif +%>


class Base(DeclarativeBase):
    """Every table of the service derives from it, so that migrations see it."""


# <%- if cookiecutter.worked_example == "yes" +%>


class Parcel(Aggregate, Base):
    """Where a parcel is."""

    __tablename__ = "parcel"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    place: Mapped[str] = mapped_column(Text)
    scans: Mapped[int]
    last_scanned_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))

    def __init__(self, id: str) -> None:
        self.id = id
        self.place = ""
        self.scans = 0

    def move_to(self, place: str, scanned_at: datetime) -> None:
        """Count a scan. The place is that of the newest scan, which may have arrived earlier."""
        self.scans += 1
        if self.last_scanned_at is None or scanned_at >= self.last_scanned_at:
            self.place = place
            self.last_scanned_at = scanned_at


# <%- endif +%>
