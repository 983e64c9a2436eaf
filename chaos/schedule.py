"""The schedule: which faults come when, made from a seed before the run.

Nothing here does I/O.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from chaos.poison import TALLY
from demo import feed
from demo.witness import CONSUMER, TOPIC

Kind = Literal[
    "kill",
    "pause",
    "unread",
    "clients",
    "copy",
    "refused",
    "tail",
    "cut",
    "delay",
    "halfopen",
    "partition",
    "terminate",
    "database",
    "broker",
    "both",
    "readonly",
    "connections",
    "locked",
    "renamed",
    "rebalance",
    "relays",
    "rollout",
    "retention",
    "rotation",
    "replay",
    "effects",
    "scheduled",
    "audit",
    "stopped",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
SERVERS = ("postgres", "kafka")
EVERYBODY = "all"
MODES = ("refuses", "hangs", "hangs up", "stammers")
"""How the outside fails: it takes nothing; or takes what comes, and does not answer, for long or at
once, or answers twice."""
BUSIEST = "busiest"
"""Stands for the key of which most has come by then."""
PAUSED_TOPIC, THROTTLED_TOPIC = f"topic {feed.TOPIC}", f"topic {feed.TOPIC} 20"
PAUSED_CONSUMER, PAUSED_EVENTS = f"consumer {CONSUMER}", f"events {TOPIC}"
PAUSED_KEY = f"key {BUSIEST}"
STOPS = (
    PAUSED_TOPIC,
    THROTTLED_TOPIC,
    PAUSED_CONSUMER,
    f"consumer {TALLY}",
    f"consumer {TALLY} 20",
    PAUSED_EVENTS,
    PAUSED_KEY,
)
"""What people pause, as the command names it, or throttle to so many in a second."""

BETWEEN = 5.0
"""Seconds from one fault to the next, about."""
FIRST_AFTER = 1.0
"""Seconds; what is to be broken must run first."""

# Seconds that a fault lasts, shortest and longest. The rig's session timeout is 4 s, its relays'
# lease 2 s: a pause and a partition outlast both, and a delay neither.
LASTS: dict[Kind, tuple[float, float]] = {
    "kill": (0.0, 3.0),
    "pause": (5.0, 9.0),
    "unread": (8.0, 12.0),
    "clients": (8.0, 12.0),
    "copy": (3.0, 6.0),
    "refused": (4.0, 8.0),
    "tail": (2.0, 4.0),
    "cut": (0.0, 0.0),
    "delay": (3.0, 6.0),
    "halfopen": (0.0, 0.0),
    "partition": (2.0, 8.0),
    "terminate": (0.0, 0.0),
    "database": (0.5, 4.0),
    "broker": (0.5, 4.0),
    "both": (0.5, 4.0),
    "readonly": (1.0, 4.0),
    "connections": (2.0, 5.0),
    "locked": (2.0, 6.0),
    "renamed": (2.0, 5.0),
    "rebalance": (3.0, 6.0),
    "relays": (3.0, 6.0),
    "rollout": (0.0, 1.0),
    "retention": (0.0, 0.0),
    "rotation": (4.0, 8.0),
    "replay": (2.0, 15.0),
    "effects": (2.0, 5.0),
    "scheduled": (2.0, 5.0),
    "audit": (4.0, 8.0),
    "stopped": (1.0, 6.0),
}
SINGLE: tuple[Kind, ...] = ("kill", "pause", "cut", "delay", "halfopen", "partition")
"""Kinds that hit any process of a service, by itself or with all."""
_HOW_LONG: dict[Kind, str] = {"replay": "of", "rollout": "with pauses of", "tail": "of"}
LATENCY = (0.02, 0.15)
"""Seconds that a delayed link takes longer, shortest and longest."""


@dataclass(frozen=True)
class Fault:
    """One thing that breaks, and heals by itself after a while."""

    at: float
    """Seconds after the first scan."""
    kind: Kind
    target: str
    """A process of the service, everybody, a server, or a topic; or how the outside fails, or what
    people stop."""
    seconds: float = 0.0
    """How long it lasts; of a replay, how far it goes back; of a tail, how much is lost; of a
    rollout, the pause between two processes."""
    server: str = ""
    """Whose connections suffer, of a fault on the way."""
    latency: float = 0.0
    """Seconds that a delayed link takes longer."""
    hard: bool = False
    """Whether something ends by signal 9 and not when it is asked to."""

    def __str__(self) -> str:
        """Say it in a line."""
        words = [self.kind, self.target]
        if self.server:
            words.append(f"-> {self.server}")
        if self.latency:
            words.append(f"by {self.latency * 1000:.0f} ms")
        if self.hard:
            words.append("(kill -9)")
        if self.seconds:
            words.append(f"{_HOW_LONG.get(self.kind, 'for')} {self.seconds:.1f} s")
        return " ".join(words)


def make(
    seed: int,
    seconds: float,
    *,
    consumers: Sequence[str],
    relays: Sequence[str],
    kinds: Sequence[Kind] = KINDS,
    between: float = BETWEEN,
) -> list[Fault]:
    """Return faults for so many seconds; every kind comes once before any comes twice.

    With less time than `between` allows for all kinds, they come closer to each other. Raises
    `ValueError` if there is no time for any.
    """
    if not kinds:
        return []
    chance = random.Random(seed)
    usable = seconds - FIRST_AFTER
    if usable <= 0:
        raise ValueError(f"the first fault comes after {FIRST_AFTER:g} s: there must be more time")
    between = min(between, usable / len(kinds))
    deck = _deck(chance, kinds)
    faults: list[Fault] = []
    for number in range(max(len(kinds), int(usable / between))):
        at = round(FIRST_AFTER + between * (number + chance.random() * 0.8), 2)
        faults.append(_fault(chance, at, next(deck), consumers, relays))
    return faults


def beside(
    seed: int, seconds: float, *, members: Sequence[str], kinds: Sequence[Kind] = KINDS
) -> list[Fault]:
    """Return faults of a service that works beside, of those kinds that hit single processes."""
    single = [kind for kind in kinds if kind in SINGLE]
    faults = make(seed, seconds, consumers=(), relays=members, kinds=single, between=2 * BETWEEN)
    return [fault for fault in faults if fault.target in members]


def _deck(chance: random.Random, kinds: Sequence[Kind]) -> Iterator[Kind]:
    while True:
        yield from chance.sample(kinds, len(kinds))


def _fault(
    chance: random.Random, at: float, kind: Kind, consumers: Sequence[str], relays: Sequence[str]
) -> Fault:
    seconds = round(chance.uniform(*LASTS[kind]), 2)
    members = [*consumers, *relays]
    match kind:
        case "kill" | "pause" | "clients":
            return Fault(at, kind, chance.choice(members), seconds)
        case "cut" | "halfopen" | "partition":
            target, server = chance.choice([*members, EVERYBODY]), chance.choice(SERVERS)
            return Fault(at, kind, target, seconds, server)
        case "delay":
            latency = round(chance.uniform(*LATENCY), 3)
            target, server = chance.choice([*members, EVERYBODY]), chance.choice(SERVERS)
            return Fault(at, kind, target, seconds, server, latency)
        case "terminate":
            return Fault(at, kind, "postgres")
        case "database":
            return Fault(at, kind, "postgres", seconds, hard=chance.random() < 0.5)
        case "broker":
            return Fault(at, kind, "kafka", seconds, hard=chance.random() < 0.5)
        case "both":
            return Fault(at, kind, "postgres and kafka", seconds, hard=chance.random() < 0.5)
        case (
            "readonly"
            | "connections"
            | "locked"
            | "renamed"
            | "retention"
            | "rotation"
            | "scheduled"
            | "audit"
            | "copy"
        ):
            return Fault(at, kind, "postgres", seconds)
        case "tail":
            return Fault(at, kind, "kafka", seconds)
        case "refused":
            return Fault(at, kind, TOPIC, seconds)
        case "replay" | "unread":
            return Fault(at, kind, chance.choice(consumers), seconds)
        case "stopped":
            return Fault(at, kind, chance.choice(STOPS), seconds)
        case "effects":
            return Fault(at, kind, chance.choice(MODES), seconds)
        case "rollout":
            return Fault(at, kind, EVERYBODY, seconds)
        case "rebalance":
            return Fault(at, kind, "consume-extra", seconds, hard=chance.random() < 0.3)
        case "relays":
            return Fault(at, kind, "relay-extra", seconds, hard=chance.random() < 0.5)
