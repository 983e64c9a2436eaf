"""Dead letters and dead events: counting, listing, redriving and discarding them.

Both are tables whose rows wait, are dead, or were discarded by a person. Rows are changed in
chunks, each in a transaction that holds the lock of the worker or relay that owns them. A command
that was interrupted has changed a part of them, and can be run again.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import partial
from time import monotonic
from typing import Any, ClassVar, Literal

import asyncpg

from onceward.handlers.policy import FORGOTTEN
from onceward.operators import audit
from onceward.operators.audit import Change
from onceward.operators.copies import Copy
from onceward.service import Service
from onceward.settings import Settings

from .advice import advice_on
from .errors import Refused
from .output import content_of

CHUNK = 1_000
"""Rows that one transaction changes, and one statement reads."""
SECONDS = 600.0
"""Time limit of statements that read a whole table, which may hold millions of rows."""
NAMED = 20
"""Largest number of entries listed as dead again."""
_POLL_MIN, _POLL_MAX = 0.05, 1.0

State = Literal["dead", "waiting", "discarded"]
STATES: tuple[State, ...] = ("dead", "waiting", "discarded")
_CONDITIONS: Mapping[State, str] = {
    "dead": "died_at IS NOT NULL AND discarded_at IS NULL",
    "waiting": "died_at IS NULL",
    "discarded": "died_at IS NOT NULL AND discarded_at IS NOT NULL",
}
STATE = """CASE WHEN discarded_at IS NOT NULL THEN 'discarded'
            WHEN died_at IS NOT NULL THEN 'dead' ELSE 'waiting' END"""
"""The state of a row, in SQL."""

_NEWEST = "ORDER BY <since> DESC, row_key DESC"
_LIMITS = """
SELECT set_config('lock_timeout', $1, true),
       set_config('idle_in_transaction_session_timeout', $1, true)
"""

Entry = dict[str, Any]
"""A row as commands show it: values by the names of columns; bytes as `Content`."""
Rows = Sequence[asyncpg.Record]
_Changing = Callable[[Rows], Awaitable[Any]]
Outcome = Literal["waiting", "dead", "sent", "applied", "duplicate", "gone"]
"""What became of an entry that was redriven.

`waiting`: not tried yet, or failed and tried again later; `dead`: dead again; `sent`: Kafka has
accepted the event; `applied`: the message took effect; `duplicate`: its event took effect in
another record; `gone`: the handlers now read another event from its record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Conditions for entries; one that is None is left out."""

    keys: Sequence[bytes] | Sequence[int] | None = None
    """Primary keys."""
    reasons: Sequence[str] | None = None
    except_reasons: Sequence[str] | None = None
    consumers: Sequence[str] | None = None
    event_id: str | None = None
    type: str | None = None
    topic: str | None = None
    record_key: bytes | None = None
    release: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    @property
    def arguments(self) -> tuple[object, ...]:
        """The first parameters of every statement that selects rows."""
        return tuple(getattr(self, one.name) for one in fields(self))


@dataclass
class Became:
    """What became of the entries that were redriven."""

    counts: dict[Outcome, int]
    died: list[dict[str, str | None]] = field(default_factory=list)
    """Some of those that are dead again: `id`, `reason`, `error`."""


class Store(ABC):
    """Entries of one table.

    A chunk waits for a lock for as long as a lease of its owner lasts. If this process is stopped
    while it holds one, PostgreSQL ends its connection after the same time.
    """

    name: ClassVar[str]
    command: ClassVar[str]
    """The command group that shows and changes the entries."""
    reasons: ClassVar[Mapping[str, str]]
    """What a person should do about an entry, by the reason for which it is in the table."""
    outcomes: ClassVar[tuple[Outcome, ...]]
    hint: ClassVar[str]
    """Where to look when redriven entries wait."""
    listed: ClassVar[Sequence[str]]
    """Columns of a list without `--json`."""

    source: ClassVar[str]
    """The table in SQL, with further names that both tables have: `row_key`, `lock` (the number of
    the lane or shard that a chunk locks), `waiting_since`, `why`, `consumer`, `event_id`,
    `record_key`, `payload`."""
    key_type: ClassVar[str]
    lowest: ClassVar[Any]
    """A key below all keys."""
    entry: ClassVar[str]
    """Columns of an entry in short."""
    detail: ClassVar[str]
    """The other columns of an entry."""
    chunk: ClassVar[str]
    """Columns that redriving and discarding need."""
    order: ClassVar[str]
    """The order in which rows with one lock are redriven."""

    def __init__(
        self, connection: asyncpg.Connection, service: Service, settings: Settings
    ) -> None:
        self.connection = connection
        self._service = service
        self._patience = settings.backlog_lease

    @abstractmethod
    async def keys_of(self, ids: Sequence[str]) -> list[Any]:
        """Return the primary keys of entries named by their ids. Raises `Refused`."""

    @abstractmethod
    async def _lock(self, number: int) -> None:
        """Lock a lane or shard until the transaction ends."""

    @abstractmethod
    async def _redrive(self, rows: Rows, copy: Copy | None) -> Sequence[Any]:
        """Let a chunk of dead rows be tried again, and return what `_settle` needs for each."""

    @abstractmethod
    async def _discard(self, rows: Rows, *, operator: str, why: str) -> Rows:
        """Discard a chunk of rows, and return them."""

    @abstractmethod
    async def _settle(self, some: Sequence[Any]) -> list[tuple[Outcome, asyncpg.Record | None]]:
        """Return what became of each of some entries, and its row if it is dead again."""

    def redrivable(self, selection: Selection) -> Selection:
        """Return the selection without entries that must not be redriven."""
        return selection

    async def chosen(self, ids: Sequence[str], state: State) -> list[Any]:
        """Return the primary keys of entries in a state. Raises `Refused` if one is in another."""
        for id in ids:
            found: State = (await self.show(id))["state"]
            if found != state:
                see = f"see `service {self.command} show {id}`"
                raise Refused(f"{id} is not {state}, but {found}: {see}")
        return await self.keys_of(ids)

    async def preview(self, selection: Selection) -> list[tuple[Entry, str]]:
        """Count dead entries as `count` does, each group with why a redrive leaves it out."""
        redrivable = self.redrivable(selection)
        groups = await self.count("dead", selection)
        return [(one, _why_left_out(one, redrivable)) for one in groups]

    async def count(self, state: State, selection: Selection) -> list[Entry]:
        """Count entries by reason, consumer, type and topic, the largest group first."""
        statement = self._statement(
            state,
            "SELECT count(*), why AS reason, consumer, type, topic, min(<since>) AS oldest,"
            " max(<since>) AS newest",
            "GROUP BY 2, 3, 4, 5 ORDER BY 1 DESC, 2, 3, 4, 5",
        )
        rows = await self.connection.fetch(statement, *selection.arguments, timeout=SECONDS)
        return [dict(row) for row in rows]

    async def chunks(
        self, state: State, selection: Selection, limit: int | None = None
    ) -> AsyncIterator[list[Entry]]:
        """Yield the newest entries in chunks, at most `limit`, of which 65 bytes are in memory.

        Without a limit yield all, in the order of their keys: none is in memory.
        """
        # No index has their order. A cursor's transaction would be open while the list is read.
        fetch = partial(self.connection.fetch, timeout=SECONDS)
        if limit is None:
            page = f"AND row_key > $12 ORDER BY row_key LIMIT {CHUNK}"
            following, after = self._statement(state, "SELECT <entry>", page), self.lowest
            while rows := await fetch(following, *selection.arguments, after):
                yield [self._read(row) for row in rows]
                after = rows[-1]["row_key"]
            return
        newest = self._statement(state, "SELECT row_key", f"{_NEWEST} LIMIT $12")
        found = await self.connection.fetchval(
            f"SELECT ARRAY({newest})", *selection.arguments, limit, timeout=SECONDS
        )
        chunk = self._statement(state, "SELECT <entry>", _NEWEST)
        for start in range(0, len(found), CHUNK):
            some = replace(selection, keys=found[start : start + CHUNK])
            rows = await fetch(chunk, *some.arguments)
            yield [self._read(row) for row in rows]

    async def page(
        self, state: State, selection: Selection, size: int, after: Any = None
    ) -> tuple[list[Entry], Any]:
        """Return the newest entries, at most `size`, and the key of the last if others follow.

        With its time as `until` and its key as `after`, return those that follow it.
        """
        behind = f"AND ($12::{self.key_type} IS NULL OR (<since>, row_key) < ($11, $12))"
        statement = self._statement(state, "SELECT <entry>", f"{behind} {_NEWEST} LIMIT $13")
        arguments = *selection.arguments, after, size + 1
        rows = await self.connection.fetch(statement, *arguments, timeout=SECONDS)
        last = rows[size - 1]["row_key"] if len(rows) > size else None
        return [self._read(row) for row in rows[:size]], last

    async def show(self, id: str) -> Entry:
        """Return all that is stored of an entry, and the `advice`. Raises `Refused`."""
        (key,) = await self.keys_of([id])
        row = await self.connection.fetchrow(
            f"SELECT {self.entry}, {STATE} AS state, {self.detail} FROM {self.source}"
            " WHERE row_key = $1",
            key,
        )
        if row is None:
            raise Refused(f"there is no {self.name} {id}: see `service {self.command} list`")
        return self._read(row) | {"advice": advice_on(row, self.reasons)}

    async def _stored(self, keys: Sequence[Any]) -> dict[Any, asyncpg.Record]:
        """Return the entries that are in the table, in short, by their primary keys."""
        statement = f"SELECT row_key, {self.entry} FROM {self.source} WHERE row_key = ANY ($1)"
        return {row["row_key"]: row for row in await self.connection.fetch(statement, keys)}

    def _read(self, row: asyncpg.Record) -> Entry:
        return {
            name: content_of(value) if isinstance(value, bytes) else value
            for name, value in row.items()
            if name != "row_key"
        }

    def redrive(
        self, selection: Selection, by: Change, copy: Copy | None = None
    ) -> AsyncIterator[Sequence[Any]]:
        """Let dead entries be tried again, in the order of their keys; yields committed chunks.

        With a copy, let that take the place of a dead letter.
        """
        return self._in_chunks("dead", selection, partial(self._redrive, copy=copy), by)

    def discard(
        self, selection: Selection, by: Change, state: State = "dead"
    ) -> AsyncIterator[Rows]:
        """Discard entries, whose rows stay. Yields committed chunks."""
        change = partial(self._discard, operator=by.who, why=by.why or "")
        return self._in_chunks(state, selection, change, by)

    async def _in_chunks(
        self, state: State, selection: Selection, change: _Changing, by: Change
    ) -> AsyncIterator[Any]:
        """Change rows in a state, one lock after the other, the rows of a key in their order."""
        connection = self.connection
        locks = self._statement(state, "SELECT DISTINCT lock", "ORDER BY lock")
        for (number,) in await connection.fetch(locks, *selection.arguments, timeout=SECONDS):
            rows: Rows | None = None
            while rows is None or len(rows) == CHUNK:
                async with audit.changing(connection, by) as subjects:
                    await connection.execute(_LIMITS, f"{round(self._patience * 1000)}ms")
                    await self._lock(number)
                    arguments = *selection.arguments, number, CHUNK
                    rows = await connection.fetch(self.chunk_statement(state), *arguments)
                    changed = await change(rows)
                    subjects.extend(audit.entries(self.name, [row[0] for row in rows]))
                yield changed

    async def follow(self, redriven: Sequence[Any], seconds: float) -> Became:
        """Return what became of entries, as soon as none waits or the time in seconds is over."""
        became = Became(dict.fromkeys(self.outcomes, 0))
        waiting, deadline, pause = redriven, monotonic() + seconds, _POLL_MIN
        while True:
            still = []
            for start in range(0, len(waiting), CHUNK):
                some = waiting[start : start + CHUNK]
                for one, (outcome, row) in zip(some, await self._settle(some), strict=True):
                    if outcome == "waiting":
                        still.append(one)
                        continue
                    became.counts[outcome] += 1
                    if row and len(became.died) < NAMED:
                        became.died.append({name: row[name] for name in ("id", "reason", "error")})
            waiting = still
            if not waiting or monotonic() >= deadline:
                became.counts["waiting"] = len(waiting)
                return became
            await asyncio.sleep(min(pause, max(0.0, deadline - monotonic())))
            pause = min(2 * pause, _POLL_MAX)

    @classmethod
    def chunk_statement(cls, state: State) -> str:
        """Return the statement that reads rows of one lock, $12, at most $13."""
        rest = f"AND lock = $12 ORDER BY {cls.order} LIMIT $13"
        return cls._statement(state, f"SELECT {cls.chunk}", rest)

    @classmethod
    def _statement(cls, state: State, select: str, rest: str) -> str:
        """Return a statement on the selected rows in a state.

        `<since>` in it stands for the column with the time at which a row got into this state, and
        `<entry>` for an entry in short, with its key.
        """
        entry = f"{cls.entry}, {STATE} AS state, <since> AS since, row_key"
        since = {"dead": "died_at", "discarded": "discarded_at"}.get(state, "waiting_since")
        return f"""
{select}
  FROM {cls.source}
 WHERE {_CONDITIONS[state]}
   AND ($1::{cls.key_type}[] IS NULL OR row_key = ANY ($1))
   AND ($2::text[] IS NULL OR why = ANY ($2))
   AND ($3::text[] IS NULL OR why <> ALL ($3))
   AND ($4::text[] IS NULL OR consumer = ANY ($4))
   AND ($5::text IS NULL OR event_id = $5)
   AND ($6::text IS NULL OR type = $6)
   AND ($7::text IS NULL OR topic = $7)
   AND ($8::bytea IS NULL OR record_key = $8)
   AND ($9::text IS NULL OR release = $9)
   AND ($10::timestamptz IS NULL OR <since> >= $10)
   AND ($11::timestamptz IS NULL OR <since> <= $11)
{rest}
""".replace("<entry>", entry).replace("<since>", since)


def _why_left_out(group: Entry, redrivable: Selection) -> str:
    """Return why a group of entries is not in this selection; empty if it is."""
    consumer, reason = group["consumer"], group["reason"]
    if redrivable.consumers is not None and consumer not in redrivable.consumers:
        return f"this service has no consumer {consumer!r}: they would wait for ever"
    if reason == FORGOTTEN:
        return "nothing can decrypt them any more: discard them"
    if reason in (redrivable.except_reasons or ()):
        return f"it is not known whether they were applied: select the reason {reason!r}"
    return ""
