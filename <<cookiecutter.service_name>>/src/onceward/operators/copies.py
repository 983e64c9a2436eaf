"""Edit and redrive: a copy of a dead letter with a new payload and a new id."""

from collections.abc import Sequence
from typing import NamedTuple
from uuid import uuid4

import asyncpg

from onceward.apply import backlog
from onceward.apply.batch import items_of, prepare
from onceward.apply.encryption import Encryption
from onceward.apply.item import Item, Undecoded
from onceward.errors import Refused, describe_error
from onceward.handlers.policy import REDRIVEN, Decision, ProcessDied
from onceward.handlers.registry import Handlers
from onceward.handlers.staging import CALLS
from onceward.redaction import HIDDEN
from onceward.retry import lane_source

from . import dead_rows, statements

_LONGEST_ID = 200


class Copy(NamedTuple):
    """What takes the place of a dead letter."""

    value: bytes
    """Its payload, in the form of the topic."""
    operator: str
    """Who replaces the letter, and why."""
    why: str


async def redrive(
    connection: asyncpg.Connection,
    handlers: Handlers,
    encryption: Encryption | None,
    key: bytes,
    copy: Copy,
) -> Sequence[Item]:
    """Store a copy of a dead letter, at its place in its key's order, and discard the letter.

    An id stands for one payload, so the copy's differs: a new value in the header `ce_id`, or the
    payload's own where the codec reads it there. Only the letter's consumers handle the copy;
    returns its message for each. Call `lock_lane` before, in the same transaction. Raises
    `Refused` if it can't be handled, or if its id is the letter's or one that is stored already.
    """
    row = await connection.fetchrow(statements.READ_ROW, key)
    items = await _copies(handlers, row, copy.value)
    new_id = items[0].message.id
    if (await backlog.find(connection, items)).known:
        raise Refused(f"an event with the id {new_id!r} is stored already: choose another id")
    rows = [backlog.row_of(one, Decision(REDRIVEN)) for one in items]
    # As rows of a consume transaction: due, whatever their lanes do.
    await backlog.add(connection, rows, encryption)
    why = f"replaced by {new_id}: {copy.why}"
    await dead_rows.discard(connection, [row], operator=copy.operator, why=why)
    return items


async def messages_of(
    connection: asyncpg.Connection, handlers: Handlers, encryption: Encryption | None, key: bytes
) -> Sequence[Item]:
    """Return the message of a row as it is decoded now, for each of its consumers.

    Returns none if it can't be decoded, or if a process may have died of it.
    """
    row = await connection.fetchrow(statements.READ_ROW, key)
    if encryption is not None:
        (row,) = await encryption.decrypt(connection, [row], "value")
    record = lane_source.stored_record(row, stored_for=0.0)
    has_killed = (row["error"] or "").startswith(ProcessDied.__name__)
    if has_killed or await prepare(handlers, [record]):
        return []
    found = items_of(handlers, record, validates=False)
    if isinstance(found, Undecoded):
        return []
    return [one for one in found if row["consumer"] in ("", one.consumer)]


async def _copies(handlers: Handlers, row: asyncpg.Record, value: bytes) -> Sequence[Item]:
    """Return the copy's message for each consumer of the row. Raises `Refused` if there is none."""
    if row["topic"] == CALLS:
        raise Refused("the called system deduplicates a call by its id: redrive it unchanged")
    if HIDDEN.encode() in value:
        raise Refused("secrets of the payload are hidden: have the event sent again instead")
    record = lane_source.stored_record(row, stored_for=0.0)
    record = record._replace(value=value, headers=_with_new_id(record.headers))
    for error in (await prepare(handlers, [record])).values():
        raise Refused(f"the payload can't be decoded at present: {describe_error(error)}")
    consumer = row["consumer"]
    found = items_of(handlers, record, validates=True, holds=False, consumer=consumer)
    if isinstance(found, Undecoded):
        raise Refused(f"the payload can't be decoded: {describe_error(found.error)}")
    items = [one for one in found if consumer in ("", one.consumer)]
    if not items:
        raise Refused(f"{consumer or 'the service'} has no handler for this event")
    for one in items:
        if one.fault is not None:
            raise Refused(f"the payload is invalid: {describe_error(one.fault)}")
        if (one.message.source, one.message.id) == (row["source"], row["id"]):
            raise Refused(
                f"the copy has the letter's id {one.message.id!r}, which stands for the old"
                " payload: change the id in the payload, or, if it has none, have the event sent"
                " again"
            )
    return items


def _with_new_id(
    headers: Sequence[tuple[str, bytes | None]],
) -> Sequence[tuple[str, bytes | None]]:
    """Return CloudEvents' headers with a new id that begins with the old one; others unchanged."""
    old = dict(headers)
    if "ce_specversion" not in old:
        return headers
    new = (old.get("ce_id") or b"copy")[:_LONGEST_ID] + b"~" + uuid4().hex[:12].encode()
    return [*((name, text) for name, text in headers if name != "ce_id"), ("ce_id", new)]
