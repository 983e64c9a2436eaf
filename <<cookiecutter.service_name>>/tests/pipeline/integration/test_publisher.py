"""How events look in Kafka, and what happens to a page of which the broker takes only a part."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from pipeline.publisher import LeaseExpired, NotSent, Publisher, partition_of
from pipeline.settings import Settings

from .conftest import Records, eventually
from .outgoing import event, following, ids_in, numbered, relaying, stage

NewTopic = Callable[..., Awaitable[str]]


async def rows(db: asyncpg.Connection) -> list[asyncpg.Record]:
    """Return the events staged so far."""
    return list(await db.fetch("SELECT * FROM pipeline.outbox ORDER BY id"))


@asynccontextmanager
async def publishing(settings: Settings) -> AsyncIterator[Publisher]:
    publisher = Publisher(settings, client_id="bank-relay", owner="me")
    try:
        yield publisher
    finally:
        await publisher.discard()


async def allow(kafka: str, topic: str, size: int) -> None:
    """Let the topic take larger records from now on."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        changed = ConfigResource(ConfigResourceType.TOPIC, topic, {"max.message.bytes": str(size)})
        await admin.alter_configs([changed])
    finally:
        await admin.close()


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


async def test_an_event_without_key_payload_sequence_and_trace_has_no_headers_for_them(
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
        await publisher.send(await rows(db), lambda: True)
    assert await ids_in(kafka, topic) == [str(number) for number in range(100)]


async def test_nothing_is_sent_when_the_lease_has_ended(
    settings: Callable[..., Settings], db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    topic = await new_topic()
    await stage(db, numbered(topic, range(5)))
    async with publishing(settings()) as publisher:
        with pytest.raises(LeaseExpired):
            await publisher.send(await rows(db), lambda: False)
    assert await ids_in(kafka, topic) == []


async def test_no_further_batch_is_sent_when_the_lease_ends_between_two(
    settings: Callable[..., Settings], db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    topic = await new_topic()
    await stage(db, [event(topic, number, payload=b"x" * 2_000) for number in range(5)])
    answers: Iterator[bool] = iter([True, True, False])
    async with publishing(settings(max_event_bytes=1_000)) as publisher:
        with pytest.raises(LeaseExpired):
            await publisher.send(await rows(db), lambda: next(answers))
    assert await ids_in(kafka, topic) == ["0", "1"]


async def test_behind_an_event_that_the_broker_refuses_nothing_of_its_partition_is_sent(
    settings: Callable[..., Settings], db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    """Trap 6."""
    small, large = await new_topic(**{"max.message.bytes": "4000"}), await new_topic()
    sizes = [10, 10, 9_000, 10, 10]
    for number, size in enumerate(sizes):
        await stage(db, [event(topic, number, payload=b"x" * size) for topic in (small, large)])
    async with publishing(settings(max_event_bytes=1_000)) as publisher:
        with pytest.raises(NotSent, match="MessageSizeTooLarge"):
            await publisher.send(await rows(db), lambda: True)
        assert await ids_in(kafka, small) == ["0", "1"]
        # The same publisher goes on with a new producer, and all is sent again.
        await allow(kafka, small, 100_000)
        await publisher.send(await rows(db), lambda: True)
    assert await ids_in(kafka, small) == ["0", "1", *"01234"]
    assert await ids_in(kafka, large) == [*"01234", *"01234"]


async def test_a_relay_stands_still_before_an_event_that_the_broker_refuses_and_says_so(
    settings: Callable[..., Settings], db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    """Traps 6 and 7."""
    topic = await new_topic(**{"max.message.bytes": "4000"})
    keys = ["ada", "bob", "eve"]
    sizes = [10] * 5 + [9_000] + [10] * 20
    await stage(
        db, [event(topic, n, keys[n % 3], payload=b"x" * size) for n, size in enumerate(sizes)]
    )
    chosen = settings(relay_page=4, max_event_bytes=1_000, relay_lease=1)
    async with following(kafka, topic) as tail, relaying(chosen) as one:
        await eventually(lambda: "MessageSizeTooLarge" in one.reason)
        tries = tail.ids.count("4")
        await tail.until(lambda: tail.ids.count("4") > tries + 1)
        assert "MessageSizeTooLarge" in one.reason
        assert set(tail.ids) <= set("01234")
        await allow(kafka, topic, 100_000)
        await tail.until_ids(range(26))
        await eventually(lambda: one.reason == "")
    assert tail.first_ids() == {
        key.encode(): [str(n) for n in range(26) if keys[n % 3] == key] for key in keys
    }


async def test_a_relay_that_stands_still_does_not_repeat_the_pages_that_are_acknowledged(
    settings: Callable[..., Settings], db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    topic = await new_topic(**{"max.message.bytes": "4000"})
    sizes = [10] * 10 + [9_000]
    await stage(db, [event(topic, n, payload=b"x" * size) for n, size in enumerate(sizes)])
    chosen = settings(relay_page=4, max_event_bytes=1_000, relay_cursor_interval=3_600)
    async with following(kafka, topic) as tail, relaying(chosen):
        # Pages: 0 to 3, 4 to 7, and 8 to 10, of which 8 and 9 are taken at every try.
        await tail.until(lambda: tail.ids.count("9") > 3)
    assert [tail.ids.count(str(number)) for number in range(8)] == [1] * 8


async def test_a_relay_that_stops_before_a_refused_event_leaves_it_to_the_next_one(
    settings: Callable[..., Settings], db: asyncpg.Connection, kafka: str, new_topic: NewTopic
) -> None:
    topic = await new_topic(**{"max.message.bytes": "4000"})
    await stage(db, [event(topic, 0, payload=b"x" * 9_000), *numbered(topic, range(1, 5))])
    async with relaying(settings(relay_lease=1)) as one:
        await eventually(lambda: "MessageSizeTooLarge" in one.reason)
        await one.stop()
    assert await ids_in(kafka, topic) == []
    await allow(kafka, topic, 100_000)
    async with following(kafka, topic) as tail, relaying(settings(relay_lease=1)):
        await tail.until_ids(range(5))
    assert tail.ids == list("01234")


async def test_a_producer_that_cannot_connect_leaves_nothing_open(
    settings: Callable[..., Settings], db: asyncpg.Connection, unused_tcp_port: int
) -> None:
    await stage(db, numbered("t", [1]))
    nowhere = settings(kafka_bootstrap_servers=f"127.0.0.1:{unused_tcp_port}")
    async with relaying(nowhere) as one:
        await eventually(lambda: "KafkaConnectionError" in one.reason)
        await one.stop()  # an unclosed producer would be a warning, and those are errors here
