"""Large payloads: stored before the transaction commits, and noted in it."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from onceward import Event, Handlers, Transaction, Writer, Writing
from onceward.claims.check import Claims, Stored
from onceward.errors import StoreUnavailable
from onceward.events.event import Unpublishable
from onceward.events.message import Reference
from onceward.servers.database import create_engine
from onceward.settings import Settings

from .conftest import FOLDER_AND_S3, LIMIT, Objects, Outage
from tests.contract.bank import Deposit
from tests.onceward.integration.applier import Applier, NewApplier
from tests.onceward.integration.test_round_trips import NEW, deposits, round_trips, wired
from tests.onceward.integration.wire import Wire
from tests.servers.waiting import PATIENCE, eventually

__all__ = ["wired"]


class Statement(Event, type="statement", topic="statements"):
    """What an account's holder gets."""

    text: str


EMPTY = len(Statement(text="").model_dump_json())


class Deposited(Event, type="deposited"):
    """Money came in: so many letters are written about it."""

    account: str
    amount: int


class Clerk:
    """Writes statements of as many letters as were deposited."""

    def __init__(self) -> None:
        self.handlers = Handlers()
        self.copies = 1
        self.raises: Exception | None = None
        self.options: dict[str, object] = {}
        self.calls = 0
        self.seconds = 0.0

        @self.handlers.on(Deposited, topic="deposits", consumer="state")
        async def state(event: Deposited, tx: Transaction) -> None:
            self.calls += 1
            await asyncio.sleep(self.seconds)
            for _ in range(self.copies):
                tx.publish(
                    Statement(text=event.amount * "x"),
                    key=event.account,
                    **self.options,  # type: ignore[arg-type]
                )
            if self.raises:
                raise self.raises


@pytest.fixture
def clerk() -> Clerk:
    """Return a clerk."""
    return Clerk()


@pytest.fixture
async def applier(clerk: Clerk, new_applier: NewApplier, opened: Callable[..., Claims]) -> Applier:
    """Return the applier of the clerk."""
    applier = await new_applier(clerk.handlers, topic="deposits")
    applier.consume.claims = opened()
    return applier


async def outbox(db: asyncpg.Connection) -> list[asyncpg.Record]:
    """Return the outbox."""
    rows: list[asyncpg.Record] = await db.fetch("SELECT * FROM pipeline.outbox ORDER BY id")
    return rows


async def noted(db: asyncpg.Connection) -> dict[str, str]:
    """Return the event ids of what is noted, by name."""
    return dict(await db.fetch("SELECT name, event_id FROM pipeline.claim"))


async def test_only_a_payload_above_the_limit_is_stored_outside_of_kafka(
    applier: Applier, objects: Objects, db: asyncpg.Connection
) -> None:
    at_limit = LIMIT - EMPTY
    await applier.apply(Deposit(at_limit), Deposit(at_limit + 1))
    small, large = await outbox(db)
    assert (len(small["payload"]), small["dataref"]) == (LIMIT, None)
    (name,) = objects.names()
    content = objects.get(name)
    assert len(content) == LIMIT + 1
    assert (large["payload"], large["dataref"]) == (b"", f"{objects.url}/{name}")
    assert large["datalength"] == LIMIT + 1
    assert large["datachecksum"] == sha256(content).hexdigest()
    assert await noted(db) == {name: large["event_id"]}
    service, kind, day, last = name.split("/")
    assert kind == "claims"
    assert (service, len(day), len(last)) == ("applier", 10, 65)


async def test_what_would_not_fit_with_its_key_is_kept_elsewhere_too(
    new_applier: NewApplier,
    clerk: Clerk,
    opened: Callable[..., Claims],
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIPELINE_CLAIM_LIMIT_BYTES", "3000")
    applier = await new_applier(clerk.handlers, topic="deposits", max_event_bytes=4_800)
    applier.consume.claims = opened()
    await applier.apply(Deposit(2_900, account="k" * 1_000))
    (row,) = await outbox(db)
    assert row["dataref"] is not None


@pytest.mark.parametrize("letters", [9_990 - EMPTY, 10_001 - EMPTY])
async def test_what_is_larger_than_the_memory_is_refused_as_it_is_staged(
    new_applier: NewApplier,
    clerk: Clerk,
    opened: Callable[..., Claims],
    objects: Objects,
    letters: int,
) -> None:
    applier = await new_applier(clerk.handlers, topic="deposits", max_event_bytes=5_000)
    applier.consume.claims = opened()
    await applier.apply(Deposit(letters))
    fits = letters + EMPTY <= 10_000
    assert len(objects.names()) == fits
    assert (await applier.park() == {}) == fits
    if not fits:
        (row,) = await applier.backlog()
        assert row["error"].startswith(Unpublishable.__name__)
        assert "PIPELINE_CLAIM_MEMORY_BYTES" in row["error"]


async def test_small_events_cost_no_round_trip_and_large_ones_one_for_all(
    wired: tuple[object, Applier, Wire], opened: Callable[..., Claims], objects: Objects
) -> None:
    _, applier, wire = wired
    applier.consume.claims = opened()
    await applier.apply(*deposits(0, 10))
    await applier.apply(*deposits(10, 10))
    assert await round_trips(wire, applier, deposits(20, 1_000)) == NEW
    assert objects.names() == set()


async def test_the_large_ones_of_a_transaction_are_noted_by_one_statement(
    applier: Applier, clerk: Clerk, objects: Objects, db: asyncpg.Connection
) -> None:
    clerk.copies = 3
    await applier.apply(Deposit(1_000), Deposit(1_001), Deposit(5))
    assert len(await noted(db)) == 6 == len(objects.names())
    assert len(await outbox(db)) == 9


async def test_more_than_there_is_memory_for_is_done_in_parts(
    applier: Applier, objects: Objects, db: asyncpg.Connection
) -> None:
    await applier.apply(*(Deposit(3_000 + number) for number in range(8)))
    assert len(await outbox(db)) == 8
    assert await applier.park() == {}
    assert set(await noted(db)) == objects.names()


async def test_one_message_that_needs_more_is_its_handlers_fault(
    applier: Applier, clerk: Clerk
) -> None:
    clerk.copies = 4
    await applier.apply(Deposit(3_000), Deposit(2, account="bob"))
    assert await applier.park() == {("state", 0): "transaction failed"}


async def test_a_store_that_is_slow_gets_less_at_once(
    applier: Applier, opened: Callable[..., Claims], db: asyncpg.Connection
) -> None:
    class Slow(Claims):
        async def put(self, payloads: Mapping[str, bytes]) -> Mapping[str, Stored]:
            if len(payloads) > 2:
                raise StoreUnavailable("it takes too long")
            return await super().put(payloads)

    claims = opened()
    claims.__class__ = Slow
    applier.consume.claims = claims
    async with asyncio.timeout(PATIENCE):
        await applier.apply(*(Deposit(1_000 + number) for number in range(8)))
    assert len(await outbox(db)) == 8
    assert applier.outages == []


async def test_an_event_that_is_taken_back_is_not_kept(
    applier: Applier, clerk: Clerk, objects: Objects
) -> None:
    clerk.raises = RuntimeError("no")
    await applier.apply(Deposit(1_000))
    assert objects.names() == set()


async def test_scheduled_events_are_kept_when_they_are_staged(
    applier: Applier, clerk: Clerk, objects: Objects, db: asyncpg.Connection
) -> None:
    clerk.options = {"after": timedelta(days=1), "name": "later"}
    await applier.apply(Deposit(1_000))
    (row,) = await db.fetch("SELECT * FROM pipeline.scheduled")
    (name,) = objects.names()
    assert (row["payload"], row["dataref"]) == (b"", f"{objects.url}/{name}")
    assert await noted(db) == {name: row["event_id"]}


@pytest.fixture
async def engine(settings: Callable[..., Settings]) -> AsyncIterator[AsyncEngine]:
    """Return the engine of an API."""
    engine = create_engine(settings(), name="api")
    yield engine
    await engine.dispose()


async def test_a_writer_stores_large_payloads_and_reports_an_unavailable_store(
    engine: AsyncEngine,
    opened: Callable[..., Claims],
    objects: Objects,
    outage: Outage,
    db: asyncpg.Connection,
) -> None:
    writer = Writer(engine, source="/api", max_event_bytes=100_000, claims=opened("api"))

    async def state(writing: Writing) -> None:
        writing.publish(Statement(text=2_000 * "x"), key="ada")

    await writer.write(state)
    (row,) = await outbox(db)
    assert row["dataref"].startswith(f"{objects.url}/api/")
    async with outage():
        with pytest.raises(StoreUnavailable, match="object store at"):
            await writer.write(state)
    assert len(await outbox(db)) == 1


@FOLDER_AND_S3
async def test_storing_does_not_create_a_missing_store(
    opened: Callable[..., Claims], objects: Objects, loss: Outage
) -> None:
    """A folder that is not mounted would get what its readers never see."""
    claims = opened()
    async with loss():
        with pytest.raises(StoreUnavailable, match="object store at"):
            await claims.put({"a": b"1"})
    assert objects.names() == set()


async def test_what_is_kept_in_a_folder_survives_a_loss_of_power(
    opened: Callable[..., Claims], store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event is committed afterwards: its payload must not go where its row stays."""
    synced: set[int] = set()
    fsync = os.fsync

    def note(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", note)
    kept = await opened().put({"a": b"1", "b": b"2"})
    store = Path(store_url.removeprefix("file://"))
    for one in kept.values():
        file = store / one.name
        # The file, and for its name and theirs the folders down to it.
        for path in (file, *(folder for folder in file.parents if folder.is_relative_to(store))):
            assert path.stat().st_ino in synced, path


async def test_a_store_that_is_away_is_waited_for_and_spends_no_attempt(
    applier: Applier, clerk: Clerk, objects: Objects, outage: Outage, db: asyncpg.Connection
) -> None:
    async with outage():
        applying = asyncio.create_task(applier.apply(Deposit(1_000), Deposit(2)))
        await eventually(lambda: len(applier.outages) > 2)
        assert all(f"the object store at {objects.url}" in one for one in applier.outages)
        assert await outbox(db) == []
    await applying
    assert len(await outbox(db)) == 2
    assert await applier.backlog() == []
    assert set(await noted(db)) == objects.names()


Listen = Callable[[], Awaitable[int]]


@pytest.fixture
async def listen() -> AsyncIterator[Listen]:
    """Listen to connections, and never answer."""
    servers = []

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65_536):
            pass
        writer.close()

    async def start() -> int:
        servers.append(await asyncio.start_server(swallow, "127.0.0.1", 0))
        port: int = servers[-1].sockets[0].getsockname()[1]
        return port

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the environment name a store behind a port."""

    def lead_to(port: int) -> None:
        for name, value in {
            "PIPELINE_CLAIM_URL": "s3://bucket/claims",
            "PIPELINE_CLAIM_TIMEOUT": "0.5",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "nowhere",
            "AWS_ACCESS_KEY_ID": "ann",
            "AWS_SECRET_ACCESS_KEY": "hunter2",
        }.items():
            monkeypatch.setenv(name, value)

    return lead_to


@pytest.mark.parametrize("is_listening", [True, False], ids=["hanging", "refusing"])
async def test_a_store_that_does_not_answer_is_infrastructure(
    new_applier: NewApplier,
    clerk: Clerk,
    opened: Callable[..., Claims],
    listen: Listen,
    unused_tcp_port: int,
    remote: Callable[[int], None],
    is_listening: bool,
) -> None:
    remote(await listen() if is_listening else unused_tcp_port)
    applier = await new_applier(clerk.handlers, topic="deposits")
    applier.consume.claims = opened()
    applying = asyncio.create_task(applier.apply(Deposit(1_000)))
    await eventually(lambda: len(applier.outages) > 1)
    applying.cancel()
    await asyncio.gather(applying, return_exceptions=True)
    why = "storing takes longer" if is_listening else "error sending request"
    assert all("the object store at s3://bucket/claims: " in one for one in applier.outages)
    assert all(why in one for one in applier.outages)
    assert "hunter2" not in "".join(applier.outages)
    assert await applier.backlog() == []


async def test_a_hanging_store_spends_no_attempt_of_a_slow_handler(
    new_applier: NewApplier,
    clerk: Clerk,
    opened: Callable[..., Claims],
    listen: Listen,
    remote: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remote(await listen())
    monkeypatch.setenv("PIPELINE_CLAIM_TIMEOUT", "2")
    applier = await new_applier(
        clerk.handlers, topic="deposits", transaction_timeout=6, lock_timeout=1
    )
    applier.consume.claims = opened()
    clerk.seconds = 1.0
    applying = asyncio.create_task(applier.apply(Deposit(1_000)))
    await eventually(lambda: applying.done() or len(applier.outages) > 1)
    assert not applying.done()
    applying.cancel()
    await asyncio.gather(applying, return_exceptions=True)
    assert all("the object store at s3://bucket/claims: " in one for one in applier.outages)
    assert await applier.backlog() == []


@pytest.mark.parametrize("is_there", [True, False], ids=["working", "hanging"])
async def test_a_handler_leaving_the_store_too_little_time_is_at_fault(
    new_applier: NewApplier,
    clerk: Clerk,
    opened: Callable[..., Claims],
    listen: Listen,
    request: pytest.FixtureRequest,
    is_there: bool,
) -> None:
    """However quick the store is: what a message comes to does not depend on others' luck."""
    if not is_there:
        request.getfixturevalue("remote")(await listen())
    applier = await new_applier(
        clerk.handlers, topic="deposits", transaction_timeout=9, lock_timeout=1
    )
    applier.consume.claims = opened(timeout=8)
    clerk.seconds = 1.5
    async with asyncio.timeout(PATIENCE):
        await applier.apply(Deposit(1_000), Deposit(1, account="bob"))
        await applier.work_off()
    assert await applier.park() == {("state", 0): "takes too long"}
    (row,) = await applier.backlog()
    assert "takes longer than 1 s and leaves the object store less than 8 s" in row["error"]
    assert applier.outages == []


FORBIDDEN = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


async def test_a_store_that_denies_access_is_awaited_and_permissions_are_named(
    opened: Callable[..., Claims], remote: Callable[[int], None]
) -> None:
    async def forbid(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(FORBIDDEN), FORBIDDEN))
        writer.close()

    async with await asyncio.start_server(forbid, "127.0.0.1", 0) as server:
        remote(server.sockets[0].getsockname()[1])
        claims = opened(timeout=PATIENCE)
        with pytest.raises(
            StoreUnavailable, match=r"fetching is forbidden: .* grant .*s3:ListBucket"
        ):
            await claims.fetch(Reference("s3://bucket/claims/a"))
