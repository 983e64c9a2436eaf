"""What the HTTP API answers. A pattern for tests of your own routes, which need no Kafka."""

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime

import httpx2
import pytest

from onceward.http import open_receiver
from onceward.settings import Settings

from <<cookiecutter.package_name>>.api import app
from <<cookiecutter.package_name>>.events import ScanRecorded
from <<cookiecutter.package_name>>.main import service

pytestmark = pytest.mark.integration


@pytest.fixture
async def client(settings: Callable[..., Settings]) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of the application, on the test's database."""
    transport = httpx2.ASGITransport(app)
    async with (
        open_receiver(service, settings()) as app.state.receiver,
        httpx2.AsyncClient(transport=transport, base_url="http://api") as one,
    ):
        yield one


async def post(client: httpx2.AsyncClient, number: int, place: str, key: str) -> httpx2.Response:
    """Send a scan."""
    scan = ScanRecorded(
        scanner="by hand",
        number=number,
        parcel_id="p-1",
        place=place,
        scanned_at=datetime(2026, 1, 1, 12, number, tzinfo=UTC),
    )
    return await client.post(
        "/scans", json=scan.model_dump(mode="json"), headers={"Idempotency-Key": key}
    )


async def test_a_scan_and_its_repeat_are_answered_with_the_same_place(
    client: httpx2.AsyncClient,
) -> None:
    first = await post(client, 1, "Vienna", "key-1")
    second = await post(client, 2, "Graz", "key-2")
    again = await post(client, 1, "Vienna", "key-1")
    assert first.json() == {"parcel_id": "p-1", "place": "Vienna", "scans": 1}
    assert second.json() == {"parcel_id": "p-1", "place": "Graz", "scans": 2}
    assert (again.status_code, again.json()) == (200, first.json())


async def test_one_key_for_two_scans_is_refused(client: httpx2.AsyncClient) -> None:
    await post(client, 1, "Vienna", "key-1")
    refused = await post(client, 2, "Graz", "key-1")
    assert (refused.status_code, refused.json()["title"]) == (
        422,
        "Idempotency-Key is already used",
    )
