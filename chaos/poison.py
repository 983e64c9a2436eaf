"""Poison: what may be wrong with a scan, and what must become of it.

The feed puts it in, the handlers of `chaos.troubled` act on it, and the checker knows it again from
the record alone. Nothing here does I/O.
"""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from demo.feed import headers
from demo.flights import Scan
from demo.witness import CONSUMER

TALLY = "tally"
"""The deferred consumer: it writes every scan into a table of its own."""
CONSUMERS = (CONSUMER, TALLY)

ATTEMPTS = 3
SCHEDULE = (0.2, 0.5)
"""Seconds between them."""
TIMEOUT = 1.0
"""Seconds that a handler may take."""

CALLS = "CHAOS_CALLS"
"""The variable that names the file of the handlers' calls."""
AFTER_DEATH = "CHAOS_AFTER_DEATH"
"""The variable that says what a death does to a key of the deferred consumer."""

Illegible = Literal[
    "missing attribute",
    "invalid attribute",
    "unsupported specversion",
    "invalid envelope",
    "not CloudEvents",
]
"""Records that nobody can read, by the reason that their dead letters must have."""
ILLEGIBLE: tuple[Illegible, ...] = get_args(Illegible)

Trouble = Literal[
    "asks",
    "dawdles",
    "parks",
    "raises",
    "hangs",
    "spoils",
    "rejects",
    "blames",
    "disconnects",
    "crashes",
    "remembers",
    "ends",
    "rejects-late",
    "raises-late",
]
"""What a handler does, the first times or always: reads the backlog and goes on; takes a while;
has it set aside, once; raises; takes longer than it may; lets the flush fail; rejects the scan;
executes a statement that blames the server; ends its session of the database; kills its process of
the database, which restarts the server; leaves a setting, a lock and a table with the connection,
and rejects the scan if an earlier one has; ends the transaction and begins another, from a context
of its own; rejects the scan, or raises, when its work is done."""

Kind = Trouble | Illegible | Literal["invalid payload", "unknown type", "impostor"]

UNKNOWN_TYPE = b"scan.voided.v1"
RIG = "rig"
"""Header that tells of an illegible record what it was: source, number, and what is wrong."""


class Poison(NamedTuple):
    """What is wrong with a scan."""

    kind: Kind
    """An impostor is another payload under the scan's identity, sent after it."""
    consumer: str = ""
    """Whose handler is in trouble."""
    times: int = 0
    """Attempts that fail because of it."""

    def __str__(self) -> str:
        """Write it as a payload holds it."""
        return " ".join(map(str, self))

    @property
    def uses_session(self) -> bool:
        """Whether the service's own handler uses `tx.session` because of it."""
        return self.consumer == CONSUMER and self not in LATE


class Fate(NamedTuple):
    """What must become of a message at a consumer."""

    state: Literal["applied", "waiting", "dead", "skipped"]
    reason: str = ""
    attempts: int = 0
    """Those that failed."""


def fate(poison: Poison | None, consumer: str) -> Fate:
    """Return what must become of a message with this poison, if nothing before holds its key."""
    if poison is None:
        return Fate("applied")
    if poison.kind == "unknown type":
        return Fate("skipped")
    if poison.kind == "invalid payload":
        return Fate("dead", "invalid payload")
    if poison.consumer != consumer:
        return Fate("applied")
    if poison.kind in ("rejects", "rejects-late"):
        return Fate("dead", "rejected", 1)
    if poison.times >= ATTEMPTS:
        return Fate("dead", "attempts used up", ATTEMPTS)
    return Fate("applied", attempts=poison.times)


_TROUBLES: Sequence[tuple[Trouble, int]] = (
    ("asks", 0),
    ("dawdles", 0),
    ("parks", 0),
    ("rejects", 1),
    ("raises", 1),
    ("raises", 2),
    ("raises", ATTEMPTS),
    ("hangs", 1),
    ("hangs", ATTEMPTS),
    ("spoils", 1),
    ("spoils", ATTEMPTS),
    ("blames", 1),
    ("blames", ATTEMPTS),
    ("disconnects", 1),
    ("disconnects", ATTEMPTS),
    ("remembers", 0),
    ("ends", 1),
    ("ends", ATTEMPTS),
)
LATE: Sequence[Poison] = (
    Poison("rejects-late", CONSUMER, 1),
    Poison("raises-late", CONSUMER, ATTEMPTS),
)
"""The service's own handler has done its work, by `tx` alone, and has waited for nothing when it
fails: where messages share a session, that is undone in memory, and the others go on."""
EVERY: Sequence[Poison] = (
    *(Poison(kind, one, times) for kind, times in _TROUBLES for one in CONSUMERS),
    *LATE,
    Poison("invalid payload"),
    Poison("unknown type"),
    Poison("impostor"),
    *(Poison(kind) for kind in ILLEGIBLE),
)
CRASHES: Sequence[Poison] = tuple(
    Poison("crashes", one, times) for times in (1, ATTEMPTS) for one in CONSUMERS
)
"""They come only where they are named: each attempt restarts the server three times."""
WAYS = (*EVERY, *CRASHES)
WITHOUT_SESSIONS = 0.25
"""Share of the scans, the first ones, none of which has the service's own handler use `tx.session`.
From then on its messages have sessions of their own, and nothing is undone in memory any more."""


def spread(
    scans: Sequence[Scan], share: float, seed: int, kinds: Sequence[str] = ()
) -> dict[Scan, Poison]:
    """Return which of the scans are poisoned, and how: every way is about as frequent as another.

    `kinds` are those that come, maybe with the consumer: "raises", "raises tally"; all of them if
    there are none, see `WITHOUT_SESSIONS`.
    """
    chance = random.Random(f"poison {seed}")
    named = [one for one in WAYS if {one.kind, f"{one.kind} {one.consumer}"} & {*kinds}]
    ways = named if kinds else EVERY
    first = ways if kinds else [one for one in ways if not one.uses_session]
    until = WITHOUT_SESSIONS * len(scans)
    return {
        scan: chance.choice(first if place < until else ways)
        for place, scan in enumerate(scans)
        if chance.random() < share
    }


def record(scan: Scan, poison: Poison | None) -> tuple[bytes, list[tuple[str, bytes]]]:
    """Return value and headers of the record that reports the scan."""
    value, attributes = scan.payload(), dict(headers(scan))
    del attributes["ce_time"]  # years ago: by it all of them would be too old once one was
    match poison and poison.kind:
        case None:
            pass
        case "invalid payload":
            value = _changed(value, place=None)
        case "impostor":
            value = _changed(value, place=f"not {scan.place}")
        case "unknown type":
            attributes["ce_type"] = UNKNOWN_TYPE
        case "missing attribute":
            del attributes["ce_id"]
        case "invalid attribute":
            attributes["ce_source"] += b"\xff"
        case "unsupported specversion":
            attributes["ce_specversion"] = b"0.3"
        case "not CloudEvents":
            attributes = {"content-type": b"application/json"}
        case "invalid envelope":
            attributes = {"content-type": b"application/cloudevents+json"}
            value = value[:-1]
        case _:
            value = _changed(value, trouble=str(poison))
    if poison and poison.kind in ILLEGIBLE:
        attributes[RIG] = f"{scan.source} {scan.number} {poison.kind}".encode()
    return value, list(attributes.items())


def trouble(payload: bytes | None) -> Poison | None:
    """Return the handler's trouble that a payload tells of."""
    if not payload or b'"trouble"' not in payload:
        return None
    kind, consumer, times = json.loads(payload)["trouble"].split()
    return Poison(kind, consumer, int(times))


class Given(NamedTuple):
    """A record of the input topic, understood."""

    place: tuple[int, int]
    """Partition and offset."""
    sent_at: float
    """Seconds since 1970."""
    identity: tuple[str, str]
    """Source and id of the scan; what nobody else can read says it to the rig alone."""
    key: bytes
    value: bytes
    poison: Poison | None
    """As far as the record alone tells: an impostor looks like any other."""

    @property
    def is_legible(self) -> bool:
        """Whether it can be read as an event."""
        return self.poison is None or self.poison.kind not in ILLEGIBLE

    @property
    def scan(self) -> Scan | None:
        """The scan, if the payload is one."""
        data = {name: v for name, v in json.loads(self.value).items() if name != "trouble"}
        return None if data["place"] is None else Scan.read(json.dumps(data).encode())


def understand(
    place: tuple[int, int],
    sent_at: float,
    key: bytes,
    value: bytes,
    attributes: Mapping[str, bytes],
) -> Given:
    """Read a record of the feed."""
    if RIG in attributes:
        source, number, kind = attributes[RIG].decode().split(" ", 2)
        return Given(place, sent_at, (source, number), key, value, Poison(kind))  # type: ignore[arg-type]
    identity = attributes["ce_source"].decode(), attributes["ce_id"].decode()
    poison = trouble(value)
    if attributes["ce_type"] == UNKNOWN_TYPE:
        poison = Poison("unknown type")
    elif json.loads(value)["place"] is None:
        poison = Poison("invalid payload")
    return Given(place, sent_at, identity, key, value, poison)


def _changed(value: bytes, **fields: object) -> bytes:
    return json.dumps({**json.loads(value), **fields}).encode()
