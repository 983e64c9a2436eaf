"""A copy of the database, on which processes are started beside the service: they must wait."""

import asyncio
import time
from contextlib import suppress
from urllib.parse import urlsplit

from chaos.schedule import Fault
from chaos.system import AWAY, BOOTED_WITHIN, Member, System
from demo.processes import ProcessFailed, client, run

MEMBERS = ("consume-copy", "relay-copy")
ADOPT = "service adopt"
"""What they say that they wait for."""
CONTENT = """
SELECT (SELECT count(*) FROM pipeline.inbox) AS markers,
       (SELECT count(*) FROM pipeline.outbox) AS events,
       (SELECT count(*) FROM pipeline.backlog) AS waiting,
       (SELECT count(*) FROM pipeline.scheduled) AS scheduled
"""
"""What changes when something is consumed, called, moved or deleted."""
LOOK_EVERY = 0.3


async def use(system: System, fault: Fault) -> bool:
    """Start a consumer and a relay on a copy of the database; return whether there was one.

    Notes it if they do not wait for an operator, or if they change the copy.
    """
    copy = await copied(system)
    if copy is None:
        return False
    async with system.running(MEMBERS, copy) as members:
        wait = await asyncio.gather(*(waits(one, fault.seconds) for one in members))
    for member, is_waiting in zip(members, wait, strict=True):
        if not is_waiting:
            system.misbehaved.append(f"{member.name} does not wait for {ADOPT!r}: {fault}")
    with suppress(*AWAY):  # then nobody can tell
        changed = f"TABLE content EXCEPT {CONTENT}"
        if await system.servers.execute(changed, database=copy) != "SELECT 0":
            system.misbehaved.append(f"the copy of the database was changed: {fault}")
    return True


async def copied(system: System) -> str | None:
    """Copy the database, by a dump; return the copy's name, or None if something was in the way."""
    servers, dump = system.servers, system.folder / "dump"
    name = f"{urlsplit(servers.url()).path[1:]}_copy"
    with suppress(ProcessFailed, *AWAY):
        await servers.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        await servers.execute(f"CREATE DATABASE {name}")
        # All in one snapshot, as whoever copies a database that is in use would have it.
        for program, *words in (
            ("pg_dump", "--format=custom", f"--file={dump}", servers.url()),
            ("pg_restore", "--exit-on-error", f"--dbname={servers.url(name)}", str(dump)),
        ):
            await run([client(program), *words], log=system.setup_log)
        dump.unlink()
        await servers.execute(f"CREATE TABLE content AS {CONTENT}", database=name)
        return name
    return None


async def waits(member: Member, seconds: float) -> bool:
    """Return whether a process that starts says what it waits for, and then waits for so long."""
    until, why = time.monotonic() + BOOTED_WITHIN, "it starts"
    while why and ADOPT not in why and time.monotonic() < until:
        await asyncio.sleep(LOOK_EVERY)
        why = await member.service.obstacle()
    await asyncio.sleep(seconds)
    return ADOPT in why and bool(await member.service.obstacle())
