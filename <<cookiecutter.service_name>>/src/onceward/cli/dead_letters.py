"""Dead letters: messages of the backlog that need a person's decision."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import asyncpg

from onceward.apply.backlog import mismatch_key
from onceward.apply.statements import KEPT
from onceward.events.message import headers_of, marker_key, printable
from onceward.handlers.policy import FORGOTTEN, UNKNOWN
from onceward.operators import copies, dead_rows
from onceward.operators.copies import Copy

from .dead import Entry, Outcome, Rows, Selection, Store
from .errors import Refused
from .output import content_of

TOO_OLD = "too old"

REASONS: Mapping[str, str] = {
    # Records that no handler has seen.
    "missing attribute": "let the producer send it again with the attribute; discard this one",
    "invalid attribute": "let the producer send it again with a valid one; discard this one",
    "invalid envelope": "let the producer send it again as the error says; discard this one",
    "unsupported specversion": "let the producer send it as CloudEvents 1.0; discard this one",
    "not CloudEvents": "if all records of the topic have another format, declare it by"
    " handlers.topic(…, codec=…), then redrive; else discard it",
    "missing identity": "declare one that all of its events have, then redrive; or discard it",
    "missing type": "declare a codec that finds all types, then redrive; or discard it",
    "unknown schema": "register the schema that the error names, then redrive; or discard it",
    "unknown type": "deploy a handler, or remove demands_types=True, then redrive; or discard it",
    # Messages that a handler was not given.
    "invalid payload": "let the event's model accept it, then redrive; or have it sent again with"
    " another id, and discard it",
    "data missing": "restore the object, then redrive; or discard it, and let it be sent anew",
    "data changed": "restore the object as it was sent, then redrive; or discard it",
    "data elsewhere": "set PIPELINE_CLAIM_URL to the producer's store, then redrive; or discard it",
    "data too large": "raise PIPELINE_CLAIM_MEMORY_BYTES, then redrive; or discard it",
    "identity mismatch": "find out which payload is valid; if this one is, let the producer send it"
    " with a new id; discard this one",
    "sequence conflict": "find out how the producer counts; let it be sent again, or discard it",
    "too old": "find out whether it was applied; if not, redrive it by its id; if so, discard it",
    "no handler": "deploy the handler; then redrive it if it is dead; or discard it",
    # Messages that a handler has failed on.
    "attempts used up": "correct what the error names, deploy it, then redrive; or discard it",
    "waited too long": "correct what it waited for, then redrive; or discard it",
    "sequence gap": "let the producer send what is missing before it; if that is lost, redrive it"
    " to continue without",
    "outcome unknown": "find out from the called service whether the call took effect; if not,"
    " redrive it; if so, discard it",
    "subject forgotten": "discard it: it has personal data that nothing can decrypt any more",
    "rejected": "correct the data or the handler, then redrive; or discard it",
    # What waits.
    "failed": "nothing: it is tried again on schedule",
    "transaction failed": "nothing: it is tried again on schedule",
    "takes too long": "nothing: it is tried again on schedule",
    "locked out": "nothing: it is tried again; find out what holds the locks of its rows",
    "process died": "see the last log line of the process that died; it is tried again alone",
    "parked by its handler": "nothing: it is tried again at the time that its handler has set",
    "follows another": "redrive or discard the dead letter of its key, if there is one: it is"
    " handled after the message that its key waits for",
    "undecided": "nothing: it is tried at once, alone",
    "failed in a batch": "nothing: it is tried at once, alone",
    "connection lost": "nothing: it is tried again; the third loss counts as an attempt",
    "deferred": "nothing: it is handled in its turn",
    "redriven": "nothing: it is handled in its turn",
    "paused": "`service resume key …` lets its key go on",
    "correction": "nothing: it is handled in its turn",
}
"""What a person should do about a message, by the reason for which it is in the backlog."""

_KEYS = "SELECT key FROM pipeline.backlog WHERE key BETWEEN $1 AND $2 ORDER BY key LIMIT 2"

_MARKED = f"""
SELECT key, topic, partition, "offset"
  FROM pipeline.inbox
 WHERE {KEPT}
   AND key = ANY ($1)
"""


@dataclass(frozen=True, slots=True)
class Redriven:
    """A row that was redriven."""

    keys: Sequence[bytes]
    """Its own, and those of the rows that it may become."""
    markers: Sequence[bytes]
    """The keys of its message's inbox markers, one for each consumer."""
    place: tuple[str, int, int]


class DeadLetters(Store):
    """Messages of the backlog. A chunk locks a lane, so that its worker changes no row."""

    name = "dead letter"
    command = "dead"
    reasons = REASONS
    outcomes = ("waiting", "dead", "applied", "duplicate", "gone")
    hint = "see `service dead list --waiting`, and whether the service runs."
    listed = (
        *("id", "since", "attempts", "reason", "consumer"),
        *("type", "topic", "offset", "holds", "key"),
    )

    source = """(
SELECT *, key AS row_key, lane AS lock, received_at AS waiting_since, reason AS why,
       id AS event_id, value AS payload
  FROM pipeline.backlog) AS letter"""
    key_type = "bytea"
    lowest = b""
    entry = """left(encode(key, 'hex'), 16) AS id, reason, error, attempts, consumer, type, source,
        event_id, topic, partition, "offset", record_key AS key, received_at, due_at, died_at,
        discarded_at, release, holds, CASE WHEN holds THEN (
            SELECT count(*) FROM (
                SELECT FROM pipeline.backlog AS b
                 WHERE b.order_key = letter.order_key AND b.died_at IS NULL
                   AND (b.sequence, b.partition, b."offset")
                       > (letter.sequence, letter.partition, letter."offset")
                 LIMIT 1001) AS few) END AS held"""
    detail = """timestamp, round(waited) AS waited, deaths, losses, encode(hash, 'hex') AS hash,
        traceparent, traceback, encode(remembered_hash, 'hex') AS remembered_hash, discarded_by,
        discarded_why, headers, value"""
    order = 'order_key, sequence, partition, "offset"'
    chunk = 'key, order_key, lane, consumer, source, id, topic, partition, "offset"'

    async def keys_of(self, ids: Sequence[str]) -> list[bytes]:
        """Return the keys that begin with these hex digits. Raises `Refused`."""
        keys = []
        for id in ids:
            if not re.fullmatch("[0-9a-fA-F]{8,32}", id):
                raise Refused(f"{id!r} is not the id of a dead letter: 8 to 32 hex digits")
            first, last = (bytes.fromhex(id.ljust(32, digit)) for digit in "0f")
            found = await self.connection.fetch(_KEYS, first, last)
            if len(found) != 1:
                how_many = "more than one row has" if found else "no row has"
                raise Refused(f"{how_many} an id that begins with {id}: see `service dead list`")
            keys.append(found[0]["key"])
        return keys

    def redrivable(self, selection: Selection) -> Selection:
        """Return the selection without what must not be redriven.

        Messages of consumers that the service does not have would wait for ever. What is too old,
        or a call with an unknown outcome, may have taken effect: it is redriven only if it is
        selected by id or by that reason. What can't be decrypted any more is never redriven.
        """
        known = ["", *self._service.handlers.consumers]
        chosen = [one for one in known if selection.consumers is None or one in selection.consumers]
        named = (TOO_OLD, UNKNOWN) if selection.keys is not None else selection.reasons or ()
        excluded = [reason for reason in (TOO_OLD, UNKNOWN) if reason not in named]
        return replace(selection, consumers=chosen, except_reasons=[*excluded, FORGOTTEN])

    def _read(self, row: asyncpg.Record) -> Entry:
        entry = super()._read(row)
        if "headers" in entry:
            headers = headers_of(entry["headers"])
            entry["headers"] = [(printable(name), content_of(value)) for name, value in headers]
        return entry

    async def _lock(self, number: int) -> None:
        await dead_rows.lock_lane(self.connection, number)

    async def _redrive(self, rows: Rows, copy: Copy | None) -> Sequence[Redriven]:
        if copy is not None:
            return [await self._replaced(row, copy) for row in rows]
        redriven = [await self._redriven(row) for row in rows]
        await dead_rows.redrive(self.connection, rows)
        return redriven

    async def _replaced(self, row: asyncpg.Record, copy: Copy) -> Redriven:
        handlers, encryption = self._service.handlers, self._service.encryption
        items = await copies.redrive(self.connection, handlers, encryption, row["key"], copy)
        keys = [one.key for one in items]
        return Redriven(keys, keys, _place(row))

    async def _discard(self, rows: Rows, *, operator: str, why: str) -> Rows:
        await dead_rows.discard(self.connection, rows, operator=operator, why=why)
        return rows

    async def _redriven(self, row: asyncpg.Record) -> Redriven:
        key, place = row["key"], _place(row)
        if row["consumer"] and row["source"] is not None:
            return Redriven([key], [marker_key(row["consumer"], row["source"], row["id"])], place)
        # What belongs to no consumer becomes a message to each handler.
        handlers, encryption = self._service.handlers, self._service.encryption
        items = await copies.messages_of(self.connection, handlers, encryption, key)
        markers = [item.key for item in items]
        return Redriven([key, *markers, *map(mismatch_key, items)], markers, place)

    async def _settle(
        self, some: Sequence[Redriven]
    ) -> list[tuple[Outcome, asyncpg.Record | None]]:
        keys = list({key for one in some for key in (*one.keys, *one.markers)})
        stored = await self._stored(keys)
        # Markers are read after the backlog, so that a row that leaves it in between is found.
        marked = {row["key"]: _place(row) for row in await self.connection.fetch(_MARKED, keys)}
        return [_outcome(one, stored, marked) for one in some]


def _outcome(
    one: Redriven,
    stored: Mapping[bytes, asyncpg.Record],
    marked: Mapping[bytes, tuple[str, int, int]],
) -> tuple[Outcome, asyncpg.Record | None]:
    rows = [row for key in one.keys if (row := stored.get(key)) and _place(row) == one.place]
    if rows:
        return ("dead", rows[0]) if all(row["died_at"] for row in rows) else ("waiting", None)
    places = [marked[key] for key in one.markers if key in marked]
    if one.place in places:
        return "applied", None
    return ("duplicate" if places else "gone"), None


def _place(row: asyncpg.Record) -> tuple[str, int, int]:
    return row["topic"], row["partition"], row["offset"]
