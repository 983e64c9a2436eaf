"""One call to the outside: made with its time limit and its span, then settled in a transaction.

The handler that settles a call returns or raises what the call did, so that its row is done, tried
again, postponed or dead like that of any other handler.
"""

import asyncio
import logging
import math
from dataclasses import dataclass, replace
from inspect import isawaitable
from time import perf_counter
from typing import Any

import pydantic_core
from opentelemetry.context import Context

from onceward.apply.calls import result_as_json
from onceward.apply.item import Item
from onceward.errors import OncewardError, describe_error, is_of_the_database
from onceward.handlers.policy import NOT_DONE, UNKNOWN, Park, Reject, as_decision
from onceward.handlers.registry import Handler
from onceward.handlers.transaction import Transaction
from onceward.observe import metrics
from onceward.observe.traces import ProcessSpans
from onceward.observe.watchdog import CALLS
from onceward.servers.service_code import call_service

from .registration import Call, Effect

log = logging.getLogger(__name__)


class OutcomeUnknown(OncewardError):
    """A call has begun, and whether it took place is not known."""


class CallFailed(OncewardError):
    """A call has failed with an error that looks like one of the service's own database."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call."""

    item: Item
    result: object = None
    kept: object = None
    """What is kept of the result, as JSON."""
    error: BaseException | None = None
    context: Context | None = None
    """Trace context of the call's span."""
    is_noted: bool = False
    """Whether it was stored beforehand that the call begins."""
    is_made: bool = False
    """Whether the call was made; otherwise at most `ask` was called."""

    @property
    def is_done(self) -> bool:
        """Whether to settle it runs no code of the service, and can't fail."""
        has_failed = self.error is not None or self.item.fault is not None
        return not has_failed and Effect.of(self.item).then is None

    def settling(self) -> Item:
        """Return the message with a handler that stores the result of the call."""
        effect = Effect.of(self.item)

        async def settle(event: Any, tx: Transaction) -> object:
            if self.error is not None:
                raise self.error
            if effect.then is not None:
                try:
                    await effect.then(event, tx, self.result)
                except Exception as error:
                    if effect.is_repeatable or not isinstance(as_decision(error), NOT_DONE):
                        raise
                    # Such an error says that the call did not take place. This one did.
                    text = f"it took place, but then: {describe_error(error)}"
                    raise OutcomeUnknown(text) from error
            return self.kept

        return self.item._replace(handler=replace(effect, function=settle), called=self.context)


class Caller:
    """Makes calls."""

    def __init__(self, group: str) -> None:
        self._spans = ProcessSpans(group)

    async def call(self, item: Item) -> CallResult:
        """Call the function, or first `ask` whether an earlier call took place."""
        handler = item.handler
        if item.fault is not None:
            return CallResult(item)
        task = asyncio.current_task()
        assert task is not None
        now = asyncio.get_running_loop().time
        until = now() + handler.timeout
        CALLS[task] = lambda seconds: item.name if now() - until > seconds else None
        limit = asyncio.timeout(handler.timeout)
        current = self._spans.of(item.message, handler.consumer, item.trace)
        called = CallResult(item, context=current.context)
        outcome: str | None = None
        begun = perf_counter()
        metrics.call_began(handler.consumer)
        try:
            with current:
                async with limit:
                    call = Call(item.message, item.history.attempts + 1)
                    if may_have_happened(item):
                        if await _has_happened(item, call):
                            outcome = "done"
                            return called
                        if now() >= (
                            limit.when() or math.inf
                        ):  # the process was stopped, and the time-out has not fired yet
                            raise TimeoutError
                    called = replace(called, is_made=True)
                    result = await call_service(handler.function(item.event, call))
                    if isawaitable(result):
                        raise TypeError("the function has returned a coroutine or a task: await it")
            outcome = "done"
            return replace(called, result=result, kept=_kept(result, item))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # sys.exit() too, and the panic of a library
            outcome = _outcome(error, limit)
            return replace(called, error=_as_handlers_own(error, handler, limit))
        finally:
            key, seconds = (handler.consumer, handler.event.__event_type__), perf_counter() - begun
            metrics.handled({key: seconds})
            metrics.call_ended(handler.consumer, outcome, seconds)
            del CALLS[task]


def _outcome(error: BaseException, limit: asyncio.Timeout) -> str:
    """Return what a metric counts a call as that has raised an error."""
    if limit.expired():
        return "late"
    # By these the function says what to do about an answer.
    return "done" if isinstance(as_decision(error), Reject | Park) else "failed"


def may_have_happened(item: Item) -> bool:
    """Whether an earlier call may have taken place, so that it must not simply be repeated."""
    return item.reason == UNKNOWN and not Effect.of(item).is_repeatable


async def _has_happened(item: Item, call: Call) -> bool:
    """Return whether an earlier call took place, as `ask` reports."""
    ask = Effect.of(item).ask
    assert ask is not None

    async def asked() -> object:
        return await ask(item.event, call)  # any awaitable

    try:
        answer = await call_service(asked())
    except Exception as error:
        if not isinstance(as_decision(error), NOT_DONE):
            raise
        # The effect's function raises it to say that the call did not take place. From `ask` it
        # says nothing about the earlier call.
        raise OutcomeUnknown(f"ask has failed: {describe_error(error)}") from error
    if not isinstance(answer, bool):
        raise TypeError(f"ask has returned {type(answer).__name__}: return whether it took place")
    return answer


def _kept(result: object, item: Item) -> object:
    """Return the JSON that is kept of the result of a call; None if it can't be written as JSON."""
    try:
        kept = result_as_json(result)
    except TypeError as error:
        log.warning("%s: the call was made; its result is not stored: %s", item.name, error)
        return None
    return kept and pydantic_core.from_json(kept)


def _as_handlers_own(
    error: BaseException, handler: Handler, limit: asyncio.Timeout
) -> BaseException:
    """Return the error of a call as one that the transaction attributes to its handler."""
    own: BaseException
    decision = as_decision(error)
    if limit.expired():
        own = TimeoutError(f"{handler.consumer} takes longer than {handler.timeout} s")
    elif is_of_the_database(decision):
        own = CallFailed(describe_error(error))
    else:
        return decision
    own.__cause__ = error
    return own
