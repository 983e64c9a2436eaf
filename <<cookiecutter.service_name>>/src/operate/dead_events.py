"""Commands on events that Kafka rejects: the dead ones, as dead letters in `dead`, and others.

What is changed is changed in chunks, each a transaction that holds the cursor of one shard, so that
the relay that owns it stores no rejected event meanwhile.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import asyncpg

from pipeline.settings import Settings

from .dead import (
    CHUNK,
    LIMITS,
    NAMED,
    SECONDS,
    Became,
    Shown,
    State,
    advice,
    newest,
    shown,
    state_of,
    states,
    until_none_waits,
)
from .operations import Refused

REASONS: Mapping[str, str] = {
    "topic missing": "create the topic, or run `service topics create`: then it is published;"
    " or discard it",
    "topic not allowed": "allow the service's user to Describe and Write the topic: then it is"
    " published; or discard it",
    "topic rejects many": "nothing: it is tried again; see the dead events of its topic",
    "topic not writable": "discard it: it is one of the brokers' own topics",
    "too large": "raise the topic's max.message.bytes above its size, then redrive; or discard it",
    "not valid": "see what the topic demands (a compacted one: a key), then redrive; or discard it",
    "follows another": "nothing: it goes after those that wait for its topic",
    "redriven": "nothing: it is tried again as soon as a relay sees it",
}
"""Every reason for which an event is rejected, or waits, and what a person is to do."""

_REASON = "COALESCE(reason, 'follows another')"

_STATES = states("parked_at")


def _asking(state: State, question: str, rest: str) -> str:
    condition, since = _STATES[state]
    return f"""
{question}
  FROM pipeline.outbox_rejected
 WHERE {condition}
   AND ($1::bigint[] IS NULL OR id = ANY ($1))
   AND ($2::text[] IS NULL OR {_REASON} = ANY ($2))
   AND ($3::text IS NULL OR event_id = $3)
   AND ($4::text IS NULL OR type = $4)
   AND ($5::text IS NULL OR topic = $5)
   AND ($6::bytea IS NULL OR key = $6)
   AND ($7::timestamptz IS NULL OR {since} >= $7)
   AND ($8::timestamptz IS NULL OR {since} <= $8)
{rest}
""".replace("<since>", since)


_COUNTS = {
    state: _asking(
        state,
        f"SELECT {_REASON} AS reason, type, topic, count(*) AS count, min(<since>) AS oldest,"
        " max(<since>) AS newest",
        "GROUP BY 1, type, topic ORDER BY count DESC, 1, 2, 3",
    )
    for state in _STATES
}

_COLUMNS = f"""id, {_REASON} AS reason, event_id, source, type, topic, key,
       COALESCE(datalength, octet_length(payload)) AS size,
       created_at, parked_at, died_at, discarded_at, error"""

_EVENTS = {
    state: _asking(
        state,
        f"SELECT {_COLUMNS}, <since> AS since",
        "AND ($9::timestamptz IS NULL OR (<since>, id) < ($9, $10::bigint))"
        " ORDER BY <since> DESC, id DESC LIMIT $11",
    )
    for state in _STATES
}

_SHARDS = {state: _asking(state, "SELECT DISTINCT shard", "ORDER BY shard") for state in _STATES}

_CHUNK = {
    state: _asking(state, "SELECT id", "AND shard = $9 AND id > $10 ORDER BY id LIMIT $11")
    for state in _STATES
}

_EVENT = f"""
SELECT {_COLUMNS}, payload, dataref, subject, sequence, content_type, traceparent, discarded_by,
       discarded_why
  FROM pipeline.outbox_rejected
 WHERE id = $1
"""

_NUMBER = """
SELECT count(*) FROM pipeline.outbox_rejected WHERE died_at IS NOT NULL AND discarded_at IS NULL
"""

_HOLD_SHARD = "SELECT FROM pipeline.outbox_cursor WHERE shard = $1 FOR UPDATE"

_REDRIVE = """
UPDATE pipeline.outbox_rejected
   SET died_at = NULL, parked_at = clock_timestamp(), reason = 'redriven', error = NULL
 WHERE id = ANY ($1)
"""

_DISCARD = """
UPDATE pipeline.outbox_rejected
   SET died_at = COALESCE(died_at, clock_timestamp()), discarded_at = clock_timestamp(),
       discarded_by = $2, discarded_why = $3
 WHERE id = ANY ($1)
"""

_BECAME = """
SELECT id, reason, error, died_at IS NOT NULL AS is_dead
  FROM pipeline.outbox_rejected WHERE id = ANY ($1)
"""


@dataclass(frozen=True, slots=True)
class Which:
    """What events are chosen by; None chooses all."""

    ids: Sequence[int] | None = None
    reasons: Sequence[str] | None = None
    event_id: str | None = None
    type: str | None = None
    topic: str | None = None
    key: bytes | None = None
    since: datetime | None = None
    until: datetime | None = None

    @property
    def arguments(self) -> tuple[object, ...]:
        """The parameters of every question."""
        return (
            self.ids,
            self.reasons,
            self.event_id,
            self.type,
            self.topic,
            self.key,
            self.since,
            self.until,
        )


@dataclass(frozen=True, slots=True)
class RejectedEvent:
    """An event that was committed and that Kafka has not taken, in short."""

    id: int
    """Its number in the outbox, which names it: an event's id is its source's business."""
    state: State
    reason: str
    event_id: str
    source: str
    type: str
    topic: str
    key: Shown
    size: int | None
    """Bytes of its payload."""
    created_at: datetime
    parked_at: datetime
    """Since when it has waited, or had until it died."""
    died_at: datetime | None
    discarded_at: datetime | None
    error: str | None


@dataclass(frozen=True, slots=True)
class EventDetail:
    """All that is stored of one."""

    event: RejectedEvent
    advice: str
    """What a person is to do."""
    payload: Shown
    dataref: str | None
    """Where the payload is, if it is not here."""
    subject: str | None
    sequence: int | None
    content_type: str
    traceparent: str | None
    discarded_by: str | None
    discarded_why: str | None


@dataclass(frozen=True, slots=True)
class EventGroup:
    """How many are alike."""

    reason: str
    type: str
    topic: str
    count: int
    oldest: datetime
    newest: datetime


class EventOutcome(StrEnum):
    """What has become of an event that was redriven."""

    WAITING = "waiting"
    """No relay has tried it yet, or it was refused and is tried again."""
    DEAD = "dead"
    """It is dead again."""
    SENT = "sent"


async def number(connection: asyncpg.Connection) -> int:
    """Count the dead ones."""
    counted: int = await connection.fetchval(_NUMBER, timeout=SECONDS)
    return counted


async def count(connection: asyncpg.Connection, state: State, which: Which) -> list[EventGroup]:
    """Count what is alike."""
    rows = await connection.fetch(_COUNTS[state], *which.arguments, timeout=SECONDS)
    return [EventGroup(*row) for row in rows]


async def events(
    connection: asyncpg.Connection, state: State, which: Which, limit: int
) -> AsyncIterator[RejectedEvent]:
    """Yield the newest ones, at most `limit`."""
    async for row in newest(connection, _EVENTS[state], which.arguments, "id", limit):
        yield _event(row)


async def detail(connection: asyncpg.Connection, id: int) -> EventDetail:
    """Return all that is stored of one. Raises `Refused`."""
    row = await connection.fetchrow(_EVENT, id)
    if row is None:
        raise Refused(f"no event {id} was rejected: see `service dead events list`")
    return EventDetail(
        event=_event(row),
        advice=advice(row, REASONS),
        payload=shown(row["payload"]),
        dataref=row["dataref"],
        subject=row["subject"],
        sequence=row["sequence"],
        content_type=row["content_type"],
        traceparent=row["traceparent"],
        discarded_by=row["discarded_by"],
        discarded_why=row["discarded_why"],
    )


def _event(row: asyncpg.Record) -> RejectedEvent:
    return RejectedEvent(
        id=row["id"],
        state=state_of(row),
        reason=row["reason"],
        event_id=row["event_id"],
        source=row["source"],
        type=row["type"],
        topic=row["topic"],
        key=shown(row["key"]),
        size=row["size"],
        created_at=row["created_at"],
        parked_at=row["parked_at"],
        died_at=row["died_at"],
        discarded_at=row["discarded_at"],
        error=row["error"],
    )


def patience_of(settings: Settings) -> float:
    """Return for how long a relay may be held up: it has a third of its lease left after that."""
    return settings.relay_lease / 3


async def redrive(
    connection: asyncpg.Connection, which: Which, *, patience: float
) -> AsyncIterator[Sequence[int]]:
    """Let relays publish dead events again, in order; yields what was committed.

    The relay that owns them notices within a third of its lease. `patience` is how many seconds to
    wait for its transaction, and how many it waits for this process if it is stopped.
    """
    async for ids in _in_chunks(connection, "dead", which, patience, _REDRIVE):
        yield ids


async def discard(
    connection: asyncpg.Connection,
    which: Which,
    *,
    operator: str,
    why: str,
    patience: float,
    state: State = "dead",
) -> AsyncIterator[Sequence[int]]:
    """Give up events that are dead, or wait; their rows stay and say why. Yields as `redrive`."""
    async for ids in _in_chunks(connection, state, which, patience, _DISCARD, operator, why):
        yield ids


async def _in_chunks(
    connection: asyncpg.Connection,
    state: State,
    which: Which,
    patience: float,
    change: str,
    *arguments: object,
) -> AsyncIterator[Sequence[int]]:
    """Change events shard by shard, and those of a key in their order."""
    for (shard,) in await connection.fetch(_SHARDS[state], *which.arguments, timeout=SECONDS):
        ids = [0]
        while ids:
            async with connection.transaction():
                # A stopped process must not hold the shard.
                await connection.execute(LIMITS, f"{round(patience * 1000)}ms")
                await connection.execute(_HOLD_SHARD, shard)
                rows = await connection.fetch(
                    _CHUNK[state], *which.arguments, shard, ids[-1], CHUNK
                )
                ids = [row["id"] for row in rows]
                await connection.execute(change, ids, *arguments)
            yield ids


async def follow(
    connection: asyncpg.Connection, redriven: Sequence[int], seconds: float
) -> Became[EventOutcome]:
    """Say what becomes of them, as soon as none waits any more, or so many seconds from now."""
    became = Became(dict.fromkeys(EventOutcome, 0))

    async def sort(ids: Sequence[int]) -> list[int]:
        """Note what has become of some; returns those that wait."""
        stored = {row["id"]: row for row in await connection.fetch(_BECAME, ids)}
        died = [row for row in stored.values() if row["is_dead"]]
        became.counts[EventOutcome.SENT] += len(ids) - len(stored)
        became.counts[EventOutcome.DEAD] += len(died)
        became.died += [
            {"id": str(row["id"]), "reason": row["reason"], "error": row["error"]}
            for row in died[: NAMED - len(became.died)]
        ]
        return [id for id, row in stored.items() if not row["is_dead"]]

    waiting = await until_none_waits(redriven, seconds, sort)
    became.counts[EventOutcome.WAITING] = len(waiting)
    return became
