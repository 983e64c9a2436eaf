"""What the relay publishes, in which order, and what it leaves to its successor."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import asyncpg
import pytest
from sqlalchemy import make_url

from pipeline import database, epoch, outbox, relay, window
from pipeline.publisher import Publisher
from pipeline.schema import SHARDS
from pipeline.settings import Settings
from pipeline.window import Page, Progress

from .conftest import PATIENCE, eventually
from .outgoing import (
    Tail,
    event,
    following,
    ids_in,
    let_leases_end,
    numbered,
    relaying,
    stage,
)

Connect = Callable[[], Awaitable[asyncpg.Connection]]
ALL = list(range(SHARDS))


async def start_of(db: asyncpg.Connection) -> Progress:
    """Return the progress of a relay that has just published everything."""
    return Progress(await db.fetchval("SELECT pg_current_snapshot()"), None, 0, 0)


async def read(db: asyncpg.Connection, progress: Progress, limit: int) -> Page:
    """Read the next page, as a relay that owns all shards does."""
    step = window.fresh if progress.target is None else window.page
    return await step(db, progress, ALL, limit)


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


async def cursors(db: asyncpg.Connection) -> list[tuple[object, ...]]:
    """Return the progress that the database holds, of every shard."""
    rows = await db.fetch(
        "SELECT shard, seen, target, last_id, high_id FROM pipeline.outbox_cursor ORDER BY shard"
    )
    return [tuple(row) for row in rows]


async def shares(db: asyncpg.Connection) -> list[int]:
    """Return how many shards each owner holds by a lease that has not ended."""
    rows = await db.fetch(
        "SELECT count(*) FROM pipeline.outbox_cursor"
        " WHERE lease_until > clock_timestamp() GROUP BY owner ORDER BY 1"
    )
    return [row["count"] for row in rows]


async def owners(db: asyncpg.Connection) -> list[tuple[str | None, int]]:
    """Return the owner and the token of every shard."""
    rows = await db.fetch("SELECT owner, token FROM pipeline.outbox_cursor ORDER BY shard")
    return [(row["owner"], row["token"]) for row in rows]


async def all_is_written(db: asyncpg.Connection) -> bool:
    """Whether the cursor in the database is past everything that is committed."""
    return bool(
        await db.fetchval(
            "SELECT NOT EXISTS (SELECT FROM pipeline.outbox JOIN pipeline.outbox_cursor"
            " USING (shard) WHERE target IS NOT NULL OR NOT pg_visible_in_snapshot(xid, seen))"
        )
    )


# What a window holds.


async def test_a_lower_id_that_commits_later_is_not_passed_over(
    connect: Connect, db: asyncpg.Connection
) -> None:
    progress = await start_of(db)
    late = await connect()
    transaction = late.transaction()
    await transaction.start()
    await outbox.copy(late, numbered("t", [1]))
    await stage(await connect(), numbered("t", [2]))
    before, progress = await read_all(db, progress)
    await transaction.commit()
    after, _ = await read_all(db, progress)
    assert (before, after) == (["2"], ["1"])


async def test_transactions_above_the_snapshots_xmax_are_not_passed_over(
    connect: Connect, db: asyncpg.Connection
) -> None:
    writers = [await connect() for _ in range(3)]
    transactions = [writer.transaction() for writer in writers]
    for number, (writer, transaction) in enumerate(zip(writers, transactions, strict=True)):
        await transaction.start()
        await outbox.copy(writer, numbered("t", [number]))
    xids = [await writer.fetchval("SELECT pg_current_xact_id()") for writer in writers]
    ids, progress = await read_all(db, await start_of(db))
    assert ids == []
    assert progress.seen[1] <= min(xids), "this test needs running transactions above xmax"
    for number in (1, 2, 0):
        await transactions[number].commit()
        ids, progress = await read_all(db, progress)
        assert ids == [str(number)]


async def test_what_a_savepoint_has_taken_back_is_not_published_and_the_rest_is(
    connect: Connect, db: asyncpg.Connection
) -> None:
    progress = await start_of(db)
    writer = await connect()
    async with writer.transaction():
        await outbox.copy(writer, numbered("t", [1]))
        async with writer.transaction():
            await outbox.copy(writer, numbered("t", [2]))
        with suppress(ZeroDivisionError):
            async with writer.transaction():
                await outbox.copy(writer, numbered("t", [3]))
                raise ZeroDivisionError
        between, progress = await read_all(db, progress)
        async with writer.transaction():
            await outbox.copy(writer, numbered("t", [4]))
    after, _ = await read_all(db, progress)
    assert (between, after) == ([], ["1", "2", "4"])


async def test_a_row_that_commits_below_the_end_of_a_paged_window_comes_in_the_next_one(
    connect: Connect, db: asyncpg.Connection
) -> None:
    progress = await start_of(db)
    late = await connect()
    transaction = late.transaction()
    await transaction.start()
    await outbox.copy(late, numbered("t", ["late"]))
    await stage(await connect(), numbered("t", range(20)))
    first = await read(db, progress, 7)
    await outbox.copy(late, numbered("t", ["later"]))
    await transaction.commit()
    rest, _ = await read_all(db, first.then, 7)
    assert [row["event_id"] for row in first.events] == [str(number) for number in range(7)]
    assert rest == [*(str(number) for number in range(7, 20)), "late", "later"]


async def test_a_window_is_paged_through_a_long_gap_of_ids(
    db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "_SCAN_AT_MOST", 10)
    progress = await start_of(db)
    await stage(db, numbered("t", [1, 2, 3]))
    await db.execute("SELECT nextval('pipeline.outbox_id_seq') FROM generate_series(1, 95)")
    await stage(db, numbered("t", [4, 5, 6]))
    ids, progress = await read_all(db, progress, 2)
    # The gap gives pages without events: `read_all` goes on because a target is set.
    assert ids == ["1", "2", "3", "4", "5", "6"]
    assert progress.target is None


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_commits_in_whatever_order_is_read_exactly_once(
    connect: Connect, db: asyncpg.Connection, seed: int
) -> None:
    chance = random.Random(seed)
    idle = [await connect() for _ in range(6)]
    open_ones: list[tuple[asyncpg.Connection, asyncpg.transaction.Transaction, list[str]]] = []
    committed: list[str] = []
    seen: list[str] = []
    progress = await start_of(db)
    staged = 0
    for _ in range(500):
        match chance.choice(["begin", "add", "end", "end", "read"]):
            case "begin" if idle:
                writer = idle.pop()
                transaction = writer.transaction()
                await transaction.start()
                open_ones.append((writer, transaction, []))
            case "add" if open_ones:
                writer, _, ids = chance.choice(open_ones)
                new = range(staged, staged := staged + chance.randint(1, 12))
                keys = [f"key-{chance.randint(0, 9)}" for _ in new]
                await outbox.copy(
                    writer, [event("t", id, key) for id, key in zip(new, keys, strict=True)]
                )
                ids += map(str, new)
            case "end" if open_ones:
                writer, transaction, ids = open_ones.pop(chance.randrange(len(open_ones)))
                if chance.random() < 0.3:
                    await transaction.rollback()
                else:
                    await transaction.commit()
                    committed += ids
                idle.append(writer)
            case "read":
                one = await read(db, progress, chance.randint(1, 9))
                seen += [row["event_id"] for row in one.events]
                progress = one.then
    for _, transaction, ids in open_ones:
        await transaction.commit()
        committed += ids
    rest, _ = await read_all(db, progress, 3)
    assert len(committed) > 100
    assert Counter(seen + rest) == Counter(committed)


# What arrives in Kafka.


async def test_windows_larger_than_a_page_are_published_in_order_while_others_write(
    settings: Callable[..., Settings],
    connect: Connect,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic(3)
    keys = [f"key-{number}" for number in range(5)]
    writer = await connect()

    async def write(numbers: Sequence[int]) -> None:
        await stage(writer, [event(topic, n, keys[n % 5]) for n in numbers])

    await write(range(300))
    async with following(kafka, topic) as tail, relaying(settings(relay_page=7)) as one:
        for start in range(300, 600, 20):
            await tail.until(lambda start=start: len(tail.records) > start - 250)  # type: ignore[misc]
            await write(range(start, start + 20))
        await one.stop()
        await tail.until_ids(range(600))
    assert tail.first_ids() == {
        key.encode(): [str(n) for n in range(600) if keys[n % 5] == key] for key in keys
    }
    assert len(tail.records) == 600


async def test_whatever_happens_to_writers_and_relays_every_event_arrives_in_its_keys_order(
    settings: Callable[..., Settings],
    connect: Connect,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic(4)
    ledger = Ledger(topic, seed=20)
    await ledger.open(db)
    chosen = settings(relay_page=7, relay_lease=1, lanes=1)
    async with AsyncExitStack() as stack:
        tail = await stack.enter_async_context(following(kafka, topic))
        for _ in range(3):
            await stack.enter_async_context(relaying(chosen))
        doomed = await stack.enter_async_context(relaying(chosen))
        writers = [asyncio.create_task(ledger.write(await connect())) for _ in range(8)]
        for enough in (600, 1_500, 2_400):
            await tail.until(lambda enough=enough: len(tail.records) > enough)  # type: ignore[misc]
            if enough == 1_500:
                await doomed.kill()
            else:
                await db.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid IN"
                    " (SELECT pid FROM pg_stat_activity WHERE application_name = 'bank'"
                    "  AND datname = current_database() ORDER BY backend_start LIMIT 1)"
                )
        ledger.closing = True
        await asyncio.gather(*writers)
        committed = [
            row["event_id"] for row in await db.fetch("SELECT event_id FROM pipeline.outbox")
        ]
        await tail.until_ids(committed)
    assert set(tail.ids) == set(committed)
    assert ledger.rolled_back
    assert not ledger.rolled_back & set(tail.ids)
    numbers = {key: [int(id.split("/")[1]) for id in ids] for key, ids in tail.first_ids().items()}
    assert numbers == {key: list(range(1, len(found) + 1)) for key, found in numbers.items()}
    assert len(numbers) == Ledger.KEYS


class Ledger:
    """Writers at random: long and short transactions, some of which roll back.

    The counter of a key is a row that the transaction locks and raises, so the events of a key
    carry 1, 2, 3 in the order of their transactions, whatever ids they get.
    """

    KEYS = 12

    def __init__(self, topic: str, seed: int) -> None:
        self._topic = topic
        self._chance = random.Random(seed)
        self._attempts = 0
        self.rolled_back: set[str] = set()
        self.closing = False

    async def open(self, db: asyncpg.Connection) -> None:
        await db.execute(
            "CREATE TABLE counter AS SELECT key, 0 AS number FROM generate_series(0, 11) AS key"
        )

    async def write(self, connection: asyncpg.Connection) -> None:
        while not self.closing:
            await self._write_once(connection)

    async def _write_once(self, connection: asyncpg.Connection) -> None:
        chance = self._chance
        self._attempts += 1
        attempt = self._attempts
        keys = sorted(chance.sample(range(self.KEYS), chance.choice([1, 1, 2, 3])))
        staged: list[str] = []
        transaction = connection.transaction()
        await transaction.start()
        for key in keys:
            count = chance.choice([1, 1, 2, 5, 20])
            last = await connection.fetchval(
                "UPDATE counter SET number = number + $2 WHERE key = $1 RETURNING number",
                key,
                count,
            )
            ids = [f"{attempt}/{number}" for number in range(last - count + 1, last + 1)]
            await outbox.copy(connection, [event(self._topic, id, f"key-{key}") for id in ids])
            staged += ids
            await asyncio.sleep(chance.choice([0, 0, 0.002, 0.02]))
        if chance.random() < 0.2:
            await transaction.rollback()
            self.rolled_back |= set(staged)
        else:
            await transaction.commit()


async def test_events_without_a_key_all_arrive(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic(3)
    await stage(db, numbered(topic, range(30), key=None))
    async with following(kafka, topic) as tail, relaying(settings()):
        await tail.until_ids(range(30))
    assert {record.key for record in tail.records} == {None}
    assert Counter(record.partition for record in tail.records) == {0: 10, 1: 10, 2: 10}


async def test_a_relay_that_is_woken_publishes_without_waiting_for_its_next_poll(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic()
    never = settings(relay_poll_min=3_600, relay_poll_max=3_600)
    async with following(kafka, topic) as tail, relaying(never) as one:
        await eventually(lambda: not one.health.reasons)
        await stage(db, numbered(topic, [1]))
        one.relay.wake()
        await tail.until_ids([1])


# What is left behind, and who goes on.


async def test_a_successor_repeats_what_the_cursor_does_not_know_and_loses_nothing(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic()
    await stage(db, numbered(topic, range(50)))
    never_written = settings(relay_cursor_interval=3_600, relay_lease=3_600, relay_page=7)
    async with following(kafka, topic) as tail:
        async with relaying(never_written) as first:
            await tail.until_ids(range(50))
            await first.kill()
        await stage(db, numbered(topic, range(50, 60)))
        await let_leases_end(db)
        async with relaying(settings()):
            await tail.until_ids(range(60))
        assert tail.first_ids() == {b"ada": [str(number) for number in range(60)]}
        assert tail.ids == [str(number) for number in [*range(50), *range(60)]]


async def test_a_successor_repeats_nothing_that_the_cursor_knows(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic()
    await stage(db, numbered(topic, range(50)))
    async with relaying(settings(relay_page=7, relay_cursor_interval=0.01)) as first:
        await eventually(lambda: all_is_written(db))
        await first.kill()
    await stage(db, numbered(topic, [50]))
    await let_leases_end(db)
    async with following(kafka, topic) as tail, relaying(settings()) as second:
        await tail.until_ids([50])
        await second.stop()
    assert await ids_in(kafka, topic) == [str(number) for number in range(51)]


async def test_a_successor_goes_on_in_the_middle_of_a_window(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic()
    progress = await start_of(db)
    await stage(db, numbered(topic, range(50)))
    half = (await read(db, progress, 20)).then
    await db.execute(
        "UPDATE pipeline.outbox_cursor SET seen = $1, target = $2, last_id = $3, high_id = $4",
        half.seen,
        half.target,
        half.last_id,
        half.high_id,
    )
    await stage(db, numbered(topic, range(50, 55)))
    async with following(kafka, topic) as tail, relaying(settings(relay_page=7)):
        await tail.until_ids(range(20, 55))
    assert tail.ids == [str(number) for number in range(20, 55)]


async def test_a_relay_takes_over_what_a_dead_one_held_when_its_lease_has_ended(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic()
    async with (
        following(kafka, topic) as tail,
        relaying(settings(relay_lease=1)) as first,
        relaying(settings(relay_lease=1)),
    ):
        await eventually(lambda: _shares_are(db, [32, 32]))
        before = await owners(db)
        await first.kill()
        await stage(db, [event(topic, number, f"key-{number}") for number in range(200)])
        await tail.until_ids(range(200))
        await eventually(lambda: _shares_are(db, [64]))
        after = await owners(db)
    (survivor,) = {owner for owner, _ in after}
    # The token rises where the owner changes, and nowhere else.
    assert [token for _, token in after] == [
        token if owner == survivor else token + 1 for owner, token in before
    ]


async def _shares_are(db: asyncpg.Connection, expected: list[int]) -> bool:
    return await shares(db) == expected


async def test_live_relays_share_the_shards_evenly(
    settings: Callable[..., Settings], db: asyncpg.Connection
) -> None:
    quick = settings(relay_lease=1)
    async with relaying(quick), relaying(quick) as second, relaying(quick) as third:
        await eventually(lambda: _shares_are(db, [20, 22, 22]))
        await third.stop()
        await eventually(lambda: _shares_are(db, [32, 32]))
        await second.stop()
        await eventually(lambda: _shares_are(db, [64]))


async def test_a_relay_that_stops_gives_its_shards_back_at_once(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic()
    for_ever = settings(relay_lease=3_600)
    async with relaying(for_ever) as first:
        await eventually(lambda: _shares_are(db, [64]))
        await first.stop()
    assert (
        await db.fetchval("SELECT count(owner) + count(lease_until) FROM pipeline.outbox_cursor")
        == 0
    )
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox_relay") == 0
    await stage(db, numbered(topic, [1]))
    async with following(kafka, topic) as tail, relaying(for_ever):
        await tail.until_ids([1])


async def test_a_relay_publishes_all_that_is_committed_before_it_stops(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic()
    async with relaying(settings(relay_page=7, relay_poll_min=3_600, relay_poll_max=3_600)) as one:
        await eventually(lambda: not one.health.reasons)
        await stage(db, numbered(topic, range(100)))
        await one.stop()
    assert await ids_in(kafka, topic) == [str(number) for number in range(100)]
    assert await all_is_written(db)


async def test_what_is_committed_behind_the_back_of_the_last_look_is_published_before_the_stop(
    settings: Callable[..., Settings],
    connect: Connect,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic, writer = await new_topic(), await connect()

    class Interrupted(relay.Relay):
        """One that is told to stop when it has just found nothing."""

        async def _step(self, driver: asyncpg.Connection) -> bool:
            found = await super()._step(driver)
            if not self._stopping.is_set():
                await stage(writer, numbered(topic, [1]))
                self.stop()
            return found

    async with relaying(settings(), Interrupted) as one:
        await asyncio.wait_for(one.task, PATIENCE)
    assert await ids_in(kafka, topic) == ["1"]


async def test_a_relay_that_lost_its_shards_writes_nothing_over_the_new_owners_progress(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic()
    slow_to_renew = settings(relay_lease=3_600, relay_cursor_interval=0.01)
    async with following(kafka, topic) as tail, relaying(slow_to_renew) as one:
        await eventually(lambda: _shares_are(db, [64]))
        await db.execute(
            "UPDATE pipeline.outbox_cursor SET token = token + 1, owner = 'another'"
            " WHERE shard >= 10"
        )
        theirs = (await cursors(db))[10:]
        # Fewer than a first page: all of them are sent before the loss is noticed.
        await stage(db, [event(topic, number, f"key-{number}") for number in range(80)])
        await tail.until_ids(range(80))
        await eventually(lambda: _all_is_written_below(db, 10))
        await one.stop()
    assert (await cursors(db))[10:] == theirs
    assert {owner for owner, _ in (await owners(db))[10:]} == {"another"}


async def test_a_page_that_takes_longer_than_the_lease_is_sent_once_and_keeps_its_shards(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic()

    class Slow(Publisher):
        """One whose brokers take their time."""

        async def send(
            self, events: Sequence[asyncpg.Record], may_send: Callable[[], bool]
        ) -> None:
            await asyncio.sleep(2.5)
            await super().send(events, may_send)

    class SlowRelay(relay.Relay):
        """A relay with such a publisher."""

        def __init__(self, *args: Any, settings: Settings, **options: Any) -> None:
            super().__init__(*args, settings=settings, **options)
            self._publisher = Slow(settings, client_id="slow", owner="slow")

    await stage(db, numbered(topic, range(20)))
    async with following(kafka, topic) as tail, relaying(settings(relay_lease=1), SlowRelay):
        await eventually(lambda: _shares_are(db, [64]))
        async with relaying(settings(relay_lease=1)):
            await tail.until_ids(range(20))
            await eventually(lambda: all_is_written(db))
    assert tail.ids == [str(number) for number in range(20)]


async def _all_is_written_below(db: asyncpg.Connection, shard: int) -> bool:
    return bool(
        await db.fetchval(
            "SELECT bool_and(pg_visible_in_snapshot(xid, seen)) FROM pipeline.outbox"
            " JOIN pipeline.outbox_cursor USING (shard) WHERE shard < $1",
            shard,
        )
    )


async def test_a_relay_that_lost_its_connection_goes_on_with_a_new_one(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic()
    async with following(kafka, topic) as tail, relaying(settings(relay_lease=3_600)):
        await stage(db, numbered(topic, [1]))
        await tail.until_ids([1])
        killed = await db.fetch(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'bank' AND datname = current_database()"
        )
        await stage(db, numbered(topic, [2]))
        await tail.until_ids([2])
    assert killed
    assert tail.first_ids() == {b"ada": ["1", "2"]}


@asynccontextmanager
async def wire_that_dies_silently(url: str) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """Lead to the server, until `die` is called: then what is open is silent, and not closed."""
    there = make_url(url)
    epoch = 0

    def die() -> None:
        nonlocal epoch
        epoch += 1

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        born = epoch
        with suppress(OSError):
            while data := await reader.read(65_536):
                if born == epoch:
                    writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection(there.host, there.port)
        await asyncio.gather(pipe(reader, to_server), pipe(server, writer))

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        here = there.set(host="127.0.0.1", port=port)
        yield here.render_as_string(hide_password=False), die


async def test_a_relay_notices_a_connection_that_died_without_a_word(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    database_url: str,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(database, "_COMMAND_SECONDS", 1.0)
    topic = await new_topic()
    async with (
        following(kafka, topic) as tail,
        wire_that_dies_silently(database_url) as (url, die),
        relaying(settings(database_url=url)) as one,
    ):
        await stage(db, numbered(topic, [1]))
        await tail.until_ids([1])
        die()
        await eventually(lambda: one.reason != "")
        await stage(db, numbered(topic, [2]))
        await tail.until_ids([2])
        await eventually(lambda: one.reason == "")


async def test_after_a_dump_is_restored_nothing_is_published_before_a_reset(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    """Trap 2, its second half: with a cursor that is ahead, and with one that is not."""
    topic = await new_topic()
    await stage(db, numbered(topic, range(3)))
    await db.execute("UPDATE pipeline.outbox_epoch SET system_identifier = 1")
    async with relaying(settings()) as one:
        await eventually(lambda: "service relay reset" in one.reason)
    # Another cluster's transaction ids, as a dump carries them.
    await db.execute("UPDATE pipeline.outbox SET xid = '9000000000'")
    await db.execute("UPDATE pipeline.outbox_cursor SET seen = '9000000009:9000000009:'")
    assert await ids_in(kafka, topic) == []
    await epoch.reset(db, keep_progress=False)
    async with following(kafka, topic) as tail, relaying(settings()) as one:
        await tail.until_ids(range(3))
        await stage(db, numbered(topic, [3]))
        await tail.until_ids(range(4))
    assert tail.ids == ["0", "1", "2", "3"]


async def test_a_cursor_ahead_of_its_own_cluster_is_refused_too(
    settings: Callable[..., Settings], db: asyncpg.Connection
) -> None:
    await db.execute("UPDATE pipeline.outbox_cursor SET seen = '9000000009:9000000009:'")
    async with relaying(settings()) as one:
        await eventually(lambda: "service relay reset" in one.reason)


async def test_a_reset_that_was_cut_short_leaves_the_relay_refusing(
    settings: Callable[..., Settings], db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(epoch, "_RENEW_EVENTS", "SELECT 1 / 0")
        with pytest.raises(asyncpg.DivisionByZeroError):
            await epoch.reset(db, keep_progress=False)
    async with relaying(settings()) as one:
        await eventually(lambda: "service relay reset" in one.reason)
        await epoch.reset(db, keep_progress=False)
        await eventually(lambda: one.reason == "")


async def test_a_cluster_that_kept_its_transaction_ids_goes_on_where_it_was(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic()
    await stage(db, numbered(topic, [1]))
    async with following(kafka, topic) as tail, relaying(settings()):
        await tail.until_ids([1])
    await db.execute("UPDATE pipeline.outbox_epoch SET system_identifier = 1")
    await stage(db, numbered(topic, [2]))
    await epoch.reset(db, keep_progress=True)
    async with following(kafka, topic) as tail, relaying(settings()):
        await tail.until_ids([2])
    assert tail.ids == ["1", "2"]


# Query plans, on a table of some size.


@pytest.fixture
async def aged(db: asyncpg.Connection) -> asyncpg.Connection:
    """Return a connection to a database with 100,000 published events, and 100 new ones."""
    for part in range(20):
        await db.execute(
            "INSERT INTO pipeline.outbox"
            " (topic, key, payload, event_id, source, type, content_type)"
            " SELECT 't', ('key-' || n % 1000)::bytea, '{}', $1 || '/' || n, '/bank', 'x', 'y'"
            " FROM generate_series(1, 5000) AS n",
            str(part),
        )
    await db.execute("UPDATE pipeline.outbox_cursor SET seen = pg_current_snapshot()")
    await stage(db, [event("t", number, f"key-{number}") for number in range(100)])
    await db.execute("VACUUM ANALYZE pipeline.outbox")
    return db


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_a_fresh_window_is_found_by_the_index_on_xid(
    aged: asyncpg.Connection, mode: str
) -> None:
    seen = await aged.fetchval("SELECT seen FROM pipeline.outbox_cursor LIMIT 1")
    await aged.execute(f"SET plan_cache_mode = {mode}")
    assert await scans(aged, window._FRESH, seen, ALL, 5_001) == {"outbox_xid_idx"}


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_a_page_is_found_by_the_index_on_id(aged: asyncpg.Connection, mode: str) -> None:
    seen = await aged.fetchval("SELECT seen FROM pipeline.outbox_cursor LIMIT 1")
    now = await aged.fetchval("SELECT pg_current_snapshot()")
    await aged.execute(f"SET plan_cache_mode = {mode}")
    found = await scans(aged, window._PAGE, seen, now, 50_000, 100_000, ALL, 5_000)
    assert found == {"outbox_id_idx"}


async def scans(db: asyncpg.Connection, query: str, *arguments: object) -> set[str]:
    """Return by which indexes of the parent the partition that holds the rows is read."""
    plan = json.loads(await db.fetchval(f"EXPLAIN (FORMAT JSON) {query}", *arguments))
    names = await db.fetch(
        "SELECT part.relname AS part, whole.relname AS whole FROM pg_inherits"
        " JOIN pg_class part ON part.oid = inhrelid JOIN pg_class whole ON whole.oid = inhparent"
        " WHERE part.relkind = 'i'"
    )
    parents = {row["part"]: row["whole"] for row in names}
    full = await db.fetchval("SELECT tableoid::regclass::text FROM pipeline.outbox LIMIT 1")
    indexes = {
        row["indexrelid"]
        for row in await db.fetch(
            "SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = $1::regclass",
            full,
        )
    }
    found: set[str] = set()
    nodes = [plan[0]["Plan"]]
    for node in nodes:
        nodes += node.get("Plans", [])
        if f"pipeline.{node.get('Relation Name')}" == full and "Index Name" not in node:
            if node["Node Type"] != "Bitmap Heap Scan":
                found.add(node["Node Type"])
        elif f"pipeline.{node.get('Index Name')}" in indexes:
            found.add(parents[node["Index Name"]])
    return found


def test_the_tail_notices_what_is_out_of_order() -> None:
    """The property above can fail: the helper tells first appearances from repeats."""
    record = type("Record", (), {})

    def seen(id: str) -> object:
        one = record()
        one.key, one.headers = b"k", [("ce_id", id.encode())]
        return one

    tail = Tail([seen("1"), seen("3"), seen("1"), seen("2")])
    assert tail.first_ids() == {b"k": ["1", "3", "2"]}
