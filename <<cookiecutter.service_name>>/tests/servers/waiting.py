"""Waiting for progress: tests wait until something is so, and never for a time to pass."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from onceward.cli import status
from onceward.consume import stamps

PATIENCE = 300.0
"""Seconds until a test that waits is taken for one that hangs."""


def let_servers_be_slow() -> None:
    """Let commands wait for servers as long; a test of their time limits sets its own."""
    stamps._ANSWER_SECONDS = status._SECONDS = PATIENCE


async def eventually(
    condition: Callable[[], bool | Awaitable[bool]], patience: float = PATIENCE
) -> None:
    """Wait until the condition holds. Fails the test if it does not within `patience` seconds."""
    deadline = asyncio.get_running_loop().time() + patience
    while True:
        holds = condition()
        if await holds if isinstance(holds, Awaitable) else holds:
            return
        if asyncio.get_running_loop().time() > deadline:
            pytest.fail(f"did not happen within {patience} s")
        await asyncio.sleep(0.02)
