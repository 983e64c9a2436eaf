"""The transaction as a handler sees it: load and change rows, publish events."""

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
    """What one handler does for one message; it commits with the whole batch, or not at all.

    A handler may run again, for a lost connection or a neighbour's fault: keep effects that a
    rollback does not undo out of it.
    """

    __slots__ = ("_key", "_strays", "gap", "message")

    def __init__(
        self,
        rows: Rows,
        outbox: Outbox,
        message: Message,
        key: bytes,
        strays: dict[bytes, Exception],
        context: Context | None = None,
        gap: int = 0,
    ) -> None:
        """`key` is the marker's; `strays` takes, by it, what is done after the handler ended."""
        super().__init__(rows, outbox, context)
        self.message = message
        """Envelope of the event: identity, key, time, partition and offset."""
        self.gap = gap
        """So many events that come before this one did not come in time, see `Gaps`."""
        self._key = key
        self._strays = strays

    def _id(self) -> str:
        return event_id(self._key, self.message.hash, self._staged)

    def _check(self) -> None:
        try:
            super()._check()
        except HandlerFault as error:
            self._strays[self._key] = error
            raise

    def overwrites(self, row: Timed) -> bool:
        """Let the event win over what wrote the row before, if it is later; says whether it is.

        The latest by CloudEvents' `time`, whatever order events come in; of two with the same time
        always the same one. That is as good as the clocks of those who send: one that is ahead wins
        until it is overtaken. What was deleted is forgotten, and an older event makes it anew.
        Raises `Reject` for an event without a time.
        """
        return overwrites(row, self.message)


class EventBatch(Generic[E]):
    """Events that a handler takes together, in order, each with the transaction to publish in.

    All the transactions are one, and share `session`.
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
