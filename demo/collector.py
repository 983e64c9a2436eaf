"""The OpenTelemetry Collector: `python -m demo.collector` builds it, and prints where it is.

It is built once for all projects of this user, with Go, of the modules that `demo/otelcol` pins.
"""

import asyncio
import fcntl
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from demo.flights import ROOT
from demo.processes import READY_WITHIN, STOPPED_WITHIN, ProcessFailed, free_port, last_lines

sys.path.insert(0, str(ROOT / "<<cookiecutter.service_name>>" / "dev"))
import programs

SOURCE = ROOT / "demo" / "otelcol"
SOURCES = ("go.mod", "go.sum", "main.go")
PIPELINE = "traces"


def find() -> Path:
    """Return the program; builds it if need be, which takes a minute or two.

    Raises `ProcessFailed` if it cannot be built.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dev-stack"
    sources = b"".join((SOURCE / name).read_bytes() for name in SOURCES)
    program = caches / f"otelcol-{hashlib.sha256(sources).hexdigest()[:12]}"
    if program.exists():
        return program
    caches.mkdir(parents=True, exist_ok=True)
    with (caches / "otelcol-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            with tempfile.TemporaryDirectory(prefix="otelcol-", dir=caches) as work:
                _build(Path(work) / program.name).rename(program)
    return program


def _build(program: Path) -> Path:
    try:
        go = programs.require_go()
    except programs.ProgramError as error:
        raise ProcessFailed(str(error)) from None
    print("building the OpenTelemetry Collector, once for all projects", file=sys.stderr)
    flags = ["-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags=-s -w"]
    done = subprocess.run(
        [go, "build", *flags, "-o", program, "."],
        cwd=SOURCE,
        env=os.environ | {"GOWORK": "off", "CGO_ENABLED": "0"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise ProcessFailed(f"go build failed: the collector cannot be built\n{done.stderr}")
    return program


class Collector:
    """One that runs, on the loopback."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, kept: Path, log: Path):
        self.url = f"http://127.0.0.1:{port}"
        """Where it takes OTLP over HTTP."""
        self.pid = process.pid
        self._process = process
        self._port = port
        self._kept = kept
        self._log = log

    def requests(self) -> Iterator[dict[str, Any]]:
        """Return what it has been sent so far: each request in the JSON encoding of OTLP.

        Raises `ProcessFailed` if it has ended.
        """
        self._check()
        for line in self._kept.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):  # else it is being written
                yield json.loads(line)

    async def ready(self) -> None:
        """Wait until it serves. Raises `ProcessFailed` if it ends before, or takes too long."""
        try:
            async with asyncio.timeout(READY_WITHIN):
                while not await asyncio.to_thread(_serves, self._port):
                    self._check()
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise ProcessFailed(f"the collector was not ready\n{last_lines(self._log)}") from None

    def _check(self) -> None:
        if (code := self._process.returncode) is not None:
            tail = last_lines(self._log)
            raise ProcessFailed(f"the collector ended by itself, with exit code {code}\n{tail}")


@asynccontextmanager
async def collecting(configuration: str, folder: Path) -> AsyncIterator[Collector]:
    """Run one with a configuration in YAML, but on a free port of the loopback.

    It also keeps the traces, in the folder, and has no metrics of its own.
    """
    port, kept, log = free_port(), folder / "traces.jsonl", folder / "collector.log"
    kept.unlink(missing_ok=True)
    program = await asyncio.to_thread(find)
    # Of two configurations the later one wins, key by key; a list is replaced.
    changes = {
        "receivers": {"otlp": {"protocols": {"http": {"endpoint": f"127.0.0.1:{port}"}}}},
        "exporters": {"file": {"path": str(kept), "flush_interval": "100ms"}},
        "service": {
            "telemetry": {"metrics": {"level": "none"}},
            "pipelines": {PIPELINE: {"exporters": ["debug", "file"]}},
        },
    }
    configurations = [f"--config=yaml:{one}" for one in (configuration, json.dumps(changes))]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            program,
            *configurations,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        collector = Collector(process, port, kept, log)
        await collector.ready()
        yield collector
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOPPED_WITHIN)
    except TimeoutError:
        process.kill()
        await process.wait()


def _serves(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    try:
        print(find())
    except ProcessFailed as error:
        sys.exit(str(error))
