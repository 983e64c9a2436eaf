"""How a run begins and ends: alone in its folder, and with everything stopped."""

import argparse
import asyncio
import fcntl
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from demo.display import say
from demo.flights import ROOT


def add_into(parser: argparse.ArgumentParser, name: str) -> None:
    """Let the command line say in which folder everything is; by default below `build`."""
    parser.add_argument(
        "--into",
        type=Path,
        default=ROOT / "build" / name,
        metavar="DIR",
        help=f"where to bake the service and to keep everything (build/{name})",
    )


class AlreadyRuns(Exception):
    """Somebody else works in the same folder."""


@contextmanager
def only_one_in(folder: Path) -> Iterator[None]:
    """Let no second run into the folder. Raises `AlreadyRuns` for it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRuns(f"another run is in {short(folder)}") from None
        yield


async def until_interrupted(work: Coroutine[Any, Any, bool], console: Console) -> int:
    """Run to the end; return the exit code, 0 for true.

    A signal ends the work, once: its cleaning up is not cut short by a second one.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[signal.Signals] = []

    def note(number: signal.Signals) -> None:
        if not received:
            task.cancel()
        received.append(number)

    ending = {signal.SIGINT, signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        ending.add(signal.SIGHUP)
    for number in ending:
        loop.add_signal_handler(number, note, number)
    try:
        return 0 if await work else 1
    except asyncio.CancelledError:
        say(console, "interrupted", "everything that was started is stopped")
        return 128 + received[0] if received else 1


def short(path: str | Path) -> str:
    """Return a path as seen from here, if it lies below; any other word as it is."""
    return str(path).removeprefix(f"{Path.cwd()}/")
