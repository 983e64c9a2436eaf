"""Handlers: which function takes which event of which topic, as which consumer."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any, Literal, TypeVar

from .aggregate import Loads
from .events import Event, Tombstone
from .message import Plain
from .policy import Policy
from .transaction import EventBatch, Transaction

E = TypeVar("E", bound=Event)
Function = Callable[[E, Transaction], Awaitable[object]]
BatchFunction = Callable[[EventBatch[E]], Awaitable[None]]
F = TypeVar("F", bound=Callable[..., Awaitable[object]])


@dataclass(frozen=True)
class Handler:
    """One registration."""

    event: type[Event]
    topic: str
    consumer: str
    loads: Loads[Any] | None
    function: Callable[..., Awaitable[object]]
    takes_batches: bool
    policy: Policy
    mode: Literal["immediate", "deferred"]
    timeout: float
    takes_old: bool


class Handlers:
    """The registry of a service's handlers."""

    def __init__(self) -> None:
        self._by_topic: dict[str, dict[str, tuple[Handler, ...]]] = {}
        self._plain: dict[str, Plain] = {}
        self._demanding: set[str] = set()

    def on(
        self,
        event: type[E],
        *,
        topic: str,
        consumer: str,
        loads: Loads[Any] | None = None,
        policy: Policy = Policy(),  # noqa: B008  # it is frozen
        mode: Literal["immediate", "deferred"] = "immediate",
        timeout: float = 5.0,
        takes_old: bool = False,
    ) -> Callable[[Function[E]], Function[E]]:
        """Register the decorated coroutine function for the events of a topic.

        `consumer` is part of the identity under which the inbox remembers: keep it when you
        rename the function. `loads` names the rows that the handler is going to change; they are
        fetched and locked for the whole batch in one query.

        `policy` says what becomes of a message that the function fails on; later messages of its
        key wait behind it. With `mode="deferred"` every message is stored at once and handled
        later, from the backlog. After `timeout` seconds a call is ended, and has failed. With
        `takes_old=True` also what is older than the inbox remembers is applied, at the risk of
        a second time; otherwise it is a dead letter.

        What the function returns is kept as JSON beside the marker; a duplicate gets it back, and
        `service inbox show` prints it.

        Raises `TypeError` if the consumer already takes these events, or `loads` or the
        function does not fit, and `ValueError` for a time-out that is none.
        """
        register: Callable[[Function[E]], Function[E]] = self._registering(
            event, topic, consumer, loads, policy, mode, timeout, takes_old, takes_batches=False
        )
        return register

    def on_batch(
        self,
        event: type[E],
        *,
        topic: str,
        consumer: str,
        loads: Loads[Any] | None = None,
        policy: Policy = Policy(),  # noqa: B008  # it is frozen
        mode: Literal["immediate", "deferred"] = "immediate",
        timeout: float = 5.0,
        takes_old: bool = False,
    ) -> Callable[[BatchFunction[E]], BatchFunction[E]]:
        """Register a coroutine function that takes many events at once, an `EventBatch`.

        For handlers that read and write by sets, in SQL of their own. All is as in `on`, but that
        the function returns nothing, `timeout` is for all of a call, and when it fails on several
        events they are tried again in halves, until it is known which one is at fault.
        """
        register: Callable[[BatchFunction[E]], BatchFunction[E]] = self._registering(
            event, topic, consumer, loads, policy, mode, timeout, takes_old, takes_batches=True
        )
        return register

    def _registering(
        self,
        event: type[Event],
        topic: str,
        consumer: str,
        loads: Loads[Any] | None,
        policy: Policy,
        mode: Literal["immediate", "deferred"],
        timeout: float,
        takes_old: bool,
        *,
        takes_batches: bool,
    ) -> Callable[[F], F]:
        if loads is not None:
            loads.check(event)
        if not timeout > 0:
            raise ValueError(f"timeout is in seconds, not {timeout}")

        def register(function: F) -> F:
            is_coroutine_function = iscoroutinefunction(function)
            if not is_coroutine_function:
                raise TypeError(f"{function} is no coroutine function: write `async def`")
            registered = self._by_topic.setdefault(topic, {})
            others = registered.get(event.event_type, ())
            for other in others:
                if other.event is not event:
                    raise TypeError(
                        f"{other.event.__name__} and {event.__name__} both have the type"
                        f" {event.event_type!r}"
                    )
                if other.consumer == consumer:
                    raise TypeError(
                        f"consumer {consumer!r} already takes {event.event_type!r} of topic"
                        f" {topic!r}: give the second handler a name of its own"
                    )
            handler = Handler(
                event,
                topic,
                consumer,
                loads,
                function,
                takes_batches,
                policy,
                mode,
                timeout,
                takes_old,
            )
            registered[event.event_type] = (*others, handler)
            return function

        return register

    def plain(self, topic: str, how: Plain) -> None:
        """Say how a topic without CloudEvents names its events.

        Raises `TypeError` if it was said before.
        """
        if topic in self._plain:
            raise TypeError(f"topic {topic!r} is described twice")
        self._plain[topic] = how

    def demand_types(self, topic: str) -> None:
        """Make a type that no handler takes a dead letter; elsewhere it is skipped and counted."""
        self._demanding.add(topic)

    @property
    def demanding(self) -> frozenset[str]:
        """Topics of which `demand_types` was told."""
        return frozenset(self._demanding)

    @property
    def topics(self) -> frozenset[str]:
        """Topics that some handler takes events of."""
        return frozenset(self._by_topic)

    @property
    def consumers(self) -> frozenset[str]:
        """Names of all consumers."""
        return frozenset(
            handler.consumer
            for types in self._by_topic.values()
            for handlers in types.values()
            for handler in handlers
        )

    def of(self, topic: str, type: str) -> tuple[Handler, ...]:
        """Return the handlers of an event type, in the order of their registration."""
        return self._by_topic.get(topic, {}).get(type, ())

    def plain_of(self, topic: str) -> Plain | None:
        """Return what `plain` was told of the topic."""
        return self._plain.get(topic)

    def demands_types(self, topic: str) -> bool:
        """Whether a type that no handler takes is a dead letter."""
        return topic in self._demanding

    def takes_tombstones(self, topic: str) -> bool:
        """Whether records without a value go to a handler."""
        return Tombstone.event_type in self._by_topic.get(topic, {})
