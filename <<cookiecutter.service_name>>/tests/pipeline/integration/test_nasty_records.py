"""Trap 14: nothing that a producer sends vanishes between the broker and our decoding."""

from collections.abc import Awaitable, Callable
from unittest.mock import patch

import asyncpg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy

from pipeline import Event, Handlers, Transaction
from pipeline.backlog import headers_of
from pipeline.batch import read

from .conftest import Records
from .desk import NewDesk
from tests.pipeline.nasty import NASTY, fates, kafka_record

LIMIT = 4_000_000
FOREVER = str(2**63 - 1)


class Shape(Event, type="shape"):
    """What the good ones are."""

    number: int = 0
    text: str = ""


async def take(event: Shape, tx: Transaction) -> None:
    """Take an event."""


async def test_every_nasty_record_comes_as_it_was_sent_and_gets_its_fate(
    kafka: str, new_topic: Callable[..., Awaitable[str]], records: Records
) -> None:
    topic = await new_topic(
        **{"max.message.bytes": str(LIMIT), "message.timestamp.after.max.ms": FOREVER}
    )
    async with AIOKafkaProducer(bootstrap_servers=kafka, max_request_size=LIMIT) as producer:
        for nasty in NASTY:
            await producer.send(
                topic,
                nasty.value,
                key=nasty.key,
                timestamp_ms=nasty.timestamp,
                headers=nasty.headers,
            )
    handlers = Handlers()
    handlers.on(Shape, topic=topic, consumer="take")(take)

    found = await records(topic, len(NASTY))

    assert [record.offset for record in found] == list(range(len(NASTY)))
    assert [
        (list(record.headers), record.value, record.key, record.timestamp) for record in found
    ] == [(nasty.headers, nasty.value, nasty.key, nasty.timestamp) for nasty in NASTY]
    assert fates(handlers, topic, found).total() == len(NASTY)


class Bytes(str):
    """The name of a header as another language's client may send it."""

    def encode(self, *_: str) -> bytes:
        """Return what is not UTF-8."""
        return b"\xff"


async def test_the_client_passes_over_no_record_whose_header_has_a_name_that_is_not_utf8(
    kafka: str, new_topic: Callable[..., Awaitable[str]]
) -> None:
    """It raises instead, however often it is asked; what stands behind in the batch is shut off."""
    topic = await new_topic()
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        with patch(
            "aiokafka.producer.message_accumulator.DefaultRecordBatchBuilder",
            _DefaultRecordBatchBuilderPy,
        ):
            batch = producer.create_batch()
        for name in ("good", Bytes("bad"), "good"):
            batch.append(key=None, value=b"", timestamp=None, headers=[(name, b"")])
        await (await producer.send_batch(batch, topic, partition=0))
        await producer.send_and_wait(topic, b"")
    partition = TopicPartition(topic, 0)
    async with AIOKafkaConsumer(bootstrap_servers=kafka, auto_offset_reset="none") as client:

        async def next_offset() -> int:
            found = await client.getmany(partition, timeout_ms=30_000, max_records=1)
            return int(found[partition][0].offset)

        client.assign([partition])
        client.seek(partition, 0)
        assert await next_offset() == 0
        for position in (1, 1, 2):
            client.seek(partition, position)
            with pytest.raises(UnicodeDecodeError):
                await next_offset()
            assert await client.position(partition) == position
        client.seek(partition, 3)
        assert await next_offset() == 3


async def test_every_nasty_record_takes_effect_or_is_stored_as_it_came(
    new_desk: NewDesk, db: asyncpg.Connection
) -> None:
    handlers = Handlers()
    handlers.on(Shape, topic="nasty", consumer="take")(take)
    desk = await new_desk(handlers, topic="nasty", breaker_keys=10_000)
    found = [kafka_record(nasty, offset, "nasty") for offset, nasty in enumerate(NASTY)]
    assert await desk.position() == 0
    outcomes = await desk.apply_batch(read(handlers, "nasty", 0, found))
    assert await desk.position() == len(NASTY)
    stored = await desk.backlog()
    assert {"invalid payload", "invalid envelope"} <= {row["reason"] for row in stored}
    for row in stored:
        nasty = NASTY[row["offset"]]
        assert (headers_of(row["headers"]), row["value"]) == (nasty.headers, nasty.value)
        assert (row["record_key"], row["timestamp"]) == (nasty.key, nasty.timestamp)
    taken = {one.item.record.offset for one in outcomes}
    assert len(taken | {row["offset"] for row in stored}) > len(NASTY) / 2
