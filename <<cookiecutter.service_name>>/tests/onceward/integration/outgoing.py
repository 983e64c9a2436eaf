"""What the relay's tests share: staging events, running relays, following a topic in Kafka."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from time import monotonic
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from onceward.cli.dead import Selection, State
from onceward.cli.dead_events import DeadEvents
from onceward.handlers import staging
from onceward.handlers.staged import StagedEvent
from onceward.observe.health import Health
from onceward.operators.audit import Change
from onceward.relay import window
from onceward.relay.cursor import Cursor, Fence
from onceward.relay.relay import Relay
from onceward.relay.window import Page, Progress
from onceward.retention import partitions
from onceward.schema import SHARDS
from onceward.servers.database import create_engine
from onceward.settings import Settings

from .applier import store_of
from tests.servers.topics import administrator
from tests.servers.waiting import PATIENCE, eventually

ALL_SHARDS = list(range(SHARDS))
EVERYTHING = Selection()
REDRIVES = Change("zoë", "redrive")
SMALL, LARGE = b"x" * 10, b"x" * 9_000
"""Payloads; topics of tests that allow 4,000 bytes don't take the second one."""


async def let_leases_end(connection: asyncpg.Connection, owner: str | None = None) -> None:
    """Make relays look as if they had been silent for longer than their leases: all, or one."""
    for table in ("outbox_cursor", "outbox_relay"):
        await connection.execute(
            f"UPDATE pipeline.{table} SET lease_until = clock_timestamp() - interval '1 second'"
            " WHERE owner = COALESCE($1, owner)",
            owner,
        )


def event(
    topic: str, id: object, key: str | None = "ada", payload: bytes = b"{}", **fields: object
) -> StagedEvent:
    """Return an event as a handler would have staged it."""
    plain = StagedEvent(
        topic=topic,
        key=None if key is None else key.encode(),
        payload=payload,
        event_id=str(id),
        source="/bank",
        type="balance.changed",
        subject=key,
        sequence=None,
        content_type="application/json",
        traceparent=None,
        tracestate=None,
        baggage=None,
    )
    return plain._replace(**fields)  # type: ignore[arg-type]


def numbered(topic: str, numbers: Iterable[object], key: str | None = "ada") -> list[StagedEvent]:
    """Return events of one key whose ids are the numbers."""
    return [event(topic, number, key) for number in numbers]


async def stage(connection: asyncpg.Connection, events: Sequence[StagedEvent]) -> None:
    """Commit events, in a transaction of their own."""
    async with connection.transaction():
        await staging.append(connection, events)


async def set_back(db: asyncpg.Connection, ago: timedelta, topic: str | None = None) -> None:
    """Let the events of the outbox, or of a topic, be so old: soon after midnight, of yesterday."""
    at = datetime.now(UTC) - ago
    day = at.date()
    bounds = f"FROM ('{day} 00:00+00') TO ('{day + timedelta(days=1)} 00:00+00')"
    await partitions.attach(db, "outbox", f"outbox_p{day:%Y%m%d}", bounds)
    await db.execute(
        "UPDATE pipeline.outbox SET created_at = $1 WHERE topic = coalesce($2, topic)", at, topic
    )


OLD = "outbox_p20200101"
"""A day of the outbox that should have gone long ago."""
IN_OLD = datetime(2020, 1, 1, 12, tzinfo=UTC)


async def make_old_day(db: asyncpg.Connection) -> None:
    """Let the outbox have that day still."""
    bounds = "FROM ('2020-01-01 00:00+00') TO ('2020-01-02 00:00+00')"
    await partitions.attach(db, "outbox", OLD, bounds)


async def stage_long_ago(
    db: asyncpg.Connection,
    id: object,
    topic: str = "missing",
    key: str = "ada",
    payload: bytes | None = None,
) -> None:
    """Insert an event into the old day."""
    await db.execute(
        "INSERT INTO pipeline.outbox (topic, key, payload, event_id, source, type, content_type,"
        " created_at) VALUES ($1, $2, $3, $4, '/bank', 'x', 'y', $5)",
        topic,
        key.encode(),
        payload,
        str(id),
        IN_OLD,
    )


async def waiting(db: asyncpg.Connection) -> list[str]:
    """Return the ids of the events that wait for their topic."""
    rows = await db.fetch(
        "SELECT event_id FROM pipeline.outbox_rejected WHERE died_at IS NULL ORDER BY id"
    )
    return [row["event_id"] for row in rows]


def waits(db: asyncpg.Connection, ids: Sequence[object]) -> Callable[[], Awaitable[bool]]:
    """Return the question whether just these events wait, for `eventually`."""

    async def ask() -> bool:
        return await waiting(db) == [str(id) for id in ids]

    return ask


async def died(db: asyncpg.Connection, which: Selection = EVERYTHING) -> list[SimpleNamespace]:
    """Return dead events, in the order in which they were staged."""
    found = store_of(DeadEvents, db).chunks("dead", which, 10_000)
    events = [SimpleNamespace(**one) async for some in found for one in some]
    return sorted(events, key=lambda one: int(one.id))


def are_dead(db: asyncpg.Connection, ids: Sequence[object]) -> Callable[[], Awaitable[bool]]:
    """Return the question whether just these events are dead, for `eventually`."""

    async def ask() -> bool:
        return [one.event_id for one in await died(db)] == [str(id) for id in ids]

    return ask


async def redrive(db: asyncpg.Connection, which: Selection = EVERYTHING) -> list[int]:
    """Redrive dead events, as the command does."""
    chunks = store_of(DeadEvents, db).redrive(which, REDRIVES)
    return [id async for ids in chunks for id in ids]


async def discard(
    db: asyncpg.Connection, which: Selection = EVERYTHING, state: State = "dead"
) -> list[int]:
    """Discard events, as the command does."""
    by = Change("zoë", "discard", "sent by hand")
    chunks = store_of(DeadEvents, db).discard(which, by, state)
    return [row["id"] async for rows in chunks for row in rows]


@dataclass(frozen=True)
class Running:
    """A relay at work in a task."""

    relay: Relay
    health: Health
    task: asyncio.Task[None]

    @property
    def reason(self) -> str:
        """Why it is not ready; empty if it is."""
        return self.health.reasons.get("relay", "")

    async def stop(self) -> None:
        """Let it drain and give its leases back."""
        self.relay.stop()
        await asyncio.wait_for(asyncio.shield(self.task), PATIENCE)

    async def kill(self) -> None:
        """End it in the middle of whatever it does."""
        # Cancelled in the first connect of an engine, SQLAlchemy raises another error instead, and
        # the relay, which was not stopped, begins again.
        while not self.task.done():
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=1)


class EagerCursor(Cursor):
    """A cursor that looks for other relays all the time, however long its lease is."""

    async def renew(self, driver: asyncpg.Connection, fence: Fence) -> bool:
        has_claimed = await super().renew(driver, fence)
        self._renew_at = monotonic() + 0.1
        return has_claimed


class EagerRelay(Relay):
    """A relay that soon shares its shards, with leases that no slow machine exceeds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._cursor = EagerCursor(self._settings, self._cursor.owner)


@asynccontextmanager
async def relaying(settings: Settings, kind: type[Relay] = Relay) -> AsyncIterator[Running]:
    """Run a relay, as long as the `with` block lasts or it is stopped or killed inside."""
    engine = create_engine(settings, name="bank")
    health = Health(stall_after=3_600)
    relay = kind(engine, name="bank", settings=settings, health=health)
    one = Running(relay, health, asyncio.create_task(relay.run()))
    try:
        yield one
    finally:
        if not one.task.done():
            await one.stop()
        await engine.dispose()


async def allow(kafka: str, topic: str, size: int) -> None:
    """Let the topic take records of this size, and no larger ones, from now on."""
    changed = ConfigResource(ConfigResourceType.TOPIC, topic, {"max.message.bytes": str(size)})
    async with administrator(kafka) as admin:
        await admin.alter_configs([changed])


_STRANGERS = """
SELECT array_agg(backend_xid) FROM pg_stat_activity
 WHERE datname <> current_database() OR backend_type <> 'client backend'
"""
_STILL_RUNNING = """
SELECT array_agg(format('%s %s: %s', datname, now() - xact_start, query))
  FROM pg_stat_activity WHERE backend_xid = ANY ($1)
"""


async def publish_all(db: asyncpg.Connection) -> None:
    """Move every shard's progress over all that is visible, as a relay does in the end.

    The server's other databases and its autovacuum hold snapshots back for a moment.
    """
    strangers = await db.fetchval(_STRANGERS)
    running: list[str] | None = None

    async def have_ended() -> bool:
        nonlocal running
        running = await db.fetchval(_STILL_RUNNING, strangers)
        return not running

    try:
        # Of other tests on a busy machine some take longer than this one may wait otherwise.
        await eventually(have_ended, 2 * PATIENCE)
    except pytest.fail.Exception:
        pytest.fail(f"held back by transactions of other tests: {running}")
    await db.execute("UPDATE pipeline.outbox_cursor SET seen = pg_current_snapshot()")


async def start_of(db: asyncpg.Connection) -> Progress:
    """Return the progress of a relay that has just published everything."""
    return Progress(await db.fetchval("SELECT pg_current_snapshot()"), None, 0, 0)


async def read(db: asyncpg.Connection, progress: Progress, limit: int) -> Page:
    """Read the next page, as a relay that owns all shards does."""
    if progress.target is not None:
        return await window.page(db, progress, ALL_SHARDS, limit)
    if wide := await window.opened(db, progress, ALL_SHARDS, unleased):
        return wide
    return await window.fresh(db, progress, ALL_SHARDS, limit)


async def unleased() -> None:
    """Extend no lease."""


async def read_all(
    db: asyncpg.Connection, progress: Progress, limit: int = 1_000
) -> tuple[list[str], Progress]:
    """Read until nothing is left, and return the ids in the order of reading."""
    ids: list[str] = []
    while True:
        one = await read(db, progress, limit)
        ids += [row["event_id"] for row in one.events]
        progress = one.then
        if not one.events and progress.target is None:
            return ids, progress


async def shares(db: asyncpg.Connection) -> list[int]:
    """Return how many shards each owner holds by a lease that has not ended."""
    rows = await db.fetch(
        "SELECT count(*) FROM pipeline.outbox_cursor"
        " WHERE lease_until > clock_timestamp() GROUP BY owner ORDER BY 1"
    )
    return [row["count"] for row in rows]


async def all_is_written(db: asyncpg.Connection) -> bool:
    """Whether the cursor in the database is past everything that is committed."""
    return bool(
        await db.fetchval(
            "SELECT NOT EXISTS (SELECT FROM pipeline.outbox JOIN pipeline.outbox_cursor"
            " USING (shard) WHERE target IS NOT NULL OR NOT pg_visible_in_snapshot(xid, seen))"
        )
    )


_BURY = """
INSERT INTO pipeline.outbox_rejected
       (id, created_at, topic, key, payload, event_id, source, type, content_type,
        reason, error, died_at)
SELECT n, now(), 'moves', ('key ' || n % 7)::bytea, '{}', 'event ' || n, '/bank', 'moved',
       'application/json', 'too large', 'event is larger',
       now() - make_interval(secs => n % 3)
  FROM generate_series(1, $1) AS n
"""


async def bury(db: asyncpg.Connection, count: int) -> None:
    """Store dead events of seven keys, in an order of death that is not theirs."""
    await db.execute(_BURY, count)
