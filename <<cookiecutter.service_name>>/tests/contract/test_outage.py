"""While the database is away, messages wait, which spends no attempt."""

from collections.abc import Awaitable, Callable

import asyncpg
import pytest

from .ledger import Ledger
from tests.servers.databases import administer
from tests.servers.processes import Process, Start
from tests.servers.waiting import eventually

TERMINATE = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
NOTE_ATTEMPTS = """
CREATE TABLE spent (message text, attempts int);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO spent VALUES (NEW.id, NEW.attempts);
    RETURN NULL;
END $$;
CREATE TRIGGER note AFTER INSERT OR UPDATE ON pipeline.backlog
   FOR EACH ROW WHEN (NEW.attempts > 0) EXECUTE FUNCTION note();
"""


Spent = Callable[[], Awaitable[list[asyncpg.Record]]]

PATIENT = {"kafka_session_timeout": 45, "transaction_timeout": 40, "backlog_lease": 60}
"""Settings with which nothing here ends because it has taken too long."""


@pytest.fixture
async def spent(db: asyncpg.Connection) -> Spent:
    """Return the question for the attempts that the bank has spent on messages."""
    await db.execute(NOTE_ATTEMPTS)
    return lambda: db.fetch("SELECT * FROM spent")


async def test_lost_connections_spend_no_attempt(
    ledger: Ledger, start: Start, spent: Spent
) -> None:
    async def are_cut() -> bool:
        return bool(await ledger.db.fetchval(TERMINATE))

    async with ledger.traffic(failing=False):
        process = await start("run", **PATIENT)
        for _ in range(5):
            await ledger.progresses()
            await eventually(are_cut)  # it may not be connected again yet
        await ledger.progresses()
        await eventually(process.is_ready)
    assert process.is_running, "it needs no restart"
    assert await spent() == []


async def test_a_database_that_takes_no_connections_is_waited_for(
    ledger: Ledger, start: Start, server_url: str, spent: Spent
) -> None:
    database = await ledger.db.fetchval("SELECT current_database()")
    async with ledger.traffic(failing=False):
        process = await start("run", **PATIENT)
        await ledger.progresses()
        await administer(server_url, f"ALTER DATABASE {database} ALLOW_CONNECTIONS false")
        await ledger.db.fetchval(TERMINATE)
        await eventually(lambda: says_it_is_not_ready(process))
        await administer(server_url, f"ALTER DATABASE {database} ALLOW_CONNECTIONS true")
        await ledger.progresses()
        await eventually(process.is_ready)
    assert process.is_running, "it needs no restart"
    assert await spent() == []


async def says_it_is_not_ready(process: Process) -> bool:
    """Whether readiness, which operators and supervisors see, says no, and liveness yes."""
    statuses = [(await process.get(f"/health/{one}"))[0] for one in ("ready", "live")]
    return statuses == [503, 200]
