"""The one policy by which a server that is unavailable is tried again."""

import logging
from collections.abc import Awaitable, Callable
from random import uniform
from typing import Any, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception

from pipeline.errors import StoreUnavailable, describe_error, is_infrastructure, summarize_error

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE = 0.1


_LONGEST_PAUSE = 5.0


def pause(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row, before the next attempt.

    Many that wait for one server come back at different times, and no one long after it.
    """
    longest = min(_FIRST_PAUSE * 2 ** min(failures, 10), _LONGEST_PAUSE)
    return uniform(longest / 2, longest)


class Attempts(AsyncRetrying):
    """Tenacity's, which leave no cycles: it keeps steps to do next, and these would keep it.

    They are begun several times for a transaction. For what they left the collector held up
    everything for 50 ms every thousand transactions.
    """

    async def __call__(  # type: ignore[override]  # as tenacity itself overrides it
        self, fn: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any
    ) -> T:
        """Call until it is done."""
        try:
            result: T = await super().__call__(fn, *args, **kwargs)
            return result
        finally:
            self.iter_state.reset()


def retry_while_unavailable(
    what: str, server: str, *, unless: Callable[[], bool], away: Callable[[str], None]
) -> Attempts:
    """Attempts that go on while the server fails, or the way to it, as far apart as `pause` says.

    `away` is told the reason before every pause; after `unless` turns true the error is raised.
    """

    def tell(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        reason = f"{server}: {describe_error(error) if error else 'unknown'}"
        if isinstance(error, StoreUnavailable):  # says itself who it is
            reason = summarize_error(error)
        away(reason)
        if state.attempt_number == 1:
            log.warning("%s failed, trying again: %s", what, reason)

    return Attempts(
        retry=retry_if_exception(lambda error: is_infrastructure(error) and not unless()),
        wait=lambda state: pause(state.attempt_number),
        before_sleep=tell,
        reraise=True,
    )
