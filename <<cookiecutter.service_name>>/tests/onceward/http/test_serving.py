"""The API as a process: it is killed, and each request is applied once and answered in the end."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from pathlib import Path

import asyncpg
import httpx2
import pytest
from aiokafka import AIOKafkaProducer

from .cashier import NOTHING, ONE, new_key, stored
from tests.contract.bank import Deposit, histories
from tests.onceward.integration import processes
from tests.onceward.integration.bank import Bank
from tests.servers.processes import Process, Start
from tests.servers.waiting import PATIENCE, eventually


@pytest.fixture
async def start(
    bank: Bank, database_url: str, kafka: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Start]:
    """Start processes that have the command `api`."""
    monkeypatch.setattr(processes, "APP", "tests.onceward.http.app")
    async with processes.starting(
        bank, database_url=database_url, kafka_bootstrap_servers=kafka, transaction_timeout=5
    ) as one:
        yield one


class Client:
    """A client that repeats a request until it is answered."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.lost = 0
        """Attempts of which no answer came."""
        self.conflicts = 0

    async def post(self, amount: int, key: str, **headers: str) -> httpx2.Response:
        """Pay in once. Each request has a connection of its own."""
        async with httpx2.AsyncClient(timeout=PATIENCE, verify=False) as one:
            return await one.post(
                f"http://127.0.0.1:{self.port}/deposits",
                json={"account": "ada", "amount": amount},
                headers={"Idempotency-Key": key, **headers},
            )

    async def until_answered(self, amount: int, key: str) -> httpx2.Response:
        """Pay in with repeats."""
        while True:
            try:
                answer = await self.post(amount, key)
                if answer.status_code not in (409, 503):
                    return answer
                self.conflicts += answer.status_code == 409
            except httpx2.TransportError:
                self.lost += 1
            await asyncio.sleep(0.05)


@pytest.fixture
def client(unused_tcp_port: int) -> Client:
    """Return a client of the port that processes serve."""
    return Client(unused_tcp_port)


async def serving(start: Start, client: Client, **more: str) -> Process:
    """Start the API and wait until it serves."""
    one = await start("api", http_port=client.port, more_variables=more)
    await one.says(f"the API is at http://127.0.0.1:{client.port}/")
    await eventually(one.is_ready)
    return one


async def test_an_answer_that_was_lost_with_its_process_is_found_again(
    start: Start, client: Client, db: asyncpg.Connection
) -> None:
    dying, key = await serving(start, client, BANK_DIES="yes"), new_key()
    with pytest.raises(httpx2.TransportError):
        await client.post(5, key, **{"x-die": "yes"})
    assert await dying.ended() == -signal.SIGKILL
    assert await stored(db) == ONE, "it was committed, and the client does not know"

    await serving(start, client)
    answer = await client.post(5, key)
    assert (answer.status_code, answer.json()) == (201, {"account": "ada", "balance": 5})
    assert answer.headers["idempotency-replayed"] == "true"
    assert await stored(db) == ONE


@pytest.mark.full
async def test_clients_that_repeat_while_the_process_is_killed_pay_in_once_each(
    start: Start, client: Client, db: asyncpg.Connection
) -> None:
    amounts, ended = count(1), asyncio.Event()
    answered: dict[int, int] = {}

    async def pay_in() -> None:
        while not ended.is_set():
            amount = next(amounts)
            answer = await client.until_answered(amount, f"key-{amount}")
            assert answer.status_code == 201, answer.text
            answered[amount] = answer.json()["balance"]

    async with asyncio.TaskGroup() as clients:
        for _ in range(6):
            clients.create_task(pay_in())
        for _ in range(6):
            process = await serving(start, client)
            enough = len(answered) + random.randint(5, 40)
            await eventually(lambda enough=enough: len(answered) >= enough)  # type: ignore[misc]
            await process.kill()
        await serving(start, client)
        ended.set()

    paid = (await histories(db))["ada"]
    assert sorted(paid) == sorted(answered) == [*range(1, len(answered) + 1)]
    balances = dict(zip(paid, _sums(paid), strict=True))
    assert answered == balances, "each has got the answer of the time when it was applied"
    rows = "SELECT count(*), count(DISTINCT event_id), max(sequence) FROM pipeline.outbox"
    assert set(await db.fetchrow(rows)) == {len(answered)}
    assert client.lost > 0, "no process was killed over a request"


def _sums(amounts: list[int]) -> list[int]:
    total, found = 0, list[int]()
    for one in amounts:
        total += one
        found.append(total)
    return found


async def test_a_process_that_is_stopped_answers_what_is_under_way(
    start: Start, client: Client, db: asyncpg.Connection
) -> None:
    process = await serving(start, client)
    async with db.transaction():
        await db.execute("LOCK TABLE account")
        request = asyncio.create_task(client.post(5, new_key()))
        await eventually(lambda: _waits(db))
        process.send(signal.SIGTERM)
        await process.says("SIGTERM: finishing running batches")
    assert (await request).status_code == 201
    assert await process.ended() == 0
    assert "bank has stopped" in process.output


async def _waits(db: asyncpg.Connection) -> bool:
    found = await db.fetchval(
        "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database"
        " WHERE NOT granted AND datname = current_database()"
    )
    return bool(found)


async def test_both_doors_of_a_running_service_lead_to_one_account(
    start: Start,
    bank: Bank,
    client: Client,
    db: asyncpg.Connection,
    new_topic: Callable[..., Awaitable[str]],
    producer: AIOKafkaProducer,
) -> None:
    """Real processes: one consumes and relays, the other serves requests."""
    bank.deposits, bank.balances = await new_topic(), await new_topic()
    await asyncio.gather(start("run"), serving(start, client))

    async def messages() -> None:
        for amount in range(1001, 1041):
            await Deposit(amount).send(producer, bank.deposits)

    async def requests() -> None:
        for amount in range(1, 41):
            await client.until_answered(amount, f"key-{amount}")

    await asyncio.gather(messages(), requests())

    async def has_all() -> bool:
        return len((await histories(db)).get("ada", [])) == 80

    await eventually(has_all)
    rows = await db.fetch(
        "SELECT sequence, (convert_from(payload, 'UTF8')::json->>'amount')::int AS amount"
        " FROM pipeline.outbox ORDER BY id"
    )
    assert [row["sequence"] for row in rows] == [*range(1, 81)]
    assert [row["amount"] for row in rows] == (await histories(db))["ada"]


async def test_a_port_in_use_is_named_with_its_setting(start: Start, client: Client) -> None:
    await serving(start, client)
    second = await start("api", http_port=client.port)
    assert await second.ended() == 1
    assert "check PIPELINE_HTTP_HOST and PIPELINE_HTTP_PORT" in second.output


async def test_wrong_settings_are_reported_at_once(start: Start) -> None:
    process = await start("api", http_port=70_000, http_request_timeout=0)
    assert await process.ended() == 2
    assert "PIPELINE_HTTP_PORT" in process.output
    assert "PIPELINE_HTTP_REQUEST_TIMEOUT" in process.output


async def test_a_database_that_is_not_migrated_ends_the_process(
    start: Start, client: Client, db: asyncpg.Connection
) -> None:
    await db.execute("DELETE FROM alembic_version")
    process = await start("api", http_port=client.port)
    assert await process.ended() == 1
    assert "service migrate" in process.output
    assert await stored(db) == NOTHING


async def test_the_api_waits_for_its_database_and_serves_meanwhile(
    start: Start, client: Client, unused_tcp_port_factory: Callable[[], int]
) -> None:
    url = f"postgresql+asyncpg://none@127.0.0.1:{unused_tcp_port_factory()}/none"
    process = await start("api", http_port=client.port, database_url=url, http_request_timeout=0.5)
    await process.says("the API is at")
    await eventually(lambda: _reports(process))
    answer = await client.post(5, new_key())
    assert answer.status_code == 503
    process.send(signal.SIGTERM)
    assert await process.ended() == 0


async def _reports(process: Process, text: str = "PostgreSQL") -> bool:
    return text in str((await process.reasons()).get("api"))


@pytest.mark.parametrize("opens", [True, False])
async def test_the_api_is_not_ready_before_its_resources_are_open(
    start: Start, client: Client, db: asyncpg.Connection, tmp_path: Path, opens: bool
) -> None:
    token = tmp_path / "token"
    variables = {"BANK_TOKEN": str(token)}
    process = await start("api", http_port=client.port, more_variables=variables)
    await process.says("opening resources failed, trying again: open_resources: ConnectionError")
    await eventually(lambda: _reports(process, "the application has not started yet"))
    if opens:
        token.write_text("secret")
        await eventually(process.is_ready)
        assert (await client.post(5, new_key())).status_code == 201
    process.send(signal.SIGTERM)
    assert await process.ended() == 0
    assert "Traceback" not in process.output
