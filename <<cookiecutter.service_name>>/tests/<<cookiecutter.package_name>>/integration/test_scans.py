"""What a scan does, from Kafka to Kafka. A pattern for the tests of your own handlers."""

import json
from datetime import UTC, datetime
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer, ConsumerRecord

from <<cookiecutter.package_name>>.events import ParcelDelayed, ParcelMoved, ScanRecorded

from .conftest import Published, RunningService

pytestmark = pytest.mark.integration


@pytest.fixture
def parcel_id() -> str:
    """Return a parcel that no other test knows."""
    return f"parcel-{uuid4().hex[:12]}"


def scan(parcel_id: str, number: int, place: str, minutes_late: int | None = None) -> ScanRecorded:
    return ScanRecorded(
        scanner=f"scanner-of-{parcel_id}",
        number=number,
        parcel_id=parcel_id,
        place=place,
        scanned_at=datetime(2026, 1, 1, 12, number, tzinfo=UTC),
        minutes_late=minutes_late,
    )


async def send(producer: AIOKafkaProducer, *scans: ScanRecorded) -> None:
    for one in scans:
        await producer.send_and_wait(
            "scans",
            one.model_dump_json().encode(),
            key=one.parcel_id.encode(),
            headers=[
                ("ce_specversion", b"1.0"),
                ("ce_id", str(one.number).encode()),
                ("ce_source", one.scanner.encode()),
                ("ce_type", one.event_type.encode()),
                ("content-type", b"application/json"),
            ],
        )


def types(records: list[ConsumerRecord]) -> list[str]:
    return [dict(record.headers)["ce_type"].decode() for record in records]


async def test_a_scan_moves_its_parcel_and_tells_the_world(
    running_service: RunningService,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    published: Published,
    parcel_id: str,
) -> None:
    async with running_service():
        await send(producer, scan(parcel_id, 1, "Vienna"), scan(parcel_id, 2, "Graz"))
        events = await published("parcel-events", parcel_id, 2)
    assert types(events) == [ParcelMoved.event_type] * 2
    assert [json.loads(event.value)["place"] for event in events] == ["Vienna", "Graz"]
    row = await db.fetchrow("SELECT place, scans, version FROM parcel WHERE id = $1", parcel_id)
    assert tuple(row or ()) == ("Graz", 2, 2)


async def test_a_scan_that_is_sent_twice_counts_once(
    running_service: RunningService,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    published: Published,
    parcel_id: str,
) -> None:
    first, second = scan(parcel_id, 1, "Vienna"), scan(parcel_id, 2, "Graz")
    async with running_service():
        await send(producer, first, first, second)
        events = await published("parcel-events", parcel_id, 2)
    assert [json.loads(event.value)["scans"] for event in events] == [1, 2]
    assert await db.fetchval("SELECT scans FROM parcel WHERE id = $1", parcel_id) == 2


async def test_a_parcel_that_is_more_than_an_hour_late_is_told_to_be_delayed(
    running_service: RunningService,
    producer: AIOKafkaProducer,
    published: Published,
    parcel_id: str,
) -> None:
    punctual, late = scan(parcel_id, 1, "Vienna", 60), scan(parcel_id, 2, "Graz", 61)
    async with running_service():
        await send(producer, punctual, late)
        events = await published("parcel-events", parcel_id, 3)
    moved, delayed = ParcelMoved.event_type, ParcelDelayed.event_type
    assert types(events) == [moved, moved, delayed]
    assert json.loads(events[2].value)["minutes_late"] == 61
