"""The parts of a process, and what ends it."""

import asyncio
from typing import Any, cast

import pytest

from pipeline.runtime import Cancelled, _run_until


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
