"""The parts of a process, what it says at its start, and what ends it."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from onceward import runtime
from onceward.runtime import Cancelled, _run_until

from tests.servers.waiting import PATIENCE

PROGRAM = """
import asyncio
import sys

from pydantic_settings import BaseSettings

from onceward import Handlers, Service
from onceward.runtime import process
from onceward.settings import Settings


async def main(host: str) -> None:
    class Partners(BaseSettings):
        partner: str = f"http://{host}/"

    settings = Settings(
        database_url="postgresql+asyncpg://s:s@localhost:1/s",
        kafka_bootstrap_servers="localhost:1",
        health_port=0,
        log_json=False,
    )
    service = Service("starting", Handlers(), metadata=None, settings=[Partners])
    async with process(service, settings):
        pass


asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize(("host", "are_secured"), [("localhost", True), ("elsewhere", False)])
def test_the_start_warns_once_of_each_address_that_tls_does_not_secure(
    host: str, are_secured: bool
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, host],
        env=os.environ | {"PYTHONPATH": str(Path(runtime.__file__).parents[1])},
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    warnings = re.findall(r"WARNING onceward\.runtime: (.*)", done.stderr)
    assert warnings == [
        f"connections to {one} (PARTNER) are not secured by TLS: use https://"
        for one in [host]
        if not are_secured
    ]


class Part:
    """Runs until it is stopped, or cancels itself as code of a service may."""

    def __init__(self, *, cancels: bool) -> None:
        self._cancels = cancels
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._cancels:
            task.cancel()
        await self._stopping.wait()

    def stop(self) -> None:
        self._stopping.set()


async def test_a_part_that_code_of_the_service_has_cancelled_ends_the_process() -> None:
    groups = [(60.0, [cast(Any, Part(cancels=True)), cast(Any, Part(cancels=False))])]
    with pytest.raises(Cancelled, match=r"cancelled a task of the engine \(Part\)"):
        await _run_until(asyncio.Event(), (), groups)


async def test_a_part_that_is_cancelled_after_its_grace_is_no_failure() -> None:
    part = Part(cancels=False)
    part.stop = lambda: None  # type: ignore[method-assign]
    stopping = asyncio.Event()
    stopping.set()
    await _run_until(stopping, (), [(0.0, [cast(Any, part)])])
