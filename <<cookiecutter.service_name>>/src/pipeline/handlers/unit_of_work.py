"""A unit of work: rows that are changed and events that are published in one transaction."""

from abc import ABC, abstractmethod
from datetime import datetime, timedelta
from typing import TypeVar

from opentelemetry.context import Context
from sqlalchemy.ext.asyncio import AsyncSession

from pipeline.events.event import Event
from pipeline.servers.guard import HAS_RETURNED, HandlerFault

from .aggregate import Aggregate
from .rows import Rows
from .sessions import SharedSession
from .staging import Due, Outbox

A = TypeVar("A", bound=Aggregate)


class UnitOfWork(ABC):
    """Changes of a handler or a writer, which are committed together or not at all."""

    __slots__ = ("_context", "_has_ended", "_outbox", "_rows", "_staged")

    def __init__(self, rows: Rows, outbox: Outbox, context: Context | None = None) -> None:
        """`context` is the trace of published events, by default the current one."""
        self._rows = rows
        self._outbox = outbox
        self._context = context
        self._staged = 0
        self._has_ended = False

    @abstractmethod
    def _id(self) -> str:
        """Return the id of the event that is staged next."""

    def end(self) -> None:
        """Reject further calls: changes by a task that outlives its handler would be lost."""
        self._has_ended = True

    def _check(self) -> None:
        if self._has_ended:
            raise HandlerFault(HAS_RETURNED)

    @property
    def session(self) -> AsyncSession:
        """SQLAlchemy's session of this message alone. Close neither it nor the transaction.

        It costs the message a few more round trips; `load`, `load_or_create` and `add` do not need
        it. Its changes are flushed when the handler returns. Savepoints, by `begin_nested()`,
        drop the events published inside when they are rolled back. The connection's state (`SET`,
        temporary tables, session locks) ends with the message.
        """
        self._check()
        session = self._rows.session
        if isinstance(session.sync_session, SharedSession):
            session.sync_session.want()
        return session

    def add(self, row: object) -> None:
        """Insert a new row when the batch is written, together with those of other messages."""
        self._check()
        self._rows.add(row)

    async def load(self, entity: type[A], *key: object) -> A | None:
        """Return the row with this primary key, locked until the end of the batch, or None.

        Rows declared by `loads=` were fetched for the whole batch at once and cost nothing here.
        """
        self._check()
        return await self._rows.get(entity, key)

    async def load_or_create(self, entity: type[A], *key: object) -> A:
        """Return the row with this primary key, locked; a missing one is created by keyword."""
        self._check()
        return await self._rows.get(entity, key) or self._rows.create(entity, key)

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

        `of` is the aggregate that the event is about: its primary key becomes the record's key
        and its `version`, raised by one, the event's sequence. Events of one aggregate keep their
        order because its row is locked: it must come from `tx.load…`, or be new. Without `of`,
        `key` and `sequence` may be given; an event without a key has no order, and those of one key
        have the order of their transactions if you have locked the rows that they are about.

        With `at`, a time with its zone, or `after` the commit, the event is put into the outbox
        when it is due, by the database's clock; until then `tx.cancel` cancels it by its `name`.
        Another event of that name replaces it. It is not ordered with other events of its key, so
        `of` and `sequence` are not allowed.

        Raises `Unpublishable` for an event that can't be sent.
        """
        self._check()
        due = None
        if at is not None or after is not None or name is not None:
            if of is not None or sequence is not None:
                raise TypeError("publish(…, at=…) takes key=, and neither of= nor sequence=")
            due = Due.check(at, after, name)
        if of is not None:
            if key is not None or sequence is not None:
                raise TypeError("publish(…) takes of= or key= and sequence=: of= brings its own")
            key = self._rows.key_of(of)
            sequence = (of.version or 0) + 1
        self._outbox.stage(
            event, id=self._id(), key=key, sequence=sequence, context=self._context, due=due
        )
        self._staged += 1
        if of is not None and sequence is not None:
            of.version = sequence

    def call(self, event: Event, *, of: Aggregate | None = None, key: str | None = None) -> None:
        """Stage an event for its effects: they are called exactly if this transaction commits.

        They are called after the commit (see the optional package `effects`), for one key one after
        the other, in the order of the transactions that lock the row that the events are about.
        `of` is that row, as in `publish`, and its primary key is the key; without `of` and `key`
        there is no order.

        Raises `TypeError` if no effect takes the event, and `Unpublishable` if it can't be stored.
        """
        self._check()
        if of is not None:
            if key is not None:
                raise TypeError("call(…) takes of= or key=: of= brings its own")
            key = self._rows.key_of(of)
        self._outbox.call(event, id=self._id(), key=key, context=self._context)
        self._staged += 1

    def cancel(self, name: str) -> None:
        """Cancel the scheduled event of this name, exactly if this transaction commits.

        It has no effect on an event that is published already or was never scheduled.
        """
        self._check()
        self._outbox.cancel(name)
