"""Code that blocks the event loop, and the signal that interrupts it."""

import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from onceward.observe.watchdog import RUNNING
from onceward.servers import guard

Block = Callable[..., object]
LIMIT = 1_000.0
"""Seconds that a step may take in tests, which let them pass at once."""


def loop() -> None:
    """Compute for ever."""
    while True:
        pass


def wait_for_itself() -> None:
    """Wait for a lock that this thread has."""
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()


def match() -> None:
    """Match an expression that takes years, in which no other thread of Python runs."""
    re.match("(a+)+$", 60 * "a" + "b")


def wait_in_c() -> None:
    """Wait for ever in a library that handles no signals."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


def compute(seconds: float) -> None:
    """Use so much time of the processor."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def be_stopped() -> None:
    """Stop the process, as by SIGSTOP, in the middle of a step that takes a moment."""
    compute(0.02)
    os.kill(os.getpid(), signal.SIGSTOP)
    compute(0.02)


BLOCKS: dict[str, Block] = {
    "sleep": partial(time.sleep, 6),
    "command": partial(os.system, "sleep 6"),
    "loop": loop,
    "lock": wait_for_itself,
    "expression": match,
    "library": wait_in_c,
    "stop": be_stopped,
}


def interrupt() -> None:
    """Block for longer than a call may, and be found by the signal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RUNNING, "limit", LIMIT)
        RUNNING.seconds += LIMIT
        guard.interrupt(signal.SIGVTALRM, sys._getframe())


@contextmanager
def interrupting() -> Iterator[Block]:
    """Yield a function that blocks the event loop, and is interrupted a moment later."""
    send = partial(signal.pthread_kill, threading.get_ident(), signal.SIGVTALRM)
    before = signal.signal(signal.SIGVTALRM, guard.interrupt)

    def block() -> None:
        passed = threading.Event()

        def pass_time() -> None:
            RUNNING.seconds += LIMIT
            send()
            passed.set()

        threading.Timer(0.05, pass_time).start()
        while not passed.is_set():
            time.sleep(0.01)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RUNNING, "limit", LIMIT)
        try:
            yield block
        finally:
            signal.signal(signal.SIGVTALRM, before)
