"""The breaker: when the same error strikes key after key, it is not the messages that are wrong."""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from pipeline.observe import metrics
from pipeline.observe.health import Health

log = logging.getLogger(__name__)

_FORGOTTEN_AFTER = 120.0
"""Seconds without a probe after which nothing is left here that could make one."""


class Failed(NamedTuple):
    """One message that failed."""

    consumer: str
    order_key: bytes
    error: BaseException
    last_error: str | None = None
    """What it failed with before, as `policy.described`."""

    @property
    def is_news(self) -> bool:
        """Whether it has not failed like this before. Retries of what is wrong always do."""
        name = type(self.error).__qualname__
        return self.last_error is None or not self.last_error.startswith(f"{name}:")


class BreakerOpen(Exception):
    """A consumer fails alike for key after key: nothing is set aside, the batch waits."""


@dataclass(slots=True)
class _Consumer:
    kind: type[BaseException]
    keys: set[bytes] = field(default_factory=set)
    probe_at: float = 0.0
    is_open: bool = False


class Breaker:
    """What fails at the consumers of this process, since each has last succeeded.

    It opens when one has failed for many keys in a row, all with the same type of error. Each try
    after that is a probe; the first success closes it, when it is committed.
    """

    def __init__(self, *, keys: int, pause: float, health: Health) -> None:
        """`keys` that fail alike open it; while it is open there is a `pause` in seconds."""
        self._limit = keys
        self._pause = pause
        self._health = health
        self._failing: dict[str, _Consumer] = {}

    @property
    def resting(self) -> set[str]:
        """Consumers for whom it is open, and whose next probe is not due."""
        now = monotonic()
        gone = [
            name
            for name, one in self._failing.items()
            if one.is_open and now > one.probe_at + _FORGOTTEN_AFTER
        ]
        for name in gone:
            self._close(name, "is not tried here any more: another process has its partitions")
        return {name for name, one in self._failing.items() if one.is_open and now < one.probe_at}

    @property
    def open(self) -> set[str]:
        """Consumers for whom it is open."""
        return {name for name, one in self._failing.items() if one.is_open}

    def succeeded(self, consumers: Iterable[str]) -> None:
        """Note whose work has been committed."""
        for consumer in consumers:
            self._close(consumer, "succeeds again")

    def observe(self, failures: Iterable[Failed], *, succeeded: Collection[str] = ()) -> None:
        """Note who failed in an attempt; raises `BreakerOpen` if nothing may be stored.

        The failures of those who `fared_well` with other messages of the attempt are their own.
        """
        failed: dict[str, BaseException] = {}
        for failure in failures:
            if failure.consumer not in succeeded:
                failed[failure.consumer] = failure.error
                if failure.is_news:
                    self._note(failure)
        for consumer, error in failed.items():
            state = self._failing.get(consumer)
            if state is not None and (state.is_open or len(state.keys) >= self._limit):
                self._open(state, consumer, error)

    def _note(self, failure: Failed) -> None:
        state = self._failing.get(failure.consumer)
        if state is None or (state.kind is not type(failure.error) and not state.is_open):
            state = self._failing[failure.consumer] = _Consumer(type(failure.error))
        if len(state.keys) < self._limit:
            state.keys.add(failure.order_key)

    def _open(self, state: "_Consumer", consumer: str, error: BaseException) -> None:
        state.probe_at = monotonic() + self._pause
        text = (
            f"{consumer} fails with {type(error).__qualname__} for {self._limit} keys and more,"
            " one after the other: nothing is set aside, it is tried again until it succeeds"
        )
        if not state.is_open:
            state.is_open = True
            log.error("breaker: %s", text, exc_info=error)
            metrics.set_breaker(consumer, is_open=True)
        self._health.not_ready(f"breaker of {consumer}", text)
        raise BreakerOpen(text) from error

    def _close(self, consumer: str, why: str) -> None:
        state = self._failing.pop(consumer, None)
        if state is not None and state.is_open:
            log.info("breaker: %s %s", consumer, why)
            metrics.set_breaker(consumer, is_open=False)
            self._health.forget(f"breaker of {consumer}")
