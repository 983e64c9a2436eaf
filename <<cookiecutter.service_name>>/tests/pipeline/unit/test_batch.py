"""Decoding a batch: what is taken, what is skipped, and where it is cut."""

import json
from collections.abc import Sequence

import pytest
from aiokafka import ConsumerRecord
from pydantic import ValidationError, field_validator

from pipeline import Event, Handlers, PayloadFields, Plain, Tombstone, Transaction
from pipeline.batch import Batch, read
from pipeline.message import Reason, Undecodable

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
    return [(item.marker.message.offset, item.handler.consumer) for item in batch.items]


def test_a_record_becomes_an_item_of_each_of_its_consumers_in_the_order_of_registration(
    handlers: Handlers,
) -> None:
    batch = read(handlers, TOPIC, 5, [record(5), record(6)])
    assert taken(batch) == [(5, "ship"), (5, "bill"), (6, "ship"), (6, "bill")]
    assert (batch.start, batch.end, batch.skipped, batch.stuck) == (5, 7, [], None)
    assert batch.items[0].event == Placed(order=1)
    assert len({item.marker.key for item in batch.items}) == 4


def test_the_end_is_behind_the_last_record_whatever_gaps_there_are(handlers: Handlers) -> None:
    """Trap 13."""
    batch = read(handlers, TOPIC, 5, [record(7), record(20)])
    assert (batch.start, batch.end) == (5, 21)


def test_types_that_nobody_takes_and_tombstones_are_skipped_and_the_end_passes_them(
    handlers: Handlers,
) -> None:
    records = [record(0, type="other", value=b"no JSON"), record(1), record(2, value=None)]
    batch = read(handlers, TOPIC, 0, records)
    assert [offset for offset, _ in taken(batch)] == [1, 1]
    assert (batch.skipped, batch.end, batch.stuck) == ([0, 2], 3, None)


def test_a_tombstone_without_headers_is_skipped_where_nobody_asks_for_it(
    handlers: Handlers,
) -> None:
    batch = read(handlers, TOPIC, 0, [record(0, value=None, type=None)])
    assert (batch.skipped, batch.end, batch.stuck) == ([0], 1, None)


def test_a_tombstone_is_an_event_with_the_records_key_where_somebody_asks_for_it(
    handlers: Handlers,
) -> None:
    handlers.on(Tombstone, topic=TOPIC, consumer="forget")(ignore)
    batch = read(handlers, TOPIC, 0, [record(0, value=None, key=b"a\xff")])
    assert taken(batch) == [(0, "forget")]
    assert batch.items[0].event == Tombstone(key="a\\xff")
    (item,) = read(handlers, TOPIC, 0, [record(0, value=None, key=None)]).items
    assert item.event == Tombstone(key="")


def test_a_tombstone_without_headers_is_named_by_its_place(handlers: Handlers) -> None:
    handlers.on(Tombstone, topic=TOPIC, consumer="forget")(ignore)
    batch = read(handlers, TOPIC, 7, [record(7, value=None, type=None, key=b"a")])
    assert batch.stuck is None
    assert batch.items[0].marker.message.id == "0-7"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (record(2, type=None), Reason.NOT_CLOUDEVENTS),
        (record(2, value=b"{"), "invalid payload"),
        (record(2, value=b'{"order": "x"}'), "invalid payload"),
        (record(2, value=b"\xff"), "invalid payload"),
        (record(2, value=b'{"order": 2}', type="fragile"), "invalid payload"),
    ],
    ids=["no headers", "no JSON", "a wrong type", "no UTF-8", "a validator that breaks"],
)
def test_the_batch_is_cut_before_the_record_that_can_not_be_read(
    handlers: Handlers, bad: ConsumerRecord[bytes, bytes], reason: str
) -> None:
    """Trap 14."""
    batch = read(handlers, TOPIC, 0, [record(0), record(1, type="other"), bad, record(3)])
    assert [offset for offset, _ in taken(batch)] == [0, 0]
    assert (batch.end, batch.skipped) == (2, [1])
    assert batch.stuck is not None
    assert (batch.stuck.offset, batch.stuck.reason) == (2, reason)


def test_a_batch_may_begin_with_what_can_not_be_read(handlers: Handlers) -> None:
    batch = read(handlers, TOPIC, 4, [record(6, type=None), record(7)])
    assert (batch.start, batch.items, batch.skipped) == (4, [], [])
    assert batch.end == 6
    assert isinstance(batch.stuck and batch.stuck.error, Undecodable)


def test_the_reason_of_an_invalid_payload_names_the_field_and_hides_its_value(
    handlers: Handlers,
) -> None:
    batch = read(handlers, TOPIC, 0, [record(0, value=b'{"order": "secret"}')])
    assert batch.stuck is not None
    assert isinstance(batch.stuck.error, ValidationError)
    assert "order" in str(batch.stuck)
    assert "secret" not in str(batch.stuck)


def test_a_plain_topic_is_read_as_it_was_told(handlers: Handlers) -> None:
    handlers.plain(TOPIC, Plain("placed", PayloadFields("order")))
    same = [record(n, value=json.dumps({"order": 1}).encode(), type=None) for n in (0, 1)]
    batch = read(handlers, TOPIC, 0, same)
    assert taken(batch) == [(0, "ship"), (0, "bill"), (1, "ship"), (1, "bill")]
    assert len({item.marker.key for item in batch.items}) == 2


def test_a_part_has_the_records_between_its_ends_and_is_not_stuck(handlers: Handlers) -> None:
    records = [record(0), record(2, type="other"), record(3), record(9), record(10, type=None)]
    batch = read(handlers, TOPIC, 0, records)
    part = batch.between(1, 9)
    assert [offset for offset, _ in taken(part)] == [3, 3]
    assert (part.start, part.end, part.skipped, part.stuck) == (1, 9, [2], None)


def test_an_empty_read_moves_nothing(handlers: Handlers) -> None:
    batch = read(handlers, TOPIC, 3, [])
    assert (batch.start, batch.end, batch.items) == (3, 3, [])
