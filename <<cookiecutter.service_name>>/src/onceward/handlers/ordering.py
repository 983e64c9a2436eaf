"""Orders that events carry themselves: the sequence of a subject's events, or the event's time.

Kafka keeps the order in which the events of a key were sent. Only the sequence shows that a
producer has sent them in another order, or has lost some.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import sqlalchemy as sa
from sqlalchemy.orm import Mapped, mapped_column

from onceward.errors import OncewardError
from onceward.events.message import Message

from .policy import Reject, is_delay


class Sequenced:
    """Mixin for an aggregate that follows numbered events, see `gaps=` of `Handlers.on`."""

    followed: Mapped[int] = mapped_column(sa.BigInteger, default=0)
    """Sequence of the last event that was applied to the row; the engine writes it."""
    followed_by: Mapped[str | None] = mapped_column(sa.Text)
    """Source and id of that event."""


class Timed:
    """Mixin for a row that has the values of the latest event, see `Transaction.overwrites`."""

    written_at: Mapped[datetime | None] = mapped_column(sa.DateTime(timezone=True))
    """Time of the latest event so far."""
    written_by: Mapped[str | None] = mapped_column(sa.Text)
    """Its source and id: they decide between events of the same time, whichever comes first."""


@dataclass(frozen=True)
class Gaps:
    """Decision on an event whose predecessors have not come."""

    wait: float = 600.0
    """Seconds that it and its successors wait for them. Choose more than the longest outage or lag
    of the service, because the predecessors may still be in Kafka."""
    then: Literal["apply", "die", "hold"] = "apply"
    """After that "apply" applies it, with the number of missing events in `Transaction.gap`. "die"
    makes it a dead letter, and the next event waits in its place; "hold" makes it a dead letter,
    and all events of its key wait until an operator redrives or discards it."""

    def __post_init__(self) -> None:
        if not is_delay(self.wait):
            raise ValueError(f"wait is a number of seconds, not {self.wait!r}")
        if self.then not in ("apply", "die", "hold"):
            raise ValueError(f"then is 'apply', 'die' or 'hold', not {self.then!r}")


class SequenceGap(OncewardError):
    """Events that come before this one have not come."""

    def __init__(self, sequence: int, gap: int) -> None:
        missing = f"{sequence - gap} to {sequence - 1}" if gap > 1 else f"{sequence - 1}"
        super().__init__(f"it has the sequence {sequence}, and {missing} did not come")


class SequenceConflict(OncewardError):
    """Another event with this sequence was applied: their producer numbers events wrongly."""

    def __init__(self, sequence: int, other: str) -> None:
        super().__init__(
            f"it has the sequence {sequence}, as {other!r} that was applied: one of both has a"
            " wrong number; check how their producer numbers its events"
        )


def name_of(message: Message) -> str:
    """Return the identity of an event that is stored in a row: source and id."""
    return f"{message.source} {message.id}"


def sequence_of(message: Message) -> int:
    """Return the event's sequence number. Raises `Reject` if it has no valid one."""
    text = message.sequence or ""
    if text.isascii() and text.isdecimal() and len(text) < 40 and 0 < int(text) < 2**63:
        return int(text)
    raise Reject(
        "its handler goes by the CloudEvents attribute `sequence`, which should be a number from 1"
        f" on and is {message.sequence!r}: have the producer send it, or leave gaps= out"
    )
