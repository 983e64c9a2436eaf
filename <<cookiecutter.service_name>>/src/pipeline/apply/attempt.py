"""The state that handlers of one transaction share: connection, rows, outbox, time limit."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field

import asyncpg
from opentelemetry.context import Context
from sqlalchemy.ext.asyncio import AsyncConnection

from pipeline.events.event import Event
from pipeline.handlers.registry import Handler
from pipeline.handlers.rows import Rows
from pipeline.handlers.sessions import isolated, own_session
from pipeline.handlers.staging import Outbox
from pipeline.observe.traces import ProcessSpans
from pipeline.servers.guard import Guard

from .batch import validated
from .deadline import Deadline
from .item import Item


@dataclass
class Memory:
    """What an attempt to apply messages passes on to the next attempt."""

    handed: set[int] = field(default_factory=set)
    """`id` of the events that were handed to a handler."""
    isolates: bool = False
    """Whether a message with a session of its own has failed: from then on each such message has a
    savepoint, so that one attempt finds all messages that fail."""


@dataclass(eq=False)
class Attempt:
    """The state that handlers of one transaction share, and the call that is under way."""

    connection: AsyncConnection
    driver: asyncpg.Connection
    rows: Rows
    """Those of the session that messages share, or of the message that is being handled."""
    outbox: Outbox
    spans: ProcessSpans
    own: Collection[str]
    """Consumers whose messages have a session of their own each."""
    restore_limits: str
    """Statement that sets the transaction's limits again."""
    memory: Memory
    guards: dict[bytes, Guard] = field(default_factory=dict)
    """Those of the messages that have a session of their own, by marker key."""
    errors_after_return: dict[bytes, Exception] = field(default_factory=dict)
    """Errors of calls to `tx` after the message's handler had returned, by marker key."""
    guard: Guard = field(init=False)
    """That of the messages that share a session, or of the message that is being handled."""
    calling: Item | None = None
    context: Context | None = None
    """Trace context of the latest call."""
    longest: dict[tuple[str, str], float] = field(default_factory=dict)
    """Longest duration of a call in seconds, by consumer and type of event."""
    deadline: Deadline = field(default_factory=Deadline)

    def __post_init__(self) -> None:
        self.guard = Guard(self.outbox)

    def has_called(self, handler: Handler) -> None:
        """Note the duration of the call that has just ended."""
        key = handler.consumer, handler.event.event_type
        if self.deadline.seconds > self.longest.get(key, 0.0):
            self.longest[key] = self.deadline.seconds

    def raise_error(self) -> None:
        """Raise the error of the call, also if its handler has caught it or can't have seen it."""
        if (fault := self.guard.fault) is not None:
            self.guard.fault = None
            raise fault
        self.rows.raise_error()

    def event_of(self, item: Item) -> Event | None:
        """Return the event for a call; a new object for each, as a handler may have changed it."""
        if id(item.event) in self.memory.handed:
            return validated(item).event
        self.memory.handed.add(id(item.event))
        return item.event

    @asynccontextmanager
    async def own_session(self, item: Item) -> AsyncIterator[None]:
        """Use a session of its own for the message that is handled next."""
        shared = self.rows, self.guard
        guard = self.guards[item.key] = Guard(self.outbox)
        isolating = isolated(self.driver, self.outbox, self.restore_limits)
        async with (
            isolating if self.memory.isolates else nullcontext(),
            own_session(self.connection, self.driver, guard, self.restore_limits) as session,
        ):
            self.rows, self.guard = Rows(session), guard
            try:
                yield
            finally:
                self.rows, self.guard = shared

    def ignores_cancellation(self, seconds: float) -> str | None:
        """Return the name of the call if it has run for `seconds` after its cancellation."""
        if self.calling is None or self.deadline.overdue() <= seconds:
            return None
        return self.calling.name
