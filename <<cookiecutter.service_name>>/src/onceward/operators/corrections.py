"""Corrections: messages that took effect are stored as rows of the backlog, for their correction.

A row has the order key of the consumer that is corrected, and the place of its message. So once,
order, retries and dead letters are those of every row.
"""

from collections.abc import Sequence
from datetime import UTC

import asyncpg

from onceward.apply import backlog
from onceward.apply.batch import items_of
from onceward.apply.encryption import Encryption
from onceward.apply.item import Item, Row, StoredRecord, Undecoded
from onceward.events.event import payload_of
from onceward.events.message import Record
from onceward.handlers.applied import Applied
from onceward.handlers.policy import CORRECTION, Decision
from onceward.handlers.registry import Handlers


def record_of(applied: Applied, key: bytes | None) -> StoredRecord:
    """Return the record of what is remembered of a message, with the key of the message's own."""
    headers = [
        ("ce_specversion", b"1.0"),
        ("ce_id", applied.id.encode()),
        ("ce_source", applied.source.encode()),
        ("ce_type", Applied.__event_type__.encode()),
        ("content-type", b"application/json"),
    ]
    place = applied.topic, applied.partition, applied.offset
    milliseconds = int(applied.at.astimezone(UTC).timestamp() * 1_000)
    return StoredRecord(*place, milliseconds, key, payload_of(applied), headers, stored_for=0.0)


def item_of(
    handlers: Handlers, consumer: str, record: Record, hash: bytes | None = None
) -> Item | None:
    """Return the message for a correction; None if it takes no such message.

    `hash` is that of the payload, as the marker has it. The topic's codec is prepared before, see
    `batch.prepare`.
    """
    found = items_of(handlers, record, validates=False, hash=hash, holds=False, consumer=consumer)
    if isinstance(found, Undecoded):
        return None
    return next((one for one in found if one.consumer == consumer), None)


async def hand(
    connection: asyncpg.Connection,
    items: Sequence[Item],
    longest: float,
    encryption: Encryption | None,
) -> Sequence[Row]:
    """Store messages for their corrections, in a transaction; returns those that are new.

    They are due after two transactions of `longest` seconds. A transaction that has not seen a row
    has ended by then, and a later one stores its message of the key behind it: so a correction is
    never at work on a key at the same time as the consumer that it corrects.
    """
    decision = Decision(CORRECTION, due_in=2 * longest)
    rows = [backlog.row_of(one, decision) for one in items]
    return await backlog.add(connection, rows, encryption)
