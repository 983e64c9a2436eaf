"""Code that blocks the event loop, and the signal that interrupts it."""

import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from pipeline.servers.guard import INTERRUPTION

Block = Callable[..., object]


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
    compute(0.15)
    os.kill(os.getpid(), signal.SIGSTOP)
    compute(0.15)


BLOCKS: dict[str, Block] = {
    "sleep": partial(time.sleep, 6),
    "loop": loop,
    "lock": wait_for_itself,
    "expression": match,
    "library": wait_in_c,
    "stop": be_stopped,
}


def interrupt() -> None:
    """Do what the handler of the signal does when it finds the same call again."""
    if (call := INTERRUPTION.get()) and not call.is_over:
        call.was_raised = True
        raise call


@contextmanager
def interrupting() -> Iterator[Block]:
    """Yield a function that blocks the event loop, and is interrupted a moment later."""
    send = partial(signal.pthread_kill, threading.get_ident(), signal.SIGVTALRM)
    before = signal.signal(signal.SIGVTALRM, lambda *_: interrupt())

    def block(seconds: float = 60) -> None:
        threading.Timer(0.05, send).start()
        time.sleep(seconds)

    try:
        yield block
    finally:
        signal.signal(signal.SIGVTALRM, before)
