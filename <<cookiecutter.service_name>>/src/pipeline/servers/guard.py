"""The guard of a connection that handlers use: it checks their statements, and rejects some."""

import asyncio
import decimal
import re
import traceback
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextvars import ContextVar, copy_context
from types import FrameType
from typing import Any, Generic, NoReturn, Protocol, TypeVar, cast

import asyncpg
from sqlalchemy.sql.elements import (
    ReleaseSavepointClause,
    RollbackToSavepointClause,
    SavepointClause,
)

from pipeline.errors import is_contention

T = TypeVar("T")

GUARD = "pipeline guard"
"""Key in the `info` of a connection: the `Guard` of the message that uses it."""
_CONTROL = re.compile(
    r"(?:\s|/\*.*?\*/|--[^\n]*\n)*(BEGIN|START\s+TRANSACTION|COMMIT|END|ROLLBACK|ABORT|SAVEPOINT|RELEASE"
    r"|PREPARE\s+TRANSACTION)\b",
    re.IGNORECASE | re.DOTALL,
)
_QUOTED = re.compile(
    r"\bE'(?:\\.|[^'\\])*'|'[^']*'|\"[^\"]*\"|\$(\w*)\$.*?\$\1\$|/\*.*?\*/|--[^\n]*",
    re.IGNORECASE | re.DOTALL,
)
"""Parts of a text that hold no statement of their own."""
_SAVEPOINT_CLAUSES = (SavepointClause, RollbackToSavepointClause, ReleaseSavepointClause)
_USE_BEGIN_NESTED = (
    "savepoints are made by `async with tx.session.begin_nested()`, which the engine follows, and"
    " the transaction is ended by the engine"
)
UNDER_WAY = "a statement is still under way: await all that the handler has begun"
CANCELLED = (
    "a statement was cancelled under way, by asyncio.timeout or a task group: its transaction is"
    " lost. Bound a statement by SET LOCAL statement_timeout inside begin_nested(), or the whole"
    " handler by timeout="
)
HAS_RETURNED = "the handler has ended: await what it has begun before it returns"
NOT_ITS_CONNECTION = (
    f"{HAS_RETURNED}; or it has used another connection of the engine, such as a Writer's, whose"
    " changes would stay if the message fails: use tx.session"
)
HAS_ENDED = "the transaction has ended or is read only: " + _USE_BEGIN_NESTED


class HandlerFault(RuntimeError):
    """A handler has done what would affect other messages; the text says what to do instead."""


class Stages(Protocol):
    """Holds what handlers stage to be written when the transaction commits."""

    staged: Any
    """What is staged so far; setting it to an earlier value drops what was staged since."""


CURRENT_GUARD: ContextVar["Guard | None"] = ContextVar("pipeline_guard", default=None)
"""Guard of the handler's call that the code runs in, also in tasks that it has started; None in the
engine's own code."""


class Guard:
    """Checks the statements of one message, and keeps what it stages in step with savepoints."""

    def __init__(self, outbox: Stages) -> None:
        self._outbox = outbox
        self._savepoints: list[tuple[Any, BaseException | None]] = []
        """What was staged, and `contention`, before each open savepoint of the session."""
        self._is_undone = False
        """Whether the latest open savepoint was rolled back."""
        self._unsent = 0
        """Savepoints that the session has begun, and whose statement was not sent yet."""
        self.under_way: set[object] = set()
        """Statements of SQLAlchemy that have not ended."""
        self.fault: HandlerFault | None = None
        self.contention: BaseException | None = None
        """Error of a statement in whose way locks were, unless a savepoint has undone it."""
        self.was_cancelled = False
        """Whether a statement was cancelled under way, which makes the connection unusable."""
        self.stray: HandlerFault | None = None
        """Fault of a task that sent a statement after its handler had ended, or of a handler that
        used another connection."""

    def refuse_statement_after_handler(self, guard: "Guard | None") -> None:
        """Raise `HandlerFault` unless the connection's guard is this one.

        Otherwise a task of a handler that has returned sends the statement, or a handler uses
        another connection of the engine.
        """
        if guard is not self:
            self.stray = HandlerFault(NOT_ITS_CONNECTION)
            raise self.stray

    def begin_savepoint(self) -> None:
        """Note what is staged so far."""
        self._savepoints.append((self._outbox.staged, self.contention))
        self._unsent += 1

    def roll_back(self) -> None:
        """Note that the latest savepoint was rolled back; `end_savepoint` follows."""
        self._is_undone = bool(self._savepoints)

    def end_savepoint(self) -> bool:
        """End a savepoint that was released or rolled back; return whether it was rolled back."""
        earlier, was_undone = self._savepoints.pop(), self._is_undone
        if was_undone:
            (self._outbox.staged, self.contention), self._is_undone = earlier, False
        self._unsent = min(self._unsent, len(self._savepoints))
        return was_undone

    def before(self, text: str, context: Any, driver: asyncpg.Connection) -> None:
        """Raise `HandlerFault` for a statement of SQLAlchemy that must not be sent."""
        clause = context.invoked_statement
        is_savepoint = isinstance(clause, _SAVEPOINT_CLAUSES)
        if isinstance(clause, SavepointClause):
            self._unsent -= 1
        if (self._unsent < 0) if is_savepoint else _CONTROL.match(text):
            self.refuse(text)
        if not driver.is_in_transaction():
            raise self.note(HAS_ENDED)
        self.under_way.add(context)

    def fail(self, error: BaseException | None) -> None:
        """Note the error of a statement."""
        if error is not None and is_contention(error):
            self.contention = error

    def refuse(self, text: str) -> NoReturn:
        """Raise `HandlerFault` for a statement that ends the transaction or a part of it."""
        raise self.note(f"{text.split(maxsplit=1)[0]} in a handler: {_USE_BEGIN_NESTED}")

    def after(self, text: str) -> None:
        """Note a fault if a text that asyncpg has sent controls the transaction."""
        for statement in _QUOTED.sub("", text).split(";"):
            if control := _CONTROL.match(statement):
                self.note(f"{control[1]} in a handler: {_USE_BEGIN_NESTED}")

    def note(self, text: str) -> HandlerFault:
        """Note a fault, also if the handler catches it; returns it."""
        self.fault = HandlerFault(text)
        return self.fault


class GuardedConnection(asyncpg.Connection):  # type: ignore[misc]  # it has no types
    """asyncpg's connection: notes the fault of a handler that closes it, and adds to BEGIN."""

    __slots__ = ("first_statements",)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.first_statements = ""
        """Statements that are sent together with the BEGIN of the next transaction."""

    async def execute(self, query: str, *arguments: Any, timeout: float | None = None) -> str:  # noqa: ASYNC109
        if self.first_statements and query.startswith("BEGIN"):
            query, self.first_statements = query + self.first_statements, ""
        status: str = await super().execute(query, *arguments, timeout=timeout)
        return status

    async def close(self, *, timeout: float | None = None) -> None:  # noqa: ASYNC109
        self._note_closing()
        await super().close(timeout=timeout)

    def terminate(self) -> None:
        self._note_closing()
        super().terminate()

    def _note_closing(self) -> None:
        # SQLAlchemy closes it after a statement that was cancelled, or if it was lost.
        guard = CURRENT_GUARD.get()
        if guard and not guard.was_cancelled and not self.is_closed():
            guard.note(f"connection.close() in a handler: {_USE_BEGIN_NESTED}")


def watch_coroutines() -> None:
    """Treat a coroutine that a handler never awaits as a fault of its message, and warn as before.

    This changes the warning filters of the process, so that each occurrence is reported.
    """
    warnings.filterwarnings("always", ".* was never awaited", RuntimeWarning)
    warn = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *args: Any) -> None:
        if (
            category is RuntimeWarning
            and "never awaited" in str(message)
            and (guard := CURRENT_GUARD.get())
        ):
            guard.fault = HandlerFault(f"{message}: write `await` before it")
        warn(message, category, *args)

    warnings.showwarning = show  # type: ignore[assignment]


class InContext(Generic[T]):
    """Awaits a coroutine in a context of its own: variables that it sets end with it."""

    __slots__ = ("_coroutine", "_guard")

    def __init__(self, call: Awaitable[T], guard: Guard | None = None) -> None:
        """`call` is the result of a coroutine function; `guard` checks its statements."""
        self._coroutine = cast(Coroutine[Any, Any, T], call)
        self._guard = guard

    def __await__(self) -> Generator[Any, Any, T]:
        run, coroutine = copy_context().run, self._coroutine
        step: Callable[..., Any] = self._begin
        value: Any = None
        while True:
            try:
                waits_for = run(step, value)
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                value = yield waits_for
                step = coroutine.send
            except BaseException as error:
                value, step = error, coroutine.throw

    def _begin(self, _: None) -> Any:
        CURRENT_GUARD.set(self._guard)
        # A copy, because code changes the context object in place.
        decimal.setcontext(decimal.getcontext().copy())
        return self._coroutine.send(None)


def stack_of(task: asyncio.Task[Any] | None) -> str:
    """Return where a task waits, through everything that it awaits."""
    places = ((frame, frame.f_lineno) for frame in frames_of(task))
    return "".join(traceback.StackSummary.extract(places).format())


def frames_of(task: asyncio.Task[Any] | None) -> Iterator[FrameType]:
    """Yield the frame of the task's coroutine, and of each that is awaited in turn."""
    awaited = cast(Any, task and task.get_coro())
    while frame := getattr(awaited, "cr_frame", None):
        yield frame
        awaited = awaited.cr_await
        inner = getattr(awaited, "gi_frame", None)
        if inner is not None and inner.f_code is InContext.__await__.__code__:
            awaited = inner.f_locals["coroutine"]
