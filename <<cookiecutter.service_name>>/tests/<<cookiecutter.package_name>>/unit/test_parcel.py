"""What a parcel knows, without servers."""

from datetime import UTC, datetime

from <<cookiecutter.package_name>>.tables import Parcel


def test_a_parcel_is_where_it_was_scanned_last_and_counts_its_scans() -> None:
    parcel = Parcel("parcel-1")
    parcel.move_to("Vienna", datetime(2026, 1, 1, 12, tzinfo=UTC))
    parcel.move_to("Graz", datetime(2026, 1, 1, 14, tzinfo=UTC))
    assert (parcel.place, parcel.scans) == ("Graz", 2)
    assert parcel.last_scanned_at == datetime(2026, 1, 1, 14, tzinfo=UTC)


def test_a_late_scan_counts_and_does_not_move_the_parcel_back() -> None:
    parcel = Parcel("parcel-1")
    parcel.move_to("Graz", datetime(2026, 1, 1, 14, tzinfo=UTC))
    parcel.move_to("Vienna", datetime(2026, 1, 1, 12, tzinfo=UTC))
    assert (parcel.place, parcel.scans) == ("Graz", 2)
    assert parcel.last_scanned_at == datetime(2026, 1, 1, 14, tzinfo=UTC)
