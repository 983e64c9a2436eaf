"""What a pooler in transaction mode takes away: nothing may live as long as a session."""

import asyncio
from collections.abc import Awaitable, Callable

import asyncpg
import pytest
from servers.network import free_port
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncSession

from onceward.retention.generations import close_generation
from onceward.retention.maintenance import run_retention
from onceward.servers.database import autocommitting, driver_of
from onceward.settings import Settings

from .applier import Applier, NewApplier
from .bank import Bank
from .outgoing import numbered, relaying, stage
from .test_interrupted import kill_connections
from tests.contract.bank import Account, Deposit, histories
from tests.servers.databases import url_of
from tests.servers.pooler import pooling
from tests.servers.topics import following
from tests.servers.waiting import eventually

LEFT_BEHIND = """
SELECT (SELECT count(*) FROM pg_prepared_statements) AS statements,
       (SELECT count(*) FROM pg_locks
         WHERE pid = pg_backend_pid() AND locktype = 'advisory') AS locks,
       current_setting('lock_timeout') AS lock_timeout,
       current_setting('idle_in_transaction_session_timeout') AS idle_timeout
"""


@pytest.mark.parametrize(("pooler", "statements"), [(True, 0), (False, 1)])
async def test_a_transaction_leaves_nothing_behind_in_its_session(
    new_applier: NewApplier, direct_url: str, pooler: bool, statements: int
) -> None:
    """Trap 22; without the setting prepared statements stay, which is faster where it works."""
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    applier: Applier = await new_applier(
        bank.handlers,
        topic=bank.deposits,
        database_url=direct_url,
        database_pooler=pooler,
        concurrency=1,
    )
    await applier.apply(*(Deposit(amount) for amount in range(20)))
    async with autocommitting(applier.engine) as driver:
        await run_retention(
            driver,
            Settings.model_validate(
                {"database_url": "postgresql+asyncpg://", "kafka_bootstrap_servers": "unused:9092"}
            ),
        )
        assert await close_generation(driver, current=1)
    async with AsyncSession(applier.engine) as session:
        account = await session.get_one(Account, "ada")
        assert account.balance == sum(range(20))
        driver = await driver_of(await session.connection())
        left = dict((await driver.fetch(LEFT_BEHIND))[0])
    assert min(left.pop("statements"), 1) == statements
    assert left == {"locks": 0, "lock_timeout": "0", "idle_timeout": "0"}


async def test_a_relay_needs_no_session(
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    """Trap 22."""
    topic = await new_topic()
    await stage(db, numbered(topic, range(30)))
    chosen = settings(database_pooler=True, relay_batch_events=7)
    async with following(kafka, topic) as tail, relaying(chosen):
        await tail.until_ids(range(30))


@pytest.mark.parametrize("when", ["before a batch", "while a handler is called"])
async def test_a_pooler_without_a_server_is_an_outage_and_nothing_is_spent(
    new_applier: NewApplier, server_url: str, direct_url: str, db: asyncpg.Connection, when: str
) -> None:
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    server = make_url(direct_url)
    # Whoever waits for a server longer than a second gets an error.
    with pooling(server_url, "query_wait_timeout = 1\nserver_login_retry = 1\n") as pooler:
        applier = await new_applier(
            bank.handlers,
            topic=bank.deposits,
            database_url=url_of(pooler.url, server.database or ""),
            database_pooler=True,
        )
        await applier.apply(Deposit(1), Deposit(2))

        async def lose_the_server() -> None:
            bank.waits.clear()
            pooler.resume_at(free_port())
            await eventually(lambda: _are_none_left(db))

        if when == "before a batch":
            await lose_the_server()
        else:
            bank.waits[4] = lose_the_server
        applying = asyncio.create_task(applier.apply(*map(Deposit, (3, 4, 5)), start=2))
        await eventually(lambda: len(applier.outages) > 2)
        assert not applying.done()
        pooler.resume_at(server.port or 0)
        await applying
        assert await applier.backlog() == []
    assert await histories(db) == {"ada": [1, 2, 3, 4, 5]}


async def _are_none_left(db: asyncpg.Connection) -> bool:
    """End the server's connections, and return whether there were none."""
    return not await kill_connections(db)
