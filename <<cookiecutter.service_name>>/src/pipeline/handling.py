"""Handlers at work: called one after the other, in one transaction."""

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Self, cast

import asyncpg
import pydantic_core
import sqlalchemy as sa
from opentelemetry.context import Context
from sqlalchemy.ext.asyncio import AsyncSession

from .aggregate import Aggregate, Key
from .backlog import StoredRecord
from .batch import Item
from .failures import is_of_the_database, named
from .handlers import Handler
from .ordering import Sequenced, SequenceGap, sequence_of
from .outbox import Outbox
from .policy import DIED, FOLLOWER, GAP, PARKED, REDRIVEN, Fate, Reject, as_decision, dead, early
from .tasks import Turn
from .telemetry import Current, ProcessSpans, traceparent
from .transaction import EventBatch, Rows, Transaction


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
            if is_ours and kind is asyncio.CancelledError:
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


@dataclass(eq=False)
class Attempt:
    """What the handlers of one transaction share, and which of them is at work."""

    session: AsyncSession
    driver: asyncpg.Connection
    rows: Rows
    outbox: Outbox
    spans: ProcessSpans
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

    def deaf(self, seconds: float) -> Item | None:
        """Return the message whose handler goes on so long after it was cancelled."""
        return self.calling if self.deadline.overdue() > seconds else None


@dataclass
class Handled:
    """How the handlers have fared."""

    applied: list[Item] = field(default_factory=list)
    stale: list[Item] = field(default_factory=list)
    """Those that a later one of their sequence has overtaken."""
    early: list[tuple[Item, Fate]] = field(default_factory=list)
    """Those that come before others of their sequence, and what becomes of them."""
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


async def handle_all(items: Sequence[Item], attempt: Attempt) -> Handled:
    """Lock the rows that handlers have declared, and call the handlers in order.

    After one has failed the transaction is lost. The others are tried all the same, to find out
    who else fails; not those that have their order with one that failed. Raises `BatchFailed`.
    """
    for entity, keys in _declared(items):
        await attempt.rows.lock(entity, keys)
    handled = Handled()
    behind: set[bytes] = set()
    waiting: set[bytes] = set()
    begun = perf_counter()
    turn = Turn()
    for one in _runs(items):
        if turn.is_over:
            await turn.end()
        run = [item for item in one if item.order_key not in behind] if behind else one
        if not run:
            continue
        try:
            gap = 0
            if run[0].handler.gaps is not None:
                gap = await _gap_before(run[0], attempt)
                if gap < 0:
                    handled.stale.append(run[0])
                    continue
                follows = run[0].order_key in waiting  # also after a deadline of its own
                if gap > 0 and (fate := FOLLOWER if follows else _fate_of_early(run[0], gap)):
                    handled.early.append((run[0], fate))
                    if not fate.is_dead or fate.holds:
                        waiting.add(run[0].order_key)
                    continue
            result = await _handle(run, attempt, gap)
            if result is not None:
                handled.returned[run[0].marker.key] = result
            handled.applied += run
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
            if len(handled.failed) == 1:
                # Aborted by the error of a statement, it would fail for everybody.
                await attempt.driver.execute("SELECT")
        except Exception:
            if handled.failed:
                break
            raise
    handled.seconds = perf_counter() - begun
    return handled


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


def _fate_of_early(item: Item, gap: int) -> Fate | None:
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
        if handler.gaps is not None and (row := await _followed(item, attempt)):
            row.followed = item.sequence
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
        if is_of_the_database(error) or attempt.driver.is_closed():
            raise
        raise _Failed(error, attempt.context) from error
    finally:
        attempt.calling = None


def result_as_json(result: object) -> str | None:
    """Return what is kept of a handler's result. Raises `TypeError` for what is no JSON."""
    if result is None:
        return None
    try:
        return pydantic_core.to_json(result, inf_nan_mode="strings").decode()
    except Exception as error:
        raise TypeError(
            f"the function has returned what is no JSON ({named(error)}): return text, a number, a"
            " list, a dict or a model, which are kept, or nothing"
        ) from error


async def _call(item: Item, attempt: Attempt, gap: int) -> object:
    """Call a handler of single events, in the trace of the message.

    What was called outside already has its span, and has told how long it took.
    """
    handler, marker = item.handler, item.marker
    tx = Transaction(attempt.session, attempt.rows, attempt.outbox, marker, gap=gap)
    current = (
        attempt.spans.of(marker.message, handler.consumer, item.trace)
        if item.called is None
        else Current.without_span(item.called)
    )
    attempt.context = current.context
    try:
        with current, attempt.deadline.within(handler.timeout):
            return await handler.function(item.event, tx)
    finally:
        tx.end()
        if item.called is None:
            attempt.has_called(handler)


async def _hand_over(run: Sequence[Item], attempt: Attempt) -> None:
    """Call a handler of batches. Each event it publishes belongs to the trace of its message."""
    handler, session, rows, outbox = run[0].handler, attempt.session, attempt.rows, attempt.outbox
    spans = [attempt.spans.of(item.marker.message, handler.consumer, item.trace) for item in run]
    attempt.context = spans[0].context
    calls = [
        (item.event, Transaction(session, rows, outbox, item.marker, span.context))
        for item, span in zip(run, spans, strict=True)
    ]
    failure = None
    try:
        with attempt.deadline.within(handler.timeout):
            await handler.function(EventBatch(session, calls))
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
