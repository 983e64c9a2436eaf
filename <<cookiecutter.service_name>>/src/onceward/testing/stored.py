"""What the database holds after a transaction: published events, calls, dead letters, due times."""

from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import asyncpg

from onceward.apply.encryption import Encryption, Rows
from onceward.apply.item import StoredRecord
from onceward.events.cloudevents import sent_headers
from onceward.events.event import Event, declared_events, payload_of, reader
from onceward.handlers.registry import Handlers
from onceward.handlers.staging import CALLS
from onceward.operators import dead_rows
from onceward.relay.scheduled import Scheduled as DueEvents
from onceward.retention import generations
from onceward.retention.maintenance import make_ahead
from onceward.schema import FIRST_LANE_OF_CALLS
from onceward.settings import Settings

from .errors import HarnessMisused
from .outcome import Published, Scheduled

_MARK = """
SELECT COALESCE(pg_sequence_last_value('pipeline.outbox_id_seq'), 0) AS outbox,
       clock_timestamp() AS at,
       COALESCE(pg_sequence_last_value('pipeline.backlog_call_seq'), 0) AS calls
"""

# Dead letters for the dead-letter topic have no content type.
_PUBLISHED = """
SELECT * FROM pipeline.outbox WHERE id > $1 AND content_type <> '' ORDER BY id
"""
_SCHEDULED = """
SELECT *, due_at AS created_at, due_at - scheduled_at AS after FROM pipeline.scheduled
 WHERE scheduled_at > $1 ORDER BY scheduled_at, name
"""
# A call has a row for each of its effects.
_CALLS = """
SELECT type, value FROM (
    SELECT DISTINCT ON (id) "offset", type, value FROM pipeline.backlog
     WHERE topic = $1 AND "offset" > $2 ORDER BY id, "offset") AS call
 ORDER BY "offset"
"""

_SHIFT = (
    "UPDATE pipeline.backlog SET due_at = due_at - $1::interval, received_at = received_at - $1",
    "UPDATE pipeline.scheduled SET due_at = due_at - $1::interval",
    "UPDATE pipeline.inbox_generation SET opened_at = opened_at - $1::interval, since = since - $1",
    "UPDATE pipeline.inbox_closed SET closed_at = closed_at - $1::interval",
)
_NEXT = """
SELECT (SELECT min(due_at) FROM (
            SELECT due_at FROM pipeline.backlog WHERE lane < $1
             UNION ALL SELECT due_at FROM pipeline.scheduled) AS waiting) - clock_timestamp(),
       opened_at + make_interval(secs => $2) - clock_timestamp()
  FROM pipeline.inbox_generation
"""
_DUE_CALLS = """
SELECT DISTINCT consumer FROM pipeline.backlog
 WHERE lane >= $1 AND due_at <= clock_timestamp() ORDER BY 1
"""

_DEAD = """
SELECT encode(key, 'hex') AS id, consumer, reason, error, attempts, topic,
       record_key AS key, value, id AS message_id
  FROM pipeline.backlog WHERE died_at IS NOT NULL AND discarded_at IS NULL
 ORDER BY died_at, order_key, sequence, partition, "offset"
"""
_END_LEASES = """
UPDATE pipeline.backlog_lane SET lease_until = clock_timestamp()
 WHERE lease_until >= clock_timestamp()
"""
_PLACES = "SELECT key, lane, order_key FROM pipeline.backlog WHERE encode(key, 'hex') = ANY ($1)"


class Mark(NamedTuple):
    """A moment in the database: what comes later is new."""

    outbox: int
    at: object
    calls: int


BEGINNING = Mark(0, datetime.fromtimestamp(0, UTC), 0)


class DeadLetter(NamedTuple):
    """A message that is not tried again until it is redriven."""

    id: str
    """As `service dead list` shows it, at full length."""
    consumer: str
    """Empty for a record that no handler has seen."""
    reason: str
    error: str
    """Type and text of the last error."""
    attempts: int
    topic: str
    key: bytes | None
    value: bytes | None
    message_id: str | None
    """The CloudEvents id."""


class Stored(NamedTuple):
    """What was stored since a mark."""

    records: list[Published]
    calls: list[Event]
    scheduled: list[Scheduled]


async def mark(driver: asyncpg.Connection) -> Mark:
    """Return the mark of now."""
    return Mark(*(await driver.fetchrow(_MARK))[:])


async def since(
    driver: asyncpg.Connection,
    mark: Mark,
    handlers: Handlers,
    package: str | None,
    encryption: Encryption | None = None,
) -> Stored:
    """Return what was stored since the mark. Classes of the `package` are preferred to others."""

    async def fetch(column: str, *query: object) -> Rows:
        rows: Rows = await driver.fetch(*query)
        return await encryption.decrypt(driver, rows, column) if encryption else rows

    records = [
        Published(
            await _event(row, handlers, package),
            row["topic"],
            None if row["key"] is None else row["key"].decode(),
            row["sequence"],
            dict(sent_headers(row)),
        )
        for row in await fetch("payload", _PUBLISHED, mark.outbox)
    ]
    scheduled = [
        Scheduled(
            await _event(row, handlers, package),
            row["name"],
            round(row["after"].total_seconds(), 3),
            row["due_at"],
        )
        for row in await fetch("payload", _SCHEDULED, mark.at)
    ]
    calls = [
        reader(handlers.call_types[row["type"]])(row["value"])
        for row in await fetch("value", _CALLS, CALLS, mark.calls)
    ]
    return Stored(records, calls, scheduled)


def _read(url: str) -> bytes:
    return Path(unquote(urlsplit(url).path)).read_bytes()


async def _event(row: asyncpg.Record, handlers: Handlers, package: str | None) -> Event:
    """Return the event as a consumer with the same codec reads it."""
    topic = row["topic"]
    record = StoredRecord(topic, 0, 0, 0, row["key"], row["payload"], sent_headers(row), 0.0)
    codec = handlers.codec(topic)
    await codec.prepare([record])
    payload = codec.decode(record).data
    if (url := row["dataref"]) is not None:  # too large for a record: in the harness's folder
        payload = _read(url)
    kinds = [
        one
        for one in declared_events()
        if (one.__event_topic__, getattr(one, "__event_type__", "")) == (topic, row["type"])
    ]
    kinds.sort(key=lambda one: one.__module__.startswith(f"{package}."))
    # The last class of a type is the one to use; a generic event has several that are in use.
    event: Event
    for kind in reversed(kinds if len(kinds) > 1 else []):
        with suppress(ValueError):
            event = reader(kind)(payload or b"")
            if payload_of(event) == payload:
                return event
    event = reader(kinds[-1])(payload or b"")
    return event


async def pass_time(
    driver: asyncpg.Connection, time: timedelta, at_least: timedelta, settings: Settings
) -> timedelta:
    """Let stored times pass up to the next one that is due; return how much of `time` is left.

    `at_least` so much of it passes, unless something is due already.
    Calls to the outside do not count as due. The inbox's generation is closed when it is due, and
    old ones are forgotten, as retention does.
    """
    until, rotation = await driver.fetchrow(
        _NEXT, FIRST_LANE_OF_CALLS, settings.inbox_generation_age
    )
    step = min(time, *(max(one, timedelta()) for one in (until, rotation) if one is not None))
    step = step and min(time, max(step, at_least))
    async with driver.transaction():
        for statement in _SHIFT:
            await driver.execute(statement, step)
    if rotation <= step:
        if not await generations.rotate(driver, settings):
            await make_ahead(driver, settings)
            await generations.rotate(driver, settings)
        await generations.forget(driver, settings)
    left: timedelta = time - step
    return left


async def end_leases(driver: asyncpg.Connection) -> None:
    """Let leases of lanes end, as they do when their process is dead."""
    await driver.execute(_END_LEASES)


async def publish_due(driver: asyncpg.Connection) -> None:
    """Move scheduled events that are due into the outbox, as a relay does."""
    events = DueEvents()
    while await events.move(driver):
        pass


async def consumers_of_due_calls(driver: asyncpg.Connection) -> list[str]:
    """Return the effects that have calls to make now."""
    return [row["consumer"] for row in await driver.fetch(_DUE_CALLS, FIRST_LANE_OF_CALLS)]


async def dead_letters(
    driver: asyncpg.Connection, encryption: Encryption | None = None
) -> list[DeadLetter]:
    """Return what is dead and not discarded, the oldest first."""
    rows: Rows = await driver.fetch(_DEAD)
    if encryption is not None:
        rows = await encryption.decrypt(driver, rows, "value")
    return [DeadLetter(*(row[name] for name in DeadLetter._fields)) for row in rows]


async def redrive(driver: asyncpg.Connection, letters: Iterable[DeadLetter]) -> None:
    """Have dead letters tried again, as `service dead redrive` does."""
    ids = [one.id for one in letters]
    async with driver.transaction():
        rows = await driver.fetch(_PLACES, ids)
        if len(rows) != len(set(ids)):
            raise HarnessMisused("a letter is not there any more: get them by dead_letters()")
        for number in sorted({row["lane"] for row in rows}):
            await dead_rows.lock_lane(driver, number)
        await dead_rows.redrive(driver, rows)
