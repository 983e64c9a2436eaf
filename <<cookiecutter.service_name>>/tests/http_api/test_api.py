"""The HTTP API: the header Idempotency-Key, and errors as problem details."""

import asyncio
from collections.abc import AsyncIterator, Callable

import asyncpg
import httpx2
import pytest
from fastapi import FastAPI

from http_api.problems import DRAFT
from http_api.settings import HttpSettings
from pipeline import Retry
from pipeline.errors import StoreUnavailable
from pipeline.settings import Settings

from .cashier import NOTHING, ONE, new_key, stored
from .routes import app_of
from tests.contract.bank import histories
from tests.pipeline.integration.bank import Bank
from tests.servers.waiting import PATIENCE, eventually

PROBLEM = "application/problem+json"


@pytest.fixture
async def app(bank: Bank, settings: Callable[..., Settings]) -> AsyncIterator[FastAPI]:
    """Return the bank's application, which lives as long as the test."""
    app = app_of(bank.service, settings())
    app.state.seconds = PATIENCE
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of the application."""
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://bank") as one:
        yield one


async def post(
    client: httpx2.AsyncClient,
    amount: object = 5,
    key: str | None = "key-1",
    path: str = "/deposits",
) -> httpx2.Response:
    """Pay in for Ada."""
    headers = {} if key is None else {"Idempotency-Key": key}
    return await client.post(path, json={"account": "ada", "amount": amount}, headers=headers)


def assert_problem(response: httpx2.Response, status: int, detail: str, **members: object) -> None:
    """Check that the response has problem details as RFC 9457 has them."""
    assert response.status_code == status
    assert response.headers["content-type"] == PROBLEM
    problem = response.json()
    assert problem["status"] == status
    assert detail in problem["detail"]
    assert problem["title"]
    expected = {"type": "about:blank", **members}
    assert {name: problem[name] for name in expected} == expected


async def test_a_repeated_request_gets_the_same_answer_and_a_header(
    client: httpx2.AsyncClient, db: asyncpg.Connection
) -> None:
    first = await post(client, key='"key-1"')
    again = await post(client, key="key-1")
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json() == again.json() == {"account": "ada", "balance": 5}
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert await histories(db) == {"ada": [5]}


@pytest.mark.parametrize(("key", "detail"), [(None, "needs the header"), ("a b", "1 to 255")])
async def test_without_a_key_nothing_is_applied(
    client: httpx2.AsyncClient, db: asyncpg.Connection, key: str | None, detail: str
) -> None:
    assert_problem(await post(client, key=key), 400, detail, type=DRAFT)
    assert await stored(db) == NOTHING


async def test_a_key_with_another_body_is_answered_with_422(
    client: httpx2.AsyncClient, db: asyncpg.Connection
) -> None:
    await post(client, 5)
    title = "Idempotency-Key is already used"
    assert_problem(await post(client, 6), 422, "belongs to an earlier", type=DRAFT, title=title)
    assert await stored(db) == ONE


async def test_the_same_body_in_other_words_is_a_repeat(client: httpx2.AsyncClient) -> None:
    await post(client, 5)
    headers = {"Idempotency-Key": "key-1", "content-type": "application/json"}
    body = b'{ "failures": 0, "amount": 5, "account": "\\u0061da" }'
    again = await client.post("/deposits", content=body, headers=headers)
    assert again.headers["idempotency-replayed"] == "true"


async def test_a_request_under_way_is_answered_with_409(
    client: httpx2.AsyncClient, bank: Bank, db: asyncpg.Connection
) -> None:
    is_seen = asyncio.Event()

    async def wait() -> None:
        await is_seen.wait()

    bank.waits[5] = wait
    first = asyncio.create_task(post(client))
    await eventually(lambda: bank.calls == [5])
    second = await post(client)
    is_seen.set()
    assert_problem(second, 409, "under way", type=DRAFT)
    assert second.headers["retry-after"] == "1"
    assert (await first).status_code == 201
    assert (await post(client)).json() == (await first).json()
    assert await stored(db) == ONE


async def test_what_a_handler_rejects_is_answered_with_its_reason(
    client: httpx2.AsyncClient, db: asyncpg.Connection
) -> None:
    assert_problem(await post(client, -1), 422, "-1 is no deposit")
    assert await stored(db) == NOTHING


async def test_a_handler_that_is_to_be_tried_later_is_answered_with_503(
    client: httpx2.AsyncClient, bank: Bank, db: asyncpg.Connection
) -> None:
    bank.errors[5] = Retry("the secret is 7", after=2.5)
    answer = await post(client)
    assert_problem(answer, 503, "repeat it, with the same Idempotency-Key")
    assert answer.headers["retry-after"] == "3"
    assert "secret" not in answer.text
    assert await stored(db) == NOTHING


async def test_a_store_that_is_away_is_answered_with_503(
    client: httpx2.AsyncClient, bank: Bank, app: FastAPI
) -> None:
    app.state.seconds = 0.5
    bank.errors[5] = StoreUnavailable("the registry is away")
    assert_problem(await post(client), 503, "repeat it")


async def test_without_a_database_requests_are_answered_with_503(
    bank: Bank, settings: Callable[..., Settings], unused_tcp_port: int
) -> None:
    url = f"postgresql+asyncpg://ada:secret@127.0.0.1:{unused_tcp_port}/none"
    app = app_of(bank.service, settings(database_url=url))
    app.state.seconds = 0.5
    transport = httpx2.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://bank") as client,
    ):
        answer = await post(client)
    assert_problem(answer, 503, "the request was not applied now")
    assert answer.headers["retry-after"] == "1"


async def test_a_mistake_of_a_handler_is_answered_with_500_and_no_details(
    client: httpx2.AsyncClient, bank: Bank, db: asyncpg.Connection
) -> None:
    bank.errors[5] = KeyError("a secret")
    answer = await post(client)
    assert_problem(answer, 500, "the log says why")
    assert "secret" not in answer.text
    assert await stored(db) == NOTHING
    bank.errors.clear()
    assert (await post(client)).status_code == 201


async def test_a_body_that_is_no_event_is_answered_with_what_is_wrong_and_not_with_the_body(
    client: httpx2.AsyncClient,
) -> None:
    answer = await post(client, "a secret")
    assert_problem(answer, 422, "is not as the API describes it")
    (error,) = answer.json()["errors"]
    assert error["loc"] == ["body", "amount"]
    assert "secret" not in answer.text


async def test_an_unknown_path_and_a_wrong_method_are_answered_alike(
    client: httpx2.AsyncClient,
) -> None:
    assert_problem(await client.get("/nothing"), 404, "Not Found")
    assert_problem(await client.get("/deposits"), 405, "Method Not Allowed")


async def test_a_body_that_is_too_large_is_refused(
    client: httpx2.AsyncClient, db: asyncpg.Connection
) -> None:
    account = "a" * HttpSettings().max_body_bytes
    headers = {"Idempotency-Key": "key-1"}
    body = {"account": account, "amount": 5}
    assert (await client.post("/deposits", json=body, headers=headers)).status_code == 413
    assert await stored(db) == NOTHING


async def test_callers_have_keys_of_their_own(
    client: httpx2.AsyncClient, db: asyncpg.Connection
) -> None:
    answers = [await post(client, 5, path=f"/{one}/deposits") for one in ("bob", "carol", "bob")]
    assert [one.json()["balance"] for one in answers] == [5, 10, 5]
    assert await histories(db) == {"ada": [5, 5]}


async def test_the_trace_of_a_caller_goes_on_without_spans_of_this_process(
    client: httpx2.AsyncClient, db: asyncpg.Connection
) -> None:
    sent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"Idempotency-Key": new_key(), "traceparent": sent}
    await client.post("/deposits", json={"account": "ada", "amount": 5}, headers=headers)
    assert await db.fetchval("SELECT traceparent FROM pipeline.outbox") == sent


async def test_the_api_describes_the_key(client: httpx2.AsyncClient) -> None:
    described = (await client.get("/openapi.json")).json()
    (header,) = described["paths"]["/deposits"]["post"]["parameters"]
    assert (header["name"], header["in"]) == ("idempotency-key", "header")
