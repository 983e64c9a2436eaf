"""Messages, interruptions, and commands that run to completion."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

LOCALE = {"LC_ALL": "C.UTF-8", "LANGUAGE": "C"}
"""Logs are searched for texts, so they are not translated; Java decodes paths by the locale."""


class StackError(Exception):
    """An expected failure; the message says what went wrong and what to do."""


class Interrupted(Exception):
    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number


def say(message: str) -> None:
    # Standard output is for `env`, `status` and the command of `run`.
    print(f"stack: {message}", file=sys.stderr, flush=True)


# Signals are only recorded when they arrive, and handled in `pause`. So none can interrupt the code
# between starting a server and recording its pid, or the cleanup.
received_signals: list[int] = []


def note_signals() -> None:
    def note(number: int, frame: FrameType | None) -> None:
        received_signals.append(number)

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, note)


def pause(seconds: float = 0.05) -> None:
    time.sleep(seconds)
    if received_signals:
        raise Interrupted(received_signals[0])


def run_step(
    command: Sequence[str | Path],
    log: Path,
    failure: str,
    *,
    text: str = "",
    progress: Callable[[], None] = lambda: None,
    **options: Any,
) -> None:
    """Run a command to completion, with `text` as its input; its output is appended to the log.

    If this process is interrupted, the command is terminated.
    """
    with log.open("ab") as output, tempfile.TemporaryFile() as stdin:
        stdin.write(text.encode())
        stdin.seek(0)
        process = subprocess.Popen(command, stdin=stdin, stdout=output, stderr=output, **options)
        try:
            while process.poll() is None:
                progress()
                pause()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode != 0:
        pause()  # A Ctrl-C in the terminal also ends the command, which is not a failure.
        raise StackError(f"{failure}\n{last_lines(log)}")


def last_lines(log: Path, count: int = 15) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join(
        [f"Last lines of {log}:", *(f"  {line}" for line in text.splitlines()[-count:])]
    )
