"""Trap 14: nothing that a producer sends vanishes between the broker and our decoding."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any
from unittest.mock import patch

import asyncpg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.producer import message_accumulator, producer
from aiokafka.record import memory_records
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy, _DefaultRecordBatchPy
from pydantic_core import to_json

from onceward import Event, Handlers, Transaction
from onceward.apply.batch import read
from onceward.cli.dead_letters import DeadLetters
from onceward.events.message import headers_of
from onceward.servers import record_batches

from .applier import NewApplier, store_of
from .bank import Bank
from .conftest import position_reaches
from tests.conftest import Records, Running
from tests.contract.bank import Deposit, histories
from tests.onceward.nasty import NASTY, Name, decisions, kafka_record
from tests.servers.waiting import eventually

LIMIT = 4_000_000
FOREVER = str(2**63 - 1)


class Shape(Event, type="shape"):
    """What the good ones are."""

    number: int = 0
    text: str = ""


async def take(event: Shape, tx: Transaction) -> None:
    """Take an event."""


@asynccontextmanager
async def sending_any_names(kafka: str, compression: str | None = None) -> AsyncIterator[Any]:
    """Run a producer that sends headers whose names are not UTF-8; the fast one can't."""
    builder = "DefaultRecordBatchBuilder", _DefaultRecordBatchBuilderPy
    with patch.object(message_accumulator, *builder), patch.object(producer, *builder):
        async with AIOKafkaProducer(
            bootstrap_servers=kafka, max_request_size=LIMIT, compression_type=compression
        ) as one:
            yield one


async def test_every_nasty_record_comes_as_it_was_sent_and_gets_its_fate(
    kafka: str, new_topic: Callable[..., Awaitable[str]], records: Records
) -> None:
    topic = await new_topic(
        **{"max.message.bytes": str(LIMIT), "message.timestamp.after.max.ms": FOREVER}
    )
    async with sending_any_names(kafka) as one:
        for nasty in NASTY:
            await one.send_and_wait(
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
    assert (await decisions(handlers, topic, found)).total() == len(NASTY)


@pytest.fixture(params=["C extension", "pure Python"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let records be read by either of aiokafka's readers."""
    if request.param == "pure Python":
        monkeypatch.setattr(record_batches, "MemoryRecords", memory_records._MemoryRecordsPy)
        monkeypatch.setattr(memory_records, "DefaultRecordBatch", _DefaultRecordBatchPy)


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("compression", [None, "gzip"])
async def test_records_around_a_non_utf8_header_name_arrive_once_each(
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
    records: Records,
    compression: str | None,
) -> None:
    """The client by itself raises for ever, and what stands behind in the batch is shut off."""
    topic = await new_topic()
    names = ("a", Name("\udcff"), "b", Name("ü\udc80"), "c")
    async with sending_any_names(kafka, compression) as one:
        for _ in range(2):
            batch = one.create_batch()
            for name in names:
                batch.append(key=b"k", value=b"v", timestamp=None, headers=[(name, b"x")])
            await (await one.send_batch(batch, topic, partition=0))
    async with AIOKafkaProducer(bootstrap_servers=kafka) as ordinary:
        await ordinary.send_and_wait(topic, b"w")
    found = await records(topic, 11)
    assert [record.offset for record in found] == list(range(11))
    assert [record.headers for record in found] == [((name, b"x"),) for name in names] * 2 + [()]
    assert [record.value for record in found] == [b"v"] * 10 + [b"w"]


async def test_every_nasty_record_takes_effect_or_is_stored_as_it_came(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    handlers = Handlers()
    handlers.on(Shape, topic="nasty", consumer="take")(take)
    applier = await new_applier(handlers, topic="nasty", breaker_keys=10_000)
    found = [kafka_record(nasty, offset, "nasty") for offset, nasty in enumerate(NASTY)]
    assert await applier.position() == 0
    outcomes = await applier.apply_batch(await read(handlers, 0, found))
    assert await applier.position() == len(NASTY)
    stored = await applier.backlog()
    assert {"invalid payload", "invalid envelope"} <= {row["reason"] for row in stored}
    for row in stored:
        nasty = NASTY[row["offset"]]
        assert (headers_of(row["headers"]), row["value"]) == (nasty.headers, nasty.value)
        assert (row["record_key"], row["timestamp"]) == (nasty.key, nasty.timestamp)
        entry = await store_of(DeadLetters, db, handlers).show(row["key"].hex())
        assert to_json(entry)
    taken = {one.item.record.offset for one in outcomes}
    assert len(taken | {row["offset"] for row in stored}) > len(NASTY) / 2


async def test_headers_that_a_library_for_tracing_cannot_read_hold_up_no_record(
    bank: Bank,
    running: Running,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OpenTelemetry's for aiokafka wraps `getmany`, and decodes what it returns."""
    getmany = AIOKafkaConsumer.getmany

    async def traced(*args: Any, **options: Any) -> Any:
        found = await getmany(*args, **options)
        for record in chain.from_iterable(found.values()):
            for _, value in record.headers:
                value.decode()
        return found

    monkeypatch.setattr(AIOKafkaConsumer, "getmany", traced)
    headers = tuple((name, b"\xff") for name in ("traceparent", "tracestate", "baggage"))
    async with running(bank.service):
        for amount in range(1, 4):
            await Deposit(amount, headers=headers).send(producer, bank.deposits)
        await eventually(position_reaches(db, bank.deposits, 3))
    assert await histories(db) == {"ada": [1, 2, 3]}
