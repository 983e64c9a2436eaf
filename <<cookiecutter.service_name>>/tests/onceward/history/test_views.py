"""The pages of the package on the operations page."""

import asyncio
import html
import json
import re
from collections.abc import AsyncIterator
from urllib.parse import parse_qsl

import asyncpg
import httpx2
import pytest

from onceward.history import views

from .conftest import Take
from .test_correct import _AGE, Undoing, deployed, undoing, work_off  # noqa: F401 (fixtures)
from .test_timeline import TRACE, TRACED
from tests.contract.bank import Deposit
from tests.onceward.integration.applier import Applier
from tests.onceward.integration.bank import Bank
from tests.onceward.page.conftest import (
    TOKEN,
    Opened,
    buried,
    csrf,
    log_in,
    opened,  # noqa: F401 (fixture)
)
from tests.onceward.page.test_furnished import rows
from tests.onceward.page.test_page import HOSTILE, assert_harmless
from tests.servers.waiting import eventually


@pytest.fixture
async def ann(opened: Opened) -> AsyncIterator[httpx2.AsyncClient]:  # noqa: F811
    """Return the page as Ann sees it, who is logged in."""
    async with opened(modules=[views]) as client:
        await log_in(client)
        yield client


async def test_a_letter_leads_to_the_timeline_of_its_key(
    ann: httpx2.AsyncClient, applier: Applier, db: asyncpg.Connection
) -> None:
    id = await buried(applier, db, Deposit(1, "a & b"))
    text = (await ann.get(f"/dead/{id}")).text
    assert 'href="/timeline?key=a+%26+b"' in text or 'href="/timeline?key=a%20%26%20b"' in text
    found = await rows(ann, "/timeline", key="a & b")
    assert [row[1] for row in found] == ["dead"]
    for name in views.NAMES.values():
        assert f">{name}</a>" in text, "in the navigation"


async def test_a_message_that_the_page_sends_leads_to_the_timeline_of_its_key(
    opened: Opened,  # noqa: F811
    bank: Bank,
) -> None:
    async with opened(token=TOKEN, send=True, modules=[views]) as client:
        await log_in(client)
        form = {"csrf": await csrf(client, "/send"), "what": f"{bank.deposits} deposited"}
        filled = {"payload.account": "a & b", "payload.amount": "1"}
        text = (await client.post("/send/message", data=form | filled)).text
        (path,) = re.findall('href="(/timeline[?][^"]*)"', text)
        (id,) = re.findall("with the id <code>([^<]+)</code>", text)
        assert dict(parse_qsl(html.unescape(path).partition("?")[2])) == {"key": "a & b"}
        (row,) = await rows(client, "/timeline", key="a & b", seconds="15")
    assert row[1] == "not read"
    assert id in row[3]


async def test_a_trace_is_linked_to_where_the_setting_says(
    ann: httpx2.AsyncClient,
    opened: Opened,  # noqa: F811
    applier: Applier,
) -> None:
    await applier.apply(Deposit(1, headers=TRACED))
    text = (await ann.get("/timeline?key=ada")).text
    assert text.count(f"trace <code>{TRACE}</code>") == 2, "of the message and its event"
    chosen = {"token": TOKEN, "trace_url": "https://traces.test/{trace_id}"}
    async with opened(modules=[views], **chosen) as client:
        await log_in(client)
        text = (await client.get("/timeline?key=ada")).text
    assert re.findall('href="(https?:[^"]*)"', text) == [f"https://traces.test/{TRACE}"] * 2


async def test_a_timeline_covers_the_requested_period_and_can_be_downloaded(
    ann: httpx2.AsyncClient, applier: Applier, take: Take, db: asyncpg.Connection
) -> None:
    await take(applier, Deposit(1))
    await db.execute("UPDATE pipeline.inbox SET created_at = created_at - interval '7 hours'")
    assert {row[1] for row in await rows(ann, "/timeline", key="ada")} == {"staged"}
    wanted = {"key": "ada", "since": "8h", "seconds": "15"}
    whats = {"applied", "arrived", "staged"}
    assert {row[1] for row in await rows(ann, "/timeline", **wanted)} == whats
    text = (await ann.get("/timeline", params=wanted)).text
    assert 'name="since" value="8h"' in text
    (path,) = re.findall('href="(/timeline.json[^"]*)"', text)
    answer = await ann.get(html.unescape(path))
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.headers["content-disposition"] == 'attachment; filename="timeline.jsonl"'
    *found, last = map(json.loads, answer.content.splitlines())
    assert {one["what"] for one in found} == whats
    assert last == {"unknown": {}, "not_searched": []}


@pytest.mark.parametrize(
    "wrong", [{"since": "soon"}, {"seconds": "0"}, {"seconds": "16"}, {"seconds": "nan"}], ids=str
)
async def test_a_timeline_of_a_time_that_is_none_is_refused(
    ann: httpx2.AsyncClient, wrong: dict[str, str]
) -> None:
    assert (await ann.get("/timeline.json")).status_code == 409, "of which key?"
    for path in ("/timeline", "/timeline.json"):
        answer = await ann.get(path, params={"key": "ada", **wrong})
        assert answer.status_code == 409
        assert "Refused" in answer.text


async def test_what_is_hostile_is_shown_as_text(
    ann: httpx2.AsyncClient, applier: Applier, db: asyncpg.Connection
) -> None:
    await buried(applier, db, Deposit(1, HOSTILE, id=HOSTILE))
    await db.execute("UPDATE pipeline.backlog SET type = $1, release = '1.4.2'", HOSTILE)
    assert_harmless((await ann.get("/timeline", params={"key": HOSTILE})).text)
    assert_harmless((await ann.get("/affected", params={"release": "1.4.2"})).text)
    for path in ("/timeline?key=%00", "/affected?release=%00", "/correct?name=%00"):
        assert (await ann.get(path)).status_code == 409


async def test_a_release_is_counted(
    ann: httpx2.AsyncClient, applier: Applier, take: Take, bank: Bank, db: asyncpg.Connection
) -> None:
    await take(applier, Deposit(1), Deposit(2))
    found = await rows(ann, "/affected", release="1.4.2")
    assert [row[:4] for row in found] == [
        ["2", "message", "deposit", bank.deposits],
        ["1", "aggregate", "-", bank.balances],
        ["2", "event", "-", bank.balances],
    ]
    assert await rows(ann, "/affected", release="2") == []


async def test_a_correction_is_previewed_begun_with_a_reason_and_cancelled(
    ann: httpx2.AsyncClient,
    deployed: Undoing,  # noqa: F811
    applier: Applier,
    take: Take,
    db: asyncpg.Connection,
) -> None:
    await take(applier, Deposit(1), Deposit(2))
    await db.execute(_AGE)
    wanted = {"name": "undo", "release": "1.4.2"}
    assert [row[:3] for row in await rows(ann, "/correct", **wanted)] == [["2", "0", "0"]]
    form = {**wanted, "csrf": await csrf(ann, "/correct?name=undo&release=1.4.2")}
    assert (await ann.post("/correct/begin", data=form)).status_code == 409, "why?"
    assert await applier.backlog() == []

    async def is_done() -> bool:
        return "undo of 1.4.2: 2 handed; done" in (await ann.get("/correct")).text

    for _ in range(2):
        begun = await ann.post("/correct/begin", data={**form, "why": "a fee"})
        assert begun.status_code == 303
        await eventually(is_done)
        cancelled = await ann.post("/correct/cancel", data={**form, "why": "not so"})
        assert "Cancelled: 2." in cancelled.text
        assert await applier.backlog() == []
    await ann.post("/correct/begin", data={**form, "why": "a fee"})
    await eventually(is_done)
    await work_off(applier)
    assert sorted(deployed.made) == [1, 2]
    audit = await db.fetch("SELECT who, action FROM pipeline.audit ORDER BY id")
    assert {row["who"] for row in audit} == {"ann"}
    assert [row["action"] for row in audit] == [*("correct", "cancel") * 2, "correct"]


async def test_a_correction_has_a_rate_and_selects_only_newer_messages(
    ann: httpx2.AsyncClient,
    deployed: Undoing,  # noqa: F811
    applier: Applier,
    take: Take,
    db: asyncpg.Connection,
) -> None:
    await take(applier, Deposit(1), Deposit(2))
    await db.execute(_AGE)
    wanted = {"name": "undo", "release": "1.4.2"}
    assert await rows(ann, "/correct", **wanted, newer="1s") == []
    assert [row[0] for row in await rows(ann, "/correct", **wanted, newer="7d")] == ["2"]
    assert (await ann.get("/correct", params={**wanted, "newer": "soon"})).status_code == 409
    form = {**wanted, "newer": "7d", "why": "a fee", "csrf": await csrf(ann)}
    for wrong in ({"rate": "0.5"}, {"rate": "1001"}, {"rate": "nan"}, {"newer": "soon"}):
        assert (await ann.post("/correct/begin", data={**form, **wrong})).status_code == 409
    assert await applier.backlog() == []
    assert (await ann.post("/correct/begin", data={**form, "rate": "1000"})).status_code == 303

    async def is_done() -> bool:
        return "undo of 1.4.2: 2 handed; done" in (await ann.get("/correct")).text

    await eventually(is_done)


async def test_one_is_handed_at_a_time(
    ann: httpx2.AsyncClient,
    deployed: Undoing,  # noqa: F811
    applier: Applier,
    take: Take,
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(views, "RATE", 1)
    await take(applier, *(Deposit(number) for number in range(1, 61)))
    await db.execute(_AGE)
    form = {"name": "undo", "release": "1.4.2", "why": "a fee", "csrf": await csrf(ann)}
    clicks = [ann.post("/correct/begin", data=form) for _ in range(2)]
    begun, again = sorted(await asyncio.gather(*clicks), key=lambda one: one.status_code)
    assert (begun.status_code, again.status_code) == (303, 409)
    assert "one at a time" in re.sub(r"\s+", " ", again.text)

    async def has_begun() -> bool:
        return bool(await applier.backlog())

    await eventually(has_begun)
    assert (await ann.post("/correct/cancel", data=form)).status_code == 200
    assert await applier.backlog() == []
