"""The parts of a timeline that are in PostgreSQL."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from shlex import quote
from typing import Any

import asyncpg

from onceward.apply.statements import KEPT, PAUSES
from onceward.cli.dead import STATE
from onceward.cli.inbox_commands import ORDINALS, events_of
from onceward.cli.output import format_time
from onceward.handlers.registry import Handlers
from onceward.handlers.staging import CALLS, event_id
from onceward.observe.traces import trace_id
from onceward.operators import stopping

from .entries import READ, Entry, Place, Timeline

_MOST_STOPS = 1_000

_MARKER = """
       key, hash, xid, created_at, consumer, id, type, topic, partition, "offset", traceparent,
       release"""

_MARKERS = f"""
SELECT {_MARKER}
  FROM pipeline.inbox
 WHERE {KEPT} AND record_key = $1 AND created_at >= $2
 ORDER BY created_at DESC LIMIT $3
"""

# A transaction writes its markers before its events.
_CAUSES = f"""
SELECT {_MARKER}
  FROM unnest($1::text[], $2::timestamptz[]) AS of (transaction, at) CROSS JOIN LATERAL (
       SELECT * FROM pipeline.inbox
        WHERE {KEPT} AND xid = of.transaction::xid8
          AND created_at BETWEEN at - interval '1 minute' AND at) AS marker
"""

_EVENTS = """
SELECT xid, created_at, event_id, type, topic, sequence, traceparent, release FROM pipeline.outbox
 WHERE key = $1 AND created_at >= $2
 ORDER BY created_at DESC LIMIT $3
"""

_SCHEDULED = """
SELECT scheduled_at AS created_at, due_at, event_id, type, topic, traceparent, release
  FROM pipeline.scheduled
 WHERE key = $1
 ORDER BY scheduled_at DESC LIMIT $2
"""

_BACKLOG = f"""
SELECT {STATE} AS state, key, received_at, died_at, discarded_at, due_at, discarded_by,
       discarded_why, consumer, id, type, topic, partition, "offset", traceparent, reason, error,
       attempts, release
  FROM pipeline.backlog
 WHERE record_key = $1 AND topic <> '{PAUSES}'
 ORDER BY received_at DESC LIMIT $2
"""

_REJECTED = f"""
SELECT {STATE} AS state, id, COALESCE(discarded_at, died_at, parked_at) AS created_at,
       discarded_at, discarded_by, discarded_why, event_id, type, topic, traceparent,
       COALESCE(reason, 'follows another') AS reason, error, release
  FROM pipeline.outbox_rejected
 WHERE key = $1
 ORDER BY id DESC LIMIT $2
"""

_RELEASES = "SELECT name, first_at FROM pipeline.release WHERE first_at >= $1"

# Of dead letters and events the subject has the ids, as commands list them.
_AUDIT = """
SELECT at, who, action, subject, why FROM pipeline.audit
 WHERE at >= $1
   AND (subject = ANY ($2::text[]) OR starts_with(subject, $3)
        OR starts_with(subject, 'dead ')
           AND string_to_array(translate(subject, ',', ''), ' ') && $4::text[])
 ORDER BY at DESC LIMIT $5
"""

_STATES = {"waiting": "waits", "dead": "dead", "discarded": "discarded"}
_KINDS = ("topic", "consumer", "events")


class Stored:
    """Reads each part in the method with its name, and adds it to the timeline."""

    def __init__(
        self,
        connection: asyncpg.Connection,
        handlers: Handlers,
        timeline: Timeline,
        key: bytes,
        since: datetime,
        limit: int,
    ) -> None:
        self._connection = connection
        self._handlers = handlers
        self._found = timeline.entries
        self._key, self._since, self._limit = key, since, limit
        self._known: set[bytes] = set()
        """Keys of the markers that are found."""
        self._events: Sequence[asyncpg.Record] = ()
        """Events of the key, the newest first."""
        self._ids: set[str] = set()
        """What the audit calls messages, which are dead letters or have been, and dead events."""

    async def inbox(self) -> None:
        """Markers of the key, and what the newest of them have published for other keys."""
        rows = await self._connection.fetch(_MARKERS, self._key, self._since, self._limit)
        self._add_markers(rows)
        for row in rows[:READ]:
            of = row["key"], row["hash"], row["xid"]
            for event in await events_of(self._connection, *of):
                if event["key"] is None or event["key"].encode() != self._key:
                    to = "no key" if event["key"] is None else f"key {event['key']}"
                    self._add_event("staged", row, event, f"{to} {_version(event)}".strip())

    def _add_markers(self, rows: Sequence[asyncpg.Record]) -> None:
        for row in rows:
            is_correction = row["consumer"] in self._handlers.corrections
            what = "corrected" if is_correction else "applied"
            self._known.add(row["key"])
            self._ids.add(row["key"].hex()[:16])
            self._found.append(
                Entry(
                    row["created_at"],
                    "called" if row["topic"] == CALLS else what,
                    row["consumer"],
                    f"{row['type']} {row['id']}",
                    _at(row),
                    row["release"],
                    trace_id(row["traceparent"]),
                    _place(row),
                    until=row["created_at"],
                )
            )

    def _add_event(self, what: str, row: asyncpg.Record, event: asyncpg.Record, more: str) -> None:
        """Add an event; its time and release are those of `row`."""
        name = f"{event['type']} {event['event_id']}"
        of = row["release"], trace_id(event["traceparent"])
        self._found.append(Entry(row["created_at"], what, event["topic"], name, more, *of))

    async def outbox(self) -> None:
        """Events of the key."""
        of = self._key, self._since, self._limit
        self._events = await self._connection.fetch(_EVENTS, *of)
        for row in self._events:
            self._add_event("staged", row, row, _version(row))

    async def causes(self) -> None:
        """Messages with another key, or none, that have published events of the key.

        Requires the events. A transaction has markers of many messages: the ids of events, which
        are derived from them, tell whose they are.
        """
        newest = self._events[:READ]
        times = {row["xid"]: row["created_at"] for row in reversed(newest)}
        columns = [str(one) for one in times], [*times.values()]
        rows = await self._connection.fetch(_CAUSES, *columns)
        of_messages = {row["xid"] for row in rows}  # others are of requests, or of a timer
        left = {row["event_id"] for row in newest if row["xid"] in of_messages}
        causes: dict[bytes, asyncpg.Record] = {}
        for ordinal in range(ORDINALS):
            if not left:
                break
            await asyncio.sleep(0)  # so that the time limit is kept
            for row in rows:
                if (id := event_id(row["key"], row["hash"], ordinal)) in left:
                    left.remove(id)
                    causes[row["key"]] = row
        self._add_markers([row for key, row in causes.items() if key not in self._known])

    async def scheduled(self) -> None:
        """Events of the key that are due later."""
        rows = await self._connection.fetch(_SCHEDULED, self._key, self._limit)
        for row in rows:
            self._add_event("scheduled", row, row, f"due {format_time(row['due_at'])}")

    async def backlog(self) -> None:
        """Messages of the key that wait, are dead, or were discarded."""
        rows = await self._connection.fetch(_BACKLOG, self._key, self._limit)
        for row in rows:
            self._ids.add(row["key"].hex()[:16])
            more = _why(row)
            if row["state"] == "waiting":
                due = f"next {format_time(row['due_at'])}" if row["due_at"] else "behind another"
                more = f"{row['attempts']} attempts, {due}; {more}"
            ended = row["discarded_at"] or row["died_at"]
            is_correction = row["consumer"] in self._handlers.corrections
            self._found.append(
                Entry(
                    ended or row["received_at"],
                    _STATES[row["state"]],
                    row["consumer"] or row["topic"],
                    f"{row['type']} {row['id']}" if row["id"] else "",
                    f"{_at(row)}; {more}",
                    row["release"],
                    trace_id(row["traceparent"]),
                    # Its message arrived, and was applied, long before it was handed.
                    None if is_correction else _place(row),
                    since=row["received_at"],
                    until=ended,
                )
            )

    async def rejected(self) -> None:
        """Events of the key that their topic has rejected."""
        rows = await self._connection.fetch(_REJECTED, self._key, self._limit)
        for row in rows:
            self._ids.add(str(row["id"]))
            self._add_event(_STATES[row["state"]], row, row, _why(row))

    async def releases(self) -> None:
        """Releases that were first started in this time."""
        rows = await self._connection.fetch(_RELEASES, self._since)
        for row in rows:
            self._found.append(Entry(row["first_at"], "release", row["name"], more="first seen"))

    async def audit(self) -> None:
        """What people have asked for the key, what is found, or its topics and consumers.

        Requires the other parts. What was paused before this time, and still is, is among it.
        """
        names = {one.where for one in self._found}
        names |= {one.place[0] for one in self._found if one.place}
        subjects = {f"{kind} {name}" for kind in _KINDS for name in names}
        of_key = f"key {quote(self._key.decode(errors='backslashreplace'))} --"
        asked = self._since, list(subjects), of_key, list(self._ids), self._limit
        for row in await self._connection.fetch(_AUDIT, *asked):
            more = _said(row["who"], row["why"])
            where = _of_these(row["subject"], self._ids)
            self._found.append(Entry(row["at"], row["action"], where, more=more))
        for stop in await stopping.listed(self._connection, _MOST_STOPS):
            at, subject = datetime.now(UTC) - timedelta(seconds=stop.seconds), str(stop.subject)
            if at < self._since and (subject in subjects or subject.startswith(of_key)):
                more = _said(stop.who, stop.why)
                self._found.append(Entry(at, stop.state, subject, more=more))


def _version(row: Mapping[str, Any]) -> str:
    return "" if row["sequence"] is None else f"version {row['sequence']}"


def _place(row: Mapping[str, Any]) -> Place:
    return row["topic"], row["partition"], row["offset"]


def _at(row: Mapping[str, Any]) -> str:
    return f"{row['topic']}/{row['partition']} at {row['offset']}"


def _of_these(subject: str, ids: Collection[str]) -> str:
    """Return a subject of the audit; of many dead letters or events those with these ids alone."""
    if not subject.startswith("dead "):
        return subject
    *kind, named = subject.split(" ", 2)
    every = named.split(", ")
    own = [one for one in every if one in ids]
    more = f" and {len(every) - len(own):,} more" if len(every) > len(own) else ""
    return f"{' '.join(kind)} {', '.join(own)}{more}"


def _said(who: str, why: str | None) -> str:
    return f"{who}: {why}" if why else who


def _why(row: Mapping[str, Any]) -> str:
    """Return why a message or event was not applied or published, and who has discarded it."""
    by = ""
    if row["discarded_at"]:
        by = f"{_said(row['discarded_by'], row['discarded_why'])}; "
    return f"{by}{row['reason']}" + (f": {row['error']}" if row["error"] else "")
