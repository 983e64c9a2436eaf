"""Errands: what some scans have the service do besides, and what must have come of that.

They have the outside called, or an event published later. Which ones do, follows from the parcel
and from how many scans it has had by then, which the events tell: so the checker knows every errand
from the output alone. Nothing here does I/O.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, NamedTuple
from zlib import crc32

from chaos.fates import Finding

Work = Literal["effects", "scheduled", "audit", "apart"]
"""Errands of a kind, named after the faults that try them. The audit is the database's: a trigger
writes down each version of a parcel's row. Apart, each scan has a transaction of its own at the
deferred consumer."""
WORK = "CHAOS_WORK"
"""The variable that names what there is to do."""
OUTSIDE = "CHAOS_OUTSIDE"
"""The variable that names the outside's URL."""

TELL, CHARGE = "tell-outside", "charge-outside"
"""The effects: one may be repeated, the other only after the outside was asked."""
KEY = "Idempotency-Key"

REMINDERS = "reminders"
"""The topic of what is published later."""
AFTER = timedelta(seconds=2)
NEVER = timedelta(days=3_650)
"""Longer than any round, whatever its clock does."""


def work_of(parcel_id: str) -> Work | None:
    """Return what the scans of a parcel have done besides; of every other one nothing."""
    works: tuple[Work | None, ...] = ("effects", "scheduled", None, None)
    return works[crc32(parcel_id.encode()) % len(works)]


def called(scans: int) -> str | None:
    """Return the effect that a parcel's scan has called."""
    return {3: TELL, 4: CHARGE}.get(scans % 5)


Step = Literal["put off", "take back", "move up"]


def step(scans: int) -> tuple[Step, str]:
    """Return what a parcel's scan does about the events to come, and part of a name.

    One is scheduled for never, and taken back; the next is replaced by one that is due soon.
    """
    if scans % 2:
        return "put off", str(scans)
    return "move up" if scans % 4 == 0 else "take back", str(scans - 1)


class Errand(NamedTuple):
    """A parcel's scan that something is to be done for."""

    parcel_id: str
    scans: int


class Request(NamedTuple):
    """A request as the outside has written it down; they stand in the order of their arrival."""

    consumer: str
    id: str
    """The idempotency key."""
    parcel_id: str
    scans: int
    word: Literal["taken", "refused", "asked: yes", "asked: no"]
    """What was answered, or would have been: the answer to a question only if it was sent."""


class Reminder(NamedTuple):
    """A record of the topic of what is published later, each partition in its order."""

    errand: Errand
    id: str
    at: datetime
    """When it was put into the outbox, by the database's clock."""
    rest: object
    """All of the record, to compare repeats."""


@dataclass(frozen=True)
class Done:
    """All that can be known from outside about the errands."""

    work: Collection[str]
    moves: Mapping[Errand, datetime]
    """The scans that took effect, and when, by the database's clock."""
    requests: Sequence[Request] = ()
    reminders: Sequence[Reminder] = ()
    waiting: Collection[str] = ()
    """Names of scheduled events."""
    versions: Sequence[Errand] = ()
    """What the audit has written down."""
    transactions: Sequence[str] = ()
    """The transaction of each scan at the deferred consumer."""
    late: int = 0
    """Calls that may come late, when somebody else may have asked and called meanwhile."""


def judge(done: Done) -> list[Finding]:
    """Find all that is wrong with the errands."""
    findings: list[Finding] = []
    if "effects" in done.work:
        findings += _calls(done)
        findings += _order_of_calls(done.requests)
        blind = list(_blind(done.requests))
        # Who is stopped between its note and its call, or loses its lane there, calls after all.
        findings += blind if len(blind) > done.late else []
    if "scheduled" in done.work:
        findings += _reminders(done)
        findings += _waiting(done)
    if "audit" in done.work:
        findings += _versions(done)
    if "apart" in done.work:
        findings += _shared(done.transactions)
    return findings


def _calls(done: Done) -> Iterator[Finding]:
    """Find calls that were not made, or that no transaction has committed."""
    asked = {
        (effect, *one)
        for one in done.moves
        if work_of(one.parcel_id) == "effects" and (effect := called(one.scans)) is not None
    }
    ids: defaultdict[tuple[str, str, int], set[str]] = defaultdict(set)
    taken: set[tuple[str, str, int]] = set()
    for one in done.requests:
        call = one.consumer, one.parcel_id, one.scans
        ids[call].add(one.id)
        if one.word == "taken":
            taken.add(call)
    for call in sorted(asked - taken):
        yield Finding("lost", f"the call {call} was not made")
    for call in sorted(ids.keys() - asked):
        yield Finding("doubled", f"the call {call} was made, and nothing was committed")
    for call, different in ids.items():
        if len(different) > 1:
            yield Finding("doubled", f"the call {call} was made under {len(different)} keys")


def _order_of_calls(requests: Sequence[Request]) -> Iterator[Finding]:
    """Find calls that began before an earlier one of their parcel had been taken."""
    taken: set[tuple[str, str, int]] = set()
    newest: dict[tuple[str, str], int] = {}
    for one in requests:
        if one.word.startswith("asked"):
            continue
        key = one.consumer, one.parcel_id
        last = newest.setdefault(key, one.scans)
        # A later one has begun, or begins: the earlier of both must be done.
        if one.scans != last and (*key, min(one.scans, last)) not in taken:
            yield Finding("reordered", f"{one} did not wait for its turn: {last} came before")
        newest[key] = max(last, one.scans)
        if one.word == "taken":
            taken.add((*key, one.scans))


def _blind(requests: Sequence[Request]) -> Iterator[Finding]:
    """Find calls that were repeated though nobody knew that they had not taken place."""
    may_call: defaultdict[str, bool] = defaultdict(lambda: True)
    for one in requests:
        if one.consumer != CHARGE:
            continue
        is_question = one.word.startswith("asked")
        if not is_question and not may_call[one.id]:
            yield Finding("doubled", f"{one} was repeated blindly")
        may_call[one.id] = one.word in ("refused", "asked: no")


def _reminders(done: Done) -> Iterator[Finding]:
    """Find events that were published not at all, twice, too early, or out of their order."""
    must = {
        errand
        for errand in done.moves
        if work_of(errand.parcel_id) == "scheduled" and step(errand.scans)[0] == "move up"
    }
    firsts: dict[Errand, Reminder] = {}
    newest: dict[str, int] = {}
    for one in done.reminders:
        errand = one.errand
        first = firsts.setdefault(errand, one)
        if first is not one:
            if (first.id, first.rest) != (one.id, one.rest):
                yield Finding("doubled", f"the event of {errand} was published as another one")
            continue
        if errand not in must:
            yield Finding("doubled", f"the event of {errand} was published, and taken back before")
        elif one.at < done.moves[errand] + AFTER:
            yield Finding("reordered", f"the event of {errand} was published before it was due")
        if errand.scans < newest.get(errand.parcel_id, 0):
            yield Finding("reordered", f"the event of {errand} was published after a later one")
        newest[errand.parcel_id] = max(newest.get(errand.parcel_id, 0), errand.scans)
    for errand in sorted(must - firsts.keys()):
        yield Finding("lost", f"the event of {errand} was not published")


def _waiting(done: Done) -> Iterator[Finding]:
    """Find scheduled events that wait though they were taken back, or are gone."""
    last: dict[str, int] = {}
    for parcel_id, scans in done.moves:
        last[parcel_id] = max(last.get(parcel_id, 0), scans)
    must = {
        name_of(Errand(parcel_id, scans))
        for parcel_id, scans in last.items()
        if work_of(parcel_id) == "scheduled" and step(scans)[0] == "put off"
    }
    for name in sorted(must - {*done.waiting}):
        yield Finding("lost", f"{name} does not wait to be published")
    for name in sorted({*done.waiting} - must):
        yield Finding("doubled", f"{name} waits to be published, and should not")


def _versions(done: Done) -> Iterator[Finding]:
    """Find scans whose version of the row the database was not given once."""
    times = Counter(done.versions)
    for one in done.moves:
        if one not in times:
            yield Finding("lost", f"the version of the row after {one} was not written")
    for one, number in times.items():
        if number > 1 or one not in done.moves:
            yield Finding("doubled", f"the version of the row after {one}: written {number} times")


def _shared(transactions: Sequence[str]) -> Iterator[Finding]:
    """Find scans that share the transaction which each was to have for itself."""
    for one, number in Counter(transactions).items():
        if number > 1:
            yield Finding("doubled", f"the transaction {one} has {number} scans, not one")


def name_of(errand: Errand) -> str:
    """Return the name by which the errand's scheduled event is known."""
    return f"{errand.parcel_id} {step(errand.scans)[1]}"
