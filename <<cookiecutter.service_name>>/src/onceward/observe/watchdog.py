"""The watchdog: interrupts calls that block the event loop, and ends a process that is dead.

Handlers of one process share its event loop and its partitions: one that hangs stops the others.

| what is found                         | by                               | exit code |
| ------------------------------------- | -------------------------------- | --------- |
| the event loop is blocked             | a thread that misses heartbeats  | 1         |
| no thread of Python runs              | a timer of the kernel            | (SIGALRM) |
| a call goes on after its cancellation | a task of the event loop         | 70        |
| the process goes on after its command | a thread from then on            | its own   |

The next process handles the same messages again. Starts without a clean end are counted, at the
position of a partition (`consume/position.py`) and for a lane of the backlog. After
PIPELINE_UNCLEAN_STARTS of them the first records of the partition are stored as suspects. A worker
of the backlog tries suspects alone (`retry/workers.py`).
"""

import asyncio
import ctypes
import faulthandler
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from .health import Health, ReadinessLog

log = logging.getLogger(__name__)

BEAT = 1.0
"""Seconds between heartbeats."""
LAST_RESORT = 5.0
"""Seconds after the watchdog's own time-out at which a signal has the stack of the event loop
written, if no thread of Python runs. Twice as late another one ends the process."""
_STANDARD_ERROR = 2
_REPORT_SECONDS = 1.0
"""Time that the reason for the end may take to be written."""
_END_SECONDS = 3.0
"""Time for a process to end by itself when its command has ended."""
_LOOP_BLOCKED = 1
"""Exit code."""
_CANCELLATION_IGNORED = 70
"""Exit code."""


class RunningTime:
    """Time in which the process could run. For as long as it was stopped, only a moment counts."""

    seconds = 0.0
    turned_at = 0.0
    """`seconds` when the event loop last had a heartbeat."""
    since = 0.0
    """`seconds` at the last heartbeat, or when a step of a call last began or ended."""
    limit = math.inf
    """Seconds that a step of a call may take."""

    def __init__(self) -> None:
        self._at, self._used = time.monotonic(), time.process_time()

    def count(self) -> None:
        """Add the time since the last count; if that is long, only what used the processor."""
        at, used = time.monotonic(), time.process_time()
        self.seconds += min(at - self._at, max(self.limit / 3, used - self._used))
        self._at, self._used = at, used

    def turn(self) -> None:
        """Note a heartbeat of the event loop."""
        self.turned_at = self.since = self.seconds

    @property
    def is_over(self) -> bool:
        """Whether the code that runs has blocked the event loop for too long."""
        return self.seconds - self.since >= self.limit


RUNNING = RunningTime()
CALLS: dict[asyncio.Task[Any], Callable[[float], str | None]] = {}
"""Tasks that are calling functions of the service. The value returns the name of the call if it
goes on for so many seconds after it was cancelled."""


async def heartbeat(
    health: Health, interrupt: Callable[[int, FrameType | None], None], interrupt_after: float
) -> None:
    """Beat once a second, log changes of readiness, and end what blocks the event loop.

    Signals call `interrupt` when a step of a call takes `interrupt_after` seconds. The process
    ends, with the stack in the log, when liveness begins to fail: before a supervisor sees that.
    """
    readiness, stopping = ReadinessLog(health), threading.Event()
    limit = RUNNING.limit = min(interrupt_after, health.stall_after / 3)
    RUNNING.count()
    RUNNING.turn()
    signal.signal(signal.SIGVTALRM, interrupt)
    arguments = (health, threading.get_ident(), stopping)
    watching = threading.Thread(target=_watch_loop, args=arguments, name="watchdog", daemon=True)
    watching.start()
    try:
        while True:
            health.beat()
            RUNNING.turn()
            # Regular expressions handle signals, and let no thread run that could send them.
            signal.setitimer(signal.ITIMER_VIRTUAL, limit * 2 / 3, limit / 3)
            readiness.announce()
            await asyncio.sleep(min(BEAT, limit / 3))
    finally:
        stopping.set()
        watching.join()
        RUNNING.limit = math.inf
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.unregister(signal.SIGALRM)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _watch_loop(health: Health, thread: int, stopping: threading.Event) -> None:
    """Send signals to the thread of a blocked event loop; end the process after `stall_after`."""
    tick, postpone_at = RUNNING.limit / 12, -math.inf
    postpone = _last_resort(health.stall_after)
    while (silence := RUNNING.seconds - RUNNING.turned_at) < health.stall_after:
        # By a clock that goes on while the process is stopped, as the timer of the kernel does:
        # afterwards it is postponed at once.
        if (now := time.monotonic()) >= postpone_at:
            postpone()
            postpone_at = now + BEAT
        if stopping.wait(tick):
            return
        RUNNING.count()
        if RUNNING.is_over:
            signal.pthread_kill(thread, signal.SIGVTALRM)
    stack = "".join(traceback.format_stack(sys._current_frames()[thread])).rstrip()
    text = "the event loop has been blocked for %.0f s: PIPELINE_HANG_TIMEOUT ends the process"
    stack = f"Stack (most recent call last):\n{stack}"
    _end_process(_LOOP_BLOCKED, text, silence, stack=stack)


def _last_resort(seconds: float) -> Callable[[], None]:
    """Return what postpones the signals that end the process if no thread of Python runs.

    The first one is over, too, once the process was stopped for longer. So it does not end it: in
    C, as Python may not run, it writes the stack of the thread that it interrupts, and restores
    the default action for the second one. Stacks of other threads could not be read safely then.
    """
    # A handler for one signal only. Not every C library has it: there the first signal is the last.
    if handle_once := getattr(ctypes.CDLL(None), "sysv_signal", None):
        handle_once.argtypes, handle_once.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        faulthandler.register(signal.SIGALRM, _STANDARD_ERROR, all_threads=False)
        write_stack = handle_once(signal.SIGALRM, None)

    def postpone() -> None:
        if handle_once:
            handle_once(signal.SIGALRM, write_stack)
        signal.setitimer(signal.ITIMER_REAL, seconds + LAST_RESORT, LAST_RESORT)

    return postpone


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
