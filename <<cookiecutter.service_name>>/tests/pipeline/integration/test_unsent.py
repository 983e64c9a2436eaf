"""What Kafka refuses: it waits in the outbound backlog, with its key or topic, and nothing else."""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace

import asyncpg
import pytest

from operate.dead import Selection
from pipeline.observe import logs, telemetry
from pipeline.relay import rejected, relay
from pipeline.relay.rejection import Refused
from pipeline.servers import cluster
from pipeline.settings import Settings

from .kafka_wire import Wire
from .outgoing import (
    LARGE,
    SMALL,
    all_is_written,
    allow,
    are_dead,
    died,
    discard,
    event,
    let_leases_end,
    numbered,
    redrive,
    relaying,
    stage,
    waiting,
    waits,
)
from .test_trace import SENDER, TRACE
from tests.servers.topics import create_topic, delete_topic, following
from tests.servers.waiting import eventually

NewSettings = Callable[..., Settings]
NewTopic = Callable[..., Awaitable[str]]
TRACEPARENT = f"00-{TRACE}-{SENDER}-01"


async def attempts(db: asyncpg.Connection) -> dict[str, int]:
    """Return how often each event in the outbound backlog was refused itself."""
    rows = await db.fetch("SELECT event_id, attempts FROM pipeline.outbox_unsent")
    return {row["event_id"]: row["attempts"] for row in rows}


def has_tried(db: asyncpg.Connection, id: str, times: int) -> Callable[[], Awaitable[bool]]:
    """Return the question whether an event was refused so often, for `eventually`."""

    async def ask() -> bool:
        return (await attempts(db)).get(id, 0) >= times

    return ask


@pytest.mark.parametrize("transactional", [False, True])
async def test_a_missing_topic_holds_up_nothing_but_its_own_events_until_it_exists(
    quick: NewSettings,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    missing: str,
    caplog: pytest.LogCaptureFixture,
    transactional: bool,
) -> None:
    there = await new_topic()
    keys = ["ada", "bob", None]

    async def stage_both(numbers: range) -> None:
        for n in numbers:
            await stage(db, [event(topic, n, keys[n % 3]) for topic in (missing, there)])

    chosen = quick(relay_page=7, relay_transactional=transactional)
    with caplog.at_level(logging.WARNING, "pipeline"):
        async with relaying(chosen) as one:
            async with following(kafka, there) as good:
                await stage_both(range(30))
                await good.until_ids(range(30))
                await eventually(waits(db, range(30)))
                assert one.reason == ""
                await stage_both(range(30, 40))
                await good.until_ids(range(40))
                await eventually(waits(db, range(40)))
            await create_topic(kafka, missing)
            async with following(kafka, missing) as late:
                await late.until_ids(range(40))
                await eventually(waits(db, []))
                await stage_both(range(40, 50))
                await late.until_ids(range(50))
    for tail in (good, late):
        assert tail.first_ids()[b"ada"] == [str(n) for n in range(len(tail.records)) if n % 3 == 0]
        assert tail.first_ids()[b"bob"] == [str(n) for n in range(len(tail.records)) if n % 3 == 1]
        assert max(Counter(tail.ids).values()) == 1
    (line,) = [
        record.message for record in caplog.records if record.name == "pipeline.relay.rejected"
    ]
    assert line == (
        f"relay: events wait: topic {missing} is not known to the brokers:"
        " create it, or run `service topics create`"
    )


@pytest.mark.parametrize("transactional", [False, True])
async def test_a_topic_that_is_deleted_while_the_relay_runs_is_missing_too(
    quick: NewSettings,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    caplog: pytest.LogCaptureFixture,
    transactional: bool,
) -> None:
    gone, there = await new_topic(), await new_topic()
    chosen = quick(relay_transactional=transactional)
    with caplog.at_level(logging.WARNING, "pipeline.relay.rejected"):
        async with following(kafka, there) as good, relaying(chosen) as one:
            await stage(db, [*numbered(gone, range(3)), *numbered(there, range(3))])
            await good.until_ids(range(3))
            await eventually(lambda: all_is_written(db))
            await delete_topic(kafka, gone)
            await stage(db, [*numbered(gone, range(3, 9)), *numbered(there, range(3, 9))])
            await good.until_ids(range(9))
            await eventually(waits(db, range(3, 9)))
            await eventually(lambda: one.reason == "")
            await create_topic(kafka, gone)
            async with following(kafka, gone) as late:
                await late.until_ids(range(3, 9))
            assert late.first_ids() == {b"ada": [str(n) for n in range(3, 9)]}
    assert f"topic {gone} is not known" in caplog.text


@pytest.mark.parametrize("transactional", [False, True])
async def test_behind_an_event_that_is_too_large_only_those_of_its_key_wait(
    quick: NewSettings,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    transactional: bool,
) -> None:
    """Trap 6."""
    topic = await new_topic(2, **{"max.message.bytes": "4000"})
    keys = ["ada", "bob", "eve", None]
    large = {8, 11, 20}  # of ada, of nobody, of ada

    async def stage_some(numbers: range) -> None:
        for n in numbers:
            payload = LARGE if n in large else SMALL
            await stage(db, [event(topic, n, keys[n % 4], payload)])

    held = [n for n in range(80) if (n >= 8 and n % 4 == 0) or n == 11]
    chosen = quick(relay_page=9, relay_transactional=transactional)
    async with following(kafka, topic) as tail, relaying(chosen) as one:
        await stage_some(range(40))
        await eventually(waits(db, [n for n in held if n < 40]))
        await stage_some(range(40, 80))
        await tail.until_ids(set(range(80)) - set(held))
        await eventually(waits(db, held))
        assert one.reason == ""
        assert not set(tail.ids) & {str(n) for n in held}
        await allow(kafka, topic, 100_000)
        await tail.until_ids(range(80))
        await stage_some(range(80, 90))
        await tail.until_ids(range(90))
        await eventually(waits(db, []))
    first = tail.first_ids()
    for place, key in enumerate(["ada", "bob", "eve"]):
        assert first[key.encode()] == [str(n) for n in range(place, 90, 4)]
    assert len(tail.records) == 90


async def test_a_topic_that_refuses_many_events_of_a_page_waits_as_a_whole_and_says_so(
    quick: NewSettings,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = await new_topic(**{"max.message.bytes": "4000"})
    # Each is smaller than the last one that was refused, and so has to be tried.
    large = [event(topic, n, f"key {n}", b"x" * (9_000 - 100 * n)) for n in range(30)]
    await stage(db, [*large, *numbered(topic, ["x"])])
    with caplog.at_level(logging.WARNING, "pipeline.relay.rejected"):
        async with following(kafka, topic) as tail, relaying(quick(unsent_pause=0.01)):
            # Each of the twenty that are found costs a producer of its own.
            await eventually(lambda: "x" in tail.ids, patience=120)
            await allow(kafka, topic, 100_000)
            await eventually(lambda: len(set(tail.ids)) == 31, patience=120)
    # It says nothing of events that were not refused themselves.
    line = f"relay: events wait: topic {topic} has refused 20 events of a page: too large"
    assert line in caplog.messages


async def test_the_lines_about_an_event_that_waits_and_has_died_name_it_and_are_of_its_trace(
    quick: NewSettings,
    db: asyncpg.Connection,
    new_topic: NewTopic,
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = await new_topic(**{"max.message.bytes": "4000"})
    caplog.handler.setFormatter(logs._Json())
    caplog.set_level(logging.WARNING, "pipeline.relay.rejected")
    async with relaying(quick(unsent_attempts=2)):
        large = event(topic, "the large", "a" * 200, LARGE, traceparent=TRACEPARENT)
        await stage(db, [large])
        await eventually(are_dead(db, ["the large"]))
    waiting_line, dead_line = map(json.loads, caplog.text.splitlines())
    assert waiting_line["message"].startswith(
        "relay: events wait: event the large is larger than topic"
    )
    assert dead_line["message"].startswith(
        f"relay: event the large for topic {topic} is a dead lett"
    )
    for line in waiting_line, dead_line:
        assert {name: line[name] for name in ("topic", "message_id", "message_type", "key")} == {
            "topic": topic,
            "message_id": "the large",
            "message_type": "balance.changed",
            "key": "a" * 100,
        }
        assert (line["reason"], line["trace_id"], line["span_id"]) == ("too large", TRACE, SENDER)


async def test_an_event_without_a_key_waits_for_no_other_and_is_waited_for_by_none(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    topic = await new_topic(**{"max.message.bytes": "4000"})
    async with following(kafka, topic) as tail, relaying(quick(unsent_pause=3_600)):
        await stage(db, [event(topic, 0, None, LARGE), event(topic, 1, None), event(topic, 2)])
        await tail.until_ids([1, 2])
        await eventually(waits(db, [0]))
        await stage(db, [event(topic, 3, None), event(topic, 4, ""), event(topic, 5)])
        await tail.until_ids(range(1, 6))
        assert await waiting(db) == ["0"]


async def test_a_key_that_waited_with_its_topic_waits_by_itself_when_its_own_event_is_refused(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, missing: str
) -> None:
    async with relaying(quick()):
        await stage(db, [event(missing, 0, payload=LARGE), *numbered(missing, range(1, 4))])
        await stage(db, numbered(missing, ["x", "y"], "bob"))
        await eventually(waits(db, [0, 1, 2, 3, "x", "y"]))
        await create_topic(kafka, missing, 1, **{"max.message.bytes": "4000"})
        async with following(kafka, missing) as tail:
            await tail.until_ids(["x", "y"])
            await stage(db, [*numbered(missing, [4]), *numbered(missing, ["z"], "bob")])
            await tail.until_ids(["z"])
            await eventually(waits(db, range(5)))
            await allow(kafka, missing, 100_000)
            await tail.until_ids(range(5))
    assert tail.ids == ["x", "y", "z", *"01234"]


async def test_what_waits_is_sent_in_order_by_whoever_takes_the_shards_over(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    topic = await new_topic(**{"max.message.bytes": "4000"})
    async with following(kafka, topic) as tail:
        async with relaying(quick(relay_lease=3_600)) as first:
            await stage(db, [event(topic, 0, payload=LARGE), *numbered(topic, range(1, 5))])
            await eventually(waits(db, range(5)))
            await first.kill()
        await stage(db, [*numbered(topic, range(5, 8)), event(topic, "x", "bob")])
        await let_leases_end(db)
        async with relaying(quick(relay_lease=3_600)) as second:
            await tail.until_ids(["x"])
            await eventually(waits(db, range(8)))
            await second.stop()
        await stage(db, numbered(topic, range(8, 10)))
        await allow(kafka, topic, 100_000)
        async with relaying(quick()), relaying(quick()):
            await tail.until_ids(range(10))
    assert tail.first_ids() == {b"ada": [str(n) for n in range(10)], b"bob": ["x"]}
    assert len(tail.records) == 11


async def test_a_relay_that_dies_before_it_has_noted_what_it_sent_leaves_repeats_and_no_gap(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, missing: str
) -> None:
    sent = asyncio.Event()

    class Forgetful(rejected.Unsent):
        async def settle(
            self,
            connection: asyncpg.Connection,
            rows: Sequence[asyncpg.Record],
            refused: Refused,
        ) -> None:
            if not refused:
                sent.set()
                await asyncio.Event().wait()
            await super().settle(connection, rows, refused)

    async with relaying(quick()) as one:
        one.relay._unsent = Forgetful(quick())
        await stage(db, numbered(missing, range(150)))
        await eventually(waits(db, range(150)))
        await create_topic(kafka, missing)
        await asyncio.wait_for(sent.wait(), 30)
        await one.kill()
    await let_leases_end(db)
    await stage(db, numbered(missing, range(150, 160)))
    async with following(kafka, missing) as tail, relaying(quick()):
        await tail.until_ids(range(160))
    assert tail.first_ids() == {b"ada": [str(n) for n in range(160)]}
    assert len(tail.records) > 160


async def test_what_a_relay_sets_aside_is_stored_only_while_the_shards_are_its_own(
    quick: NewSettings,
    db: asyncpg.Connection,
    connect: Callable[[], Awaitable[asyncpg.Connection]],
    missing: str,
) -> None:
    stored: list[int] = []
    another = await connect()

    class Replaced(rejected.Unsent):
        async def park(
            self,
            connection: asyncpg.Connection,
            events: Sequence[asyncpg.Record],
            refused: Refused,
        ) -> None:
            stored.append(len(events))
            await super().park(connection, events, refused)

    class ReplacedRelay(relay.Relay):
        """One whose shards are taken while it sends for the first time."""

        async def _send(
            self, driver: asyncpg.Connection, events: Sequence[asyncpg.Record]
        ) -> Refused:
            refused = await super()._send(driver, events)
            if not taken:
                taken.append(await another.execute("UPDATE pipeline.outbox_cursor SET token = 70"))
            return refused

    taken: list[str] = []
    await stage(db, numbered(missing, range(3)))
    async with relaying(quick(), ReplacedRelay) as one:
        one.relay._unsent = Replaced(quick())
        await eventually(waits(db, range(3)))
    assert stored == [3]
    assert await db.fetchval("SELECT min(token) FROM pipeline.outbox_cursor") == 71


async def test_ten_thousand_events_that_waited_for_a_topic_go_by_pages_and_not_one_by_one(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, new_topic: NewTopic, missing: str
) -> None:
    """Trap 8."""
    pages: list[int] = []

    class Counting(relay.Relay):
        """A relay that counts what it sends."""

        async def _send(
            self, driver: asyncpg.Connection, events: Sequence[asyncpg.Record]
        ) -> Refused:
            pages.append(len(events))
            return await super()._send(driver, events)

    there = await new_topic()
    await stage(db, [event(missing, n, f"key-{n % 5_000}") for n in range(10_000)])
    async with relaying(quick(relay_page=2_000), Counting):
        await eventually(lambda: all_is_written(db))
        assert len(await waiting(db)) == 10_000
        pages.clear()
        await create_topic(kafka, missing, 3)
        async with following(kafka, missing) as tail, following(kafka, there) as good:
            await tail.until(lambda: len(tail.records) > 0)
            await stage(db, [event(topic, "new", "key-7") for topic in (missing, there)])
            await good.until_ids(["new"])
            await tail.until_ids([*range(10_000), "new"])
    assert len(tail.records) == 10_001
    assert tail.first_ids()[b"key-7"] == ["7", "5007", "new"]
    tried = pages.index(2_000)  # the topic is looked for with a small page
    assert len([page for page in pages[tried:] if page > 10]) < 10


_WAIT_LARGE = """
INSERT INTO pipeline.outbox_unsent (id, created_at, topic, key, payload, event_id, source, type,
                                    content_type, queue, attempts)
SELECT n, now(), 't', key,
       convert_to(repeat('x', CASE WHEN n <= 200 THEN 10 ELSE 900000 END), 'UTF8'), n,
       '/bank', 'x', 'y', sha256(key), 1
  FROM generate_series(1, 240) AS n, LATERAL (SELECT ('key-' || n % 2)::bytea) AS of_n (key)
"""


async def test_large_events_after_small_ones_are_read_a_few_at_a_time_and_of_each_key_some(
    db: asyncpg.Connection, settings: NewSettings
) -> None:
    """A queue of which nothing is read counts as empty: later events of its key would overtake."""
    await db.execute(_WAIT_LARGE)
    one = rejected.Unsent(settings())
    shards = list(range(64))
    await one.look(db, shards)
    seen: list[int] = []
    while rows := await one.due(db, shards):
        assert {bytes(row["key"]) for row in rows} == {b"key-0", b"key-1"}
        assert sum(len(row["payload"]) for row in rows) < 11_000_000
        seen += [row["id"] for row in rows]
        await one.settle(db, rows, {})
    assert sorted(seen) == list(range(1, 241))
    for key in (0, 1):
        of_key = [id for id in seen if id % 2 == key]
        assert of_key == sorted(of_key)


@pytest.mark.parametrize("budget", [1, 3])
async def test_an_event_that_is_refused_too_often_is_a_dead_letter_and_those_behind_it_go_on(
    quick: NewSettings,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    budget: int,
) -> None:
    topic = await new_topic(**{"max.message.bytes": "4000"})
    some = [event(topic, n, payload=LARGE if n in (1, 3) else SMALL) for n in range(6)]
    await stage(db, some)
    chosen = quick(unsent_attempts=budget)
    async with following(kafka, topic) as tail, relaying(chosen):
        await tail.until_ids([0, 2, 4, 5])
        await eventually(waits(db, []))
        assert tail.ids == ["0", "2", "4", "5"]
        first, second = await died(db)
        assert (first.event_id, second.event_id) == ("1", "3")
        assert (first.key, first.size) == ({"text": "ada"}, len(LARGE))
        assert first.reason == "too large"
        assert "raise the topic's max.message.bytes" in str(first.error)
        # A person gives one up, and lets the other be tried again, in vain and then not.
        assert await discard(db, Selection(keys=[int(first.id)])) == [int(first.id)]
        assert await redrive(db, Selection(keys=[int(first.id), int(second.id)])) == [
            int(second.id)
        ]
        await eventually(lambda: _is_dead_again(db, second))
        await allow(kafka, topic, 100_000)
        await redrive(db)
        await tail.until_ids([3])
        await stage(db, numbered(topic, [6]))
        await tail.until_ids([6])
        await eventually(waits(db, []))
    assert await died(db) == []
    left = await db.fetchrow("SELECT * FROM pipeline.outbox_unsent")
    assert (left["event_id"], left["discarded_by"], left["discarded_why"]) == (
        "1",
        "zoë",
        "sent by hand",
    )


async def _is_dead_again(db: asyncpg.Connection, one: SimpleNamespace) -> bool:
    return any(again.id == one.id and again.died_at != one.died_at for again in await died(db))


async def test_events_whose_topic_is_missing_for_too_long_are_dead_letters_and_may_be_redriven(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, missing: str
) -> None:
    keys = ["ada", "bob", None]
    await stage(db, [event(missing, n, keys[n % 3]) for n in range(250)])
    async with relaying(quick(unsent_age=0.001)):
        await eventually(are_dead(db, range(250)))
    assert {one.reason for one in await died(db)} == {"topic missing"}
    await create_topic(kafka, missing)
    assert len(await redrive(db)) == 250
    async with following(kafka, missing) as tail, relaying(quick()):
        await tail.until_ids(range(250))
        await eventually(waits(db, []))
    first = tail.first_ids()
    assert first[b"ada"] == [str(n) for n in range(0, 250, 3)]
    assert first[b"bob"] == [str(n) for n in range(1, 250, 3)]


async def test_a_dead_event_that_is_redriven_joins_those_of_its_key_that_wait_with_their_topic(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, missing: str
) -> None:
    await stage(db, [*numbered(missing, range(3)), event(missing, "x", None)])
    async with relaying(quick()) as one:
        await eventually(waits(db, [0, 1, 2, "x"]))
        await one.stop()
    await db.execute(
        "UPDATE pipeline.outbox_unsent SET died_at = clock_timestamp(), attempts = 9,"
        " reason = 'too large', error = 'it was', queue = coalesce(sha256(key), '-')"
        " WHERE event_id IN ('0', 'x')"
    )
    assert len(await redrive(db)) == 2
    assert await waiting(db) == ["0", "1", "2", "x"]
    assert await db.fetch("SELECT DISTINCT queue FROM pipeline.outbox_unsent") == [(b"",)]
    assert set((await attempts(db)).values()) == {0}
    await create_topic(kafka, missing)
    async with following(kafka, missing) as tail, relaying(quick()):
        await tail.until_ids([0, 1, 2, "x"])
    assert tail.first_ids() == {b"ada": ["0", "1", "2"], None: ["x"]}
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox_unsent") == 0


async def test_an_outage_spends_no_attempt(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    """Trap 16."""
    topic = await new_topic(**{"max.message.bytes": "4000"})
    async with Wire(kafka).listening() as wire, following(kafka, topic) as tail:
        chosen = quick(kafka_bootstrap_servers=wire.address)
        async with relaying(chosen) as one:
            await stage(db, [event(topic, 0, payload=LARGE), *numbered(topic, range(1, 4))])
            await eventually(has_tried(db, "0", 2))
            wire.shut()
            await eventually(lambda: one.relay._failures > 1)
            before = await attempts(db)
            failures = one.relay._failures
            await eventually(lambda: one.relay._failures > failures + 2)
            assert await attempts(db) == before
            wire.go_on()
            await eventually(has_tried(db, "0", before["0"] + 1))
            await allow(kafka, topic, 100_000)
            await tail.until_ids(range(4))
    assert tail.first_ids() == {b"ada": list("0123")}


@pytest.mark.parametrize("transactional", [False, True])
async def test_a_topic_that_may_not_be_written_waits_by_itself(
    quick: NewSettings,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    caplog: pytest.LogCaptureFixture,
    transactional: bool,
) -> None:
    topic, there = await new_topic(), await new_topic()
    async with Wire(kafka).listening() as wire:
        wire.forbid(topic)
        chosen = quick(kafka_bootstrap_servers=wire.address, relay_transactional=transactional)
        with caplog.at_level(logging.WARNING, "pipeline.relay.rejected"):
            async with following(kafka, there) as good, relaying(chosen) as one:
                await stage(db, [*numbered(topic, range(5)), *numbered(there, range(5))])
                await good.until_ids(range(5))
                await eventually(waits(db, range(5)))
                assert one.reason == ""
                wire.go_on()
                async with following(kafka, topic) as tail:
                    await tail.until_ids(range(5))
                assert tail.first_ids() == {b"ada": list("01234")}
    assert f"topic {topic} may not be written" in caplog.text
    assert await attempts(db) == {}


async def test_events_that_come_again_after_a_reset_wait_once(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, missing: str
) -> None:
    await stage(db, numbered(missing, range(5)))
    async with relaying(quick()) as one:
        await eventually(waits(db, range(5)))
        await one.stop()
    await cluster.reset(db, keep_progress=False)
    async with relaying(quick()):
        await eventually(lambda: all_is_written(db))
        assert await waiting(db) == list("01234")
        await create_topic(kafka, missing)
        async with following(kafka, missing) as tail:
            await tail.until_ids(range(5))
    assert tail.ids == list("01234")


async def test_it_is_told_how_many_events_wait_and_how_many_are_dead(
    quick: NewSettings,
    db: asyncpg.Connection,
    new_topic: NewTopic,
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(
        telemetry, "observe_unsent", lambda waiting, dead: told.append((waiting, dead))
    )
    topic = await new_topic(**{"max.message.bytes": "4000"})
    await stage(db, [event(topic, "x", payload=LARGE), *numbered(missing, range(3))])
    async with relaying(quick(unsent_attempts=1)):
        await eventually(lambda: (3, 1) in told)
