"""The HTTP API: the header Idempotency-Key, and errors as problem details."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import uuid4

import asyncpg
import httpx2
import pytest
from fastapi import FastAPI, HTTPException, Request
from pydantic import AfterValidator, BaseModel, Field

from onceward import Event, Retry, Transaction
from onceward.errors import StoreUnavailable
from onceward.http import Receiver
from onceward.http.app import Idempotent, create_app
from onceward.http.problems import DRAFT
from onceward.http.settings import HttpSettings
from onceward.settings import Settings

from .cashier import CASHIER, NOTHING, ONE, cashier, new_key, stored
from .routes import app_of
from tests.contract.bank import Deposited, histories
from tests.onceward.integration.bank import Bank
from tests.servers.waiting import PATIENCE, eventually

PROBLEM = "application/problem+json"


@pytest.fixture
async def app(bank: Bank, settings: Callable[..., Settings]) -> AsyncIterator[FastAPI]:
    """Return the bank's application, which lives as long as the test."""
    app = app_of(bank.service, settings())
    app.state.seconds = PATIENCE
    async with app.router.lifespan_context(app):
        yield app


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of an application."""
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://bank") as one:
        yield one


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of the application."""
    async with client_of(app) as one:
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
    body = b'{ "amount": 5, "account": "\\u0061da" }'
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


async def test_an_invalid_body_is_answered_with_the_error_but_not_quoted(
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


async def _in_chunks(body: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(body), 100_000):
        yield body[at : at + 100_000]


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("path", ["/deposits", "/nothing"])
async def test_a_body_that_is_too_large_is_refused(
    client: httpx2.AsyncClient, db: asyncpg.Connection, path: str, is_chunked: bool
) -> None:
    account = "a" * HttpSettings().max_body_bytes
    headers = {"Idempotency-Key": "key-1", "content-type": "application/json"}
    body = json.dumps({"account": account, "amount": 5}).encode()
    content = _in_chunks(body) if is_chunked else body
    answer = await client.post(path, content=content, headers=headers)
    if is_chunked and path == "/nothing":  # its body is not read
        assert_problem(answer, 404, "Not Found")
    else:
        assert_problem(answer, 413, "larger than 900,000 bytes")
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


async def test_several_keys_are_answered_with_400(
    client: httpx2.AsyncClient, db: asyncpg.Connection
) -> None:
    headers = [("Idempotency-Key", "key-1"), ("Idempotency-Key", "key-1")]
    body = {"account": "ada", "amount": 5}
    answer = await client.post("/deposits", json=body, headers=headers)
    assert_problem(answer, 400, "several headers", type=DRAFT)
    assert await stored(db) == NOTHING


@pytest.mark.parametrize("status", [499, 599, 418])
async def test_a_route_answers_with_any_status(
    app: FastAPI, client: httpx2.AsyncClient, status: int
) -> None:
    @app.get("/closed")
    async def closed() -> None:
        raise HTTPException(status, "half a surrogate pair: \ud800")

    assert_problem(await client.get("/closed"), status, "half a surrogate pair: \ud800")


@pytest.mark.parametrize("status", [204, 304])
async def test_a_status_without_a_body_has_none(
    app: FastAPI, client: httpx2.AsyncClient, status: int
) -> None:
    @app.get("/unchanged")
    async def unchanged() -> None:
        raise HTTPException(status, "nothing new", headers={"etag": "1"})

    answer = await client.get("/unchanged")
    assert (answer.status_code, answer.content, answer.headers["etag"]) == (status, b"", "1")


class Strict(BaseModel, extra="forbid"):
    """A body that knows its fields."""


async def test_a_field_whose_name_is_no_text_is_answered_with_422(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    @app.post("/strict")
    async def strict(body: Strict) -> None:
        pass

    headers = {"content-type": "application/json"}
    answer = await client.post("/strict", content=b'{"\\ud800": 1}', headers=headers)
    assert_problem(answer, 422, "is not as the API describes it")


@pytest.mark.parametrize(
    "body",
    [
        {"account": "a\0b", "amount": 5},
        {"account": "ada", "amount": 10**12},
        {"account": "".join(str(uuid4()) for _ in range(1_000)), "amount": 5},
    ],
    ids=["NUL", "out of range", "too long for an index"],
)
async def test_a_value_that_the_database_does_not_accept_is_answered_with_422(
    client: httpx2.AsyncClient,
    db: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
    body: dict[str, object],
) -> None:
    answer = await client.post("/deposits", json=body, headers={"Idempotency-Key": "key-1"})
    assert_problem(answer, 422, "the database does not accept a value")
    assert await stored(db) == NOTHING
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert str(body["account"]) not in caplog.text


async def test_a_caller_whose_name_can_not_be_stored_is_answered_with_400(
    client: httpx2.AsyncClient, db: asyncpg.Connection
) -> None:
    assert_problem(await post(client, path="/%00/deposits"), 400, "text without NUL", type=DRAFT)
    assert await stored(db) == NOTHING


class Opened(Event, type="opened.v1"):
    """An account is opened, at this release."""

    account: str
    at: datetime | None = None


class Notes(BaseModel):
    """A part of the next release's event."""

    since: int = 1


class OpenedLater(Event, type="opened.v2"):
    """The same, at the next release, which makes more of it."""

    account: Annotated[str, AfterValidator(str.upper)]
    at: datetime | None = None
    notes: Notes = Notes()
    token: str = Field(default_factory=lambda: str(uuid4()))


@asynccontextmanager
async def release(
    settings: Callable[..., Settings], event: type[Event]
) -> AsyncIterator[tuple[FastAPI, httpx2.AsyncClient]]:
    """Yield a release of the API that opens accounts by this event, and its client."""
    bank = cashier()

    @bank.handlers.on(event, topic=None, consumer="open")
    async def open_account(event: Any, tx: Transaction) -> str:
        return f"{event.account} is open"

    app = create_app(bank.service, settings())
    app.state.seconds = PATIENCE

    async def post(one: Any, request: Idempotent) -> Any:
        return await request.receive(one, consumer="open")

    async def post_of(account: str, request: Idempotent) -> Any:
        return await request.receive(event.model_validate({"account": account}), consumer="open")

    async def post_stream(request: Request, idempotent: Idempotent) -> Any:
        body = b"".join([part async for part in request.stream()])
        return await idempotent.receive(event.model_validate_json(body), consumer="open")

    post.__annotations__["one"] = event
    app.post("/accounts")(post)
    app.post("/accounts/{account}")(post_of)
    app.post("/stream")(post_stream)
    async with app.router.lifespan_context(app), client_of(app) as client:
        yield app, client


async def repeated(
    settings: Callable[..., Settings], path: str, body: dict[str, object]
) -> httpx2.Response:
    """Return the answer of the next release to a request that this one has answered."""
    headers = {"Idempotency-Key": "key-1"}
    async with release(settings, Opened) as (_, client):
        first = await client.post(path, json=body, headers=headers)
        assert (first.status_code, first.json()) == (200, "ada is open")
    async with release(settings, OpenedLater) as (_, client):
        return await client.post(path, json=body, headers=headers)


@pytest.mark.parametrize("path", ["/accounts", "/accounts/ada"])
async def test_a_repeat_across_a_release_gets_the_stored_answer(
    settings: Callable[..., Settings], db: asyncpg.Connection, path: str
) -> None:
    again = await repeated(settings, path, {"account": "ada"})
    assert (again.status_code, again.json()) == (200, "ada is open")
    assert again.headers["idempotency-replayed"] == "true"


async def test_without_its_body_a_request_is_its_event(
    settings: Callable[..., Settings], db: asyncpg.Connection
) -> None:
    body, headers = {"account": "ada"}, {"Idempotency-Key": "key-1"}
    async with release(settings, OpenedLater) as (_, client):
        first = await client.post("/stream", json=body, headers=headers)
        again = await client.post("/stream", json=body, headers=headers)
        assert (first.json(), again.json()) == ("ADA is open", "ADA is open")
        assert again.headers["idempotency-replayed"] == "true"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/accounts", {"account": "ada", "at": "2026-01-01T01:00:00+01:00"}),
        ("/accounts?loudly=1", {"account": "ada", "at": "2026-01-01T00:00:00Z"}),
        ("/accounts/ada", {"account": "ada", "at": "2026-01-01T00:00:00Z"}),
    ],
    ids=["time of another zone", "query", "path"],
)
async def test_what_is_sent_otherwise_is_another_request(
    settings: Callable[..., Settings], db: asyncpg.Connection, path: str, body: dict[str, object]
) -> None:
    headers, first = {"Idempotency-Key": "key-1"}, {"account": "ada", "at": "2026-01-01T00:00:00Z"}
    async with release(settings, Opened) as (_, client):
        assert (await client.post("/accounts", json=first, headers=headers)).status_code == 200
        answer = await client.post(path, json=body, headers=headers)
    assert_problem(answer, 422, "belongs to an earlier request with other content", type=DRAFT)


async def test_an_answer_that_version_1_0_0_has_stored_is_found(
    settings: Callable[..., Settings], db: asyncpg.Connection
) -> None:
    """It has compared events, as a receiver still does that is not told what was sent."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    async with release(settings, Opened) as (app, client):
        receiver: Receiver = app.state.receiver
        await receiver.receive(Opened(account="ada", at=at), key="key-1", consumer="open")
        body = {"account": "ada", "at": "2026-01-01T00:00:00Z"}
        headers = {"Idempotency-Key": "key-1"}
        again = await client.post("/accounts", json=body, headers=headers)
        assert again.headers["idempotency-replayed"] == "true"
        other = await client.post("/accounts", json={"account": "bob"}, headers=headers)
        assert other.status_code == 422


async def test_a_receiver_that_is_not_told_what_was_sent_leaves_defaults_out(
    settings: Callable[..., Settings], db: asyncpg.Connection
) -> None:
    async with release(settings, OpenedLater) as (app, _):
        receiver: Receiver = app.state.receiver
        first, again = [
            await receiver.receive(OpenedLater(account="ada"), key="key-1", consumer="open")
            for _ in range(2)
        ]
    assert (first.is_repeat, again.is_repeat) == (False, True)


async def test_a_request_to_pay_in_is_not_that_of_another_account(
    client: httpx2.AsyncClient, app: FastAPI
) -> None:
    @app.post("/accounts/{account}/deposits")
    async def pay_in_to(account: str, amount: int, request: Idempotent) -> Any:
        return await request.receive(Deposited(account=account, amount=amount), consumer=CASHIER)

    headers = {"Idempotency-Key": "key-1"}
    answers = [
        await client.post(f"/accounts/{one}/deposits?amount=5", headers=headers)
        for one in ("ada", "ada", "bob")
    ]
    assert [one.status_code for one in answers] == [200, 200, 422]


async def test_a_client_that_has_gone_before_its_body_came_is_no_failure(app: FastAPI) -> None:
    @app.post("/emptied")
    async def empty(request: Idempotent) -> Any:
        event = Deposited(account="ada", amount=5)
        return await request.receive(event, consumer=CASHIER)

    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/emptied",
        "query_string": b"",
        "headers": [(b"idempotency-key", b"key-1")],
    }
    await app(scope, receive, send)
    assert sent[0]["status"] == 400
