"""What each page shows of a service that has something of everything."""

import html
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from itertools import chain
from urllib.parse import parse_qsl

import asyncpg
import httpx2
import pytest

from onceward.page import reading

from .conftest import buried
from tests.contract.bank import Deposit
from tests.onceward.integration.applier import Applier
from tests.onceward.integration.bank import Bank
from tests.onceward.integration.outgoing import make_old_day

_SCHEDULE = """
INSERT INTO pipeline.scheduled (name, due_at, topic, key, event_id, source, type, content_type)
VALUES ('reminder', '2030-01-02 03:04:05+00', 'reminders', 'ada', 'a', '/s', 'remind', 'y')
"""


async def rows(client: httpx2.AsyncClient, path: str, **search: str) -> list[list[str]]:
    """Return the cells of a page's tables, as text."""
    text = (await client.get(path, params=search)).text
    return [
        [
            re.sub(r"\s+", " ", re.sub("<[^>]+>", "", cell)).strip()
            for cell in re.findall("<td[^>]*>(.*?)</td>", row, re.DOTALL)
        ]
        for row in re.findall("<tr>(<td.*?)</tr>", text, re.DOTALL)
    ]


async def ids(client: httpx2.AsyncClient, **search: str) -> set[str]:
    """Return the keys of the dead letters that a search finds."""
    return {cells[4] for cells in await rows(client, "/dead", **search)}


async def test_the_overview_shows_plots_and_who_owns_the_shards(
    ann: httpx2.AsyncClient, db: asyncpg.Connection, applier: Applier
) -> None:
    await buried(applier, db, Deposit(1), Deposit(2))
    await db.execute(_SCHEDULE)
    await db.execute(
        "UPDATE pipeline.outbox_cursor SET owner = 'relay ' || (shard / 4 % 2),"
        " lease_until = clock_timestamp() + interval '1 hour' WHERE shard < 9"
    )
    text = (await ann.get("/")).text
    assert [cells for cells in await rows(ann, "/") if cells[0].startswith("relay")] == [
        ["relay 0", "5: 0-3, 8"],
        ["relay 1", "4: 4-7"],
    ]
    assert "55 shards have no relay" in text
    tiles = re.findall(r'<section class="card tile.*?</section>', text, re.DOTALL)
    assert all("<svg" in one for one in tiles)
    figures = {
        re.sub("<[^>]+>", "", one.partition("</h2>")[0]).strip(): re.findall("<p[^>]*>(.*?)<", one)
        for one in tiles
    }
    assert figures["Dead letters"] == ["2", "need a decision"]
    assert figures["Scheduled"] == ["1", "next 2030-01-02 03:04:05Z"]


async def test_the_backlog_page_shows_waiting_count_and_due_time_per_key(
    ann: httpx2.AsyncClient, db: asyncpg.Connection, bank: Bank, applier: Applier
) -> None:
    await buried(applier, db, Deposit(1, "ada"), Deposit(2, "ada"), Deposit(3, "bob"))
    await db.execute(
        "UPDATE pipeline.backlog SET died_at = NULL, reason = 'transient', attempts = 3,"
        " due_at = CASE \"offset\" WHEN 0 THEN '2030-01-02 03:04:05+00'::timestamptz END"
    )
    waits = ["transient", "3"]
    assert await rows(ann, "/backlog") == [
        ["ada", "deposit", bank.deposits, "2", "2030-01-02 03:04:05Z", *waits],
        ["bob", "deposit", bank.deposits, "1", "behind another", *waits],
    ]


async def test_a_key_of_the_backlog_leads_to_its_messages(
    ann: httpx2.AsyncClient, db: asyncpg.Connection, applier: Applier
) -> None:
    await buried(applier, db, Deposit(1, "a & b"), Deposit(2, "a & b"), Deposit(3, "bob"))
    await db.execute("UPDATE pipeline.backlog SET died_at = NULL, due_at = now()")
    text = (await ann.get("/backlog")).text
    (link,) = re.findall('href="([^"]+)">a &amp; b', text)
    path, _, query = html.unescape(link).partition("?")
    found = await rows(ann, path, **dict(parse_qsl(query)))
    assert [cells[4] for cells in found] == ["a &amp; b"] * 2
    await db.execute("UPDATE pipeline.backlog SET consumer = '' WHERE \"offset\" = 0")
    links = re.findall('href="([^"]+)">a &amp; b', (await ann.get("/backlog")).text)
    assert len(links) == 2, "one is of no consumer"
    for link in links:
        path, _, query = html.unescape(link).partition("?")
        assert len(await rows(ann, path, **dict(parse_qsl(query)))) == 1, link
    # A search can't ask for these.
    for key in (b"\xff", b" ", b"\0", b"x" * 5_000, None):
        await db.execute("UPDATE pipeline.backlog SET record_key = $1", key)
        answer = await ann.get("/backlog")
        assert answer.status_code == 200
        assert "key=" not in answer.text


async def test_the_scheduled_show_when_each_is_due(
    ann: httpx2.AsyncClient, db: asyncpg.Connection
) -> None:
    await db.execute(_SCHEDULE)
    ((*cells, _),) = await rows(ann, "/scheduled")
    assert cells == ["2030-01-02 03:04:05Z", "reminder", "remind", "reminders", "ada"]


async def test_retention_shows_each_partition_until_when_it_stays_and_what_holds_it(
    ann: httpx2.AsyncClient, db: asyncpg.Connection
) -> None:
    await make_old_day(db)
    shown = {name: [until, held] for name, until, held in await rows(ann, "/retention")}
    until, held = shown["outbox_p20200101"]
    assert datetime.fromisoformat(until) < datetime(2030, 1, 1, tzinfo=UTC)
    assert held.startswith("it is not closed yet")
    inbox = [place for name, place in shown.items() if name.startswith("inbox_g")]
    assert ["takes new markers", ""] in inbox
    days = [name for name in shown if name.startswith("outbox_p")]
    there = await db.fetchval(
        "SELECT count(*) FROM pg_inherits WHERE inhparent = 'pipeline.outbox'::regclass"
    )
    assert len(days) == there


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("reason", "too old"),
        ("consumer", "notice"),
        ("type", "withdrawn"),
        ("topic", "other"),
        ("event", "the second"),
        ("key", "bob"),
    ],
)
async def test_a_search_finds_by_each_of_its_fields_and_nothing_else(
    ann: httpx2.AsyncClient, db: asyncpg.Connection, applier: Applier, name: str, given: str
) -> None:
    await buried(applier, db, Deposit(1, "ada"), Deposit(2, "bob", id="the second"))
    await db.execute(
        "UPDATE pipeline.backlog SET reason = 'too old', consumer = 'notice', type = 'withdrawn',"
        " topic = 'other' WHERE \"offset\" = 1"
    )
    assert await ids(ann) == {"ada", "bob"}
    assert await ids(ann, **{name: given}) == {"bob"}
    assert await ids(ann, **{name: given}, state="waiting") == set()


async def test_a_search_finds_by_state(
    ann: httpx2.AsyncClient, db: asyncpg.Connection, applier: Applier
) -> None:
    await buried(applier, db, Deposit(1, "ada"), Deposit(2, "bob"), Deposit(3, "eve"))
    change = 'UPDATE pipeline.backlog SET {} WHERE "offset" = {}'
    await db.execute(change.format("died_at = NULL, due_at = now()", 1))
    await db.execute(change.format("discarded_at = now()", 2))
    assert await ids(ann, state="dead") == {"ada"}
    assert await ids(ann, state="waiting") == {"bob"}
    assert await ids(ann, state="discarded") == {"eve"}


async def pages(client: httpx2.AsyncClient, path: str, cell: str) -> AsyncIterator[list[str]]:
    """Yield what each page of a list has of this pattern, at most ten pages."""
    for _ in range(10):
        text = (await client.get(path)).text
        yield re.findall(cell, text)
        older = re.search('<a href="([^"]+)">older ones', text)
        if older is None:
            return
        path = html.unescape(older[1])


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("are_discarded", [False, True])
async def test_older_entries_are_found_page_by_page_each_once(
    ann: httpx2.AsyncClient,
    db: asyncpg.Connection,
    applier: Applier,
    monkeypatch: pytest.MonkeyPatch,
    at_once: bool,
    are_discarded: bool,
) -> None:
    """Also if those of a page are discarded before the next one is asked for."""
    monkeypatch.setattr(reading, "_LISTED", 2)
    names = ["ada", "bob", "eve", "joe", "sue"]
    for number, name in enumerate(names):
        await buried(applier, db, Deposit(number, name))
    if at_once:
        await db.execute("UPDATE pipeline.backlog SET died_at = now()")
    found = list[list[str]]()
    async for keys in pages(ann, "/dead?state=dead", 'data-label="Key">([^<]*)<'):
        found.append(keys)
        if are_discarded:
            await db.execute(
                "UPDATE pipeline.backlog SET discarded_at = now() WHERE record_key = ANY ($1)",
                [one.encode() for one in keys],
            )
    assert [len(keys) for keys in found] == [2, 2, 1]
    assert sorted(chain(*found)) == names


async def test_older_events_are_found_page_by_page_by_their_numbers(
    ann: httpx2.AsyncClient, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_LISTED", 2)
    await db.execute(
        "INSERT INTO pipeline.outbox_rejected (id, created_at, topic, event_id, source, type,"
        " content_type, died_at, reason)"
        " SELECT n, now(), 't', n, '/s', 'x', 'y', now(), 'too large'"
        " FROM generate_series(8, 12) AS n"
    )
    found = [some async for some in pages(ann, "/events", 'href="/events/([0-9]+)"')]
    assert found == [["12", "11"], ["10", "9"], ["8"]]


@pytest.mark.parametrize("given", ["", "x", "0", "-1", "é", "9" * 30])
async def test_a_place_that_is_none_is_at_the_newest(
    ann: httpx2.AsyncClient, db: asyncpg.Connection, applier: Applier, given: str
) -> None:
    await buried(applier, db, Deposit(1, "ada"))
    wanted = {"until": "2100-01-01T00:00:00+00:00", "after": given}
    assert [cells[4] for cells in await rows(ann, "/dead", **wanted)] == ["ada"]
    assert (await ann.get("/events", params=wanted)).status_code == 200


async def test_a_dead_letter_shows_its_headers_error_and_traceback(
    ann: httpx2.AsyncClient, db: asyncpg.Connection, applier: Applier
) -> None:
    headers = (("tenant", b"north & south"), ("binary", b"\xff\x00"))
    id = await buried(applier, db, Deposit(1, headers=headers))
    await db.execute(
        "UPDATE pipeline.backlog SET error = 'Reject: no <money>',"
        " traceback = E'Traceback:\\n  deposit\\nReject: no'"
    )
    text = (await ann.get(f"/dead/{id}")).text
    assert '<dt>tenant</dt><dd class="text">north &amp; south</dd>' in text
    assert '<dt>binary</dt><dd class="text">2 bytes, not UTF-8:\nff00</dd>' in text
    assert '<dt>Error</dt><dd class="text">Reject: no &lt;money&gt;</dd>' in text
    traceback = text.partition("<h2>Traceback</h2>")[2]
    assert "Traceback:\n  deposit\nReject: no</pre>" in traceback
