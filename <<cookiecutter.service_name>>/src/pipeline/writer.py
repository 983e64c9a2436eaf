"""Writers without a message: an HTTP API or a job that changes rows and publishes events.

They take no lock while somebody thinks. A row that another one has changed meanwhile is noticed by
its version when it is written, and everything is done again with the row as it is now.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Mapped, Session, declared_attr, mapped_column
from sqlalchemy.orm.exc import StaleDataError
from tenacity import (
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_random_exponential,
)

from . import aggregate, telemetry
from .database import driver_of
from .events import Event
from .failures import Attempts, as_raised
from .outbox import Outbox
from .references import Claims

T = TypeVar("T")

_LONGEST_PAUSE = 1.0
_RETRYABLE = ("40001", "40P01")
"""PostgreSQL's codes for a serialization failure and a deadlock."""


class Versioned:
    """Mixin for a mapped class whose rows are written without a lock.

    SQLAlchemy raises `version` with every write, and writes only over the version that was read. It
    writes row by row; for handlers, which lock their rows for a whole batch, there is `Aggregate`.
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


class Writing:
    """What a writer does in one attempt."""

    def __init__(self, session: AsyncSession) -> None:
        self.session = session
        """SQLAlchemy's session. Don't commit: that comes after the work."""
        self.published: list[tuple[Event, Versioned | None, str | None]] = []

    def publish(self, event: Event, *, of: Versioned | None = None, key: str | None = None) -> None:
        """Stage an event; it is in the outbox exactly if this attempt commits.

        `of` is the row that it tells of: its primary key becomes the record's key and the version
        that it is written with the event's sequence. So there is one event of a row, which was
        added or changed.
        """
        if of is not None and (key is not None or any(of is row for _, row, _ in self.published)):
            raise TypeError("publish(…, of=row) takes no key=, and is called once for a row")
        self.published.append((event, of, key))


class Writer:
    """Changes rows and publishes events together, outside of any handler."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        source: str,
        max_event_bytes: int,
        attempts: int = 5,
        claims: Claims | None = None,
    ) -> None:
        """`source` is the events' own, as `Service.source`; `claims` is what `Service.claims`
        opens."""
        self._engine = engine
        self._source = source
        self._max_event_bytes = max_event_bytes
        self._attempts = attempts
        self._claims = claims

    async def write(self, work: Callable[[Writing], Awaitable[T]]) -> T:
        """Do the work in a transaction; again, on a fresh session, when others were quicker.

        Pauses grow up to a second and differ, so that writers do not meet again. Raises `Conflict`
        when all attempts are used up, and `StoreAway` if a payload is too large to travel and can't
        be kept elsewhere; what the work raises is nobody else's to try again.
        """
        id = uuid4().hex  # the events are the same at each attempt

        def give_up(state: RetryCallState) -> T:
            assert state.outcome is not None
            raise Conflict(self._attempts) from state.outcome.exception()

        retrying = Attempts(
            retry=retry_if_exception(_is_conflict),
            wait=wait_random_exponential(0.01, max=_LONGEST_PAUSE),
            stop=stop_after_attempt(self._attempts),
            after=lambda _: telemetry.conflicted(),
            retry_error_callback=give_up,
        )
        return await retrying(self._attempt, work, id)

    async def _attempt(self, work: Callable[[Writing], Awaitable[T]], id: str) -> T:
        async with AsyncSession(self._engine, expire_on_commit=False) as session, session.begin():
            # The transaction begins with its first statement, and COPY needs one that has begun.
            await session.execute(sa.text("SELECT"))
            written = _Written(session.sync_session)
            writing = Writing(session)
            result = await work(writing)
            # Rows are locked from here on, so that their events have the order of their versions.
            await session.flush()
            outbox = Outbox(self._source, self._max_event_bytes, claims=self._claims)
            for number, (event, row, given) in enumerate(writing.published):
                key, version = (given, None) if row is None else written.key_and_version(row)
                outbox.stage(event, id=f"{id}-{number}", key=key, sequence=version)
            await outbox.write(await driver_of(await session.connection()))
            return result


class _Written:
    """The rows that a session has written."""

    def __init__(self, session: Session) -> None:
        rows = self._rows = set[object]()

        def add(session: Session, _: object) -> None:
            rows.update(session.new)
            rows.update(row for row in session.dirty if session.is_modified(row))

        sa.event.listen(session, "after_flush", add)

    def key_and_version(self, row: Versioned) -> tuple[str, int]:
        identity = sa.inspect(row).identity
        if row not in self._rows or identity is None:
            raise TypeError(
                f"publish(…, of={type(row).__name__}) is for a row that is added or changed here:"
                " an event of another one would have no place in its order"
            )
        return aggregate.record_key(type(row), identity), row.version


def _is_conflict(error: BaseException) -> bool:
    error = as_raised(error)
    return isinstance(error, StaleDataError) or getattr(error, "sqlstate", None) in _RETRYABLE
