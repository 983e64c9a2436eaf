"""Handlers: which function takes which event of which topic, as which consumer."""

import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import iscoroutinefunction, signature, unwrap
from types import MappingProxyType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pipeline.events.codec import CLOUD_EVENTS, Codec, check_codec
from pipeline.events.event import Event, Tombstone, check_event, check_name, check_topic, reader

from .aggregate import Declared, Loads, declared
from .ordering import Gaps, Sequenced
from .policy import Policy
from .staging import CALLS, REQUESTS
from .transaction import EventBatch, Transaction

TIMEOUT = 5.0
"""Default time-out of a handler in seconds."""

E = TypeVar("E", bound=Event)
Function = Callable[[E, Transaction], Awaitable[object]]
BatchFunction = Callable[[EventBatch[E]], Awaitable[None]]


@dataclass(frozen=True)
class Handler:
    """One registration."""

    event: type[Event]
    topic: str
    consumer: str
    loads: Sequence[Loads[Any]]
    function: Callable[..., Awaitable[object]]
    policy: Policy
    mode: Literal["immediate", "deferred", "call"]
    """A "call" is an effect: workers of the optional package `effects` call it, outside of a
    transaction."""
    timeout: float
    takes_batches: bool = False
    takes_old: bool = False
    gaps: Gaps | None = None
    """Set if it applies events in the order of their sequence."""
    own_transaction: bool = False
    """Whether each of its records has a transaction of its own."""


class Handlers:
    """The registry of a service's handlers."""

    def __init__(self) -> None:
        self._by_topic: dict[str, dict[str, tuple[Handler, ...]]] = {}
        self.codecs: dict[str, Codec] = {}
        """Codecs of topics that are declared with one."""
        self.closed: dict[str, str] = {}
        """Topics whose codec is not open yet, and why: what is published there can't be stored."""
        self.demanding: set[str] = set()
        """Topics that are declared with `demands_types`."""
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

        With the topic None it is called for requests alone, see the optional package `http_api`;
        handlers of a topic can be called for requests as well.

        `consumer` is part of the key of inbox markers: keep it when you rename the function.
        `loads` names the rows that the handler is going to change, with a list those of several
        declarations; they are fetched and locked for the whole batch in one query for each table.

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

    def add(self, new: Handler) -> None:
        """Add a handler. Raises `TypeError` if it can't be beside those that are registered."""
        registered = self._by_topic.setdefault(new.topic, {})
        types = (new.event.__event_type__, *new.event.__event_upcasters__)
        alike = [one for type in types for one in registered.get(type, ())]
        follows = new.loads[0].entity if new.gaps else None
        for other in self:
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

    def topic(self, topic: str, *, codec: Codec | None = None, demands_types: bool = False) -> None:
        """Declare how the events of a topic are written, both those read and those published.

        `codec` is `CloudEvents()` by default. With `demands_types=True` a type that no handler
        takes is a dead letter; elsewhere it is skipped and counted. Raises `TypeError` if the topic
        was declared before, or the codec is no object with the methods of `Codec`.
        """
        check_topic(topic)
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
            )
        return renamed

    def __iter__(self) -> Iterator[Handler]:
        """Return all that are registered."""
        found = (pair for types in self._by_topic.values() for pair in types.items())
        return (one for type, alike in found for one in alike if one.event.__event_type__ == type)

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
        return sorted(one.__qualname__ for one in functions if _is_wrapped_since(one))

    @property
    def consumers(self) -> frozenset[str]:
        """Names of all consumers."""
        return frozenset(one.consumer for one in self)

    @property
    def callers(self) -> frozenset[str]:
        """Names of the consumers of calls."""
        return frozenset(one.consumer for one in self if one.topic == CALLS)

    def of(self, topic: str, type: str) -> tuple[Handler, ...]:
        """Return the handlers of an event type, in the order of their registration."""
        return self._by_topic.get(topic, {}).get(type, ())

    def codec(self, topic: str) -> Codec:
        """Return the topic's codec."""
        return self.codecs.get(topic, CLOUD_EVENTS)

    def sharing(self, table: str) -> list[str]:
        """Return the consumers that load rows of a table and have no `own_transaction`.

        If none loads them, and none has `own_transaction`, any of them may add rows: return all.
        """
        found = [one for one in self if one.mode != "call"]
        loading = [one for one in found if any(each.table == table for each in one.loads)]
        if not loading and any(one.own_transaction for one in found):
            return []
        return sorted({one.consumer for one in loading or found if not one.own_transaction})

    def rivals(self) -> Iterator[tuple[str, str, list[str]]]:
        """Yield a topic, the name of a class, and the consumers of the topic that load its rows, if
        there are several."""
        consumers: dict[tuple[str, type[Any]], set[str]] = {}
        for one in self:
            for loads in one.loads if one.topic != REQUESTS else ():
                consumers.setdefault((one.topic, loads.entity), set()).add(one.consumer)
        for (topic, entity), names in consumers.items():
            if len(names) > 1:
                yield topic, entity.__name__, sorted(names)

    def takes_tombstones(self, topic: str) -> bool:
        """Whether records without a value go to a handler."""
        return Tombstone.__event_type__ in self._by_topic.get(topic, {})


def check_options(
    event: type[Event], *, consumer: str, loads: Declared, timeout: float
) -> Sequence[Loads[Any]]:
    """Return `loads` as a sequence. Raises `TypeError` or `ValueError` for an invalid option."""
    check_event(event)
    check_name("a consumer", consumer)
    if event.__pydantic_complete__:  # otherwise it refers to classes that are defined later
        reader(event)
    rows = declared(loads, event)
    if not timeout > 0:
        raise ValueError(f"timeout is in seconds, not {timeout}")
    return rows


def check_function(function: Callable[..., object], **takes: Any) -> None:
    """Raise `TypeError` for a function that can't take arguments of these types, in this order.

    Its annotations are checked as far as they can be evaluated.
    """
    if not iscoroutinefunction(function):
        raise TypeError(f"{function} must be a coroutine function: write `async def`")
    name = getattr(function, "__name__", "handle")
    parameters = ", ".join(f"{name}: {_text(given)}" for name, given in takes.items())
    advice = f"write `async def {name}({parameters})`"
    try:
        # Not the signature of a wrapped function, which may differ.
        bound = signature(function, follow_wrapped=False).bind(*takes.values())
    except TypeError as error:
        raise TypeError(f"{name} can't be called as a handler is ({error}): {advice}") from None
    try:
        hints = get_type_hints(function)
    except Exception:  # names that only a type checker knows, or that are defined later
        return
    for parameter, given in bound.arguments.items():
        hint = hints.get(parameter, Any)
        if not isinstance(given, tuple) and not _fits(given, hint):
            raise TypeError(
                f"{name} takes {_text(hint)} as {parameter}, where it is given"
                f" {_text(given)}: {advice}"
            )


def _fits(given: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(given, one) for one in get_args(hint))
    kind, wanted = get_origin(given) or given, get_origin(hint) or hint
    is_known = isinstance(wanted, type) and not getattr(wanted, "_is_protocol", False)
    if Any in (kind, wanted) or not is_known:
        return True
    return issubclass(kind, wanted) and all(map(_fits, get_args(given), get_args(hint)))


def _text(given: Any) -> str:
    name: str = getattr(given, "__name__", str(given))
    inner = ", ".join(map(_text, get_args(given)))
    return f"{name}[{inner}]" if inner else name


def _is_wrapped_since(function: Callable[..., object]) -> bool:
    """Whether a decorator in its module has replaced the function by one that calls it."""
    name = getattr(function, "__qualname__", "")
    found = getattr(sys.modules.get(function.__module__), name, function)
    if found is function or not callable(found):
        return False
    cells = getattr(found, "__closure__", None) or ()
    return unwrap(found, stop=lambda one: one is function) is function or any(
        cell.cell_contents is function for cell in cells
    )
