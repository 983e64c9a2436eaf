"""The breaker: it opens when a consumer fails for many keys with one error type."""

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from onceward.errors import Paused, as_raised
from onceward.observe import metrics
from onceward.observe.health import Health

from .throttles import Throttles

log = logging.getLogger(__name__)

_FORGOTTEN_AFTER = 120.0
"""Seconds without a probe after which this process has no messages of the consumer any more."""


class FailedMessage(NamedTuple):
    """One message that failed."""

    consumer: str
    order_key: bytes
    error: BaseException
    is_repeated: bool = False
    """Whether it has failed before: it is judged where it has failed first, beside others."""


class BreakerOpen(Paused):
    """A consumer fails with one error type for many keys."""

    reason = "breaker open"

    def __init__(self, text: str, consumer: str) -> None:
        super().__init__(text)
        self.consumer = consumer


@dataclass(slots=True)
class _Consumer:
    kind: type[BaseException]
    keys: set[bytes] = field(default_factory=set)
    failed_at: float = 0.0
    is_open: bool = False
    text: str = ""


_KINDS = {True: "consumer", False: "reader's probe"}
"""What rests until a worker (True), or a reader, may probe. Workers try what has failed, and must
not use up the turns of readers; meanwhile they take nothing else of the consumer, either."""


class Breaker:
    """Counts the failures of each consumer of this process since its last success.

    It opens for a consumer that has failed for many keys in a row with the same type of error. Each
    attempt after that is a probe; the first success that is committed closes it.
    """

    def __init__(
        self, *, keys: int, pause: float, health: Health, throttles: Throttles | None = None
    ) -> None:
        """It opens after failures for `keys` keys; a probe follows after `pause` seconds."""
        self.throttles = throttles or Throttles()
        self._limit = keys
        self._pause = pause
        self._health = health
        self._failing: dict[str, _Consumer] = {}

    @contextmanager
    def probe(self, consumers: Iterable[str], *, is_worker: bool = False) -> Iterator[None]:
        """Apply a batch, which is the probe of consumers for which it is open.

        Raises `BreakerOpen` if another reader, or worker, has made it within the pause.
        """
        kind, failed, rests = _KINDS[is_worker], None, self.throttles
        probed = self.open.intersection(consumers)
        for name in probed:
            if left := rests.rest_left(kind, name):
                refused = BreakerOpen(self._failing[name].text, name)
                refused.after = left
                raise refused
        until = {name: rests.rest(kind, name, self._pause) for name in probed}
        try:
            yield
        except BreakerOpen as error:
            failed = error.consumer
            raise
        finally:
            for name in probed - {failed}:
                rests.end_rest(kind, name, until[name])  # what follows may be the probe

    def forget_idle(self) -> None:
        """Close it for consumers that this process does not probe any more."""
        now = monotonic()
        for name in self.open:
            if now > self._failing[name].failed_at + self._pause + _FORGOTTEN_AFTER:
                self._close(name, "is not tried here any more: another process has its partitions")

    @property
    def open(self) -> set[str]:
        """Consumers for which it is open."""
        return {name for name, one in self._failing.items() if one.is_open}

    def succeeded(self, consumers: Iterable[str]) -> None:
        """Close it for consumers of which a transaction was committed."""
        for consumer in consumers:
            self._close(consumer, "succeeds again")

    def observe(
        self, failures: Iterable[FailedMessage], *, succeeded: Collection[str] = ()
    ) -> None:
        """Count the failures of an attempt. Raises `BreakerOpen` if it is open for a consumer.

        Failures of a consumer that has `succeeded` with other messages of the attempt are not
        counted: those messages are at fault.
        """
        failed: dict[str, BaseException] = {}
        for consumer, order_key, error, is_repeated in failures:
            if consumer in succeeded:
                continue
            failed[consumer], kind = error, type(as_raised(error))
            if is_repeated:
                continue
            state = self._failing.get(consumer)
            if state is None or (state.kind is not kind and not state.is_open):
                state = self._failing[consumer] = _Consumer(kind)
            if len(state.keys) < self._limit:
                state.keys.add(order_key)
        for consumer, error in failed.items():
            state = self._failing.get(consumer)
            if state is not None and (state.is_open or len(state.keys) >= self._limit):
                self._open(state, consumer, error)

    def _open(self, state: "_Consumer", consumer: str, error: BaseException) -> None:
        state.failed_at = monotonic()
        self.throttles.rest(_KINDS[True], consumer, self._pause)
        kind = type(as_raised(error)).__qualname__
        state.text = text = (
            f"{consumer} fails with {kind} for at least {self._limit} keys in a row:"
            " its messages wait, and some are tried until one succeeds"
        )
        if not state.is_open:
            state.is_open = True
            self.throttles.rest(_KINDS[False], consumer, self._pause)
            log.error("breaker: %s", text, exc_info=error)
            metrics.set_breaker(consumer, is_open=True)
        self._health.not_ready(f"breaker of {consumer}", text)
        raise BreakerOpen(text, consumer)  # without the error, which refers to the batch

    def _close(self, consumer: str, why: str) -> None:
        state = self._failing.pop(consumer, None)
        if state is not None and state.is_open:
            for kind in _KINDS.values():
                self.throttles.rest(kind, consumer, 0.0)
            log.info("breaker: %s %s", consumer, why)
            metrics.set_breaker(consumer, is_open=False)
            self._health.forget(f"breaker of {consumer}")
