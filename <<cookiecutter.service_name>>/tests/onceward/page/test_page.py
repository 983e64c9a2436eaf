"""What is shown and how, and what forms change."""

import html
import logging
import re

import asyncpg
import httpx2
import pytest

from .conftest import TOKEN, Opened, buried, csrf, log_in
from tests.contract.bank import Deposit
from tests.onceward.integration.applier import Applier
from tests.onceward.integration.bank import Bank

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>\u202egnp.exe"


def assert_harmless(text: str) -> None:
    assert "<script>alert" not in text
    assert "<img" not in text
    assert '"&#39;>' not in text
    # A field holds what it was given.
    assert "\u202e" not in re.sub('value="[^"]*"', "", text)
    assert html.escape("<script>alert(1)</script>") in text
    assert len(text) < 200_000


def records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the log's lines about what people did."""
    return [one for one in caplog.records if one.name == "onceward.page.actions"]


def recorded(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    """Return what they say: what was done, by whom, and to what."""
    return [(one.message, vars(one)["operator"], vars(one)["id"]) for one in records(caplog)]


async def test_what_is_hostile_is_shown_as_text(
    ann: httpx2.AsyncClient, applier: Applier, db: asyncpg.Connection
) -> None:
    headers = ((HOSTILE, HOSTILE.encode()), (HOSTILE * 5_000, b"x" * 100_000))
    id = await buried(applier, db, Deposit(1, account=HOSTILE, id=HOSTILE, headers=headers))
    await db.execute(
        "UPDATE pipeline.backlog SET error = $1, traceback = $2, consumer = $1, topic = $1,"
        " type = $1, source = $1, traceparent = $1",
        HOSTILE,
        HOSTILE * 10_000,
    )
    for path in ("/dead", f"/dead/{id}"):
        assert_harmless((await ann.get(path)).text)
    for name in ("type", "key", "event", "topic", "consumer"):
        assert_harmless((await ann.get("/dead", params={name: HOSTILE})).text)
    await db.execute("UPDATE pipeline.backlog SET died_at = NULL, due_at = now()")
    assert_harmless((await ann.get("/backlog")).text)


async def test_what_is_hostile_in_events_is_shown_as_text(
    ann: httpx2.AsyncClient, db: asyncpg.Connection
) -> None:
    await db.execute(
        "INSERT INTO pipeline.scheduled (name, due_at, topic, key, event_id, source, type,"
        " content_type) VALUES ($1, '2030-01-02 03:04+00', $1, $2, $1, $1, $1, $1)",
        HOSTILE,
        HOSTILE.encode(),
    )
    await db.execute(
        "INSERT INTO pipeline.outbox_rejected (id, created_at, topic, key, payload, event_id,"
        " source, type, content_type, traceparent, died_at, reason, error)"
        " VALUES (1, now(), $1, $2, $2, $1, $1, $1, $1, $1, now(), 'too large', $1)",
        HOSTILE,
        HOSTILE.encode(),
    )
    for path in ("/scheduled", "/events", "/events/1"):
        assert_harmless((await ann.get(path)).text)


async def test_a_trace_is_linked_to_where_the_setting_says_and_nowhere_else(
    opened: Opened, applier: Applier, db: asyncpg.Connection
) -> None:
    id = await buried(applier, db, Deposit(1))
    async with opened(token=TOKEN, trace_url="https://traces.test/{trace_id}") as client:
        await log_in(client)
        for trace, link in (
            ("0af7651916cd43dd8448eb211c80319c", "0af7651916cd43dd8448eb211c80319c"),
            ("javascript:alert(1)", None),
            ("/../../evil.test?01234567890123?", None),
        ):
            await db.execute("UPDATE pipeline.backlog SET traceparent = $1", f"00-{trace}-b7-01")
            links = re.findall('href="(https?:[^"]*)"', (await client.get(f"/dead/{id}")).text)
            assert links == ([f"https://traces.test/{link}"] if link else [])


@pytest.mark.parametrize(
    "given", ["", "\0", "%00", "' OR 1=1 --", "x" * 10_000, "\u202e", "\ud800"]
)
async def test_any_search_is_answered(ann: httpx2.AsyncClient, given: str) -> None:
    text = given.encode("utf-8", "surrogatepass")
    for name in ("reason", "consumer", "event", "type", "topic", "key", "release", "state"):
        answer = await ann.get("/dead", params={name: text})
        assert answer.status_code in (200, 409)


@pytest.mark.parametrize(
    "id", ["0", "-1", "9223372036854775807", "9223372036854775808", "9" * 5_000, "%00", "x", "%F0"]
)
async def test_what_is_not_there_is_told_so(ann: httpx2.AsyncClient, id: str) -> None:
    token = await csrf(ann)
    for kind in ("dead", "events"):
        assert (await ann.get(f"/{kind}/{id}")).status_code in (404, 409)
        for what in ("redrive", "discard"):
            form = {"csrf": token, "why": "no"}
            answer = await ann.post(f"/{kind}/{id}/{what}", data=form)
            assert answer.status_code in (404, 409)


async def test_a_search_finds_what_it_asks_for(
    ann: httpx2.AsyncClient, applier: Applier, db: asyncpg.Connection
) -> None:
    await buried(applier, db, Deposit(1, "ada"), Deposit(2, "bob"))
    text = (await ann.get("/dead", params={"key": "bob"})).text
    assert ">bob</td>" in text
    assert ">ada</td>" not in text
    await db.execute("UPDATE pipeline.backlog SET release = '1.4.2' WHERE record_key = 'ada'")
    text = (await ann.get("/dead", params={"release": "1.4.2"})).text
    assert ">ada</td>" in text
    assert ">bob</td>" not in text
    assert '<input name="release" value="1.4.2">' in text


async def test_discarding_a_dead_letter_stores_the_reason_and_logs_the_user(
    ann: httpx2.AsyncClient,
    applier: Applier,
    db: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    id = await buried(applier, db, Deposit(1))
    caplog.set_level(logging.WARNING, "onceward.page")
    answer = await ann.post(
        f"/dead/{id}/discard",
        content=f"csrf={await csrf(ann)}&why=no+more",
        headers={"content-type": "application/x-www-form-urlencoded; charset=UTF-8"},
    )
    assert answer.status_code == 200
    row = await db.fetchrow("SELECT discarded_by, discarded_why FROM pipeline.backlog")
    assert tuple(row) == ("ann", "no more")
    assert recorded(caplog) == [
        ("requested on the page: discard dead letters", "ann", id),
        ("done on the page: discard dead letters", "ann", id),
    ]
    assert (
        await ann.post(f"/dead/{id}/redrive", data={"csrf": await csrf(ann)})
    ).status_code == 409


async def test_a_dead_letter_is_redriven_and_handled(
    ann: httpx2.AsyncClient,
    bank: Bank,
    applier: Applier,
    db: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    id = await buried(applier, db, Deposit(1))
    caplog.set_level(logging.WARNING, "onceward.page")
    answer = await ann.post(f"/dead/{id}/redrive", data={"csrf": await csrf(ann)})
    assert answer.status_code == 200
    assert "Redriven: 1." in answer.text
    assert recorded(caplog) == [
        ("requested on the page: redrive dead letters", "ann", id),
        ("done on the page: redrive dead letters", "ann", id),
    ]
    await applier.work_off()
    assert bank.calls == [1]
    assert await applier.backlog() == []


async def test_an_identity_mismatch_is_shown_with_both_hashes(
    ann: httpx2.AsyncClient, applier: Applier, db: asyncpg.Connection
) -> None:
    id = await buried(applier, db, Deposit(1))
    assert "is stored for this id" not in (await ann.get(f"/dead/{id}")).text
    await db.execute("UPDATE pipeline.backlog SET hash = '\\xab01', remembered_hash = '\\xcd02'")
    text = (await ann.get(f"/dead/{id}")).text
    stored = "<code>cd02</code> is stored for this id"
    assert f"<code>ab01</code> was received, {stored}" in text


async def test_a_scheduled_event_is_cancelled(
    ann: httpx2.AsyncClient, db: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await db.execute(
        "INSERT INTO pipeline.scheduled (name, due_at, topic, event_id, source, type, content_type)"
        " VALUES ($1, '2030-01-02 03:04+00', 't', 'a', '/s', 'x', 'y')",
        HOSTILE,
    )
    caplog.set_level(logging.WARNING, "onceward.page")
    form = {"csrf": await csrf(ann, "/scheduled"), "name": HOSTILE}
    assert (await ann.post("/scheduled/cancel", data=form)).status_code == 409, "why?"
    assert await db.fetchval("SELECT count(*) FROM pipeline.scheduled") == 1
    for status in (303, 409):
        answer = await ann.post("/scheduled/cancel", data={**form, "why": "paid twice"})
        assert answer.status_code == status
    assert [what for what, *_ in recorded(caplog)] == [
        "requested on the page: cancel",
        "done on the page: cancel",
        "requested on the page: cancel",
        "failed on the page: cancel: Refused: not scheduled, or published already",
    ]
    told = {(vars(one)["operator"], vars(one)["id"], vars(one)["why"]) for one in records(caplog)}
    assert told == {("ann", HOSTILE, "paid twice")}
    assert await db.fetchval("SELECT count(*) FROM pipeline.scheduled") == 0


async def test_dead_events_are_shown_discarded_and_redriven(
    ann: httpx2.AsyncClient, db: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "onceward.page")
    await db.execute(
        "INSERT INTO pipeline.outbox_rejected (id, created_at, topic, event_id, source, type,"
        " content_type, died_at, reason)"
        " SELECT n, now(), 't', n, '/s', 'x', 'y', now(), 'too large'"
        " FROM generate_series(1, 2) AS n"
    )
    assert "too large" in (await ann.get("/events/1")).text
    token = await csrf(ann)
    assert (
        await ann.post("/events/1/discard", data={"csrf": token, "why": "no"})
    ).status_code == 200
    assert (await ann.post("/events/2/redrive", data={"csrf": token})).status_code == 200
    rows = await db.fetch(
        "SELECT died_at IS NULL, discarded_by FROM pipeline.outbox_rejected ORDER BY id"
    )
    assert [tuple(row) for row in rows] == [(False, "ann"), (True, None)]
    assert recorded(caplog) == [
        ("requested on the page: discard dead events", "ann", "1"),
        ("done on the page: discard dead events", "ann", "1"),
        ("requested on the page: redrive dead events", "ann", "2"),
        ("done on the page: redrive dead events", "ann", "2"),
    ]


@pytest.mark.parametrize("what", ["redrive", "discard"])
async def test_changing_dead_events_times_out_after_a_third_of_the_lease(
    opened: Opened, db: asyncpg.Connection, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """So that no relay waits for longer than its own lease on a page that has been stopped."""
    await db.execute(
        "INSERT INTO pipeline.outbox_rejected (id, created_at, topic, event_id, source, type,"
        " content_type, died_at, reason)"
        " VALUES (1, now(), 't', 'a', '/s', 'x', 'y', now(), 'too large')"
    )
    async with opened(backlog_lease=3_600, token=TOKEN) as client:
        await log_in(client)
        form = {"csrf": await csrf(client, "/events/1"), "why": "no"}
        async with db.transaction():
            await db.execute("SELECT FROM pipeline.outbox_cursor FOR UPDATE")
            answer = await client.post(f"/events/1/{what}", data=form)
    assert answer.status_code == 503
    assert "due to lock timeout" in caplog.text
