"""Writers without a message: an HTTP API or a job that changes rows and publishes events.

They take no lock while somebody thinks. A row that another one has changed meanwhile is noticed by
its version when it is written, and everything is done again with the row as it is now.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast
from uuid import uuid4

import asyncpg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.orm import Mapped, declared_attr, mapped_column
from sqlalchemy.orm.exc import StaleDataError
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_random_exponential,
)

from pipeline.errors import sqlstate_of
from pipeline.events.event import Event
from pipeline.events.references import Claims
from pipeline.handlers import aggregate
from pipeline.handlers.aggregate import Aggregate
from pipeline.handlers.registry import Handlers
from pipeline.handlers.rows import Rows
from pipeline.handlers.sessions import BEGIN, WriterSession, clean, own_session
from pipeline.handlers.staging import Outbox
from pipeline.handlers.unit_of_work import UnitOfWork
from pipeline.observe import metrics
from pipeline.servers.database import driver_of
from pipeline.servers.guard import Guard, InContext

from . import backlog

T = TypeVar("T")

_LONGEST_PAUSE = 1.0
_RETRYABLE = ("40001", "40P01")
"""PostgreSQL's codes for a serialization failure and a deadlock."""


class Versioned:
    """Mixin for a mapped class whose rows are written without a lock.

    SQLAlchemy raises `version` with every write, and writes only over the version that was read. It
    writes row by row. Handlers lock their rows for a whole batch: those are `Aggregate`, which a
    writer can lock and change as well.
    """

    version: Mapped[int] = mapped_column(sa.BigInteger)

    @declared_attr.directive
    @classmethod
    def __mapper_args__(cls) -> dict[str, object]:
        return {"version_id_col": cls.version}


class Conflict(Exception):
    """Others have changed the same rows again and again; nothing of this was written."""

    def __init__(self, attempts: int) -> None:
        super().__init__(f"the rows were changed by others at each of {attempts} attempts")


class Writing(UnitOfWork):
    """What a writer does in one attempt: as in a handler, rows are loaded, events published."""

    __slots__ = ("_attempt", "_versioned")

    def __init__(self, rows: Rows, outbox: Outbox, id: str) -> None:
        """`id` names the work: its events have the same ids at each attempt."""
        super().__init__(rows, outbox)
        self._attempt = id
        self._versioned: dict[str, Versioned] = {}

    def _id(self) -> str:
        return f"{self._attempt}-{self._staged}"

    def publish(self, event: Event, *, of: Aggregate | Versioned | None = None, **how: Any) -> None:
        """Stage an event, as `Transaction.publish`; it is in the outbox exactly if this commits.

        `of` is an `Aggregate` that was loaded by `load` or `load_or_create`, or is new: as in a
        handler. Or it is a `Versioned` row that is added or changed here: the version that it is
        written with is the event's sequence, and there is one event of it.
        """
        if not isinstance(of, Versioned):
            super().publish(event, of=of, **how)
            return
        # A savepoint may have taken some back.
        self._versioned = {id: row for id, row in self._versioned.items() if self._outbox.holds(id)}
        if how or any(of is row for row in self._versioned.values()):
            raise TypeError("publish(…, of=row) of a Versioned row is called once, with no key=")
        id = self._id()
        super().publish(event)
        self._versioned[id] = of

    def place_of(self, id: str) -> tuple[str, int] | None:
        """Return key and sequence of the event of a versioned row, which is written now."""
        row = self._versioned.get(id)
        if row is None:
            return None
        identity = sa.inspect(row).identity
        if row not in cast(WriterSession, self._rows.session.sync_session).written or not identity:
            raise TypeError(
                f"publish(…, of={type(row).__name__}) is for a row that is added or changed here:"
                " an event of another one would have no place in its order"
            )
        return aggregate.record_key(type(row), identity), row.version


class Writer:
    """Changes rows and publishes events together, outside of any handler."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        source: str,
        max_event_bytes: int,
        attempts: int = 5,
        handlers: Handlers | None = None,
        claims: Claims | None = None,
    ) -> None:
        """See `Service.writer`, which makes one. `source` is the events' own; `handlers` know the
        effects that `call` is for; `claims` keeps payloads that are too large to travel."""
        self._engine = engine
        self._source = source
        self._max_event_bytes = max_event_bytes
        self._attempts = attempts
        self._handlers = handlers or Handlers()
        self._claims = claims

    async def write(self, work: Callable[[Writing], Awaitable[T]]) -> T:
        """Do the work in a transaction; again, on a fresh session, when others were quicker.

        Pauses grow up to a second and differ, so that writers do not meet again. Raises `Conflict`
        when all attempts are used up, `StoreUnavailable` if a payload is too large to travel and
        can't be kept elsewhere, and `HandlerFault` for work that ends the transaction, or goes on
        after an error of a statement; what the work raises is nobody else's to try again.
        """
        id = uuid4().hex  # the events are the same at each attempt

        def give_up(state: RetryCallState) -> T:
            assert state.outcome is not None
            raise Conflict(self._attempts) from state.outcome.exception()

        retrying = AsyncRetrying(
            retry=retry_if_exception(_is_conflict),
            wait=wait_random_exponential(0.01, max=_LONGEST_PAUSE),
            stop=stop_after_attempt(self._attempts),
            after=lambda _: metrics.conflicts.add(1),
            retry_error_callback=give_up,
        )
        return await retrying(self._attempt, work, id)

    async def _attempt(self, work: Callable[[Writing], Awaitable[T]], id: str) -> T:
        outbox = Outbox(
            self._source,
            self._max_event_bytes,
            effects=self._handlers.effects,
            claims=self._claims,
        )
        async with self._engine.connect() as connection:
            driver = await driver_of(connection)
            try:
                async with connection.begin():
                    # The transaction begins with its first statement.
                    await connection.execute(sa.text(BEGIN))
                    result = await self._work(connection, driver, outbox, work, id)
                    if outbox.calls:
                        await backlog.add(driver, backlog.called(self._handlers, outbox.calls))
                    await outbox.write(driver)
            except Exception:
                await clean(connection, driver)
                raise
            except BaseException:
                await connection.invalidate()  # it may be in the middle of a statement
                raise
        return result

    async def _work(
        self,
        connection: AsyncConnection,
        driver: asyncpg.Connection,
        outbox: Outbox,
        work: Callable[[Writing], Awaitable[T]],
        id: str,
    ) -> T:
        guard = Guard(outbox)
        async with own_session(connection, driver, guard, BEGIN, WriterSession) as session:
            writing = Writing(Rows(session), outbox, id)
            try:
                result = await InContext(work(writing), guard)
            finally:
                writing.end()
        # Rows are locked now, so that their events have the order of their versions.
        outbox.place(writing.place_of)
        return result


def _is_conflict(error: BaseException) -> bool:
    return isinstance(error, StaleDataError) or sqlstate_of(error) in _RETRYABLE
