"""What a service is made of, as its `main.py` says it."""

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import MetaData

from .events import Event
from .handlers import Handlers


class Misconfigured(Exception):
    """The service, as its code and its settings describe it, makes no sense."""


@dataclass(frozen=True)
class Service:
    """A service: its name, its handlers and its tables.

    `name` is the consumer group, the `source` of the events published (as `/name`) and the name in
    traces and logs. A new name is a new group, which starts from the beginning.
    """

    name: str
    handlers: Handlers
    metadata: MetaData

    def check(self, dead_letter_topic: str | None) -> None:
        """Raise `Misconfigured` for what can't have been meant."""
        if dead_letter_topic in self.handlers.topics:
            raise Misconfigured(
                f"the service reads {dead_letter_topic}, and would send its dead letters there for"
                " ever: let PIPELINE_DEAD_LETTER_TOPIC name another topic"
            )
        if unread := self.handlers.demanding - self.handlers.topics:
            raise Misconfigured(
                f"demand_types({min(unread)!r}) is about a topic that no handler reads"
            )

    @property
    def source(self) -> str:
        """The CloudEvents source of what the service publishes."""
        return f"/{self.name}"

    @property
    def topics(self) -> frozenset[str]:
        """Every topic that the service reads or declares events for."""
        declared = {event.event_topic for event in _below(Event) if event.event_topic}
        return self.handlers.topics | declared


def _below(event: type[Event]) -> Iterator[type[Event]]:
    for sub in event.__subclasses__():
        yield sub
        yield from _below(sub)
