"""One attempt to apply messages in a transaction, and what its handlers share."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter

import asyncpg
from opentelemetry.context import Context
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncTransaction

from onceward.events.event import Event
from onceward.handlers.catalog import Catalog
from onceward.handlers.policy import Decision
from onceward.handlers.registry import Handler, Handlers
from onceward.handlers.rows import Place, Rows
from onceward.handlers.sessions import SharedSession, clean, new_session, own_session
from onceward.handlers.staging import Outbox
from onceward.handlers.statements import RESET_SESSION
from onceward.observe.traces import ProcessSpans
from onceward.servers.guard import Guard

from .batch import validated
from .claim_check import ClaimCheck
from .encryption import Encryption
from .item import Item
from .limits import Deadline


@dataclass
class Findings:
    """What an attempt to apply messages passes on to the next attempt."""

    handed: set[int] = field(default_factory=set)
    """`id` of the events that were handed to a handler."""
    decisions: dict[bytes, Decision] = field(default_factory=dict)
    """Decisions, by marker key, that the next transaction stores."""
    suspects: set[bytes] = field(default_factory=set)
    """Marker keys of the messages whose calls have failed."""


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
    findings: Findings
    handlers: Handlers
    catalog: Catalog
    claims: ClaimCheck | None
    encryption: Encryption | None
    rows: Rows = field(init=False)
    """Those of the session that messages share, or of the message that is being handled."""
    latest: Rows = field(init=False)
    """Those of the call that was made last."""
    guard: Guard = field(init=False)
    """That of the messages that share a session, or of the message that is being handled."""
    guards: dict[bytes, Guard] = field(default_factory=dict)
    """Those of the messages that have a session of their own, by marker key."""
    errors_after_return: dict[bytes, Exception] = field(default_factory=dict)
    """Errors of calls to `tx` after the message's handler had returned, by marker key."""
    task: asyncio.Task[object] | None = field(default_factory=asyncio.current_task)
    calling: Item | None = None
    is_shared: bool = False
    """Whether the run has other messages."""
    context: Context | None = None
    """Trace context of the latest call."""
    longest: dict[tuple[str, str], float] = field(default_factory=dict)
    """Longest duration of a call in seconds, by consumer and type of event."""
    deadline: Deadline = field(default_factory=Deadline)
    began_at: float = field(default_factory=perf_counter)
    has_begun_calls: bool = False
    """Whether the first statements of the engine have ended, and calls of handlers have begun."""
    lacking: str = ""
    """What the error of a transaction that is late says about the object store."""
    is_cut_off: bool = False
    """Whether a call was cut off by its time limit."""
    is_committing: bool = False
    """Whether all statements but the COMMIT have been executed."""

    def __post_init__(self) -> None:
        self.begin_run(())

    def begin_run(self, items: Iterable[Item]) -> None:
        """Begin a run: its messages have a session that knows nothing of earlier ones."""
        self.rows = Rows(new_session(self.connection, SharedSession), self.catalog)
        self.latest = self.rows
        self.guard = Guard(self.outbox)
        for item in items:  # they may have been in a run that was rolled back
            self.guards.pop(item.key, None)
            self.errors_after_return.pop(item.key, None)

    @property
    def is_lost(self) -> bool:
        """Whether the transaction can't go on: its connection is lost, or it has ended."""
        driver = self.driver
        return self.is_busy or driver.is_closed() or not driver.is_in_transaction()

    @property
    def is_busy(self) -> bool:
        """Whether a statement may be under way on the connection."""
        return self.is_cut_off or any(one.under_way for one in self._all_guards)

    @property
    def contention(self) -> BaseException | None:
        """Error of a statement in whose way locks were, also if its handler has caught it."""
        return next((one.contention for one in self._all_guards if one.contention), None)

    @property
    def _all_guards(self) -> Collection[Guard]:
        return self.guard, *self.guards.values()

    def places(self) -> Iterator[Place]:
        """Yield the rows that handlers and `loads=` have locked, and those that they wait for."""
        for rows in dict.fromkeys((self.latest, self.rows)):
            yield from rows.places()

    def strays(self) -> Iterator[tuple[bytes | None, Exception]]:
        """Yield errors of code that went on after its handler's return, and faults that were noted,
        with the marker key of the message; None: it is one of those that share a session."""
        if self.guard.stray:
            yield None, self.guard.stray
        for key, guard in self.guards.items():
            if fault := guard.stray or guard.fault:
                yield key, fault
        yield from self.errors_after_return.items()

    async def undo_run(self, point: AsyncTransaction) -> None:
        """Roll back to the savepoint at which the run began."""
        self.rows.release()
        if point.is_active:  # a flush that has failed has rolled it back
            await point.rollback()
        # PostgreSQL keeps the savepoint then, with what a handler has done after it.
        name = point.sync_transaction._savepoint  # type: ignore[union-attr]
        undo = f"ROLLBACK TO SAVEPOINT {name}; RELEASE SAVEPOINT {name}"
        await self.driver.execute(f"{undo}; {RESET_SESSION}; {self.limits}" if self.own else undo)

    @property
    def seconds(self) -> float:
        """Seconds since the transaction has begun."""
        return perf_counter() - self.began_at

    @property
    def is_late(self) -> bool:
        """Whether the time limit has passed."""
        return self.seconds >= self.time_limit

    def reserve(self, seconds: float) -> None:
        """Raise `TimeoutError` if less than these seconds are left, as if the limit had passed."""
        if self.seconds >= self.time_limit - seconds:
            self.time_limit -= seconds
            self.lacking = f" and leaves the object store less than {seconds:g} s"
            raise TimeoutError

    async def roll_back(self, *, discards: bool = False) -> None:
        """Roll back; the connection stays usable unless a statement may be under way."""
        self.rows.release()
        if discards or self.is_busy or self.is_late:
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

    def event_of(self, item: Item) -> Event | None:
        """Return the event for a call; a new object for each, as a handler may have changed it.

        Raises the error of a validation that fails now and has succeeded before.
        """
        if id(item.event) in self.findings.handed:
            again = validated(item)
            if again.fault is not None:
                raise again.fault
            return again.event
        self.findings.handed.add(id(item.event))
        return item.event

    @asynccontextmanager
    async def own_session(self, item: Item) -> AsyncIterator[None]:
        """Use a session of its own for the message that is handled next."""
        shared = self.rows, self.guard
        guard = self.guards[item.key] = Guard(self.outbox)
        async with own_session(self.connection, self.driver, guard, self.limits) as session:
            self.rows, self.guard = Rows(session), guard
            self.latest = self.rows
            try:
                yield
            finally:
                self.rows, self.guard = shared

    def ignores_cancellation(self, seconds: float) -> str | None:
        """Return the name of the call if it has run for `seconds` after its cancellation."""
        if self.calling is None or self.deadline.overdue() <= seconds:
            return None
        return self.calling.name
