"""Events: Pydantic models with a type name and, where the service publishes them, a topic."""

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from . import redaction


class Event(BaseModel):
    """Base of everything the service consumes or publishes.

    ```python
    class ParcelMoved(Event, type="parcel.moved.v1", topic="parcel-events"):
        parcel_id: str
        place: str
    ```

    Its handlers and their repetitions share one instance: leave what it holds as it is.

    Pydantic reads and writes the JSON; overriding `model_validate_json` or `model_dump_json` has no
    effect on it: use validators and serializers.

    Secrets are fields of the type `SecretStr`, or with `json_schema_extra={"writeOnly": True}`:
    whatever shows a payload leaves their values out, see `docs/security.md`.

    `type` is the CloudEvents type; it names a contract, so change it when a field changes its
    meaning. `topic` is needed for events that are published.
    """

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    event_type: ClassVar[str]
    event_topic: ClassVar[str | None] = None

    def __init_subclass__(cls, *, type: str, topic: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not type:
            raise TypeError(f'{cls.__name__} needs a type: class {cls.__name__}(Event, type="…")')
        cls.event_type = type
        cls.event_topic = topic
        redaction.mark(cls)


def declared_events(base: type[Event] = Event) -> Iterator[type[Event]]:
    """Return the classes of events that the process has imported."""
    for event in base.__subclasses__():
        yield event
        yield from declared_events(event)


class Tombstone(Event, type="tombstone"):
    """A record without a value: the mark of a deletion on a compacted topic.

    It reaches handlers that are registered for `Tombstone`; elsewhere it is skipped and counted.
    """

    key: str
