"""The doctor: it names each kind of work that no process takes, unless people have paused it."""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count

from aiokafka import AIOKafkaProducer  # type: ignore[import-untyped]

from chaos.errands import REMINDERS, TELL
from chaos.system import System
from demo.feed import TOPIC
from demo.processes import Service
from demo.witness import CONSUMER

PATIENCE = 240.0
"""Seconds in which the doctor has to see it: work counts as not taken after a minute."""
LOOK_EVERY = 2.0
TAKERS: Mapping[str, str] = {
    **dict.fromkeys(("reads", "backlog", "calls"), "consume"),
    **dict.fromkeys(("outbox", "scheduled"), "relay"),
}
"""The command that starts the processes which take the work of a check."""
# What becomes of it later is nobody's concern: the ledger is closed. It is not legible.
ROW = """
INSERT INTO pipeline.backlog (key, lane, order_key, consumer, topic, partition, "offset", timestamp,
       value, headers, hash_version, reason, attempts, waited, holds, due_at)
SELECT key, {lane}, key, '{consumer}', '{topic}', 0, 0, 0, '{{}}', '[]', 1, 'failed', 1, 0, false,
       now() - interval '1 hour'
  FROM sha256('{consumer} {number}') AS key
"""
EVENT = f"""
INSERT INTO pipeline.outbox (topic, event_id, source, type, content_type, payload)
VALUES ('{REMINDERS}', 'doctor', '/rig', 'rig', 'text/plain', '')
"""
SCHEDULED = f"""
INSERT INTO pipeline.scheduled (name, due_at, topic, event_id, source, type, content_type, payload)
VALUES ('doctor', now() - interval '1 hour', '{REMINDERS}', 'due', '/rig', 'rig', 'text/plain', '')
    ON CONFLICT DO NOTHING
"""


async def examine(system: System, members: Sequence[str], *, has_effects: bool) -> list[str]:
    """Give work of each kind while no process runs, and while all do but those of one kind.

    Returns what the doctor misses, or names though it is taken. The members must have stopped.
    """
    given = {check for check in TAKERS if has_effects or check != "calls"}
    numbers = count()

    async def give() -> None:
        number = next(numbers)
        calls = [ROW.format(consumer=TELL, lane=64, topic="(calls)", number=number)]
        await system.servers.execute(
            ROW.format(consumer=CONSUMER, lane=0, topic=TOPIC, number=number),
            *(calls if has_effects else []),
            EVENT,
            SCHEDULED,
        )
        await send(system.servers.stack.kafka)

    asked, log = system.members[members[0]].service, system.setup_log
    await give()
    if missing := await _left(asked, given.difference):
        return [f"nobody takes {missing}, and the doctor does not say so"]
    of = ("consumer", CONSUMER)
    await asked.command("pause", *of, "--because", "a question", "--yes", log=log)
    if await _left(asked, {"backlog"}.intersection):
        return ["a consumer is paused, and the doctor says that nobody takes its messages"]
    await asked.command("resume", *of, log=log)
    for kind in ("relay", "consume"):
        others = [name for name in members if system.members[name].command != kind]
        await system.run(others)
        untaken = {check for check in given if TAKERS[check] == kind}
        if wrong := await _left(asked, untaken.symmetric_difference):
            return [f"all processes but `{kind}` run, and the doctor is wrong about {wrong}"]
        to_do = defaultdict(str, await _wrong(asked))
        if unsaid := [one for one in untaken if f"`service {kind}`" not in to_do[one]]:
            return [f"no `{kind}` runs, and the doctor does not say so of {sorted(unsaid)}"]
        await asyncio.gather(*(system.end(system.members[name]) for name in others))
        await give()
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
        left = left_of((await _wrong(service)).keys() & TAKERS)
        if not left or time.monotonic() > until:
            return ", ".join(sorted(left))
        await asyncio.sleep(LOOK_EVERY)


async def _wrong(service: Service) -> Mapping[str, str]:
    """Return the checks that are wrong, and what the doctor says to do about each."""
    found: dict[str, str] = {}
    for line in (await service.ask("doctor", "--json", codes=(0, 1))).splitlines():
        one = json.loads(line)
        if one["level"] == "wrong":
            found[one["check"]] = f"{found.get(one['check'], '')} {one['advice']}"
    return found
