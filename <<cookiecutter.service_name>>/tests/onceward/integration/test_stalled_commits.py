"""A server whose COMMIT waits for a standby that is not there: on a cluster of its own."""

import asyncio
from collections.abc import Iterator

import asyncpg
import pytest

from onceward.apply.positions import PositionMoved

from .applier import NewApplier
from .bank import Bank
from .clusters import Cluster, private
from .private_server import server_url, template, used_databases, way_in  # noqa: F401 (fixtures)
from tests.contract.bank import Deposit, histories
from tests.servers.waiting import eventually

pytestmark = pytest.mark.full

_STALLED = """
SELECT count(*) FROM pg_stat_activity WHERE application_name = 'applier' AND wait_event = 'SyncRep'
"""
_LOCKS = "SELECT count(*) FROM pg_locks JOIN pg_class ON oid = relation WHERE relname = 'account'"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Return a database server whose settings a test may change."""
    with private() as one:
        yield one


async def test_locks_end_with_the_time_limit_while_commits_wait_for_a_standby(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    async def wait_for_standby(name: str) -> None:
        await db.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
        await db.execute("SELECT pg_reload_conf()")
        await eventually(lambda: is_one(f"current_setting('synchronous_standby_names') = '{name}'"))

    async def is_one(condition: str) -> bool:
        return bool(await db.fetchval(f"SELECT {condition}"))

    bank = Bank(deposits="deposits", balances="balances", name="bank")
    applier = await new_applier(
        bank.handlers, topic="deposits", transaction_timeout=2, lock_timeout=1
    )
    await applier.apply(Deposit(1))
    batch = await applier.read(Deposit(2), Deposit(3), start=1)
    await wait_for_standby("missing")
    applying = asyncio.create_task(applier.apply_batch(batch))
    try:
        await eventually(lambda: is_one(f"({_STALLED}) = 1"))
        assert await is_one(f"({_LOCKS}) > 0")
        await eventually(lambda: is_one(f"({_LOCKS}) = 0"))
        assert not applying.done()  # the probe waits for the standby, too: an outage
    finally:
        await wait_for_standby("")
    with pytest.raises(PositionMoved):  # it is committed, and nothing is applied again
        await applying
    assert (bank.calls, await applier.backlog()) == ([1, 2, 3], [])
    assert await histories(db) == {"ada": [1, 2, 3]}
