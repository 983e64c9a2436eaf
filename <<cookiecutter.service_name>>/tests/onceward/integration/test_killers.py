"""Records that kill the process: found, tried alone, set aside, and dead in the end."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from .bank import Bank
from .processes import starting
from tests.contract.bank import Deposit, histories
from tests.servers.processes import Process, Start
from tests.servers.waiting import eventually

pytestmark = pytest.mark.full

EXITS = {"KeyboardInterrupt", "GeneratorExit", "SystemExit"}
APPLIED = "SELECT count(*) FROM pipeline.inbox"
DEAD = "SELECT count(*) FROM pipeline.backlog WHERE died_at IS NOT NULL"
STOPPABLE = {
    "kafka_session_timeout": 30,
    "transaction_timeout": 25,
    "backlog_lease": 30,
    "relay_lease": 30,
    "hang_timeout": 60,
}
"""Settings with which a process may stand still for twelve seconds. A call may block for ten."""


@pytest.fixture
async def start(bank: Bank, database_url: str, kafka: str) -> AsyncIterator[Start]:
    """Start processes that give a record two chances, and hang for two seconds at most."""
    async with starting(
        bank,
        database_url=database_url,
        kafka_bootstrap_servers=kafka,
        kafka_session_timeout=6,
        transaction_timeout=5,
        lock_timeout=2,
        unclean_starts=1,
        backlog_lease=6,
        backlog_poll_max=0.1,
        hang_timeout=2,
    ) as one:
        yield one


@asynccontextmanager
async def supervised(start: Start, **settings: object) -> AsyncIterator[list[Process]]:
    """Start the service whenever it has ended, as a supervisor does."""
    started: list[Process] = []

    async def supervise() -> None:
        while True:
            started.append(await start("run", **settings))
            await started[-1].ended()

    task = asyncio.create_task(supervise())
    try:
        yield started
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def struck(how: str) -> Deposit:
    """Return a record of ada's that nobody survives."""
    value = json.dumps({"how": how}).encode()
    return Deposit(3, type="struck", id=f"struck by {how}", value=value)


@pytest.mark.parametrize(
    ("mode", "how", "deaths"),
    [
        # Among others, and three times from the backlog, with the attempt stored beforehand.
        ("immediate", "kill", 4),
        ("deferred", "library", 4),
        # As the first one, before any handler is called.
        ("deferred", "kill", 4),
        ("immediate", "validation", 4),
        # asyncio lets these out of a task that the handler has begun, and so out of the loop.
        ("immediate", "task: KeyboardInterrupt", 4),
        ("deferred", "task: SystemExit", 4),
        # From the handler itself they are its failure, as anything else is.
        ("immediate", "KeyboardInterrupt", 0),
        ("deferred", "GeneratorExit", 0),
        ("immediate", "cancellation", 0),
        ("deferred", "cancellation", 0),
        # Interrupted, and the same.
        ("immediate", "sleep", 0),
        ("immediate", "command", 0),
        ("deferred", "loop", 0),
        ("immediate", "lock", 0),
        ("deferred", "expression", 0),
    ],
)
async def test_a_record_that_kills_the_process_dies_and_the_service_recovers(
    bank: Bank,
    start: Start,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    how: str,
    deaths: int,
) -> None:
    monkeypatch.setenv("BANK_STRIKES", mode)
    for one in (
        *(Deposit(n, "bob") for n in (1, 2)),
        struck(how),
        *(Deposit(n, "ada") for n in (4, 5)),
        *(Deposit(n, "bob") for n in (6, 7)),
    ):
        await one.send(producer, bank.deposits)

    async def is_dead() -> bool:
        reason = await db.fetchval("SELECT reason FROM pipeline.backlog WHERE died_at IS NOT NULL")
        return bool(reason == "attempts used up")

    async with supervised(start, hang_timeout=2 if deaths else 60) as started:
        await eventually(is_dead, patience=1200)
        await eventually(lambda: _is_empty(db), patience=1200)
        assert await histories(db) == {"bob": [1, 2, 6, 7], "ada": [4, 5]}
        # The last attempt was spent beforehand, too: nobody has come back from it.
        await eventually(lambda: len(started) - 1 == deaths, patience=120)
        await eventually(started[-1].is_ready)
        if how == "library":
            said = started[0].output
            assert "PIPELINE_HANG_TIMEOUT ends the process" in said
            assert "in strike" in said, "the stack that it hung in is in the log"
            assert "Stack (most recent call first)" not in said, "the last resort was not needed"


@pytest.mark.parametrize("mode", ["immediate", "deferred"])
async def test_a_process_stopped_during_a_call_does_not_blame_the_call(
    bank: Bank,
    start: Start,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    monkeypatch.setenv("BANK_STRIKES", mode)
    monkeypatch.setenv("BANK_CHANCES", "1")
    await struck("stop").send(producer, bank.deposits)
    one = await start("run", **STOPPABLE)
    await one.stops_for(12)
    await eventually(lambda: db.fetchval(f"SELECT ({APPLIED}) + ({DEAD}) > 0"))
    assert await db.fetch("SELECT FROM pipeline.backlog") == []
    assert one.is_running


async def test_a_handler_that_swallows_its_cancellation_ends_the_process(
    bank: Bank, start: Start, producer: AIOKafkaProducer
) -> None:
    await struck("deaf").send(producer, bank.deposits)
    one = await start("run")
    assert await asyncio.wait_for(one.ended(), 60) == 70
    assert "struck by deaf" in one.output
    assert "is still running 2.0 s after its cancellation" in one.output
    assert "in strike" in one.output


async def test_a_validator_that_would_end_the_process_makes_a_dead_letter(
    bank: Bank, start: Start, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    one = await start("run")
    for how in EXITS:
        await struck(f"validation: {how}").send(producer, bank.deposits)

    async def are_dead() -> bool:
        rows = await db.fetch("SELECT reason, error FROM pipeline.backlog")
        assert {row["reason"] for row in rows} <= {"invalid payload"}
        return {row["error"].partition(":")[0] for row in rows} == EXITS

    await eventually(are_dead)
    assert one.is_running


async def test_a_second_signal_ends_the_process_without_blaming_a_handler(
    bank: Bank, start: Start, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    one = await start("run", hang_timeout=60)
    await struck("deaf").send(producer, bank.deposits)
    await eventually(lambda: db.fetchval("SELECT sum(starts) > 0 FROM pipeline.position"))
    one.send(signal.SIGINT)
    await one.says("SIGINT: finishing running batches")
    one.send(signal.SIGINT)
    assert await one.ended() == -signal.SIGINT
    assert await db.fetch("SELECT FROM pipeline.backlog") == []


async def _is_empty(db: asyncpg.Connection) -> bool:
    waiting = "SELECT count(*) FROM pipeline.backlog WHERE died_at IS NULL"
    return bool(await db.fetchval(APPLIED) == 6 and await db.fetchval(waiting) == 0)
