"""What a scan does, from Kafka to Kafka. A pattern for tests of the service as a whole."""

import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer, ConsumerRecord

from <<cookiecutter.package_name>>.events import ParcelMoved, ScanRecorded

from .conftest import Published, RunningService
from tests.servers.topics import Rename

pytestmark = pytest.mark.integration

PARCEL = "parcel-1"


def scan(number: int, place: str, minutes_late: int | None = None) -> ScanRecorded:
    return ScanRecorded(
        scanner="scanner-1",
        number=number,
        parcel_id=PARCEL,
        place=place,
        scanned_at=datetime(2026, 1, 1, 12, number, tzinfo=UTC),
        minutes_late=minutes_late,
    )


Send = Callable[..., Awaitable[None]]


@pytest.fixture
def send(producer: AIOKafkaProducer, topics: Rename) -> Send:
    """Send scans, as scanners do."""

    async def send(*scans: ScanRecorded) -> None:
        for one in scans:
            await producer.send_and_wait(
                topics("scans"),
                one.model_dump_json().encode(),
                key=one.parcel_id.encode(),
                headers=[
                    ("ce_specversion", b"1.0"),
                    ("ce_id", str(one.number).encode()),
                    ("ce_source", one.scanner.encode()),
                    ("ce_type", one.__event_type__.encode()),
                    ("content-type", b"application/json"),
                ],
            )

    return send


def types(records: list[ConsumerRecord]) -> list[str]:
    return [dict(record.headers)["ce_type"].decode() for record in records]


async def test_a_scan_moves_its_parcel_and_is_published_once(
    running_service: RunningService,
    send: Send,
    db: asyncpg.Connection,
    published: Published,
) -> None:
    async with running_service():
        await send(scan(1, "Vienna"), scan(1, "Vienna"), scan(2, "Graz"))
        events = await published("parcel-events", PARCEL, 2)
    assert types(events) == [ParcelMoved.__event_type__] * 2
    assert [json.loads(event.value)["place"] for event in events] == ["Vienna", "Graz"]
    row = await db.fetchrow("SELECT place, scans, version FROM parcel WHERE id = $1", PARCEL)
    assert tuple(row or ()) == ("Graz", 2, 2)
