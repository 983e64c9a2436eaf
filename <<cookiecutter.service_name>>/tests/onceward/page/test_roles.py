"""What the page needs of the database, and what it says where that is not there."""

import re
from collections.abc import AsyncIterator, Callable

import asyncpg
import pytest
import sqlalchemy.exc
from sqlalchemy import make_url

from onceward.page import errors
from onceward.settings import Settings

from .conftest import PAGES, TOKEN, Opened, buried, csrf, log_in
from tests.contract.bank import Deposit
from tests.onceward.integration.applier import Applier
from tests.onceward.integration.grantees import DIRECTLY, Roles, splitting


@pytest.fixture
async def granted(server_url: str, direct_url: str, db: asyncpg.Connection) -> AsyncIterator[Roles]:
    """Roles that may do what they may."""
    async with splitting(server_url, direct_url, db) as made:
        yield made


@DIRECTLY
async def test_the_operators_role_is_enough(
    opened: Opened, granted: Roles, applier: Applier, db: asyncpg.Connection
) -> None:
    id = await buried(applier, db, Deposit(1), Deposit(2), Deposit(3), Deposit(4, "bob"))
    _, other, edited, _ = await db.fetchval(
        "SELECT array_agg(encode(key, 'hex') ORDER BY \"offset\") FROM pipeline.backlog"
    )
    await db.execute(
        "INSERT INTO pipeline.scheduled (name, due_at, topic, event_id, source, type, content_type)"
        " VALUES ('n', '2030-01-02 03:04+00', 't', 'a', '/s', 'x', 'y')"
    )
    await db.execute(
        "INSERT INTO pipeline.outbox_rejected (id, created_at, topic, event_id, source, type,"
        " content_type, died_at, reason)"
        " SELECT n, now(), 't', n, '/s', 'x', 'y', now(), 'too large'"
        " FROM generate_series(1, 2) AS n"
    )
    async with opened(url=granted.of("operator"), token=TOKEN, send=True) as client:
        await log_in(client)
        for path in (*PAGES, "/send", "/dead/preview", f"/dead/{id}", "/events/1"):
            answer = await client.get(path)
            assert answer.status_code == 200, answer.text
            assert "Not known" not in answer.text
        form = {
            "csrf": await csrf(client),
            "why": "no",
            "name": "n",
            "payload": '{"account": "ada", "amount": 5}',
            "until": "2100-01-01T00:00:00+00:00",
            "key": "bob",
            "what": f"topic {applier.slot.topic}",
        }
        for path, status in (
            (f"/dead/{edited}/copy", 200),
            ("/dead/discard", 200),
            (f"/dead/{id}/redrive", 200),
            (f"/dead/{other}/discard", 200),
            ("/events/1/redrive", 200),
            ("/events/2/discard", 200),
            ("/scheduled/cancel", 303),
        ):
            answer = await client.post(path, data=form)
            assert answer.status_code == status, answer.text
        answer = await client.post("/stops/pause", data=form | {"key": ""})
        assert answer.status_code == 303, answer.text
        message = {"what": f"{applier.slot.topic} deposited", "payload.account": "ada"}
        answer = await client.post("/send/message", data=form | message | {"payload.amount": "1"})
        assert answer.status_code == 200, answer.text
        position = {"what": "seek", "topic": applier.slot.topic, "to": "earliest", "shown": "0:0"}
        for path, given, role in (
            ("/positions/move", position, "service"),
            ("/retention/skip-archive", {"day": "2020-01-01"}, "retention"),
        ):
            answer = await client.post(path, data=form | given)
            assert (answer.status_code, f"takes the {role}" in answer.text) == (409, True)


@DIRECTLY
async def test_another_role_is_told_what_it_may_not_see_and_which_may(
    opened: Opened, granted: Roles
) -> None:
    async with opened(url=granted.of("relay")) as client:
        await log_in(client)
        answer = await client.get("/dead")
        assert answer.status_code == 503
        assert "permission denied for table backlog" in answer.text
        assert "that of the operator" in answer.text
        text = (await client.get("/")).text
        assert "Not known: backlog" in text
        assert re.search('>Backlog</a></h2>\\s*<p class="figure">not known<', text)


@DIRECTLY
async def test_a_wrong_password_is_told(opened: Opened, direct_url: str) -> None:
    url = make_url(direct_url).set(username="nobody", password="nothing")
    async with opened(url=url.render_as_string(hide_password=False)) as client:
        await log_in(client)
        for path in ("/", "/dead"):
            answer = await client.get(path)
            assert answer.status_code == 503
            assert "PIPELINE_DATABASE_URL" in answer.text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (asyncpg.LockNotAvailableError(), "does not answer in time"),
        (asyncpg.QueryCanceledError(), "does not answer in time"),
        (sqlalchemy.exc.TimeoutError(), "does not answer in time"),
        (TimeoutError(), "does not answer in time"),
        (asyncpg.CannotConnectNowError(), "can't be used: CannotConnectNowError"),
        (ConnectionRefusedError(), "can't be used: ConnectionRefusedError"),
    ],
)
def test_locks_and_a_pool_that_is_full_are_no_outage(
    settings: Callable[..., Settings], error: Exception, said: str
) -> None:
    assert said in (errors.describe(error, settings()) or "")


async def test_a_database_without_tables_is_told(opened: Opened, db: asyncpg.Connection) -> None:
    await db.execute("DROP SCHEMA pipeline CASCADE")
    async with opened() as client:
        await log_in(client)
        for path in ("/", "/dead"):
            answer = await client.get(path)
            assert answer.status_code == 503
            assert "service migrate" in answer.text
