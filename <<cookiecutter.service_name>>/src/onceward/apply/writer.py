"""Writers without a message: an HTTP API or a job that changes rows and publishes events.

They hold no lock between reading and writing. If another transaction has changed a row meanwhile,
the version that is checked by the write shows it, and the work is repeated with the new row.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Mapped, declared_attr, mapped_column
from sqlalchemy.orm.exc import StaleDataError
from tenacity import (
    AsyncRetrying,
    retry_if_exception,
    stop_after_attempt,
    wait_random_exponential,
)

from onceward.errors import OncewardError, sqlstate_of
from onceward.events.event import Event
from onceward.handlers import aggregate
from onceward.handlers.aggregate import Aggregate
from onceward.handlers.registry import Handlers
from onceward.handlers.rows import Rows
from onceward.handlers.sessions import OwnSession, clean, own_session
from onceward.handlers.staged import StagedEvent
from onceward.handlers.staging import Outbox
from onceward.handlers.statements import END_GUARD, GUARD_WRITER
from onceward.handlers.transaction import UnitOfWork
from onceward.observe import metrics
from onceward.servers.database import driver_of
from onceward.servers.guard import Guard, HandlerFault, LoopBlocked
from onceward.servers.service_code import call_service

from . import backlog
from .claim_check import ClaimCheck
from .encryption import Encryption

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


class Conflict(OncewardError):
    """Other transactions have changed the rows during each attempt; nothing was written."""

    def __init__(self, attempts: int) -> None:
        super().__init__(f"the rows were changed by others at each of {attempts} attempts")


class Writing(UnitOfWork):
    """One attempt of a writer: it loads rows and publishes events, as a handler does."""

    __slots__ = ("_attempt", "_versioned")

    def __init__(self, rows: Rows, outbox: Outbox, id: str) -> None:
        """`id` identifies the work: its events have the same ids at each attempt."""
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
        # The rollback of a savepoint may have removed some.
        self._versioned = {id: row for id, row in self._versioned.items() if self._outbox.holds(id)}
        if how or any(of is row for row in self._versioned.values()):
            raise TypeError("publish(…, of=row) of a Versioned row is called once, with no key=")
        id = self._id()
        super().publish(event)
        self._versioned[id] = of

    def placed(self, event: StagedEvent) -> StagedEvent:
        """Return the event; one of a versioned row, which is now written, with key and sequence."""
        row = self._versioned.get(event.event_id)
        if row is None:
            return event
        identity = sa.inspect(row).identity
        if row not in cast(OwnSession, self._rows.session.sync_session).written or not identity:
            raise TypeError(
                f"publish(…, of={type(row).__name__}) is for a row that is added or changed here:"
                " an event of another one would have no place in its order"
            )
        key = aggregate.record_key(aggregate.canonical(type(row), identity))
        return event._replace(key=key.encode(), subject=key, sequence=row.version)


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
        claims: ClaimCheck | None = None,
        encryption: Encryption | None = None,
        release: str = "",
    ) -> None:
        """See `Service.writer`, which makes one. `source` is the events' own; `handlers`
        has the effects for `call`; `claims` stores payloads too large for a record; `release` is
        stored beside what it writes."""
        self._engine = engine
        self._source = source
        self._max_event_bytes = max_event_bytes
        self._attempts = attempts
        self._handlers = handlers or Handlers()
        self._claims = claims
        self._encryption = encryption
        self._released = f"set_config('pipeline.release', '{release}', true)"

    async def write(self, work: Callable[[Writing], Awaitable[T]]) -> T:
        """Do the work in a transaction; repeat it, in a new session, after a conflict.

        Pauses grow up to a second and are random, so that writers do not conflict again. Raises
        `Conflict` when all attempts are used up, `StoreUnavailable` if a large payload can't be
        stored or a codec can't write an event now, and `HandlerFault` for work that ends the
        transaction, goes on after an error of a statement or blocks the event loop. Work that
        cancels itself is an error, too. Other errors of the work are raised without a repetition.
        """
        id = uuid4().hex
        retrying = AsyncRetrying(
            retry=retry_if_exception(_is_conflict),
            wait=wait_random_exponential(0.01, max=_LONGEST_PAUSE),
            stop=stop_after_attempt(self._attempts),
            after=lambda _: metrics.conflicts.add(1),
            reraise=True,
        )
        try:
            return await retrying(self._attempt, work, id)
        except LoopBlocked as error:
            raise HandlerFault(f"the work {error}") from error
        except Exception as error:
            if _is_conflict(error):
                raise Conflict(self._attempts) from error
            raise

    async def _attempt(self, work: Callable[[Writing], Awaitable[T]], id: str) -> T:
        outbox = Outbox(
            self._source,
            self._max_event_bytes,
            call_types=self._handlers.call_types,
            codecs=self._handlers.codecs,
            closed=self._handlers.closed,
            sent_size=self._claims.sent_size if self._claims else None,
        )
        guard = Guard(outbox, shares=False)
        async with self._engine.connect() as connection:
            driver = await driver_of(connection)
            try:
                # The transaction begins with its first statement.
                begin = f"{GUARD_WRITER} AND {self._released} IS NOT NULL"
                await connection.execute(sa.text(begin))
                done = f"{END_GUARD}, {self._released}"  # the session ends with RESET ALL
                async with own_session(connection, driver, guard, done) as own:
                    writing = Writing(Rows(own), outbox, id)

                    async def call(writing: Writing = writing) -> T:
                        return await work(writing)  # any awaitable

                    try:
                        result = await call_service(call(), guard)
                    finally:
                        writing.end()
                # Rows are locked now, so that their events have the order of their versions.
                outbox.replace({one.event_id: writing.placed(one) for one in outbox.events})
                await backlog.add_calls(driver, self._handlers, outbox.calls, self._encryption)
                if self._claims is not None:
                    await self._claims.store(driver, outbox)
                if self._encryption is not None:
                    await self._encryption.encrypt_events(driver, outbox)
                await outbox.write(driver)
                await connection.commit()
            except Exception:
                await clean(connection, driver)
                raise
            except BaseException:
                await connection.invalidate()  # it may be in the middle of a statement
                raise
        return result


def _is_conflict(error: BaseException) -> bool:
    return isinstance(error, StaleDataError) or sqlstate_of(error) in _RETRYABLE
