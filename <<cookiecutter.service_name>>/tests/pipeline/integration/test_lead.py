"""Batches and the relay of one process: neither leaves the other behind for long."""

import asyncio
import time

import asyncpg
from aiokafka import AIOKafkaProducer

from pipeline.lead import PATIENCE
from pipeline.runtime import Part

from .bank import Bank, Deposit
from .conftest import Records, Running, eventually
from .kafka_wire import Wire

MANY = 2_000
SMALL = {"batch_size": 50, "relay_page": 50}
AT_MOST = 2 * SMALL["relay_page"]


async def applied(db: asyncpg.Connection) -> int:
    return int(await db.fetchval("SELECT count(*) FROM pipeline.inbox"))


async def send_many(producer: AIOKafkaProducer, bank: Bank) -> None:
    await asyncio.gather(*(Deposit(n).send(producer, bank.deposits) for n in range(MANY)))


async def test_batches_wait_for_a_relay_that_is_behind_and_not_for_ever(
    running: Running,
    bank: Bank,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
    records: Records,
) -> None:
    await send_many(producer, bank)
    async with Wire(kafka).listening() as wire:
        wire.hold()
        async with running(bank.service, kafka_bootstrap_servers=wire.address, **SMALL):
            await eventually(lambda: wire.held > 0)  # the first page
            began, before = time.monotonic(), await applied(db)
            await eventually(lambda: time.monotonic() > began + 1.2 * PATIENCE)
            gained = await applied(db) - before
            waits = (time.monotonic() - began) / PATIENCE
            assert 0 < gained <= AT_MOST + (waits + 2) * SMALL["batch_size"]
            wire.go_on()
            assert len(await records(bank.balances, MANY)) == MANY


async def test_where_no_relay_works_nobody_waits_for_it(
    running: Running, bank: Bank, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    await send_many(producer, bank)
    async with running(bank.service, Part.CONSUME, **SMALL):
        await eventually(lambda: db.fetchval("SELECT count(*) >= $1 FROM pipeline.inbox", AT_MOST))
        began, before = time.monotonic(), await applied(db)
        await eventually(lambda: db.fetchval("SELECT count(*) = $1 FROM pipeline.inbox", MANY))
        batches = (MANY - before) / SMALL["batch_size"]
        assert time.monotonic() - began < batches * PATIENCE / 2
