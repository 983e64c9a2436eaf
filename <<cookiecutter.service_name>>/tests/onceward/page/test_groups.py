"""Dead letters by reason, each group with a link to its preview."""

import html
import re

import asyncpg
import httpx2
import pytest

from onceward.page import actions

from .conftest import buried
from .test_many import hidden, preview
from tests.contract.bank import Deposit
from tests.onceward.integration.applier import Applier
from tests.onceward.integration.bank import Bank


@pytest.fixture
def bank() -> Bank:
    """Return a bank without topics: dead letters need none."""
    return Bank(deposits="deposits", balances="balances", name="bank")


def groups(text: str) -> dict[str, str]:
    """Return the groups of a page with the path of each preview."""
    found = re.findall(r'<li>([^<]+): <a href="([^"]+)">', text)
    return {name: html.unescape(path) for name, path in found}


async def test_dead_letters_are_grouped_by_reason_and_consumer_with_preview_links(
    ann: httpx2.AsyncClient, applier: Applier, db: asyncpg.Connection
) -> None:
    await buried(applier, db, *(Deposit(n, "ada") for n in range(1, 4)), Deposit(4, "bob"))
    assert groups((await ann.get("/dead")).text) == {}, "all have one reason"
    await db.execute(
        "UPDATE pipeline.backlog SET reason = 'too old', type = 'x' || \"offset\""
        ' WHERE "offset" > 0'
    )
    found = groups((await ann.get("/dead")).text)
    assert list(found) == ["3 too old, deposit", "1 rejected, deposit"]
    text = (await ann.get(found["3 too old, deposit"])).text
    assert "reason <strong>too old</strong>" in text
    assert "Discard 3<" in text
    of_ada = groups((await ann.get("/dead?key=ada")).text)
    assert list(of_ada) == ["2 too old, deposit", "1 rejected, deposit"]
    assert "Discard 2<" in (await ann.get(of_ada["2 too old, deposit"])).text
    assert groups((await ann.get("/dead?state=waiting")).text) == {}
    await db.execute("UPDATE pipeline.backlog SET consumer = 'gone' WHERE \"offset\" = 1")
    found = groups((await ann.get("/dead")).text)
    assert found.keys() == {"2 too old, deposit", "1 too old, gone", "1 rejected, deposit"}
    assert "Discard 1<" in (await ann.get(found["1 too old, gone"])).text


async def test_the_group_of_no_consumer_leads_to_a_preview_of_it_alone(
    ann: httpx2.AsyncClient, applier: Applier, db: asyncpg.Connection
) -> None:
    await buried(applier, db, Deposit(1, "ada"), Deposit(2, "bob"), Deposit(3, "eve"))
    await db.execute("UPDATE pipeline.backlog SET consumer = '' WHERE \"offset\" = 1")
    found = groups((await ann.get("/dead")).text)
    assert list(found) == ["2 rejected, deposit", "1 rejected, (none)"]
    preview_path = found["1 rejected, (none)"]
    assert "Discard 1<" in (await ann.get(preview_path)).text
    form = hidden((await ann.get(preview_path)).text) | {"why": "no more"}
    assert "Discarded: 1." in (await ann.post("/dead/discard", data=form)).text
    left = await db.fetch("SELECT consumer FROM pipeline.backlog WHERE discarded_at IS NULL")
    assert [row["consumer"] for row in left] == ["deposit"] * 2


async def test_a_letter_says_whether_it_holds_its_key_and_how_many_messages(
    ann: httpx2.AsyncClient, applier: Applier, db: asyncpg.Connection
) -> None:
    id = await buried(applier, db, Deposit(1, "ada"), Deposit(2, "ada"), Deposit(3, "bob"))
    await db.execute(
        'UPDATE pipeline.backlog SET holds = "offset" = 0,'
        ' died_at = CASE WHEN "offset" <> 1 THEN died_at END'
    )
    assert "it holds 1 messages of its key" in (await ann.get(f"/dead/{id}")).text
    found = re.findall('data-label="Holds its key">([^<]*)<', (await ann.get("/dead")).text)
    assert sorted(found) == ["1", "no"]


async def test_the_result_of_many_is_that_of_the_first(
    ann: httpx2.AsyncClient,
    applier: Applier,
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actions, "_FOLLOWED", 2)
    monkeypatch.setattr(actions, "_REDRIVE_SECONDS", 0.0)
    await buried(applier, db, Deposit(1, "ada"), Deposit(2, "bob"), Deposit(3, "eve"))
    text = (await ann.post("/dead/redrive", data=await preview(ann))).text
    assert "Redriven: 3. Result so far of the first 2: waiting: 2." in text
    audited = await db.fetch("SELECT who, action, why FROM pipeline.audit")
    assert {tuple(row) for row in audited} == {("ann", "redrive", "no more")}
