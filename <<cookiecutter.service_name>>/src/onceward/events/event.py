"""Events: Pydantic models with a type name and, where the service publishes them, a topic."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from datetime import datetime
from decimal import Decimal
from functools import cache
from inspect import iscoroutinefunction, isroutine
from typing import Any, ClassVar

import orjson
from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticSerializationError, from_json

from onceward import redaction
from onceward.errors import OncewardError, summarize_error

_FLOAT = re.compile(rb"[:,\[\s](-?\d+(?:\.\d+(?:[eE][+-]?\d+)?|[eE][+-]?\d+))(?=[,}\]\s])")
"""Numbers that Pydantic parses as floats. Matches inside of strings too, which does no harm."""
_APART = {"computed_fields", "default", "metadata", "serialization", "strict_schema"}
"""Members of a schema that do not affect validation, which is not strict."""
_SCALARS = {"bool", "float", "int", "str"}
_SAME_IN_A_UNION = _SCALARS | {"literal", "none"}
"""Types that fit a value of JSON as well as the equal one of Python."""
_VALUES: tuple[object, ...] = ({}, [], "", 0, 0.0, True, None)
"""A value of each type that JSON has."""
_TOPIC = re.compile(r"(?!\.\.?$)[a-zA-Z0-9._-]{1,249}")
_ADVICE = (
    "publish what the class and JSON keep, which is no NaN, no secret, nothing of exclude=True and"
    " nothing of another type or a subclass; an alias needs serialize_by_alias=True"
)

Upcaster = Callable[[dict[str, Any]], dict[str, Any]]


class Unpublishable(OncewardError, ValueError):
    """An event that can't be sent. It is raised to the handler; nothing was staged."""


class Event(BaseModel):
    """Base class of all events that the service consumes or publishes.

    ```python
    class ParcelMoved(Event, type="parcel.moved.v1", topic="parcel-events"):
        parcel_id: str
        place: str
    ```

    Each call of a handler, also a repeated one, gets an instance of its own. What a handler changes
    in it is not seen by any other call.

    The engine reads and writes JSON by Pydantic's core, so overriding `model_validate_json` or
    `model_dump_json` has no effect: use validators and serializers. An event that is serialized
    and validated again must equal the original.

    Secrets are fields of the type `SecretStr`, or with `json_schema_extra={"writeOnly": True}`:
    their values are left out wherever a payload is displayed, see `docs/security.md`.

    `type` is the CloudEvents type; it names a contract, so change it when a field changes its
    meaning. `topic` is needed for events that are published. A subclass inherits `topic` unless it
    sets one; a parametrized generic class inherits both.
    """

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    # A field can't begin with an underscore, so none has the name of one of these.
    __event_type__: ClassVar[str]
    __event_topic__: ClassVar[str | None] = None
    __event_upcasters__: ClassVar[Mapping[str, tuple[Upcaster, ...]]] = {}
    """For each older type the functions of `upcast`, in the order in which they are called."""

    def __init_subclass__(
        cls, *, type: str | None = None, topic: str | None = None, **options: Any
    ) -> None:
        super().__init_subclass__(**options)
        if type:
            check_name(f"the type of {cls.__name__}", type)
            cls.__event_type__ = type
        cls.__event_upcasters__ = {} if type else dict(cls.__event_upcasters__)
        if topic is not None:
            check_topic(topic)
            cls.__event_topic__ = topic
        redaction.mark(cls)

    @classmethod
    def __pydantic_init_subclass__(cls, *, type: str | None = None, **options: Any) -> None:
        if not type and cls.__pydantic_generic_metadata__["origin"] is None:
            name, parent = cls.__name__, cls.__bases__[0].__name__
            raise TypeError(f'{name} needs a type of its own: class {name}({parent}, type="…")')
        for name, field in cls.__pydantic_fields__.items():
            if isroutine(field.default):  # Pydantic takes a method of this name for the default
                raise TypeError(
                    f"{name!r} can't be a field of {cls.__name__}, whose method has this name: give"
                    f" another name to the field, with Field(alias={name!r}), and"
                    " ConfigDict(serialize_by_alias=True) to the class"
                )

    @classmethod
    def upcast(cls, old: str, *, to: str | None = None) -> Callable[[Upcaster], Upcaster]:
        """Register the decorated function, which converts the data of an older type.

        Handlers of this class then take messages of the type `old`, too. The function is given the
        payload's JSON object, in which fractions are `Decimal`, and returns that of this class; or
        that of the older type `to`, whose own function goes on from there. Its error is that of an
        invalid payload. Identity and hash stay those of what was received.

        Raises `TypeError` if the class takes `old` already or has handlers, or not yet takes `to`.
        """
        check_name("an older type", old)

        def register(function: Upcaster) -> Upcaster:
            known, type = cls.__event_upcasters__, cls.__event_type__
            if old in (type, *known):
                raise TypeError(
                    f"{cls.__name__} takes {old!r} already: write one upcaster for each older type"
                )
            if to == type:
                raise TypeError(f"{to!r} is the type of {cls.__name__} itself: leave out to=")
            if to not in (None, *known):
                raise TypeError(
                    f"{cls.__name__} does not take {to!r} yet: write its upcaster first, above that"
                    f" of {old!r}"
                )
            made = [one for one in cls.__subclasses__() if one.__event_type__ == cls.__event_type__]
            if made or not isinstance(known, dict) or iscoroutinefunction(function):
                raise TypeError(f"write `def`, and the upcasters of {cls.__name__} before handlers")
            known[old] = (function, *known.get(to or "", ()))
            return function

        return register


def check_event(event: object) -> None:
    """Raise `TypeError` unless the argument is a subclass of `Event` with a type."""
    if not isinstance(event, type) or not issubclass(event, Event) or event is Event:
        raise TypeError(f'{event!r} is no event: declare class Name(Event, type="…")')


def check_name(what: str, name: str) -> None:
    """Raise `ValueError` for a name that is empty, unprintable or surrounded by white space."""
    if not name or not name.isprintable() or name != name.strip():
        raise ValueError(f"{what} is a name of characters that can be seen, not {name!r}")


def check_topic(topic: str) -> None:
    """Raise `ValueError` for a name that is not valid for a Kafka topic."""
    if not _TOPIC.fullmatch(topic):
        raise ValueError(
            f"a topic is named by 1 to 249 letters, digits, dots, underscores and hyphens,"
            f" not {topic!r}"
        )


@cache
def reader(event: type[Event]) -> Callable[[bytes], Any]:
    """Return the function that parses JSON as this event; decimals keep all of their digits.

    Pydantic parses every number with a fraction as a float, also for a `Decimal`. So JSON in which
    a float would lose digits is parsed here, and validated as Python objects. Raises `TypeError`
    for a model that could accept these otherwise: in strict mode, in a union, or as an instance.
    """
    # Does what model_validate_json() does, which takes half as long again.
    validator = event.__pydantic_validator__
    read = validator.validate_json
    nodes = [*_nodes(event.__pydantic_core_schema__)]
    if all(node.get("type") != "decimal" for node in nodes):
        return read
    if any(map(_depends_on_mode, nodes)):
        raise TypeError(
            f"{event.__name__} has a Decimal, and its numbers could lose digits: leave out"
            " strict=True, except for fields of the types bool, float, int and str; give a union"
            ' like UUID | str or Card | Bill the option Field(union_mode="left_to_right"), or a'
            " discriminator; and let a type of your own accept the value that JSON has"
        )

    def read_decimals(data: bytes) -> Any:
        if all(repr(float(number)).encode() == number for number in _FLOAT.findall(data)):
            return read(data)
        try:
            from_json(data)  # rejects what Python's parser accepts
            value = json.loads(data, parse_float=_Number)
        except (ValueError, RecursionError):
            return read(data)  # raises, with Pydantic's description of the error
        return _without_text(validator.validate_python(value))

    return read_decimals


def upcasted(event: type[Event], old: str, data: bytes) -> bytes:
    """Return JSON of an older type as that of the event; numbers keep all of their digits."""
    try:
        value = json.loads(data, parse_float=Decimal, parse_constant=Decimal)
    except ValueError:
        return data  # rejected by its reader, with Pydantic's description of the error
    if not isinstance(value, dict):
        return data
    for function in event.__event_upcasters__[old]:
        value = function(value)
        if not isinstance(value, dict):
            raise TypeError(f"the upcaster of {old!r} returned {type(value)}: return the data")
    return orjson.dumps(_writable(value), default=lambda one: orjson.Fragment(str(Decimal(one))))


def _writable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _writable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(one) for one in value]
    return Decimal(value) if type(value) is int and value.bit_length() > 63 else value


class _Number(float):
    """A float with the text that it has in JSON, which Pydantic uses for a `Decimal`."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


def _without_text(value: Any) -> Any:
    """Return the value with plain floats, also in fields of the type `Any` and in extra fields."""
    if type(value) is _Number:
        return float(value)
    if type(value) is tuple:
        return tuple(map(_without_text, value))
    if isinstance(value, list):
        value[:] = map(_without_text, value)
    elif isinstance(value, dict):
        for name, one in value.items():
            value[name] = _without_text(one)
    elif isinstance(value, BaseModel) or is_dataclass(value):
        _without_text(getattr(value, "__dict__", None))
        _without_text(getattr(value, "__pydantic_extra__", None))
    return value


def _nodes(schema: object) -> Iterator[Mapping[str, Any]]:
    """Yield all parts of a schema that Pydantic has built."""
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield one
            apart = _APART if isinstance(one.get("type"), str) else ()
            left += [inner for name, inner in one.items() if name not in apart]
        elif isinstance(one, list | tuple):
            left += one


def _depends_on_mode(node: Mapping[str, Any]) -> bool:
    """Whether a part of a schema can accept an object of Python otherwise than the same JSON."""
    kind = node.get("type")
    if kind == "union" and node.get("mode") != "left_to_right":
        choices = [one[0] if isinstance(one, tuple) else one for one in node["choices"]]
        return any(one["type"] not in _SAME_IN_A_UNION for one in choices)
    if kind == "is-instance":
        return not any(isinstance(value, node["cls"]) for value in _VALUES)
    return node.get("strict") is True and kind not in _SCALARS


def payload_of(event: Event) -> bytes:
    """Return the event as JSON, in which its class reads an equal event.

    Raises `Unpublishable` if it can't be written, or is another event when it is read.
    """
    kind = type(event)
    try:
        payload = event.__pydantic_serializer__.to_json(event)  # as model_dump_json() does
    except (UnicodeEncodeError, PydanticSerializationError) as error:
        text = f"{kind.__name__} can't be written as UTF-8 JSON: {error}"
        raise Unpublishable(text) from error
    try:
        read = kind.__pydantic_validator__.validate_json(payload)
    except Exception as error:
        why = f"{kind.__name__} can't be read from its own JSON ({summarize_error(error)})"
        raise Unpublishable(f"{why}: {_ADVICE}") from error
    if read.__dict__ != event.__dict__ or event.__pydantic_extra__:
        after = _members(read)
        for name, value in _members(event).items():
            if not _is_same(value, after.get(name)):
                why = f"{kind.__name__}.{name} is another value when it is read from its own JSON"
                raise Unpublishable(f"{why}: {_ADVICE}")
    return payload


def _members(one: object) -> dict[str, Any]:
    if isinstance(one, dict):
        return one
    if isinstance(one, BaseModel):
        fields = {name: getattr(one, name) for name in type(one).model_fields}
        return fields | (one.__pydantic_extra__ or {})
    return getattr(one, "__dict__", {})


def _is_same(one: Any, other: Any) -> bool:
    """Whether values are the same, also for types whose `==` does not compare values."""
    if one == other or type(one) is not type(other):
        return bool(one == other)
    if isinstance(one, datetime):  # in two zones, in the hour that is repeated
        return bool(one.isoformat() == other.isoformat())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    before, after = _members(one), _members(other)
    return (
        bool(before)
        and before.keys() == after.keys()
        and all(_is_same(before[name], after[name]) for name in before)
    )


def declared_events(base: type[Event] = Event) -> Iterator[type[Event]]:
    """Yield the event classes that the process has imported."""
    for event in base.__subclasses__():
        yield event
        yield from declared_events(event)


def is_final(event: type[Event]) -> bool:
    """Whether it is neither a base class of other events nor a generic one without parameters."""
    parameters = event.__pydantic_generic_metadata__["parameters"]
    return not parameters and not event.__subclasses__()


class Tombstone(Event, type="tombstone"):
    """A record without a value: the mark of a deletion on a compacted topic.

    It reaches handlers that are registered for `Tombstone`; elsewhere it is skipped and counted.
    """

    key: str
