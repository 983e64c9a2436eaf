"""Redriving and discarding a search at once, after a preview; the doctor; the words."""

import html
import logging
import re

import asyncpg
import httpx2
import pytest

from onceward.cli.words import WORDS

from .conftest import TOKEN, Opened, buried, csrf, log_in
from .test_furnished import rows
from .test_page import HOSTILE, assert_harmless, recorded
from tests.contract.bank import Deposit
from tests.onceward.integration.applier import Applier
from tests.onceward.integration.bank import Bank

_REJECTED = """
INSERT INTO pipeline.outbox_rejected
       (id, created_at, topic, event_id, source, type, content_type, died_at, reason)
SELECT n, now(), 't' || n % 2, n, '/s', 'x', 'y', now(), 'too large'
  FROM generate_series(1, 4) AS n
"""


def hidden(text: str) -> dict[str, str]:
    """Return the fields of a preview's forms, which a browser sends back."""
    found = re.findall('type="hidden" name="([^"]+)" value="([^"]*)"', text)
    return {name: html.unescape(value) for name, value in found}


async def preview(client: httpx2.AsyncClient, kind: str = "dead", **search: str) -> dict[str, str]:
    """Return what a preview of a search sends, together with a reason."""
    answer = await client.get(f"/{kind}/preview", params=search)
    assert answer.status_code == 200, answer.text
    return hidden(answer.text) | {"why": "no more"}


async def test_a_preview_counts_what_a_search_finds_and_changes_nothing(
    ann: httpx2.AsyncClient, bank: Bank, applier: Applier, db: asyncpg.Connection
) -> None:
    await buried(applier, db, Deposit(1, "ada"), Deposit(2, "bob"), Deposit(3, "ada"))
    await db.execute(
        "UPDATE pipeline.backlog SET consumer = 'gone' WHERE \"offset\" = 0;"
        "UPDATE pipeline.backlog SET reason = 'too old' WHERE \"offset\" = 1"
    )
    found = {cells[2]: cells for cells in await rows(ann, "/dead/preview")}
    assert found["gone"][0] == "1"
    assert "no consumer &#39;gone&#39;" in found["gone"][-1]
    by_reason = {cells[1]: cells for cells in await rows(ann, "/dead/preview")}
    assert "it is not known whether they were applied" in by_reason["too old"][-1]
    text = (await ann.get("/dead/preview")).text
    assert "<strong>Everything</strong> that is dead" in text
    assert "Redrive 1<" in text
    assert "Discard 3<" in text
    assert [cells[-1] for cells in await rows(ann, "/dead/preview", reason="too old")] == [
        "redriven"
    ]
    assert "Nothing of this search is dead" in (await ann.get("/dead/preview?key=eve")).text
    assert len([one for one in await applier.backlog() if one["died_at"]]) == 3


async def test_what_is_discarded_is_what_the_preview_has_counted(
    ann: httpx2.AsyncClient,
    applier: Applier,
    db: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await buried(applier, db, Deposit(1, "ada"), Deposit(2, "bob"), Deposit(3, "ada"))
    caplog.set_level(logging.WARNING, "onceward.page")
    form = await preview(ann, key="ada")
    await buried(applier, db, Deposit(4, "ada"))  # after the preview
    without = {**form, "why": " "}
    assert (await ann.post("/dead/discard", data=without)).status_code == 409
    answer = await ann.post("/dead/discard", data=form)
    assert "Discarded: 2." in answer.text
    left = await db.fetch(
        'SELECT "offset", discarded_by, discarded_why FROM pipeline.backlog ORDER BY "offset"'
    )
    discarded = ("ann", "no more")
    assert [tuple(one)[1:] for one in left] == [discarded, (None, None), discarded, (None, None)]
    assert recorded(caplog) == [
        ("requested on the page: discard dead letters", "ann", "key 'ada'"),
        ("done on the page: discard dead letters", "ann", "key 'ada'"),
    ]


async def test_what_is_redriven_is_handled_in_order_and_the_rest_stays_dead(
    ann: httpx2.AsyncClient, bank: Bank, applier: Applier, db: asyncpg.Connection
) -> None:
    await buried(applier, db, Deposit(1, "ada"), Deposit(2, "bob"), Deposit(3, "ada"))
    answer = await ann.post("/dead/redrive", data=await preview(ann, key="ada"))
    assert "Redriven: 2." in answer.text
    await applier.work_off()
    assert bank.calls == [1, 3]
    assert [one["record_key"] for one in await applier.backlog()] == [b"bob"]
    assert (await ann.post("/dead/redrive", data=await preview(ann, key="ada"))).status_code == 409


@pytest.mark.parametrize(
    "until", [None, "", "yesterday", "2026-01-01T00:00:00", "0001-01-01T00:00:00+14:00"]
)
@pytest.mark.parametrize("what", ["redrive", "discard"])
async def test_a_form_without_a_preview_changes_nothing(
    ann: httpx2.AsyncClient, applier: Applier, db: asyncpg.Connection, until: str | None, what: str
) -> None:
    await buried(applier, db, Deposit(1))
    form = await preview(ann)
    del form["until"]
    answer = await ann.post(
        f"/dead/{what}", data=form if until is None else form | {"until": until}
    )
    assert answer.status_code == 409
    assert "search again" in answer.text
    assert await db.fetchval("SELECT died_at IS NOT NULL FROM pipeline.backlog")


async def test_dead_events_are_searched_redriven_and_discarded_together(
    ann: httpx2.AsyncClient, db: asyncpg.Connection
) -> None:
    await db.execute(_REJECTED)
    assert len(await rows(ann, "/events", topic="t1")) == 2
    assert (
        "Redriven: 2."
        in (await ann.post("/events/redrive", data=await preview(ann, "events", topic="t1"))).text
    )
    assert (
        "Discarded: 2."
        in (await ann.post("/events/discard", data=await preview(ann, "events"))).text
    )
    found = await db.fetch(
        "SELECT died_at IS NULL, discarded_by FROM pipeline.outbox_rejected ORDER BY id"
    )
    assert [tuple(one) for one in found] == [(True, None), (False, "ann")] * 2


async def test_a_search_is_for_what_is_older_or_newer_than_a_time(
    ann: httpx2.AsyncClient, applier: Applier, db: asyncpg.Connection
) -> None:
    await buried(applier, db, Deposit(1, "ada"), Deposit(2, "bob"), Deposit(3, "eve"))
    await db.execute("UPDATE pipeline.backlog SET died_at = now() - \"offset\" * interval '2 h'")
    for search, keys in (
        ({"newer": "1h"}, {"ada"}),
        ({"older": "1h"}, {"bob", "eve"}),
        ({"older": "1h", "newer": "3h"}, {"bob"}),
    ):
        assert {cells[4] for cells in await rows(ann, "/dead", **search)} == keys
        form = await preview(ann, **search)
        assert f"Discard {len(keys)}<" in (await ann.get("/dead/preview", params=search)).text
    assert "Discarded: 1." in (await ann.post("/dead/discard", data=form)).text
    left = await db.fetch("SELECT record_key FROM pipeline.backlog WHERE discarded_at IS NULL")
    assert {row["record_key"] for row in left} == {b"ada", b"eve"}
    for wrong in ("soon", "-1h", "1"):
        assert (await ann.get("/dead", params={"newer": wrong})).status_code == 409


async def test_events_are_discarded_while_they_wait_and_letters_are_not(
    ann: httpx2.AsyncClient, applier: Applier, db: asyncpg.Connection
) -> None:
    await db.execute(_REJECTED)
    await db.execute("UPDATE pipeline.outbox_rejected SET died_at = NULL WHERE topic = 't1'")
    assert 'href="/events/preview?' in (await ann.get("/events?state=waiting")).text
    text = (await ann.get("/events/preview?state=waiting")).text
    assert "Discard 2<" in text
    assert "/events/redrive" not in text
    form = hidden(text) | {"why": "no such topic"}
    assert "Discarded: 2." in (await ann.post("/events/discard", data=form)).text
    found = await db.fetch("SELECT topic, discarded_why FROM pipeline.outbox_rejected ORDER BY id")
    assert [tuple(one) for one in found] == [("t1", "no such topic"), ("t0", None)] * 2
    await buried(applier, db, Deposit(1))
    await db.execute("UPDATE pipeline.backlog SET died_at = NULL")
    sent = await preview(ann, "events") | {"state": "waiting"}
    assert "Discarded: 0." in (await ann.post("/dead/discard", data=sent)).text


async def test_what_is_hostile_in_a_preview_is_shown_as_text(
    ann: httpx2.AsyncClient, applier: Applier, db: asyncpg.Connection
) -> None:
    await buried(applier, db, Deposit(1, account=HOSTILE, id=HOSTILE))
    await db.execute("UPDATE pipeline.backlog SET consumer = $1, topic = $1, type = $1", HOSTILE)
    assert_harmless((await ann.get("/dead/preview")).text)
    for name in ("type", "key", "event", "topic", "consumer"):
        assert_harmless((await ann.get("/dead/preview", params={name: HOSTILE})).text)
    form = await preview(ann, key=HOSTILE)
    assert form["key"] == HOSTILE
    assert "Discarded: 1." in (await ann.post("/dead/discard", data=form)).text


async def test_the_doctor_says_what_is_wrong_first_and_what_to_do(
    ann: httpx2.AsyncClient, db: asyncpg.Connection
) -> None:
    await rows(ann, "/doctor")  # it connects; a copy is refused later connections
    await db.execute("UPDATE pipeline.outbox_cluster SET system_identifier = 1")
    found = await rows(ann, "/doctor")
    levels = [cells[0] for cells in found]
    assert levels == sorted(levels, key=["wrong", "warning", "ok"].index)
    assert ["wrong", "cluster"] in [cells[:2] for cells in found]
    advice = {cells[1]: cells[3] for cells in found}
    assert "service adopt" in advice["cluster"]
    assert {"kafka", "clock", "server"} < advice.keys()


async def test_the_doctor_makes_the_other_checks_if_postgresql_is_away(opened: Opened) -> None:
    url = "postgresql+asyncpg://nobody@127.0.0.1:1/nothing"
    async with opened(url=url, token=TOKEN) as client:
        await log_in(client)
        found = {cells[1]: cells[0] for cells in await rows(client, "/doctor")}
    assert found["postgresql"] == "wrong"
    assert found["kafka"] == "ok"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("COMMENT ON SCHEMA pipeline IS 'another'", "is that of service another"),
        ("UPDATE pipeline.outbox_cluster SET database_oid = 1", "the database is not adopted"),
    ],
    ids=["of another service", "a copy"],
)
async def test_the_page_refuses_to_show_or_change_another_services_database(
    opened: Opened, db: asyncpg.Connection, applier: Applier, change: str, told: str
) -> None:
    await buried(applier, db, Deposit(1))
    await db.execute(change)
    async with opened() as client:
        await log_in(client)
        for path in ("/", "/dead", "/backlog", "/doctor"):
            assert told in (await client.get(path)).text
        (letter,) = await db.fetch("SELECT left(encode(key, 'hex'), 16) FROM pipeline.backlog")
        form = {"csrf": await csrf(client, "/words"), "why": "x"}
        done = await client.post(f"/dead/{letter[0]}/discard", data=form)
        assert told in done.text
    assert (
        await db.fetchval("SELECT count(*) FROM pipeline.backlog WHERE discarded_at IS NULL") == 1
    )


async def test_every_figure_of_the_overview_and_every_reason_is_explained(
    ann: httpx2.AsyncClient, bank: Bank
) -> None:
    text = (await ann.get("/")).text
    headings = re.findall('<h2 title="([^"]*)">(?:<a[^>]*>)?([^<]+)', text)
    assert len(headings) == 13
    meanings = {name: one["meaning"] for name, one in WORDS.items()}
    assert {name: html.unescape(title) for title, name in headings}.items() <= meanings.items()
    page = html.unescape((await ann.get("/words")).text)
    assert all(text in page for one in WORDS.values() for text in one.values())
    explained = {cells[0] for cells in await rows(ann, "/words")}
    assert {"attempts used up", "identity mismatch", "too large"} < explained


async def test_a_preview_needs_a_session_and_its_forms_the_sessions_secret(
    opened: Opened, ann: httpx2.AsyncClient, applier: Applier, db: asyncpg.Connection
) -> None:
    await buried(applier, db, Deposit(1))
    form = await preview(ann)
    for path in ("/dead/discard", "/dead/redrive"):
        forged = {**form, "csrf": "x" * len(await csrf(ann))}
        assert (await ann.post(path, data=forged)).status_code == 403
        async with opened() as stranger:
            assert (await stranger.post(path, data=form)).status_code == 303
    assert await db.fetchval("SELECT died_at IS NOT NULL FROM pipeline.backlog")
