"""Kafka's clients leave nothing behind, however they are stopped and whatever the brokers do."""

import asyncio
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from onceward.servers import patches
from onceward.servers.clients import KafkaProducer
from onceward.servers.consumer import IDLE_MAX_WAIT_MS, MAX_WAIT_MS, KafkaConsumer

from .kafka_wire import Api, Wire
from tests.servers.proxy import proxy
from tests.servers.waiting import PATIENCE, eventually

NewTopic = Callable[..., Awaitable[str]]


@pytest.fixture
async def wire(kafka: str) -> AsyncIterator[Wire]:
    """Return a wire to Kafka, and check at the end that no client has left anything behind."""
    before = asyncio.all_tasks()

    def nothing_is_left() -> bool:
        ours = asyncio.current_task()
        assert ours is not None
        return one.is_unused and asyncio.all_tasks() <= before | {ours}

    async with Wire(kafka).listening() as one:
        yield one
        await eventually(nothing_is_left)


def new_client(kind: str, wire: Wire) -> KafkaConsumer | KafkaProducer:
    """Return a client that waits for an answer for longer than a test lasts."""
    name = f"test-{uuid4().hex[:12]}"
    common = {"bootstrap_servers": wire.address, "request_timeout_ms": 300_000}
    match kind:
        case "consumer":
            return KafkaConsumer(group_id=name, **common)
        case "transactional producer":
            return KafkaProducer(transactional_id=name, **common)
        case _:
            return KafkaProducer(enable_idempotence=True, **common)


class Reset:
    """The way to a broker that has reset it a moment ago, as uvloop has it.

    asyncio lets one write on, and says later that nothing has come of it.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def write(self, data: bytes) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport>; the handler is closed")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


async def test_a_consumer_and_a_producer_go_on_after_uvloop_would_not_write(
    kafka: str, new_topic: NewTopic
) -> None:
    topic = await new_topic()
    async with (
        KafkaConsumer(
            topic, bootstrap_servers=kafka, auto_offset_reset="earliest", metadata_max_age_ms=500
        ) as consumer,
        KafkaProducer(bootstrap_servers=kafka) as producer,
    ):
        for number in range(2):
            await producer.send_and_wait(topic, b"%d" % number)
            record = await asyncio.wait_for(consumer.getone(), PATIENCE)
            assert record.value == b"%d" % number
            for client in (consumer._client, producer.client):
                for connection in client._conns.values():
                    connection._writer = Reset(connection._writer)
        assert not consumer._fetcher.error_future.done()


@pytest.mark.parametrize(
    ("kind", "api"),
    [
        ("consumer", Api.API_VERSIONS),
        ("consumer", Api.METADATA),
        ("producer", Api.METADATA),
        ("producer", Api.INIT_PRODUCER_ID),
        ("transactional producer", Api.FIND_COORDINATOR),
    ],
)
async def test_a_client_that_is_cancelled_while_it_starts_leaves_nothing_behind(
    wire: Wire, kind: str, api: Api
) -> None:
    wire.ignore(api)
    one = new_client(kind, wire)
    starting = asyncio.create_task(one.start())
    await eventually(lambda: wire.ignored > 0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await starting
    await one.stop(5)
    await eventually(lambda: wire.is_unused)
    # What the error still refers to was closed by us then, and not by the garbage collector.
    assert cancelled.tb is not None


@pytest.mark.parametrize("kind", ["producer", "transactional producer"])
@pytest.mark.parametrize("hindrance", ["hangs", "is away", "opens no connection", "has no leader"])
async def test_a_producer_whose_broker_does_not_let_it_finish_is_cut_off(
    wire: Wire, new_topic: NewTopic, kind: str, hindrance: str
) -> None:
    topic = await new_topic()
    one = new_client(kind, wire)
    await one.start()
    await one.partitions_for(topic)
    match hindrance:
        case "hangs":
            wire.ignore(Api.PRODUCE)
        case "is away":
            wire.shut()
        case "opens no connection":
            wire.ignore(Api.API_VERSIONS)
            wire.cut()
        case "has no leader":
            wire.take_leaders()
            await eventually(one.client.force_metadata_update)
    if kind == "transactional producer":
        await one.begin_transaction()
    batch = one.create_batch()
    batch.append(timestamp=None, key=b"ada", value=b"{}", headers=[])
    sent = await one.send_batch(batch, topic, partition=0)
    await one.stop(0.2)
    wire.go_on()
    await asyncio.wait({sent}, timeout=PATIENCE)
    assert sent.cancelled() or sent.exception()


async def test_a_consumer_whose_farewell_nobody_hears_is_cut_off(
    wire: Wire, new_topic: NewTopic
) -> None:
    topic = await new_topic()
    one = new_client("consumer", wire)
    await one.start()
    one.subscribe([topic])
    await eventually(lambda: bool(one.assignment()))
    wire.ignore(Api.LEAVE_GROUP)
    await one.stop(2)  # enough to send it
    assert wire.ignored == 1


async def test_a_consumer_for_which_nothing_comes_asks_less_often(
    wire: Wire, kafka: str, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceward.servers.consumer._BUSY_SECONDS", 0.5)
    topic = await new_topic()
    one = KafkaConsumer(topic, bootstrap_servers=wire.address, auto_offset_reset="earliest")
    await one.start()

    async def taken(seconds: float) -> list[Any]:
        partition = TopicPartition(topic, 0)
        await one.arrival(partition, asyncio.get_running_loop().time() + seconds)
        return await one.take(partition, 1)

    async def asks_after(milliseconds: int) -> None:
        async def asks() -> bool:
            found = await taken(0.05)
            return not found and wire.waits[-1:] == [milliseconds]

        await eventually(asks)

    await asks_after(IDLE_MAX_WAIT_MS)
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        await producer.send_and_wait(topic, b"1")
    assert await taken(PATIENCE)
    await asks_after(MAX_WAIT_MS)
    await asks_after(IDLE_MAX_WAIT_MS)
    await one.stop(5)


async def test_a_resting_partition_takes_no_memory_and_resumes_at_its_position(
    kafka: str, new_topic: NewTopic
) -> None:
    topic = await new_topic()
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        for _ in range(6):
            await producer.send_and_wait(topic, bytes(10_000))
    partition = TopicPartition(topic, 0)
    async with KafkaConsumer(
        bootstrap_servers=kafka, auto_offset_reset="earliest", isolation_level="read_committed"
    ) as one:
        one.hold(25_000)
        one.assign([partition])

        async def offsets(seconds: float) -> list[int]:
            until = asyncio.get_running_loop().time() + seconds
            await one.arrival(partition, until)
            return [record.offset for record in await one.take(partition, 100)]

        assert await offsets(PATIENCE) == [0, 1], "more would be more than a share"
        assert await one.arrival(partition, asyncio.get_running_loop().time() + PATIENCE)
        with one.resting(partition):
            assert not one._fetcher._records
            assert await offsets(0.3) == []
        assert await offsets(PATIENCE) == [2, 3]


async def test_a_start_that_is_cancelled_leaves_its_connection_open_without_the_patch(
    wire: Wire,
) -> None:
    """A test that fails says that the patch can go."""
    wire.ignore(Api.METADATA)
    one = AIOKafkaProducer(bootstrap_servers=wire.address)
    starting = asyncio.create_task(one.start())
    await eventually(lambda: wire.ignored > 0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await starting
    await one.stop()
    await asyncio.sleep(0.2)
    assert not wire.is_unused
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(cancelled.value.__traceback__)]
    (connection,) = (names["bootstrap_conn"] for names in frames if "bootstrap_conn" in names)
    connection.close()


async def test_a_producer_whose_broker_hangs_does_not_stop_without_the_patch(
    wire: Wire, new_topic: NewTopic
) -> None:
    """A test that fails says that the patch can go."""
    topic = await new_topic()
    one = AIOKafkaProducer(bootstrap_servers=wire.address, request_timeout_ms=300_000)
    await one.start()
    await one.partitions_for(topic)
    wire.ignore(Api.PRODUCE)
    sent = await one.send(topic, b"1")
    await eventually(lambda: wire.ignored > 0)
    stopping = asyncio.create_task(one.stop())
    await asyncio.wait({stopping}, timeout=1)
    assert not stopping.done()
    patches.cut_off(one.client)
    patches.cancel_batches(one)
    await asyncio.wait({stopping, sent}, timeout=PATIENCE)


async def test_a_consumer_for_which_nothing_comes_asks_as_often_without_the_patch(
    wire: Wire, new_topic: NewTopic
) -> None:
    """A test that fails says that the patch can go."""
    topic = await new_topic()
    one = AIOKafkaConsumer(topic, bootstrap_servers=wire.address, fetch_max_wait_ms=50)
    await one.start()
    for _ in range(10):
        assert not await one.getmany(timeout_ms=100)
    assert set(wire.waits) == {50}
    await one.stop()


async def test_without_the_patch_a_consumer_rejected_by_its_group_gives_up(
    wire: Wire, new_topic: NewTopic
) -> None:
    """A test that fails says that the patch can go."""
    one = AIOKafkaConsumer(group_id="rejected", bootstrap_servers=wire.address)
    await one.start()
    wire.refuse_members(30)
    one.subscribe([await new_topic()])
    await eventually(lambda: one._coordinator._pending_exception is not None)
    wire.go_on()
    await asyncio.sleep(1)
    assert not one.assignment()
    await one.stop()


@pytest.mark.parametrize("kind", [AIOKafkaProducer, KafkaProducer])
async def test_without_the_patch_a_client_does_not_find_moved_brokers(
    wire: Wire, kafka: str, unused_tcp_port: int, kind: Any
) -> None:
    """A test that fails says that the patch can go."""
    host, _, port = wire.address.rpartition(":")
    async with proxy(host, int(port), listen=unused_tcp_port):
        one = kind(bootstrap_servers=f"{host}:{unused_tcp_port}")
        await one.start()
    wire.shut()
    async with (
        Wire(kafka).listening() as new,
        proxy(host, int(new.address.rpartition(":")[2]), listen=unused_tcp_port),
    ):
        assert await one.client.force_metadata_update() == (kind is KafkaProducer)
        await one.stop()
