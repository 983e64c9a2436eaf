"""The HTTP API: requests that handlers answer. `service api` serves it."""

# <% if cookiecutter.worked_example == "yes" %>
from pydantic import BaseModel

from http_api.app import Idempotent, create_app

from .events import ScanRecorded
# <% else %>
from http_api.app import create_app

# <% endif %>
from .main import service

app = create_app(service)
# <% if cookiecutter.worked_example == "yes" %>


class ParcelPlace(BaseModel):
    """Where a parcel is."""

    parcel_id: str
    place: str
    scans: int


@app.post("/scans")
async def post_scan(scan: ScanRecorded, request: Idempotent) -> ParcelPlace:
    """Record a scan. Anyone may: authenticate callers, and pass their name as `scope=`."""
    return ParcelPlace.model_validate(await request.receive(scan, consumer="answer-scan"))
# <% endif %>
