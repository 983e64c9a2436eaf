"""How events look in Kafka, and what happens to a page of which the broker takes only a part."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC
from random import Random
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from onceward.observe import metrics
from onceward.relay.batches import partition_of
from onceward.relay.cursor import LeaseExpired
from onceward.relay.publisher import Publisher
from onceward.relay.rejections import Rejections
from onceward.settings import Settings

from .kafka_wire import Wire
from .outgoing import allow, event, numbered, relaying, stage
from tests.conftest import Records
from tests.servers.topics import create_topic, following, ids_in
from tests.servers.waiting import eventually

NewTopic = Callable[..., Awaitable[str]]


async def rows(db: asyncpg.Connection) -> list[asyncpg.Record]:
    """Return the events staged so far."""
    return list(await db.fetch("SELECT * FROM pipeline.outbox ORDER BY id"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the owners of all producers that are started, in that order."""
    found: list[str] = []
    new_producer = Publisher._new_producer

    async def noted(self: Publisher, owner: str) -> AIOKafkaProducer:
        found.append(owner)
        return await new_producer(self, owner)

    monkeypatch.setattr(Publisher, "_new_producer", noted)
    return found


async def send(
    publisher: Publisher, events: Sequence[asyncpg.Record], may_send: Callable[[], bool]
) -> Rejections:
    """Send events as the relay does."""
    await publisher.look_up({event["topic"] for event in events})
    return await publisher.send(events, may_send)


@asynccontextmanager
async def publishing(settings: Settings) -> AsyncIterator[Publisher]:
    publisher = Publisher(settings, client_id="bank-relay", owner=uuid4().hex)
    try:
        yield publisher
    finally:
        await publisher.discard()


async def test_an_event_arrives_with_its_key_and_payload_and_all_its_headers(
    settings: Callable[..., Settings], db: asyncpg.Connection, new_topic: NewTopic, records: Records
) -> None:
    topic = await new_topic()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await stage(
        db,
        [
            event(
                topic,
                "e-1",
                "Zoë",
                '{"name": "Zoë"}'.encode(),
                sequence=42,
                traceparent=trace,
                tracestate="vendor=1",
                baggage="tenant=7",
            )
        ],
    )
    created = await db.fetchval("SELECT created_at FROM pipeline.outbox")
    async with relaying(settings()):
        (record,) = await records(topic, 1)
    assert record.key == "Zoë".encode()
    assert record.value == '{"name": "Zoë"}'.encode()
    assert dict(record.headers) == {
        "ce_specversion": b"1.0",
        "ce_id": b"e-1",
        "ce_source": b"/bank",
        "ce_type": b"balance.changed",
        "ce_time": created.astimezone(UTC).isoformat().encode(),
        "ce_subject": "Zoë".encode(),
        "ce_sequence": b"00000000000000000042",
        "content-type": b"application/json",
        "traceparent": trace.encode(),
        "tracestate": b"vendor=1",
        "baggage": b"tenant=7",
    }


async def test_absent_key_payload_sequence_and_trace_produce_no_headers(
    settings: Callable[..., Settings], db: asyncpg.Connection, new_topic: NewTopic, records: Records
) -> None:
    topic = await new_topic()
    await stage(db, [event(topic, "e-1", None, payload=None)])  # type: ignore[arg-type]
    async with relaying(settings()):
        (record,) = await records(topic, 1)
    assert record.key is None
    assert record.value is None
    names = {name for name, _ in record.headers}
    assert not names & {"ce_subject", "ce_sequence", "traceparent", "tracestate", "baggage"}


async def test_sequences_sort_as_text_as_they_do_as_numbers(
    settings: Callable[..., Settings], db: asyncpg.Connection, new_topic: NewTopic, records: Records
) -> None:
    topic = await new_topic()
    sequences = [9, 10, 99, 100, 2**63 - 1]
    await stage(db, [event(topic, n, sequence=n) for n in sequences])
    async with relaying(settings()):
        found = [dict(one.headers)["ce_sequence"] for one in await records(topic, 5)]
    assert found == sorted(found)
    assert [int(one) for one in found] == sequences


# Apache Kafka, clients/…/common/utils/UtilsTest.java, testMurmur2.
JAVA = {
    "21": -973932308,
    "foobar": -790332482,
    "a-little-bit-long-string": -985981536,
    "a-little-bit-longer-string": -1486304829,
    "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    "abc": 479470107,
}


@pytest.mark.parametrize("key", JAVA)
@pytest.mark.parametrize("partitions", [1, 3, 8, 50])
def test_a_key_goes_to_the_partition_that_the_java_client_chooses(
    key: str, partitions: int
) -> None:
    assert partition_of(key.encode(), 7, partitions) == (JAVA[key] & 0x7FFFFFFF) % partitions


async def test_a_key_goes_to_the_partition_that_a_plain_producer_chooses(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    new_topic: NewTopic,
    records: Records,
    producer: AIOKafkaProducer,
) -> None:
    topic = await new_topic(7)
    keys = ["", "ada", "Zoë", *(f"key-{number}" for number in range(40))]
    theirs = {
        key: (await producer.send_and_wait(topic, b"", key=key.encode())).partition for key in keys
    }
    await stage(db, [event(topic, number, key) for number, key in enumerate(keys)])
    async with relaying(settings()):
        found = await records(topic, 2 * len(keys))
    ours = {record.key.decode(): record.partition for record in found if record.headers}
    assert ours == theirs
    assert len(set(ours.values())) == 7


async def test_events_that_fill_many_batches_keep_their_order(
    settings: Callable[..., Settings], db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    topic = await new_topic()
    await stage(db, [event(topic, number, payload=b"x" * 500) for number in range(100)])
    async with publishing(settings(max_event_bytes=3_000)) as publisher:
        await send(publisher, await rows(db), lambda: True)
    assert await ids_in(kafka, topic) == [str(number) for number in range(100)]


async def test_nothing_is_sent_when_the_lease_has_ended(
    settings: Callable[..., Settings], db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    topic = await new_topic()
    await stage(db, numbered(topic, range(5)))
    async with publishing(settings()) as publisher:
        with pytest.raises(LeaseExpired):
            await send(publisher, await rows(db), lambda: False)
    assert await ids_in(kafka, topic) == []


async def test_no_further_batch_is_sent_when_the_lease_ends_between_two(
    settings: Callable[..., Settings], db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    topic = await new_topic()
    await stage(db, [event(topic, number, payload=b"x" * 2_000) for number in range(5)])
    answers: Iterator[bool] = iter([True, True, False])
    async with publishing(settings(max_event_bytes=1_000)) as publisher:
        with pytest.raises(LeaseExpired):
            await send(publisher, await rows(db), lambda: next(answers))
    assert await ids_in(kafka, topic) == ["0", "1"]


@pytest.fixture(params=[False, True], ids=["idempotent", "transactional"])
def chosen(settings: Callable[..., Settings], request: pytest.FixtureRequest) -> Settings:
    """Return settings for each way to publish; batches are small."""
    return settings(max_event_bytes=1_000, relay_transactional=request.param)


def reasons(events: list[asyncpg.Record], rejections: Rejections) -> dict[str, str]:
    """Return the reasons for which events were rejected, by their ids."""
    return {
        event["event_id"]: rejections[event["id"]].reason
        for event in events
        if event["id"] in rejections
    }


async def committed_ids(kafka: str, topic: str, count: int) -> list[str]:
    """Return the ids of all records, when there are as many as expected."""
    async with following(kafka, topic) as tail:
        await tail.until(lambda: len(tail.records) >= count)
        return tail.ids


async def test_the_events_around_one_that_the_broker_rejects_are_sent_in_order(
    chosen: Settings, db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    """Traps 6 and 7."""
    small, large = await new_topic(**{"max.message.bytes": "4000"}), await new_topic()
    for n in range(20):
        payload = b"x" * (9_000 if n in (4, 13) else 10)
        topics = (small, large)
        await stage(
            db, [event(topic, n, ["ada", "bob", "eve"][n % 3], payload) for topic in topics]
        )
    async with publishing(chosen) as publisher:
        events = await rows(db)
        rejections = await send(publisher, events, lambda: True)
        assert {event["topic"] for event in events if event["id"] in rejections} == {small}
        assert reasons(events, rejections) == {"4": "too large", "13": "too large"}
        rest = [event for event in events if event["id"] in rejections]

        async def is_sent() -> bool:
            return not await send(publisher, rest, lambda: True)

        await allow(kafka, small, 100_000)
        await eventually(is_sent)
    sent = [n for n in range(20) if n not in (4, 13)]
    assert await committed_ids(kafka, small, 20) == [str(n) for n in [*sent, 4, 13]]
    assert await committed_ids(kafka, large, 20) == [str(n) for n in range(20)]


async def test_an_erased_event_is_rejected_and_its_neighbours_are_sent(
    chosen: Settings, db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    topic = await new_topic()
    await stage(db, numbered(topic, range(3)))
    events = [dict(row) | {"erased": None} for row in await rows(db)]
    events[1] |= {"payload": None, "erased": "the key of its subject was deleted"}
    async with publishing(chosen) as publisher:
        rejections = await send(publisher, events, lambda: True)
    assert reasons(events, rejections) == {"1": "subject forgotten"}
    assert [one.text for one in rejections.values()] == [events[1]["erased"]]
    assert await committed_ids(kafka, topic, 2) == ["0", "2"]


async def test_events_that_cause_a_batch_rejection_are_found_and_neighbours_sent(
    settings: Callable[..., Settings], db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    compacted = await new_topic(**{"cleanup.policy": "compact"})
    keys = {7: None, 40: None, 41: None}
    await stage(db, [event(compacted, n, keys.get(n, f"key-{n % 5}")) for n in range(100)])
    async with publishing(settings()) as publisher:
        rejections = await send(publisher, await rows(db), lambda: True)
        assert reasons(await rows(db), rejections) == dict.fromkeys(map(str, keys), "not valid")
    assert await ids_in(kafka, compacted) == [str(n) for n in range(100) if n not in keys]


async def test_batches_that_are_larger_than_their_topic_allows_go_in_parts(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    started: list[str],
) -> None:
    topic = await new_topic(**{"max.message.bytes": "9000"})
    await stage(db, [event(topic, n, payload=b"x" * 1_000) for n in range(500)])
    async with publishing(settings()) as publisher:
        assert await send(publisher, await rows(db), lambda: True) == {}
    assert await ids_in(kafka, topic) == [str(n) for n in range(500)]
    # 128 kB, 64, 32, 16, and then it is known what need not be tried.
    assert 1 < len(started) < 8


async def test_sent_and_failed_events_are_counted_separately_with_the_error(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    new_topic: NewTopic,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: Counter[str | None] = Counter()
    monkeypatch.setattr(
        metrics,
        "published",
        lambda _, count, error=None: counted.update({error and type(error).__name__: count}),
    )
    compacted = await new_topic(**{"cleanup.policy": "compact"})
    await stage(db, [*numbered(compacted, [1]), *numbered(compacted, [2], None)])
    async with publishing(settings()) as publisher:
        rejections = await send(publisher, await rows(db), lambda: True)
        assert len(rejections) == 1
        # Both go in a batch, and then each by itself.
        assert counted == {None: 1, "InvalidRecordError": 3}
        with pytest.raises(LeaseExpired):
            await send(publisher, await rows(db), lambda: False)
        assert counted == {None: 1, "InvalidRecordError": 3}, "what was not sent is not counted"


async def test_a_topic_that_keeps_rejecting_must_wait_and_delays_no_other(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    started: list[str],
) -> None:
    compacted, other = await new_topic(**{"cleanup.policy": "compact"}), await new_topic()
    await stage(db, [*numbered(compacted, range(200), None), *numbered(other, range(200), None)])
    async with publishing(settings()) as publisher:
        rejections = await send(publisher, await rows(db), lambda: True)
    assert len(rejections) == 200
    found = Counter((one.reason, not one.waits) for one in rejections.values())
    assert set(found) == {("not valid", True), ("topic rejects many", False)}
    assert len(started) < 30
    assert len(await ids_in(kafka, other)) == 200


async def test_events_of_a_missing_topic_are_not_sent_and_others_are(
    chosen: Settings, db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    topic, missing = await new_topic(), f"{await new_topic()}-not"
    await stage(db, [*numbered(missing, range(3)), *numbered(topic, range(3))])
    async with publishing(chosen) as publisher:
        rejections = await send(publisher, await rows(db), lambda: True)
        assert reasons(await rows(db), rejections) == dict.fromkeys("012", "topic missing")
        assert await committed_ids(kafka, topic, 3) == list("012")
        # It is known as soon as it is there.
        await create_topic(kafka, missing)
        assert await send(publisher, (await rows(db))[:3], lambda: True) == {}
    assert await committed_ids(kafka, missing, 3) == list("012")


@pytest.mark.parametrize("transactional", [False, True])
async def test_a_leaderless_topic_needs_no_new_producer_and_resumes_immediately(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    started: list[str],
    transactional: bool,
) -> None:
    topic, leaderless = await new_topic(), await new_topic()
    await stage(db, [*numbered(leaderless, range(3)), *numbered(topic, range(3, 6))])
    events = await rows(db)
    async with Wire(kafka).listening() as wire:
        wire.take_leaders(leaderless)
        chosen = settings(kafka_bootstrap_servers=wire.address, relay_transactional=transactional)
        async with publishing(chosen) as publisher:
            for _ in range(2):
                rejections = await send(publisher, events, lambda: True)
                assert reasons(events, rejections) == dict.fromkeys("012", "topic refuses")
            # The client has not heard of it: it asks twice a minute.
            wire.go_on()
            assert await send(publisher, events[:3], lambda: True) == {}
    assert len(started) == 1
    assert await committed_ids(kafka, leaderless, 3) == list("012")
    assert await committed_ids(kafka, topic, 6) == list("345345")


async def test_a_producer_that_cannot_connect_leaves_nothing_open(
    settings: Callable[..., Settings], db: asyncpg.Connection, unused_tcp_port: int
) -> None:
    await stage(db, numbered("t", [1]))
    nowhere = settings(kafka_bootstrap_servers=f"127.0.0.1:{unused_tcp_port}")
    async with relaying(nowhere) as one:
        await eventually(lambda: "KafkaConnectionError" in one.reason)
        await one.stop()  # an unclosed producer would be a warning, and those are errors here


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_a_compressed_event_may_be_larger_than_one_that_was_too_large(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    codec: str,
) -> None:
    """The topic's limit is for what is sent, and how far that is compressed is seen only then."""
    topic = await new_topic(**{"max.message.bytes": "4000"})
    even = [event(topic, n, "ada", b"x" * 9_000) for n in range(4)]
    uneven = event(topic, 4, "eve", Random(4).randbytes(6_000))
    await stage(db, [*even[:2], uneven, *even[2:]])
    async with publishing(settings(relay_compression=codec)) as publisher:
        rejections = await send(publisher, await rows(db), lambda: True)
        assert reasons(await rows(db), rejections) == {"4": "too large"}
    assert await ids_in(kafka, topic) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_lost_acknowledgement_repeats_a_batch_only_without_idempotence_and_never_reorders(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: NewTopic,
    idempotent: bool,
) -> None:
    topic = await new_topic()
    await stage(db, [event(topic, n, payload=b"x" * 1_000) for n in range(300)])
    events = await rows(db)
    async with Wire(kafka).listening() as wire:
        chosen = settings(kafka_bootstrap_servers=wire.address, relay_idempotent=idempotent)
        async with publishing(chosen) as publisher:
            await send(publisher, events[:10], lambda: True)
            wire.lose_answers(after=1)
            sending = asyncio.create_task(send(publisher, events[10:], lambda: True))
            await eventually(lambda: wire.lost > 0)
            wire.cut()
            wire.go_on()
            assert await sending == {}
        found = await ids_in(kafka, topic)
    assert list(dict.fromkeys(found)) == [str(n) for n in range(300)]
    assert (len(found) > 300) is not idempotent
