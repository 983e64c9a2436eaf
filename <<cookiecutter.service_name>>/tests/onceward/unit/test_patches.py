"""aiokafka without the engine's patches: a test that fails says that a patch can go.

What needs a broker is in `test_clients`.
"""

import asyncio
import ssl
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition, conn, errors
from aiokafka.client import AIOKafkaClient
from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException, KafkaConnectionError
from aiokafka.producer import sender
from aiokafka.protocol import fetch, group
from aiokafka.protocol.api import Request
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.record.memory_records import MemoryRecords

from onceward.servers import consumer, patches
from onceward.servers.subclassing import using

from .test_record_batches import LARGE, batch
from tests.servers.waiting import PATIENCE


def test_a_function_that_no_longer_uses_a_class_fails_at_import() -> None:
    with pytest.raises(TypeError, match=r"AIOKafkaConsumer.start of aiokafka no longer uses"):
        using(AIOKafkaConsumer.start, AIOKafkaClient=patches.Client)


async def test_aiokafkas_own_clients_stay_as_they_are() -> None:
    plain, ours = AIOKafkaConsumer(group_id="a"), consumer.KafkaConsumer(group_id="a")
    assert type(plain._client) is AIOKafkaClient
    assert type(ours._client) is patches.Client
    for one in (plain, ours):
        await one.stop()


class Reset:
    """A writer whose connection was reset, under uvloop."""

    def write(self, data: bytes) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport>; the handler is closed")


@pytest.mark.parametrize(
    ("kind", "error"),
    [(conn.AIOKafkaConnection, RuntimeError), (patches.Connection, KafkaConnectionError)],
)
async def test_without_the_patch_writes_to_reset_connections_raise_no_kafka_error(
    kind: Any, error: type[Exception]
) -> None:
    connection = kind("127.0.0.1", 9)
    connection._writer = Reset()
    connection._versions = {MetadataRequest.API_KEY: (0, 1)}
    connection.close = lambda reason: None
    with pytest.raises(error):
        connection.send(MetadataRequest([]))
    connection._writer = None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (AIOKafkaClient, "Unable to bootstrap"),
        (patches.Client, "no broker accepts the client: .*SSL"),
    ],
)
async def test_why_a_broker_rejects_the_client_is_not_raised_without_the_patch(
    kind: Any, text: str
) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"no TLS here")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        client = kind(
            bootstrap_servers=f"127.0.0.1:{server.sockets[0].getsockname()[1]}",
            security_protocol="SSL",
            ssl_context=ssl.create_default_context(),
        )
        with pytest.raises(KafkaConnectionError, match=text) as raised:
            await client.bootstrap()
    is_patched = kind is patches.Client
    assert (raised.value.__cause__ is not None) == is_patched
    await client.close()


async def test_a_request_of_a_closed_client_never_ends_without_the_patch() -> None:
    for kind in (AIOKafkaClient, patches.Client):
        client = kind(bootstrap_servers="127.0.0.1:9")
        await client.close()
        update = client.force_metadata_update()
        is_patched = kind is patches.Client
        await asyncio.wait({update}, timeout=PATIENCE if is_patched else 0.2)
        assert update.cancelled() == is_patched
        update.cancel()


async def test_without_the_patch_a_client_without_brokers_fails_an_assertion() -> None:
    kinds = ((AIOKafkaClient, AssertionError), (patches.Client, errors.NodeNotReadyError))
    for kind, error in kinds:
        client = kind(bootstrap_servers="127.0.0.1:9")
        client.cluster._brokers.clear()
        with pytest.raises(error):
            await client.coordinator_lookup(0, "group")
        await client.close()
    assert errors.NodeNotReadyError.retriable


async def test_without_the_patch_brokers_wait_for_replicas_until_the_request_timeout() -> None:
    producer = AIOKafkaProducer(bootstrap_servers="127.0.0.1:9", request_timeout_ms=40_000)
    handler: Any = sender.SendProduceReqHandler(producer._sender, {})
    assert handler.create_request()._timeout == 40_000  # of the broker
    patches.limit_wait_for_replicas(producer, 5.0)
    assert handler.create_request()._timeout == 5_000
    await producer.stop()


def test_a_batch_is_unpacked_without_a_limit_without_the_patch() -> None:
    (record,) = MemoryRecords(batch("gzip", bytes(LARGE))).next_batch()
    assert len(record.value) == LARGE


def test_without_the_patch_a_non_utf8_header_name_cannot_be_read() -> None:
    data = batch("none", b"v", headers=[("name", b"x")]).replace(b"name", b"n\xffme")
    with pytest.raises((UnicodeDecodeError, CorruptRecordException)):
        list(MemoryRecords(data).next_batch())


def test_errors_that_are_added_are_unknown_without_the_patch() -> None:
    numbers = {getattr(error, "errno", None) for error in vars(errors).values()}
    ours = patches.InvalidRecordError, patches.GroupIsFullError, patches.FencedInstanceIdError
    assert not numbers & {one.errno for one in ours}


@pytest.mark.parametrize(
    ("requests", "since"), [(group.HeartbeatRequestStruct, 3), (group.JoinGroupRequestStruct, 9)]
)
def test_without_the_patch_a_static_member_misses_fencing_and_leadership(
    requests: Any, since: int
) -> None:
    """The versions of requests since which brokers say so."""
    assert max(one.API_VERSION for one in get_args(requests)) < since


def test_without_the_patch_a_consumer_misses_records_lost_by_a_leader() -> None:
    """It would ask where the leader epoch ends that it has read, by requests of this kind."""
    of_leader_epochs = 23
    kinds = {one.API_KEY for one in Request.__subclasses__()}
    assert fetch.FetchRequest.API_KEY in kinds
    assert of_leader_epochs not in kinds


def waiting() -> tuple[consumer.KafkaConsumer, consumer.Fetcher]:
    """Return a consumer that has fetched nothing, and its fetcher; neither of them runs."""
    fetching = consumer.Fetcher.__new__(consumer.Fetcher)
    fetching._loop, fetching._closed = asyncio.get_running_loop(), False
    fetching._records, fetching._fetch_waiters = {}, set()
    one = consumer.KafkaConsumer.__new__(consumer.KafkaConsumer)
    one._fetcher, one.last_stable_offset = fetching, lambda _: 7
    return one, fetching


def arrived(partition: TopicPartition, batches: object) -> Any:
    """Return the result of a fetch as aiokafka stores it."""
    records = SimpleNamespace(_records=batches)
    return fetcher.FetchResult(partition, assignment=None, partition_records=records, backoff=0)


async def test_records_wake_the_readers_of_other_partitions_without_the_patch() -> None:
    one, other = TopicPartition("deposits", 0), TopicPartition("deposits", 1)
    client, fetching = waiting()
    until = fetching._loop.time() + PATIENCE
    reading: asyncio.Task[Any] = asyncio.create_task(client.arrival(one, until))
    await asyncio.sleep(0)
    (waiter,) = fetching._fetch_waiters
    batches = SimpleNamespace()
    for partition in (other, one):
        assert not reading.done()
        fetching._records[partition] = arrived(partition, batches)
        fetching._notify(waiter)
        assert waiter.done() == (partition == one)
        await asyncio.sleep(0.01)
    assert await reading is batches
    assert batches.stable == 7
    assert not fetching.awaited
    waiter = fetching._create_fetch_waiter()
    fetcher.Fetcher._notify(fetching, waiter)
    assert waiter.done()


async def test_a_reader_waits_for_its_time_unless_an_error_has_arrived() -> None:
    partition = TopicPartition("deposits", 0)
    client, fetching = waiting()
    until = fetching._loop.time() + 0.05
    assert await client.arrival(partition, until) is None
    assert fetching._loop.time() > until - 0.01  # timers may be early by less
    assert not fetching.awaited
    fetching._records[partition] = fetcher.FetchError(error=KafkaConnectionError(), backoff=0)
    assert await client.arrival(partition, fetching._loop.time() + PATIENCE) is None
    client._closed = fetching._closed = True
    with pytest.raises(errors.ConsumerStoppedError):
        await client.take(partition, 1)


@pytest.mark.parametrize(("rate", "rests"), [(50, False), (1_000, True)])
async def test_a_fetch_is_sent_at_once_at_any_rate_without_the_patch(
    rate: int, rests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rested: list[float] = []

    async def find_records(*_: Any) -> bool:
        return True

    async def rest(seconds: float) -> None:
        rested.append(seconds)

    monkeypatch.setattr(consumer, "_process_fetch", find_records)
    monkeypatch.setattr(asyncio, "sleep", rest)
    paced = consumer.Fetcher.__new__(consumer.Fetcher)
    # No time passes between the two fetches.
    paced._loop, paced._counted_since = SimpleNamespace(time=lambda: 100.0), 99.0
    paced.count(rate)
    for _ in range(2):
        assert await paced._proc_fetch_request(None, 0, SimpleNamespace(topics=[]))
    assert rested == ([pytest.approx(0.9 * consumer._GATHER_SECONDS)] if rests else [])


async def test_knowledge_of_a_partition_expires_after_an_error_or_a_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, state, partition = [100.0], SimpleNamespace(timestamp=None), TopicPartition("t", 0)
    found: list[bool] = []
    answers = (
        (0, 1, True),
        (1.5, 1, True),
        (0, 0.1, False),
        (0, 0.1, True),
        (2.5, 0.1, True),  # as of a process that is stopped or busy between two fetches
        (0, 30, True),  # while it waits for the answer
        (0, 30, True),  # each takes that long
    )

    async def answer(*_: Any) -> bool:
        _pause, took, has_succeeded = answers[len(found)]
        clock[0] += took
        state.timestamp = 1 if has_succeeded else None
        return False

    monkeypatch.setattr(consumer, "_process_fetch", answer)
    one = consumer.Fetcher.__new__(consumer.Fetcher)
    one._loop, one.answers = SimpleNamespace(time=lambda: clock[0]), {}
    assignment = SimpleNamespace(state_value=lambda _: state)
    for pause, *_ in answers:
        clock[0] += pause
        await one._proc_fetch_request(assignment, 0, SimpleNamespace(topics=[("t", [(0, 5, 1)])]))
        since, last, _took = one.answers[partition]
        found.append(since == last)
    assert found == [True, False, True, False, True, True, False]


async def test_a_fetch_that_is_cancelled_while_it_rests_returns_as_aiokafka_expects() -> None:
    paced = consumer.Fetcher.__new__(consumer.Fetcher)
    paced._loop = asyncio.get_running_loop()
    paced._rests_until = paced._loop.time() + 60
    fetch = asyncio.create_task(paced._proc_fetch_request(None, 0, None))
    await asyncio.sleep(0)
    fetch.cancel()
    assert await fetch is False
