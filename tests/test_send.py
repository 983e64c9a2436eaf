"""`dev/send.py` of a service: an event, or any bytes, with or without a key."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition  # type: ignore[import-untyped]
from aiokafka.admin import AIOKafkaAdminClient, NewTopic  # type: ignore[import-untyped]

from tests.baked import RAW

SEND = RAW / "dev" / "send.py"
KAFKA = "PIPELINE_KAFKA_BOOTSTRAP_SERVERS"
DATA = '{"scanner": "JFK"}'


def send(*arguments: str, value: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the program, with this standard input."""
    return subprocess.run(
        [sys.executable, "-B", SEND, *arguments], input=value, capture_output=True, timeout=120
    )


@asynccontextmanager
async def new_topic() -> AsyncIterator[str]:
    """Create a topic of one partition."""
    name = f"send-{uuid4().hex[:12]}"
    admin = AIOKafkaAdminClient(bootstrap_servers=os.environ[KAFKA])
    await admin.start()
    try:
        await admin.create_topics([NewTopic(name, 1, 1)])
        yield name
        await admin.delete_topics([name])
    finally:
        await admin.close()


@pytest.fixture
async def topic() -> AsyncIterator[str]:
    """A topic of one partition."""
    async with new_topic() as name:
        yield name


async def first(topic: str) -> ConsumerRecord:
    """Return the topic's first record."""
    async with AIOKafkaConsumer(bootstrap_servers=os.environ[KAFKA]) as consumer:
        partition = TopicPartition(topic, 0)
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        return await asyncio.wait_for(consumer.getone(), 60)


@pytest.mark.integration
async def test_any_bytes_are_sent_as_they_are_with_the_given_headers_alone(topic: str) -> None:
    value = b"\x00\xff no event\n"
    given = ["--file", "-", "--header", "x-id=7", "--header", "note=a=b"]

    done = await asyncio.to_thread(send, topic, *given, value=value)

    record = await first(topic)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"sent 12 bytes to {topic}, partition 0, offset 0\n".encode()
    assert (record.key, record.value) == (None, value)
    assert record.headers == (("x-id", b"7"), ("note", b"a=b"))


@pytest.mark.integration
async def test_an_event_gets_a_given_key_and_headers_can_be_replaced(topic: str) -> None:
    event = ["scan.recorded.v1", "--id", "1", "--key", "N1", DATA, "--header", "ce_source=/x"]

    done = await asyncio.to_thread(send, topic, *event)

    record = await first(topic)
    assert done.returncode == 0, done.stderr
    assert (record.key, record.value) == (b"N1", DATA.encode())
    assert dict(record.headers) == {
        "ce_specversion": b"1.0",
        "ce_id": b"1",
        "ce_source": b"/x",
        "ce_type": b"scan.recorded.v1",
        "content-type": b"application/json",
    }


@pytest.mark.integration
async def test_if_nothing_is_published_it_names_the_lists_and_the_doctor(topic: str) -> None:
    async with new_topic() as watched:
        done = await asyncio.to_thread(send, topic, "scanned", DATA, "--watch", watched)

    assert done.returncode == 0, done.stderr
    for command in ("dead list`", "dead list --waiting`", "doctor`"):
        assert f"`service {command}" in done.stdout.decode()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scan.recorded.v1"], "give either TYPE and DATA of an event, or --file"),
        (["scan.recorded.v1", DATA, "--file", "-"], "give either TYPE and DATA of an event"),
        (["scan.recorded.v1", "{"], "not JSON: "),
        (["--file", "no such file"], "No such file or directory: 'no such file'"),
        (["--file", "-", "--header", "x"], "'x' is not NAME=VALUE"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(
    arguments: list[str], message: str
) -> None:
    done = send("scans", *arguments)

    assert done.returncode == 2
    assert message in done.stderr.decode()
