"""What people stop for a while: it waits in its order, and nothing is spent on it."""

import asyncio
import math
from contextlib import suppress

from chaos.schedule import Fault
from chaos.system import System
from demo.processes import ProcessFailed


async def pause(system: System, fault: Fault) -> bool:
    """Pause what the fault names, and resume it; return whether it was paused.

    If nobody can resume it, it ends by itself.
    """
    member = next(iter(system.members.values()))
    words, lasts = fault.target.split(), f"{math.ceil(fault.seconds)}s"
    try:
        await member.service.command(
            *("pause", *words, "--for", lasts, "--because", "a fault", "--yes"), log=member.log
        )
    except ProcessFailed:
        return False
    await asyncio.sleep(fault.seconds)
    with suppress(ProcessFailed):
        await member.service.command("resume", *words, log=member.log)
    return True
