"""The calls of handlers in a transaction."""

import asyncio
import json
import logging
from typing import Any, cast

import pytest
from aiokafka import ConsumerRecord

from onceward.apply.attempt import Attempt, Findings
from onceward.apply.batch import read
from onceward.apply.calls import call_handlers
from onceward.apply.failures import NeedsOwnSession
from onceward.apply.outcome import BatchOutcome
from onceward.events.event import Event
from onceward.handlers.catalog import Catalog
from onceward.handlers.registry import Handlers
from onceward.handlers.staging import Outbox
from onceward.handlers.transaction import Transaction
from onceward.observe import logs
from onceward.observe.traces import ProcessSpans


class Placed(Event, type="placed", topic="orders"):
    """An order was placed."""

    order: int


def record(key: bytes = b"1") -> ConsumerRecord[bytes, bytes]:
    names = {"specversion": "1.0", "id": "1", "source": "/shop", "type": "placed"}
    headers = [(f"ce_{name}", value.encode()) for name, value in names.items()]
    headers.append(("content-type", b"application/json"))
    value = b'{"order": 1}'
    return ConsumerRecord("orders", 0, 0, 0, 0, key, value, None, 1, len(value), tuple(headers))


async def call(handlers: Handlers) -> None:
    attempt = Attempt(
        connection=cast(Any, None),
        driver=cast(Any, None),
        outbox=Outbox("/test", 1_000),
        spans=ProcessSpans("group"),
        own=(),
        limits="",
        time_limit=60.0,
        findings=Findings(),
        handlers=handlers,
        catalog=Catalog(),
        claims=None,
        encryption=None,
    )
    try:
        items = (await read(handlers, 0, [record()])).items
        await call_handlers(items, attempt, BatchOutcome())
    finally:
        attempt.deadline.close()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_cancellation_is_not_replaced_by_the_need_for_a_session(is_cancelled: bool) -> None:
    handlers = Handlers()
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    @handlers.on(Placed, topic="orders", consumer="ship")
    async def ship(event: Placed, tx: Transaction) -> None:
        try:
            await tx.session.flush()
        finally:
            has_begun.set()
            await may_end.wait()

    task = asyncio.create_task(call(handlers))
    await has_begun.wait()
    if is_cancelled:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        may_end.set()
        with pytest.raises(NeedsOwnSession, match="ship"):
            await task


async def test_the_log_line_of_a_message_has_a_bounded_length(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handlers = Handlers()

    @handlers.on(Placed, topic="orders", consumer="ship")
    async def ship(event: Placed, tx: Transaction) -> None:
        """Do nothing."""

    (item,) = (await read(handlers, 0, [record(100_000 * b"k")])).items
    assert item.name == "ship: placed '1'"
    message = item.message._replace(id=100_000 * "i", type=100_000 * "t")
    with caplog.at_level(logging.DEBUG, "onceward.apply.outcome"):
        BatchOutcome(applied=[item._replace(message=message)]).report("group")
    (written,) = caplog.records
    text = logs.JsonLines().format(written)
    line = json.loads(text)
    assert len(text) < 16_384
    assert line["message"].startswith("ship: ttt")
    assert line["message"].endswith("iii': applied")
    assert [line[name][0] for name in ("key", "message_id", "message_type")] == ["k", "i", "t"]
