"""The timeline of a key: what the tables have of it, sorted by time."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime

import asyncpg

from operate.dead import Selection, State, Store
from operate.dead_events import DeadEvents
from operate.dead_letters import DeadLetters
from pipeline.errors import describe_error
from pipeline.service import Service
from pipeline.settings import Settings

_SECONDS = 5.0
"""Time limit of each part."""

_MARKERS = """
SELECT created_at, consumer, id, type, topic, partition, "offset", release
  FROM pipeline.inbox
 WHERE generation = ANY (ARRAY(
           SELECT generate_series(oldest, current) FROM pipeline.inbox_generation))
   AND record_key = $1 AND created_at >= $2
 ORDER BY created_at DESC LIMIT $3
"""

_EVENTS = """
SELECT created_at, event_id, type, topic, sequence, release
  FROM pipeline.outbox
 WHERE key = $1 AND created_at >= $2
 ORDER BY created_at DESC LIMIT $3
"""

_SCHEDULED = """
SELECT scheduled_at, due_at, event_id, type, topic, release
  FROM pipeline.scheduled
 WHERE key = $1
 ORDER BY scheduled_at DESC LIMIT $2
"""

_RELEASES = "SELECT name, first_at FROM pipeline.release WHERE first_at >= $1"


@dataclass(frozen=True)
class Entry:
    """Something that happened to a key."""

    at: datetime
    what: str
    where: str
    event: str = ""
    more: str = ""
    release: str | None = None


@dataclass
class Timeline:
    """What is known of a key, and of which parts nothing is known."""

    entries: list[Entry] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    """Why a part could not be read, by its name."""


class _Search:
    def __init__(
        self,
        connection: asyncpg.Connection,
        service: Service,
        settings: Settings,
        key: bytes,
        since: datetime,
        limit: int,
    ) -> None:
        self._connection = connection
        self._context = connection, service, settings
        self._key, self._since, self._limit = key, since, limit

    async def applied(self) -> list[Entry]:
        rows = await self._connection.fetch(_MARKERS, self._key, self._since, self._limit)
        return [
            Entry(
                row["created_at"],
                "applied",
                row["consumer"],
                f"{row['type']} {row['id']}",
                f"{row['topic']}/{row['partition']} at {row['offset']}",
                row["release"],
            )
            for row in rows
        ]

    async def outbox(self) -> list[Entry]:
        rows = await self._connection.fetch(_EVENTS, self._key, self._since, self._limit)
        found = []
        for row in rows:
            version = "" if row["sequence"] is None else f"version {row['sequence']}"
            event = f"{row['type']} {row['event_id']}"
            found.append(
                Entry(row["created_at"], "staged", row["topic"], event, version, row["release"])
            )
        return found

    async def scheduled(self) -> list[Entry]:
        rows = await self._connection.fetch(_SCHEDULED, self._key, self._limit)
        return [
            Entry(
                row["scheduled_at"],
                "scheduled",
                row["topic"],
                f"{row['type']} {row['event_id']}",
                f"due {row['due_at']:%Y-%m-%d %H:%M:%SZ}",
                row["release"],
            )
            for row in rows
        ]

    async def backlog(self) -> list[Entry]:
        return await self._stored(DeadLetters)

    async def rejected(self) -> list[Entry]:
        return await self._stored(DeadEvents)

    async def _stored(self, kind: type[Store]) -> list[Entry]:
        store = kind(*self._context)
        found: list[Entry] = []
        states: tuple[State, ...] = ("waiting", "dead", "discarded")
        for state in states:
            chunks = store.chunks(state, Selection(record_key=self._key), self._limit)
            async for some in chunks:
                for one in some:
                    where = one.get("consumer") or one["topic"]
                    event = f"{one['type']} {one['event_id']}"
                    why = one["reason"] + (f": {one['error']}" if one["error"] else "")
                    found.append(Entry(one["since"], state, where, event, why))
        return found

    async def releases(self) -> list[Entry]:
        rows = await self._connection.fetch(_RELEASES, self._since)
        return [Entry(row["first_at"], "release", row["name"], more="first seen") for row in rows]


async def look(
    connection: asyncpg.Connection,
    service: Service,
    settings: Settings,
    key: bytes,
    since: datetime,
    limit: int,
) -> Timeline:
    """Return the newest entries of a key. A part that can't be read is named as unknown."""
    search = _Search(connection, service, settings, key, since, limit)
    parts: tuple[Callable[[], Awaitable[list[Entry]]], ...] = (
        *(search.applied, search.outbox, search.scheduled),
        *(search.backlog, search.rejected, search.releases),
    )
    timeline = Timeline()
    for part in parts:
        name = getattr(part, "__name__", "")
        try:
            async with asyncio.timeout(_SECONDS):
                timeline.entries += await part()
        except TimeoutError:
            timeline.unknown[name] = f"PostgreSQL has not answered in {_SECONDS:.0f} s"
        except (asyncpg.InsufficientPrivilegeError, asyncpg.QueryCanceledError) as error:
            timeline.unknown[name] = describe_error(error)
    timeline.entries.sort(key=lambda one: one.at)
    del timeline.entries[:-limit]
    return timeline
