"""Due rows of a backlog lane, as a source of the consume transaction."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import ClassVar, Self

import asyncpg

from onceward.apply import backlog
from onceward.apply.backlog import Stored
from onceward.apply.batch import items_of, prepare, validated
from onceward.apply.breaker import FailedMessage
from onceward.apply.encryption import Encryption, Rows
from onceward.apply.item import Item, Known, Row, StoredRecord, Undecoded
from onceward.apply.outcome import BatchOutcome
from onceward.apply.positions import Generations
from onceward.apply.source import without_decision
from onceward.apply.statements import PAUSES
from onceward.apply.throttles import Throttles
from onceward.errors import OncewardError
from onceward.events.message import headers_of
from onceward.events.payload import HASH_VERSION
from onceward.handlers.policy import (
    DEFERRED,
    FORGOTTEN,
    UNKNOWN,
    Decision,
    History,
    Policy,
    assumed,
    dead,
    unchanged,
)
from onceward.handlers.registry import Handler, Handlers
from onceward.observe import metrics
from onceward.servers.tasks import TimeSlice

from . import lanes, statements
from .lanes import Lease

_RUN_BYTES = 16 * 2**20
"""Approximate limit of the memory for the rows of one transaction."""


class NoHandler(OncewardError):
    """No registered handler of the consumer takes the message."""


@dataclass(frozen=True)
class LaneSource:
    """Rows of a lane, beginning with the first one of each key, in its order."""

    lease: Lease
    items: Sequence[Item]
    """The messages, in order."""
    keys: Sequence[bytes]
    """Order keys of all rows read, also of those that are not due."""
    unhandleable: Sequence[Row] = ()
    """Rows that no handler of this process takes, with the decision about them."""
    redecoded: Mapping[bytes, bytes] = field(default_factory=dict)
    """Rows of records that could not be decoded before and now can, by the marker key of the last
    message of each. If there are any, `items` are their messages, which get rows of their own."""
    skipped: Sequence[bytes] = ()
    """Rows of records that could not be decoded before and now can, and that their consumer does
    not take."""
    assumed: Mapping[bytes, Decision] = field(default_factory=dict)
    """Decisions to store without a call of a handler, by marker key."""
    compares: bool = False
    """Whether rows are left out that another transaction has decided since they were read."""
    ended: Sequence[bytes] = ()
    """Rows at the heads of keys whose pause is over."""
    throttles: Throttles | None = None
    """What people have paused, unless its handlers are to be called whatever is."""
    has_lease: ClassVar[bool] = True

    @classmethod
    def of(
        cls, lease: Lease, items: Sequence[Item], assumed: Mapping[bytes, Decision] = {}
    ) -> Self:
        """Return a source of these rows alone."""
        return cls(lease, items, [item.order_key for item in items], assumed=assumed)

    @property
    def decisions(self) -> dict[bytes, Decision]:
        """Decisions to store without a call: `assumed`, and to defer redecoded messages."""
        return {item.key: DEFERRED for item in self.items if not item.row} | dict(self.assumed)

    @property
    def decoded(self) -> tuple[set[str], list[FailedMessage]]:
        """Return nothing: what can't be decoded is dead already."""
        return set(), []

    @property
    def patience(self) -> float:
        """Half of the lease, which `check` extends."""
        return self.lease.seconds / 2

    async def check(self, connection: asyncpg.Connection) -> None:
        """Extend the lease, whatever becomes of the transaction. Raises `LaneLost`.

        Raises `Resting` if a consumer whose handler is to be called is paused.
        """
        await lanes.extend(connection, self.lease)
        if self.throttles:
            called = without_decision(self, self.decisions)
            await self.throttles.end_if_paused({item.consumer for item in called})

    async def begin(self, connection: asyncpg.Connection) -> Generations:
        """Lock the lane. Raises `LaneLost`."""
        return await lanes.hold(connection, self.lease)

    async def find(self, connection: asyncpg.Connection, items: Sequence[Item]) -> Stored:
        """Return which messages are in other rows of the backlog than those they were read from,
        and the keys whose first row is not due any more, or another one."""
        own = {item.row for item in self.items}
        new = [item for item in items if item.key not in own]
        known = (await backlog.find(connection, new)).known if new else {}
        heads = {
            item.order_key: (item.row, item.history.attempts, item.history.waited)
            for item in reversed(self.items)
            if item.row
        }
        is_compared = self.compares and heads
        return Stored(known, (), await lanes.overtaken(connection, heads) if is_compared else ())

    async def settle(self, connection: asyncpg.Connection, outcome: BatchOutcome) -> Sequence[Row]:
        """Delete the rows of applied messages, and update others; returns the dead rows."""
        superseded = (item for item, _ in outcome.superseded)
        done = (*outcome.applied, *outcome.duplicates, *superseded)
        # Rows behind one that failed stay as they are. So do those of calls, of which the stored
        # reason says whether they were made.
        changed = [
            *self.unhandleable,
            *(
                backlog.row_of(item, decision)
                for item, decision in outcome.decided
                if decision.is_decided
                or item.row is None
                or (decision.is_undecided and self.compares)
            ),
            *outcome.letters,
        ]
        outcome.letters += [row for row in self.unhandleable if not row.decision.is_assumed]
        if outcome.encryption:
            changed = await outcome.encryption.encrypt(connection, changed)
        if self.ended:
            await lanes.end_pauses(connection, self.ended)
        redecoded = {row for item in self.items if (row := self.redecoded.get(item.key))}
        # Before what becomes of them is stored: an identity mismatch has the same row again.
        await lanes.delete(connection, redecoded | {*self.skipped})
        # Encrypted already, together with the others.
        new = await backlog.add(connection, [row for row in changed if row.is_new], None)
        changed = [*new, *(row for row in changed if not row.is_new)]
        outcome.keep_letters(changed)
        await lanes.settle(
            connection,
            self.lease,
            done={item.row for item in done if item.row},
            changed=[row for row in changed if not row.is_new],
            keys=self.keys,
            keys_with_progress={item.order_key for item in done},
        )
        return [row for row in changed if row.decision.is_dead]

    @property
    def is_alone(self) -> bool:
        """Whether there is one row only, whose handler is to be called."""
        return len(self.items) == 1 and not self.assumed

    def pieces(self, records: float) -> Sequence[Self]:
        """Divide the rows, with those that no handler takes in the first piece."""
        if len(self.items) <= records:
            return [self]
        size = int(records)
        first, *others = (self.items[n : n + size] for n in range(0, len(self.items), size))
        rest = replace(self, unhandleable=(), skipped=(), ended=())
        return [
            replace(self, items=first),
            *(replace(rest, items=one, keys=self._keys_of(one)) for one in others),
        ]

    def _keys_of(self, items: Sequence[Item]) -> Sequence[bytes]:
        # Rows of records that could not be decoded have keys of their own.
        return self.keys if self.redecoded else [item.order_key for item in items]

    def record_metrics(self, group: str, applied: Sequence[Item], seconds: float) -> None:
        """Record how long the messages were stored before they were applied."""
        longest: dict[str, float] = {}
        for item in applied:
            if isinstance(item.record, StoredRecord):
                stored_for = item.record.stored_for
                longest[item.consumer] = max(longest.get(item.consumer, 0.0), stored_for)
        for consumer, stored_for in longest.items():
            metrics.backlog_applied(consumer, stored_for + seconds)


async def take(
    connection: asyncpg.Connection,
    lease: Lease,
    consumers: Collection[str],
    limit: int,
    *,
    before: datetime | None = None,
    encryption: Encryption | None = None,
) -> Rows:
    """Return due rows: of the keys that are due longest, which share the `limit` of rows.

    With `before`, only keys with a due row that may have been stored by then. Rows of the lane's
    unavailable topics are left out.
    """
    rows: Rows = await connection.fetch(
        statements.READ_DUE_ROWS,
        lease.lanes,
        list(consumers),
        limit,
        _RUN_BYTES,
        before,
        [*lease.unavailable],
    )
    return await encryption.decrypt(connection, rows, "value") if encryption else rows


async def read_rows(
    lease: Lease, handlers: Handlers, rows: Sequence[asyncpg.Record], *, validates: bool = True
) -> LaneSource:
    """Decode rows, and validate them unless they are validated later.

    Keys wait if what a codec needs for their topic can't be fetched now: the topic is then one of
    the lane's unavailable ones.

    Raises `StoreUnavailable` if no other rows are left.
    """
    records = [stored_record(row, stored_for=row["stored_for"]) for row in rows]
    unavailable = await prepare(handlers, records)
    lease.unavailable.update(unavailable)
    keys: list[bytes] = []
    items: list[Item] = []
    new: list[Item] = []
    redecoded: dict[bytes, bytes] = {}
    unhandleable: list[Row] = []
    skipped: list[bytes] = []
    ended: list[bytes] = []
    waiting: set[bytes] = set()
    turn = TimeSlice()
    for row, record in zip(rows, records, strict=True):
        if turn.is_over:
            await turn.end()
        key = row["order_key"]
        if not keys or keys[-1] != key:
            keys.append(key)
        if row["must_wait"] or record.topic in unavailable:
            waiting.add(key)
        if key in waiting:
            continue
        if record.topic == PAUSES:
            ended.append(row["key"])
            waiting.add(key)  # which goes on in the next transaction
            continue
        found = _read(handlers, row, record, validates=validates)
        if isinstance(found, Row):
            unhandleable.append(found)
            if not found.decision.is_dead:
                waiting.add(key)
        elif not found:
            skipped.append(row["key"])
        elif row["consumer"]:
            items += found
        else:
            new += found
            redecoded[found[-1].key] = row["key"]
    if not (new or items or unhandleable or skipped or ended):
        for error in unavailable.values():
            raise error
    # No handler is called for new messages, so the others follow in a transaction of their own.
    return LaneSource(
        lease, new or items, keys, unhandleable, redecoded, skipped, compares=True, ended=ended
    )


def _read(
    handlers: Handlers, row: asyncpg.Record, record: StoredRecord, *, validates: bool
) -> Sequence[Item] | Row:
    """Decode the row as the service does now, for its consumer, or for all if it has none.

    A row without a consumer could not be decoded before, nor could one without a source: nothing is
    returned for that if its consumer does not take it. Returns a row to store if no handler takes
    the message.
    """
    consumer = row["consumer"]
    if erased := row.get("erased"):
        return Row(row["key"], consumer, record, dead(Policy(), FORGOTTEN, LookupError(erased)))
    hash = (row["hash"] or None) if row["hash_version"] == HASH_VERSION else None
    holds = consumer != "" and consumer not in handlers.corrections
    found = items_of(handlers, record, validates=False, hash=hash, holds=holds, consumer=consumer)
    if isinstance(found, Undecoded):
        decision = dead(Policy(), found.reason, found.error, history_of(row))
        return Row(row["key"], consumer, record, decision)
    if not consumer and found:
        # Their markers are not known to have been looked up: another copy may have been applied.
        return found
    own = next((item for item in found if item.consumer == consumer), None)
    if own is not None:
        item = own._replace(
            history=history_of(row),
            row=row["key"],
            stored=Known(row["hash"], row["hash_version"]),
            was_young=True,
            reason=row["reason"],
            last_error=row["error"],
            trace=row["traceparent"],
        )
        return [validated(item) if validates else item]
    if consumer and row["source"] is None:
        return []
    name = consumer or "the service"
    error = NoHandler(f"{name} has no handler for {row['type'] or 'this'!r} of {record.topic}")
    if not consumer:
        return Row(row["key"], consumer, record, dead(Policy(), "no handler", error))
    # During a deployment a process of another version may have a handler.
    policy, history = Policy(), history_of(row)
    decision = policy.after_failure(error, history, reason="no handler", is_free=True)
    if row["reason"] == UNKNOWN:  # the outcome of its call is still unknown
        decision = replace(decision, reason=UNKNOWN)
    return Row(row["key"], consumer, record, decision)


def history_of(row: asyncpg.Record) -> History:
    """Return what a row says of its message's history."""
    return History(*(row[column] for column in History._fields))


def stored_record(row: asyncpg.Record, *, stored_for: float) -> StoredRecord:
    """Return the record of a row that has been stored for so many seconds."""
    return StoredRecord(
        row["topic"],
        row["partition"],
        row["offset"],
        row["timestamp"],
        row["record_key"],
        row["value"],
        headers_of(row["headers"]),
        stored_for,
    )


def is_full(rows: Rows, limit: int) -> bool:
    """Whether there may be more due rows than were read for a transaction."""
    return len(rows) >= limit or sum(len(row["value"] or b"") for row in rows) > _RUN_BYTES / 2


def is_suspect(lease: Lease, row: asyncpg.Record) -> bool:
    """Whether a process may have died over the row, which is due."""
    has_died = lease.starts > 1 or row["deaths"] > 0
    return has_died and not row["must_wait"] and row["topic"] != PAUSES


def beforehand(
    lease: Lease, handlers: Handlers, row: asyncpg.Record
) -> tuple[LaneSource, LaneSource]:
    """Return sources that store that an attempt at the row has failed, and that none was made."""
    topic = row["topic"]
    takers: Sequence[Handler] = handlers.of(topic, row["type"], row["consumer"])
    if row["source"] is None and topic in handlers.holding:  # it could not be decoded
        takers = handlers.holders(topic)
    policy = next((one.policy for one in takers if one.consumer == row["consumer"]), Policy())
    record, history = stored_record(row, stored_for=row["stored_for"]), history_of(row)
    failed, undone = (
        LaneSource(lease, (), [row["order_key"]], [Row(row["key"], row["consumer"], record, one)])
        for one in (assumed(policy, history), unchanged(row["reason"], history, row["error"]))
    )
    return failed, undone
