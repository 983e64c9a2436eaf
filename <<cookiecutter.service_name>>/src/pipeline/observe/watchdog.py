"""The watchdog: decides that this process is dead, and ends it.

Handlers of one process share its event loop and its partitions: one that hangs stops the others.

| what is found                         | by                               | exit code |
| ------------------------------------- | -------------------------------- | --------- |
| the event loop is blocked             | a thread that misses heartbeats  | 1         |
| no thread of Python runs              | `faulthandler`'s timer           | 1         |
| a call goes on after its cancellation | a task of the event loop         | 70        |

After every death the next process finds the message by the starts that were counted and not undone:
at the position of a partition (`consume/position.py`), which parks it as a suspect, or for a lane
of the backlog. Suspects are tried alone (`retry/workers.py`).
"""

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from .health import Health, ReadinessLog

log = logging.getLogger(__name__)

BEAT = 1.0
"""Seconds between heartbeats."""
LAST_RESORT = 5.0
"""Seconds after the watchdog's own time-out at which `faulthandler` ends the process, less half of
them at most: writing the last log line may block."""
_LOOP_BLOCKED = 1
"""Exit code, the same as `faulthandler`'s."""
_CANCELLATION_IGNORED = 70
"""Exit code."""


CALLS: dict[asyncio.Task[Any], Callable[[float], str | None]] = {}
"""Tasks that are calling functions of the service. The value returns the name of the call if it
goes on for so many seconds after it was cancelled."""


async def heartbeat(health: Health, hang_timeout: float) -> None:
    """Beat once a second, log changes of readiness, and end the process if the loop is blocked."""
    readiness = ReadinessLog(health)
    watchdog = Watchdog(health, hang_timeout)
    watchdog.start()
    try:
        while True:
            health.beat()
            watchdog.postpone_last_resort()
            readiness.announce()
            await asyncio.sleep(BEAT)
    finally:
        watchdog.stop()


async def watch_calls(stack_of: Callable[[asyncio.Task[Any]], str], hang_timeout: float) -> None:
    """End the process when a call goes on for `hang_timeout` seconds after it was cancelled."""
    ignoring: list[tuple[asyncio.Task[Any], str]] = []
    while not ignoring:
        await asyncio.sleep(BEAT)
        ignoring = calls_ignoring_cancellation(hang_timeout)
    task, what = ignoring[0]
    log.critical(
        "%s does not end, %s s after it was cancelled (PIPELINE_HANG_TIMEOUT): the process ends,"
        " and the next process handles the message alone. The stack of the call:\n%s",
        what,
        hang_timeout,
        stack_of(task),
    )
    logging.shutdown()
    os._exit(_CANCELLATION_IGNORED)


def calls_ignoring_cancellation(seconds: float) -> list[tuple[asyncio.Task[Any], str]]:
    """Return the tasks and names of calls that go on for `seconds` after they were cancelled."""
    named = [(task, ignoring(seconds)) for task, ignoring in CALLS.items()]
    return [(task, what) for task, what in named if what]


class Watchdog:
    """Ends the process, with the stack in the log, when the loop that starts it is blocked."""

    def __init__(self, health: Health, hang_timeout: float) -> None:
        """`hang_timeout`: seconds without a heartbeat after which the process ends."""
        self._health = health
        self._hang_timeout = hang_timeout
        self._watched = threading.get_ident()
        self._postponed_at = 0.0
        self._stopping = threading.Event()

    def start(self) -> None:
        """Watch from a daemon thread."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def postpone_last_resort(self) -> None:
        """Restart `faulthandler`'s timer. That starts a thread, so not every heartbeat does it."""
        if time.monotonic() - self._postponed_at < LAST_RESORT / 2:
            return
        self._postponed_at = time.monotonic()
        faulthandler.dump_traceback_later(self._hang_timeout + LAST_RESORT, exit=True)

    def stop(self) -> None:
        """Stop watching."""
        self._stopping.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        left = self._hang_timeout
        while not self._stopping.wait(left):
            left = self._hang_timeout - self._health.seconds_since_beat
            if left <= 0:
                self._end()

    def _end(self) -> None:
        stack = traceback.format_stack(sys._current_frames()[self._watched])
        text = "the event loop has been blocked for %.0f s: PIPELINE_HANG_TIMEOUT ends the process"
        args = (self._health.seconds_since_beat,)
        stack_info = "".join(["Stack (most recent call last):\n", *stack]).rstrip()
        # `log.critical` would give the stack of this thread.
        record = log.makeRecord(
            log.name, logging.CRITICAL, __file__, 0, text, args, None, sinfo=stack_info
        )
        log.handle(record)
        os._exit(_LOOP_BLOCKED)
