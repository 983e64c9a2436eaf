"""Several relays at once: killed, stopped for longer than their leases, coming and going."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

import asyncpg
import pytest

from onceward.observe.health import Health
from onceward.relay import cursor, relay, window
from onceward.relay import statements as relay_statements
from onceward.relay.rejections import Rejections
from onceward.relay.window import Page, Progress, Snapshot
from onceward.settings import Settings

from .kafka_wire import Wire
from .outgoing import EagerRelay, Running, event, numbered, relaying, shares, stage
from .writers import KEYS, Writers, faults
from tests.servers.topics import Tail, following, id_of
from tests.servers.waiting import PATIENCE, eventually

Connect = Callable[[], Awaitable[asyncpg.Connection]]
NewTopic = Callable[..., Awaitable[str]]
NewSettings = Callable[..., Settings]

_HISTORY = """
CREATE TABLE history (
    number bigint GENERATED ALWAYS AS IDENTITY, at timestamptz DEFAULT clock_timestamp(),
    shard smallint, seen pg_snapshot, target pg_snapshot, last_id bigint, token bigint,
    owner text, lease_until timestamptz);
CREATE FUNCTION remember() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO history (shard, seen, target, last_id, token, owner, lease_until)
    VALUES (new.shard, new.seen, new.target, new.last_id, new.token, new.owner, new.lease_until);
    RETURN NULL;
END $$;
CREATE TRIGGER remember AFTER UPDATE ON pipeline.outbox_cursor
   FOR EACH ROW EXECUTE FUNCTION remember()
"""
"""Remembers every state that the cursor of a shard has had."""


def is_within(earlier: Snapshot, later: Snapshot) -> bool:
    """Whether all that is visible in the one is visible in the other."""
    _, xmax, running = earlier
    return xmax <= later[1] and {xid for xid in later[2] if xid < xmax} <= set(running)


def goes_back(before: asyncpg.Record, after: asyncpg.Record) -> bool:
    """Whether the cursor forgets something that it knew as published."""
    if before["seen"] != after["seen"]:
        return not is_within(before["seen"], after["seen"])
    if before["target"] is None:
        return False
    return bool(before["target"] != after["target"] or before["last_id"] > after["last_id"])


async def has_gone_back(db: asyncpg.Connection) -> bool:
    """Whether the cursor of any shard has ever forgotten what it knew as published."""
    latest: dict[int, asyncpg.Record] = {}
    for row in await db.fetch("SELECT * FROM history ORDER BY number"):
        if row["shard"] in latest and goes_back(latest[row["shard"]], row):
            return True
        latest[row["shard"]] = row
    assert latest, "nothing was written"
    return False


class StoppableCursor(cursor.Cursor):
    """The cursor of a relay that can be stopped."""

    relay: "Stoppable"

    async def write(
        self, driver: asyncpg.Connection, progress: Mapping[int, Progress], *, keep: bool = True
    ) -> list[int]:
        if progress:
            await self.relay.stand("write")
        return await super().write(driver, progress, keep=keep)


class Stoppable(relay.Relay):
    """A relay that can be stopped where a machine may stop: before a send, or before a write."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._cursor = StoppableCursor(self._settings, self._cursor.owner)
        self._cursor.relay = self
        self._stops_before = ""
        self._go_on = asyncio.Event()
        self.stands_with: dict[int, Progress] = {}
        """What it takes for the progress of its shards, while it stands."""

    def stop_before(self, what: str) -> None:
        """Stand still before the next `send` or `write`."""
        self._stops_before = what
        self._go_on.clear()

    def go_on(self) -> None:
        """Go on where it was stopped."""
        self._stops_before = ""
        self.stands_with = {}
        self._go_on.set()

    def stop(self) -> None:
        self.go_on()
        super().stop()

    async def _send(
        self, driver: asyncpg.Connection, events: Sequence[asyncpg.Record]
    ) -> Rejections:
        await self.stand("send")
        return await super()._send(driver, events)

    async def stand(self, where: str) -> None:
        """Stand still, if this is where the relay was stopped."""
        if self._stops_before == where and self._cursor.progress:
            self.stands_with = dict(self._cursor.progress)
            await self._go_on.wait()


async def _others_are_ahead(db: asyncpg.Connection, stopped: Stoppable) -> bool:
    """Whether all of its shards have another owner, who has published and written more."""
    ahead = {
        row["shard"]
        for row in await db.fetch(
            "SELECT shard, seen FROM pipeline.outbox_cursor WHERE owner <> $1",
            stopped._cursor.owner,
        )
        if row["shard"] in stopped.stands_with
        and row["seen"] != stopped.stands_with[row["shard"]].seen
        and is_within(stopped.stands_with[row["shard"]].seen, row["seen"])
    }
    return ahead == set(stopped.stands_with)


@asynccontextmanager
async def writing(writers: Writers, tail: Tail) -> AsyncIterator[None]:
    """Let the writers work on, not too far ahead of what arrives, until the end of the block."""
    closing = False

    async def work() -> None:
        while not closing:
            await writers.step()
            await tail.until(lambda: closing or len(writers.ids) < len(tail.records) + 300)
        await writers.finish()

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        closing = True
        await task


BLOWS = ["kill", "stop before send", "stop before write", "stop before write", "cut"]
REJECTIONS = ["forbid", "forbid and kill", "forbid and cut"]


async def faults_of(
    blows: Sequence[str],
    chosen: Settings,
    connect: Connect,
    db: asyncpg.Connection,
    topic: str,
    seed: int,
    patience: float = PATIENCE,
) -> set[str]:
    """Let writers and relays work while relays are struck, and return what went wrong.

    What has not come `patience` seconds after the last blow is lost.
    """
    chance = random.Random(seed)
    await db.execute(_HISTORY)
    await Writers.prepare(db)
    writers = Writers(topic, [await connect() for _ in range(6)], chance)
    async with AsyncExitStack() as stack:
        kafka = chosen.kafka_bootstrap_servers
        tail = await stack.enter_async_context(following(kafka, topic))
        wire = await stack.enter_async_context(Wire(kafka).listening())
        through = chosen.model_copy(update={"kafka_bootstrap_servers": wire.address})

        async def new_relay() -> Running:
            return await stack.enter_async_context(relaying(through, Stoppable))

        relays = [await new_relay() for _ in range(3)]
        await eventually(lambda: _shares_are(db, [20, 22, 22]))
        async with writing(writers, tail):
            for blow in chance.sample(blows, len(blows)):
                struck = relays.pop(chance.randrange(len(relays)))
                async with forbidding(wire, topic, db) if "forbid" in blow else nullcontext():
                    await _strike(blow, struck, db)
                relays.append(await new_relay() if "kill" in blow else struck)
                come = len(tail.records)
                await tail.until(lambda come=come: len(tail.records) > come + 100)  # type: ignore[misc]
        await tail.has_ids(writers.ids, patience)
        for one in relays:
            await one.stop()
    assert writers.taken_back
    as_first = {id_of(record): record for record in reversed(tail.records)}
    changed = any(
        (record.key, record.value, record.headers) != (first.key, first.value, first.headers)
        for record in tail.records
        if (first := as_first[id_of(record)])
    )
    # Events are repeated after a blow, and may be.
    found = faults(writers.committed, ((one.key, id_of(one)) for one in tail.records))
    found -= {"repeated"}
    found |= {"repeated with a difference"} if changed else set()
    return found | ({"cursor went back"} if await has_gone_back(db) else set())


@asynccontextmanager
async def forbidding(wire: Wire, topic: str, db: asyncpg.Connection) -> AsyncIterator[None]:
    """Let the topic be forbidden, from before the block, in which some wait, to its end."""

    async def some_wait() -> bool:
        return bool(await db.fetchval("SELECT count(*) > 20 FROM pipeline.outbox_rejected"))

    wire.forbid(topic)
    await eventually(some_wait)
    yield
    wire.go_on()


async def _strike(blow: str, struck: Running, db: asyncpg.Connection) -> None:
    one = struck.relay
    assert isinstance(one, Stoppable)
    await eventually(lambda: bool(one._cursor.progress))
    match blow.removeprefix("forbid").removeprefix(" and ").split():
        case ["kill"]:
            await struck.kill()
        case ["stop", "before", what]:
            one.stop_before(what)
            await eventually(lambda: bool(one.stands_with))
            await eventually(lambda: _others_are_ahead(db, one))
            one.go_on()
        case ["cut"]:
            await db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'bank' AND datname = current_database()"
            )


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
async def test_events_arrive_in_key_order_despite_failures_of_writers_and_relays(
    settings: NewSettings,
    connect: Connect,
    db: asyncpg.Connection,
    new_topic: NewTopic,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Traps 1, 3 and 5."""
    monkeypatch.setattr(window, "_SCAN_AT_MOST", 20)
    chosen = settings(
        relay_batch_events=7, relay_lease=1, relay_cursor_interval=0.05, concurrency=1
    )
    assert await faults_of(BLOWS, chosen, connect, db, await new_topic(4), seed) == set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
async def test_events_arrive_in_key_order_despite_failures_and_a_forbidden_topic(
    settings: NewSettings,
    connect: Connect,
    db: asyncpg.Connection,
    new_topic: NewTopic,
    seed: int,
) -> None:
    """Traps 6 and 7."""
    chosen = settings(
        relay_batch_events=20,
        relay_lease=1,
        relay_cursor_interval=0.05,
        concurrency=1,
        relay_topic_pause=0.05,
    )
    assert await faults_of(REJECTIONS, chosen, connect, db, await new_topic(4), seed) == set()
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox_rejected") == 0


async def test_that_property_notices_a_relay_that_writes_without_its_token(
    settings: NewSettings,
    connect: Connect,
    db: asyncpg.Connection,
    new_topic: NewTopic,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trap 5."""
    checked = " AND cursor.token = mine.token"
    assert relay_statements.WRITE_PROGRESS.count(checked) == 1, (
        "the statement is not what this test knows"
    )
    monkeypatch.setattr(
        relay_statements, "WRITE_PROGRESS", relay_statements.WRITE_PROGRESS.replace(checked, "")
    )
    chosen = settings(
        relay_batch_events=100, relay_lease=1, relay_cursor_interval=0.05, concurrency=1
    )
    blows = ["stop before write"]
    topic = await new_topic(4)
    found = await faults_of(blows, chosen, connect, db, topic, seed=0, patience=20)
    assert "cursor went back" in found


async def test_two_relays_never_share_a_key(
    settings: NewSettings, db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    """Trap 4: rows are not claimed one by one; nothing is sent twice though all look for work."""
    topic = await new_topic(3)
    keys = [f"key-{number}" for number in range(40)]
    chosen = settings(relay_lease=3_600, relay_batch_events=7, concurrency=1)
    async with (
        following(kafka, topic) as tail,
        relaying(chosen, EagerRelay),
        relaying(chosen, EagerRelay),
        relaying(chosen, EagerRelay),
    ):
        await eventually(lambda: _shares_are(db, [20, 22, 22]))
        for start in range(0, 1_200, 60):
            await stage(db, [event(topic, n, keys[n * 7 % 40]) for n in range(start, start + 60)])
        await tail.until_ids(range(1_200))
    assert tail.first_ids() == {
        key.encode(): [str(n) for n in range(1_200) if keys[n * 7 % 40] == key] for key in keys
    }
    assert len(tail.records) == 1_200


async def _shares_are(db: asyncpg.Connection, expected: list[int]) -> bool:
    return await shares(db) == expected


async def test_a_dead_relays_shards_are_reassigned_when_its_lease_ends(
    settings: NewSettings, db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    topic = await new_topic()
    # As another relay has left it: the first half of the shards, for two more seconds.
    died = await db.fetchval(
        "INSERT INTO pipeline.outbox_relay VALUES ('dead', clock_timestamp() + interval '2 s')"
        " RETURNING lease_until"
    )
    await db.execute(
        "UPDATE pipeline.outbox_cursor SET owner = 'dead', token = 7, lease_until = $1"
        " WHERE shard < 32",
        died,
    )
    await db.execute(_HISTORY)
    await stage(db, [event(topic, number, f"key-{number}") for number in range(200)])
    # It would look at its own leases after twenty minutes.
    async with (
        following(kafka, topic) as tail,
        relaying(settings(relay_lease=3_600, concurrency=1)) as one,
    ):
        await tail.until_ids(range(200))
        await eventually(lambda: _shares_are(db, [64]))
        taken = await db.fetch(
            "SELECT shard, min(at) AS at, min(token) AS token FROM history"
            " WHERE shard < 32 AND owner = $1 GROUP BY shard",
            one.relay._cursor.owner,
        )
    assert len(taken) == 32
    assert {row["token"] for row in taken} == {8}
    assert min(row["at"] for row in taken) > died


async def test_a_dead_relays_shards_are_reassigned_after_a_clock_setback(
    settings: NewSettings, db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    topic = await new_topic()
    await db.execute("INSERT INTO pipeline.outbox_relay VALUES ('dead', now() + interval '1 h')")
    await db.execute(
        "UPDATE pipeline.outbox_cursor SET owner = 'dead', lease_until = now() + interval '1 h'"
    )
    await stage(db, [event(topic, number, f"key-{number}") for number in range(200)])
    async with following(kafka, topic) as tail, relaying(settings(concurrency=1)):
        await tail.until_ids(range(200))
        await eventually(lambda: _shares_are(db, [64]))


async def test_joining_and_leaving_relays_share_shards_without_waiting_for_leases(
    settings: NewSettings, db: asyncpg.Connection, connect: Connect, kafka: str, new_topic: NewTopic
) -> None:
    topic = await new_topic(3)
    # No event waits for the end of a lease.
    chosen = settings(relay_lease=3_600, concurrency=1)
    closing = False
    staged = 0

    async def write(writer: asyncpg.Connection) -> None:
        nonlocal staged
        while not closing:
            await stage(writer, [event(topic, staged + n, KEYS[n]) for n in range(len(KEYS))])
            staged += len(KEYS)
            await asyncio.sleep(0.02)

    async with AsyncExitStack() as stack:
        tail = await stack.enter_async_context(following(kafka, topic))
        relays = [await stack.enter_async_context(relaying(chosen, EagerRelay))]
        await eventually(lambda: _shares_are(db, [64]))
        task = asyncio.create_task(write(await connect()))
        others = [relaying(chosen, EagerRelay) for _ in range(4)]
        relays += [await stack.enter_async_context(one) for one in others]
        await eventually(lambda: _shares_are(db, [12, 13, 13, 13, 13]))
        for one in relays[:3]:
            await one.stop()
        await eventually(lambda: _shares_are(db, [32, 32]))
        closing = True
        await task
        await tail.until_ids(range(staged))
    assert len(tail.records) == staged, "shards that are handed over repeat nothing"
    assert tail.first_ids() == {
        key.encode(): [str(n) for n in range(place, staged, len(KEYS))]
        for place, key in enumerate(KEYS)
    }


async def test_a_key_with_many_events_is_published_in_pages(
    settings: NewSettings, db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    """Trap 8."""
    topic = await new_topic()
    pages: list[int] = []

    class Counting(relay.Relay):
        """A relay that counts what it sends."""

        async def _send(
            self, driver: asyncpg.Connection, events: Sequence[asyncpg.Record]
        ) -> Rejections:
            pages.append(len(events))
            return await super()._send(driver, events)

    await stage(db, numbered(topic, range(10_000)))
    async with (
        following(kafka, topic) as tail,
        relaying(settings(relay_batch_events=2_000, relay_lease=60), Counting),
    ):
        await tail.until_ids(range(10_000))
    assert pages == [2_000] * 5
    assert tail.ids == [str(number) for number in range(10_000)]


async def test_a_relay_that_is_busy_for_longer_than_a_lease_stays_ready(
    settings: NewSettings,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = await new_topic()
    reasons: list[str] = []
    extended = 0

    extend = cursor.Cursor.extend

    async def counted(self: cursor.Cursor, driver: asyncpg.Connection) -> list[int]:
        nonlocal extended
        extended += 1
        return await extend(self, driver)

    monkeypatch.setattr(cursor.Cursor, "extend", counted)
    monkeypatch.setattr(Health, "not_ready", lambda _, part, reason: reasons.append(reason))
    chosen = settings(relay_lease=3, relay_batch_events=7)
    async with following(kafka, topic) as tail, relaying(chosen):
        staged = 0
        while extended < 6:
            await stage(db, numbered(topic, range(staged, staged + 300)))
            staged += 300
            await tail.until(lambda staged=staged: len(tail.records) > staged - 200)  # type: ignore[misc]
    assert reasons == ["has not started yet"]


async def test_no_window_is_read_in_a_transaction_that_writes(
    settings: NewSettings,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trap 30."""
    topic = await new_topic()
    writes: list[int | None] = []

    async def watched(
        connection: asyncpg.Connection,
        progress: Progress,
        shards: Sequence[int],
        limit: int,
        at_most: int,
    ) -> Page:
        page = await window.fresh(connection, progress, shards, limit, at_most)
        writes.append(await connection.fetchval("SELECT pg_current_xact_id_if_assigned()"))
        return page

    monkeypatch.setattr(relay, "fresh", watched)
    # Shards that are unequally far are read in one transaction.
    await db.execute(
        "UPDATE pipeline.outbox_cursor SET seen = pg_current_snapshot() WHERE shard > 9"
    )
    async with following(kafka, topic) as tail, relaying(settings()):
        await stage(db, [event(topic, number, f"key-{number}") for number in range(200)])
        await tail.until_ids(range(200))
    assert set(writes) == {None}
