"""The SQLAlchemy sessions of handlers and writers. `servers/guard.py` checks their statements.

Messages that only use `tx` share a session, which saves round trips. A message that uses
`tx.session` has a session of its own, on the connection of the batch: it starts empty, its changes
are flushed when its handler returns, and the state of the connection is reset.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial, wraps
from typing import Any, Protocol, TypeVar, cast

import asyncpg
from greenlet import getcurrent, greenlet
from sqlalchemy.event import listens_for
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import InstanceState, Session, SessionTransaction
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.util import IdentitySet

from onceward.servers.guard import (
    CANCELLED,
    GUARD,
    HAS_ENDED,
    UNDER_WAY,
    Guard,
    HandlerFault,
)

from . import statements
from .aggregate import Aggregate, Key

T = TypeVar("T")


class NeedsSession(BaseException):
    """A handler needs a session of its own, and is called again with one.

    Not an `Exception`, because handlers may catch these.
    """


class RowSession(Session):
    """A session that records which rows were added to it.

    The engine uses it by `by_engine`. All other code is a handler's, whatever thread, task or
    context runs it.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.added = IdentitySet()
        """Rows that were added and flushed: no other transaction can see them."""
        self._of_engine: set[greenlet] = set()

    def by_engine(self, use: Callable[[Session], T]) -> T:
        """Use the session for the engine; each statement of an AsyncSession has a greenlet."""
        current = getcurrent()
        self._of_engine.add(current)
        try:
            return use(self)
        finally:
            self._of_engine.remove(current)

    @property
    def is_of_handler(self) -> bool:
        """Whether the code that runs is not the engine's."""
        return getcurrent() not in self._of_engine


async def by_engine(session: AsyncSession, use: Callable[[Session], T]) -> T:
    """Use a session for the engine, with statements."""
    return await session.run_sync(lambda sync: cast(RowSession, sync).by_engine(use))


class SharedSession(RowSession):
    """The session of the messages that have none of their own; no handler may use it.

    A handler can reach it through its rows, by a lazy relationship or by `object_session`. Then
    `want` ends the call, and the handler is called again with a session of its own.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_wanted = False
        """Whether a handler needs a session of its own."""
        self.recent: list[Any] = []
        """Rows that the message has added, also by a relationship."""

    @property
    def bind(self) -> Any:
        """The connection of the transaction."""
        self.want()
        return self._bind

    @bind.setter
    def bind(self, connection: Any) -> None:
        self._bind = connection

    def want(self) -> None:
        """Note that a handler needs a session of its own, and leave it; nothing for the engine."""
        if self.is_of_handler:
            self.is_wanted = True
            raise NeedsSession


def _wanting(name: str) -> Callable[..., Any]:
    original = getattr(Session, name)

    @wraps(original)
    def method(self: SharedSession, *args: Any, **options: Any) -> Any:
        self.want()
        return original(self, *args, **options)

    return method


_READ_ONLY_METHODS = {"identity_key", "is_modified", "object_session"}
"""Methods of a session that change nothing."""
_WANTING_METHODS = {name for name, one in vars(Session).items() if name[0] != "_" and callable(one)}
for _name in (_WANTING_METHODS - _READ_ONLY_METHODS) | {"_execute_internal", "_expunge_states"}:
    setattr(SharedSession, _name, _wanting(_name))


class LockedRows(Protocol):
    """What a session of its own needs of its rows, which know the session."""

    locked: dict[tuple[type[Aggregate], Key], Aggregate | None]
    error: BaseException | None

    def check(self) -> None:
        """Raise `HandlerFault` for a row that was changed or deleted without a lock."""


class OwnSession(RowSession):
    """The session of one message, or of a writer."""

    guard: Guard
    rows: LockedRows
    earlier: dict[SessionTransaction, tuple[Any, ...]]
    """What was staged, the guard's `contention` and the locked rows before each open savepoint."""
    dropped: set[InstanceState[Any]]
    """Rows that it has expunged."""
    written: IdentitySet
    """Rows that it has inserted or updated."""
    undone: SessionTransaction | None = None
    """The savepoint that was rolled back last."""

    def commit(self) -> None:
        self.guard.refuse("session.commit()")

    def close(self) -> None:
        self.guard.refuse("session.close()")

    def reset(self) -> None:
        self.guard.refuse("session.reset()")

    def check_origin(self, state: InstanceState[Any]) -> None:
        """Raise `HandlerFault` for a row that this session has not loaded: it may be out of date.

        SQLAlchemy itself compares versions by a `version_id_col`. A writer may take every row: the
        application has loaded it, and no batch shares it.
        """
        is_own = state.key is None or state.session_id == self.hash_key or state in self.dropped
        if self.guard.shares and not is_own and state.mapper.version_id_col is None:
            raise self.guard.note(
                f"{state.class_.__name__} {state.identity!r} is no row of this message's session,"
                " and may have changed since it was loaded: load it again (an Aggregate by"
                " tx.load), or refer to it by its key"
            )

    def _before_attach(self, state: InstanceState[Any], row: object) -> bool:
        self.check_origin(state)
        return super()._before_attach(state, row)

    def _merge(self, state: InstanceState[Any], *values: Any, **options: Any) -> Any:
        self.check_origin(state)
        return super()._merge(state, *values, **options)

    def unwritten(self) -> set[InstanceState[Any]]:
        """Return the rows whose version was raised by an event, and is not written yet."""
        return {
            state
            for state in (*self._new, *self.identity_map._modified)
            if issubclass(state.class_, Aggregate)
            and (version := state.dict.get("version"))
            and version != state.committed_state.get("version", version)
        }


def _keeping(name: str) -> Callable[..., Any]:
    original = getattr(Session, name)

    @wraps(original)
    def method(self: OwnSession, *args: Any, **options: Any) -> None:
        # Neither for the engine, nor for a savepoint that is rolled back (`to_transient`).
        before = self.unwritten() if self.is_of_handler and not options else set()
        original(self, *args, **options)
        if before - self.unwritten():
            raise self.guard.note("a row whose event was published is dropped: flush before")

    return method


for _name in ("_expire_state", "_expunge_states", "expire_all", "expunge_all"):
    setattr(OwnSession, _name, _keeping(_name))


@listens_for(OwnSession, "after_flush")
def _note_written(session: OwnSession, _: object) -> None:
    session.written.update(session.new)
    session.written.update(row for row in session.dirty if session.is_modified(row))


@listens_for(SharedSession, "transient_to_pending")
def _note_new(session: SharedSession, row: object) -> None:
    session.recent.append(row)


@listens_for(RowSession, "pending_to_persistent", propagate=True)
def _note_added(session: RowSession, row: object) -> None:
    session.added.add(row)


@listens_for(SharedSession, "detached_to_persistent")
def _note_detached(session: SharedSession, _: object) -> None:
    session.want()  # which says whose row it is


@listens_for(OwnSession, "persistent_to_detached")
def _note_dropped(session: OwnSession, row: object) -> None:
    session.dropped.add(instance_state(row))


@listens_for(OwnSession, "before_flush")
def _check_locks(session: OwnSession, *_: object) -> None:
    session.rows.check()


@listens_for(OwnSession, "after_transaction_create")
def _begin_savepoint(session: OwnSession, transaction: SessionTransaction) -> None:
    if transaction.nested:
        guard = session.guard
        guard.unsent.append(transaction)
        staged, locked = guard.outbox.staged, session.rows.locked.copy()
        session.earlier[transaction] = staged, guard.contention, locked


@listens_for(OwnSession, "after_rollback")
def _roll_back(session: OwnSession) -> None:
    session.undone = session.get_nested_transaction()


@listens_for(OwnSession, "after_transaction_end")
def _end_savepoint(session: OwnSession, transaction: SessionTransaction) -> None:
    if not transaction.nested:
        return
    guard, rows, earlier = session.guard, session.rows, session.earlier.pop(transaction)
    if transaction in guard.unsent:  # it had no statement
        guard.unsent.remove(transaction)
    if transaction is session.undone:
        guard.outbox.staged, guard.contention, rows.locked = earlier
        rows.error = None
        kept = (row for row in session.added if instance_state(row).persistent)
        session.added = IdentitySet(kept)
        kept = (row for row in session.written if not instance_state(row).expired)
        session.written = IdentitySet(kept)


def new_session(connection: AsyncConnection, kind: type[RowSession]) -> AsyncSession:
    """Return a session in the transaction of the connection, which it does not commit."""
    return AsyncSession(
        connection,
        sync_session_class=kind,
        autoflush=kind is not SharedSession,
        expire_on_commit=False,
        close_resets_only=False,
        join_transaction_mode="rollback_only",
    )


@asynccontextmanager
async def own_session(
    connection: AsyncConnection,
    driver: asyncpg.Connection,
    guard: Guard,
    restore_limits: str,
) -> AsyncIterator[AsyncSession]:
    """Return a session for one message, in the transaction of the connection.

    At the end of the block its changes are flushed and the state of the connection is reset;
    `restore_limits` is the statement that sets the transaction's limits again. Raises
    `HandlerFault` if the handler has made that impossible.
    """
    sync = connection.sync_connection
    begun = connection.get_nested_transaction() or connection.get_transaction()
    assert sync is not None
    assert begun is not None
    # `Session.connection(execution_options=…)` sets them in place.
    options = sync._execution_options
    info = connection.info
    others, info[GUARD] = info.get(GUARD), guard
    # Another partition would get the connection while this transaction still uses its driver.
    sync.close = partial(guard.refuse, "connection.close()")  # type: ignore[method-assign]
    session = new_session(connection, OwnSession)
    own = cast(OwnSession, session.sync_session)
    own.guard, own.earlier, own.dropped, own.written = guard, {}, set(), IdentitySet()
    try:
        yield session
        # A task that the handler has started last and did not await starts its statement now.
        await asyncio.sleep(0)
        if not begun.is_active and not driver.is_closed():
            raise HandlerFault(HAS_ENDED)  # perhaps only for SQLAlchemy, whose COMMIT does nothing
        await _end(session, driver, guard, restore_limits)
    except BaseException as error:
        fault = HandlerFault(CANCELLED) if guard.was_cancelled else guard.fault
        if fault and fault is not error and isinstance(error, Exception):
            raise fault from error
        raise
    finally:
        info[GUARD] = others
        del sync.close
        sync._execution_options = options
        own.by_engine(Session.close)


async def _end(
    session: AsyncSession, driver: asyncpg.Connection, guard: Guard, restore_limits: str
) -> None:
    if guard.under_way:
        raise HandlerFault(UNDER_WAY)
    if guard.fault:
        raise guard.fault
    if not driver.is_closed() and not driver.is_in_transaction():
        raise HandlerFault(HAS_ENDED)
    try:
        while (savepoint := session.get_nested_transaction()) is not None:
            await savepoint.commit()
        await by_engine(session, Session.flush)
        checks = f"{statements.CHECK_GUARD}; {statements.CHECK_DEFERRED}"
        await driver.execute(f"{checks}; {statements.RESET_SESSION}; {restore_limits}")
    except asyncpg.DivisionByZeroError as error:
        raise HandlerFault(HAS_ENDED) from error
    except asyncpg.InFailedSQLTransactionError as error:
        raise HandlerFault(
            "a statement has failed, and the handler went on: wrap what may fail in"
            " `async with tx.session.begin_nested()`"
        ) from error
    except asyncpg.InterfaceError as error:
        if driver.is_closed():
            raise
        raise HandlerFault(UNDER_WAY) from error


async def clean(connection: AsyncConnection, driver: asyncpg.Connection) -> None:
    """Roll back and reset the state of the connection; close it if that fails."""
    try:
        await connection.rollback()
        await driver.execute(statements.RESET_SESSION)
    except Exception:
        await connection.invalidate()  # it is lost, or a statement is under way
