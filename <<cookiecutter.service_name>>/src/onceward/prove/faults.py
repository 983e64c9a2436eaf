"""The faults: each hits an open transaction, whose COMMIT waits at a gate."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple

from .processes import LOCK_SECONDS, SESSION_SECONDS, Gates, Hit, Processes, Role

_HIT_SECONDS = 30.0
"""Time in which a transaction has to come: after a death a group waits for the session timeout."""
_NOTHING_SECONDS = 2.0
"""The same when there is no message left to send."""
_RECOVERY_SECONDS = 60.0
_LOOK_SECONDS = 0.05

Send = Callable[[], Awaitable[int]]
"""Sends some messages, and returns how many."""


@dataclass
class Count:
    """How often a fault was caused, and what came of it."""

    caused: int = 0
    hit: int = 0
    """How often it has hit an open transaction."""
    recovery: float = 0.0
    """Longest time in seconds from the fault, or from the end of a stop, to the next transaction of
    this role."""


class Fault(NamedTuple):
    """What is done to a process while its COMMIT waits; then the gate is opened."""

    role: Role
    strike: Callable[[Gates, Processes, Hit], Awaitable[None]]
    stops: bool = False
    """Whether the process stands still then, until others have its work."""
    needs_stack: bool = False
    """Whether only servers of one's own may be treated so."""


async def _roll_back(gates: Gates, processes: Processes, hit: Hit) -> None:
    """Kill the process before it has sent COMMIT, which the server then never executes."""
    await processes.kill(hit.pid)
    await gates.end(hit)


async def _lose_answer(gates: Gates, processes: Processes, hit: Hit) -> None:
    """Kill the process after it has sent COMMIT, which the server executes."""
    await processes.kill(hit.pid)


async def _cut(gates: Gates, processes: Processes, hit: Hit) -> None:
    """End the connection: the server rolls back, and the process continues."""
    await gates.end(hit)


async def _restart_postgres(gates: Gates, processes: Processes, hit: Hit) -> None:
    await processes.restart("postgres")


async def _restart_kafka(gates: Gates, processes: Processes, hit: Hit) -> None:
    await processes.restart("kafka")


async def _stop(gates: Gates, processes: Processes, hit: Hit) -> None:
    """Stop the process, whose COMMIT the server executes."""
    os.kill(hit.pid, signal.SIGSTOP)


async def _stop_for_long(gates: Gates, processes: Processes, hit: Hit) -> None:
    """Stop the process, and let its COMMIT wait until the server rolls back."""
    os.kill(hit.pid, signal.SIGSTOP)
    await asyncio.sleep(LOCK_SECONDS + 1)


FAULTS: Mapping[str, Fault] = {
    "kill -9 of a consumer before COMMIT": Fault("consume", _roll_back),
    "kill -9 of a consumer in COMMIT": Fault("consume", _lose_answer),
    "kill -9 of a relay": Fault("relay", _roll_back),
    "SIGSTOP of a consumer": Fault("consume", _stop, stops=True),
    "SIGSTOP of a consumer beyond its time limits": Fault("consume", _stop_for_long, stops=True),
    "SIGSTOP of a relay": Fault("relay", _stop, stops=True),
    "connection of a consumer cut": Fault("consume", _cut),
    "connection of a relay cut": Fault("relay", _cut),
    "restart of PostgreSQL": Fault("consume", _restart_postgres, needs_stack=True),
    "restart of Kafka": Fault("relay", _restart_kafka, needs_stack=True),
}
TOGETHER = "two transactions at once"
"""The fault in which a transaction waits with its COMMIT until there is another: what that one has
read without a lock is old then."""


async def hold(gates: Gates, send: Send, count: Count) -> None:
    """Let transactions be open at once."""
    count.caused += 1
    async with gates.closed("consume"):
        await send()
        count.hit += await gates.are_two(LOCK_SECONDS / 2)


async def cause(fault: Fault, gates: Gates, processes: Processes, send: Send, count: Count) -> None:
    """Cause a fault, and wait until the work continues."""
    count.caused += 1
    async with gates.closed(fault.role):
        seconds = _HIT_SECONDS if await send() else _NOTHING_SECONDS
        if not (hits := await gates.hits(fault.role, seconds)):
            return
        before, began = await gates.progress(fault.role), monotonic()
        await fault.strike(gates, processes, hits[0])
    if fault.stops:
        await asyncio.sleep(SESSION_SECONDS + 2)
        with suppress(ProcessLookupError):
            os.kill(hits[0].pid, signal.SIGCONT)
    count.hit += 1
    with suppress(TimeoutError):
        async with asyncio.timeout(_RECOVERY_SECONDS):
            await gates.passes(fault.role, before)
    count.recovery = max(count.recovery, monotonic() - began)
