"""Commands and processes of a correction are killed, and each message is corrected once."""

import signal
from collections.abc import Awaitable, Callable
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from .test_correct import _AGE
from tests.contract.bank import Deposit, histories
from tests.onceward.integration.bank import Bank
from tests.onceward.integration.processes import variables_of
from tests.servers.processes import starting
from tests.servers.waiting import eventually

pytestmark = pytest.mark.full

NUMBER = 100
SETTINGS = {
    "kafka_session_timeout": 6,
    "transaction_timeout": 3,
    "lock_timeout": 2,
    "backlog_lease": 3.5,
    "backlog_poll_max": 0.2,
    "retry_pause": 0.2,
}
CORRECT = (
    *("correct", "undo", "--release", "1.4.2", "--rate", "20"),
    *("--because", "a fee", "--yes", "--wait", "0"),
)


async def test_two_commands_and_two_processes_of_which_one_each_is_killed(
    new_topic: Callable[..., Awaitable[str]],
    database_url: str,
    kafka: str,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
) -> None:
    bank = Bank(await new_topic(), await new_topic(), f"bank-{uuid4().hex[:8]}")
    deposits = [Deposit(number, f"{number % 7}") for number in range(1, NUMBER + 1)]

    def has_markers(consumer: str, least: int) -> Callable[[], Awaitable[bool]]:
        async def has() -> bool:
            statement = "SELECT count(*) FROM pipeline.inbox WHERE consumer = $1"
            return bool(await db.fetchval(statement, consumer) >= least)

        return has

    async def has_begun() -> bool:
        return bool(await db.fetchval("SELECT EXISTS (SELECT FROM pipeline.backlog)"))

    async with starting(
        "tests.onceward.history.app",
        lambda: variables_of(bank),
        database_url=database_url,
        kafka_bootstrap_servers=kafka,
        **SETTINGS,
    ) as start:
        wrong = await start("consume", release="1.4.2")
        for one in deposits:
            await one.send(producer, bank.deposits)
        await eventually(has_markers("deposit", NUMBER))
        await wrong.kill()
        await db.execute(_AGE)
        workers = [await start("consume", release="1.4.3") for _ in range(2)]
        commands = [await start(*CORRECT, release="1.4.3") for _ in range(2)]
        await eventually(has_begun)
        commands[0].send(signal.SIGKILL)
        await commands[0].ended()
        await eventually(has_markers("undo", 1))
        await workers[0].kill()
        assert await commands[1].ended() in (0, 4), commands[1].output
        again = await start(*CORRECT, release="1.4.3")
        assert await again.ended() in (0, 4), again.output
        await eventually(has_markers("undo", NUMBER))
    found = await histories(db)
    assert sum(len(one) for one in found.values()) == 2 * NUMBER, "each twice: there and back"
    assert {key: sum(one) for key, one in found.items()} == dict.fromkeys(found, 0)
    for amounts in found.values():
        assert [-amount for amount in amounts if amount < 0] == sorted(n for n in amounts if n > 0)
