"""The guard of a connection that handlers use: it checks their statements, and rejects some."""

import asyncio
import decimal
import logging
import re
import traceback
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping
from contextvars import ContextVar, copy_context
from functools import wraps
from types import FrameType, coroutine
from typing import Any, NoReturn, TypeVar, cast

import asyncpg
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.sql.elements import (
    ReleaseSavepointClause,
    RollbackToSavepointClause,
    SavepointClause,
)
from sqlalchemy.sql.selectable import CompoundSelect, Select

from onceward.errors import OncewardError, is_contention
from onceward.observe.statements import code_of
from onceward.observe.watchdog import RUNNING

T = TypeVar("T")

log = logging.getLogger(__name__)

GUARD = "pipeline guard"
"""Key in the `info` of a connection: the `Guard` of the message that uses it."""
_REFUSED = re.compile(
    r"\s*(?:(BEGIN|START|COMMIT|END|ROLLBACK|ABORT|SAVEPOINT|RELEASE|PREPARE\s+TRANSACTION)"
    r"|(PREPARE|DEALLOCATE)|(SET\s+CONSTRAINTS))\b",
    re.IGNORECASE,
)
_ALLOWED = (RollbackToSavepointClause, ReleaseSavepointClause, Select, CompoundSelect, UpdateBase)
"""Statements that SQLAlchemy makes, and that are none of these."""
_USE_BEGIN_NESTED = (
    "savepoints are made by `async with tx.session.begin_nested()`, which the engine follows, and"
    " the transaction is ended by the engine"
)
_PREPARED = "prepared statements outlive the message; asyncpg prepares by itself what is executed"
_MODES = (
    "it would apply to other messages of the transaction: have the constraint INITIALLY DEFERRED,"
    " or INITIALLY IMMEDIATE, in the database"
)
_REASONS = (_USE_BEGIN_NESTED, _PREPARED, _MODES)
"""By the group of `_REFUSED`."""
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


class HandlerFault(OncewardError, RuntimeError):
    """A handler has done what would affect other messages; the text says what to do instead."""


class LoopBlocked(BaseException):
    """Interrupts one call of the service's code; no `except Exception` catches it."""

    is_over = has_blocked = False
    """Whether the call is over, though its tasks may go on, and whether it ends with this."""


CURRENT_GUARD: ContextVar["Guard | None"] = ContextVar("pipeline_guard", default=None)
"""Guard of the handler's call that the code runs in, also in tasks that it has started; None in the
engine's own code."""
INTERRUPTION: ContextVar[LoopBlocked | None] = ContextVar("pipeline_interruption", default=None)
"""What interrupts the call that the code runs in, also in tasks that it has started."""


class Guard:
    """Checks the statements of one message."""

    def __init__(self, outbox: Any, *, shares: bool = True) -> None:
        """`outbox` holds what the message stages; its session undoes that with a savepoint.
        `shares`: its transaction can have other messages.
        """
        self.outbox = outbox
        self.shares = shares
        self.unsent: list[object] = []
        """Savepoints that the session has begun, and whose statement was not sent yet."""
        self.under_way: set[object] = set()
        """Statements of SQLAlchemy that have not ended."""
        self.fault: HandlerFault | None = None
        self.contention: BaseException | None = None
        """Error of a statement in whose way locks were, unless a savepoint has undone it."""
        self.has_waited = False
        """Whether the call has waited for anything, so that other code has run meanwhile."""
        self.was_cancelled = False
        """Whether a statement was cancelled under way, which makes the connection unusable."""
        self.stray: HandlerFault | None = None
        """Fault of a task that sent a statement after its handler had ended, or of a handler that
        used another connection."""

    def before(self, text: str, context: Any, driver: asyncpg.Connection) -> None:
        """Raise `HandlerFault` for a statement of SQLAlchemy that must not be sent."""
        clause = context.invoked_statement
        if isinstance(clause, SavepointClause) and self.unsent:
            self.unsent.pop(0)  # that of an outer one is sent first
        elif not isinstance(clause, _ALLOWED) and (fault := self.check(text)):
            raise fault
        if not driver.is_in_transaction():
            raise self.note(HAS_ENDED)
        self.under_way.add(context)

    def fail(self, error: BaseException | None) -> None:
        """Note the error of a statement."""
        if error is not None and is_contention(error):
            self.contention = error

    def refuse(self, call: str) -> NoReturn:
        """Raise `HandlerFault` for a call that ends the transaction or a part of it."""
        raise self.note(f"{call} in a handler: {_USE_BEGIN_NESTED}")

    def check(self, text: str, *, controls: bool = True) -> HandlerFault | None:
        """Return and note the fault of statements whose effect would outlive the message and, with
        `controls`, of those that end the transaction or a part of it."""
        for statement in code_of(text).split(";"):
            found = _REFUSED.match(statement)
            place = (found and found.lastindex) or 0
            if found and place > (not controls) and (place != 3 or self.shares):
                words = " ".join(found[place].split())
                return self.note(f"{words} in a handler: {_REASONS[place - 1]}")
        return None

    def note(self, text: str) -> HandlerFault:
        """Note a fault, also if the handler catches it; returns it."""
        self.fault = HandlerFault(text)
        return self.fault


class GuardedConnection(asyncpg.Connection):  # type: ignore[misc]  # it has no types
    """asyncpg's connection: adds to BEGIN, and notes the fault of a handler that closes it or makes
    settings which are not the transaction's."""

    first_statements = ""
    """Statements that are sent together with the BEGIN of the next transaction."""
    info: Mapping[str, Any] = {}
    """What SQLAlchemy's pool keeps with the connection."""

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
        guard = self.info.get(GUARD)
        if guard and not guard.was_cancelled and not self.is_closed():
            guard.note(f"connection.close() in a handler: {_USE_BEGIN_NESTED}")


def _checking(name: str) -> Callable[..., Any]:
    original = getattr(GuardedConnection, name)
    # SQLAlchemy rolls back by `execute`, which the query log has, but not what is prepared.
    controls = name in ("prepare", "cursor")

    @wraps(original)
    def method(self: GuardedConnection, *args: Any, **options: Any) -> Any:
        guard = CURRENT_GUARD.get()
        if guard and not guard.under_way:  # SQLAlchemy's statements were checked before
            text = args[0] if args else options.get("query") or options["command"]
            if fault := guard.check(text, controls=controls):
                raise fault
        return original(self, *args, **options)

    return method


def _refusing(name: str) -> Callable[..., Any]:
    original = getattr(asyncpg.Connection, name)

    @wraps(original)
    def method(self: GuardedConnection, *args: Any, **options: Any) -> Any:
        if self.is_in_transaction():
            text = f"{name}() in a handler would outlive the message: use a connection of your own"
            raise (guard.note(text) if (guard := CURRENT_GUARD.get()) else HandlerFault(text))
        return original(self, *args, **options)

    return method


for _name in vars(asyncpg.Connection):
    if _name.startswith(("execute", "fetch", "prepare", "cursor")):
        setattr(GuardedConnection, _name, _checking(_name))
    if _name.startswith(("add_", "remove_", "set_", "reset_")):
        setattr(GuardedConnection, _name, _refusing(_name))


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


@coroutine
def in_context(
    call: Awaitable[T],
    guard: Guard | None,
    cancellations: list[int],
    cancelling: Callable[[], int],
) -> Generator[Any, Any, T]:
    """Await a coroutine in a context of its own: variables that it sets end with it.

    `call` is the result of a coroutine function; `guard` checks its statements. `cancellations[0]`
    becomes how often it has cancelled its task and not taken that back, by the task's `cancelling`:
    what was requested while it waited, as by a timer or a task group, it takes back first. A call
    of which a step has taken longer than `RUNNING.limit` ends with `LoopBlocked`, whatever it
    returns or raises, unless it was cancelled from outside.
    """
    run, inner = copy_context().run, cast("Coroutine[Any, Any, T]", call)  # quicker as text
    run(CURRENT_GUARD.set, guard)
    this = LoopBlocked("blocks the event loop: await, or use asyncio.to_thread")
    run(INTERRUPTION.set, this)
    # A copy, because code changes the context object in place.
    run(decimal.setcontext, decimal.getcontext().copy())
    step: Callable[..., Any] = inner.send
    value: Any = None
    left, others = cancelling(), 0
    while True:
        requested = cancelling()
        others += requested - left
        begun = RUNNING.since = RUNNING.seconds
        try:
            try:
                waits_for = run(step, value)
            finally:
                RUNNING.since = RUNNING.seconds
                this.has_blocked |= RUNNING.since - begun >= RUNNING.limit
                left = cancelling()
                if left != requested:
                    others += min(0, left - requested)
                    change = max(0, left - requested) + min(0, others)
                    cancellations[0] = max(0, cancellations[0] + change)
                    others = max(0, others)
        except BaseException as end:
            this.is_over = True
            if this.has_blocked and not (others and isinstance(end, asyncio.CancelledError)):
                log.warning("a call was interrupted, and ends with this error", exc_info=this)
                raise this from None
            if isinstance(end, StopIteration):
                return cast(T, end.value)
            raise
        if guard is not None:
            guard.has_waited = True
        try:
            value = yield waits_for
            step = inner.send
        except BaseException as error:
            value, step = error, inner.throw


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise in the call that runs what it ends with, if its step has taken too long.

    A handler of signals. Nothing is raised in asyncpg, which would lose its state: the process
    could die of that. What the call does to clean up has a third of the time of a step.
    """
    RUNNING.count()
    call = INTERRUPTION.get()
    if call is None or call.is_over or not RUNNING.is_over:
        return
    call.has_blocked = True
    RUNNING.since = RUNNING.seconds - RUNNING.limit * 2 / 3
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("asyncpg."):
            return
        frame = frame.f_back
    raise call


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
        if inner is not None and inner.f_code is in_context.__code__:
            awaited = inner.f_locals["inner"]
