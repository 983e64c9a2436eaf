"""Why a partition stands still: nothing of it is skipped, and a person may have to decide."""

from traceback import clear_frames

from pipeline.apply.breaker import BreakerOpen
from pipeline.apply.positions import Slot
from pipeline.errors import describe_error, summarize_error
from pipeline.servers.record_batches import UnreadableBatch


class TopicChanged(Exception):
    """The topic does not hold what the position says: a person decides where to go on."""

    def __init__(self, slot: Slot, position: int, what: str) -> None:
        super().__init__(
            f"{slot.topic}/{slot.partition} goes on at {position}, but {what}. Nothing is read"
            f" until the position is set, for instance by: {_seek(slot, 'earliest')}"
        )


class BatchHeld(Exception):
    """A batch of a producer can't be read: a person decides whether to go on behind it."""

    def __init__(self, slot: Slot, batch: UnreadableBatch, position: int, deaths: int) -> None:
        """`deaths`: processes that have died while they read it."""
        # The frames refer to what was unpacked of it.
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
    """The partition stands still before an offset; its service, topic or servers are at fault."""

    def __init__(self, offset: int, reason: str, error: BaseException) -> None:
        super().__init__(
            f"offset {offset}: {reason}: {summarize_error(error) or describe_error(error)}"
        )
        self.offset = offset
        self.reason = reason
        self.error = error

    @property
    def is_explained(self) -> bool:
        """Return whether the text says everything, so that a traceback would be of no use."""
        return isinstance(self.error, BatchHeld | BreakerOpen | TopicChanged)


def _seek(slot: Slot, to: int | str) -> str:
    return f"service topics seek {slot.topic} --partition {slot.partition} --to {to}"
