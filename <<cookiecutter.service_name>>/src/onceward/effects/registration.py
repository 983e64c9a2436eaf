"""Registration: which function makes the calls of an event, and what is done when they fail."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Concatenate, TypeVar

from onceward.apply.item import Item
from onceward.events.event import Event
from onceward.events.message import Message
from onceward.handlers.aggregate import Declared
from onceward.handlers.checks import check_function, check_options
from onceward.handlers.policy import (
    NOT_DONE,
    UNKNOWN,
    Decision,
    History,
    Policy,
    as_decision,
    dead,
)
from onceward.handlers.registry import Handler, Handlers
from onceward.handlers.staging import CALLS
from onceward.handlers.transaction import Transaction

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class Call:
    """One attempt at an effect."""

    message: Message
    """Envelope of the event: identity, key, trace."""
    attempt: int
    """1 for the first one, and again for the first after a redrive."""

    @property
    def id(self) -> str:
        """The idempotency key: the same at every attempt, and that of no other call."""
        return self.message.id


EffectFunction = Callable[Concatenate[E, Call, ...], Awaitable[object]]
"""Its further parameters take resources, as those of `ask` and `then` do."""


@dataclass(frozen=True)
class Effect(Handler):
    """One registration."""

    then: Callable[..., Awaitable[object]] | None = None
    per_second: float | None = None
    is_repeatable: bool = True
    """False: where the outcome of a call is not known, it is not made again."""
    ask: Callable[..., Awaitable[bool]] | None = None

    @property
    def functions(self) -> Mapping[str, tuple[Callable[..., Any], int]]:
        """The function of the call, `ask` and `then`."""
        found = {**super().functions}
        if self.ask is not None:
            found["ask"] = self.ask, 2
        if self.then is not None:
            found["then"] = self.then, 3
        return found

    @classmethod
    def of(cls, item: Item) -> "Effect":
        """Return the effect that a row is for."""
        assert isinstance(item.handler, cls)
        return item.handler


@dataclass(frozen=True)
class NotRepeatable(Policy):
    """Policy of calls that are not made again while it is not known whether they took place."""

    can_ask: bool = False
    """Whether a function of the service finds out, by the schedule; otherwise a person has to."""

    def after_failure(
        self, error: BaseException, history: History, *, reason: str, is_free: bool = False
    ) -> Decision:
        """Return what becomes of a call that has failed once more, or whose result has not been
        stored: its outcome is unknown unless the error says that it did not take place.
        """
        is_known = isinstance(as_decision(error), NOT_DONE)
        decision = super().after_failure(error, history, reason=reason, is_free=is_free)
        if is_known:
            return decision
        if decision.is_dead or not (self.can_ask or is_free):
            return dead(self, UNKNOWN, error, decision.history)
        return replace(decision, reason=UNKNOWN)

    def disconnected(self, error: BaseException, history: History) -> Decision:
        """Return what becomes of a call whose result has not been stored, as the connection was
        lost. The third loss in a row counts.
        """
        return replace(super().disconnected(error, history), reason=UNKNOWN)


class Effects:
    """Registers the effects of a service beside its other handlers."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers

    def on(
        self,
        event: type[E],
        *,
        consumer: str,
        policy: Policy = Policy(),  # noqa: B008  # it is frozen
        timeout: float = 10.0,
        per_second: float | None = None,
        repeatable: bool = True,
        ask: Callable[Concatenate[E, Call, ...], Awaitable[bool]] | None = None,
        then: Callable[Concatenate[E, Transaction, Any, ...], Awaitable[object]] | None = None,
        loads: Declared = None,
    ) -> Callable[[EffectFunction[E]], EffectFunction[E]]:
        """Register a coroutine function that calls the outside for events given to `tx.call`.

        It is called with the event and a `Call`, in no transaction, until it returns: if a process
        dies another one calls it again, so that the outside may see a call twice. Give it `call.id`
        as the idempotency key. Further parameters, also of `ask` and `then`, take
        `Service.resources`. `policy`, `consumer` and what is returned are as in `Handlers.on`;
        `timeout` is for one call, in seconds. Each process makes up to `per_second` calls in a
        second.

        For an outside without idempotency keys there is `repeatable=False`: it is stored before the
        call that it begins. Where the function raises `Retry`, `Park` or `Reject`, it did not take
        place; after any other error, a time-out or the death of the process its outcome is unknown.
        Then it is not made again: `ask` is called in its stead, and returns whether it took place;
        without `ask` it is a dead letter ("outcome unknown") until a person has found out.

        `then` is called afterwards as an ordinary handler, with the event, its transaction and what
        was returned (None if that is known from `ask` only); `loads` is for it. When it fails, all
        of it is done again.

        Raises `TypeError` if the consumer already takes these events, or `ask`, `loads` or the
        function does not fit, and `ValueError` for a time-out, a rate or a name that is none.
        """
        rows = check_options(event, consumer=consumer, loads=loads, timeout=timeout)
        if per_second is not None and not per_second > 0:
            raise ValueError(f"per_second is a number of calls, not {per_second!r}")
        if ask is not None and repeatable:
            raise TypeError("ask= is for what may not be repeated: give repeatable=False, too")
        _check_functions(event, ask, then)
        if not repeatable:
            once = policy.attempts, policy.max_age, policy.schedule, policy.after_death
            policy = NotRepeatable(*once, can_ask=ask is not None)

        def register(function: EffectFunction[E]) -> EffectFunction[E]:
            check_function(function, event=event, call=Call)
            self._handlers.add(
                Effect(
                    *(event, CALLS, consumer, rows, function, policy, "call", timeout),
                    takes_old=True,
                    then=then,
                    per_second=per_second,
                    is_repeatable=repeatable,
                    ask=ask,
                )
            )
            return function

        return register


def _check_functions(
    event: type[Event], ask: Callable[..., object] | None, then: Callable[..., object] | None
) -> None:
    """Raise `TypeError` if `ask` or `then` can't be called for the event."""
    if ask is not None:
        check_function(ask, event=event, call=Call)
    if then is not None:
        check_function(then, event=event, tx=Transaction, result=Any)
