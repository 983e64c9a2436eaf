"""A bank for every test of the contract: topics, a database and processes of its own."""

from collections.abc import AsyncIterator, Awaitable, Callable
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from .ledger import Ledger
from tests.servers.processes import Start, starting
from tests.servers.topics import following

PARTITIONS = 4


@pytest.fixture
async def ledger(
    new_topic: Callable[..., Awaitable[str]],
    kafka: str,
    db: asyncpg.Connection,
    producer: AIOKafkaProducer,
) -> AsyncIterator[Ledger]:
    """Return the ledger of a bank that has taken no deposit."""
    deposits, balances = await new_topic(PARTITIONS), await new_topic(PARTITIONS)
    async with following(kafka, balances) as published:
        name = f"bank-{uuid4().hex[:8]}"
        yield Ledger(name, deposits, balances, kafka, db, producer, published)


@pytest.fixture
async def start(ledger: Ledger, database_url: str, kafka: str) -> AsyncIterator[Start]:
    """Start processes of the bank: `start("run")`. Those that still run at the end are killed."""
    variables = {
        "BANK_DEPOSITS": ledger.deposits,
        "BANK_BALANCES": ledger.balances,
        "BANK_NAME": ledger.name,
    }
    async with starting(
        "tests.contract.app",
        lambda: variables,
        database_url=database_url,
        kafka_bootstrap_servers=kafka,
        # A process that was killed is replaced after this long, which brokers allow by default.
        kafka_session_timeout=6,
        transaction_timeout=5,
        lock_timeout=4,
        relay_lease=2,
        batch_size=20,
        relay_batch_events=20,
        retry_pause=0.2,
    ) as one:
        yield one
