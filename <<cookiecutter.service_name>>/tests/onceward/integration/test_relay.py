"""What the relay publishes, in which order, and what it leaves to its successor."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from opentelemetry.metrics import CallbackOptions
from sqlalchemy import make_url

from onceward.cli.commands import command_line
from onceward.observe import metrics
from onceward.operators import adopting
from onceward.relay import relay
from onceward.relay.cursor import Cursor
from onceward.relay.publisher import Publisher
from onceward.relay.rejections import Rejections
from onceward.relay.window import Page, Progress
from onceward.servers import database
from onceward.servers.tasks import in_background
from onceward.settings import Settings

from .bank import Bank
from .conftest import Command, complaint
from .kafka_wire import Wire
from .outgoing import (
    EagerRelay,
    all_is_written,
    event,
    let_leases_end,
    numbered,
    read,
    relaying,
    shares,
    stage,
    start_of,
)
from .tcp_proxy import TcpProxy
from tests.servers.proxy import proxy
from tests.servers.topics import Tail, following, ids_in
from tests.servers.waiting import PATIENCE, eventually

Connect = Callable[[], Awaitable[asyncpg.Connection]]


async def cursors(db: asyncpg.Connection) -> list[tuple[object, ...]]:
    """Return the progress that the database holds, of every shard."""
    rows = await db.fetch(
        "SELECT shard, seen, target, last_id, high_id FROM pipeline.outbox_cursor ORDER BY shard"
    )
    return [tuple(row) for row in rows]


async def owners(db: asyncpg.Connection) -> list[tuple[str | None, int]]:
    """Return the owner and the token of every shard."""
    rows = await db.fetch("SELECT owner, token FROM pipeline.outbox_cursor ORDER BY shard")
    return [(row["owner"], row["token"]) for row in rows]


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
    async with following(kafka, topic) as tail, relaying(settings(relay_batch_events=7)) as one:
        for start in range(300, 600, 20):
            await tail.until(lambda start=start: len(tail.records) > start - 250)  # type: ignore[misc]
            await write(range(start, start + 20))
        await one.stop()
        await tail.until_ids(range(600))
    assert tail.first_ids() == {
        key.encode(): [str(n) for n in range(600) if keys[n % 5] == key] for key in keys
    }
    assert len(tail.records) == 600


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
        one.relay.wake(1)
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
    never_written = settings(relay_cursor_interval=3_600, relay_lease=3_600, relay_batch_events=7)
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
    async with relaying(settings(relay_batch_events=7, relay_cursor_interval=0.01)) as first:
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
    async with following(kafka, topic) as tail, relaying(settings(relay_batch_events=7)):
        await tail.until_ids(range(20, 55))
    assert tail.ids == [str(number) for number in range(20, 55)]


async def test_a_relay_takes_over_shards_when_a_dead_relays_lease_ends(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic()
    async with (
        following(kafka, topic) as tail,
        relaying(settings(relay_lease=3_600), EagerRelay) as first,
        relaying(settings(relay_lease=3_600), EagerRelay),
    ):
        await eventually(lambda: _shares_are(db, [32, 32]))
        before = await owners(db)
        await first.kill()
        await let_leases_end(db, first.relay._cursor.owner)
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
    async with relaying(
        settings(relay_batch_events=7, relay_poll_min=3_600, relay_poll_max=3_600)
    ) as one:
        await eventually(lambda: not one.health.reasons)
        await stage(db, numbered(topic, range(100)))
        await one.stop()
    assert await ids_in(kafka, topic) == [str(number) for number in range(100)]
    assert await all_is_written(db)


@pytest.mark.parametrize("before", [0, 5], ids=["last look", "window of many pages"])
async def test_events_committed_unnoticed_by_the_relay_are_published_before_it_stops(
    settings: Callable[..., Settings],
    connect: Connect,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
    before: int,
) -> None:
    topic, writer = await new_topic(), await connect()

    class Interrupted(relay.Relay):
        """One told to stop when it has published the first page, or found that there is none."""

        async def _step(self, driver: asyncpg.Connection, *, is_poll: bool) -> tuple[bool, bool]:
            found = await super()._step(driver, is_poll=is_poll)
            if found[0] is (before > 0) and not self._stopping.is_set():
                await stage(writer, numbered(topic, [before + 1]))
                self.stop()
            return found

    await stage(writer, numbered(topic, range(1, before + 1)))
    async with relaying(settings(relay_batch_events=2), Interrupted) as one:
        await asyncio.wait_for(one.task, PATIENCE)
    assert await ids_in(kafka, topic) == [str(n) for n in range(1, before + 2)]


async def test_a_relay_that_lost_shards_keeps_the_new_owners_progress(
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


async def test_sending_longer_than_the_lease_repeats_nothing_and_keeps_shards(
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
        ) -> Rejections:
            await asyncio.sleep(4)
            return await super().send(events, may_send)

    class SlowRelay(relay.Relay):
        """A relay with such a publisher."""

        def __init__(self, *args: Any, settings: Settings, **options: Any) -> None:
            super().__init__(*args, settings=settings, **options)
            self._publisher = Slow(settings, client_id="slow", owner="slow")

    await stage(db, numbered(topic, range(20)))
    async with following(kafka, topic) as tail, relaying(settings(relay_lease=3), SlowRelay):
        await eventually(lambda: _shares_are(db, [64]))
        async with relaying(settings(relay_lease=3)):
            await tail.until_ids(range(20))
            await eventually(lambda: all_is_written(db))
    assert tail.ids == [str(number) for number in range(20)]


async def test_reading_longer_than_the_lease_sends_a_page_only_once(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = await new_topic()

    class SlowRelay(relay.Relay):
        """A relay whose database takes its time."""

        async def _read(
            self, driver: asyncpg.Connection, progress: Mapping[int, Progress]
        ) -> list[Page]:
            await asyncio.sleep(4)
            return await super()._read(driver, progress)

    async with following(kafka, topic) as tail, relaying(settings(relay_lease=3), SlowRelay):
        # The second time the producer knows the topic, and sends at once.
        for number in range(2):
            await stage(db, numbered(topic, [number]))
            await tail.until_ids([number])
    assert tail.ids == ["0", "1"]
    assert "trying again" not in caplog.text


async def test_a_connection_without_a_timely_answer_is_not_used_again(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each question would take as long again, in which the relay says nothing."""
    topic = await new_topic()
    silent: list[asyncpg.Connection] = []
    asked: list[asyncpg.Connection] = []

    class Cut(relay.Relay):
        """A relay whose connection is cut after a page was sent, and nobody has told it."""

        async def _step(self, driver: asyncpg.Connection, *, is_poll: bool) -> tuple[bool, bool]:
            found = await super()._step(driver, is_poll=is_poll)
            if self._cursor._unwritten and not silent:
                silent.append(driver)
                raise TimeoutError
            return found

    write = Cursor.write

    async def noted(self: Cursor, driver: asyncpg.Connection, *args: Any, **options: Any) -> Any:
        if silent:
            asked.append(driver)
        return await write(self, driver, *args, **options)

    monkeypatch.setattr(Cursor, "write", noted)
    await stage(db, numbered(topic, range(20)))
    async with following(kafka, topic) as tail, relaying(settings(relay_lease=1), Cut):
        await tail.until_ids(range(20))
        await eventually(lambda: all_is_written(db))
    assert asked
    assert silent[0] not in asked


async def test_what_waits_for_kafka_grows_older_in_the_metrics(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic, other = await new_topic(), await new_topic()
    answers = asyncio.Event()

    class Mute(Publisher):
        """One whose brokers don't answer for a while."""

        async def send(
            self, events: Sequence[asyncpg.Record], may_send: Callable[[], bool]
        ) -> Rejections:
            await answers.wait()
            return await super().send(events, may_send)

    class MuteRelay(relay.Relay):
        """A relay with such a publisher."""

        def __init__(self, *args: Any, settings: Settings, **options: Any) -> None:
            super().__init__(*args, settings=settings, **options)
            self._publisher = Mute(settings, client_id="mute", owner="mute")

    metrics.forget_outbox()
    await stage(db, [*numbered(topic, range(3)), event(other, 3)])
    page = settings(relay_batch_events=3)
    async with following(kafka, topic) as tail, relaying(page, MuteRelay):
        await eventually(lambda: age() > 0)
        begun = age()
        await eventually(lambda: age() > begun + 0.5)
        assert delays().keys() == {topic}, "what the next page has of the other is not known"
        assert delays()[topic] > begun
        answers.set()
        await tail.until_ids(range(3))
        await eventually(lambda: age() == 0)
        await eventually(lambda: [delays().get(one) for one in (topic, other)] == [0, 0])


def delays() -> dict[str, float]:
    """Return for how long the oldest event of each topic waits, by the metrics."""
    return {
        str((one.attributes or {})["messaging.destination.name"]): one.value
        for one in metrics._outbox_delay.observe(CallbackOptions())
    }


def age() -> float:
    """Return for how long the oldest event waits, by the metrics; less than 0 if they don't say."""
    observed = [one.value for one in metrics._lag_duration.observe(CallbackOptions())]
    return observed[0] if observed else -1


async def test_outbox_lag_grows_without_postgresql_while_no_other_relay_may_send(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    database_url: str,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic()
    url = make_url(database_url)
    metrics.forget_outbox()
    await stage(db, numbered(topic, [1]))
    async with (
        TcpProxy("127.0.0.1", url.port or 0).listening() as proxy,
        Wire(kafka).listening() as wire,
    ):
        wire.shut()
        behind = settings(
            database_url=url.set(port=proxy.port).render_as_string(hide_password=False),
            kafka_bootstrap_servers=wire.address,
            relay_lease=3_600,
        )
        async with relaying(behind) as one:
            await eventually(lambda: age() > 0)
            proxy.shut()
            await eventually(lambda: str(proxy.port) in one.reason)
            begun = age()
            assert begun > 0
            await eventually(lambda: age() > begun + 0.5)
            proxy.restore()
            wire.go_on()
            await eventually(lambda: age() == 0)


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

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        born = epoch
        while data := await reader.read(65_536):
            if born == epoch:
                writer.write(data)

    host, server_port = str(there.host), int(there.port or 0)
    async with proxy(host, server_port, ways=lambda: (pass_on, pass_on)) as port:
        here = there.set(host="127.0.0.1", port=port)
        yield here.render_as_string(hide_password=False), die


async def test_a_relay_that_renews_its_leases_right_after_a_failover_notices_it(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    """It is left without a shard then, and without a page that could tell it why."""
    topic = await new_topic()
    failovers: list[str] = []

    class Moved(relay.Relay):
        async def _renew(self, driver: asyncpg.Connection) -> None:
            if self._cursor.progress and not failovers:
                failovers.append(topic)
                assert self._cursor.server is not None
                self._cursor.server -= timedelta(days=1)
            await super()._renew(driver)

    await stage(db, numbered(topic, [1]))
    async with following(kafka, topic) as tail, relaying(settings(relay_lease=1), Moved):
        await eventually(lambda: bool(failovers))
        await stage(db, numbered(topic, [2]))
        await tail.until_ids([1, 2])


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
    await db.execute("UPDATE pipeline.outbox_cluster SET system_identifier = 1")
    async with relaying(settings()) as one:
        await eventually(lambda: "service adopt" in one.reason)
    # Another cluster's transaction ids, as a dump carries them.
    await db.execute("UPDATE pipeline.outbox SET xid = '9000000000'")
    await db.execute("UPDATE pipeline.outbox_cursor SET seen = '9000000009:9000000009:'")
    # Logical replication leaves the sequence behind: the next event would overtake all of them.
    await db.execute("SELECT setval('pipeline.outbox_id_seq', 1)")
    assert await ids_in(kafka, topic) == []
    await adopting.adopt(db, keep_progress=False)
    await stage(db, numbered(topic, [3]))
    async with following(kafka, topic) as tail, relaying(settings()) as one:
        await tail.until_ids(range(4))
    assert tail.ids == ["0", "1", "2", "3"]


async def test_a_cursor_ahead_of_its_own_cluster_is_refused_too(
    settings: Callable[..., Settings], db: asyncpg.Connection
) -> None:
    await db.execute("UPDATE pipeline.outbox_cursor SET seen = '9000000009:9000000009:'")
    async with relaying(settings()) as one:
        await eventually(lambda: "service adopt" in one.reason)


PUBLISHED = "CREATE PUBLICATION everything FOR ALL TABLES"
ALTERED = "ALTER PUBLICATION everything SET (publish = 'insert, delete, truncate')"


async def test_a_reset_that_fails_changes_nothing_and_says_what_to_alter(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
    bank: Bank,
    commands: Callable[..., Command],
) -> None:
    reset = commands(command_line(bank.service), "relay", "reset")
    topic = await new_topic()
    await stage(db, numbered(topic, [1]))
    await db.execute(PUBLISHED)
    before = await db.fetch("SELECT * FROM pipeline.outbox_cursor ORDER BY shard")
    refused = await reset("--yes")
    assert refused.exit_code == 1
    assert "nothing was adopted: " in complaint(refused)
    assert "ALTER PUBLICATION … SET (publish = 'insert, delete, truncate')" in complaint(refused)
    assert await db.fetch("SELECT * FROM pipeline.outbox_cursor ORDER BY shard") == before
    async with following(kafka, topic) as tail, relaying(settings()):
        await tail.until_ids([1])
    await db.execute(ALTERED)
    done = await reset("--yes")
    assert done.exit_code == 0, done.output
    async with following(kafka, topic) as tail, relaying(settings()):
        await eventually(lambda: tail.ids == ["1", "1"])


async def test_a_reset_takes_longer_than_statements_of_the_role_may(
    db: asyncpg.Connection, connect: Callable[[], Awaitable[asyncpg.Connection]]
) -> None:
    await stage(db, numbered("topic", [1]))
    holder, impatient, limit = await connect(), await connect(), 0.2
    await impatient.execute(f"SET statement_timeout = '{limit}s'")
    locked = holder.transaction()
    await locked.start()
    await holder.execute("SELECT FROM pipeline.outbox FOR UPDATE")
    async with in_background(adopting.adopt(impatient, keep_progress=False)) as resetting:

        async def is_overdue() -> bool:
            return resetting.done() or await db.fetchval(
                "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1"
                " AND wait_event_type = 'Lock'"
                " AND clock_timestamp() > query_start + 2 * make_interval(secs => $2))",
                impatient.get_server_pid(),
                limit,
            )

        await eventually(is_overdue)
        await locked.rollback()
        assert await resetting == 1


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
    await db.execute("UPDATE pipeline.outbox_cluster SET system_identifier = 1")
    await stage(db, numbered(topic, [2]))
    await adopting.adopt(db, keep_progress=True)
    async with following(kafka, topic) as tail, relaying(settings()):
        await tail.until_ids([2])
    assert tail.ids == ["1", "2"]


def test_the_tail_notices_what_is_out_of_order() -> None:
    """The property above can fail: the helper tells first appearances from repeats."""
    record = type("Record", (), {})

    def seen(id: str) -> object:
        one = record()
        one.key, one.headers = b"k", [("ce_id", id.encode())]
        return one

    tail = Tail([seen("1"), seen("3"), seen("1"), seen("2")])
    assert tail.first_ids() == {b"k": ["1", "3", "2"]}


async def test_pages_are_read_ahead_and_a_failed_read_ahead_repeats_nothing(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic, ahead = await new_topic(), list[bool]()

    class Interrupted(relay.Relay):
        """One whose connection fails now and then for what it reads in advance."""

        async def _read(
            self, driver: asyncpg.Connection, progress: Mapping[int, Progress]
        ) -> list[Page]:
            if progress is not self._cursor.progress:
                ahead.append(len(ahead) % 3 != 1)
                if not ahead[-1]:
                    raise ConnectionResetError
            return await super()._read(driver, progress)

    await stage(db, numbered(topic, range(100)))
    async with (
        following(kafka, topic) as tail,
        relaying(settings(relay_batch_events=7), Interrupted),
    ):
        await tail.until_ids(range(100))
    assert tail.ids == [str(number) for number in range(100)]
    assert set(ahead) == {True, False}


async def test_large_events_behind_small_ones_are_not_read_all_at_once(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the size of the small ones all of the large ones would fit into a page."""
    monkeypatch.setattr(relay, "PAGE_BYTES", 100_000)
    topic, pages = await new_topic(), list[int]()

    class Weighed(relay.Relay):
        """One that tells how large its pages are."""

        async def _read(
            self, driver: asyncpg.Connection, progress: Mapping[int, Progress]
        ) -> list[Page]:
            found = await super()._read(driver, progress)
            pages.append(sum(len(row["payload"]) for page in found for row in page.events))
            return found

    # Shards that are unequally far share a page.
    await db.execute(
        "UPDATE pipeline.outbox_cursor SET seen = pg_current_snapshot() WHERE shard > 9"
    )
    keys = [f"key-{number}" for number in range(20)]
    sizes = [10] * 300 + [20_000] * 60
    await stage(db, [event(topic, n, keys[n % 20], b"x" * size) for n, size in enumerate(sizes)])
    async with following(kafka, topic) as tail, relaying(settings(), Weighed):
        await tail.until_ids(range(360))
    assert tail.first_ids() == {
        key.encode(): [str(n) for n in range(360) if keys[n % 20] == key] for key in keys
    }
    assert max(pages) < 100_000 + 2 * 20_000


async def test_shards_that_change_hands_between_two_pages_lose_and_reorder_nothing(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic()
    small = settings(relay_batch_events=7, relay_lease=2)
    events = [event(topic, number, f"key-{number % 50}") for number in range(1_500)]
    async with following(kafka, topic) as tail, relaying(small):
        await stage(db, events)
        for _ in range(2):
            async with relaying(small):
                await eventually(lambda: _shares_are(db, [32, 32]))
        await tail.until_ids(range(1_500))
    first = dict.fromkeys(map(int, tail.ids))
    for key in range(50):
        of_key = [number for number in first if number % 50 == key]
        assert of_key == sorted(of_key)
