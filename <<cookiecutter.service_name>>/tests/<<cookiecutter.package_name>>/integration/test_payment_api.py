"""What the HTTP API answers. A pattern for tests of your own routes, which need no Kafka."""

from collections.abc import AsyncIterator, Callable

import asyncpg
import httpx2
import pytest

from http_api import open_receiver
from pipeline.settings import Settings

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
    assert first.json()["is_authorized"]
    assert first.json()["payment_id"].startswith("payment:")
    assert (again.status_code, again.json()) == (200, first.json())
    assert await db.fetchval("SELECT balance FROM account WHERE id = $1", ADA) == 300


async def test_a_repeat_after_its_answer_is_forgotten_has_the_same_id_and_is_refused(
    client: httpx2.AsyncClient, db: asyncpg.Connection
) -> None:
    first = await post(client, 100, "key-1")
    await db.execute("DELETE FROM pipeline.inbox")
    again = await post(client, 100, "key-1")
    assert again.json() == {
        "payment_id": first.json()["payment_id"],
        "is_authorized": False,
        "reason": "already authorized",
    }
    assert await db.fetchval("SELECT balance FROM account WHERE id = $1", ADA) == 700


async def test_a_payment_without_funds_is_answered_with_the_reason(
    client: httpx2.AsyncClient,
) -> None:
    answer = (await post(client, 801, "key-1")).json()
    assert (answer["is_authorized"], answer["reason"]) == (False, "insufficient funds")


async def test_one_key_for_two_payments_is_refused(client: httpx2.AsyncClient) -> None:
    await post(client, 100, "key-1")
    refused = await post(client, 200, "key-1")
    assert (refused.status_code, refused.json()["title"]) == (
        422,
        "Idempotency-Key is already used",
    )
