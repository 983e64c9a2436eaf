"""Order that events bring along: the sequence of those of one subject, or the time of each.

Kafka keeps the order in which it was given the events of a key. A producer that gives them in
another one, or loses some, is noticed by the sequence, and by nothing else.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import sqlalchemy as sa
from sqlalchemy.orm import Mapped, mapped_column

from pipeline.events.message import Message

from .policy import Reject, is_delay


class Sequenced:
    """Mixin for an aggregate that follows numbered events, see `gaps=` of `Handlers.on`."""

    followed: Mapped[int] = mapped_column(sa.BigInteger, default=0)
    """Sequence of the last event that was applied to the row; the engine writes it."""
    followed_by: Mapped[str | None] = mapped_column(sa.Text)
    """Source and id of that event."""


class Timed:
    """Mixin for a row that the latest event wins, by its own time, see `Transaction.overwrites`."""

    written_at: Mapped[datetime | None] = mapped_column(sa.DateTime(timezone=True))
    """Time of the event that has won so far."""
    written_by: Mapped[str | None] = mapped_column(sa.Text)
    """Its source and id: of two with the same time one wins, wherever they are applied."""


@dataclass(frozen=True)
class Gaps:
    """What is done with an event whose predecessors have not come."""

    wait: float = 600.0
    """Seconds that it waits for them, with all that come after it. They may still be in Kafka:
    longer than the service may be away or behind."""
    then: Literal["apply", "die", "hold"] = "apply"
    """After that it is applied, with the gap told by `Transaction.gap`; or it is a dead letter, and
    the next one waits in its place, or all of the key wait for a person."""

    def __post_init__(self) -> None:
        if not is_delay(self.wait):
            raise ValueError(f"wait is a number of seconds, not {self.wait!r}")
        if self.then not in ("apply", "die", "hold"):
            raise ValueError(f"then is 'apply', 'die' or 'hold', not {self.then!r}")


class SequenceGap(Exception):
    """Events that come before this one have not come."""

    def __init__(self, sequence: int, gap: int) -> None:
        missing = f"{sequence - gap} to {sequence - 1}" if gap > 1 else f"{sequence - 1}"
        super().__init__(f"it has the sequence {sequence}, and {missing} did not come")


class SequenceConflict(Exception):
    """Another event of the same sequence was applied: their producer counts wrongly."""

    def __init__(self, sequence: int, other: str) -> None:
        super().__init__(
            f"it has the sequence {sequence}, as {other!r} that was applied: one of both was not"
            " meant; see what their producer counts by"
        )


def name_of(message: Message) -> str:
    """Return what names an event in a row: its source and its id."""
    return f"{message.source} {message.id}"


def sequence_of(message: Message) -> int:
    """Return the event's place among those of its subject. Raises `Reject` if it has none."""
    text = message.sequence or ""
    if text.isascii() and text.isdecimal() and len(text) < 40 and 0 < int(text) < 2**63:
        return int(text)
    raise Reject(
        "its handler goes by the CloudEvents attribute `sequence`, which should be a number from 1"
        f" on and is {message.sequence!r}: have the producer send it, or leave gaps= out"
    )


def overwrites(row: Timed, message: Message) -> bool:
    """Let the event win over the row if it is later; says whether it is. Raises `Reject`."""
    if message.time is None:
        raise Reject("what wins goes by the CloudEvents attribute `time`, which is not there")
    by = name_of(message)
    if row.written_at is not None and (message.time, by) <= (row.written_at, row.written_by or ""):
        return False
    row.written_at, row.written_by = message.time, by
    return True
