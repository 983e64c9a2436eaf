"""The calls of handlers in a transaction, one after the other."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from time import perf_counter

import pydantic_core
import sqlalchemy as sa

from onceward.errors import Repeat, describe_error
from onceward.handlers.aggregate import Aggregate, Key
from onceward.handlers.policy import FOLLOWER
from onceward.handlers.sessions import SharedSession
from onceward.handlers.transaction import EventBatch, Transaction
from onceward.observe.traces import Current
from onceward.servers.guard import HandlerFault, LoopBlocked
from onceward.servers.service_code import call_service
from onceward.servers.tasks import TimeSlice

from .attempt import Attempt
from .failures import (
    CallFailed,
    NeedsOwnSession,
    TooMuch,
    decide_isolated,
    is_in_vain,
    is_nobodys,
)
from .item import Item
from .outcome import BatchOutcome
from .sequence import gap_before, note_applied


async def lock_declared(items: Sequence[Item], attempt: Attempt) -> None:
    """Lock the rows that the handlers of the messages declare, table by table, in their order."""
    wanted: dict[type[Aggregate], set[Key]] = {}
    for item in items:
        if item.event is not None:
            for loads in item.handler.loads:
                wanted.setdefault(loads.entity, set()).add(loads.key_of(item.event))

    def place(entity: type[Aggregate]) -> tuple[str, str]:
        return str(sa.inspect(entity).local_table.fullname), entity.__qualname__

    for entity in sorted(wanted, key=place):
        await attempt.rows.lock(entity, wanted[entity])


async def call_handlers(items: Sequence[Item], attempt: Attempt, outcome: BatchOutcome) -> None:
    """Lock the rows that handlers have declared, call the handlers in order, and flush.

    First the handlers of messages that share a session are called, then those of messages with a
    session of their own each. Raises `CallFailed` for the first call whose failure can't be undone
    in memory: later ones would prove nothing. Raises `Repeat`, and what the flush raises.
    """
    await lock_declared(items, attempt)
    attempt.is_shared = len(items) > 1
    reacting = attempt.catalog.reacting
    attempt.rows.writes.each = bool(reacting) and any(item.consumer in reacting for item in items)
    begun = perf_counter()
    sharing, own = items, list[Item]()
    if attempt.own:
        sharing = [item for item in items if item.handler.queue not in attempt.own]
        own = [item for item in items if item.handler.queue in attempt.own]
    try:
        await _call_in_order(sharing, attempt, outcome)
        if own:
            await attempt.rows.flush()
            await _call_in_order(own, attempt, outcome)
    except Exception:
        raise_strays(attempt, outcome)  # another call may have failed because of one
        raise
    finally:
        outcome.seconds += perf_counter() - begun
    raise_strays(attempt, outcome)
    await attempt.rows.end()


def raise_strays(attempt: Attempt, outcome: BatchOutcome) -> None:
    """Raise `CallFailed` for a message whose code went on after its return."""
    for key, error in attempt.strays():
        items = [item for item in outcome.applied if item.key == key]
        if items or key is None:
            raise CallFailed(items, error)


async def _call_in_order(items: Sequence[Item], attempt: Attempt, outcome: BatchOutcome) -> None:
    turn = TimeSlice()
    for together in _together(items):
        if turn.is_over:
            await turn.end()
        left = together
        if behind := outcome.behind:
            outcome.decided += ((one, FOLLOWER) for one in together if one.order_key in behind)
            left = [one for one in together if one.order_key not in behind]
        if left:
            await _call_in_session(left, attempt, outcome)


async def _call_in_session(items: Sequence[Item], attempt: Attempt, outcome: BatchOutcome) -> None:
    """Make one call of a handler, in the session that it needs."""
    if attempt.outbox.is_full:
        raise TooMuch("smaller runs are needed: their events take too much memory")
    item = items[0]
    is_own = item.handler.queue in attempt.own
    attempt.context = None
    earlier = attempt.outbox.staged
    try:
        async with attempt.own_session(item) if is_own else nullcontext():
            if attempt.rows.is_stale:
                await lock_declared(items, attempt)
            attempt.rows.begin_message()
            attempt.guard.has_waited = False
            gap: int | None = 0
            if item.handler.gaps is not None:
                gap = await gap_before(item, attempt.rows, outcome)
            if gap is None:
                return
            result = await _handle(items, attempt, gap)
            if attempt.rows.has_to_write:
                await _write_message(items, attempt)
    except CallFailed as failure:
        if not _is_undone(items, failure, attempt, outcome):
            raise
        attempt.outbox.staged = earlier
        decide_isolated(item, failure.with_traceback(None), outcome)
        return
    except Repeat:
        raise
    except Exception as error:
        timed_out = attempt.is_cut_off
        raise CallFailed(items, error, attempt.context, has_timed_out=timed_out) from error
    if result is not None:
        outcome.returned[item.key] = result
    outcome.applied += items


async def _write_message(items: Sequence[Item], attempt: Attempt) -> None:
    """Write what has to be written after each message."""
    attempt.guard.has_waited = True  # what fails now is not undone in memory
    try:
        await attempt.rows.write_message(items[0].consumer)
    except Repeat:
        raise
    except Exception as error:
        failure = CallFailed(items, error, attempt.context)
        failure.reason = "transaction failed"
        raise failure from error


def _is_undone(
    items: Sequence[Item], failure: CallFailed, attempt: Attempt, outcome: BatchOutcome
) -> bool:
    """Whether nothing is left of a call that has failed, so that the others can go on.

    What has waited may have executed a statement or left a task; what was interrupted, anything.
    """
    item = items[0]
    return (
        attempt.is_shared
        and len(items) == 1
        and item.handler.queue not in attempt.own
        and not isinstance(failure.error, HandlerFault)
        and not is_nobodys(failure.error)
        and not (attempt.guard.has_waited or failure.has_timed_out)
        and not is_in_vain(item.consumer, outcome)
        and attempt.rows.undo_message()
    )


def _together(items: Sequence[Item]) -> Iterable[list[Item]]:
    """Yield the messages that are handled by one call: one, or many of a handler of batches.

    The order is kept within a consumer, and not between consumers.
    """
    runs: dict[str, list[Item]] = {}
    for item in items:
        handler = item.handler
        if runs and (run := runs.get(handler.queue)) and run[0].handler is not handler:
            yield runs.pop(handler.queue)
        if handler.takes_batches:
            runs.setdefault(handler.queue, []).append(item)
        else:
            yield [item]
    yield from runs.values()


async def _handle(items: Sequence[Item], attempt: Attempt, gap: int) -> str | None:
    """Call the handler; returns what it returned, as JSON."""
    item = items[0]
    handler = item.handler
    attempt.calling = item
    is_cancelled = False
    try:
        if handler.takes_batches:
            await _call_with_batch(items, attempt)
            return None
        result = await _call(item, attempt, gap)
        attempt.raise_error()
        if handler.gaps is not None:
            await note_applied(item, attempt.rows)
        return result_as_json(result)
    except asyncio.CancelledError:
        is_cancelled = True
        raise
    except BaseException as error:  # also sys.exit(), and the panic of an extension module
        blocks = isinstance(error, LoopBlocked)
        if blocks or attempt.deadline.is_over:
            attempt.is_cut_off = True
            attempt.guard.was_cancelled = False  # not by the handler
            what = error if blocks else f"takes longer than {handler.timeout} s"
            late = TimeoutError(f"{handler.consumer} {what}")
            late.__cause__ = error  # its traceback says where the handler waited
            raise CallFailed(items, late, attempt.context, has_timed_out=True) from error
        try:
            attempt.raise_error()
        except Exception as earlier:
            error = earlier
        raise CallFailed(items, error, attempt.context) from error
    finally:
        attempt.calling = None
        shared = attempt.rows.session.sync_session
        # A cancellation of the task, as by a revocation of the partition, must not be replaced.
        if isinstance(shared, SharedSession) and shared.is_wanted and not is_cancelled:
            raise NeedsOwnSession(handler.queue)


def result_as_json(result: object) -> str | None:
    """Return the handler's result as JSON. Raises `TypeError` if it can't be JSON."""
    if result is None:
        return None
    try:
        return pydantic_core.to_json(result, inf_nan_mode="strings").decode()
    except Exception as error:
        raise TypeError(
            f"the function returned a value that can't be JSON ({describe_error(error)}): return"
            " text, a number, a list, a dict or a model, which are stored, or nothing"
        ) from error


async def _call(item: Item, attempt: Attempt, gap: int) -> object:
    """Call a handler of single events, in the trace of the message.

    A call that was made before the transaction has its span and its duration recorded already.
    """
    handler, message = item.handler, item.message
    errors = attempt.errors_after_return
    tx = Transaction(attempt.rows, attempt.outbox, message, item.key, errors, gap=gap)
    current = (
        attempt.spans.of(message, handler.consumer, item.trace)
        if item.called is None
        else Current(item.called)
    )
    attempt.context = current.context
    try:
        with current, attempt.deadline.within(handler.timeout):
            call = handler.function(attempt.event_of(item), tx)
            return await call_service(call, attempt.guard, attempt.task)
    finally:
        tx.end()
        if item.called is None:
            attempt.has_called(handler)


async def _call_with_batch(run: Sequence[Item], attempt: Attempt) -> None:
    """Call a handler of batches. Events that it publishes are in the traces of their messages."""
    handler, rows, outbox = run[0].handler, attempt.rows, attempt.outbox
    errors = attempt.errors_after_return
    spans = [attempt.spans.of(item.message, handler.consumer, item.trace) for item in run]
    attempt.context = spans[0].context
    calls = [
        (
            attempt.event_of(item),
            Transaction(rows, outbox, item.message, item.key, errors, span.context),
        )
        for item, span in zip(run, spans, strict=True)
    ]
    failure = None
    try:
        with attempt.deadline.within(handler.timeout):
            await call_service(handler.function(EventBatch(calls)), attempt.guard)
    except BaseException as error:
        failure = error
        raise
    finally:
        for span in spans:
            span.end(failure)
        for _, tx in calls:
            tx.end()
        attempt.has_called(handler)
