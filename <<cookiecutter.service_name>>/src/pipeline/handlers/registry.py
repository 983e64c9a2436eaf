"""Handlers: which function takes which event of which topic, as which consumer."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from pipeline.events.event import Event, Tombstone, check_event, check_name, check_topic, reader
from pipeline.events.identity import Plain

from . import signatures
from .aggregate import Loads
from .effects import Call, Effect
from .ordering import Gaps, Sequenced
from .policy import Policy
from .staging import EFFECTS
from .transaction import EventBatch, Transaction

E = TypeVar("E", bound=Event)
Function = Callable[[E, Transaction], Awaitable[object]]
BatchFunction = Callable[[EventBatch[E]], Awaitable[None]]
EffectFunction = Callable[[E, Call], Awaitable[object]]
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
    mode: Literal["immediate", "deferred", "effect"]
    timeout: float
    takes_old: bool
    effect: Effect | None = None
    """What there is more to say where `mode` is "effect"."""
    gaps: Gaps | None = None
    """Where it goes by the sequence of its events."""


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
        gaps: Gaps | None = None,
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

        With `gaps` the events of a row, the one that `loads` names, are applied in the order of
        their CloudEvents `sequence`: what was overtaken is skipped and counted as superseded, and
        what comes too early waits as `gaps` says. The row is a `Sequenced` one. All handlers of a
        consumer and a topic go by it, or none.

        What the function returns is kept as JSON beside the marker, as long as that is, at the
        price of a statement in a transaction in which any function returns something.
        `service inbox show` prints it; whoever sends the event once more gets no answer.

        Raises `TypeError` if the consumer already takes these events, or `loads` or the
        function does not fit, and `ValueError` for a time-out or a name that is none.
        """
        check_topic(topic)
        if gaps is not None and not (loads and issubclass(loads.entity, Sequenced)):
            raise TypeError("gaps= needs loads= of a class that has the mixin Sequenced")
        register: Callable[[Function[E]], Function[E]] = self._registering(
            event,
            topic,
            consumer,
            loads,
            policy,
            mode,
            timeout,
            takes_old,
            takes_batches=False,
            gaps=gaps,
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
        check_topic(topic)
        register: Callable[[BatchFunction[E]], BatchFunction[E]] = self._registering(
            event, topic, consumer, loads, policy, mode, timeout, takes_old, takes_batches=True
        )
        return register

    def effect(
        self,
        event: type[E],
        *,
        consumer: str,
        policy: Policy = Policy(),  # noqa: B008  # it is frozen
        timeout: float = 10.0,
        per_second: float | None = None,
        repeatable: bool = True,
        ask: Callable[[E, Call], Awaitable[bool]] | None = None,
        then: Callable[[E, Transaction, Any], Awaitable[object]] | None = None,
        loads: Loads[Any] | None = None,
    ) -> Callable[[EffectFunction[E]], EffectFunction[E]]:
        """Register a coroutine function that calls the outside for events given to `tx.call`.

        It is called with the event and a `Call`, in no transaction, until it returns: a process
        that dies leaves it to another one, so that the outside may see a call twice. Hand it
        `call.id` as the idempotency key. `policy`, `consumer` and what is returned are as in `on`;
        `timeout` is for one call, in seconds. Each process makes up to `per_second` calls in a
        second.

        For an outside that knows no idempotency key there is `repeatable=False`: it is noted before
        the call that it begins. Where the function raises `Retry`, `Park` or `Reject`, it did not
        take place; after any other error, a time-out or the death of the process nobody knows.
        Then it is not made again: `ask` is called in its stead, and returns whether it took place;
        without `ask` it is a dead letter ("outcome unknown") until a person has found out.

        `then` is called afterwards as an ordinary handler, with the event, its transaction and what
        was returned (None if that is known from `ask` only); `loads` is for it. When it fails, all
        of it is done again.

        Raises `TypeError` if the consumer already takes these events, or `ask`, `loads` or the
        function does not fit, and `ValueError` for a time-out, a rate or a name that is none.
        """
        if then is not None:
            signatures.check(then, event=event, tx=Transaction, result=Any)
        if ask is not None:
            signatures.check(ask, event=event, call=Call)
        register: Callable[[EffectFunction[E]], EffectFunction[E]] = self._registering(
            event,
            EFFECTS,
            consumer,
            loads,
            policy,
            "effect",
            timeout,
            takes_old=True,
            takes_batches=False,
            effect=Effect(then, per_second, repeatable, ask),
        )
        return register

    def _registering(
        self,
        event: type[Event],
        topic: str,
        consumer: str,
        loads: Loads[Any] | None,
        policy: Policy,
        mode: Literal["immediate", "deferred", "effect"],
        timeout: float,
        takes_old: bool,
        *,
        takes_batches: bool,
        effect: Effect | None = None,
        gaps: Gaps | None = None,
    ) -> Callable[[F], F]:
        check_event(event)
        check_name("a consumer", consumer)
        if event.__pydantic_complete__:  # else it names what comes later
            reader(event)
        if loads is not None:
            loads.check(event)
        if not timeout > 0:
            raise ValueError(f"timeout is in seconds, not {timeout}")

        def register(function: F) -> F:
            if takes_batches:
                signatures.check(function, batch=EventBatch[event])  # type: ignore[valid-type]
            else:
                takes = {"tx": Transaction} if effect is None else {"call": Call}
                signatures.check(function, event=event, **takes)
            registered = self._by_topic.setdefault(topic, {})
            others = registered.get(event.event_type, ())
            for other in others:
                if other.event is not event:
                    raise TypeError(
                        f"{other.event.__name__} and {event.__name__} both have the type"
                        f" {event.event_type!r}: take one of them in all handlers of the topic"
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
                effect,
                gaps,
            )
            self._check(handler)
            registered[event.event_type] = (*others, handler)
            return function

        return register

    def _check(self, new: Handler) -> None:
        """Raise `TypeError` for a handler that can't be beside those that are registered."""
        for other in self:
            is_alike = (other.consumer, other.topic) == (new.consumer, new.topic)
            if other.consumer == new.consumer and (other.effect is None) != (new.effect is None):
                raise TypeError(
                    f"{new.consumer!r} is an effect and a consumer of a topic: two names are needed"
                )
            if is_alike and (other.gaps is None) != (new.gaps is None):
                raise TypeError(
                    f"all handlers of consumer {new.consumer!r} and topic {new.topic!r} go by the"
                    " sequence of events (gaps=), or none does"
                )
            follows = new.loads.entity if new.gaps and new.loads else None
            followed = other.loads.entity if other.gaps and other.loads else None
            if follows and follows is followed and not is_alike:
                raise TypeError(
                    f"{follows.__name__} follows the sequence of consumer {other.consumer!r} and"
                    f" topic {other.topic!r}: it can follow one only"
                )

    def plain(self, topic: str, how: Plain) -> None:
        """Say how a topic without CloudEvents names its events.

        Raises `TypeError` if it was said before.
        """
        check_topic(topic)
        if topic in self._plain:
            raise TypeError(f"topic {topic!r} is described twice")
        self._plain[topic] = how

    def demand_types(self, topic: str) -> None:
        """Make a type that no handler takes a dead letter; elsewhere it is skipped and counted."""
        check_topic(topic)
        self._demanding.add(topic)

    def with_topics(self, rename: Callable[[str], str]) -> "Handlers":
        """Return the same handlers for topics of other names: where others use the brokers, too.

        Raises `ValueError` if two topics would have the same name.
        """
        names = {topic: rename(topic) for topic in {*self.topics, *self._plain, *self._demanding}}
        if len({*names.values()}) < len(names):
            raise ValueError(f"two topics would have the same name: {sorted(names.values())}")
        renamed = Handlers()
        for topic, types in self._by_topic.items():
            name = names.get(topic, topic)  # effects have no topic of Kafka's
            renamed._by_topic[name] = {
                type: tuple(replace(one, topic=name) for one in handlers)
                for type, handlers in types.items()
            }
        renamed._plain = {names[topic]: how for topic, how in self._plain.items()}
        renamed._demanding = {names[topic] for topic in self._demanding}
        return renamed

    def __iter__(self) -> Iterator[Handler]:
        """Return all that are registered."""
        return (one for topic in self._by_topic for one in self._on(topic))

    @property
    def demanding(self) -> frozenset[str]:
        """Topics of which `demand_types` was told."""
        return frozenset(self._demanding)

    @property
    def topics(self) -> frozenset[str]:
        """Topics that some handler takes events of."""
        return frozenset(self._by_topic) - {EFFECTS}

    @property
    def effects(self) -> Mapping[str, type[Event]]:
        """The events that some effect takes, by their types."""
        return {type: one[0].event for type, one in self._by_topic.get(EFFECTS, {}).items()}

    @property
    def replaced(self) -> list[str]:
        """Names of the functions that a decorator above the registration has replaced since."""
        functions = {one.function for one in self}
        return sorted(one.__qualname__ for one in functions if signatures.is_wrapped_since(one))

    @property
    def consumers(self) -> frozenset[str]:
        """Names of all consumers."""
        return frozenset(one.consumer for one in self)

    def refusing_old(self, topic: str) -> frozenset[str]:
        """Names of the topic's consumers without `takes_old=True`."""
        return frozenset(one.consumer for one in self._on(topic) if not one.takes_old)

    @property
    def callers(self) -> frozenset[str]:
        """Names of those consumers that are effects."""
        return frozenset(one.consumer for one in self._on(EFFECTS))

    def _on(self, topic: str) -> Iterator[Handler]:
        for handlers in self._by_topic.get(topic, {}).values():
            yield from handlers

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
