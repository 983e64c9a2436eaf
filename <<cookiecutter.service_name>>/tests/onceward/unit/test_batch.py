"""Decoding a batch: every record is taken, skipped or quarantined."""

import asyncio
import gzip
import json
import logging
import time
from collections.abc import Sequence
from decimal import Decimal
from itertools import pairwise
from typing import Self

import pytest
from aiokafka import ConsumerRecord
from pydantic import ValidationError, field_validator, model_validator

from onceward import CloudEvents, Event, Handlers, Tombstone, Transaction
from onceward.apply import batch as batches
from onceward.apply.batch import Batch, items_of, read
from onceward.apply.positions import Anchor
from onceward.errors import summarize_error
from onceward.events.message import Message, Reason, Record, Undecodable
from onceward.plain import PayloadFields, Plain
from onceward.servers import tasks
from onceward.servers.tasks import SLICE_SECONDS, in_background

from tests.servers.waiting import PATIENCE

TOPIC = "orders"


class Placed(Event, type="placed"):
    """An order was placed."""

    order: int


class Fragile(Event, type="fragile"):
    """An event whose own validator breaks."""

    order: int

    @field_validator("order")
    @classmethod
    def _breaks(cls, value: int) -> int:
        return {1: value}[value]


async def ignore(event: Event, tx: Transaction) -> None:
    """Take an event."""


@pytest.fixture
def handlers() -> Handlers:
    """Return a registry in which two consumers take `placed`."""
    registry = Handlers()
    registry.on(Placed, topic=TOPIC, consumer="ship")(ignore)
    registry.on(Placed, topic=TOPIC, consumer="bill")(ignore)
    registry.on(Fragile, topic=TOPIC, consumer="ship")(ignore)
    return registry


def record(
    offset: int,
    value: bytes | None = b'{"order": 1}',
    type: str | None = "placed",
    key: bytes | None = b"k",
) -> ConsumerRecord[bytes, bytes]:
    """Return a record; without a type it has no headers at all."""
    headers: Sequence[tuple[str, bytes]] = ()
    if type is not None:
        headers = [
            ("ce_specversion", b"1.0"),
            ("ce_id", str(offset).encode()),
            ("ce_source", b"/shop"),
            ("ce_type", type.encode()),
        ]
    return ConsumerRecord(TOPIC, 0, offset, 0, 0, key, value, None, 0, 0, headers)


def taken(batch: Batch) -> list[tuple[int, str]]:
    """Return offset and consumer of every item."""
    return [(item.message.offset, item.handler.consumer) for item in batch.items]


async def test_a_record_becomes_one_item_per_consumer_in_registration_order(
    handlers: Handlers,
) -> None:
    batch = await read(handlers, 5, [record(5), record(6)])
    assert taken(batch) == [(5, "ship"), (5, "bill"), (6, "ship"), (6, "bill")]
    assert (batch.start, batch.end, batch.skipped, batch.undecoded) == (5, 7, [], [])
    assert batch.items[0].event == Placed(order=1)
    assert len({item.key for item in batch.items}) == 4


async def test_what_is_handled_later_is_not_validated_now() -> None:
    registry = Handlers()
    registry.on(Placed, topic=TOPIC, consumer="ship", mode="deferred")(ignore)
    (item,) = (await read(registry, 0, [record(0, value=b"{}")])).items
    assert (item.event, item.fault) == (None, None)
    registry.on(Placed, topic=TOPIC, consumer="audit", mode="deferred")(ignore)
    for item in (await read(registry, 0, [record(0, value=b"{}")])).items:
        assert (item.event, item.fault) == (None, None)
    registry.on(Placed, topic=TOPIC, consumer="bill")(ignore)
    _, _, bill = (await read(registry, 0, [record(0)])).items
    assert bill.event == Placed(order=1)


async def test_the_end_is_behind_the_last_record_whatever_gaps_there_are(
    handlers: Handlers,
) -> None:
    """Trap 13."""
    batch = await read(handlers, 5, [record(7), record(20)])
    assert (batch.start, batch.end) == (5, 21)


async def test_unhandled_types_and_tombstones_are_skipped_and_the_end_passes_them(
    handlers: Handlers,
) -> None:
    records = [record(0, type="other", value=b"no JSON"), record(1), record(2, value=None)]
    batch = await read(handlers, 0, records)
    assert [offset for offset, _ in taken(batch)] == [1, 1]
    assert (batch.skipped, batch.end, batch.undecoded) == ([0, 2], 3, [])


async def test_unhandled_types_are_logged_once_each_and_in_limited_number(
    handlers: Handlers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_logged_types", set())
    caplog.set_level(logging.INFO, batches.__name__)
    types = ["plcaed", "placed", "plcaed", *(f"type {number}" for number in range(1_000))]
    await read(handlers, 0, [record(offset, type=type) for offset, type in enumerate(types)])
    first, *others = (line.getMessage() for line in caplog.records)
    assert first == "orders: records of type 'plcaed' are skipped: no handler takes it"
    assert len({first, *others}) == len(caplog.records) == 100


async def test_a_backlog_row_without_its_handler_is_not_logged_as_skipped(
    handlers: Handlers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_logged_types", set())
    caplog.set_level(logging.INFO, batches.__name__)
    assert items_of(handlers, record(0, type="removed"), validates=True) == []
    assert not caplog.records
    await read(handlers, 0, [record(0, type="long" * 100)])
    assert len(caplog.records[0].getMessage()) < 200


async def test_a_tombstone_without_headers_is_skipped_where_nobody_asks_for_it(
    handlers: Handlers,
) -> None:
    batch = await read(handlers, 0, [record(0, value=None, type=None)])
    assert (batch.skipped, batch.end, batch.undecoded) == ([0], 1, [])


async def test_a_tombstone_becomes_an_event_with_the_record_key_if_handled(
    handlers: Handlers,
) -> None:
    handlers.on(Tombstone, topic=TOPIC, consumer="forget")(ignore)
    batch = await read(handlers, 0, [record(0, value=None, key=b"a\xff")])
    assert taken(batch) == [(0, "forget")]
    assert batch.items[0].event == Tombstone(key="a\\xff")
    (item,) = (await read(handlers, 0, [record(0, value=None, key=None)])).items
    assert item.event == Tombstone(key="")


async def test_a_tombstone_without_headers_is_named_by_its_place(handlers: Handlers) -> None:
    handlers.on(Tombstone, topic=TOPIC, consumer="forget")(ignore)
    batch = await read(handlers, 7, [record(7, value=None, type=None, key=b"a")])
    assert batch.items[0].message.id == "0-7"


async def test_what_can_not_be_decoded_is_quarantined_and_its_neighbours_are_taken(
    handlers: Handlers,
) -> None:
    """Trap 14."""
    bare = record(2, type=None)
    batch = await read(handlers, 0, [record(0), record(1, type="other"), bare, record(3)])
    assert taken(batch) == [(0, "ship"), (0, "bill"), (3, "ship"), (3, "bill")]
    assert (batch.start, batch.end, batch.skipped) == (0, 4, [1])
    (one,) = batch.undecoded
    assert one.record is bare
    assert one.reason == Reason.NOT_CLOUDEVENTS
    assert isinstance(one.error, Undecodable)


async def test_a_type_that_nobody_takes_is_quarantined_where_types_are_demanded(
    handlers: Handlers,
) -> None:
    handlers.topic(TOPIC, demands_types=True)
    batch = await read(handlers, 0, [record(0, type="other"), record(1), record(2, value=None)])
    assert [offset for offset, _ in taken(batch)] == [1, 1]
    assert [(one.record.offset, one.reason) for one in batch.undecoded] == [(0, "unknown type")]
    assert "'other' of orders" in str(batch.undecoded[0].error)
    assert (batch.skipped, batch.end) == ([2], 3), "a tombstone has no type to be known"


@pytest.mark.parametrize(
    ("bad", "consumers"),
    [
        (record(2, value=b"{"), ["ship", "bill"]),
        (record(2, value=b'{"order": "x"}'), ["ship", "bill"]),
        (record(2, value=b"\xff"), ["ship", "bill"]),
        (record(2, value=b'{"order": 2}', type="fragile"), ["ship"]),
    ],
    ids=["no JSON", "a wrong type", "no UTF-8", "a validator that breaks"],
)
async def test_an_invalid_payload_is_an_item_per_consumer_with_its_fault(
    handlers: Handlers, bad: ConsumerRecord[bytes, bytes], consumers: list[str]
) -> None:
    """Trap 14."""
    batch = await read(handlers, 0, [record(1), bad, record(3)])
    assert (batch.end, batch.skipped, batch.undecoded) == (4, [], [])
    faulty = [item for item in batch.items if item.fault is not None]
    assert [(item.record.offset, item.handler.consumer) for item in faulty] == [
        (2, consumer) for consumer in consumers
    ]
    assert [item.event for item in faulty] == [None] * len(consumers)
    assert len(batch.items) == 4 + len(faulty)


class Paid(Event, type="paid"):
    """An amount with more digits than a float has."""

    amount: Decimal


@pytest.mark.parametrize("mode", ["binary", "structured"])
async def test_a_decimal_of_a_record_keeps_its_digits_in_either_mode(
    handlers: Handlers, mode: str
) -> None:
    handlers.on(Paid, topic=TOPIC, consumer="book")(ignore)
    data = '{"amount": 12345678901234567.890}'
    paid = record(0, type="paid", value=data.encode())
    if mode == "structured":
        head = '"specversion": "1.0", "id": "1", "source": "/shop", "type": "paid"'
        paid.value = f'{{{head}, "data": {data}}}'.encode()
        paid.headers = (("content-type", b"application/cloudevents+json"),)
    (item,) = (await read(handlers, 0, [paid])).items
    assert isinstance(item.event, Paid)
    assert str(item.event.amount) == "12345678901234567.890"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit, SystemExit])
async def test_a_validator_that_would_end_the_process_is_its_payloads_fault(
    handlers: Handlers, kind: type[BaseException]
) -> None:
    class Ending(Event, type="ending"):
        """An event that nobody validates twice."""

        @model_validator(mode="after")
        def _ends(self) -> Self:
            raise kind

    handlers.on(Ending, topic=TOPIC, consumer="ship")(ignore)
    (item,) = (await read(handlers, 0, [record(0, type="ending", value=b"{}")])).items
    assert type(item.fault) is kind


FRAMED = {
    "Confluent": b"\x00\x00\x00\x00\x07\x02a",
    "Confluent, by a GUID": b"\x01" + bytes(range(16)),
    "AWS Glue": b"\x03\x05" + bytes(range(16)),
    "Avro": b"\xc3\x01" + bytes(range(8)),
    "gzip": gzip.compress(b'{"order": 1}'),
    "UTF-16": '{"order": 1}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"order": 1}',
}
REFUSED = {
    "binary": "invalid payload",
    "structured": Reason.INVALID_ENVELOPE,
    "plain": Reason.INVALID_ENVELOPE,
    "no headers": Reason.NOT_CLOUDEVENTS,
}


@pytest.mark.parametrize("name", FRAMED)
@pytest.mark.parametrize("framing", REFUSED)
async def test_the_error_of_non_json_data_shows_its_first_bytes(
    handlers: Handlers, name: str, framing: str
) -> None:
    framed = record(0, value=FRAMED[name], type="placed" if framing == "binary" else None)
    if framing == "structured":
        framed.headers = (("content-type", b"application/cloudevents+json"),)
    if framing == "plain":
        handlers.topic(TOPIC, codec=Plain("placed", PayloadFields("order")))
    batch = await read(handlers, 0, [framed])
    faults = [("invalid payload", item.fault) for item in batch.items]
    refused = [*faults, *((one.reason, one.error) for one in batch.undecoded)]
    assert len(refused) == (2 if framing == "binary" else 1)
    for reason, error in refused:
        assert reason == REFUSED[framing]
        assert FRAMED[name][:2].hex(" ") in str(error)
        assert "handlers.topic(…, codec=Confluent(…)), option schema_registry" in str(error)


class Sealed(CloudEvents):
    """A codec of other bytes than JSON, which says itself what is wrong with them."""

    def decode(self, record: Record, *, hash: bytes | None = None) -> Message:
        """Refuse the record."""
        raise Undecodable(Reason.UNKNOWN_SCHEMA, "there is no schema 7")


async def test_a_codec_of_other_bytes_says_itself_what_is_wrong_with_them(
    handlers: Handlers,
) -> None:
    handlers.topic(TOPIC, codec=Sealed())
    (refused,) = (await read(handlers, 0, [record(0, value=FRAMED["Confluent"])])).undecoded
    assert (refused.reason, str(refused.error)) == ("unknown schema", "there is no schema 7")


@pytest.mark.parametrize("value", [b"", b" ", b"{", b"\n{", b"placed", '{"order": "ö'.encode()])
async def test_what_begins_as_json_is_described_by_the_model(
    handlers: Handlers, value: bytes
) -> None:
    item, _ = (await read(handlers, 0, [record(0, value=value)])).items
    assert isinstance(item.fault, ValidationError)


async def test_an_invalid_payloads_error_names_the_field_without_its_value(
    handlers: Handlers,
) -> None:
    item, _ = (await read(handlers, 0, [record(0, value=b'{"order": "secret"}')])).items
    assert isinstance(item.fault, ValidationError)
    assert "order" in summarize_error(item.fault)
    assert "secret" not in summarize_error(item.fault)


async def test_a_plain_topic_is_read_as_it_was_told(handlers: Handlers) -> None:
    handlers.topic(TOPIC, codec=Plain("placed", PayloadFields("order")))
    same = [record(n, value=json.dumps({"order": 1}).encode(), type=None) for n in (0, 1)]
    batch = await read(handlers, 0, same)
    assert taken(batch) == [(0, "ship"), (0, "bill"), (1, "ship"), (1, "bill")]
    assert len({item.key for item in batch.items}) == 2


async def test_a_batch_part_has_exactly_the_records_between_its_ends(
    handlers: Handlers,
) -> None:
    records = [record(0), record(2, type="other"), record(3), record(5, type=None), record(9)]
    batch = await read(handlers, 0, records)
    part = batch.between(1, 9)
    assert (part.start, part.end, part.skipped) == (1, 9, [2])
    assert [one.offset for one in part.records] == [2, 3, 5]
    assert [offset for offset, _ in taken(part)] == [3, 3]
    assert [one.record.offset for one in part.undecoded] == [5]
    assert part.anchor == Anchor.of(records[3])
    assert batch.between(5, 6).items == []
    assert batch.between(6, 9).anchor is None


async def test_an_empty_read_moves_nothing(handlers: Handlers) -> None:
    batch = await read(handlers, 3, [])
    assert (batch.start, batch.end, batch.items) == (3, 3, [])


async def test_other_tasks_run_while_a_batch_with_slow_validation_is_read() -> None:
    validated, seen = 0, [0]

    class Slow(Event, type="placed"):
        """An event whose own validator burns CPU."""

        order: int

        @field_validator("order")
        @classmethod
        def _burns(cls, value: int) -> int:
            nonlocal validated
            validated += 1
            time.sleep(SLICE_SECONDS)
            return value

    async def look() -> None:
        while True:
            seen.append(validated)
            await asyncio.sleep(0)

    registry = Handlers()
    registry.on(Slow, topic=TOPIC, consumer="ship")(ignore)
    async with in_background(look()):
        await read(registry, 0, [record(number) for number in range(20)])
    assert validated == 20
    assert max(after - before for before, after in pairwise(seen)) == 1


async def test_a_batch_that_takes_no_time_is_read_in_one_turn(
    handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "SLICE_SECONDS", 60.0)
    turns = 0

    async def look() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with in_background(look()):
        await asyncio.sleep(0)
        await read(handlers, 0, [record(number) for number in range(10)])
    assert turns == 1


async def test_work_that_survives_its_cancellation_is_cancelled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "_CANCEL_AGAIN_SECONDS", 0.01)
    survived = 0

    async def look() -> None:
        nonlocal survived
        while survived < 2:
            try:
                await asyncio.sleep(PATIENCE)
            except asyncio.CancelledError:  # as a library that replaces it by its own error
                survived += 1

    async with asyncio.timeout(PATIENCE), in_background(look()):
        await asyncio.sleep(0)
    assert survived == 2


async def test_a_codec_that_fails_in_an_unexpected_way_quarantines_the_record_alone(
    handlers: Handlers,
) -> None:
    class Broken(CloudEvents):
        def decode(self, record: Record, *, hash: bytes | None = None) -> Message:
            if record.offset == 1:
                raise KeyError("schema")
            return CloudEvents().decode(record, hash=hash)

    handlers.topic(TOPIC, codec=Broken())
    batch = await read(handlers, 0, [record(0), record(1), record(2)])
    assert [one.record.offset for one in batch.undecoded] == [1]
    assert isinstance(batch.undecoded[0].error, KeyError)
    assert [offset for offset, _ in taken(batch)] == [0, 0, 2, 2]
