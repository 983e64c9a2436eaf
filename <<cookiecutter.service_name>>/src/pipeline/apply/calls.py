"""Handlers at work: called one after the other, in one transaction."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter

import asyncpg
import pydantic_core
import sqlalchemy as sa
from opentelemetry.context import Context
from sqlalchemy.ext.asyncio import AsyncConnection

from pipeline.errors import describe_error, is_infrastructure, is_of_the_database, sqlstate_of
from pipeline.events.event import Event
from pipeline.handlers.aggregate import Aggregate, Key
from pipeline.handlers.policy import Reject, as_decision
from pipeline.handlers.registry import Handler
from pipeline.handlers.rows import Rows
from pipeline.handlers.sessions import DONE, SharedSession, isolated, own_session
from pipeline.handlers.staging import Outbox
from pipeline.handlers.transaction import EventBatch, Transaction
from pipeline.observe.traces import Current, ProcessSpans, traceparent
from pipeline.servers.guard import Guard, HandlerFault, InContext
from pipeline.servers.tasks import TimeSlice

from .batch import validated
from .deadline import Deadline
from .item import Item
from .outcome import BatchOutcome
from .sequence import followed, gap_before, note_applied

_READ_ONLY = "25006"
"""PostgreSQL's code for a transaction that is read only. A transaction that has written before is
so by `SET TRANSACTION`, and not by a failover."""


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


@dataclass
class Failures:
    """What has failed in the calls of a transaction."""

    needs_session: str | None = None
    """Consumer whose messages need sessions of their own."""
    failed: list[tuple[Item, BaseException]] = field(default_factory=list)
    """The first of them has failed by itself, the others maybe because of it."""
    in_batch: BaseException | None = None
    """Error of a handler that had several messages at once, any of which may be at fault."""
    traces: dict[bytes, str | None] = field(default_factory=dict)
    """`traceparent` of the calls that failed, by marker key."""
    late: Item | None = None
    """The latest of them, if it exceeded its time limit."""
    is_cut_off: bool = False
    """Whether a statement may still be under way on the connection."""
    is_certain: bool = False
    """Whether each of those that failed has failed by itself."""


class _CallFailed(Exception):
    """A handler has failed on a message. Rolls back the message's savepoint or session."""

    def __init__(
        self, error: BaseException, context: Context | None = None, *, is_cut_off: bool = False
    ) -> None:
        super().__init__()
        self.error = as_decision(error)
        self.trace = traceparent(context)
        self.is_cut_off = is_cut_off


class _NeedsOwnSession(Exception):
    """A handler has used its session, and has none of its own."""


async def call_handlers(items: Sequence[Item], attempt: Attempt, outcome: BatchOutcome) -> Failures:
    """Lock the rows that handlers have declared, and call the handlers in order.

    First come the messages that share a session: after one of them has failed the transaction is
    lost, and the others are called all the same, to find out which of them fail, too, but for those
    of the same order key. Then come those that have a session of their own each.
    """
    for entity, keys in _declared(items):
        await attempt.rows.lock(entity, keys)
    failures = Failures()
    begun = perf_counter()
    sharing, own = items, list[Item]()
    if attempt.own:
        sharing = [item for item in items if item.consumer not in attempt.own]
        own = [item for item in items if item.consumer in attempt.own]
    try:
        await _call_in_order(sharing, attempt, outcome, failures)
        if own and not (failures.failed or failures.in_batch):
            await attempt.rows.flush()
            failures.is_certain = attempt.memory.isolates
            await _call_in_order(own, attempt, outcome, failures)
            attempt.memory.isolates |= bool(failures.failed)
        if attempt.own and not (failures.failed or failures.in_batch):
            await attempt.driver.execute(DONE)
    except _NeedsOwnSession as need:
        failures.needs_session = str(need)
    _find_strays(attempt, outcome, failures)
    outcome.seconds = perf_counter() - begun
    return failures


def _find_strays(attempt: Attempt, outcome: BatchOutcome, failures: Failures) -> None:
    """Make what a message's code has tried after its handler had ended the message's failure."""
    failures.in_batch = failures.in_batch or attempt.guard.stray
    tried = {key: guard.stray for key, guard in attempt.guards.items() if guard.stray}
    if strays := attempt.strays | tried:
        failures.failed += [
            (item, strays[item.key]) for item in outcome.applied if item.key in strays
        ]


async def _call_in_order(
    items: Sequence[Item], attempt: Attempt, outcome: BatchOutcome, failures: Failures
) -> None:
    behind: set[bytes] = set()
    early: set[bytes] = set()
    turn = TimeSlice()
    for one in _runs(items):
        if turn.is_over:
            await turn.end()
        run = [item for item in one if item.order_key not in behind] if behind else one
        if not run:
            continue
        try:
            await _call_in_session(run, attempt, outcome, early)
        except _CallFailed as failure:
            failures.is_cut_off = failure.is_cut_off
            if len(run) > 1:
                if not failures.failed:
                    failures.in_batch = failure.error
                return
            item = run[0]
            failures.failed.append((item, failure.error))
            failures.traces[item.key] = failure.trace
            behind.add(item.order_key)
            if failure.is_cut_off:
                failures.late = item
                return
            if item.consumer in attempt.own:
                if not attempt.memory.isolates:
                    return
                continue
            if len(failures.failed) == 1:
                # Raises if the error of a statement has aborted the transaction: then all the
                # other calls would fail.
                await attempt.driver.execute("SELECT")
        except _NeedsOwnSession:
            raise
        except Exception:
            if failures.failed:
                return
            raise


async def _call_in_session(
    run: Sequence[Item], attempt: Attempt, outcome: BatchOutcome, early: set[bytes]
) -> None:
    """Call the handler of the messages that it takes together, in the session that it needs."""
    item = run[0]
    is_own = item.consumer in attempt.own
    try:
        async with attempt.own_session(item) if is_own else nullcontext():
            attempt.rows.begin_message()
            gap: int | None = 0
            if item.handler.gaps is not None:
                gap = await _gap_before(item, attempt, outcome, early)
            if gap is None:
                return
            result = await _handle(run, attempt, gap)
    except HandlerFault as error:
        raise _CallFailed(error, attempt.context, is_cut_off=True) from error
    except Exception as error:
        is_fault = sqlstate_of(error) == _READ_ONLY or not is_infrastructure(error)
        if not is_own or isinstance(error, _CallFailed | _NeedsOwnSession) or not is_fault:
            raise
        raise _CallFailed(error, attempt.context) from error
    if result is not None:
        outcome.returned[item.key] = result
    outcome.applied += run


async def _gap_before(
    item: Item, attempt: Attempt, outcome: BatchOutcome, early: set[bytes]
) -> int | None:
    try:
        return await gap_before(item, attempt.rows, outcome, early)
    except Reject as error:
        raise _CallFailed(error) from error


def _runs(items: Sequence[Item]) -> Iterable[list[Item]]:
    """Yield the messages that are handled by one call: one, or many of a handler of batches.

    The order is kept within a consumer, and not between consumers.
    """
    runs: dict[str, list[Item]] = {}
    for item in items:
        handler = item.handler
        if runs and (run := runs.get(handler.consumer)) and run[0].handler is not handler:
            yield runs.pop(handler.consumer)
        if handler.takes_batches:
            runs.setdefault(handler.consumer, []).append(item)
        else:
            yield [item]
    yield from runs.values()


async def _handle(run: Sequence[Item], attempt: Attempt, gap: int) -> str | None:
    """Call the handler; returns what it returned, as JSON."""
    item = run[0]
    handler = item.handler
    attempt.calling = item
    attempt.context = None
    try:
        if handler.takes_batches:
            await _hand_over(run, attempt)
            return None
        result = await _call(item, attempt, gap)
        attempt.raise_error()
        if handler.gaps is not None and (row := await followed(item, attempt.rows)):
            note_applied(item, row)
        return result_as_json(result)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise _CallFailed(error, attempt.context) from error
    except BaseException as error:  # sys.exit() too, and the panic of a library that is not Python
        if attempt.deadline.is_over:
            late = TimeoutError(f"{handler.consumer} takes longer than {handler.timeout} s")
            late.__cause__ = error  # which tells where it was
            raise _CallFailed(late, attempt.context, is_cut_off=True) from error
        try:
            attempt.raise_error()
        except Exception as earlier:
            error = earlier
        if isinstance(error, HandlerFault):
            raise _CallFailed(error, attempt.context, is_cut_off=True) from error
        if sqlstate_of(error) == _READ_ONLY:
            raise _CallFailed(error, attempt.context) from error
        if is_of_the_database(error) or attempt.driver.is_closed():
            raise
        raise _CallFailed(error, attempt.context) from error
    finally:
        attempt.calling = None
        shared = attempt.rows.session.sync_session
        if isinstance(shared, SharedSession) and shared.is_wanted:
            raise _NeedsOwnSession(handler.consumer)


def result_as_json(result: object) -> str | None:
    """Return what is kept of a handler's result. Raises `TypeError` for what is no JSON."""
    if result is None:
        return None
    try:
        return pydantic_core.to_json(result, inf_nan_mode="strings").decode()
    except Exception as error:
        raise TypeError(
            f"the function has returned what is no JSON ({describe_error(error)}): return text, a"
            " number, a list, a dict or a model, which are kept, or nothing"
        ) from error


async def _call(item: Item, attempt: Attempt, gap: int) -> object:
    """Call a handler of single events, in the trace of the message.

    What was called outside already has its span, and has told how long it took.
    """
    handler, message = item.handler, item.message
    tx = Transaction(attempt.rows, attempt.outbox, message, item.key, attempt.strays, gap=gap)
    current = (
        attempt.spans.of(message, handler.consumer, item.trace)
        if item.called is None
        else Current(item.called)
    )
    attempt.context = current.context
    try:
        with current, attempt.deadline.within(handler.timeout):
            return await InContext(handler.function(attempt.event_of(item), tx), attempt.guard)
    finally:
        tx.end()
        if item.called is None:
            attempt.has_called(handler)


async def _hand_over(run: Sequence[Item], attempt: Attempt) -> None:
    """Call a handler of batches. Each event it publishes belongs to the trace of its message."""
    handler, rows, outbox = run[0].handler, attempt.rows, attempt.outbox
    spans = [attempt.spans.of(item.message, handler.consumer, item.trace) for item in run]
    attempt.context = spans[0].context
    calls = [
        (
            attempt.event_of(item),
            Transaction(rows, outbox, item.message, item.key, attempt.strays, span.context),
        )
        for item, span in zip(run, spans, strict=True)
    ]
    failure = None
    try:
        with attempt.deadline.within(handler.timeout):
            await InContext(handler.function(EventBatch(calls)), attempt.guard)
    except BaseException as error:
        failure = error
        raise
    finally:
        for span in spans:
            span.end(failure)
        for _, tx in calls:
            tx.end()
        attempt.has_called(handler)


def _declared(items: Iterable[Item]) -> list[tuple[type[Aggregate], set[Key]]]:
    """Return the rows that the handlers are going to change, by table name."""
    wanted: dict[type[Aggregate], set[Key]] = {}
    for item in items:
        if (loads := item.handler.loads) and item.event is not None:
            wanted.setdefault(loads.entity, set()).add(loads.key_of(item.event))
    return sorted(wanted.items(), key=lambda one: str(sa.inspect(one[0]).local_table.fullname))
