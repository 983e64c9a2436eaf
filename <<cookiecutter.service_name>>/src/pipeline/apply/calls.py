"""Handlers at work: called one after the other, in one transaction."""

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Self, cast

import asyncpg
import pydantic_core
import sqlalchemy as sa
from opentelemetry.context import Context
from sqlalchemy.ext.asyncio import AsyncConnection

from pipeline.errors import describe_error, is_infrastructure, is_of_the_database, sqlstate_of
from pipeline.events.event import Event
from pipeline.handlers.aggregate import Aggregate, Key
from pipeline.handlers.ordering import (
    SequenceConflict,
    Sequenced,
    SequenceGap,
    name_of,
    sequence_of,
)
from pipeline.handlers.policy import (
    DIED,
    FOLLOWER,
    GAP,
    PARKED,
    REDRIVEN,
    Decision,
    Reject,
    as_decision,
    dead,
    early,
)
from pipeline.handlers.registry import Handler
from pipeline.handlers.rows import Rows
from pipeline.handlers.sessions import DONE, SharedSession, isolated, own_session
from pipeline.handlers.staging import Outbox
from pipeline.handlers.transaction import EventBatch, Transaction
from pipeline.observe.traces import Current, ProcessSpans, traceparent
from pipeline.servers.guard import Guard, HandlerFault, InContext
from pipeline.servers.tasks import TimeSlice

from .backlog import StoredRecord
from .batch import Item, validated

_READ_ONLY = "25006"
"""PostgreSQL's code for a transaction that is read only. A transaction that has written before is
so by `SET TRANSACTION`, and not by a failover."""


class Deadline:
    """Cancels the task that makes it when a call of a handler takes too long.

    As `asyncio.timeout` does, which sets a timer for every call, at a cost that exceeds most
    handlers'. Here one timer stands for many calls: it looks for how long the latest has run.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = math.inf
        self._ends_at = math.inf
        self._begun = 0.0
        self.is_over = False
        """Whether the latest call was cancelled."""
        self.seconds = 0.0
        """How long the latest call has taken."""

    def within(self, seconds: float) -> Self:
        """Give the call in the `with` that follows so many seconds; `TimeoutError` ends it."""
        self.is_over = False
        self._ends_at = self._loop.time() + seconds
        if self._ends_at < self._looks_at:
            self._look_at(self._ends_at)
        return self

    def __enter__(self) -> None:
        self._begun = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        self.seconds = perf_counter() - self._begun
        self._ends_at = math.inf
        if self.is_over:
            is_ours = self._task.uncancel() <= self._cancelling
            # Also where the call has swallowed its end and returned.
            if is_ours and kind in (None, asyncio.CancelledError):
                raise TimeoutError from error

    def overdue(self) -> float:
        """Return for how many seconds a call goes on that was cancelled."""
        return max(0.0, self._loop.time() - self._ends_at)

    def close(self) -> None:
        """Let no timer stay behind."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_at(self, time: float) -> None:
        self.close()
        self._looks_at = time
        self._timer = self._loop.call_at(time, self._look)

    def _look(self) -> None:
        self._looks_at = math.inf
        if self._loop.time() >= self._ends_at:
            # What it waits for may have come while others kept the loop: that is seen to first.
            self._loop.call_soon(self._end)
        elif self._ends_at < math.inf:
            self._look_at(self._ends_at)

    def _end(self) -> None:
        if self._loop.time() >= self._ends_at:
            self.is_over = True
            self._task.cancel()


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
    guard: Guard
    """Of the messages that share a session, or of the message at work."""
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
    task: asyncio.Task[object] | None = field(default_factory=asyncio.current_task)
    calling: Item | None = None
    context: Context | None = None
    """Of the latest call."""
    longest: dict[tuple[str, str], float] = field(default_factory=dict)
    """Seconds that a call has taken at most, by consumer and type of event."""
    deadline: Deadline = field(default_factory=Deadline)

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
        guard = self.guards[item.marker.key] = Guard(self.outbox)
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
class Handled:
    """How the handlers have fared."""

    applied: list[Item] = field(default_factory=list)
    superseded: list[tuple[Item, str]] = field(default_factory=list)
    """Those that a later one of their sequence has overtaken, and which."""
    unfit: list[tuple[Item, Decision]] = field(default_factory=list)
    """Those that are too early in their sequence or conflict with it, and what becomes of them."""
    returned: dict[bytes, str] = field(default_factory=dict)
    """What they returned, as JSON, by marker key."""
    failed: list[tuple[Item, BaseException]] = field(default_factory=list)
    """The first of them has failed by itself, the others maybe because of it."""
    traces: dict[bytes, str | None] = field(default_factory=dict)
    """`traceparent` of the calls that failed, by marker key."""
    seconds: float = 0.0
    """How long they have taken, without waiting for locks."""
    late: Item | None = None
    """The last of them, if it took too long."""
    is_cut_off: bool = False
    """Whether a statement may still be under way on the connection."""
    is_certain: bool = False
    """Whether each of those that failed has failed by itself."""


class BatchFailed(Exception):
    """A handler has failed on several messages at once: nobody knows which is at fault."""

    def __init__(self, error: BaseException, *, is_cut_off: bool) -> None:
        super().__init__()
        self.error = error
        self.is_cut_off = is_cut_off


class _Failed(Exception):
    """A handler has failed on a message."""

    def __init__(
        self, error: BaseException, context: Context | None = None, *, is_cut_off: bool = False
    ) -> None:
        super().__init__()
        self.error = as_decision(error)
        self.trace = traceparent(context)
        self.is_cut_off = is_cut_off


class NeedsOwnSession(Exception):
    """A consumer's handler needs a session of its own for each message."""

    def __init__(self, consumer: str) -> None:
        super().__init__(consumer)
        self.consumer = consumer


async def handle_all(items: Sequence[Item], attempt: Attempt) -> Handled:
    """Lock the rows that handlers have declared, and call the handlers in order.

    First come those whose messages share a session: after one of them has failed the transaction
    is lost, and the others are tried all the same, to find out who else fails; not those that have
    their order with one that failed. Then come those that have one of their own each; the first
    that fails ends it. Raises `BatchFailed`, and `NeedsOwnSession`.
    """
    for entity, keys in _declared(items):
        await attempt.rows.lock(entity, keys)
    handled = Handled()
    begun = perf_counter()
    sharing, own = items, list[Item]()
    if attempt.own:
        sharing = [item for item in items if item.marker.consumer not in attempt.own]
        own = [item for item in items if item.marker.consumer in attempt.own]
    await _handle_runs(sharing, attempt, handled)
    if attempt.own and not handled.failed:
        await attempt.rows.flush()
        handled.is_certain = attempt.memory.isolates
        await _handle_runs(own, attempt, handled)
        attempt.memory.isolates |= bool(handled.failed)
        if not handled.failed:
            await attempt.driver.execute(DONE)
    _find_strays(attempt, handled)
    handled.seconds = perf_counter() - begun
    return handled


def _find_strays(attempt: Attempt, handled: Handled) -> None:
    """Take what was tried for a message after its handler had ended for its failure."""
    if attempt.guard.stray is not None:
        raise BatchFailed(attempt.guard.stray, is_cut_off=False)
    tried = {key: guard.stray for key, guard in attempt.guards.items() if guard.stray}
    if strays := attempt.strays | tried:
        handled.failed += [
            (item, strays[item.marker.key]) for item in handled.applied if item.marker.key in strays
        ]


async def _handle_runs(items: Sequence[Item], attempt: Attempt, handled: Handled) -> None:
    """Call the handlers of the messages, and note how they fare."""
    behind: set[bytes] = set()
    waiting: set[bytes] = set()
    turn = TimeSlice()
    for one in _runs(items):
        if turn.is_over:
            await turn.end()
        run = [item for item in one if item.order_key not in behind] if behind else one
        if not run:
            continue
        try:
            await _handle_run(run, attempt, handled, waiting)
        except _Failed as failure:
            if len(run) > 1:
                if handled.failed:
                    handled.is_cut_off = failure.is_cut_off
                    break
                raise BatchFailed(failure.error, is_cut_off=failure.is_cut_off) from failure.error
            handled.failed.append((run[0], failure.error))
            handled.traces[run[0].marker.key] = failure.trace
            behind.add(run[0].order_key)
            if failure.is_cut_off:
                handled.late, handled.is_cut_off = run[0], True
                break
            if run[0].marker.consumer in attempt.own:
                if not attempt.memory.isolates:
                    break
                continue
            if len(handled.failed) == 1:
                # Aborted by the error of a statement, it would fail for everybody.
                await attempt.driver.execute("SELECT")
        except Exception:
            if handled.failed:
                break
            raise


async def _handle_run(
    run: Sequence[Item], attempt: Attempt, handled: Handled, waiting: set[bytes]
) -> None:
    """Call the handler of what is handed over together, in the session that it needs."""
    item = run[0]
    is_own = item.marker.consumer in attempt.own
    try:
        async with attempt.own_session(item) if is_own else nullcontext():
            attempt.rows.begin_message()
            gap = 0
            if item.handler.gaps is not None:
                gap = await _gap_before(item, attempt)
                if gap < 0:
                    await _supersede(item, attempt, handled)
                    return
                follows = item.order_key in waiting  # also after a deadline of its own
                if gap > 0 and (fate := FOLLOWER if follows else _fate_of_early(item, gap)):
                    handled.unfit.append((item, fate))
                    if not fate.is_dead or fate.holds:
                        waiting.add(item.order_key)
                    return
            result = await _handle(run, attempt, gap)
    except HandlerFault as error:
        raise _Failed(error, attempt.context, is_cut_off=True) from error
    except Exception as error:
        is_fault = sqlstate_of(error) == _READ_ONLY or not is_infrastructure(error)
        if not is_own or isinstance(error, _Failed) or not is_fault:
            raise
        raise _Failed(error, attempt.context) from error
    if result is not None:
        handled.returned[item.marker.key] = result
    handled.applied += run


def _runs(items: Sequence[Item]) -> Iterable[list[Item]]:
    """Yield what is handed over together: one, or what a handler of batches can have at once.

    For each consumer they are in order; between consumers there is none.
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


async def _followed(item: Item, attempt: Attempt) -> Sequenced | None:
    """Return the row that the event's sequence is of."""
    loads = item.handler.loads
    assert loads is not None
    assert item.event is not None
    return cast(Sequenced | None, await attempt.rows.get(loads.entity, loads.key_of(item.event)))


async def _gap_before(item: Item, attempt: Attempt) -> int:
    """Return how many events are missing before this one; less than none: it was overtaken."""
    try:
        sequence = sequence_of(item.marker.message)
    except Reject as error:
        raise _Failed(error) from error
    row = await _followed(item, attempt)
    followed = row.followed if row else None
    return sequence - (followed or 0) - 1


async def _supersede(item: Item, attempt: Attempt, handled: Handled) -> None:
    """Note an event that is overtaken, or has the place of another one."""
    row = await _followed(item, attempt)
    assert row is not None
    name = name_of(item.marker.message)
    if item.sequence == row.followed and row.followed_by not in (None, name):
        error = SequenceConflict(item.sequence, str(row.followed_by))
        handled.unfit.append((item, dead(item.handler.policy, "sequence conflict", error)))
    else:
        handled.superseded.append((item, f"sequence {row.followed} of {row.followed_by!r}"))


def _fate_of_early(item: Item, gap: int) -> Decision | None:
    """Return what becomes of an event before which others are missing; None: it is applied."""
    gaps, policy = item.handler.gaps, item.handler.policy
    assert gaps is not None
    error = SequenceGap(item.sequence, gap)
    waited = item.record.stored_for if isinstance(item.record, StoredRecord) else 0.0
    # An attempt that was spent beforehand was none: for such a one no handler is called.
    was_tried = item.attempts > 0 and item.reason not in (GAP, DIED)
    attempts = item.attempts if was_tried else 0
    if waited < gaps.wait:
        return early(error, attempts=attempts, waited=item.waited, due_in=gaps.wait - waited)
    # Also of what a person has redriven, who knows of the gap, and of what was tried since.
    if gaps.then == "apply" or item.reason in (REDRIVEN, PARKED) or was_tried:
        return None
    fate = dead(policy, GAP, error, attempts=attempts)
    return replace(fate, holds=gaps.then == "hold")


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
        if handler.gaps is not None and (row := await _followed(item, attempt)):
            row.followed = item.sequence
            row.followed_by = name_of(item.marker.message)
        return result_as_json(result)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise _Failed(error, attempt.context) from error
    except BaseException as error:  # sys.exit() too, and the panic of a library that is not Python
        if attempt.deadline.is_over:
            late = TimeoutError(f"{handler.consumer} takes longer than {handler.timeout} s")
            late.__cause__ = error  # which tells where it was
            raise _Failed(late, attempt.context, is_cut_off=True) from error
        try:
            attempt.raise_error()
        except Exception as earlier:
            error = earlier
        if isinstance(error, HandlerFault):
            raise _Failed(error, attempt.context, is_cut_off=True) from error
        if sqlstate_of(error) == _READ_ONLY:
            raise _Failed(error, attempt.context) from error
        if is_of_the_database(error) or attempt.driver.is_closed():
            raise
        raise _Failed(error, attempt.context) from error
    finally:
        attempt.calling = None
        shared = attempt.rows.session.sync_session
        if isinstance(shared, SharedSession) and shared.is_wanted:
            raise NeedsOwnSession(handler.consumer)


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
    handler, marker = item.handler, item.marker
    tx = Transaction(attempt.rows, attempt.outbox, marker, attempt.strays, gap=gap)
    current = (
        attempt.spans.of(marker.message, handler.consumer, item.trace)
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
    spans = [attempt.spans.of(item.marker.message, handler.consumer, item.trace) for item in run]
    attempt.context = spans[0].context
    calls = [
        (
            attempt.event_of(item),
            Transaction(rows, outbox, item.marker, attempt.strays, span.context),
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
