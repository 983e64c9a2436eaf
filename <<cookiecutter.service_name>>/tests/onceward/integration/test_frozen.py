"""A process that is stopped, as by SIGSTOP: others wait for a limited time."""

import asyncio
from collections.abc import Callable

import asyncpg
import pytest

from onceward import Policy
from onceward.settings import Settings

from .applier import NewApplier
from .bank import Bank
from .test_round_trips import NEW, deposits, wiring
from .wire import FreezingWire
from tests.servers.waiting import eventually

_LIMIT = 5.0
"""Seconds that a transaction may take."""
_OPEN = """
SELECT EXISTS (SELECT FROM pg_stat_activity
                WHERE datname = current_database() AND xact_start IS NOT NULL
                  AND pid <> pg_backend_pid())
"""


async def is_ended(db: asyncpg.Connection) -> bool:
    """Return whether no other session of the database has a transaction."""
    return not await db.fetchval(_OPEN)


@pytest.mark.parametrize("request_", sorted(NEW))
async def test_a_process_that_is_stopped_in_its_transaction_soon_has_none(
    request_: str,
    settings: Callable[..., Settings],
    new_applier: NewApplier,
    db: asyncpg.Connection,
) -> None:
    """Wherever it is stopped: before a request, also between the parts of a statement."""
    wire = FreezingWire()
    bank = Bank(deposits="deposits", balances="balances", name="bank", options={"policy": Policy()})
    async with wiring(settings(), wire) as there:
        limits = {"lock_timeout": _LIMIT / 2, "transaction_timeout": _LIMIT}
        applier = await new_applier(
            bank.handlers, topic=bank.deposits, database_url=there, **limits
        )
        await applier.apply(*deposits(0, 10))  # creates the accounts
        wire.freeze_before(request_)
        stopped = asyncio.create_task(applier.apply(*deposits(10, 10)))
        await wire.has_killed.wait()
        await eventually(lambda: is_ended(db))
        wire.end()
        stopped.cancel()
        await asyncio.gather(stopped, return_exceptions=True)
        await applier.engine.dispose()
