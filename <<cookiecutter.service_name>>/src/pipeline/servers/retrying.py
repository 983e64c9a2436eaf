"""The one policy by which work is retried while a server is unavailable."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from random import uniform
from typing import Any, TypeVar

from pipeline.errors import StoreUnavailable, describe_error, is_infrastructure, summarize_error

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
    """Attempts at work, which go on while the server or the network fails."""

    what: str
    """What is attempted, for the log."""
    server: str
    unless: Callable[[], bool]
    """Returns whether to give up, and to raise the error."""
    report: Callable[[str], None]
    """Called with the reason before every pause."""

    async def __call__(self, work: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Return the result of the work. Raises errors other than outages at once."""
        for failures in count(1):
            try:
                return await work(*arguments)
            except Exception as error:
                if not is_infrastructure(error) or self.unless():
                    raise
                reason = f"{self.server}: {describe_error(error)}"
                if isinstance(error, StoreUnavailable):  # its text has the address
                    reason = summarize_error(error)
            self.report(reason)
            if failures == 1:
                log.warning("%s failed, trying again: %s", self.what, reason)
            await asyncio.sleep(pause(failures))
        raise AssertionError


def retry_while_unavailable(
    what: str, server: str, *, unless: Callable[[], bool], report: Callable[[str], None]
) -> Attempts:
    """Return attempts at `what`, with pauses in between, while the server is unavailable."""
    return Attempts(what, server, unless, report)
