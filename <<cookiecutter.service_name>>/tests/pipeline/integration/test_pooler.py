"""What a pooler in transaction mode takes away: nothing may live as long as a session."""

from collections.abc import Awaitable, Callable

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from pipeline.retention.generations import close_generation
from pipeline.retention.maintenance import run_retention
from pipeline.servers.database import autocommitting, driver_of
from pipeline.settings import Settings

from .bank import Bank
from .desk import Desk, NewDesk
from .outgoing import numbered, relaying, stage
from tests.contract.bank import Account, Deposit
from tests.servers.topics import following

LEFT_BEHIND = """
SELECT (SELECT count(*) FROM pg_prepared_statements) AS statements,
       (SELECT count(*) FROM pg_locks
         WHERE pid = pg_backend_pid() AND locktype = 'advisory') AS locks,
       current_setting('lock_timeout') AS lock_timeout,
       current_setting('idle_in_transaction_session_timeout') AS idle_timeout
"""


@pytest.mark.parametrize(("pooler", "statements"), [(True, 0), (False, 1)])
async def test_a_transaction_leaves_nothing_behind_in_its_session(
    new_desk: NewDesk, direct_url: str, pooler: bool, statements: int
) -> None:
    """Trap 22; without the setting prepared statements stay, which is faster where it works."""
    bank = Bank(deposits="deposits", balances="balances", name="bank")
    desk: Desk = await new_desk(
        bank.handlers,
        topic=bank.deposits,
        database_url=direct_url,
        database_pooler=pooler,
        concurrency=1,
    )
    await desk.apply(*(Deposit(amount) for amount in range(20)))
    async with autocommitting(desk.engine) as driver:
        await run_retention(
            driver,
            Settings.model_validate(
                {"database_url": "postgresql+asyncpg://", "kafka_bootstrap_servers": "unused:9092"}
            ),
        )
        assert await close_generation(driver, current=1)
    async with AsyncSession(desk.engine) as session:
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
