"""How the rig's processes talk: they say lines of JSON, and are told single words."""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from demo.flights import ROOT
from demo.processes import ProcessFailed, last_lines

LINE_AT_MOST = 2**26


def say(**fields: object) -> None:
    """Tell the rig something."""
    print(json.dumps(fields), flush=True)


async def words() -> AsyncIterator[str]:
    """Yield what the rig tells us, one word at a time."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        yield line.decode().strip()


class Helper:
    """A process of the rig: `python -m chaos.<module>`."""

    def __init__(self, module: str, log: Path, **options: object) -> None:
        """What it prints beside its lines goes to the log."""
        self._module = f"chaos.{module}"
        self._log = log
        self._options = [f"--{name}={value}" for name, value in options.items()]
        self._process: asyncio.subprocess.Process | None = None
        self.said: dict[str, Any] = {}
        """All that it has said so far; the newest of each kind."""
        self._news = asyncio.Condition()

    async def run(self) -> None:
        """Run it to its end. Raises `ProcessFailed` if it fails; cancelled, it is killed."""
        with self._log.open("ab") as log:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module, *self._options),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={name: v for name, v in os.environ.items() if not name.startswith("PIPELINE_")},
                start_new_session=True,
                limit=LINE_AT_MOST,
            )
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                async with self._news:
                    self.said |= json.loads(line)
                    self._news.notify_all()
            code = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.wait()
        if code:
            words = shlex.join([self._module, *self._options])
            raise ProcessFailed(f"{words} failed\n{last_lines(self._log)}")

    def tell(self, word: str) -> None:
        """Tell it a word."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it has not ended."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def says(self, name: str) -> Any:
        """Wait until it has said something by this name; return it."""
        async with self._news:
            await self._news.wait_for(lambda: name in self.said)
        return self.said[name]
