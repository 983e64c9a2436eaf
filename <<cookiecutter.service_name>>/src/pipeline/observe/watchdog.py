"""The watchdog: interrupts calls that block the event loop, and ends a process that is dead.

Handlers of one process share its event loop and its partitions: one that hangs stops the others.

| what is found                         | by                               | exit code |
| ------------------------------------- | -------------------------------- | --------- |
| the event loop is blocked             | a thread that misses heartbeats  | 1         |
| no thread of Python runs              | `faulthandler`'s timer           | 1         |
| the same, and nothing reads the log   | a timer of the kernel            | (SIGALRM) |
| a call goes on after its cancellation | a task of the event loop         | 70        |
| the process goes on after its command | a thread from then on            | its own   |

The next process handles the same messages again. Starts without a clean end are counted, at the
position of a partition (`consume/position.py`) and for a lane of the backlog. After
PIPELINE_UNCLEAN_STARTS of them the first records of the partition are stored as suspects. A worker
of the backlog tries suspects alone (`retry/workers.py`).
"""

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from .health import Health, ReadinessLog

log = logging.getLogger(__name__)

BEAT = 1.0
"""Seconds between heartbeats."""
LAST_RESORT = 5.0
"""Seconds after the watchdog's own time-out at which `faulthandler` ends the process: no thread of
Python runs. It writes the stack first, which blocks if nothing reads standard error. After the same
time again the kernel ends the process."""
_REPORT_SECONDS = 1.0
"""Time that the reason for the end may take to be written."""
_END_SECONDS = 3.0
"""Time for a process to end by itself when its command has ended."""
_LOOP_BLOCKED = 1
"""Exit code, the same as `faulthandler`'s."""
_CANCELLATION_IGNORED = 70
"""Exit code."""


CALLS: dict[asyncio.Task[Any], Callable[[float], str | None]] = {}
"""Tasks that are calling functions of the service. The value returns the name of the call if it
goes on for so many seconds after it was cancelled."""


async def heartbeat(health: Health, current: Callable[[], Any], interrupt_after: float) -> None:
    """Beat once a second, log changes of readiness, and end what blocks the event loop.

    After `interrupt_after` seconds a call raises what `current` returns in it. The process ends,
    with the stack in the log, when liveness begins to fail: before a supervisor sees that.
    """
    readiness, stopping = ReadinessLog(health), threading.Event()
    apart, found_at = min(interrupt_after, health.stall_after / 3) / 3, 0.0
    found: Any = None

    def handle(*_: object) -> None:
        nonlocal found, found_at
        call, age = current(), health.seconds_since_beat
        # Before it, other code may have blocked the loop, or the process was stopped.
        if call is not found:
            found, found_at = call, age
        elif call and not call.is_over and age >= max(3 * apart, found_at + 0.9 * apart):
            call.was_raised = True
            raise call

    signal.signal(signal.SIGVTALRM, handle)
    arguments = (health, apart, threading.get_ident(), stopping)
    health.beat()
    threading.Thread(target=_watch_loop, args=arguments, name="watchdog", daemon=True).start()
    try:
        while True:
            health.beat()
            if found and found.was_raised:
                log.warning("a call was interrupted, and ends with this error", exc_info=found)
            found = None
            faulthandler.dump_traceback_later(health.stall_after + LAST_RESORT, exit=True)
            # The default action of its signal needs no thread, no lock and no pipe.
            signal.setitimer(signal.ITIMER_REAL, health.stall_after + 2 * LAST_RESORT)
            # Regular expressions handle signals, and let no thread run that could send them.
            signal.setitimer(signal.ITIMER_VIRTUAL, 2 * apart, apart)
            readiness.announce()
            await asyncio.sleep(min(BEAT, apart))
    finally:
        stopping.set()
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _watch_loop(health: Health, apart: float, thread: int, stopping: threading.Event) -> None:
    """Send signals to the thread of a blocked event loop; end the process after `stall_after`."""
    while (left := health.stall_after - health.seconds_since_beat) > 0:
        if stopping.wait(min(left, apart)):
            return
        if health.seconds_since_beat >= 2 * apart:
            signal.pthread_kill(thread, signal.SIGVTALRM)
    stack = "".join(traceback.format_stack(sys._current_frames()[thread])).rstrip()
    text = "the event loop has been blocked for %.0f s: PIPELINE_HANG_TIMEOUT ends the process"
    stack = f"Stack (most recent call last):\n{stack}"
    _end_process(_LOOP_BLOCKED, text, health.seconds_since_beat, stack=stack)


def _end_process(code: int, text: str, *args: object, stack: str | None = None) -> NoReturn:
    """Log the reason and end the process, whether or not anything reads the log."""
    # `log.critical` would give the stack of this thread.
    record = log.makeRecord(log.name, logging.CRITICAL, __file__, 0, text, args, None, sinfo=stack)

    def report() -> None:
        log.handle(record)
        logging.shutdown()

    try:
        reporting = threading.Thread(target=report, name="watchdog's report", daemon=True)
        reporting.start()
        reporting.join(_REPORT_SECONDS)
    finally:
        os._exit(code)


def end_late(code: int) -> None:
    """End the process in three seconds if it goes on, with the stacks of what it waits for.

    Python waits at its end for threads, and for functions of `atexit`, as long as they take.
    """
    time.sleep(_END_SECONDS)
    frames = sys._current_frames()
    stacks = "".join(
        f"{one.name}:\n{''.join(traceback.format_stack(frame))}"
        for one in threading.enumerate()
        if not one.daemon and (frame := frames.get(one.ident or 0))
    )
    text = "the process has not ended %.0f s after its command: it is ended with exit code %d"
    _end_process(code, text, _END_SECONDS, code, stack=stacks.rstrip())


async def watch_calls(stack_of: Callable[[asyncio.Task[Any]], str], hang_timeout: float) -> None:
    """End the process when a call goes on for `hang_timeout` seconds after it was cancelled."""
    ignoring: list[tuple[asyncio.Task[Any], str]] = []
    while not ignoring:
        await asyncio.sleep(BEAT)
        ignoring = calls_ignoring_cancellation(hang_timeout)
    task, what = ignoring[0]
    text = (
        "%s is still running %s s after its cancellation (PIPELINE_HANG_TIMEOUT): the process"
        " exits, and the next process handles the message again. The stack of the call:\n%s"
    )
    _end_process(_CANCELLATION_IGNORED, text, what, hang_timeout, stack_of(task))


def calls_ignoring_cancellation(seconds: float) -> list[tuple[asyncio.Task[Any], str]]:
    """Return the tasks and names of calls that go on for `seconds` after they were cancelled."""
    named = [(task, ignoring(seconds)) for task, ignoring in CALLS.items()]
    return [(task, what) for task, what in named if what]
