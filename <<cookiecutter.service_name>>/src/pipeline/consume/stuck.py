"""Errors that block a partition: nothing is skipped, and an operator may have to act."""

from traceback import clear_frames

from pipeline.apply.breaker import BreakerOpen
from pipeline.apply.positions import Slot
from pipeline.errors import describe_error, summarize_error
from pipeline.servers.record_batches import UnreadableBatch


class TopicChanged(Exception):
    """The topic is not the one in which the position was reached: an operator must set it."""

    def __init__(self, slot: Slot, position: int, what: str) -> None:
        super().__init__(
            f"{slot.topic}/{slot.partition} is read from {position}, but {what}. Nothing is read"
            f" until the position is set, for instance by: {_seek(slot, 'earliest')}"
        )


class BatchHeld(Exception):
    """A producer's batch can't be read: it blocks the partition until an operator skips it."""

    def __init__(self, slot: Slot, batch: UnreadableBatch, position: int, deaths: int) -> None:
        """`deaths`: processes that have died while they read the batch."""
        # The frames would keep what was unpacked of the batch in memory.
        for error in filter(None, (batch, batch.__cause__)):
            clear_frames(error.__traceback__)
        advice = ""
        if batch.is_too_large and deaths:
            advice = (
                f"Processes have died here ({deaths}): give them more memory, and let one try to"
                f" read it: {_seek(slot, position)}. "
            )
        elif batch.is_too_large:
            advice = "To read it, raise PIPELINE_UNPACKED_MEBIBYTES: it takes twice that memory. "
        super().__init__(
            f"{batch}. Nothing is read until it can be. {advice}To go on behind it, without what it"
            f" holds: {_seek(slot, batch.next)}"
        )


class Stuck(Exception):
    """The partition is blocked before an offset, by a fault of its service, topic or servers."""

    def __init__(self, offset: int, reason: str, error: BaseException) -> None:
        super().__init__(
            f"offset {offset}: {reason}: {summarize_error(error) or describe_error(error)}"
        )
        self.offset = offset
        self.reason = reason
        self.error = error

    @property
    def is_explained(self) -> bool:
        """Return whether the text is complete, so that no traceback is logged."""
        return isinstance(self.error, BatchHeld | BreakerOpen | TopicChanged)


def _seek(slot: Slot, to: int | str) -> str:
    return f"service topics seek {slot.topic} --partition {slot.partition} --to {to}"
