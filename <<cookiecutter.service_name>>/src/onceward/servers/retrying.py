"""The one policy by which work is retried while a server is unavailable."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import uniform
from typing import Any, TypeVar

from onceward.errors import (
    StoreUnavailable,
    describe_error,
    is_infrastructure,
    is_of_a_server,
    summarize_error,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0


def pause(failures: int) -> float:
    """Return the seconds to wait for the next attempt, after so many failures in a row.

    They are random, so that those that wait for a server don't all come back at the same time.
    """
    longest = min(_FIRST_PAUSE * 2 ** min(failures, 10), _LONGEST_PAUSE)
    return uniform(longest / 2, longest)


@dataclass(frozen=True)
class Retrying:
    """Attempts at work, with pauses in between, while the server is unavailable."""

    what: str
    """What is attempted, for the log."""
    server: str
    report: Callable[[str], None]
    """Called with the reason before every pause."""
    unless: Callable[[], bool] = lambda: False
    """Returns whether to give up, and to raise the error."""
    waits_for_stores: bool = True
    """Whether an object store or a schema registry that is unavailable is an outage, too."""

    async def __call__(self, work: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Return the result of the work. Raises errors other than outages at once."""
        failures = 0
        while True:
            try:
                return await work(*arguments)
            except Exception as error:
                if not self._is_outage(error):
                    raise
                failures += 1
                self._report(error, failures)
            await asyncio.sleep(pause(failures))

    def _is_outage(self, error: BaseException) -> bool:
        is_awaited = self.waits_for_stores or not isinstance(error, StoreUnavailable)
        return is_infrastructure(error) and is_awaited and not self.unless()

    def _report(self, error: Exception, failures: int) -> None:
        if isinstance(error, StoreUnavailable):  # its text has the address
            reason = summarize_error(error)
        elif is_of_a_server(error):
            reason = f"{self.server}: {describe_error(error)}"
        else:
            reason = describe_error(error)
        self.report(reason)
        if failures == 1:
            log.warning("%s failed, trying again: %s", self.what, reason)
