"""The doctor: it names each kind of work that no process takes, unless people have paused it."""

import asyncio
import json
import time
from collections.abc import Callable, Collection, Sequence

from aiokafka import AIOKafkaProducer  # type: ignore[import-untyped]

from chaos.errands import REMINDERS, TELL
from chaos.system import System
from demo.feed import TOPIC
from demo.processes import Service
from demo.witness import CONSUMER

PATIENCE = 240.0
"""Seconds in which the doctor has to see it: work counts as not taken after a minute."""
LOOK_EVERY = 2.0
# What becomes of it later is nobody's concern: the ledger is closed. It is not legible.
ROW = """
INSERT INTO pipeline.backlog (key, lane, order_key, consumer, topic, partition, "offset", timestamp,
       value, headers, hash_version, reason, attempts, waited, holds, due_at)
SELECT key, {lane}, key, '{consumer}', '{topic}', 0, 0, 0, '{{}}', '[]', 1, 'failed', 1, 0, false,
       now() - interval '1 hour'
  FROM sha256('{consumer}') AS key
"""
EVENT = f"""
INSERT INTO pipeline.outbox (topic, event_id, source, type, content_type, payload)
VALUES ('{REMINDERS}', 'doctor', '/rig', 'rig', 'text/plain', '')
"""
SCHEDULED = f"""
INSERT INTO pipeline.scheduled (name, due_at, topic, event_id, source, type, content_type, payload)
VALUES ('doctor', now() - interval '1 hour', '{REMINDERS}', 'due', '/rig', 'rig', 'text/plain', '')
"""


async def examine(system: System, members: Sequence[str], *, has_effects: bool) -> list[str]:
    """Give work of each kind while no process runs, then run them; return what the doctor misses.

    The members must have stopped.
    """
    statements = {
        "backlog": ROW.format(consumer=CONSUMER, lane=0, topic=TOPIC),
        "outbox": EVENT,
        "scheduled": SCHEDULED,
        **({"calls": ROW.format(consumer=TELL, lane=64, topic="(calls)")} if has_effects else {}),
    }
    await system.servers.execute(*statements.values())
    await send(system.servers.stack.kafka)
    given = {"reads", *statements}
    asked, log = system.members[members[0]].service, system.setup_log
    if missing := await _left(asked, given.difference):
        return [f"nobody takes {missing}, and the doctor does not say so"]
    of = ("consumer", CONSUMER)
    await asked.command("pause", *of, "--because", "a question", "--yes", log=log)
    if await _left(asked, {"backlog"}.intersection):
        return ["a consumer is paused, and the doctor says that nobody takes its messages"]
    await asked.command("resume", *of, log=log)
    await system.run(members)
    if wrong := await _left(asked, given.intersection):
        return [f"all members are ready, and the doctor says that nobody takes {wrong}"]
    return []


async def send(kafka: str) -> None:
    """Send a record that nobody can decode."""
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        await producer.send_and_wait(TOPIC, b"{}", key=b"doctor")


async def _left(service: Service, left_of: Callable[[Collection[str]], Collection[str]]) -> str:
    """Return what is left of the checks that are wrong when nothing is, or after some time."""
    until = time.monotonic() + PATIENCE
    while True:
        lines = (await service.ask("doctor", "--json", codes=(0, 1))).splitlines()
        found = [json.loads(line) for line in lines]
        left = left_of({one["check"] for one in found if one["level"] == "wrong"})
        if not left or time.monotonic() > until:
            return ", ".join(sorted(left))
        await asyncio.sleep(LOOK_EVERY)
