"""The ledger: what was sent, held against what the service's tables and its output topic show.

Nothing here asks the service, and nothing here does I/O: `audit` is given the evidence and returns
its verdict, so that `tests/test_demo.py` can tamper with the evidence and demand that it shows.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from demo.evidence import (
    MOVED,
    Effect,
    Event,
    Evidence,
    Illegible,
    ParcelRow,
    Record,
    effects,
    read,
)
from demo.flights import Scan


@dataclass(frozen=True)
class Ledger:
    """The result: its fields are the keys of `report.json`."""

    sent: int
    duplicates: int
    applied: int
    published: int
    lost: int
    doubled: int
    reordered: int
    seconds: float
    rate: float

    @property
    def holds(self) -> bool:
        """Whether every scan took its full effect, once and in order."""
        return self.sent == self.applied and not (self.lost or self.doubled or self.reordered)

    def as_json(self) -> str:
        """Return the content of `report.json`."""
        return json.dumps(asdict(self), indent=2) + "\n"


@dataclass(frozen=True)
class Finding:
    """Something that should not be."""

    kind: Literal["lost", "doubled", "reordered"]
    text: str
    count: int = 1


@dataclass(frozen=True)
class Verdict:
    """The ledger and the reasons for it."""

    ledger: Ledger
    findings: Sequence[Finding]
    repeats: int
    """Records of the output that repeat an earlier one, id and all: allowed after a crash."""


def audit(evidence: Evidence) -> Verdict:
    """Hold the evidence together, parcel by parcel."""
    findings: list[Finding] = []
    parcels: defaultdict[str, _Parcel] = defaultdict(_Parcel)
    for scan in evidence.sent:
        parcels[scan.parcel_id].sent.append(scan)
    for row in evidence.parcels:
        parcels[row.id].row = row

    ids: defaultdict[str, set[Effect]] = defaultdict(set)
    for parcel_id in evidence.unordered:
        parcels[parcel_id].ordered = False
    repeats = 0
    for record in evidence.output:
        try:
            event = read(record)
        except Illegible as problem:
            findings.append(Finding("lost", f"an event that nobody can read: {problem}"))
            continue
        ids[event.id].add(event.effect)
        known = parcels[event.parcel_id].events
        if event in known:
            repeats += 1
            if record != known[event]:
                text = f"parcel {event.parcel_id}: {event.effect} was repeated with other bytes"
                findings.append(Finding("doubled", text))
        known.setdefault(event, record)

    markers = Counter(evidence.markers)
    for parcel_id, parcel in parcels.items():
        parcel.markers = [markers.pop((scan.source, str(scan.number)), 0) for scan in parcel.sent]
        findings += (replace(f, text=f"parcel {parcel_id}: {f.text}") for f in parcel.findings())
    for source, number in markers:
        findings.append(Finding("doubled", f"a marker for {number} of {source}: nobody sent that"))
    for id_, different in ids.items():
        if len(different) > 1:
            findings.append(Finding("doubled", f"{len(different)} different events are {id_}"))

    applied = min(
        sum(row.scans for row in evidence.parcels),
        sum(bool(number) for parcel in parcels.values() for number in parcel.markers),
        sum(len(parcel.moves()) for parcel in parcels.values()),
    )
    total = Counter[str]()
    for finding in findings:
        total[finding.kind] += finding.count
    ledger = Ledger(
        sent=len(evidence.sent),
        duplicates=evidence.duplicates,
        applied=applied,
        published=len(ids),
        lost=total["lost"],
        doubled=total["doubled"],
        reordered=total["reordered"],
        seconds=round(evidence.seconds, 1),
        rate=round(applied / evidence.seconds, 1) if evidence.seconds else 0.0,
    )
    return Verdict(ledger, findings, repeats)


@dataclass
class _Parcel:
    """The evidence about one parcel. The order of its scans is the order that must be kept."""

    ordered: bool = True
    """If not, only the order of the events as the service has numbered them must be."""
    sent: list[Scan] = field(default_factory=list)
    markers: list[int] = field(default_factory=list)
    """How many inbox markers each of them has."""
    row: ParcelRow | None = None
    events: dict[Event, Record] = field(default_factory=dict)
    """What was published, in the order of its first appearance, without the repeats."""

    def firsts(self) -> dict[Effect, Event]:
        """Return the event by which each effect first appeared, in that order."""
        firsts: dict[Effect, Event] = {}
        for event in self.events:
            firsts.setdefault(event.effect, event)
        return firsts

    def applied(self) -> Sequence[Scan]:
        """Return the scans in the order in which they must have been applied.

        Where it is not promised, that is the order in which the service says that they were.
        """
        if self.ordered:
            return self.sent
        numbers = {effect: event.sequence for effect, event in self.firsts().items()}
        return sorted(self.sent, key=lambda scan: numbers.get(_moved(scan), 0))

    def facts(self) -> dict[Effect, str | int]:
        """Return what each event has to tell: the place is that of the newest scan by then."""
        facts: dict[Effect, str | int] = {}
        if self.sent:
            for scan, newest in zip(self.applied(), _newest(self.applied()), strict=True):
                facts |= dict(effects(scan)) | {_moved(scan): newest.place}
        return facts

    def moves(self) -> set[Effect]:
        """Return the moves that were published and asked for."""
        asked = {_moved(scan) for scan in self.sent}
        return asked & {event.effect for event in self.events}

    def findings(self) -> list[Finding]:
        """Return all that is wrong. A wrong scan is one finding, however many traces it left."""
        found = [*self.lost(), *self.doubled(), *self.reordered()]
        return found or [*self.contradictions()]

    def lost(self) -> Iterator[Finding]:
        """Find scans without their full effect, and versions that nobody saw."""
        firsts, facts, incomplete = self.firsts(), self.facts(), 0
        for scan, markers in zip(self.sent, self.markers, strict=True):
            missing = [] if markers else ["inbox marker"]
            for effect, _ in effects(scan):
                fact = facts[effect]
                if effect not in firsts or firsts[effect].told != fact:
                    missing.append(f"{effect.type} that tells {fact}")
            if missing:
                incomplete += 1
                yield Finding("lost", f"{_name(scan)} has no {', no '.join(missing)}")

        scans, version = (self.row.scans, self.row.version) if self.row else (0, 0)
        uncounted = len(self.sent) - scans - incomplete
        if uncounted > 0:
            yield Finding("lost", f"its row counts {scans} of {len(self.sent)} scans", uncounted)
        if incomplete or uncounted > 0:
            return  # which explains what follows
        sequences = {event.sequence for event in self.events}
        newest = max(sequences, default=0)
        if gaps := max(newest, version) - len(sequences):
            yield Finding("lost", f"{gaps} of its versions were not published", gaps)
        if version < newest:
            yield Finding("lost", f"its row has version {version}, its last event {newest}")

    def doubled(self) -> Iterator[Finding]:
        """Find scans that took effect more than once, and effects that nobody asked for."""
        asked = {effect for scan in self.sent for effect, _ in effects(scan)}
        times = Counter(event.effect for event in self.events)
        twice = {effect[1:] for effect in asked if times[effect] > 1}
        for scan, markers in zip(self.sent, self.markers, strict=True):
            if markers > 1 or (scan.scanner, scan.number) in twice:
                twice.add((scan.scanner, scan.number))
                yield Finding("doubled", f"{_name(scan)} took effect more than once")
        for effect in times.keys() - asked:
            yield Finding("doubled", f"{effect}: nobody asked for that")

        surplus = (self.row.scans if self.row else 0) - len(self.sent) - len(twice)
        if surplus > 0:
            yield Finding("doubled", f"its row counts {surplus} scans too many", surplus)
        versions: defaultdict[int, set[Effect]] = defaultdict(set)
        for event in self.events:
            versions[event.sequence].add(event.effect)
        for version, different in versions.items():
            if len(different) > 1:
                text = f"{len(different)} different events have version {version}"
                yield Finding("doubled", text)

    def reordered(self) -> Iterator[Finding]:
        """Find events that first appeared after a later one."""
        rank = {(scan.scanner, scan.number): rank for rank, scan in enumerate(self.sent)}
        firsts = [event for effect, event in self.firsts().items() if effect[1:] in rank]
        latest = highest = 0
        for event in firsts:
            place = rank[event.effect[1:]]
            if (self.ordered and place < latest) or event.sequence < highest:
                yield Finding("reordered", f"{event.effect} first appeared after a later event")
            latest, highest = max(latest, place), max(highest, event.sequence)
        partitions = sorted({event.partition for event in firsts})
        if len(partitions) > 1:
            yield Finding("reordered", f"its events lie in several partitions: {partitions}")

    def contradictions(self) -> Iterator[Finding]:
        """Find state that does not follow from the scans, where each has its effect in order."""
        firsts = self.firsts()
        applied = self.applied()
        for count, scan in enumerate(applied, start=1):
            told = firsts[_moved(scan)].scans
            if told != count:
                text = f"{_name(scan)} is its scan {count}, but the event counts {told}"
                yield Finding("lost" if isinstance(told, int) and told < count else "doubled", text)
        if self.row and not self.sent:
            yield Finding("doubled", "it has a row, but nobody sent it")
        elif self.row:
            *_, last = _newest(applied)
            if (self.row.place, self.row.last_scanned_at) != (last.place, last.scanned_at):
                yield Finding("reordered", f"its row does not show {_name(last)}, its last")


def _newest(scans: Sequence[Scan]) -> Iterator[Scan]:
    """Yield for every scan the newest so far, of several that are equally new the last one."""
    newest = scans[0]
    for scan in scans:
        if scan.scanned_at >= newest.scanned_at:
            newest = scan
        yield newest


def _moved(scan: Scan) -> Effect:
    return Effect(MOVED, scan.scanner, scan.number)


def _name(scan: Scan) -> str:
    return f"scan {scan.number} of {scan.scanner}"
