"""What is remembered of a message that took effect, as a correction is given it."""

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from onceward.events.event import Event


class AppliedEvent(BaseModel):
    """An event that a message's handler has published, as far as the outbox still has it."""

    model_config = ConfigDict(frozen=True)

    id: str
    topic: str
    type: str
    key: str | None = None
    sequence: int | None = None
    """Version of the aggregate after this event."""


class Applied(Event, type="(applied)"):
    """A message that took effect, as its marker in the inbox has it.

    Corrections take it in place of the message, whose record is not needed: see `Handlers.correct`.
    """

    consumer: str
    """Which has applied it."""
    source: str
    id: str
    type: str
    """Source, id and type of its event."""
    topic: str
    """Where it came from; "(requests)" and "(calls)" stand for requests and calls."""
    partition: int
    offset: int
    key: str | None = None
    """Key of its record; None if it had none, or its marker has none."""
    release: str | None = None
    """The release that has applied it."""
    at: datetime
    """When the transaction began that has applied it."""
    result: Any = None
    """What its handler has returned."""
    events: list[AppliedEvent] = Field(default_factory=list)
