"""What a person asks of dead letters: which there are, what is wrong with them, what to do.

They are rows of the backlog. What is changed is changed in chunks, each a transaction that has
seized one lane: who is cut short has done a part, and goes on when he asks again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from time import monotonic
from typing import Any, Generic, Literal, TypeVar

import asyncpg

from pipeline.apply import backlog
from pipeline.apply.batch import items_of
from pipeline.apply.item import Item, Undecoded
from pipeline.events.message import headers_of, marker_key, printable
from pipeline.handlers.policy import UNKNOWN
from pipeline.handlers.registry import Handlers
from pipeline.redaction import redact
from pipeline.retry import dead_rows, lanes

from .operations import Refused

T = TypeVar("T")
OutcomeT = TypeVar("OutcomeT", bound=StrEnum)

CHUNK = 1_000
"""Rows that one transaction changes, and one statement reads."""
TOO_OLD = "too old"
SECONDS = 600.0
"""What counting may take where millions are stored."""
_POLL_MIN, _POLL_MAX = 0.05, 1.0
NAMED = 20
"""Of those that are dead again so many are told of one by one."""

REASONS: Mapping[str, str] = {
    # Records that are nobody's: no handler has seen them.
    "missing attribute": "have the producer send it, then discard this one",
    "invalid attribute": "have the producer send it right, then discard this one",
    "invalid envelope": "have the producer send one event in each record, then discard this one",
    "unsupported specversion": "have the producer send CloudEvents 1.0, then discard this one",
    "not CloudEvents": "say by handlers.plain(…) how the topic names its events, then redrive",
    "missing identity": "name the topic's events by something that all have, then redrive",
    "unknown type": "deploy a handler, or leave handlers.demand_types(…) out, then redrive",
    # Messages that a handler was not given.
    "invalid payload": "make the event's model take it, then redrive; or discard it",
    "data missing": "put the object back, then redrive; or have it sent by a new id, and discard",
    "data changed": "put back what the event was sent with, then redrive; or discard it",
    "data elsewhere": "let PIPELINE_CLAIM_URL be the store that the producer uses, then redrive",
    "data too large": "raise PIPELINE_CLAIM_MEMORY, then redrive; or discard it",
    "identity mismatch": "ask the producer which is right, and for a new id; then discard this one",
    "sequence conflict": "see what the producer counts by, then discard, or have it sent again",
    "too old": "find out whether it was applied; if not, redrive it by its id; if so, discard it",
    "no handler": "deploy the handler; if it is dead, redrive it then, or discard it",
    # Messages that a handler has failed on.
    "attempts used up": "mend what the error names, deploy it, then redrive",
    "waited too long": "see to what it waited for, then redrive",
    "sequence gap": "have the producer send what is missing before it; if that is lost, redrive it"
    " to go on without",
    "outcome unknown": "find out at the service outside whether it took place; if not, redrive it;"
    " if so, discard it",
    "rejected": "its handler refuses it for good: mend the data or the handler, then redrive;"
    " or discard it",
    # What waits.
    "failed": "nothing: it is tried again by its schedule",
    "transaction failed": "nothing: it is tried again by its schedule",
    "takes too long": "nothing: it is tried again by its schedule",
    "locked out": "nothing: it is tried again; look for what holds the locks of its rows",
    "process died": "nothing: it is tried alone; look into the log of the process that died",
    "parked by its handler": "nothing: it is tried again when its handler said so",
    "follows another": "nothing: it goes on after what its key waits for",
    "undecided": "nothing: it is tried at once, by itself",
    "deferred": "nothing: it is handled in its turn",
    "redriven": "nothing: it is handled in its turn",
}
"""Every reason for which something is in the backlog, and what a person is to do about it."""

State = Literal["dead", "waiting", "discarded"]

DISCARDED = "nothing: it was given up, and stays for the record until it is too old"
"""What a person is to do about what was discarded, whatever its reason."""


def states(received: str) -> Mapping[State, tuple[str, str]]:
    """Return what is true of the rows in a state, and since when they are in it.

    `received` is the column that says since when a row waits.
    """
    return {
        "dead": ("died_at IS NOT NULL AND discarded_at IS NULL", "died_at"),
        "waiting": ("died_at IS NULL", received),
        "discarded": ("died_at IS NOT NULL AND discarded_at IS NOT NULL", "discarded_at"),
    }


_STATES = states("received_at")


def _asking(state: State, question: str, rest: str) -> str:
    condition, since = _STATES[state]
    return f"""
{question}
  FROM pipeline.backlog
 WHERE {condition}
   AND ($1::bytea[] IS NULL OR key = ANY ($1))
   AND ($2::text[] IS NULL OR reason = ANY ($2))
   AND reason <> ALL ($3::text[])
   AND ($4::text[] IS NULL OR consumer = ANY ($4))
   AND ($5::text IS NULL OR id = $5)
   AND ($6::text IS NULL OR type = $6)
   AND ($7::text IS NULL OR topic = $7)
   AND ($8::bytea IS NULL OR record_key = $8)
   AND ($9::timestamptz IS NULL OR {since} >= $9)
   AND ($10::timestamptz IS NULL OR {since} <= $10)
{rest}
""".replace("<since>", since)


_COUNTS = {
    state: _asking(
        state,
        "SELECT reason, consumer, type, topic, count(*) AS count, min(<since>) AS oldest,"
        " max(<since>) AS newest",
        "GROUP BY reason, consumer, type, topic ORDER BY count DESC, 1, 2, 3, 4",
    )
    for state in _STATES
}

_LETTERS = {
    state: _asking(
        state,
        'SELECT key, consumer, reason, attempts, type, source, id, topic, partition, "offset",'
        " record_key, received_at, due_at, died_at, discarded_at, holds, error,"
        " <since> AS since",
        "AND ($11::timestamptz IS NULL OR (<since>, key) < ($11, $12::bytea))"
        " ORDER BY <since> DESC, key DESC LIMIT $13",
    )
    for state in _STATES
}

_LANES = _asking("dead", "SELECT DISTINCT lane", "ORDER BY lane")

_CHUNK = _asking(
    "dead",
    'SELECT key, order_key, consumer, source, id, topic, partition, "offset"',
    'AND lane = $11 ORDER BY order_key, sequence, partition, "offset" LIMIT $12',
)

_KEYS = "SELECT key FROM pipeline.backlog WHERE key BETWEEN $1 AND $2 ORDER BY key LIMIT 2"

_ROW = "SELECT * FROM pipeline.backlog WHERE key = $1"

LIMITS = """
SELECT set_config('lock_timeout', $1, true),
       set_config('idle_in_transaction_session_timeout', $1, true)
"""

_STORED = """
SELECT key, topic, partition, "offset", reason, error, died_at IS NOT NULL AS is_dead
  FROM pipeline.backlog WHERE key = ANY ($1)
"""

_MARKED = """
SELECT key, topic, partition, "offset"
  FROM pipeline.inbox
 WHERE generation = ANY (ARRAY(
           SELECT generate_series(oldest, current) FROM pipeline.inbox_generation))
   AND key = ANY ($1)
"""

_AGO = "SELECT clock_timestamp() - $1::interval"


@dataclass(frozen=True, slots=True)
class Which:
    """What rows are chosen by; None chooses all."""

    keys: Sequence[bytes] | None = None
    reasons: Sequence[str] | None = None
    but_reasons: Sequence[str] = ()
    consumers: Sequence[str] | None = None
    event_id: str | None = None
    type: str | None = None
    topic: str | None = None
    record_key: bytes | None = None
    since: datetime | None = None
    until: datetime | None = None

    @property
    def arguments(self) -> tuple[object, ...]:
        """The parameters of every question."""
        return (
            self.keys,
            self.reasons,
            self.but_reasons,
            self.consumers,
            self.event_id,
            self.type,
            self.topic,
            self.record_key,
            self.since,
            self.until,
        )


Shown = dict[Literal["text", "hex"], str] | None
"""Bytes: `text` if they are UTF-8, and else `hex`."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter, or a message that waits, in short."""

    id: str
    """Names it; its first 16 characters do, too."""
    state: State
    reason: str
    attempts: int
    consumer: str
    """Empty for a record that is nobody's."""
    type: str | None
    source: str | None
    message_id: str | None
    topic: str
    partition: int
    offset: int
    key: Shown
    received_at: datetime
    due_at: datetime | None
    """None: behind another of its key, or dead."""
    died_at: datetime | None
    discarded_at: datetime | None
    holds: bool
    """Whether later messages of its key wait until a person has decided on it."""
    error: str | None


@dataclass(frozen=True, slots=True)
class Detail:
    """All that is stored of one."""

    letter: Letter
    advice: str
    """What a person is to do."""
    value: Shown
    headers: Sequence[tuple[str, Shown]]
    timestamp: int
    """The record's, in milliseconds since 1970."""
    waited: float
    """Seconds that its policy has let it wait."""
    hash: str | None
    """Hash of type and data, in hex."""
    remembered_hash: str | None
    """What its identity came with before, if it is an identity mismatch."""
    traceparent: str | None
    traceback: str | None
    discarded_by: str | None
    discarded_why: str | None


@dataclass(frozen=True, slots=True)
class Group:
    """How many are alike."""

    reason: str
    consumer: str
    type: str | None
    topic: str
    count: int
    oldest: datetime
    newest: datetime


class Outcome(StrEnum):
    """What has become of a message that was redriven."""

    WAITING = "waiting"
    """It has not had its turn yet, or has failed and is tried again."""
    DEAD = "dead"
    """It is dead again."""
    APPLIED = "applied"
    DUPLICATE = "duplicate"
    """Its event was applied meanwhile, by way of another record."""
    GONE = "gone"
    """Its record is another event to the handlers now."""


@dataclass(frozen=True, slots=True)
class Redriven:
    """A row that was redriven."""

    keys: Sequence[bytes]
    """Its own, and those of the rows that may come of it."""
    markers: Sequence[bytes]
    """What the inbox remembers its message by, at each of its consumers."""
    place: tuple[str, int, int]


@dataclass(slots=True)
class Became(Generic[OutcomeT]):
    """What has become of those that were redriven."""

    counts: dict[OutcomeT, int]
    died: list[dict[str, str | None]] = field(default_factory=list)
    """Some of those that are dead again: `id`, `reason`, `error`."""


async def ago(connection: asyncpg.Connection, time: timedelta) -> datetime:
    """Return when it was so long ago, by the database's clock."""
    moment: datetime = await connection.fetchval(_AGO, time)
    return moment


async def keys_of(connection: asyncpg.Connection, handles: Sequence[str]) -> list[bytes]:
    """Return the keys of rows named by the first characters of their ids. Raises `Refused`."""
    return [await _key(connection, handle) for handle in handles]


async def _key(connection: asyncpg.Connection, handle: str) -> bytes:
    try:
        if not 8 <= len(handle) <= 32:
            raise ValueError(handle)
        first, last = (bytes.fromhex(handle.ljust(32, digit)) for digit in "0f")
    except ValueError:
        raise Refused(f"{handle!r} is not the id of a dead letter: 8 to 32 hex digits") from None
    found = await connection.fetch(_KEYS, first, last)
    if len(found) != 1:
        how_many = "more than one has" if found else "nothing has"
        raise Refused(f"{how_many} an id that begins with {handle}: see `service dead list`")
    key: bytes = found[0]["key"]
    return key


async def count(connection: asyncpg.Connection, state: State, which: Which) -> list[Group]:
    """Count what is alike."""
    rows = await connection.fetch(_COUNTS[state], *which.arguments, timeout=SECONDS)
    return [Group(*row) for row in rows]


async def letters(
    connection: asyncpg.Connection, state: State, which: Which, limit: int
) -> AsyncIterator[Letter]:
    """Yield the newest ones, at most `limit`."""
    async for row in newest(connection, _LETTERS[state], which.arguments, "key", limit):
        yield _letter(row)


async def newest(
    connection: asyncpg.Connection,
    statement: str,
    arguments: Sequence[object],
    name: str,
    limit: int,
) -> AsyncIterator[asyncpg.Record]:
    """Yield the newest rows, at most `limit`, page by page.

    After its arguments the statement takes `since` and the column `name` of the last row before.
    """
    after: tuple[object, object] = None, None
    while limit > 0:
        size = min(limit, CHUNK)
        rows = await connection.fetch(statement, *arguments, *after, size, timeout=SECONDS)
        for row in rows:
            yield row
        if len(rows) < size:
            return
        limit -= size
        after = rows[-1]["since"], rows[-1][name]


async def detail(connection: asyncpg.Connection, handle: str) -> Detail:
    """Return all that is stored of one. Raises `Refused`."""
    row = await connection.fetchrow(_ROW, await _key(connection, handle))
    if row is None:
        raise Refused(f"{handle} has just left the backlog")
    return Detail(
        letter=_letter(row),
        advice=advice(row, REASONS),
        value=shown(row["value"]),
        headers=[(printable(name), shown(value)) for name, value in headers_of(row["headers"])],
        timestamp=row["timestamp"],
        waited=row["waited"],
        hash=row["hash"] and row["hash"].hex(),
        remembered_hash=row["remembered_hash"] and row["remembered_hash"].hex(),
        traceparent=row["traceparent"],
        traceback=row["traceback"],
        discarded_by=row["discarded_by"],
        discarded_why=row["discarded_why"],
    )


def advice(row: asyncpg.Record, reasons: Mapping[str, str]) -> str:
    """Return what a person is to do about a row."""
    if row["discarded_at"]:
        return DISCARDED
    return reasons.get(row["reason"], "nothing is known of this reason")


def state_of(row: asyncpg.Record) -> State:
    """Return what state a row is in."""
    return "discarded" if row["discarded_at"] else "dead" if row["died_at"] else "waiting"


def _letter(row: asyncpg.Record) -> Letter:
    return Letter(
        id=row["key"].hex(),
        state=state_of(row),
        reason=row["reason"],
        attempts=row["attempts"],
        consumer=row["consumer"],
        type=row["type"],
        source=row["source"],
        message_id=row["id"],
        topic=row["topic"],
        partition=row["partition"],
        offset=row["offset"],
        key=shown(row["record_key"]),
        received_at=row["received_at"],
        due_at=row["due_at"],
        died_at=row["died_at"],
        discarded_at=row["discarded_at"],
        holds=row["holds"],
        error=row["error"],
    )


def shown(data: bytes | None) -> Shown:
    """Return bytes as programs and people can read them, without secrets."""
    if data is None:
        return None
    try:
        return {"text": redact(data.decode())}
    except UnicodeDecodeError:
        return {"hex": redact(data.decode("latin-1")).encode("latin-1").hex()}


def redrivable(which: Which, handlers: Handlers) -> Which:
    """Leave out what would wait for ever, and what may have been applied before.

    The first is what belongs to consumers that the service does not have. What is too old, or a
    call that may have taken place, is redriven only if it is asked for as such: by its id, or by
    that reason.
    """
    known = ["", *handlers.consumers]
    chosen = [one for one in known if which.consumers is None or one in which.consumers]
    asked_for = (TOO_OLD, UNKNOWN) if which.keys is not None else which.reasons or ()
    left_out = [reason for reason in (TOO_OLD, UNKNOWN) if reason not in asked_for]
    return replace(which, consumers=chosen, but_reasons=left_out)


async def redrive(
    connection: asyncpg.Connection, handlers: Handlers, which: Which, *, patience: float
) -> AsyncIterator[Sequence[Redriven]]:
    """Have dead letters tried again, in the order of their keys; yields what was committed.

    What dies meanwhile is not redriven again. `patience` is how many seconds to wait for the
    transaction of a worker.
    """

    async def change(rows: Sequence[asyncpg.Record]) -> Sequence[Redriven]:
        redriven = [await _redriven(connection, handlers, row) for row in rows]
        await dead_rows.redrive(connection, [row["key"] for row in rows])
        return redriven

    async for redriven in _in_chunks(connection, which, change, patience):
        yield redriven


async def discard(
    connection: asyncpg.Connection, which: Which, *, operator: str, why: str, patience: float
) -> AsyncIterator[int]:
    """Close dead letters; their keys go on. Yields how many were committed."""

    async def change(rows: Sequence[asyncpg.Record]) -> int:
        keys = [row["key"] for row in rows]
        await dead_rows.discard(connection, keys, operator=operator, why=why)
        return len(rows)

    async for number in _in_chunks(connection, which, change, patience):
        yield number


async def _in_chunks(
    connection: asyncpg.Connection,
    which: Which,
    change: Callable[[Sequence[asyncpg.Record]], Awaitable[T]],
    patience: float,
) -> AsyncIterator[T]:
    """Change rows lane by lane, and the rows of a key in its order."""
    for (lane,) in await connection.fetch(_LANES, *which.arguments, timeout=SECONDS):
        is_done = False
        while not is_done:
            async with connection.transaction():
                # A stopped process must not hold the lane.
                await connection.execute(LIMITS, f"{round(patience * 1000)}ms")
                await dead_rows.fence_lane(connection, lane)
                rows = await connection.fetch(_CHUNK, *which.arguments, lane, CHUNK)
                changed = await change(rows)
                order_keys = {row["order_key"] for row in rows}
                await lanes.schedule_heads(connection, [lane], order_keys)
            yield changed
            is_done = len(rows) < CHUNK


async def _redriven(
    connection: asyncpg.Connection, handlers: Handlers, row: asyncpg.Record
) -> Redriven:
    place = _place(row)
    if row["consumer"]:
        return Redriven(
            [row["key"]], [marker_key(row["consumer"], row["source"], row["id"])], place
        )
    # A record that was nobody's becomes a message to each of its handlers.
    items = await _read_again(connection, handlers, row["key"])
    markers = [item.key for item in items]
    mismatched = [backlog.mismatch_key(item) for item in items]
    return Redriven([row["key"], *markers, *mismatched], markers, place)


async def _read_again(
    connection: asyncpg.Connection, handlers: Handlers, key: bytes
) -> Sequence[Item]:
    row = await connection.fetchrow(_ROW, key)
    record = lanes.stored_record(row, stored_for=0.0)
    found = items_of(handlers, record, validates=False)
    return [] if isinstance(found, Undecoded) else found


async def follow(
    connection: asyncpg.Connection, redriven: Sequence[Redriven], seconds: float
) -> Became[Outcome]:
    """Say what becomes of them, as soon as none waits any more, or so many seconds from now."""
    became = Became(dict.fromkeys(Outcome, 0))
    waiting = await until_none_waits(
        redriven, seconds, lambda some: _sort(connection, some, became)
    )
    became.counts[Outcome.WAITING] = len(waiting)
    return became


async def until_none_waits(
    some: Sequence[T], seconds: float, sort: Callable[[Sequence[T]], Awaitable[list[T]]]
) -> list[T]:
    """Sort out, again and again, until none is left or so many seconds have passed.

    `sort` is given some at a time and returns those that wait still; so does this in the end.
    """
    waiting = list(some)
    deadline, pause = monotonic() + seconds, _POLL_MIN
    while True:
        still: list[T] = []
        for start in range(0, len(waiting), CHUNK):
            still += await sort(waiting[start : start + CHUNK])
        waiting = still
        if not waiting or monotonic() >= deadline:
            return waiting
        await asyncio.sleep(min(pause, max(0.0, deadline - monotonic())))
        pause = min(2 * pause, _POLL_MAX)


async def _sort(
    connection: asyncpg.Connection, some: Sequence[Redriven], became: Became[Outcome]
) -> list[Redriven]:
    """Note what has become of some; returns those that wait."""
    keys = list({key for one in some for key in (*one.keys, *one.markers)})
    stored = {row["key"]: row for row in await connection.fetch(_STORED, keys)}
    # Later, so that what has left the backlog is found where it went.
    marked = {row["key"]: _place(row) for row in await connection.fetch(_MARKED, keys)}
    waiting = []
    for one in some:
        rows = [row for key in one.keys if (row := stored.get(key)) and _place(row) == one.place]
        outcome = _outcome(one, rows, marked)
        if outcome is Outcome.WAITING:
            waiting.append(one)
            continue
        became.counts[outcome] += 1
        if outcome is Outcome.DEAD and len(became.died) < NAMED:
            became.died += [
                {"id": row["key"].hex(), "reason": row["reason"], "error": row["error"]}
                for row in rows[:1]
            ]
    return waiting


def _outcome(
    one: Redriven, rows: Sequence[asyncpg.Record], marked: Mapping[bytes, tuple[Any, ...]]
) -> Outcome:
    if rows:
        return Outcome.DEAD if all(row["is_dead"] for row in rows) else Outcome.WAITING
    places = [marked[key] for key in one.markers if key in marked]
    if one.place in places:
        return Outcome.APPLIED
    return Outcome.DUPLICATE if places else Outcome.GONE


def _place(row: asyncpg.Record) -> tuple[str, int, int]:
    return row["topic"], row["partition"], row["offset"]
