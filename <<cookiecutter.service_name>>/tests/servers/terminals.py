"""Commands of a service on pseudo-terminals: what they show, and what is typed."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from .databases import HOME
from .waiting import eventually

CTRL_C, END_OF_INPUT = "\x03", "\x04"
"""Keys that a terminal does not pass on as they are."""

# A shell's job in the background ignores SIGINT, and so would this process.
_CONTROL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """A command whose standard streams are a terminal of its own, which controls it."""

    def __init__(self, arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
        """Start it: the arguments are those of Python."""
        self._ours, theirs = os.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CONTROL, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=HOME,
            env={**environment, "TERM": "xterm"},
            start_new_session=True,
        )
        os.close(theirs)
        self._written = b""
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ours, self._read)

    @property
    def raw(self) -> str:
        """What it has written so far, and the echo of what was typed."""
        return self._written.decode(errors="replace").replace("\r\n", "\n")

    @property
    def shown(self) -> str:
        """The same without bold type and colours."""
        return _STYLE.sub("", self.raw)

    async def shows(self, text: str) -> None:
        """Wait until it has written the text."""
        await eventually(lambda: text in self.shown)

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._ours, keys.encode())

    async def ended(self) -> int:
        """Wait until all that it has written is read, and return its exit code."""
        await eventually(lambda: self._is_over and self._process.poll() is not None)
        return int(self._process.returncode)

    def close(self) -> None:
        """Kill the command if it still runs."""
        self._loop.remove_reader(self._ours)
        os.close(self._ours)
        self._process.kill()
        self._process.wait()
        print(self.raw)  # pytest shows it beside a failure

    def _read(self) -> None:
        try:
            some = os.read(self._ours, 65_536)
        except OSError:  # EIO: no process has the terminal any more
            some = b""
        if some:
            self._written += some
        else:
            self._loop.remove_reader(self._ours)
            self._is_over = True


OnTerminal = Callable[..., Terminal]


@contextmanager
def terminals(program: str, environment: Mapping[str, str]) -> Iterator[OnTerminal]:
    """Start commands of a program, which is the name of a module, each on a terminal.

    What still runs at the end of the block is killed.
    """
    opened: list[Terminal] = []

    def start(*command: str) -> Terminal:
        opened.append(Terminal(("-m", program, *command), environment))
        return opened[-1]

    try:
        yield start
    finally:
        for one in opened:
            one.close()
