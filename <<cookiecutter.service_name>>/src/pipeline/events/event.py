"""Events: Pydantic models with a type name and, where the service publishes them, a topic."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from pipeline import redaction

from .decimals import keeping_digits

_TOPIC = re.compile(r"(?!\.\.?$)[a-zA-Z0-9._-]{1,249}")


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

    event_type: ClassVar[str]
    event_topic: ClassVar[str | None] = None

    def __init_subclass__(
        cls, *, type: str | None = None, topic: str | None = None, **options: Any
    ) -> None:
        super().__init_subclass__(**options)
        if type:
            check_name(f"the type of {cls.__name__}", type)
            cls.event_type = type
        if topic is not None:
            check_topic(topic)
            cls.event_topic = topic
        redaction.mark(cls)

    @classmethod
    def __pydantic_init_subclass__(cls, *, type: str | None = None, **options: Any) -> None:
        if not type and cls.__pydantic_generic_metadata__["origin"] is None:
            name, parent = cls.__name__, cls.__bases__[0].__name__
            raise TypeError(f'{name} needs a type of its own: class {name}({parent}, type="…")')


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

    Raises `TypeError` for a model that could lose them.
    """
    # Does what model_validate_json() does, which takes half as long again.
    read = event.__pydantic_validator__.validate_json
    prepare = keeping_digits(event.__pydantic_core_schema__)
    return read if prepare is None else lambda data: read(prepare(data))


def declared_events(base: type[Event] = Event) -> Iterator[type[Event]]:
    """Yield the event classes that the process has imported."""
    for event in base.__subclasses__():
        yield event
        yield from declared_events(event)


class Tombstone(Event, type="tombstone"):
    """A record without a value: the mark of a deletion on a compacted topic.

    It reaches handlers that are registered for `Tombstone`; elsewhere it is skipped and counted.
    """

    key: str
