"""The fates: every message applied, waiting or dead, once, for the right reason, in its order.

`demo.ledger` holds scans against rows and events; this holds the input against markers, backlog
and calls, for each consumer. Nothing here does I/O.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from chaos.poison import ATTEMPTS, CONSUMERS, TALLY, Fate, Given, fate

Identity = tuple[str, str]
"""Source and id."""
MISMATCH = "identity mismatch"


class Stored(NamedTuple):
    """A row of the backlog."""

    consumer: str
    place: tuple[int, int]
    """Partition and offset of its record."""
    key: bytes
    identity: Identity | None
    reason: str
    attempts: int
    is_dead: bool
    holds: bool


class Call(NamedTuple):
    """A call of a handler with a poisoned scan."""

    consumer: str
    source: str
    id: str
    attempts: int
    """Those that the engine had counted before."""
    fails: bool


@dataclass(frozen=True)
class Books:
    """All that can be known from outside about what became of the input."""

    given: Sequence[Given]
    """The input topic, each partition in its order."""
    markers: Mapping[str, Sequence[Identity]]
    """Of each consumer."""
    backlog: Sequence[Stored]
    tallied: Sequence[tuple[Identity, str]]
    """What the deferred consumer wrote down, in its order, and the parcel of each."""
    calls: Sequence[Call]
    interruptions: int = 0
    """How often a worker may have lost its lane, or a scan a race to insert its parcel. Each may
    cost an attempt."""
    holds: bool = True
    """Whether a death at the deferred consumer holds its key."""


class Finding(NamedTuple):
    """Something that should not be."""

    kind: Literal["lost", "doubled", "reordered", "misjudged"]
    text: str


Counts = Mapping[str, int]
"""Scans by what became of them: applied, waiting, dead, skipped; illegible if nobody read them."""


@dataclass(frozen=True)
class Judgement:
    """What became of everything, and what is wrong with that."""

    sent: int
    """Scans, each counted once."""
    duplicates: int
    """Records that are copies of one that came before."""
    counts: Mapping[str, Counts]
    """Of each consumer; they add up to the scans that were sent."""
    dead: Mapping[str, int]
    """Dead letters, by reason."""
    applied: Mapping[str, Sequence[Identity]]
    """What must have been applied, in the order of the input topic."""
    findings: Sequence[Finding]


@dataclass
class _Message:
    """All records of one identity."""

    first: Given
    partitions: set[int] = field(default_factory=set)
    impostors: set[bytes] = field(default_factory=set)
    """Other payloads."""


def judge(books: Books) -> Judgement:
    """Hold the books together, consumer by consumer."""
    messages: dict[Identity, _Message] = {}
    illegible = [given for given in books.given if not given.is_legible]
    for given in books.given:
        if given.is_legible:
            message = messages.setdefault(given.identity, _Message(given))
            message.partitions.add(given.place[0])
            if given.value != message.first.value:
                message.impostors.add(given.value)
    undecoded = [row for row in books.backlog if not row.consumer and row.identity is None]
    findings = list(_illegible(illegible, undecoded))
    findings += _other_payloads(messages, books.backlog)
    unread = {given.identity for given in illegible} - messages.keys()
    spent = _Spent(books.calls)
    counts: dict[str, Counts] = {}
    applied: dict[str, Sequence[Identity]] = {}
    for name in CONSUMERS:
        consumer = _Consumer(name, messages, books, spent)
        findings += consumer.findings()
        counts[name] = {"illegible": len(unread), **consumer.counts}
        applied[name] = consumer.applied
    findings += _order(books.tallied, applied[TALLY], messages)
    if len(spent.unearned) > books.interruptions:
        text = "{} of {}: attempt {} was counted, and no handler had failed"
        findings += [Finding("misjudged", text.format(*one)) for one in sorted(spent.unearned)]
    sent = len(messages) + len(unread)
    impostors = sum(len(message.impostors) for message in messages.values())
    return Judgement(
        sent=sent,
        duplicates=len(books.given) - sent - impostors,
        counts=counts,
        dead=Counter(row.reason for row in books.backlog if row.is_dead),
        applied=applied,
        findings=findings,
    )


class _Spent:
    """Attempts, and the failures that they were spent on."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._failed: defaultdict[tuple[str, Identity], set[int]] = defaultdict(set)
        for call in calls:
            if call.fails:
                self._failed[call.consumer, (call.source, call.id)].add(call.attempts)
        self.unearned: set[tuple[str, Identity, int]] = set()
        """Attempts that were counted without a failure: consumer, identity, which one."""
        for call in calls:
            self.count(call.consumer, (call.source, call.id), call.attempts)

    def count(self, consumer: str, identity: Identity, attempts: int) -> int:
        """Note that so many attempts were counted; returns how many of them were not earned."""
        failed = self._failed[consumer, identity]
        unearned = {(consumer, identity, n + 1) for n in range(attempts) if n not in failed}
        self.unearned |= unearned
        return len(unearned)


class _Consumer:
    """What became of every message at one consumer."""

    def __init__(
        self, name: str, messages: Mapping[Identity, _Message], books: Books, spent: _Spent
    ) -> None:
        self._name = name
        self._messages = messages
        self._holds = books.holds and name == TALLY
        self._spent = spent
        self._marked = Counter(books.markers[name])
        self._rows: defaultdict[Identity, list[Stored]] = defaultdict(list)
        self._holding: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
        """Places of the dead letters that hold their key."""
        for row in books.backlog:
            if row.consumer != name or row.identity is None or row.reason == MISMATCH:
                continue
            self._rows[row.identity].append(row)
            if row.is_dead and row.holds:
                self._holding[row.key].append(row.place)
        self.counts = Counter(applied=0, waiting=0, dead=0, skipped=0)
        self.applied: list[Identity] = []

    def findings(self) -> Iterator[Finding]:
        """Find all that is wrong with it."""
        held: set[bytes] = set()
        # Impostors hold nothing: in the order stands the one that they are taken for.
        for message in sorted(self._messages.values(), key=lambda one: one.first.place):
            became, found = self._message(message, held)
            yield from found
            self.counts[became.state] += 1
            if became.state == "applied":
                self.applied.append(message.first.identity)
            if became.state == "dead" and self._holds:
                held.add(message.first.key)
        yield from self._strangers()

    def _message(self, message: _Message, held: set[bytes]) -> tuple[Fate, list[Finding]]:
        identity = message.first.identity
        rows, markers = self._rows.get(identity, []), self._marked[identity]
        became = [Fate("applied")] * markers + [
            Fate("dead" if row.is_dead else "waiting", row.reason, row.attempts) for row in rows
        ]
        must = fate(message.first.poison, self._name)
        if len(message.partitions) > 1:
            # Nobody promises which of its copies came first, and before or behind what.
            if any(one.state == "waiting" for one in became) and self._is_behind(rows[0]):
                must = Fate("waiting")
        elif message.first.key in held and must.state != "skipped":
            must = Fate("waiting")
        name = f"{self._name}: {identity[1]} of {identity[0]} ({message.first.poison or 'sound'})"
        if len(became) > 1:
            return must, [Finding("doubled", f"{name} has become {_told(became)}")]
        is_ = became[0] if became else Fate("skipped")
        is_dead = is_.state == "dead"
        unearned = self._spent.count(self._name, identity, is_.attempts) if is_dead else 0
        if _agree(is_, must, unearned):
            return (is_ if is_dead else must), []
        kind: Literal["lost", "misjudged"] = "lost" if is_.state == "skipped" else "misjudged"
        return must, [Finding(kind, f"{name} is {_told([is_])}, not {_told([must])}")]

    def _is_behind(self, row: Stored) -> bool:
        return any(place < row.place for place in self._holding.get(row.key, ()))

    def _strangers(self) -> Iterator[Finding]:
        known = self._messages.keys()
        for identity in {*self._marked, *self._rows} - known:
            yield Finding("doubled", f"{self._name}: {identity} has a trace, and nobody sent that")


def _agree(is_: Fate, must: Fate, unearned: int) -> bool:
    """Whether a message has become what it must, given attempts that were spent on nothing."""
    if is_.state == "applied":
        return must.state == "applied"
    if is_.state == "dead" and unearned:
        is_used_up = (is_.reason, is_.attempts) == ("attempts used up", ATTEMPTS)
        earned = is_.attempts - unearned
        return (is_used_up or is_.reason == must.reason) and earned <= must.attempts
    if is_.state == "waiting":
        return must.state == "waiting"
    return is_ == must


def _told(fates: Sequence[Fate]) -> str:
    return " and ".join(
        f"{one.state} ({one.reason}, attempts {one.attempts})" if one.reason else one.state
        for one in fates
    )


def _other_payloads(
    messages: Mapping[Identity, _Message], rows: Sequence[Stored]
) -> Iterator[Finding]:
    """Find other payloads of an identity that are not one dead letter each, for all consumers."""
    stored = Counter(row.identity for row in rows if row.reason == MISMATCH and row.identity)
    for identity in {*messages, *stored}:
        must = len(messages[identity].impostors) if identity in messages else 0
        if (got := stored[identity]) != must:
            kind: Literal["lost", "doubled"] = "lost" if got < must else "doubled"
            text = f"{identity} came with {must} other payloads, {got} of them stored"
            yield Finding(kind, text)


def _illegible(given: Sequence[Given], rows: Sequence[Stored]) -> Iterator[Finding]:
    """Find records that nobody can read and that are no dead letter, each by its place."""
    must = {one.place: one.poison.kind for one in given if one.poison}
    are = Counter(row.place for row in rows)
    for place, kind in must.items():
        if place not in are:
            yield Finding("lost", f"the record at {place} ({kind}) is no dead letter")
    for row in rows:
        reason = must.get(row.place)
        if are[row.place] > 1 or reason is None:
            yield Finding("doubled", f"the record at {row.place} is a dead letter ({row.reason})")
        elif (row.reason, row.is_dead, row.holds) != (reason, True, False):
            yield Finding("misjudged", f"the record at {row.place} is {row}, not dead for {reason}")


def _order(
    tallied: Sequence[tuple[Identity, str]],
    applied: Sequence[Identity],
    messages: Mapping[Identity, _Message],
) -> Iterator[Finding]:
    """Find what the deferred consumer wrote down twice, not at all, or in another order."""
    times = Counter(identity for identity, _ in tallied)
    for identity in applied:
        if not times[identity]:
            yield Finding("lost", f"{TALLY}: {identity} was not written down")
    rank = {identity: place for place, identity in enumerate(applied)}
    stray = {message.first.key for message in messages.values() if len(message.partitions) > 1}
    latest: dict[str, int] = {}
    for identity, parcel in tallied:
        if times[identity] > 1 or identity not in rank:
            yield Finding(
                "doubled", f"{TALLY}: {identity} was written down {times[identity]} times"
            )
        elif parcel.encode() not in stray:
            if rank[identity] < latest.get(parcel, -1):
                yield Finding(
                    "reordered", f"{TALLY}: {identity} was written down after a later one"
                )
            latest[parcel] = max(latest.get(parcel, -1), rank[identity])
