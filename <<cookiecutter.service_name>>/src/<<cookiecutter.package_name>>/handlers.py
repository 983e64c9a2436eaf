"""What the service does with each event."""

# <% if cookiecutter.worked_example == "yes" %>
# <% if cookiecutter.outside_calls == "yes" %>
import httpx2
from opentelemetry.instrumentation.httpx import HTTPX2ClientInstrumentor
from pydantic import SecretStr
from pydantic_settings import BaseSettings

from effects import Call, Effects
# <% endif %>
from pipeline import Handlers, Transaction

from .events import ParcelDelayed, ParcelMoved, ScanRecorded
from .tables import Parcel
# <% else %>
# <% if cookiecutter.outside_calls == "yes" %>
from effects import Effects
# <% endif %>
from pipeline import Handlers
# <% endif %>

handlers = Handlers()
# <% if cookiecutter.outside_calls == "yes" %>
effects = Effects(handlers)
# <% endif %>
# <% if cookiecutter.worked_example == "yes" %>

LATE = 60
"""Minutes from which a parcel counts as delayed."""
# <% if cookiecutter.outside_calls == "yes" %>


class Outside(BaseSettings):
    """Settings of called services: environment variables of these names."""

    delay_webhook: SecretStr | None = None
    """URL to which each delay is sent; unset: none is. Secret, as its path grants access."""


webhook = Outside().delay_webhook
# A connection for each call: on a kept one, a late answer would be taken for that of the next call.
client = httpx2.AsyncClient(timeout=5.0, limits=httpx2.Limits(max_keepalive_connections=0))
# Passes the trace on. Its type hints lack httpx2 if httpx is installed as well.
HTTPX2ClientInstrumentor.instrument_client(client)  # type: ignore[arg-type, unused-ignore]
# <% endif %>


@handlers.on(ScanRecorded, topic="scans", consumer="record-scan", loads=Parcel.by("parcel_id"))
async def record_scan(scan: ScanRecorded, tx: Transaction) -> None:
    """Store the parcel's place, and publish its move and its delay."""
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
        delayed = ParcelDelayed(
            parcel_id=parcel.id,
            minutes_late=scan.minutes_late,
            scanner=scan.scanner,
            number=scan.number,
        )
        tx.publish(delayed, of=parcel)
        # <% if cookiecutter.outside_calls == "yes" %>
        if webhook:
            tx.call(delayed, of=parcel)


@effects.on(ParcelDelayed, consumer="tell-webhook", timeout=10.0, per_second=100)
async def tell_webhook(delayed: ParcelDelayed, call: Call) -> int:
    """Send the delay to the webhook, which drops a repeated call by its key."""
    url = webhook.get_secret_value() if webhook else ""
    headers = {"Idempotency-Key": call.id}
    answer = await client.post(url, json=delayed.model_dump(), headers=headers)
    if not answer.is_success:  # raise_for_status() would add the URL
        raise httpx2.HTTPError(f"the webhook answered {answer.status_code}")
    return answer.status_code
# <% endif %>
# <% if cookiecutter.http_api == "yes" %>


@handlers.on(ScanRecorded, topic=None, consumer="answer-scan", loads=Parcel.by("parcel_id"))
async def answer_scan(scan: ScanRecorded, tx: Transaction) -> dict[str, object]:
    """Record a scan that comes by HTTP, and answer where its parcel is now."""
    await record_scan(scan, tx)
    parcel = await tx.load_or_create(Parcel, scan.parcel_id)
    return {"parcel_id": parcel.id, "place": parcel.place, "scans": parcel.scans}
# <% endif %>
# <% endif %>
