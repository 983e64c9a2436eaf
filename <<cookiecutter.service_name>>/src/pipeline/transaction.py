"""The transaction as a handler sees it: load and change rows, publish events."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Generic, TypeVar, cast

import sqlalchemy as sa
from opentelemetry.context import Context
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from . import aggregate
from .aggregate import Aggregate, Key
from .events import Event
from .inbox import Marker
from .ordering import Timed, overwrites
from .outbox import Due, Outbox, event_id

A = TypeVar("A", bound=Aggregate)
E = TypeVar("E", bound=Event)


class BatchSession(Session):
    """The session of a batch. A handler that committed it would lose its neighbours' events."""

    has_deleted = False
    """Whether anything was deleted: to ask each time what that is would cost every message."""

    def delete(self, instance: object) -> None:
        self.has_deleted = True
        super().delete(instance)

    def delete_all(self, instances: Iterable[object]) -> None:
        self.has_deleted = True
        super().delete_all(instances)

    def commit(self) -> None:
        raise TypeError("leave session.commit() out: the whole batch commits after its handlers")


class Rows:
    """The aggregates that a batch has locked, and the keys it found no row for."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session
        # It answers three times as quickly.
        self._known = cast(BatchSession, session.sync_session)
        self._rows: dict[tuple[type[Aggregate], Key], Aggregate | None] = {}
        self._added: set[object] = set()
        # What a handler adds and flushes itself is nobody else's either. The session must not know
        # of us: together we would wait for the collector.
        added = self._added
        sa.event.listen(self._known, "pending_to_persistent", lambda _, row: added.add(row))

    async def lock(self, entity: type[Aggregate], keys: set[Key]) -> None:
        """Fetch and lock in one statement."""
        found = await aggregate.lock(self._session, entity, keys)
        for key in keys:
            self._rows[entity, key] = found.get(key)

    async def get(self, entity: type[A], key: Key) -> A | None:
        """Return the locked row; one that the batch has not declared is fetched and locked now."""
        if (entity, key) not in self._rows:
            await self.lock(entity, {key})
        row = self._rows[entity, key]
        # Another message of the batch may have deleted it, flushed or not.
        known = self._known
        if row is None or row not in known or (known.has_deleted and row in known.deleted):
            return None
        return cast(A, row)

    def check(self, row: Aggregate, key: Key) -> None:
        """Raise `TypeError` for a row that others could change at the same time."""
        held = self._rows.get((type(row), key))
        if row is not held and row not in self._known.new and row not in self._added:
            raise TypeError(
                f"an event of={type(row).__name__} needs a row that is locked, or events lose"
                " their order: fetch it by tx.load or tx.load_or_create"
            )

    def create(self, entity: type[A], key: Key) -> A:
        """Add a new row to the session."""
        row = aggregate.create(entity, key)
        self._session.add(row)
        self._rows[entity, key] = row
        return row


class Transaction:
    """What one handler does for one message; it commits with the whole batch, or not at all.

    A handler may run again, for a lost connection or a neighbour's fault: keep effects that a
    rollback does not undo out of it.
    """

    __slots__ = (
        "_context",
        "_ended",
        "_key",
        "_outbox",
        "_rows",
        "_staged",
        "gap",
        "message",
        "session",
    )

    def __init__(
        self,
        session: AsyncSession,
        rows: Rows,
        outbox: Outbox,
        marker: Marker,
        context: Context | None = None,
        gap: int = 0,
    ) -> None:
        self.session = session
        """SQLAlchemy's session of the batch. Don't commit or roll it back."""
        self.message = marker.message
        """Envelope of the event: identity, key, time, partition and offset."""
        self.gap = gap
        """So many events that come before this one did not come in time, see `Gaps`."""
        self._rows = rows
        self._outbox = outbox
        self._key = marker.key
        self._context = context
        self._staged = 0
        self._ended = False

    def end(self) -> None:
        """Let nobody publish any more."""
        # What a task that outlives its handler stages would be lost, and nobody would know.
        self._ended = True

    async def load(self, entity: type[A], *key: object) -> A | None:
        """Return the row with this primary key, locked until the end of the batch, or None.

        Rows declared by `loads=` were fetched for the whole batch at once and cost nothing here.
        """
        return await self._rows.get(entity, key)

    async def load_or_create(self, entity: type[A], *key: object) -> A:
        """Return the row with this primary key, locked; a missing one is created by keyword."""
        return await self._rows.get(entity, key) or self._rows.create(entity, key)

    def overwrites(self, row: Timed) -> bool:
        """Let the event win over what wrote the row before, if it is later; says whether it is.

        The latest by CloudEvents' `time`, whatever order events come in; of two with the same time
        always the same one. That is as good as the clocks of those who send: one that is ahead wins
        until it is overtaken. What was deleted is forgotten, and an older event makes it anew.
        Raises `Reject` for an event without a time.
        """
        return overwrites(row, self.message)

    def publish(
        self,
        event: Event,
        *,
        of: Aggregate | None = None,
        key: str | None = None,
        sequence: int | None = None,
        at: datetime | None = None,
        after: timedelta | None = None,
        name: str | None = None,
    ) -> None:
        """Stage an event; it is in the outbox exactly if this transaction commits.

        `of` is the aggregate that the event tells of: its primary key becomes the record's key
        and its `version`, raised by one, the event's sequence. Events of one aggregate keep their
        order because its row is locked: it must come from `tx.load…`, or be new. Without `of`,
        `key` and `sequence` may be given; an event without a key has no order, and those of one key
        have theirs if you have locked what they tell of.

        With `at`, a time with its zone, or `after` the commit, the event is put into the outbox
        when it is due, by the database's clock; until then `tx.cancel` takes it back by its `name`.
        Another one of that name takes its place. It has no place among the other events of its key,
        and so no `of` and no `sequence`.

        Raises `Unpublishable` for an event that could never be sent.
        """
        if self._ended:
            raise RuntimeError("the handler has ended: await what publishes before it returns")
        due = None
        if at is not None or after is not None or name is not None:
            if of is not None or sequence is not None:
                raise TypeError("publish(…, at=…) takes key=, and neither of= nor sequence=")
            due = Due.check(at, after, name)
        if of is not None:
            if key is not None or sequence is not None:
                raise TypeError("publish(…) takes of= or key= and sequence=: of= brings its own")
            key = self._key_of(of)
            sequence = (of.version or 0) + 1
        self._outbox.stage(
            event, id=self._id(), key=key, sequence=sequence, context=self._context, due=due
        )
        self._staged += 1
        if of is not None and sequence is not None:
            of.version = sequence

    def call(self, event: Event, *, of: Aggregate | None = None, key: str | None = None) -> None:
        """Have the effects of this event's type called, exactly if this transaction commits.

        They are called after the commit, see `Handlers.effect`: those of one key one after the
        other, in the order of the transactions that hold what they tell of. `of` is that row, as in
        `publish`, and its primary key the key; without `of` and `key` there is no order.

        Raises `TypeError` if no effect takes the event, and `Unpublishable` if it can't be stored.
        """
        if self._ended:
            raise RuntimeError("the handler has ended: await what calls before it returns")
        if of is not None:
            if key is not None:
                raise TypeError("call(…) takes of= or key=: of= brings its own")
            key = self._key_of(of)
        self._outbox.call(event, id=self._id(), key=key, context=self._context)
        self._staged += 1

    def _id(self) -> str:
        """Return the id of the event that is staged next."""
        return event_id(self._key, self.message.hash, self._staged)

    def _key_of(self, row: Aggregate) -> str:
        """Return the key of events of a row. Raises `TypeError` if it has none, or no lock."""
        values = aggregate.key_of(row)
        if None in values:
            raise TypeError("an event of=row needs the row's primary key: flush first")
        self._rows.check(row, values)
        return aggregate.record_key(values)

    def cancel(self, name: str) -> None:
        """Take back the scheduled event of this name, exactly if this transaction commits.

        What is published already, or was never scheduled, is left alone.
        """
        if self._ended:
            raise RuntimeError("the handler has ended: await what cancels before it returns")
        self._outbox.cancel(name)


class EventBatch(Generic[E]):
    """Events that a handler takes together, in order, each with the transaction to publish in.

    All the transactions are one, and share `session`.
    """

    def __init__(self, session: AsyncSession, calls: Sequence[tuple[E, Transaction]]) -> None:
        self.session = session
        """SQLAlchemy's session of the batch. Don't commit or roll it back."""
        self._calls = calls

    def __iter__(self) -> Iterator[tuple[E, Transaction]]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)
