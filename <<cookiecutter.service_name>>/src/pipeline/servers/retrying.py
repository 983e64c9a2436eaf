"""The one policy by which work is retried while a server is unavailable."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import uniform
from typing import Any, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception

from pipeline.errors import (
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
class Attempts:
    """Attempts at work, with pauses in between, while the server is unavailable."""

    what: str
    """What is attempted, for the log."""
    server: str
    unless: Callable[[], bool]
    """Returns whether to give up, and to raise the error."""
    report: Callable[[str], None]
    """Called with the reason before every pause."""
    waits_for_stores: bool = True
    """Whether an object store or a schema registry that is unavailable is an outage, too."""

    async def __call__(self, work: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Return the result of the work. Raises errors other than outages at once."""
        try:
            return await work(*arguments)
        except Exception as error:
            if not self._is_outage(error):
                raise
            failed = [error]

        async def attempt() -> T:
            if failed:  # the first attempt, which has been made: tenacity costs more than most work
                raise failed.pop()
            return await work(*arguments)

        retrying = AsyncRetrying(
            retry=retry_if_exception(self._is_outage),
            wait=lambda state: pause(state.attempt_number),
            before_sleep=self._report,
            reraise=True,
        )
        try:
            result: T = await retrying(attempt)
            return result
        finally:
            # It refers to its next steps, and they to it. Such cycles would make the garbage
            # collector stop the process for 50 ms now and then.
            retrying.iter_state.reset()

    def _is_outage(self, error: BaseException) -> bool:
        is_awaited = self.waits_for_stores or not isinstance(error, StoreUnavailable)
        return is_infrastructure(error) and is_awaited and not self.unless()

    def _report(self, state: RetryCallState) -> None:
        assert state.outcome is not None
        error = state.outcome.exception()
        assert error is not None
        if isinstance(error, StoreUnavailable):  # its text has the address
            reason = summarize_error(error)
        elif is_of_a_server(error):
            reason = f"{self.server}: {describe_error(error)}"
        else:
            reason = describe_error(error)
        self.report(reason)
        if state.attempt_number == 1:
            log.warning("%s failed, trying again: %s", self.what, reason)
