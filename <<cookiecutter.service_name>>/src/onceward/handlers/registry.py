"""Handlers: which function takes which event of which topic, as which consumer."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Concatenate, Literal, Self, TypeVar

from onceward.events.codec import CLOUD_EVENTS, Codec, check_codec
from onceward.events.event import Event, Tombstone, check_topic

from .aggregate import Declared, Loads, canonical, record_key
from .applied import Applied
from .checks import check_function, check_options, is_wrapped_since
from .ordering import Gaps, Sequenced
from .policy import Policy
from .staging import CALLS, REQUESTS
from .transaction import EventBatch, Transaction

TIMEOUT = 5.0
"""Default time-out of a handler in seconds."""

E = TypeVar("E", bound=Event)
Function = Callable[Concatenate[E, Transaction, ...], Awaitable[object]]
"""Its further parameters take resources."""
BatchFunction = Callable[Concatenate[EventBatch[E], ...], Awaitable[None]]
Mode = Literal["immediate", "deferred", "call"]


@dataclass(frozen=True)
class Handler:
    """One registration."""

    event: type[Event]
    topic: str
    consumer: str
    loads: Sequence[Loads[Any]]
    function: Callable[..., Awaitable[object]]
    policy: Policy
    mode: Mode
    """A "call" is an effect: workers of the optional package `effects` call it, outside of a
    transaction."""
    timeout: float
    takes_batches: bool = False
    takes_old: bool = False
    gaps: Gaps | None = None
    """Set if it applies events in the order of their sequence."""
    own_transaction: bool = False
    """Whether each of its records has a transaction of its own."""
    corrects: str = ""
    """The consumer of which it corrects what has been applied. It takes no records, but messages
    that a command stores, see `Handlers.correct`."""
    order: str = ""
    """The consumer in whose order it handles messages, if that is not its own."""

    @property
    def queue(self) -> str:
        """The consumer in whose order it handles messages: a correction's is another one."""
        return self.order or self.consumer

    @property
    def functions(self) -> Mapping[str, tuple[Callable[..., Any], int]]:
        """The functions of the service that it calls, by field, and with how many arguments.

        Their further parameters take resources.
        """
        return {"function": (self.function, 1 if self.takes_batches else 2)}

    def bound(self, bind: Callable[[Callable[..., Any], int], Callable[..., Any]]) -> Self:
        """Return the same handler with the functions that `bind` returns for its own."""
        bound: dict[str, Any] = {name: bind(*one) for name, one in self.functions.items()}
        return replace(self, **bound)


class Handlers:
    """The registry of a service's handlers."""

    def __init__(self) -> None:
        self._by_topic: dict[str, dict[str, tuple[Handler, ...]]] = {}
        self._corrections: dict[str, dict[str, tuple[Handler, ...]]] = {}
        self.corrections: dict[str, str] = {}
        """The consumer that each correction corrects, by the name of the correction."""
        self.recalling: set[str] = set()
        """Corrections that take `Applied`."""
        self.codecs: dict[str, Codec] = {}
        """Codecs of topics that are declared with one."""
        self.closed: dict[str, str] = {}
        """Topics whose codec is not open yet, and why: what is published there can't be stored."""
        self.demanding: set[str] = set()
        """Topics that are declared with `demands_types`."""
        self.holding: set[str] = set()
        """Topics of which a record that can't be decoded holds its key."""
        self._declared: set[str] = set()

    def on(
        self,
        event: type[E],
        *,
        topic: str | None,
        consumer: str,
        loads: Declared = None,
        gaps: Gaps | None = None,
        policy: Policy = Policy(),  # noqa: B008  # it is frozen
        mode: Literal["immediate", "deferred"] = "immediate",
        timeout: float = TIMEOUT,
        takes_old: bool = False,
        own_transaction: bool = False,
    ) -> Callable[[Function[E]], Function[E]]:
        """Register the decorated coroutine function for the events of a topic.

        With the topic None it is called for requests alone, see the optional package
        `onceward.http`; handlers of a topic can be called for requests as well.

        `consumer` is part of the key of inbox markers: keep it when you rename the function.
        `loads` names the rows that the handler is going to change, with a list those of several
        declarations; they are fetched and locked for the whole batch in one query for each table.
        Parameters after the transaction take `Service.resources`.

        `policy` decides on a message for which the function fails; later messages of its key wait
        behind it. With `mode="deferred"` every message is stored at once and handled
        later, from the backlog. After `timeout` seconds a call is cancelled, and has failed. With
        `takes_old=True` messages older than the oldest inbox markers are applied, at the risk of
        applying them twice; otherwise they are dead letters.

        Messages share transactions, and so `now()`, the transaction's id and statement triggers.
        With `own_transaction=True` a transaction has one record. As a partition is read in order,
        that holds for all consumers of the topic; together with `mode="deferred"` only for this
        one.

        With `gaps` the events of the first row of `loads`, a `Sequenced` one, are applied in the
        order of their CloudEvents `sequence`: one older than the latest applied is superseded, and
        one that comes early waits. All handlers of a consumer and a topic have `gaps`, or none.

        The function's result is stored as JSON in the marker, and kept as long as that is. It costs
        one more statement in a transaction in which a function returns a result. `service inbox
        show` prints it, and a repeated request is answered by it.

        Raises `TypeError` if the consumer already takes these events, or `loads` or the
        function does not fit, and `ValueError` for an invalid time-out or name.
        """
        if topic is not None:
            check_topic(topic)
        elif mode == "deferred" or gaps is not None:
            raise TypeError("a request is answered at once: it takes no gaps= and no mode=")
        rows = check_options(event, consumer=consumer, loads=loads, timeout=timeout)
        if gaps is not None and not (rows and issubclass(rows[0].entity, Sequenced)):
            raise TypeError("gaps= needs loads= of a class that has the mixin Sequenced")

        def register(function: Function[E]) -> Function[E]:
            check_function(function, event=event, tx=Transaction)
            common = event, topic or REQUESTS, consumer, rows, function, policy, mode, timeout
            self.add(
                Handler(*common, takes_old=takes_old, gaps=gaps, own_transaction=own_transaction)
            )
            return function

        return register

    def on_batch(
        self,
        event: type[E],
        *,
        topic: str,
        consumer: str,
        loads: Declared = None,
        policy: Policy = Policy(),  # noqa: B008  # it is frozen
        mode: Literal["immediate", "deferred"] = "immediate",
        timeout: float = TIMEOUT,
        takes_old: bool = False,
    ) -> Callable[[BatchFunction[E]], BatchFunction[E]]:
        """Register a coroutine function that takes many events at once, an `EventBatch`.

        For handlers that read and write sets of rows, in SQL of their own. It differs from `on` in
        that the function returns nothing, `timeout` limits the whole call, and when a call with
        several events fails they are tried again in parts, until one event fails by itself.
        """
        check_topic(topic)
        rows = check_options(event, consumer=consumer, loads=loads, timeout=timeout)

        def register(function: BatchFunction[E]) -> BatchFunction[E]:
            check_function(function, batch=EventBatch[event])  # type: ignore[valid-type]
            common = event, topic, consumer, rows, function, policy, mode, timeout
            self.add(Handler(*common, takes_batches=True, takes_old=takes_old))
            return function

        return register

    def correct(
        self,
        event: type[E],
        *,
        topic: str,
        of: str,
        consumer: str,
        loads: Declared = None,
        policy: Policy = Policy(attempts=1),  # noqa: B008  # it is frozen
        timeout: float = TIMEOUT,
    ) -> Callable[[Function[E]], Function[E]]:
        """Register the decorated coroutine function as a correction of what was applied.

        It is called once for each message of the topic that the consumer `of` has applied and that
        an operator hands to it, by `service correct`, and for no others: `consumer` is its own
        name. Messages of a key are corrected in the order of the consumer `of`, and those of the
        key that come meanwhile wait. Its options are those of `on`. By default it has one attempt,
        so that a message for which it fails does not hold up the key: it is a dead letter.

        With the class of an event it is given the message, whose record must still be in Kafka;
        with `Applied` what is remembered of it. Calls and requests, whose topics are "(calls)" and
        "(requests)", have no records. Corrections of calls have an order of their own.

        Raises `TypeError` if `of` takes nothing of the topic or has no records there, if the name
        is that of another consumer, or the function does not fit, and `ValueError` for an invalid
        time-out or name.
        """
        rows = check_options(event, consumer=consumer, loads=loads, timeout=timeout)
        its = next((one for one in self.takers if (one.consumer, one.topic) == (of, topic)), None)
        if its is None:
            raise TypeError(f"consumer {of!r} takes nothing of topic {topic!r}: register it before")
        if topic in (CALLS, REQUESTS) and event is not Applied:
            raise TypeError(f"what {of!r} has applied has no records: take Applied")
        is_call, is_alone = its.mode == "call", its.own_transaction
        mode: Mode = "immediate" if is_call else its.mode
        order = "" if is_call else of

        def register(function: Function[E]) -> Function[E]:
            check_function(function, event=event, tx=Transaction)
            common = event, topic, consumer, rows, function, policy, mode, timeout
            self.add(
                Handler(*common, takes_old=True, own_transaction=is_alone, corrects=of, order=order)
            )
            return function

        return register

    def add(self, new: Handler) -> None:
        """Add a handler. Raises `TypeError` if it can't be beside those that are registered."""
        if new.event is Applied and not new.corrects:
            raise TypeError("Applied is what corrections take: see handlers.correct")
        places = self._corrections if new.corrects else self._by_topic
        registered = places.setdefault(new.topic, {})
        types = (new.event.__event_type__, *new.event.__event_upcasters__)
        alike = [one for type in types for one in registered.get(type, ())]
        follows = new.loads[0].entity if new.gaps else None
        for other in self:
            if other.consumer == new.consumer and other.corrects != new.corrects:
                raise TypeError(f"{new.consumer!r} is the name of another consumer: choose another")
            is_other = (other.event is Applied) != (new.event is Applied)
            if new.corrects and other.consumer == new.consumer and is_other:
                raise TypeError(f"{new.consumer!r} takes records, or Applied: two names are needed")
            is_alike = (other.consumer, other.topic) == (new.consumer, new.topic)
            if other in alike and other.event is not new.event:
                both = next(type for type in types if other in registered.get(type, ()))
                raise TypeError(
                    f"{other.event.__name__} and {new.event.__name__} both have the type {both!r},"
                    " or an upcaster of it: take one of them in all handlers of the topic"
                )
            if other in alike and is_alike:
                raise TypeError(
                    f"consumer {new.consumer!r} already takes {new.event.__event_type__!r} of topic"
                    f" {new.topic!r}: give the second handler a name of its own"
                )
            if other.consumer == new.consumer and (other.mode == "call") != (new.mode == "call"):
                raise TypeError(
                    f"{new.consumer!r} is an effect and a consumer of a topic: two names are needed"
                )
            if is_alike and (other.gaps is None) != (new.gaps is None):
                raise TypeError(
                    f"all handlers of consumer {new.consumer!r} and topic {new.topic!r} go by the"
                    " sequence of events (gaps=), or none does"
                )
            followed = other.loads[0].entity if other.gaps else None
            if follows and follows is followed and not is_alike:
                raise TypeError(
                    f"{follows.__name__} follows the sequence of consumer {other.consumer!r} and"
                    f" topic {other.topic!r}: it can follow one only"
                )
        # Those of later upcasters would be skipped: `upcast` refuses them.
        new.event.__event_upcasters__ = MappingProxyType({**new.event.__event_upcasters__})
        for type in types:
            registered[type] = (*registered.get(type, ()), new)
        if new.corrects:
            self.corrections[new.consumer] = new.corrects
        if new.event is Applied:
            self.recalling.add(new.consumer)

    def topic(
        self,
        topic: str,
        *,
        codec: Codec | None = None,
        demands_types: bool = False,
        undecodable: Literal["go on", "hold"] = "go on",
    ) -> None:
        """Declare how the events of a topic are written, both those read and those published.

        `codec` is `CloudEvents()` by default. With `demands_types=True` a type that no handler
        takes is a dead letter; elsewhere it is skipped and counted. With `undecodable="hold"` a
        record that can't be decoded is a dead letter of each consumer of the topic, and later
        messages of its key wait until an operator redrives or discards it. Raises `TypeError` if
        the topic was declared before, or the codec is no object with the methods of `Codec`, and
        `ValueError` for another word.
        """
        check_topic(topic)
        if undecodable not in ("go on", "hold"):
            raise ValueError(f"undecodable is 'go on' or 'hold', not {undecodable!r}")
        if codec is not None:
            check_codec(codec)
        if topic in self._declared:
            raise TypeError(f"topic {topic!r} is declared twice")
        self._declared.add(topic)
        if codec is not None:
            self.codecs[topic] = codec
            self.closed[topic] = f"the codec of {topic!r} is not open yet"
        if demands_types:
            self.demanding.add(topic)
        if undecodable == "hold":
            self.holding.add(topic)

    def changed(self, change: Callable[[Handler], Handler | None]) -> "Handlers":
        """Return the same registry with the handlers that `change` returns for its own, if any."""
        changed = copy(self)
        changed._by_topic, changed._corrections = {}, {}
        for one in self:
            if (other := change(one)) is not None:
                changed.add(other)
        return changed

    def with_topics(self, rename: Callable[[str], str]) -> "Handlers":
        """Return the same handlers for renamed topics, as for brokers that are shared.

        Raises `ValueError` if two topics would have the same name.
        """
        names = {topic: rename(topic) for topic in {*self.topics, *self._declared}}
        if len({*names.values()}) < len(names):
            raise ValueError(f"two topics would have the same name: {sorted(names.values())}")
        renamed = Handlers()
        for one in self:
            renamed.add(replace(one, topic=names.get(one.topic, one.topic)))  # calls have none
        for topic in self._declared:
            renamed.topic(
                names[topic],
                codec=self.codecs.get(topic),
                demands_types=topic in self.demanding,
                undecodable="hold" if topic in self.holding else "go on",
            )
        return renamed

    def __iter__(self) -> Iterator[Handler]:
        """Return all that are registered, corrections last."""
        places = *self._by_topic.values(), *self._corrections.values()
        found = (pair for types in places for pair in types.items())
        return (one for type, alike in found for one in alike if one.event.__event_type__ == type)

    @property
    def takers(self) -> list[Handler]:
        """All but corrections, which take nothing by themselves."""
        return [one for one in self if not one.corrects]

    @property
    def topics(self) -> frozenset[str]:
        """Topics that have a handler."""
        return frozenset(self._by_topic) - {CALLS, REQUESTS}

    @property
    def call_types(self) -> Mapping[str, type[Event]]:
        """The events that may be staged by `call`, by their types."""
        return {type: one[0].event for type, one in self._by_topic.get(CALLS, {}).items()}

    @property
    def replaced(self) -> list[str]:
        """Names of functions that were replaced by a decorator above their registration."""
        functions = {one.function for one in self}
        return sorted(one.__qualname__ for one in functions if is_wrapped_since(one))

    @property
    def consumers(self) -> frozenset[str]:
        """Names of all consumers."""
        return frozenset(one.consumer for one in self)

    @property
    def callers(self) -> frozenset[str]:
        """Names of the consumers of calls."""
        return frozenset(one.consumer for one in self if one.mode == "call")

    def of(self, topic: str, type: str, consumer: str = "") -> tuple[Handler, ...]:
        """Return the handlers of an event type, in the order of their registration.

        Those of corrections are returned for a `consumer` that is one, and for no other.
        """
        places = self._corrections if consumer in self.corrections else self._by_topic
        return places.get(topic, {}).get(type, ())

    def holders(self, topic: str) -> Sequence[Handler]:
        """Return one handler of each consumer of a topic, of which a dead message holds its key."""
        of_topic = {one.consumer: one for one in self.takers if one.topic == topic}
        return [
            replace(one, policy=Policy(after_death="hold"), gaps=None, takes_old=True)
            for one in of_topic.values()
        ]

    def record_key(self, topic: str, event: Event) -> str | None:
        """Return the key of an event's record: the first row that its handlers load names it."""
        takers = self.of(topic, event.__event_type__)
        loads = next((one.loads[0] for one in takers if one.loads), None)
        return None if loads is None else record_key(canonical(loads.entity, loads.key_of(event)))

    def codec(self, topic: str) -> Codec:
        """Return the topic's codec."""
        return self.codecs.get(topic, CLOUD_EVENTS)

    def sharing(self, table: str) -> list[str]:
        """Return the consumers that load rows of a table and have no `own_transaction`.

        If none loads them, and none has `own_transaction`, any of them may add rows: return all.
        """
        found = [one for one in self.takers if one.mode != "call"]
        loading = [one for one in found if any(each.table == table for each in one.loads)]
        if not loading and any(one.own_transaction for one in found):
            return []
        return sorted({one.consumer for one in loading or found if not one.own_transaction})

    def rivals(self) -> Iterator[tuple[str, str]]:
        """Yield a fault and advice for each class that several consumers of a topic load, and none
        as `unordered`."""
        consumers: dict[tuple[str, type[Any]], set[str]] = {}
        for one in self.takers:
            for loads in one.loads if one.topic != REQUESTS else ():
                if not loads.unordered:
                    consumers.setdefault((one.topic, loads.entity), set()).add(one.consumer)
        for (topic, entity), names in consumers.items():
            if len(names) > 1:
                found = (
                    f"the consumers {', '.join(sorted(names))} of topic {topic} load"
                    f" {entity.__name__}: events of one key keep their order only within a consumer"
                )
                advice = (
                    "let one consumer take all events that change these rows, or write"
                    f" {entity.__name__}.by(…, unordered=True) where no order is needed"
                )
                yield found, advice

    def takes_tombstones(self, topic: str) -> bool:
        """Whether records without a value go to a handler."""
        return Tombstone.__event_type__ in self._by_topic.get(topic, {})
