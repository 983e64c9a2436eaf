"""What handlers and writers get: it loads rows and stages events, in one database transaction."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Generic, TypeVar

from opentelemetry.context import Context
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from onceward.events.event import Event
from onceward.events.message import Message
from onceward.servers.guard import HAS_RETURNED, HandlerFault

from .aggregate import Aggregate
from .ordering import Timed, name_of
from .policy import Reject
from .rows import Rows
from .sessions import SharedSession
from .staging import Due, Outbox, event_id

A = TypeVar("A", bound=Aggregate)
E = TypeVar("E", bound=Event)


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
            raise self._noted(HandlerFault(HAS_RETURNED))

    def _noted(self, error: HandlerFault) -> HandlerFault:
        """Return the error of a call after the handler has returned."""
        return error

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
        Session.add(self._rows.session.sync_session, row)

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
        headers: Mapping[str, str] = {},
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

        `headers` are texts that its record has beside those of CloudEvents, or of its codec. They
        count in its size. Names that the engine writes, such as `ce_id`, are refused.

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
            key, sequence = self._rows.key_of(of), (of.version or 0) + 1
        self._outbox.stage(
            event,
            id=self._id(),
            key=key,
            sequence=sequence,
            context=self._context,
            due=due,
            headers=headers,
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


class Transaction(UnitOfWork):
    """The changes of one handler for one message; they commit with the whole batch, or not at all.

    A handler may be called again, after a lost connection or a failure of another message: it must
    have no effects that a rollback does not undo.
    """

    __slots__ = ("_errors_after_return", "_key", "gap", "message")

    def __init__(
        self,
        rows: Rows,
        outbox: Outbox,
        message: Message,
        key: bytes,
        errors_after_return: dict[bytes, Exception],
        context: Context | None = None,
        gap: int = 0,
    ) -> None:
        """`key` is the marker's. An error of a call after the handler has returned is stored in
        `errors_after_return`, by that key.
        """
        super().__init__(rows, outbox, context)
        self.message = message
        """Envelope of the event: identity, key, time, partition and offset."""
        self.gap = gap
        """Number of events missing before this one, which did not come in time, see `Gaps`."""
        self._key = key
        self._errors_after_return = errors_after_return

    def _id(self) -> str:
        return event_id(self._key, self.message.hash, self._staged)

    def _noted(self, error: HandlerFault) -> HandlerFault:
        self._errors_after_return[self._key] = error
        return error

    def overwrites(self, row: Timed) -> bool:
        """Return whether the event is later than the last one that wrote the row, and note it.

        Events are compared by CloudEvents' `time`, in whatever order they come; of two with the
        same time always the same one wins. It relies on the clocks of producers: events of a clock
        that is ahead win until its time has come. A deleted row has no time, so that an older event
        creates it again. Raises `Reject` for an event without a time.
        """
        time, name = self.message.time, name_of(self.message)
        if time is None:
            raise Reject("what wins goes by the CloudEvents attribute `time`, which is not there")
        if row.written_at is not None and (time, name) <= (row.written_at, row.written_by or ""):
            return False
        row.written_at, row.written_by = time, name
        return True


class EventBatch(Generic[E]):
    """Events that a handler takes together, in order, each with a `Transaction` to publish in.

    All of them belong to one database transaction, and share `session`.
    """

    def __init__(self, calls: Sequence[tuple[E, Transaction]]) -> None:
        self._calls = calls

    @property
    def session(self) -> AsyncSession:
        """SQLAlchemy's session of these events, as `Transaction.session`."""
        return self._calls[0][1].session

    def __iter__(self) -> Iterator[tuple[E, Transaction]]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)
