"""What the HTTP API answers. A pattern for tests of your own routes, which need no Kafka."""

from collections.abc import AsyncIterator, Callable

import asyncpg
import httpx2
import pytest

from onceward.http import open_receiver
from onceward.settings import Settings

from <<cookiecutter.package_name>>.api import app
from <<cookiecutter.package_name>>.main import service

pytestmark = pytest.mark.integration

ADA = "customer:ada"


@pytest.fixture
async def client(
    settings: Callable[..., Settings], db: asyncpg.Connection
) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of the application, on the test's database, where Ada has 800."""
    await db.execute("INSERT INTO account (id, balance, version) VALUES ($1, 800, 0)", ADA)
    transport = httpx2.ASGITransport(app)
    async with (
        open_receiver(service, settings()) as app.state.receiver,
        httpx2.AsyncClient(transport=transport, base_url="http://api") as one,
    ):
        yield one


async def post(client: httpx2.AsyncClient, amount: int, key: str) -> httpx2.Response:
    """Request a payment."""
    payment = {"customer": ADA, "merchant": "merchant:books", "amount": amount}
    return await client.post("/payments", json=payment, headers={"Idempotency-Key": key})


async def test_a_payment_is_authorized_and_its_repeat_has_the_same_id(
    client: httpx2.AsyncClient, db: asyncpg.Connection
) -> None:
    first = await post(client, 500, "key-1")
    again = await post(client, 500, "key-1")
    assert first.json()["payment_id"].startswith("payment:")
    assert (first.json()["authorized"], first.json()["reason"]) == (500, None)
    assert (again.status_code, again.json()) == (200, first.json())
    assert await db.fetchval("SELECT balance FROM account WHERE id = $1", ADA) == 300


@pytest.mark.parametrize("amount", [100, 200])
async def test_a_repeat_after_its_answer_is_forgotten_gets_the_authorized_amount(
    client: httpx2.AsyncClient, db: asyncpg.Connection, amount: int
) -> None:
    first = await post(client, 100, "key-1")
    await db.execute("DELETE FROM pipeline.inbox")
    again = await post(client, amount, "key-1")
    assert again.json() == first.json()
    assert again.json()["authorized"] == 100
    assert await db.fetchval("SELECT balance FROM account WHERE id = $1", ADA) == 700
    assert await db.fetchval("SELECT count(*) FROM pipeline.outbox") == 1


async def test_a_payment_without_funds_is_answered_with_the_reason(
    client: httpx2.AsyncClient,
) -> None:
    answer = (await post(client, 801, "key-1")).json()
    assert (answer["authorized"], answer["reason"]) == (0, "insufficient funds")


@pytest.mark.parametrize("change", [{"amount": "5"}, {"amount": 5.0}, {"currency": "JPY"}])
async def test_a_request_that_is_not_exactly_one_is_rejected(
    client: httpx2.AsyncClient, change: dict[str, object]
) -> None:
    payment = {"customer": ADA, "merchant": "merchant:books", "amount": 5} | change
    headers = {"Idempotency-Key": "key-1"}
    assert (await client.post("/payments", json=payment, headers=headers)).status_code == 422


async def test_one_key_for_two_payments_is_refused(client: httpx2.AsyncClient) -> None:
    await post(client, 100, "key-1")
    refused = await post(client, 200, "key-1")
    assert (refused.status_code, refused.json()["title"]) == (
        422,
        "Idempotency-Key is already used",
    )
