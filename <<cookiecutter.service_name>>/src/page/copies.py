"""Edit and redrive: a copy of a dead letter with another payload, and an id of its own."""

from collections.abc import Sequence
from uuid import uuid4

import asyncpg

from operate.dead_letters import DeadLetters, Redriven
from operate.errors import Refused
from pipeline import Service
from pipeline.apply import backlog
from pipeline.apply.batch import items_of, prepare
from pipeline.apply.item import Item, Undecoded
from pipeline.errors import describe_error
from pipeline.handlers.policy import REDRIVEN, Decision
from pipeline.handlers.registry import Handlers
from pipeline.handlers.staging import CALLS
from pipeline.retry import lane_source, lanes

_ROW = """
SELECT * FROM pipeline.backlog
 WHERE key = $1 AND died_at IS NOT NULL AND discarded_at IS NULL
"""
_LONGEST_ID = 200


async def redrive_copy(
    store: DeadLetters, service: Service, id: str, value: bytes, *, operator: str, why: str
) -> Redriven:
    """Store a copy of a dead letter with this payload, in its place in the order of its key.

    The letter is discarded in the same transaction. An id stands for one payload, so the copy has
    another one: a new one in the header `ce_id`, or the payload's where the codec finds it there.
    Only the consumers of the letter handle it. Raises `Refused` if they can't, or if the copy has
    no id of its own.
    """
    connection = store.connection
    (key,) = await store.keys_of([id])
    async with connection.transaction():
        await store.limit_waiting()
        row = await connection.fetchrow(_ROW, key)
        if row is None:
            raise Refused(f"{id} is no dead letter any more")
        items = await _copies(service.handlers, row, value)
        numbers = {backlog.lane_of(one.order_key, one.handler.mode) for one in items}
        numbers.add(row["lane"])
        for number in sorted(numbers):
            await lanes.fence_lane(connection, number)
        row = await connection.fetchrow(_ROW, key)  # as it is now that nobody can change it
        if row is None:
            raise Refused(f"{id} has just left")
        new_id = items[0].message.id
        known, _ = await backlog.find(connection, items)
        if known:
            raise Refused(f"an event with the id {new_id!r} is stored already: choose another id")
        rows = [backlog.row_of(one, Decision(REDRIVEN)) for one in items]
        await backlog.add(connection, rows, service.encryption)
        replaced = f"replaced by {new_id}: {why}"
        await lanes.discard(connection, [key], operator=operator, why=replaced)
        order_keys = {row["order_key"], *(one.order_key for one in items)}
        await lanes.schedule_heads(connection, numbers, order_keys)
    keys = [one.key for one in items]
    return Redriven(keys, keys, (row["topic"], row["partition"], row["offset"]))


async def _copies(handlers: Handlers, row: asyncpg.Record, value: bytes) -> Sequence[Item]:
    """Return the copy's message for each consumer of the row. Raises `Refused` if there is none."""
    if row["topic"] == CALLS:
        raise Refused("a call has the id by which the other side knows it: redrive it as it is")
    record = lane_source.stored_record(row, stored_for=0.0)
    record = record._replace(value=value, headers=_with_new_id(record.headers))
    for error in (await prepare(handlers, [record])).values():
        raise Refused(f"the payload can't be decoded now: {describe_error(error)}")
    found = items_of(handlers, record, validates=True)
    if isinstance(found, Undecoded):
        raise Refused(f"the payload can't be decoded: {describe_error(found.error)}")
    items = [one for one in found if row["consumer"] in ("", one.consumer)]
    if not items:
        raise Refused(f"{row['consumer'] or 'the service'} has no handler for such an event")
    for one in items:
        if one.fault is not None:
            raise Refused(f"the payload is invalid: {describe_error(one.fault)}")
        if (one.message.source, one.message.id) == (row["source"], row["id"]):
            raise Refused(
                f"the copy would have the id {one.message.id!r}, which stands for the old payload:"
                " change the id in the payload; if it is not there, have the event sent again"
            )
    return items


def _with_new_id(
    headers: Sequence[tuple[str, bytes | None]],
) -> Sequence[tuple[str, bytes | None]]:
    """Return CloudEvents' headers with an id that begins with the old one; others as they are."""
    old = dict(headers)
    if "ce_specversion" not in old:
        return headers
    new = (old.get("ce_id") or b"copy")[:_LONGEST_ID] + b"~" + uuid4().hex[:12].encode()
    return [*((name, text) for name, text in headers if name != "ce_id"), ("ce_id", new)]
