"""What Kafka rejects: an event is dead by itself, or waits with its topic; no other does."""

import asyncio
import json
import logging
import math
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import NewTopic as Topic
from servers.network import LOOPBACK

from onceward.apply.throttles import Throttles
from onceward.cli.dead import Selection
from onceward.observe import logs, metrics
from onceward.observe.health import Health
from onceward.operators import adopting
from onceward.relay import brokers, publisher, relay
from onceward.relay.rejected import Rejected
from onceward.relay.rejections import Rejections
from onceward.settings import Settings

from .clusters import private_broker
from .kafka_wire import Wire
from .outgoing import (
    LARGE,
    SMALL,
    Running,
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
from tests.servers.topics import administrator, create_topic, delete_topic, following
from tests.servers.waiting import PATIENCE, eventually

NewSettings = Callable[..., Settings]
NewTopic = Callable[..., Awaitable[str]]
TRACEPARENT = f"00-{TRACE}-{SENDER}-01"


def rejected_by(topic: str, one: Running) -> str | None:
    """Return what the relay's readiness says of a topic."""
    return one.health.reasons.get(f"relay to {topic}")


@pytest.mark.parametrize("transactional", [False, True])
async def test_a_missing_topic_delays_only_its_own_events_until_it_exists(
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

    chosen = quick(relay_batch_events=7, relay_transactional=transactional)
    with caplog.at_level(logging.WARNING, "onceward"):
        async with relaying(chosen) as one:
            async with following(kafka, there) as good:
                await stage_both(range(30))
                await good.until_ids(range(30))
                await eventually(waits(db, range(30)))
                assert one.reason == ""
                assert str(rejected_by(missing, one)).startswith("events wait: topic")
                await stage_both(range(30, 40))
                await good.until_ids(range(40))
                await eventually(waits(db, range(40)))
            await create_topic(kafka, missing)
            async with following(kafka, missing) as late:
                await late.until_ids(range(40))
                await eventually(waits(db, []))
                await eventually(lambda: rejected_by(missing, one) is None)
                await stage_both(range(40, 50))
                await late.until_ids(range(50))
    for tail in (good, late):
        assert tail.first_ids()[b"ada"] == [str(n) for n in range(len(tail.records)) if n % 3 == 0]
        assert tail.first_ids()[b"bob"] == [str(n) for n in range(len(tail.records)) if n % 3 == 1]
        assert max(Counter(tail.ids).values()) == 1
    (line,) = [
        record.message for record in caplog.records if record.name == "onceward.relay.rejected"
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
    with caplog.at_level(logging.WARNING, "onceward.relay.rejected"):
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
async def test_an_oversized_event_is_dead_and_all_others_continue_in_order(
    quick: NewSettings,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    transactional: bool,
) -> None:
    """Trap 6."""
    topic = await new_topic(2, **{"max.message.bytes": "4000"})
    keys = ["ada", "bob", "eve", None]
    large = {8, 11, 20}  # of ada, of none, of ada

    async def stage_some(numbers: range) -> None:
        for n in numbers:
            payload = LARGE if n in large else SMALL
            await stage(db, [event(topic, n, keys[n % 4], payload)])

    chosen = quick(relay_batch_events=9, relay_transactional=transactional)
    async with following(kafka, topic) as tail, relaying(chosen) as one:
        await stage_some(range(80))
        await tail.until_ids(set(range(80)) - large)
        await eventually(are_dead(db, sorted(large)))
        assert one.health.is_ready
        await allow(kafka, topic, 100_000)
        assert len(await redrive(db)) == 3
        await tail.until_ids(range(80))
        await stage_some(range(80, 90))
        await tail.until_ids(range(90))
        await eventually(waits(db, []))
    first = tail.first_ids()
    for place, key in enumerate(["ada", "bob", "eve"]):
        ids = [int(id) for id in first[key.encode()] if int(id) not in large]
        assert ids == [n for n in range(place, 90, 4) if n not in large]
    ada = first[b"ada"]
    assert ada.index("8") < ada.index("20"), "what is redriven goes in its order"
    assert len(tail.records) == 90


async def test_a_topic_rejecting_much_of_a_page_waits_and_is_logged(
    quick: NewSettings,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = await new_topic(**{"max.message.bytes": "4000"})
    # Each is smaller than the last one that was rejected, and so has to be tried.
    large = [event(topic, n, f"key {n}", b"x" * (9_000 - 100 * n)) for n in range(30)]
    await stage(db, [*large, *numbered(topic, ["x"])])
    with caplog.at_level(logging.WARNING, "onceward.relay.rejected"):
        async with following(kafka, topic) as tail, relaying(quick(relay_topic_pause=0.01)):
            # Each of the twenty that are found costs a producer of its own.
            await eventually(lambda: "x" in tail.ids)
            await eventually(are_dead(db, range(30)))
            await allow(kafka, topic, 100_000)
            await redrive(db)
            await eventually(lambda: len(set(tail.ids)) == 31)
    assert (
        f"relay: events wait: topic {topic} has rejected 20 batches of a page:"
        " see `service dead events list`"
    ) in caplog.messages


async def test_a_dead_events_log_line_names_it_and_its_trace(
    quick: NewSettings,
    db: asyncpg.Connection,
    new_topic: NewTopic,
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = await new_topic(**{"max.message.bytes": "4000"})
    caplog.handler.setFormatter(logs.JsonLines())
    caplog.set_level(logging.WARNING, "onceward.relay.rejected")
    async with relaying(quick()):
        large = event(topic, "the large", "a" * 200, LARGE, traceparent=TRACEPARENT)
        await stage(db, [large])
        await eventually(are_dead(db, ["the large"]))
    (line,) = map(json.loads, caplog.text.splitlines())
    assert line["message"].startswith(f"relay: event the large for topic {topic} is a dead letter")
    assert {name: line[name] for name in ("topic", "message_id", "message_type", "key")} == {
        "topic": topic,
        "message_id": "the large",
        "message_type": "balance.changed",
        "key": "a" * 200,
    }
    assert (line["reason"], line["trace_id"], line["span_id"]) == ("too large", TRACE, SENDER)


async def test_an_internal_topic_of_the_brokers_makes_only_its_events_dead(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    topic = await new_topic()
    # The brokers make theirs when a group is used for the first time.
    async with AIOKafkaConsumer(topic, group_id=topic, bootstrap_servers=kafka) as consumer:
        await consumer.position(TopicPartition(topic, 0))
    async with following(kafka, topic) as tail, relaying(quick()) as one:
        await stage(db, [*numbered("__consumer_offsets", range(3)), *numbered(topic, range(3, 6))])
        await tail.until_ids(range(3, 6))
        await eventually(are_dead(db, range(3)))
        await eventually(lambda: one.health.is_ready)
    assert {dead.reason for dead in await died(db)} == {"topic not writable"}


async def test_an_event_that_waited_for_its_topic_dies_when_rejected_itself(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, missing: str
) -> None:
    async with relaying(quick()):
        await stage(db, [event(missing, 0, payload=LARGE), *numbered(missing, range(1, 4))])
        await stage(db, numbered(missing, ["x", "y"], "bob"))
        await eventually(waits(db, [0, 1, 2, 3, "x", "y"]))
        await create_topic(kafka, missing, 1, **{"max.message.bytes": "4000"})
        async with following(kafka, missing) as tail:
            await tail.until_ids([1, 2, 3, "x", "y"])
            await eventually(are_dead(db, [0]))
            await stage(db, [*numbered(missing, [4]), *numbered(missing, ["z"], "bob")])
            await tail.until_ids([4, "z"])
    assert tail.ids == ["1", "2", "3", "x", "y", "4", "z"]


async def test_waiting_events_are_sent_in_order_by_the_relay_taking_over(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, missing: str
) -> None:
    async with relaying(quick(relay_lease=3_600)) as first:
        await stage(db, numbered(missing, range(5)))
        await eventually(waits(db, range(5)))
        await first.kill()
    await stage(db, [*numbered(missing, range(5, 8)), event(missing, "x", "bob")])
    await let_leases_end(db)
    async with relaying(quick(relay_lease=3_600)) as second:
        await eventually(waits(db, [*range(8), "x"]))
        await second.stop()
    await stage(db, numbered(missing, range(8, 10)))
    await create_topic(kafka, missing)
    async with following(kafka, missing) as tail, relaying(quick()), relaying(quick()):
        await tail.until_ids([*range(10), "x"])
    assert tail.first_ids() == {b"ada": [str(n) for n in range(10)], b"bob": ["x"]}
    assert len(tail.records) == 11


async def test_a_relay_dying_before_recording_sent_events_causes_repeats_without_gaps(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, missing: str
) -> None:
    sent = asyncio.Event()

    class Forgetful(Rejected):
        async def settle(
            self,
            connection: asyncpg.Connection,
            events: Sequence[asyncpg.Record],
            why: Rejections,
        ) -> None:
            if not why:
                sent.set()
                await asyncio.Event().wait()
            await super().settle(connection, events, why)

    async with relaying(quick()) as one:
        one.relay._rejected = Forgetful(quick(), one.health)
        await stage(db, numbered(missing, range(150)))
        await eventually(waits(db, range(150)))
        await create_topic(kafka, missing)
        await asyncio.wait_for(sent.wait(), PATIENCE)
        await one.kill()
    await let_leases_end(db)
    await stage(db, numbered(missing, range(150, 160)))
    async with following(kafka, missing) as tail, relaying(quick()):
        await tail.until_ids(range(160))
    assert tail.first_ids() == {b"ada": [str(n) for n in range(160)]}
    assert len(tail.records) > 160


async def test_what_kafka_rejects_is_stored_only_while_the_shards_are_its_own(
    quick: NewSettings,
    db: asyncpg.Connection,
    connect: Callable[[], Awaitable[asyncpg.Connection]],
    missing: str,
) -> None:
    stored: list[int] = []
    another = await connect()

    class Replaced(Rejected):
        async def add(
            self,
            connection: asyncpg.Connection,
            events: Sequence[asyncpg.Record],
            why: Rejections,
        ) -> None:
            stored.append(len(events))
            await super().add(connection, events, why)

    class ReplacedRelay(relay.Relay):
        """One whose shards are taken while it sends for the first time."""

        async def _send(
            self, driver: asyncpg.Connection, events: Sequence[asyncpg.Record]
        ) -> Rejections:
            rejections = await super()._send(driver, events)
            if not taken:
                taken.append(await another.execute("UPDATE pipeline.outbox_cursor SET token = 70"))
            return rejections

    taken: list[str] = []
    await stage(db, numbered(missing, range(3)))
    async with relaying(quick(), ReplacedRelay) as one:
        one.relay._rejected = Replaced(quick(), one.health)
        await eventually(waits(db, range(3)))
    assert stored == [3]
    assert await db.fetchval("SELECT min(token) FROM pipeline.outbox_cursor") == 71


async def test_events_that_waited_for_a_topic_are_sent_in_pages(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, new_topic: NewTopic, missing: str
) -> None:
    """Trap 8."""
    pages: list[int] = []

    class Counting(relay.Relay):
        """A relay that counts what it sends."""

        async def _send(
            self, driver: asyncpg.Connection, events: Sequence[asyncpg.Record]
        ) -> Rejections:
            pages.append(len(events))
            return await super()._send(driver, events)

    there = await new_topic()
    await stage(db, [event(missing, n, f"key-{n % 5_000}") for n in range(10_000)])
    async with relaying(quick(relay_batch_events=2_000), Counting):
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
INSERT INTO pipeline.outbox_rejected (id, created_at, topic, key, payload, event_id, source, type,
                                      content_type)
SELECT n, now(), 't', key,
       convert_to(repeat('x', CASE WHEN n <= 200 THEN 10 ELSE 900000 END), 'UTF8'), n,
       '/bank', 'x', 'y'
  FROM generate_series(1, 240) AS n, LATERAL (SELECT ('key-' || n % 2)::bytea) AS of_n (key)
"""


async def test_large_events_after_small_ones_are_read_a_few_at_a_time(
    db: asyncpg.Connection, settings: NewSettings
) -> None:
    await db.execute(_WAIT_LARGE)
    one = Rejected(settings(), Health(stall_after=3_600))
    shards = list(range(64))
    await one.look(db, shards)
    seen: list[int] = []
    accepting = False
    while topic := one.next_topic(accepting=accepting):
        rows = await one.due(db, topic, shards)
        if not rows:
            break
        accepting = True
        assert sum(len(row["payload"]) for row in rows) < 11_000_000
        seen += [row["id"] for row in rows]
        await one.settle(db, rows, {})
    assert sorted(seen) == list(range(1, 241))
    for remainder in (0, 1):
        of_key = [id for id in seen if id % 2 == remainder]
        assert of_key == sorted(of_key)


async def test_a_dead_event_is_discarded_or_redriven_in_vain_and_then_published(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    topic = await new_topic(**{"max.message.bytes": "4000"})
    some = [event(topic, n, payload=LARGE if n in (1, 3) else SMALL) for n in range(6)]
    await stage(db, some)
    async with following(kafka, topic) as tail, relaying(quick()):
        await tail.until_ids([0, 2, 4, 5])
        await eventually(are_dead(db, [1, 3]))
        first, second = await died(db)
        assert (first.key, first.size) == ({"text": "ada"}, len(LARGE))
        assert first.reason == "too large"
        assert "raise the topic's max.message.bytes" in str(first.error)
        ids = [int(first.id), int(second.id)]
        assert await discard(db, Selection(keys=ids[:1])) == ids[:1]
        assert await redrive(db, Selection(keys=ids)) == ids[1:]

        async def is_dead_again() -> bool:
            return any(again.died_at != second.died_at for again in await died(db))

        await eventually(is_dead_again)
        await allow(kafka, topic, 100_000)
        await redrive(db)
        await tail.until_ids([3])
        await stage(db, numbered(topic, [6]))
        await tail.until_ids([6])
        await eventually(waits(db, []))
    assert tail.ids == ["0", "2", "4", "5", "3", "6"]
    assert await died(db) == []
    left = await db.fetchrow("SELECT * FROM pipeline.outbox_rejected")
    assert (left["event_id"], left["discarded_by"], left["discarded_why"]) == (
        "1",
        "zoë",
        "sent by hand",
    )


async def test_events_that_wait_for_a_topic_that_will_never_be_are_discarded(
    quick: NewSettings, db: asyncpg.Connection, missing: str
) -> None:
    async with relaying(quick()) as one:
        await stage(db, numbered(missing, range(5)))
        await eventually(waits(db, range(5)))
        assert len(await discard(db, state="waiting")) == 5
        await eventually(lambda: rejected_by(missing, one) is None)
        await stage(db, numbered(missing, [5]))
        await eventually(waits(db, [5]))
    assert await died(db) == []


async def test_a_redriven_dead_event_precedes_later_ones_waiting_for_its_topic(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, missing: str
) -> None:
    await stage(db, [*numbered(missing, range(3)), event(missing, "x", None)])
    async with relaying(quick()) as one:
        await eventually(waits(db, [0, 1, 2, "x"]))
        await one.stop()
    await db.execute(
        "UPDATE pipeline.outbox_rejected SET died_at = clock_timestamp(), reason = 'too large'"
        " WHERE event_id IN ('0', 'x')"
    )
    assert len(await redrive(db)) == 2
    assert await waiting(db) == ["0", "1", "2", "x"]
    await create_topic(kafka, missing)
    async with following(kafka, missing) as tail, relaying(quick()):
        await tail.until_ids([0, 1, 2, "x"])
    assert tail.first_ids() == {b"ada": ["0", "1", "2"], None: ["x"]}
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox_rejected") == 0


async def test_an_outage_lets_no_event_die(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, missing: str, new_topic: NewTopic
) -> None:
    """Trap 16."""
    topic = await new_topic()
    async with (
        Wire(kafka).listening() as wire,
        relaying(quick(kafka_bootstrap_servers=wire.address)) as one,
    ):
        await stage(db, numbered(missing, range(4)))
        await eventually(waits(db, range(4)))
        wire.shut()
        await stage(db, numbered(topic, range(4)))
        await eventually(lambda: one.relay._failures > 3)
        assert await waiting(db) == list("0123")
        await create_topic(kafka, missing)
        wire.go_on()
        async with following(kafka, topic) as tail, following(kafka, missing) as late:
            await tail.until_ids(range(4))
            await late.until_ids(range(4))
    assert tail.first_ids() == late.first_ids() == {b"ada": list("0123")}
    assert await died(db) == []


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
        with caplog.at_level(logging.WARNING, "onceward.relay.rejected"):
            async with following(kafka, there) as good, relaying(chosen) as one:
                await stage(db, [*numbered(topic, range(5)), *numbered(there, range(5))])
                await good.until_ids(range(5))
                await eventually(waits(db, range(5)))
                await eventually(lambda: one.reason == "")
                wire.go_on()
                async with following(kafka, topic) as tail:
                    await tail.until_ids(range(5))
                assert tail.first_ids() == {b"ada": list("01234")}
    assert f"topic {topic} may not be written" in caplog.text
    assert await waiting(db) == []


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the relay wait for an acknowledgement for a second."""
    monkeypatch.setattr(brokers, "_ACKNOWLEDGED_WITHIN", 1.0)


@pytest.mark.parametrize("code", [5, 7, 19])
async def test_a_batch_temporarily_refused_by_brokers_is_repeated_without_events_waiting(
    quick: NewSettings,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    """As when a leader moves, or the broker restarts that coordinates a transaction."""
    monkeypatch.setattr(brokers, "_ACKNOWLEDGED_WITHIN", math.inf)
    topic = await new_topic()
    async with Wire(kafka).listening() as wire:
        wire.refuse_records(topic, code)
        chosen = quick(kafka_bootstrap_servers=wire.address, relay_transactional=code == 19)
        async with following(kafka, topic) as tail, relaying(chosen) as one:
            await stage(db, numbered(topic, range(5)))
            await eventually(lambda: "wait" in str(one.health.reasons))
            wire.go_on()
            await tail.until_ids(range(5))
            await eventually(lambda: one.health.is_ready)
    assert tail.ids == list("01234")
    assert "events wait" not in caplog.text


REFUSALS: dict[str, Callable[[Wire, str], None]] = {
    "UNKNOWN": partial(Wire.refuse_records, code=-1),
    "CORRUPT_MESSAGE": partial(Wire.refuse_records, code=2),
    "UNKNOWN_TOPIC_OR_PARTITION": partial(Wire.refuse_records, code=3),
    "LEADER_NOT_AVAILABLE": Wire.take_leaders,
    "REQUEST_TIMED_OUT": partial(Wire.refuse_records, code=7),
    "NOT_ENOUGH_REPLICAS": partial(Wire.refuse_records, code=19),
    "CLUSTER_AUTHORIZATION_FAILED": partial(Wire.refuse_records, code=31),
    "INVALID_TIMESTAMP": partial(Wire.refuse_records, code=32),
    "OUT_OF_ORDER_SEQUENCE_NUMBER": partial(Wire.refuse_records, code=45),
    "INVALID_PRODUCER_EPOCH": partial(Wire.refuse_records, code=47),
    "INVALID_PRODUCER_ID_MAPPING": partial(Wire.refuse_records, code=49),
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": partial(Wire.refuse_records, code=53),
    "KAFKA_STORAGE_ERROR": partial(Wire.refuse_records, code=56),
}
"""Errors of the brokers that have no reason of their own, and what lets a topic have them."""
TOLD = {
    "UNKNOWN_TOPIC_OR_PARTITION": "no acknowledgement",
    "REQUEST_TIMED_OUT": "no acknowledgement",
    "NOT_ENOUGH_REPLICAS": "no acknowledgement",
    "KAFKA_STORAGE_ERROR": "no acknowledgement",
    "INVALID_PRODUCER_EPOCH": "newer producer",
}
"""What the relay tells of errors whose name it does not learn."""


@pytest.mark.parametrize("error", REFUSALS)
@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.usefixtures("impatient")
async def test_a_topic_whose_events_the_brokers_refuse_waits_by_itself(
    quick: NewSettings,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    error: str,
    transactional: bool,
) -> None:
    topic, there = await new_topic(), await new_topic()

    async def stage_both(numbers: range) -> None:
        for n in numbers:
            await stage(db, [event(name, n) for name in (topic, there)])

    await stage_both(range(160))
    async with Wire(kafka).listening() as wire:
        REFUSALS[error](wire, topic)
        chosen = quick(
            kafka_bootstrap_servers=wire.address,
            relay_batch_events=20,
            relay_transactional=transactional,
        )
        async with following(kafka, there) as good, relaying(chosen) as one:
            await good.until_ids(range(160))
            await eventually(waits(db, range(160)))
            assert TOLD.get(error, error) in str(rejected_by(topic, one))
            await stage_both(range(160, 170))
            await good.until_ids(range(170))
            await eventually(lambda: one.reason == "")
            wire.go_on()
            async with following(kafka, topic) as late:
                await late.until_ids(range(170))
                await eventually(waits(db, []))
                await eventually(lambda: rejected_by(topic, one) is None)
    assert good.first_ids() == late.first_ids() == {b"ada": [str(n) for n in range(170)]}
    assert len(good.records) == 170


@pytest.mark.parametrize("transactional", [False, True])
async def test_retrying_a_topic_does_not_delay_others_however_long_it_takes(
    quick: NewSettings,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    monkeypatch: pytest.MonkeyPatch,
    transactional: bool,
) -> None:
    topic, there = await new_topic(), await new_topic()
    tried = asyncio.Event()

    class Trial(publisher.Publisher):
        """Sends without a limit what was refused."""

        async def send(self, *args: Any) -> Rejections:
            monkeypatch.setattr(brokers, "_ACKNOWLEDGED_WITHIN", math.inf)
            tried.set()
            return await super().send(*args)

    class PatientRelay(relay.Relay):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._trials.__class__ = Trial

    monkeypatch.setattr(brokers, "_ACKNOWLEDGED_WITHIN", 1.0)
    async with Wire(kafka).listening() as wire:
        wire.refuse_records(topic, 20)
        chosen = quick(kafka_bootstrap_servers=wire.address, relay_transactional=transactional)
        async with following(kafka, there) as good, relaying(chosen, PatientRelay):
            await stage(db, numbered(topic, range(5)))
            await asyncio.wait_for(tried.wait(), PATIENCE)
            for start in range(0, 50, 10):
                await stage(db, numbered(there, range(start, start + 10)))
                await good.until_ids(range(start + 10))
            wire.go_on()
            async with following(kafka, topic) as late:
                await late.until_ids(range(5))
                await eventually(waits(db, []))
    assert len(good.records) == 50


@pytest.mark.full
@pytest.mark.parametrize("transactional", [False, True])
async def test_topics_that_lack_a_leader_or_replicas_wait_by_themselves(
    quick: NewSettings, db: asyncpg.Connection, transactional: bool
) -> None:
    name = f"test-{uuid4().hex[:12]}"
    there, leaderless, lacking = topics = [f"{name}-{n}" for n in range(3)]
    with ExitStack() as brokers:
        first = brokers.enter_context(private_broker())
        kafka = f"{LOOPBACK}:{first.port}"
        # The topic of transactions is made now, and stays with the first broker.
        async with AIOKafkaProducer(bootstrap_servers=kafka, transactional_id=name):
            second = brokers.enter_context(private_broker(first))
        async with administrator(kafka) as admin:

            async def have_leaders() -> bool:
                found = await admin.describe_topics(topics)
                leaders = [one["leader"] for topic in found for one in topic["partitions"]]
                return sorted(leaders) == [1, 1, 2]

            needs_both = {"min.insync.replicas": "2"}
            await admin.create_topics(
                [
                    Topic(there, -1, -1, {0: [1]}),
                    Topic(leaderless, -1, -1, {0: [2]}),
                    Topic(lacking, -1, -1, {0: [1, 2]}, needs_both),
                ]
            )
            await eventually(have_leaders)
        await asyncio.to_thread(second.send, signal.SIGKILL)
        await asyncio.to_thread(second.stop)
        for n in range(160):
            await stage(db, [event(topic, n) for topic in topics])
        chosen = quick(
            kafka_bootstrap_servers=kafka,
            relay_batch_events=60,
            relay_transactional=transactional,
        )
        async with following(kafka, there) as good, relaying(chosen) as one:
            await good.until_ids(range(160))
            await eventually(waits(db, [n for n in range(160) for _ in (leaderless, lacking)]))
            assert "LEADER_NOT_AVAILABLE" in str(rejected_by(leaderless, one))
            assert "no acknowledgement" in str(rejected_by(lacking, one))
            await asyncio.to_thread(second.start)
            await asyncio.to_thread(second.wait_until_serving)
            async with following(kafka, leaderless) as late, following(kafka, lacking) as later:
                await late.until_ids(range(160))
                await later.until_ids(range(160))
                await eventually(waits(db, []))
    in_order = {b"ada": [str(n) for n in range(160)]}
    assert good.first_ids() == late.first_ids() == later.first_ids() == in_order
    assert len(good.records) == 160


async def test_a_topic_that_refuses_the_times_of_events_waits_by_itself(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    """The broker itself refuses what is a millisecond old when it arrives, which is nearly all."""
    topic, there = await new_topic(**{"message.timestamp.before.max.ms": "0"}), await new_topic()
    count = 0
    async with following(kafka, there) as good, relaying(quick()) as one:
        while (reason := rejected_by(topic, one)) is None:
            await stage(db, [event(name, count) for name in (topic, there)])
            count += 1
            await good.until_ids(range(count))
        assert "INVALID_TIMESTAMP" in reason
        await stage(db, [event(name, n) for n in range(count, 200) for name in (topic, there)])
        await good.until_ids(range(200))
        await allow(kafka, topic, 1_000_000)  # which sets all its other settings back
        async with following(kafka, topic) as late:
            await late.until_ids(range(200))
            await eventually(waits(db, []))
    assert good.first_ids() == late.first_ids() == {b"ada": [str(n) for n in range(200)]}
    assert len(good.records) == 200


async def test_events_that_come_again_after_a_reset_wait_once(
    quick: NewSettings, db: asyncpg.Connection, kafka: str, missing: str
) -> None:
    await stage(db, numbered(missing, range(5)))
    async with relaying(quick()) as one:
        await eventually(waits(db, range(5)))
        await one.stop()
    await adopting.adopt(db, keep_progress=False)
    async with relaying(quick()):
        await eventually(lambda: all_is_written(db))
        assert await waiting(db) == list("01234")
        await create_topic(kafka, missing)
        async with following(kafka, missing) as tail:
            await tail.until_ids(range(5))
    assert tail.ids == list("01234")


async def test_metrics_count_the_events_that_wait_and_the_dead_ones(
    quick: NewSettings,
    db: asyncpg.Connection,
    new_topic: NewTopic,
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[tuple[int, int]] = []
    monkeypatch.setattr(
        metrics, "observe_rejected", lambda waiting, dead, paused: counted.append((waiting, dead))
    )
    topic = await new_topic(**{"max.message.bytes": "4000"})
    await stage(db, [event(topic, "x", payload=LARGE), *numbered(missing, range(3))])
    async with relaying(quick()):
        await eventually(lambda: (3, 1) in counted)


async def test_a_throttled_topic_that_rejects_its_events_is_one_that_rejects(
    quick: NewSettings, db: asyncpg.Connection, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Throttled(relay.Relay):
        """A relay that knows of the throttle."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            throttles = Throttles()
            throttles._rates = {("events", missing): 1_000.0}
            super().__init__(*arguments, **named | {"throttles": throttles})

    counted: list[dict[str, int]] = []
    monkeypatch.setattr(metrics, "observe_rejected", lambda **numbers: counted.append(numbers))
    await stage(db, numbered(missing, range(3)))
    async with relaying(quick(), Throttled) as one:
        await eventually(lambda: {"waiting": 3, "dead": 0, "paused": 0} in counted)
        assert str(rejected_by(missing, one)).startswith("events wait: topic")


async def test_two_relays_of_a_process_use_an_allowance_only_once(
    quick: NewSettings, db: asyncpg.Connection, missing: str
) -> None:
    await stage(db, numbered(missing, range(3)))
    async with relaying(quick()) as one:
        await eventually(waits(db, range(3)))
        await one.stop()
    throttles, taken = Throttles(), list[int]()
    throttles._rates = {("events", missing): 0.01}
    for _ in range(2):
        each = Rejected(quick(), Health(stall_after=3_600), throttles)
        await each.look(db, list(range(64)))
        if topic := each.next_topic(accepting=False):
            taken.append(len(await each.due(db, topic, list(range(64)))))
    assert taken == [1]
    assert throttles.left("events", missing) > 0


async def test_events_of_a_topic_paused_during_its_look_up_wait(
    quick: NewSettings,
    db: asyncpg.Connection,
    new_topic: NewTopic,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the relay knows of the pause before it sends."""
    topic, there = await new_topic(), await new_topic()
    throttles = Throttles()
    look_up = brokers.look_up_topics

    async def slow(producer: AIOKafkaProducer, topics: Collection[str]) -> None:
        await look_up(producer, topics)
        throttles._rates = {("events", topic): 0.0}

    monkeypatch.setattr(publisher, "look_up_topics", slow)

    class Pausing(relay.Relay):
        """A relay that learns of the pause while it looks topics up."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named | {"throttles": throttles})

    await stage(db, [*numbered(topic, range(3)), *numbered(there, range(3, 6))])
    async with relaying(quick(), Pausing):
        await eventually(waits(db, range(3)))
        await eventually(lambda: all_is_written(db))
    assert await waiting(db) == list("012")
