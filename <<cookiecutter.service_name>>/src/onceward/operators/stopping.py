"""What people pause, throttle and resume, and who did it; `apply/throttles.py` lets processes obey.

A key waits while a row waits at its head. So pausing a key is one such row, due at the end of the
pause, for each consumer and topic: no loop has to know of keys, and any number of them costs
nothing. The worker of its lane ends it when it is due: it has waited for longer than any policy
allows, so that one of version 1.0.0 makes a dead letter of it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import blake2b
from shlex import quote
from typing import NamedTuple

import asyncpg

from onceward.apply.backlog import lane_of
from onceward.apply.item import StoredRecord, order_key
from onceward.errors import Refused
from onceward.handlers.registry import Handlers
from onceward.handlers.staging import CALLS, REQUESTS

from . import audit, stop_statements
from .audit import Change

LISTED = 100
"""How many pauses and throttles are listed, if nothing else is asked for."""


class Subject(NamedTuple):
    """What is taken, and may be paused."""

    kind: str
    """`topic`: records of a topic that the service reads; `consumer`: messages of a consumer, or
    the calls that it makes; `events`: events for a topic, which relays publish; `key`: messages of
    a key."""
    name: str
    """Of a key its consumer."""
    topic: str = ""
    key: bytes = b""

    def __str__(self) -> str:
        if self.kind == "key":  # as the commands take it
            key = quote(self.key.decode(errors="backslashreplace"))
            return f"key {key} --topic {quote(self.topic)} --consumer {quote(self.name)}"
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Stop:
    """What a person has paused or throttled."""

    kind: str
    name: str
    topic: str
    key: str
    """In hex."""
    per_second: float
    """How much is taken in a second; 0: nothing."""
    until: datetime | None
    """When it ends by itself; None: when it is resumed."""
    seconds: float
    """How long ago it was asked."""
    who: str
    why: str

    @property
    def subject(self) -> Subject:
        """What it is for."""
        return Subject(self.kind, self.name, self.topic, bytes.fromhex(self.key))

    @property
    def state(self) -> str:
        """What the subject is."""
        return f"throttled to {self.per_second:g}/s" if self.per_second else "paused"


_TURN = 0x1B0CA
"""Advisory lock: two people who pause the same things do so one after the other."""


def pausable(
    handlers: Handlers, events: Collection[str], key: str = ""
) -> dict[str, list[Subject]]:
    """Return what of a service can be paused, by its name in words.

    `events` are topics that it publishes to, `key` is that of keys.
    """
    found: dict[str, list[Subject]] = {}
    for kind, names in (
        ("topic", handlers.topics),
        ("consumer", handlers.consumers),
        ("events", events),
    ):
        found |= {f"{kind} {name}": [Subject(kind, name)] for name in sorted(names)}
    for topic, consumer in sorted({(one.topic, one.consumer) for one in handlers.takers}):
        if topic != REQUESTS:
            subject = Subject("key", consumer, topic, key.encode())
            found.setdefault(f"key of {topic}", []).append(subject)
    return found


def consequence(handlers: Handlers, subject: Subject) -> str:
    """Return a sentence on what else waits or is stored while a subject is paused; empty if nothing
    is.
    """
    if subject.kind != "consumer":
        return ""
    if corrected := handlers.corrections.get(subject.name):
        return f"Keys of {corrected} wait behind its messages."
    takers = [one for one in handlers.takers if one.topic not in (CALLS, REQUESTS)]
    own = {one.topic for one in takers if one.consumer == subject.name}
    others = {one.consumer for one in takers if one.topic in own} - {subject.name}
    names = ", ".join(sorted(others))
    return f"Its messages are stored: {names} of its topic go on." if others else ""


def paused(stops: Sequence[Stop], kind: str) -> set[str]:
    """Return the names of the subjects of a kind that are paused, and not only throttled."""
    return {one.name for one in stops if one.kind == kind and not one.per_second}


def paused_topics(handlers: Handlers, stops: Sequence[Stop]) -> set[str]:
    """Return the topics that are paused, or all of whose consumers are."""
    at_rest = paused(stops, "consumer")
    going_on = {one.topic for one in handlers.takers if one.consumer not in at_rest}
    return paused(stops, "topic") | {one.topic for one in handlers.takers} - going_on


async def listed(connection: asyncpg.Connection, most: int = LISTED) -> list[Stop]:
    """Return what people have asked, the oldest first, and keys last."""
    return [Stop(**row) for row in await connection.fetch(stop_statements.LIST_STOPS, most)]


async def of_key(connection: asyncpg.Connection, key: bytes) -> list[Subject]:
    """Return the consumers and topics for which a key is paused."""
    return [Subject(*row) for row in await connection.fetch(stop_statements.FIND_STOPS_OF_KEY, key)]


async def publication(connection: asyncpg.Connection) -> str | None:
    """Return the name of the publication by which a connector publishes events; None: none."""
    name: str | None = await connection.fetchval(stop_statements.FIND_PUBLICATION)
    return name


async def ask(
    connection: asyncpg.Connection,
    subjects: Sequence[Subject],
    *,
    per_second: float = 0.0,
    lasts: timedelta | None,
    who: str,
    why: str,
) -> None:
    """Let so much of the subjects be taken in a second, by all processes, until `resume`.

    0: nothing, which is all that can be asked for keys. With `lasts` it ends by itself. Raises
    `Refused` for events that a connector publishes, and a rate that nobody can keep.
    """
    is_of_events = any(one.kind == "events" for one in subjects)
    if is_of_events and (name := await publication(connection)):
        raise Refused(
            f"a connector publishes the events, by the publication {name}: pause the connector"
            f" instead. If the relay publishes them again: DROP PUBLICATION {name}"
        )
    action = f"throttle to {per_second:g}/s" if per_second else "pause"
    async with audit.changing(connection, Change(who, action, why)) as named:
        await connection.execute(stop_statements.LOCK_STOPS, _TURN)
        await connection.execute(stop_statements.DELETE_ENDED_STOPS)
        try:
            await connection.execute(
                stop_statements.STORE_STOPS, *_columns(subjects), per_second, lasts, who, why
            )
        except asyncpg.CheckViolationError:
            raise Refused("a rate is between 0.001 and 1,000,000 in a second") from None
        if rows := _rows(subjects):
            await connection.execute(
                stop_statements.HOLD_KEYS, *_columns(rows), lasts, f"{who}: {why}"
            )
        named.extend(map(str, subjects))


async def resume(
    connection: asyncpg.Connection, subjects: Sequence[Subject], *, who: str, why: str | None
) -> bool:
    """Let the subjects be taken as before; return whether any was paused or throttled."""
    async with audit.changing(connection, Change(who, "resume", why)) as named:
        await connection.execute(stop_statements.LOCK_STOPS, _TURN)
        await connection.execute(stop_statements.DELETE_ENDED_STOPS)
        if (
            await connection.execute(stop_statements.DELETE_STOPS, *_columns(subjects))
            == "DELETE 0"
        ):
            return False
        await connection.execute(stop_statements.RELEASE_KEYS, [key for key, *_ in _rows(subjects)])
        named.extend(map(str, subjects))
    return True


def _rows(subjects: Sequence[Subject]) -> list[tuple[bytes, int, bytes, str, bytes]]:
    """Return for each key its row's key, lane, order key, consumer and the record's key."""
    rows = []
    for one in subjects:
        if one.kind == "key":
            record = StoredRecord(one.topic, 0, 0, 0, one.key, None, (), stored_for=0.0)
            order = order_key(one.name, record)
            # A worker of any of its lanes reads the whole key; that of calls has lanes of its own.
            lane = lane_of(order, "call" if one.topic == CALLS else "immediate")
            row = blake2b(b"paused" + order, digest_size=16).digest()
            rows.append((row, lane, order, one.name, one.key))
    return rows


def _columns(rows: Sequence[Sequence[object]]) -> list[list[object]]:
    return [list(column) for column in zip(*rows, strict=True)]
