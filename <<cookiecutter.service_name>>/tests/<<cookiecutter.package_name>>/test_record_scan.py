"""What a scan does. A pattern for the tests of your own handlers, which need no Kafka."""

from datetime import UTC, datetime

from onceward.testing import Harness

from <<cookiecutter.package_name>>.events import ParcelDelayed, ParcelMoved, ScanRecorded
from <<cookiecutter.package_name>>.tables import Parcel


def scan(number: int, place: str, minutes_late: int | None = None) -> ScanRecorded:
    return ScanRecorded(
        scanner="scanner-1",
        number=number,
        parcel_id="p-1",
        place=place,
        scanned_at=datetime(2026, 1, 1, 12, number, tzinfo=UTC),
        minutes_late=minutes_late,
    )


def moved(number: int, place: str) -> ParcelMoved:
    return ParcelMoved(
        parcel_id="p-1", place=place, scans=number, scanner="scanner-1", number=number
    )


async def test_a_scan_moves_its_parcel_and_is_published(harness: Harness) -> None:
    outcome = await harness.handle_batch([scan(1, "Vienna"), scan(2, "Graz")])
    assert outcome.published == [moved(1, "Vienna"), moved(2, "Graz")]
    assert [(one.key, one.sequence) for one in outcome.records] == [("p-1", 1), ("p-1", 2)]
    parcel = await harness.get(Parcel, "p-1")
    assert (parcel.place, parcel.scans) == ("Graz", 2)


async def test_a_scan_that_is_sent_twice_counts_once(harness: Harness) -> None:
    await harness.handle(scan(1, "Vienna"))
    again = await harness.handle(scan(1, "Vienna"))
    assert again.is_duplicate
    assert again.published == []
    assert (await harness.get(Parcel, "p-1")).scans == 1


async def test_scans_count_once_in_whatever_way_they_come(harness: Harness) -> None:
    async def all_are_counted(harness: Harness) -> None:
        parcel = await harness.get(Parcel, "p-1")
        assert (parcel.place, parcel.scans) == ("Graz", 3)

    scans = [scan(1, "Vienna"), scan(3, "Graz"), scan(2, "Linz")]
    assert await harness.explore(scans, invariant=all_are_counted) == 9


async def test_a_scan_counts_once_wherever_the_process_dies(harness: Harness) -> None:
    async for crash in harness.each_crash():
        await harness.handle(scan(1, "Vienna"))
        await harness.handle(scan(2, "Graz"))
        assert (await harness.get(Parcel, "p-1")).scans == 2, crash


async def test_one_scan_with_two_places_is_a_dead_letter(harness: Harness) -> None:
    await harness.handle(scan(1, "Vienna"), id="1")
    (failure,) = (await harness.handle(scan(1, "Graz"), id="1")).failures
    assert (failure.reason, failure.decision) == ("identity mismatch", "dead")
    assert (await harness.get(Parcel, "p-1")).place == "Vienna"


async def test_a_parcel_that_is_more_than_an_hour_late_is_reported(harness: Harness) -> None:
    assert (await harness.handle(scan(1, "Vienna", 60))).published == [moved(1, "Vienna")]
    late = await harness.handle(scan(2, "Graz", 61))
    delayed = ParcelDelayed(parcel_id="p-1", minutes_late=61, scanner="scanner-1", number=2)
    assert late.published == [moved(2, "Graz"), delayed]
    assert late.calls == []
