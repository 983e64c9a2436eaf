"""One attempt to apply messages in a transaction, and what its handlers share."""

import asyncio
import math
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from time import perf_counter

import asyncpg
from opentelemetry.context import Context
from sqlalchemy.ext.asyncio import AsyncConnection

from pipeline.events.event import Event
from pipeline.handlers.registry import Handler
from pipeline.handlers.rows import Rows
from pipeline.handlers.sessions import SharedSession, clean, isolated, new_session, own_session
from pipeline.handlers.staging import Outbox
from pipeline.observe.traces import ProcessSpans
from pipeline.servers.guard import Guard

from .batch import validated
from .item import Item
from .limits import Deadline


@dataclass
class Memory:
    """What an attempt to apply messages passes on to the next attempt."""

    handed: set[int] = field(default_factory=set)
    """`id` of the events that were handed to a handler."""
    isolates: bool = False
    """Whether a message with a session of its own has failed: from then on each such message has a
    savepoint, so that one attempt finds all messages that fail."""
    cut_off: set[bytes] = field(default_factory=set)
    """Marker keys of messages whose calls were cut off once."""
    contentions: int = 0
    """Attempts in a row in which locks were in the way."""


@dataclass(eq=False)
class Attempt:
    """One attempt to apply messages in a transaction."""

    connection: AsyncConnection
    driver: asyncpg.Connection
    outbox: Outbox
    spans: ProcessSpans
    own: Collection[str]
    """Consumers whose messages have a session of their own each."""
    limits: str
    """Statement that sets the transaction's limits."""
    time_limit: float
    """Time limit of the transaction in seconds, which begins now."""
    memory: Memory
    rows: Rows = field(init=False)
    """Those of the session that messages share, or of the message that is being handled."""
    guard: Guard = field(init=False)
    """That of the messages that share a session, or of the message that is being handled."""
    guards: dict[bytes, Guard] = field(default_factory=dict)
    """Those of the messages that have a session of their own, by marker key."""
    errors_after_return: dict[bytes, Exception] = field(default_factory=dict)
    """Errors of calls to `tx` after the message's handler had returned, by marker key."""
    task: asyncio.Task[object] | None = field(default_factory=asyncio.current_task)
    calling: Item | None = None
    context: Context | None = None
    """Trace context of the latest call."""
    longest: dict[tuple[str, str], float] = field(default_factory=dict)
    """Longest duration of a call in seconds, by consumer and type of event."""
    deadline: Deadline = field(default_factory=Deadline)
    began_at: float = field(default_factory=perf_counter)
    handlers_began_at: float = math.inf
    """Time at which the engine's own statements ended and the calls of handlers began."""
    reserved: float = 0.0
    """Seconds of the time limit that were needed for the object store, and not left."""
    is_cut_off: bool = False
    """Whether a statement may still be under way on the connection."""

    def __post_init__(self) -> None:
        self.rows = Rows(new_session(self.connection, SharedSession))
        self.guard = Guard(self.outbox)

    @property
    def seconds(self) -> float:
        """Seconds since the transaction has begun."""
        return perf_counter() - self.began_at

    @property
    def is_late(self) -> bool:
        """Whether the time limit has passed."""
        return self.seconds >= self.time_limit - self.reserved

    def reserve(self, seconds: float) -> None:
        """Raise `TimeoutError` if less than these seconds are left, as if the limit had passed."""
        self.reserved = seconds
        if self.is_late:
            raise TimeoutError
        self.reserved = 0.0

    async def roll_back(self) -> None:
        """Roll back; the connection stays usable unless a statement may be under way."""
        if self.is_cut_off or self.is_late:
            await self.connection.invalidate()
        elif self.own:
            await clean(self.connection, self.driver)

    def has_called(self, handler: Handler) -> None:
        """Note the duration of the call that has just ended."""
        key = handler.consumer, handler.event.__event_type__
        if self.deadline.seconds > self.longest.get(key, 0.0):
            self.longest[key] = self.deadline.seconds

    def raise_error(self) -> None:
        """Raise the error of the call, also if its handler has caught it or can't have seen it."""
        if (fault := self.guard.fault) is not None:
            self.guard.fault = None
            raise fault
        self.rows.raise_error()

    async def is_sound(self) -> bool:
        """Return whether no statement of the call has failed: an outage is of another server."""
        with suppress(Exception):
            await self.driver.execute("SELECT")
            return not self.guard.has_failed
        return False

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
        isolating = isolated(self.driver, self.outbox, self.limits)
        async with (
            isolating if self.memory.isolates else nullcontext(),
            own_session(self.connection, self.driver, guard, self.limits) as session,
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
