"""Batches and the relay of one process: neither leaves the other behind for long."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from onceward.relay import backpressure
from onceward.relay.backpressure import PATIENCE
from onceward.runtime import Part

from .bank import Bank
from .kafka_wire import Wire
from tests.conftest import Records, Running
from tests.contract.bank import Deposit
from tests.servers.waiting import eventually

MANY = 2_000
SMALL = {"batch_size": 50, "relay_batch_events": 50}
AT_MOST = 2 * SMALL["relay_batch_events"]
AT_ONCE = 4
"""Transactions, by default."""


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
            gained, waits = await _gain(lambda: applied(db), 1.2 * PATIENCE)
            assert gained <= AT_MOST + (waits + 2) * SMALL["batch_size"]
            wire.go_on()
            assert len(await records(bank.balances, MANY)) == MANY


async def _gain(count: Callable[[], Awaitable[int]], seconds: float) -> tuple[int, float]:
    """Wait for so long, and for a first gain however long that takes; in units of a wait, too."""
    began, before = time.monotonic(), await count()
    await eventually(lambda: time.monotonic() > began + seconds)

    async def has_gained() -> bool:
        return await count() > before

    await eventually(has_gained)
    gained = await count() - before
    return gained, (time.monotonic() - began) / PATIENCE


async def _held_back(db: asyncpg.Connection) -> None:
    """Check that what is staged while nothing can be published stays within bounds."""

    async def staged() -> int:
        return int(await db.fetchval("SELECT count(*) FROM pipeline.outbox"))

    gained, waits = await _gain(staged, 2.2 * PATIENCE)
    assert gained <= AT_MOST + (waits + 2) * AT_ONCE * SMALL["batch_size"]


async def test_the_lead_does_not_grow_with_the_partitions(
    running: Running,
    new_topic: Callable[..., Awaitable[str]],
    bank: Bank,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
    records: Records,
) -> None:
    wide = Bank(deposits=await new_topic(partitions=32), balances=bank.balances, name=bank.name)
    deposits = [Deposit(n, account=f"{n % 32}", partition=n % 32) for n in range(2 * MANY)]
    await asyncio.gather(*(one.send(producer, wide.deposits) for one in deposits))
    async with Wire(kafka).listening() as wire:
        wire.hold()
        async with running(wide.service, kafka_bootstrap_servers=wire.address, **SMALL):
            await eventually(lambda: wire.held > 0)
            await _held_back(db)
            wire.go_on()
            assert len(await records(wide.balances, 2 * MANY)) == 2 * MANY


async def test_what_is_handled_later_waits_as_well(
    running: Running,
    bank: Bank,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    kafka: str,
    records: Records,
) -> None:
    later = Bank(
        deposits=bank.deposits, balances=bank.balances, name=bank.name, options={"mode": "deferred"}
    )
    await asyncio.gather(
        *(Deposit(n, account=f"{n % 400}").send(producer, bank.deposits) for n in range(MANY))
    )
    async with running(later.service, Part.CONSUME, backlog_workers=1, **SMALL):
        stored = "SELECT count(*) > $1 FROM pipeline.backlog"
        await eventually(lambda: db.fetchval(stored, MANY // 2))
    async with Wire(kafka).listening() as wire:
        wire.hold()
        async with running(later.service, kafka_bootstrap_servers=wire.address, **SMALL):
            await eventually(lambda: wire.held > 0)
            await _held_back(db)
            wire.go_on()
            assert len(await records(bank.balances, MANY)) == MANY


async def test_where_no_relay_works_nobody_waits_for_it(
    running: Running,
    bank: Bank,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backpressure, "PATIENCE", 3_600.0)
    await send_many(producer, bank)
    async with running(bank.service, Part.CONSUME, **SMALL):
        await eventually(lambda: db.fetchval("SELECT count(*) = $1 FROM pipeline.inbox", MANY))
