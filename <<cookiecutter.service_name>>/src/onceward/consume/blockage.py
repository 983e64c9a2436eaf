"""That a partition is blocked, and how the log, its metric and its health say so."""

import logging

from onceward.apply.positions import Slot
from onceward.errors import OncewardError
from onceward.observe import metrics
from onceward.observe.health import Health

log = logging.getLogger(__name__)


class Blocked(OncewardError):
    """The partition is blocked before an offset, by a fault of its service, topic or servers.

    Nothing is skipped, and an operator may have to act.
    """

    def __init__(
        self, offset: int, reason: str, text: str, unexpected: Exception | None = None
    ) -> None:
        """`unexpected`: an error whose traceback is logged."""
        super().__init__(f"offset {offset}: {reason}: {text}")
        self.offset = offset
        self.reason = reason
        self.unexpected = unexpected


class Blockage:
    """Whether a partition is blocked. A reason is logged once, until it is another one."""

    def __init__(self, slot: Slot, part: str, health: Health) -> None:
        """`part` is the partition's name in the log and in its health."""
        self._slot = slot
        self._part = part
        self._health = health
        self._now: tuple[int, str] | None = None
        """The offset where it is blocked, and why."""

    def report(self, blocked: Blocked) -> None:
        """Report why the partition is blocked."""
        slot, text = self._slot, str(blocked)
        if self._now is None or self._now[1] != text:
            log.error(
                "%s is blocked and skips no record: %s",
                self._part,
                blocked,
                exc_info=blocked.unexpected,
                extra={"topic": slot.topic, "partition": slot.partition}
                | {"offset": blocked.offset, "reason": blocked.reason},
            )
            metrics.processed(slot.topic, "", "blocked", 1, slot.group)
        self._now = blocked.offset, text
        metrics.set_blocked(slot.topic, slot.partition, is_blocked=True)
        self._health.not_ready(self._part, text)

    def pass_by(self, position: int) -> None:
        """Report the partition as ready, unless it is still blocked at this position."""
        if self._now is not None:
            if position == self._now[0]:
                return
            log.info("%s: resumed at offset %s", self._part, position)
        self.end()

    def end(self) -> None:
        """Report the partition as ready, whatever blocked it."""
        self.forget()
        self._health.ready(self._part)

    def forget(self) -> None:
        """Report it as blocked no longer, and leave its health as it is."""
        if self._now is not None:
            self._now = None
            metrics.set_blocked(self._slot.topic, self._slot.partition, is_blocked=False)
