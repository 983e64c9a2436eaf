"""The transaction that handlers get: it loads rows and publishes events."""

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from opentelemetry.context import Context
from sqlalchemy.ext.asyncio import AsyncSession

from pipeline.events.event import Event
from pipeline.events.message import Message
from pipeline.servers.guard import HandlerFault

from .ordering import Timed, overwrites
from .rows import Rows
from .staging import Outbox, event_id
from .unit_of_work import UnitOfWork

E = TypeVar("E", bound=Event)


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

    def _check(self) -> None:
        try:
            super()._check()
        except HandlerFault as error:
            self._errors_after_return[self._key] = error
            raise

    def overwrites(self, row: Timed) -> bool:
        """Return whether the event is later than the last one that wrote the row, and note it.

        Events are compared by CloudEvents' `time`, in whatever order they come; of two with the
        same time always the same one wins. It relies on the clocks of producers: events of a clock
        that is ahead win until its time has come. A deleted row has no time, so that an older event
        creates it again. Raises `Reject` for an event without a time.
        """
        return overwrites(row, self.message)


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
