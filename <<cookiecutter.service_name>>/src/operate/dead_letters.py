"""Dead letters: messages of the backlog that a person has to decide on."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import asyncpg

from pipeline.apply.backlog import mismatch_key
from pipeline.apply.batch import items_of, prepare
from pipeline.apply.encryption import Encryption
from pipeline.apply.item import Item, Undecoded
from pipeline.events.message import headers_of, marker_key, printable
from pipeline.handlers.policy import FORGOTTEN, UNKNOWN, ProcessDied
from pipeline.handlers.registry import Handlers
from pipeline.retry import lane_source, lanes
from pipeline.service import Service
from pipeline.settings import Settings

from .dead import Entry, Outcome, Rows, Selection, Store
from .errors import Refused
from .output import content_of

TOO_OLD = "too old"

REASONS: Mapping[str, str] = {
    # Records that no handler has seen.
    "missing attribute": "have the producer send it, then discard this one",
    "invalid attribute": "have the producer send it right, then discard this one",
    "invalid envelope": "have the producer send the form that the error names, then discard it",
    "unsupported specversion": "have the producer send CloudEvents 1.0, then discard this one",
    "not CloudEvents": "declare the topic's codec by handlers.topic(…, codec=…), then redrive",
    "missing identity": "name the topic's events by something that all have, then redrive",
    "missing type": "let the topic's codec find the type in all its records, then redrive",
    "unknown schema": "register what the error names, then redrive; discard an invalid one",
    "unknown type": "deploy a handler, or leave demands_types=True out, then redrive",
    # Messages that a handler was not given.
    "invalid payload": "make the event's model take it, then redrive; or discard it",
    "data missing": "put the object back, then redrive; or have it sent by a new id, and discard",
    "data changed": "put back what the event was sent with, then redrive; or discard it",
    "data elsewhere": "let PIPELINE_CLAIM_URL be the store that the producer uses, then redrive",
    "data too large": "raise PIPELINE_CLAIM_MEMORY, then redrive; or discard it",
    "identity mismatch": "ask the producer which is right, and for a new id; then discard this one",
    "sequence conflict": "see what the producer counts by, then discard, or have it sent again",
    "too old": "find out whether it was applied; if not, redrive it by its id; if so, discard it",
    "no handler": "deploy the handler; if it is dead, redrive it then, or discard it",
    # Messages that a handler has failed on.
    "attempts used up": "mend what the error names, deploy it, then redrive",
    "waited too long": "see to what it waited for, then redrive",
    "sequence gap": "have the producer send what is missing before it; if that is lost, redrive it"
    " to go on without",
    "outcome unknown": "find out at the service outside whether it took place; if not, redrive it;"
    " if so, discard it",
    "subject forgotten": "discard it: it has personal data that nothing can decrypt any more",
    "rejected": "its handler has rejected it: mend the data or the handler, then redrive;"
    " or discard it",
    # What waits.
    "failed": "nothing: it is tried again by its schedule",
    "transaction failed": "nothing: it is tried again by its schedule",
    "takes too long": "nothing: it is tried again by its schedule",
    "locked out": "nothing: it is tried again; look for what holds the locks of its rows",
    "process died": "the last log line of the process that died says why; it is tried alone",
    "parked by its handler": "nothing: it is tried again when its handler said so",
    "follows another": "nothing: it goes on after what its key waits for",
    "undecided": "nothing: it is tried at once, by itself",
    "deferred": "nothing: it is handled in its turn",
    "redriven": "nothing: it is handled in its turn",
}
"""Every reason for which something is in the backlog, and what a person is to do about it."""

_KEYS = "SELECT key FROM pipeline.backlog WHERE key BETWEEN $1 AND $2 ORDER BY key LIMIT 2"

_ROW = "SELECT * FROM pipeline.backlog WHERE key = $1"

_MARKED = """
SELECT key, topic, partition, "offset"
  FROM pipeline.inbox
 WHERE generation = ANY (ARRAY(
           SELECT generate_series(oldest, current) FROM pipeline.inbox_generation))
   AND key = ANY ($1)
"""


@dataclass(frozen=True, slots=True)
class Redriven:
    """A row that was redriven."""

    keys: Sequence[bytes]
    """Its own, and those of the rows that it may become."""
    markers: Sequence[bytes]
    """The keys of its message's inbox markers, at each of its consumers."""
    place: tuple[str, int, int]


class DeadLetters(Store):
    """Messages of the backlog. A chunk holds a lane, so that its worker settles nothing."""

    name = "dead letter"
    command = "dead"
    reasons = REASONS
    outcomes = ("waiting", "dead", "applied", "duplicate", "gone")
    hint = "see `service dead list --waiting`, and whether the service runs."
    listed = ("id", "since", "attempts", "reason", "consumer", "type", "topic", "offset", "key")

    source = """(
SELECT *, key AS row_key, lane AS lock, received_at AS waiting_since, reason AS why,
       id AS event_id
  FROM pipeline.backlog) AS letter"""
    key_type = "bytea"
    entry = """left(encode(key, 'hex'), 16) AS id, reason, error, attempts, consumer, type, source,
        event_id, topic, partition, "offset", record_key AS key, received_at, due_at, died_at,
        discarded_at, holds"""
    detail = """timestamp, waited, encode(hash, 'hex') AS hash, traceparent, traceback,
        encode(remembered_hash, 'hex') AS remembered_hash, discarded_by, discarded_why, headers,
        value"""
    order = 'order_key, sequence, partition, "offset"'
    chunk = 'key, order_key, lane, consumer, source, id, topic, partition, "offset"'

    def __init__(
        self,
        connection: asyncpg.Connection,
        handlers: Handlers,
        patience: float,
        encryption: Encryption | None = None,
    ) -> None:
        super().__init__(connection, patience)
        self._handlers = handlers
        self._encryption = encryption

    @classmethod
    def of(cls, connection: asyncpg.Connection, service: Service, settings: Settings) -> Self:
        """Return the store of a service."""
        return cls(
            connection, service.handlers, settings.backlog_lease, encryption=service.encryption
        )

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
        """Return the selection without what would wait for ever, and what may have been applied.

        The first are messages of consumers that the service does not have. What is too old, and a
        call that may have taken place, is redriven only if it is named by its id or that reason.
        What can't be decrypted any more never is.
        """
        known = ["", *self._handlers.consumers]
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
        await lanes.fence_lane(self.connection, number)

    async def _redrive(self, rows: Rows) -> Sequence[Redriven]:
        redriven = [await self._redriven(row) for row in rows]
        await lanes.redrive(self.connection, [row["key"] for row in rows])
        await self._schedule_heads(rows)
        return redriven

    async def _discard(self, rows: Rows, *, operator: str, why: str) -> Rows:
        keys = [row["key"] for row in rows]
        await lanes.discard(self.connection, keys, operator=operator, why=why)
        await self._schedule_heads(rows)
        return rows

    async def _schedule_heads(self, rows: Rows) -> None:
        numbers, order_keys = {row["lane"] for row in rows}, {row["order_key"] for row in rows}
        await lanes.schedule_heads(self.connection, numbers, order_keys)

    async def _redriven(self, row: asyncpg.Record) -> Redriven:
        key, place = row["key"], _place(row)
        if row["consumer"]:
            return Redriven([key], [marker_key(row["consumer"], row["source"], row["id"])], place)
        # A record that no handler has seen becomes a message to each of its handlers.
        stored = await self.connection.fetchrow(_ROW, key)
        if self._encryption is not None:
            (stored,) = await self._encryption.decrypt(self.connection, [stored], "value")
        record = lane_source.stored_record(stored, stored_for=0.0)
        # Without them its markers are not known, and it counts as waiting or gone.
        items: Sequence[Item] = ()
        has_killed = (stored["error"] or "").startswith(ProcessDied.__name__)
        if not has_killed and not await prepare(self._handlers, [record]):
            found = items_of(self._handlers, record, validates=False)
            items = () if isinstance(found, Undecoded) else found
        markers = [item.key for item in items]
        return Redriven([key, *markers, *map(mismatch_key, items)], markers, place)

    async def _settle(
        self, some: Sequence[Redriven]
    ) -> list[tuple[Outcome, asyncpg.Record | None]]:
        keys = list({key for one in some for key in (*one.keys, *one.markers)})
        stored = await self._stored(keys)
        # Markers are read later: a row that leaves the backlog in between is found by its marker.
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
