"""What is deleted of the store, and what is never."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest

from onceward import Handlers, Service
from onceward.claims import sweeping
from onceward.claims.check import Claims, Stored
from onceward.claims.commands import app
from onceward.cli.commands import command_line
from onceward.operators import adopting
from onceward.relay.scheduled import Scheduled
from onceward.runtime import Part

from .conftest import GONE, Objects, Outage
from .press import Base
from tests.conftest import Running
from tests.onceward.integration.conftest import Command, complaint
from tests.onceward.integration.grantees import DIRECTLY, splitting
from tests.onceward.integration.outgoing import event, publish_all, stage
from tests.servers.waiting import PATIENCE, eventually

OLD = {"age": -1.0}
"""A setting with which everything that is published is old."""

_NOTE = "INSERT INTO pipeline.claim (name, event_id) VALUES ($1, $2)"
_TIME_PASSES = "UPDATE pipeline.claim SET published_at = published_at - $1::interval"
_SCHEDULE = """
INSERT INTO pipeline.scheduled (name, due_at, topic, payload, event_id, source, type, content_type,
                                dataref)
VALUES ('later', clock_timestamp() + interval '1 hour', 'books', '', 'event', '/applier', 'printed',
        'application/json', 'file:///somewhere')
"""
_REFUSE = """
INSERT INTO pipeline.outbox_rejected (id, created_at, topic, payload, event_id, source, type,
                                    content_type, dataref)
SELECT id, created_at, topic, payload, event_id, source, type, content_type, dataref
  FROM pipeline.outbox
"""


@pytest.fixture
def service(commands: Callable[..., Command]) -> Command:
    """Call `service claims …` of a service without handlers."""
    applier = Service("applier", Handlers(), Base.metadata)
    return commands(command_line(applier, claims=app), "claims")


async def keep(claims: Claims, db: asyncpg.Connection, id: str = "event") -> Stored:
    """Keep a payload and note it, in the transaction that is open or in one of its own."""
    (kept,) = (await claims.put({id: b"x"})).values()
    await db.execute(_NOTE, kept.name, id)
    return kept


async def test_what_has_no_event_is_deleted_after_the_grace_and_not_before(
    opened: Callable[..., Claims], objects: Objects, db: asyncpg.Connection
) -> None:
    await opened().put({"orphan": b"x"})
    noted = await keep(opened(), db)
    await opened().sweep(db)
    assert len(objects.names()) == 2
    await opened(**GONE).sweep(db)
    assert objects.names() == {noted.name}


async def test_a_transaction_that_is_not_over_keeps_what_it_has_stored(
    opened: Callable[..., Claims],
    objects: Objects,
    db: asyncpg.Connection,
    connect: Callable[[], Awaitable[asyncpg.Connection]],
) -> None:
    other = await connect()
    async with db.transaction():
        noted = await keep(opened(), db)
        await opened().sweep(other)
        assert objects.names() == {noted.name}
    await opened(**GONE).sweep(other)
    assert objects.names() == {noted.name}


@pytest.mark.parametrize("place", ["outbox", "rejected", "scheduled", "moved"])
async def test_what_waits_to_be_published_keeps_its_payload_however_old_it_is(
    opened: Callable[..., Claims], objects: Objects, db: asyncpg.Connection, place: str
) -> None:
    noted = await keep(opened(), db)
    await publish_all(db)
    if place in ("outbox", "rejected"):
        await stage(db, [event("books", "event", dataref=noted.reference.uri)])
    if place == "rejected":
        await db.execute(_REFUSE)
        await publish_all(db)
    if place in ("scheduled", "moved"):
        await db.execute(_SCHEDULE)
        await publish_all(db)
    if place == "moved":
        await db.execute("UPDATE pipeline.scheduled SET due_at = now()")
        assert await Scheduled().move(db)
    for _ in range(2):
        await opened(**OLD, **GONE).sweep(db)
        assert objects.names() == {noted.name}

    await db.execute("DELETE FROM pipeline.scheduled")
    await db.execute("DELETE FROM pipeline.outbox_rejected")
    await publish_all(db)
    await opened().sweep(db)
    assert objects.names() == {noted.name}, "it was published a moment ago"
    await opened(**OLD).sweep(db)
    assert objects.names() == set()
    assert await db.fetchval("SELECT count(*) FROM pipeline.claim") == 0


async def test_the_age_begins_when_the_event_is_published(
    opened: Callable[..., Claims], objects: Objects, db: asyncpg.Connection
) -> None:
    noted = await keep(opened(), db)
    await stage(db, [event("books", "event", dataref=noted.reference.uri)])
    await opened().sweep(db)
    assert await db.fetchval("SELECT published_at FROM pipeline.claim") is None
    await publish_all(db)
    before = await db.fetchval("SELECT clock_timestamp()")
    await opened().sweep(db)
    published_at = await db.fetchval("SELECT published_at FROM pipeline.claim")
    assert published_at > before
    await opened().sweep(db)
    assert await db.fetchval("SELECT published_at FROM pipeline.claim") == published_at
    await db.execute(
        "UPDATE pipeline.claim SET published_at = published_at - $1::interval", timedelta(29)
    )
    await opened().sweep(db)
    assert objects.names() == {noted.name}
    await db.execute(
        "UPDATE pipeline.claim SET published_at = published_at - $1::interval", timedelta(2)
    )
    await opened().sweep(db)
    assert objects.names() == set()


async def test_what_is_not_the_services_own_payloads_is_left_alone(
    opened: Callable[..., Claims], objects: Objects, db: asyncpg.Connection
) -> None:
    for name in ("other", "applier2", "des", "APPLIER"):
        objects.put(f"{name}/claims/2026-01-01/a", b"x")
    # An archive may lie below the same URL.
    objects.put("applier/outbox/2026-01-01/manifest.json", b"x")
    objects.put("applier/claims2/2026-01-01/a", b"x")
    before = objects.names()
    await opened(**OLD, **GONE).sweep(db)
    assert objects.names() == before


async def test_rounds_go_on_where_the_last_one_ended(
    opened: Callable[..., Claims],
    objects: Objects,
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweeping, "_A_ROUND", 3)
    for day in range(1, 5):
        for number in range(3):
            objects.put(f"applier/claims/2026-01-0{day}/{number}", b"x")
            await db.execute(_NOTE, f"applier/claims/2026-01-0{day}/{number}", "event")
    await stage(db, [event("books", "event", dataref="x")])
    claims = opened(**GONE)
    await claims.sweep(db)
    late = objects.put("applier/claims/2026-01-01/late", b"x")
    objects.put("applier/claims/2026-01-03/late", b"x")
    for _ in range(2):
        await claims.sweep(db)
    assert len(objects.names()) == 13, "the first folder is not looked into again so soon"
    for _ in range(3):
        await claims.sweep(db)
    assert late.removeprefix(f"{objects.url}/") not in objects.names()
    assert len(objects.names()) == 12


async def test_a_round_that_was_cut_off_leaves_nothing_for_good(
    opened: Callable[..., Claims], objects: Objects, db: asyncpg.Connection, outage: Outage
) -> None:
    await keep(opened(), db)
    await opened().sweep(db)
    claims = opened(**OLD, **GONE)
    async with outage():
        with pytest.raises(ConnectionError, match="object store at"):
            await claims.sweep(db)
    assert len(objects.names()) == 1
    assert await db.fetchval("SELECT count(*) FROM pipeline.claim") == 0, "its row went first"
    await opened(**OLD, **GONE).sweep(db)
    assert objects.names() == set()


@pytest.mark.parametrize(
    "another", ["system_identifier = 1", "database_oid = 1", "kafka_cluster = 'another'"]
)
async def test_nothing_is_deleted_for_a_database_that_is_not_adopted(
    service: Command,
    opened: Callable[..., Claims],
    objects: Objects,
    db: asyncpg.Connection,
    another: str,
) -> None:
    """As after a dump was restored: what is newer than the dump looks like orphans."""
    await opened().put({"orphan": b"x"})
    await keep(opened(), db)
    await db.execute(f"UPDATE pipeline.outbox_cluster SET {another}")
    done = await service("sweep")
    assert done.exit_code == 1
    assert "service adopt" in complaint(done)
    assert len(objects.names()) == 2
    await adopting.adopt(db, keep_progress=False)
    await opened(**GONE).sweep(db)
    assert len(objects.names()) == 1


async def test_two_at_once_do_no_harm(
    opened: Callable[..., Claims],
    objects: Objects,
    connect: Callable[[], Awaitable[asyncpg.Connection]],
) -> None:
    connections = [await connect() for _ in range(3)]
    # A busy machine may take longer for as many than these tests have a store take.
    patient = {"timeout": PATIENCE}
    await opened(memory_bytes=10**6, **patient).put({str(number): b"x" for number in range(1_100)})
    noted = [await keep(opened(), connections[0], f"old {number}") for number in range(20)]
    assert len(objects.names()) == 1_100 + len(noted)
    await asyncio.gather(*(opened(**OLD, **GONE, **patient).sweep(one) for one in connections))
    assert objects.names() == set()


async def test_a_running_service_sweeps_in_the_rounds_of_its_retention(
    running: Running, opened: Callable[..., Claims], objects: Objects, db: asyncpg.Connection
) -> None:
    service = Service(
        "applier", Handlers(), Base.metadata, claims=lambda name, _: opened(name, **GONE)
    )
    async with running(service, Part.RELAY, retention_interval=0.2):
        await opened().put({"orphan": b"x"})
        await eventually(lambda: not objects.names())


@DIRECTLY
async def test_where_roles_are_split_retention_sweeps_and_the_others_leave_it(
    commands: Callable[..., Command],
    server_url: str,
    direct_url: str,
    running: Running,
    opened: Callable[..., Claims],
    objects: Objects,
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    noted = await keep(opened(), db, "old")
    await db.execute("UPDATE pipeline.claim SET published_at = now() - interval '31 days'")
    applier = Service("applier", Handlers(), Base.metadata, claims=lambda name, _: opened(name))
    caplog.set_level("DEBUG", "onceward.retention.worker")
    async with splitting(server_url, direct_url, db) as made:
        async with running(applier, Part.RELAY, database_url=made.of("relay")):
            await eventually(lambda: "left to another role" in caplog.text)
        assert "a round of retention failed" not in caplog.text
        service = commands(command_line(applier, claims=app), "claims")
        for role in ("service", "relay", "operator"):
            monkeypatch.setenv("PIPELINE_DATABASE_URL", made.of(role))
            done = await service("sweep")
            assert done.exit_code == 1
            assert "permission denied" in complaint(done)
            assert objects.names() == {noted.name}
        monkeypatch.setenv("PIPELINE_DATABASE_URL", made.of("retention"))
        done = await service("sweep")
        assert done.exit_code == 0, complaint(done)
        assert objects.names() == set()


async def test_the_command_reports_deletions_and_a_dry_run_the_intended_ones(
    service: Command,
    opened: Callable[..., Claims],
    objects: Objects,
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await keep(opened(), db)
    await db.execute("UPDATE pipeline.claim SET published_at = now() - interval '31 days'")
    await opened().put({"orphan": b"x"})
    done = await service("sweep", "--dry-run")
    assert done.stdout.splitlines() == [
        "would be deleted 1 payloads whose events were published long ago",
        "would be deleted 0 payloads without an event, of 2",
    ]
    assert len(objects.names()) == 2
    told = json.loads((await service("sweep", "--dry-run", "--json")).stdout)
    assert told == {"old": 1, "orphans": 0, "seen": 2}
    done = await service("sweep")
    assert done.stdout.splitlines() == [
        "deleted   1 payloads whose events were published long ago",
        "deleted   0 payloads without an event, of 1",
    ]
    assert len(objects.names()) == 1

    monkeypatch.delenv("PIPELINE_CLAIM_URL")
    done = await service("sweep")
    assert done.exit_code == 1
    assert "PIPELINE_CLAIM_URL is not set" in complaint(done)


async def test_the_command_says_that_the_store_and_not_postgresql_is_unavailable(
    service: Command, objects: Objects, tmp_path: Path
) -> None:
    (tmp_path / "store" / "applier").touch()  # where a folder is expected
    done = await service("sweep")
    assert done.exit_code == 1
    place = f"{objects.url.removeprefix('file://')}/applier/claims"
    assert complaint(done) == (
        f"the object store at {objects.url}: listing failed: Generic LocalFileSystem error:"
        f" Unable to walk dir: IO error for operation on {place}: Not a directory (os error 20)"
    )
