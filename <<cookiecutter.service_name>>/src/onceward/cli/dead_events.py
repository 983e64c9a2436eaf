"""Dead events: events that Kafka has rejected, and those that wait for their topic."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import asyncpg

from onceward.handlers.policy import FORGOTTEN
from onceward.operators import rejected
from onceward.operators.copies import Copy
from onceward.service import Service
from onceward.settings import Settings

from .dead import Outcome, Rows, Selection, Store
from .errors import Refused

REASONS: Mapping[str, str] = {
    "topic missing": "create the topic, or run `service topics create`: then it is published;"
    " or discard it",
    "topic not allowed": "allow the service's user to Describe and Write the topic: then it is"
    " published; or discard it",
    "topic rejects many": "nothing: it is tried again; see the dead events of its topic",
    "topic refuses": "correct what the error names, in the topic's settings or replicas: then it is"
    " published; or discard it",
    "topic not writable": "discard it: the topic is the brokers' own",
    "too large": "raise the topic's max.message.bytes above its size, then redrive; or discard it",
    "not valid": "find out what the topic requires (a compacted one: a key), then redrive; or"
    " discard it",
    "subject forgotten": "discard it: it has personal data that nothing can decrypt any more",
    "follows another": "nothing: it is published after those that wait for its topic",
    "redriven": "nothing: it is tried again as soon as a relay reads it",
}
"""What a person should do about an event, by the reason for which it is rejected or waits."""

_LARGEST_ID = 2**63 - 1


class DeadEvents(Store):
    """Events that Kafka has rejected. An id is the event's number in the outbox.

    A chunk locks the cursor of a shard, so that its relay stores no rejected event meanwhile.
    """

    name = "dead event"
    command = "dead events"
    reasons = REASONS
    outcomes = ("waiting", "dead", "sent")
    hint = (
        "the relay notices within a third of PIPELINE_RELAY_LEASE; see"
        " `service dead events list --waiting`, and whether a relay runs."
    )
    listed = ("id", "since", "reason", "type", "event_id", "topic", "key")

    source = """(
SELECT *, id AS row_key, shard AS lock, parked_at AS waiting_since, NULL::text AS consumer,
       key AS record_key, COALESCE(reason, 'follows another') AS why
  FROM pipeline.outbox_rejected) AS event"""
    key_type = "bigint"
    lowest = -1
    entry = """id::text, why AS reason, error, type, source,
        event_id, topic, key, COALESCE(datalength, octet_length(payload)) AS size, created_at,
        parked_at, died_at, discarded_at, release"""
    detail = """subject, sequence, content_type, traceparent, discarded_by, discarded_why, dataref,
        payload"""
    chunk = "id"
    order = "id"

    def __init__(
        self, connection: asyncpg.Connection, service: Service, settings: Settings
    ) -> None:
        """A relay that waits for the lock of a chunk keeps two thirds of its lease."""
        super().__init__(connection, service, settings)
        self._patience = settings.relay_lease / 3

    async def keys_of(self, ids: Sequence[str]) -> list[int]:
        """Return the numbers of events. Raises `Refused`."""
        for id in ids:
            if not (re.fullmatch("[0-9]{1,19}", id) and int(id) <= _LARGEST_ID):
                raise Refused(f"{id[:40]!r} is not the number of an event in the outbox")
        return [int(id) for id in ids]

    def redrivable(self, selection: Selection) -> Selection:
        """Return the selection without events that can't be decrypted any more."""
        return replace(selection, except_reasons=[FORGOTTEN])

    async def _lock(self, number: int) -> None:
        await rejected.hold_shard(self.connection, number)

    async def _redrive(self, rows: Rows, copy: Copy | None) -> Sequence[int]:
        ids = [row["id"] for row in rows]
        await rejected.redrive(self.connection, ids)
        return ids

    async def _discard(self, rows: Rows, *, operator: str, why: str) -> Rows:
        ids = [row["id"] for row in rows]
        await rejected.discard(self.connection, ids, operator=operator, why=why)
        return rows

    async def _settle(self, some: Sequence[int]) -> list[tuple[Outcome, asyncpg.Record | None]]:
        stored = await self._stored(some)
        rows = [stored.get(id) for id in some]
        return [
            ("sent" if row is None else "dead" if row["died_at"] else "waiting", row)
            for row in rows
        ]
