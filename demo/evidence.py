"""What can be known from outside: the sender's own record, the tables, the output topic."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from demo.flights import Scan

MOVED = "parcel.moved.v1"
DELAYED = "parcel.delayed.v1"
LATE = 60
"""Minutes; a scan that is later than that publishes `parcel.delayed.v1` as well."""


class Record(NamedTuple):
    """A record of the output topic, as it lies there."""

    partition: int
    key: bytes | None
    headers: Mapping[str, bytes]
    value: bytes | None


class ParcelRow(NamedTuple):
    """A row of the service's table `parcel`."""

    id: str
    place: str
    scans: int
    version: int
    last_scanned_at: datetime


@dataclass(frozen=True)
class Evidence:
    """All of it, for one run."""

    sent: Sequence[Scan]
    """Every scan once, in the order in which they were sent first; of a parcel's scans it must be
    the order in the input topic."""
    duplicates: int
    """How many of them were sent a second time."""
    markers: Sequence[tuple[str, str]]
    """(source, id) of every inbox marker of the consumer of scans."""
    parcels: Sequence[ParcelRow]
    output: Sequence[Record]
    """The output topic from its beginning to its end, each partition in its order."""
    seconds: float
    """From the first send to the last output."""
    unordered: frozenset[str] = frozenset()
    """Parcels whose scans lie in several partitions of the input: their order is not promised."""


class Effect(NamedTuple):
    """An event that a scan is to publish: once, however often the record is repeated."""

    type: str
    scanner: str
    number: int


@dataclass(frozen=True)
class Event:
    """A record of the output topic, understood."""

    id: str
    parcel_id: str
    sequence: int
    partition: int
    effect: Effect
    told: str | int
    """The place, or the minutes late."""
    scans: int | None
    """How many scans the parcel had by then, if the event tells."""


class Illegible(ValueError):
    """A record of the output topic is not a CloudEvent of the agreed form."""


def effects(scan: Scan) -> Iterator[tuple[Effect, str | int]]:
    """Yield what a scan is to publish, each with the fact that it is to tell."""
    yield Effect(MOVED, scan.scanner, scan.number), scan.place
    if scan.minutes_late is not None and scan.minutes_late > LATE:
        yield Effect(DELAYED, scan.scanner, scan.number), scan.minutes_late


def read(record: Record) -> Event:
    """Understand a record of the output topic; raise `Illegible` if it breaks the agreement."""
    try:
        headers = {name: value.decode() for name, value in record.headers.items()}
        key, type_, sequence = record.key or b"", headers["ce_type"], headers["ce_sequence"]
        data = json.loads(record.value or b"")
        agreement = {
            "ce_specversion is 1.0": headers["ce_specversion"] == "1.0",
            "content-type is application/json": headers["content-type"] == "application/json",
            f"ce_type is {MOVED} or {DELAYED}": type_ in (MOVED, DELAYED),
            "ce_sequence has 20 digits, from 1": len(sequence) == 20 and int(sequence) > 0,
            "ce_subject is the key": headers["ce_subject"].encode() == key,
            "parcel_id is the key": data["parcel_id"].encode() == key,
        }
        if broken := [rule for rule, kept in agreement.items() if not kept]:
            raise Illegible(f"not so: {', '.join(broken)}")
        return Event(
            id=headers["ce_id"],
            parcel_id=key.decode(),
            sequence=int(sequence),
            partition=record.partition,
            effect=Effect(type_, data["scanner"], data["number"]),
            told=data["place"] if type_ == MOVED else data["minutes_late"],
            scans=data["scans"] if type_ == MOVED else None,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise Illegible(f"{problem!r} in {record}") from problem
