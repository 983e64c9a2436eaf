"""The HTTP API: requests that handlers answer. `service api` serves it."""

# <% if cookiecutter.worked_example in ("parcels", "yes") %>
from pydantic import BaseModel

from onceward.http.app import Idempotent, create_app

from .events import ScanRecorded
# <% elif cookiecutter.worked_example == "payments" %>
from pydantic import BaseModel

from onceward.http.app import Idempotent, create_app

from .events import Reason, RequestPayment
# <% else %>
from onceward.http.app import create_app

# <% endif %>
from .main import service

app = create_app(service)
# <% if cookiecutter.worked_example in ("parcels", "yes") %>


class ParcelPlace(BaseModel):
    """Where a parcel is."""

    parcel_id: str
    place: str
    scans: int


@app.post("/scans")
async def post_scan(scan: ScanRecorded, request: Idempotent) -> ParcelPlace:
    """Record a scan. Anyone may: authenticate callers, and pass their name as `scope=`."""
    return ParcelPlace.model_validate(await request.receive(scan, consumer="answer-scan"))
# <% elif cookiecutter.worked_example == "payments" %>


class RequestedPayment(BaseModel):
    """A payment that was requested: the cents that are authorized; with 0, why it is refused."""

    payment_id: str
    authorized: int
    reason: Reason | None


@app.post("/payments")
async def post_payment(payment: RequestPayment, request: Idempotent) -> RequestedPayment:
    """Authorize a payment. Anyone may: authenticate callers, and pass their name as `scope=`."""
    answer = await request.receive(payment, consumer="answer-payment")
    return RequestedPayment.model_validate(answer)
# <% endif %>
