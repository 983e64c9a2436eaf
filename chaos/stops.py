"""What people stop or slow down for a while: it waits in its order, and nothing is spent on it.

What comes when every process must obey, and takes effect before it is resumed, was not stopped.
"""

import asyncio
import math
import time
from contextlib import suppress

import asyncpg  # type: ignore[import-untyped]

from chaos.schedule import BUSIEST, Fault
from chaos.system import AWAY, SETTINGS, System
from demo import feed, witness
from demo.processes import ProcessFailed

OBEYED_WITHIN = 2.0 + float(SETTINGS["PIPELINE_TRANSACTION_TIMEOUT"])
"""Seconds in which every process obeys, and what had begun before is finished."""
PROCESSES = 4
"""Those that consume, the extra one among them."""
LOOKS = 10.0
"""Seconds that it lasts longer, if nobody resumes it: to look takes time."""

_BUSIEST = "SELECT id FROM parcel ORDER BY scans DESC, id LIMIT 1"
# Of a topic, a consumer or a key: messages of records from these offsets on. What is paused must
# not take those that came later; what is throttled may have others to take.
_HANDLED = """
SELECT count(*) FROM pipeline.inbox
  JOIN unnest($1::integer[], $2::bigint[]) AS input (partition, ends) USING (partition)
 WHERE topic = $3 AND "offset" >= ends
   AND $4 IN (topic, consumer, convert_from(record_key, 'UTF8'))
"""
# Events that wait for their topic, or until it is resumed, are in `outbox_rejected`.
_PUBLISHED = """
SELECT count(*) FROM pipeline.outbox JOIN pipeline.outbox_cursor USING (shard)
 WHERE topic = $1 AND created_at > $2 AND pg_visible_in_snapshot(xid, seen)
   AND id NOT IN (SELECT id FROM pipeline.outbox_rejected WHERE topic = $1)
"""
_READ = "SELECT COALESCE(sum(next_offset), 0)::bigint FROM pipeline.position WHERE topic = $1"
_IS_STOPPED = """
SELECT EXISTS (SELECT FROM pipeline.throttle WHERE until > clock_timestamp())
"""


async def stop(system: System, fault: Fault) -> bool:
    """Pause what the fault names, or throttle it, and resume it; return whether that was done.

    If nobody can resume it, it ends by itself. Notes it if a process does not obey.
    """
    member = next(iter(system.members.values()))
    kind, name, *rate = fault.target.split()
    try:
        name = await _busiest(system) if name == BUSIEST else name
        lasts = f"{math.ceil(OBEYED_WITHIN + fault.seconds + LOOKS)}s"
        await member.service.command(
            *("throttle" if rate else "pause", kind, name, *rate),
            *("--for", lasts, "--because", "a fault", "--yes"),
            log=member.log,
        )
    except (ProcessFailed, *AWAY):
        return False
    await asyncio.sleep(OBEYED_WITHIN)
    with suppress(*AWAY):  # then nobody knows
        per_second = float(rate[0]) if rate else 0.0
        if taken := await _taken(system, kind, name, per_second, fault.seconds):
            system.misbehaved.append(f"{taken:,} were taken meanwhile: {fault}")
    with suppress(ProcessFailed):
        await member.service.command("resume", kind, name, log=member.log)
    return True


async def _busiest(system: System) -> str:
    """Return the key of which most has come. Raises `ProcessFailed` if nothing has."""
    connection = await asyncpg.connect(system.servers.stack.database)
    try:
        key: str | None = await connection.fetchval(_BUSIEST)
    finally:
        connection.terminate()
    if key is None:
        raise ProcessFailed("nothing has come yet")
    return key


async def _taken(system: System, kind: str, name: str, per_second: float, seconds: float) -> int:
    """Return after so many seconds how much was taken in them; 0 if it was no more than allowed."""
    servers = system.servers
    connection = await asyncpg.connect(servers.stack.database)
    try:
        counting = await _counting(connection, servers.stack.kafka, kind, name, per_second)
        began, before = time.monotonic(), await connection.fetchval(*counting)
        await asyncio.sleep(seconds)
        taken: int = await connection.fetchval(*counting) - before
        # Each process may take what a second allows before it knows of the others' takes.
        most = per_second * (1.5 * (time.monotonic() - began) + PROCESSES)
        # The database's clock may have jumped to its end.
        return taken if taken > most and await connection.fetchval(_IS_STOPPED) else 0
    finally:
        connection.terminate()


async def _counting(
    connection: asyncpg.Connection, kafka: str, kind: str, name: str, per_second: float
) -> tuple[object, ...]:
    """Return the statement that counts what is taken from now on, and its arguments."""
    if per_second and kind == "topic":
        return _READ, name
    if kind == "events":
        return _PUBLISHED, name, await connection.fetchval("SELECT clock_timestamp()")
    async with witness.reading(kafka, feed.TOPIC) as consumer:
        ends = await consumer.end_offsets(consumer.assignment())
    offsets = [0 if per_second else end for end in ends.values()]
    return _HANDLED, [one.partition for one in ends], offsets, feed.TOPIC, name
