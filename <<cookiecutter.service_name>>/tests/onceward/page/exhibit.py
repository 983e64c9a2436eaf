"""A page with something to see: `python -m tests.onceward.page.exhibit`, on an empty database.

Run with the variables of `tests.onceward.page.app`; it makes tables, topics, rows and records,
then runs the service and its page until the latter ends.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import asyncpg
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from onceward.apply.positions import Slot
from onceward.servers.database import create_engine
from onceward.settings import Settings

from tests.contract.bank import Deposit
from tests.onceward.integration.app import bank
from tests.onceward.integration.applier import Applier
from tests.onceward.integration.conftest import build
from tests.onceward.integration.outgoing import event, stage
from tests.onceward.integration.test_dead import bury
from tests.servers.databases import HOME
from tests.servers.waiting import eventually

HOSTILE = "<script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">"

RELEASE = "1.4.2"
"""What has applied the first messages. The processes here have no release: they may correct it."""
REASONS = """
UPDATE pipeline.backlog SET reason = 'attempts used up' WHERE record_key = 'account 6';
UPDATE pipeline.backlog SET reason = 'missing type', consumer = '' WHERE record_key = 'account 1'
"""
"""So that there are several groups of dead letters, of which one has no consumer."""
SCHEDULED = """
INSERT INTO pipeline.scheduled (name, due_at, topic, event_id, source, type, content_type)
SELECT 'reminder of ' || name, timestamptz '2030-01-02 03:04+00', 'reminders', name, '/s', 'r', 'y'
  FROM unnest('{ada,eve}'::text[]) AS name
"""
DEAD_EVENTS = """
INSERT INTO pipeline.outbox_rejected (id, created_at, topic, event_id, source, type, content_type,
       died_at, reason)
SELECT id, now(), 'balances', event_id, '/s', 'balance.changed', 'y', now(), reason
  FROM (VALUES (1, 'b', 'too large'), (100001, 'c', 'too large'), (100002, 'd', 'not valid'))
       AS dead (id, event_id, reason)
"""
AGE = """
UPDATE pipeline.inbox SET release = $1, created_at = created_at - interval '1 hour'
 WHERE id = ANY ($2)
"""


async def furnish(settings: Settings) -> None:
    """Store dead letters, events to publish, scheduled and dead ones; send what is to be read."""
    engine = create_engine(settings, name="exhibit")
    nobody: Any = None
    slot = Slot(bank.name, bank.deposits, 0)
    applier = Applier(engine, nobody, nobody, nobody, bank.handlers, slot)
    others = [Deposit(n, f"account {n % 7}") for n in range(2, 12)]
    dead = [Deposit(1, HOSTILE, id=HOSTILE), *others]
    await bury(applier, *dead)
    await engine.dispose()
    db = await connect()
    await stage(db, [event(bank.balances, n) for n in range(3)])
    for statement in (REASONS, SCHEDULED, DEAD_EVENTS):
        await db.execute(statement)
    await db.close()
    admin = AIOKafkaAdminClient(bootstrap_servers=settings.kafka_bootstrap_servers)
    await admin.start()
    await admin.create_topics([NewTopic(name, 1, 1) for name in (bank.deposits, bank.balances)])
    await admin.close()
    await send(settings, *dead)


async def connect() -> asyncpg.Connection:
    """Open a connection to the database."""
    url = os.environ["PIPELINE_DATABASE_URL"].replace("+asyncpg", "")
    connection: asyncpg.Connection = await asyncpg.connect(url)
    return connection


async def send(settings: Settings, *deposits: Deposit) -> None:
    """Send deposits to the bank."""
    async with AIOKafkaProducer(bootstrap_servers=settings.kafka_bootstrap_servers) as producer:
        await asyncio.gather(*(one.send(producer, bank.deposits) for one in deposits))


async def let_a_release_have_applied(ids: Sequence[str]) -> None:
    """Wait until the messages are applied, and let that have been an hour ago, by a release."""
    db = await connect()
    count = "SELECT count(*) = $2 FROM pipeline.inbox WHERE id = ANY ($1)"
    await eventually(lambda: db.fetchval(count, ids, len(ids)))
    await db.execute(AGE, RELEASE, ids)
    await db.close()


async def send_waves(settings: Settings) -> None:
    """Send so that plots have a shape, for half a minute."""
    for wave in range(20):
        first, count = 1_000 * (wave + 1), 20 + wave * 37 % 90
        deposits = [Deposit(first + n, f"account {n % 7}") for n in range(count)]
        again = deposits[:: 1 + wave % 5] if wave % 3 else []
        await send(settings, *deposits, *again)
        if not wave:
            await let_a_release_have_applied([str(one.amount) for one in deposits])
        await asyncio.sleep(1.5)


def show(settings: Settings) -> None:
    """Run the service and its page, until SIGTERM or until the page ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with ExitStack() as running:
        for command in ("run", "page"):
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.onceward.page.app", command], cwd=HOME
            )
            running.callback(process.wait)
            running.callback(process.terminate)
        asyncio.run(send_waves(settings))
        process.wait()


if __name__ == "__main__":
    build(os.environ["PIPELINE_DATABASE_URL"])
    chosen = Settings()
    asyncio.run(furnish(chosen))
    show(chosen)
