"""What the handlers of one transaction share: connection, rows, outbox, sessions, time limit."""

import asyncio
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
    """What one attempt at a work leaves to the next."""

    handed: set[int] = field(default_factory=set)
    """`id` of the events that were handed to a handler."""
    isolates: bool = False
    """Whether a message with a session of its own has failed: each has a savepoint from then on, so
    that all that fail are found at once."""


@dataclass(eq=False)
class Attempt:
    """What the handlers of one transaction share, and which of them is at work."""

    connection: AsyncConnection
    driver: asyncpg.Connection
    rows: Rows
    """Those of the session that messages share, or of the message at work."""
    outbox: Outbox
    spans: ProcessSpans
    own: Collection[str]
    """Consumers whose messages have a session of their own each."""
    again: str
    """Statement that bounds the transaction anew."""
    memory: Memory
    guards: dict[bytes, Guard] = field(default_factory=dict)
    """Those of the messages that have a session of their own, by marker key."""
    strays: dict[bytes, Exception] = field(default_factory=dict)
    """What was done for a message after its handler had ended, by marker key."""
    guard: Guard = field(init=False)
    """Of the messages that share a session, or of the message at work."""
    task: asyncio.Task[object] | None = field(default_factory=asyncio.current_task)
    calling: Item | None = None
    context: Context | None = None
    """Of the latest call."""
    longest: dict[tuple[str, str], float] = field(default_factory=dict)
    """Seconds that a call has taken at most, by consumer and type of event."""
    deadline: Deadline = field(default_factory=Deadline)

    def __post_init__(self) -> None:
        self.guard = Guard(self.outbox)

    def has_called(self, handler: Handler) -> None:
        """Note how long the call took that has just ended."""
        key = handler.consumer, handler.event.event_type
        if self.deadline.seconds > self.longest.get(key, 0.0):
            self.longest[key] = self.deadline.seconds

    def raise_error(self) -> None:
        """Raise what the call has done wrong, whether its handler knows of it or not."""
        if (fault := self.guard.fault) is not None:
            self.guard.fault = None
            raise fault
        self.rows.raise_error()

    def event_of(self, item: Item) -> Event | None:
        """Return the event for a call: its own, as the one before may have been changed."""
        if id(item.event) in self.memory.handed:
            return validated(item).event
        self.memory.handed.add(id(item.event))
        return item.event

    @asynccontextmanager
    async def own_session(self, item: Item) -> AsyncIterator[None]:
        """Give the message that is called next a session of its own."""
        shared = self.rows, self.guard
        guard = self.guards[item.key] = Guard(self.outbox)
        isolating = isolated(self.driver, self.outbox, self.again)
        async with (
            isolating if self.memory.isolates else nullcontext(),
            own_session(self.connection, self.driver, guard, self.again) as session,
        ):
            self.rows, self.guard = Rows(session), guard
            try:
                yield
            finally:
                self.rows, self.guard = shared

    def ignores_cancellation(self, seconds: float) -> Item | None:
        """Return the message whose handler goes on so long after it was cancelled."""
        return self.calling if self.deadline.overdue() > seconds else None
