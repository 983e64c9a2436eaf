"""What a release has written: messages that it has applied, calls, events and what is stored.

An index finds which times have rows of a release. Lists go through them minute by minute, so that
nothing is kept in memory, and no statement takes long.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import datetime
from typing import Any

import asyncpg

from onceward.apply.statements import KEPT, PAUSES
from onceward.cli.dead import CHUNK, SECONDS, STATE
from onceward.cli.errors import Refused
from onceward.handlers.staging import CALLS

AGGREGATES = 100_000
"""Aggregates that one statement reads; each reads all events of the release, so they are few."""
_NAMED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which rows are meant; a condition that is None is left out."""

    release: str
    consumer: str | None = None
    types: Sequence[str] | None = None
    topics: Sequence[str] | None = None
    since: datetime | None = None
    until: datetime | None = None
    """Excluded."""


_WANTED = """release = $1
   AND ($2::text IS NULL OR consumer = $2)
   AND ($3::text[] IS NULL OR type = ANY ($3))
   AND ($4::text[] IS NULL OR topic = ANY ($4))
   AND ($5::timestamptz IS NULL OR created_at >= $5)
   AND ($6::timestamptz IS NULL OR created_at < $6)"""
"""The conditions, whose values are the fields of `Wanted`."""

_MARKERS = f"FROM pipeline.inbox WHERE {KEPT} AND {_WANTED}"
# The outbox has no consumers.
_EVENTS = f"FROM pipeline.outbox WHERE {_WANTED.replace('consumer = $2', 'false')}"

_GROUP = "topic, type, count(*), min(created_at) AS oldest, max(created_at) AS newest"

_COUNT_MARKERS = f"""
SELECT CASE topic WHEN '{CALLS}' THEN 'call' ELSE 'message' END AS what, consumer, {_GROUP}
  {_MARKERS} GROUP BY consumer, topic, type ORDER BY count(*) DESC
"""

_COUNT_EVENTS = f"""
SELECT 'event' AS what, NULL AS consumer, {_GROUP} {_EVENTS} GROUP BY topic, type ORDER BY 5 DESC
"""

_COUNT_AGGREGATES = f"""
SELECT 'aggregate' AS what, NULL AS consumer, topic, NULL AS type, count(DISTINCT key),
       min(created_at) AS oldest, max(created_at) AS newest
  {_EVENTS} AND sequence IS NOT NULL GROUP BY topic ORDER BY 5 DESC
"""

_COUNT_SCHEDULED = f"""
SELECT 'scheduled' AS what, consumer, {_GROUP}
  FROM (SELECT *, NULL::text AS consumer, scheduled_at AS created_at
          FROM pipeline.scheduled) AS event
 WHERE {_WANTED} GROUP BY consumer, topic, type ORDER BY 5 DESC
"""

_STORED = f"""
  FROM (SELECT *, {STATE} AS state, received_at AS created_at FROM pipeline.backlog
         WHERE topic <> '{PAUSES}') AS stored
 WHERE {_WANTED}"""

_COUNT_STORED = f"""
SELECT state AS what, consumer, {_GROUP} {_STORED}
 GROUP BY state, consumer, topic, type ORDER BY 5 DESC
"""

_COUNTS = _COUNT_MARKERS, _COUNT_AGGREGATES, _COUNT_EVENTS, _COUNT_SCHEDULED, _COUNT_STORED

_MINUTES = "SELECT DISTINCT date_trunc('minute', created_at) AS minute {of} ORDER BY minute"

_OF_MINUTE = "AND created_at >= $7::timestamptz AND created_at < $7 + interval '1 minute'"

_LIST_MARKERS = f"""
SELECT key, hash, hash_version, consumer, source, id, type, topic, partition, "offset", record_key,
       release, created_at, result::text AS result, xid, traceparent,
       CASE topic WHEN '{CALLS}' THEN 'made' ELSE 'applied' END AS state
  {_MARKERS} {_OF_MINUTE} AND (topic, partition, "offset", key) > ($8, $9, $10, $11)
 ORDER BY topic, partition, "offset", key LIMIT {CHUNK}
"""

_LIST_CALLS = f"""
SELECT key, consumer, source, id, type, topic, record_key, release, created_at, state, reason,
       attempts, due_at {_STORED} AND topic = '{CALLS}' AND key > $7
 ORDER BY key LIMIT {CHUNK}
"""

_LIST_EVENTS = f"""
SELECT id, created_at, event_id, type, topic, key, sequence, traceparent
  {_EVENTS} {_OF_MINUTE} AND id > $8 ORDER BY id LIMIT {CHUNK}
"""

_LIST_AGGREGATES = f"""
SELECT topic, key, min(sequence) AS first, max(sequence) AS last, count(*) AS events
  {_EVENTS} AND sequence IS NOT NULL AND key IS NOT NULL AND (topic, key) > ($7, $8)
 GROUP BY topic, key ORDER BY topic, key LIMIT {AGGREGATES}
"""

_KNOWN = "SELECT name, first_at FROM pipeline.release ORDER BY first_at DESC"

Rows = Sequence[asyncpg.Record]


async def count(connection: asyncpg.Connection, wanted: Wanted) -> list[dict[str, Any]]:
    """Count what a release has written, by what it is, consumer, type and topic."""
    found: list[dict[str, Any]] = []
    for statement in _COUNTS:
        rows = await connection.fetch(statement, *astuple(wanted), timeout=SECONDS)
        found += map(dict, rows)
    return found


async def known(connection: asyncpg.Connection) -> Rows:
    """Return the releases whose consumers were started, and when first; the latest first."""
    rows: Rows = await connection.fetch(_KNOWN)
    return rows


async def check(connection: asyncpg.Connection, release: str) -> None:
    """Raise `Refused` if no consumer of the release was started, and nothing of it is stored."""
    names = [row["name"] for row in await known(connection)]
    if release not in names and not await count(connection, Wanted(release=release)):
        said = ", ".join(names[:_NAMED]) or "none: PIPELINE_RELEASE names one"
        raise Refused(f"nothing is of release {release!r}; releases are {said}")


async def minutes(
    connection: asyncpg.Connection, wanted: Wanted, *, are_events: bool = False
) -> list[datetime]:
    """Return the minutes that have markers, or else events, in their order."""
    statement = _MINUTES.format(of=_EVENTS if are_events else _MARKERS)
    rows = await connection.fetch(statement, *astuple(wanted), timeout=SECONDS)
    return [row["minute"] for row in rows]


async def markers(connection: asyncpg.Connection, wanted: Wanted) -> AsyncIterator[Rows]:
    """Yield markers in chunks: minute by minute, each in the order of topics and offsets."""
    its = await minutes(connection, wanted)
    place = {"topic": "", "partition": -1, "offset": -1, "key": b""}
    async for rows in _chunks(connection, wanted, its, _LIST_MARKERS, place):
        yield rows


async def _chunks(
    connection: asyncpg.Connection,
    wanted: Wanted,
    its: Sequence[datetime],
    statement: str,
    place: Mapping[str, object],
) -> AsyncIterator[Rows]:
    """Yield rows of each minute in chunks, the first one behind this place."""
    for minute in its:
        of = *astuple(wanted), minute
        async for rows in _following(connection, statement, of, place, CHUNK):
            yield rows


async def _following(
    connection: asyncpg.Connection,
    statement: str,
    arguments: Sequence[object],
    place: Mapping[str, object],
    size: int,
) -> AsyncIterator[Rows]:
    """Yield the rows behind this place in chunks of the size that the statement limits."""
    after = [*place.values()]
    while True:
        rows = await connection.fetch(statement, *arguments, *after, timeout=SECONDS)
        if rows:
            yield rows
        if len(rows) < size:
            return
        after = [rows[-1][name] for name in place]


async def messages(connection: asyncpg.Connection, wanted: Wanted) -> AsyncIterator[Rows]:
    """Yield the markers of messages, without those of calls."""
    async for rows in markers(connection, wanted):
        yield [row for row in rows if row["topic"] != CALLS]


async def calls(connection: asyncpg.Connection, wanted: Wanted) -> AsyncIterator[Rows]:
    """Yield the calls that it has staged and that wait or are dead, then those that it has made.

    A call that is made meanwhile is in both.
    """
    if wanted.topics is not None and CALLS not in wanted.topics:
        return
    of = astuple(wanted)
    async for rows in _following(connection, _LIST_CALLS, of, {"key": b""}, CHUNK):
        yield rows
    async for made in markers(connection, replace(wanted, topics=[CALLS])):
        yield made


async def events(connection: asyncpg.Connection, wanted: Wanted) -> AsyncIterator[Rows]:
    """Yield events in chunks, minute by minute."""
    its = await minutes(connection, wanted, are_events=True)
    async for rows in _chunks(connection, wanted, its, _LIST_EVENTS, {"id": -1}):
        yield rows


async def aggregates(connection: asyncpg.Connection, wanted: Wanted) -> AsyncIterator[Rows]:
    """Yield topic, key, first and last version and number of events of aggregates in chunks.

    They are those whose events have a version, in the order of topics and keys.
    """
    of, place = astuple(wanted), {"topic": "", "key": b""}
    async for rows in _following(connection, _LIST_AGGREGATES, of, place, AGGREGATES):
        yield rows
