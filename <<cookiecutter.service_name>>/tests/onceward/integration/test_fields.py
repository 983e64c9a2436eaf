"""What is handed on by place arrives under its own name: most neighbours are of one type."""

from dataclasses import replace

import asyncpg

from onceward.apply import backlog, inbox
from onceward.apply.item import Item, Row, StoredRecord
from onceward.events.message import Message
from onceward.handlers.policy import Decision, History
from onceward.handlers.registry import Handler

from .applier import Applier
from .bank import Bank

MESSAGE = Message(
    topic="topic",
    partition=1,
    offset=2,
    timestamp=3,
    key=b"record_key",
    source="source",
    id="id",
    type="type",
    time=None,
    subject="subject",
    sequence="sequence",
    dataschema="dataschema",
    content_type="content_type",
    data=b"value",
    traceparent="traceparent",
    tracestate="tracestate",
    baggage="baggage",
    hash=b"hash",
)


def of_their_own_names(row: asyncpg.Record, *names: str) -> dict[str, object]:
    """Return what the columns would hold that are named so, if each had its own name."""
    return {name: name if isinstance(row[name], str) else name.encode() for name in names}


async def test_a_marker(ledger: tuple[Bank, Applier], db: asyncpg.Connection) -> None:
    bank, _ = ledger
    (handler,) = bank.handlers.of(bank.deposits, "deposited")
    record = StoredRecord("topic", 1, 2, 3, b"record_key", b"value", [], 0.0)
    item = Item(replace(handler, consumer="consumer"), b"key", MESSAGE, record)
    await inbox._insert(db, 1, [item])
    row = await db.fetchrow("SELECT * FROM pipeline.inbox")
    texts = ("key", "hash", "consumer", "source", "id", "type", "topic", "traceparent")
    assert {name: row[name] for name in texts} == of_their_own_names(row, *texts)
    assert (row["generation"], row["partition"], row["offset"]) == (1, 1, 2)


async def test_a_row_of_the_backlog(ledger: tuple[Bank, Applier], db: asyncpg.Connection) -> None:
    bank, _ = ledger
    handler: Handler
    (handler,) = bank.handlers.of(bank.deposits, "deposited")
    record = StoredRecord("topic", 1, 2, 3, b"record_key", b"value", [("headers", b"5")], 0.0)
    decision = Decision("reason", History(6, 7.5), None, True, "error", "traceback")
    item = Item(handler, b"key", MESSAGE, record)
    row = Row(b"key", "consumer", record, decision, item, b"remembered_hash")
    await backlog.add(db, [row], None)
    row = await db.fetchrow("SELECT * FROM pipeline.backlog")
    texts = (
        *("key", "consumer", "topic", "record_key", "value", "source", "id", "type", "hash"),
        *("remembered_hash", "traceparent", "reason", "error", "traceback"),
    )
    assert {name: row[name] for name in texts} == of_their_own_names(row, *texts)
    numbers = ("partition", "offset", "timestamp", "attempts", "waited", "holds", "due_at")
    assert [row[name] for name in numbers] == [1, 2, 3, 6, 7.5, True, None]
    assert row["headers"] == '[["headers","5"]]'
    assert row["died_at"] is not None
    assert row["order_key"] == item.order_key
    assert row["lane"] == backlog.lane_of(row["order_key"], "immediate")
