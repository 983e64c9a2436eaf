"""What is paused and resumed in a browser."""

import html
import re

import asyncpg
import httpx2
import pytest

from .conftest import csrf
from .test_furnished import rows
from .test_page import HOSTILE, assert_harmless
from tests.onceward.integration.bank import Bank

_AUDIT = "SELECT who, action, subject, why FROM pipeline.audit ORDER BY id"
_PAUSED = "SELECT count(*) FROM pipeline.throttle"


async def form(client: httpx2.AsyncClient, path: str = "/stops") -> dict[str, str]:
    """Return the hidden fields of the page's first form that resumes."""
    text = (await client.get(path)).text
    found = re.search(r'action="/stops/resume">(.*?)</form>', text, re.DOTALL)
    assert found
    fields = re.findall(r'name="(\w+)" value="([^"]*)"', found[1])
    return {name: html.unescape(value) for name, value in fields}


async def test_a_topic_is_paused_and_resumed_by_who_is_logged_in(
    ann: httpx2.AsyncClient, bank: Bank, db: asyncpg.Connection
) -> None:
    assert "Nothing is paused" in (await ann.get("/stops")).text
    what = f"topic {bank.deposits}"
    given = {"csrf": await csrf(ann, "/stops"), "what": what}
    assert (await ann.post("/stops/pause", data=given)).status_code == 409, "why?"
    for wrong in (
        {"minutes": "soon"},
        {"minutes": "0"},
        {"rate": "-1"},
        {"rate": "0"},
        {"rate": "nan"},
        {"rate": "inf"},
        {"rate": "1e-300"},
        {"rate": "1e9"},
        {"key": "ada"},
        {"what": f"key of {bank.deposits}"},
        {"what": "topic elsewhere"},
    ):
        answer = await ann.post("/stops/pause", data={**given, "why": "prices", **wrong})
        assert answer.status_code == 409, wrong
    assert await db.fetchval(_PAUSED) == 0
    answer = await ann.post("/stops/pause", data={**given, "why": "prices", "minutes": "90"})
    assert answer.status_code == 303
    ((shown, _, who, why, until, _),) = await rows(ann, "/stops")
    assert (shown, who, why) == (f"{what} is paused", "ann", "prices")
    minutes = "extract(epoch FROM until - now()) / 60"
    assert 80 < await db.fetchval(f"SELECT {minutes} FROM pipeline.throttle") <= 90
    assert until.endswith("Z")
    found = await form(ann)
    assert (await ann.post("/stops/resume", data=found)).status_code == 409, "why?"
    for status in (303, 409):
        answer = await ann.post("/stops/resume", data={**found, "why": "right again"})
        assert answer.status_code == status
    assert await db.fetchval(_PAUSED) == 0
    assert [tuple(row) for row in await db.fetch(_AUDIT)] == [
        ("ann", "pause", what, "prices"),
        ("ann", "resume", what, "right again"),
    ]


async def test_a_hostile_reason_is_shown_as_text(
    ann: httpx2.AsyncClient, db: asyncpg.Connection
) -> None:
    await db.execute(
        "INSERT INTO pipeline.throttle (kind, subject, per_second, who, why)"
        " VALUES ('topic', $1, 0, $1, $1)",
        HOSTILE,
    )
    assert_harmless((await ann.get("/stops")).text)
    answer = await ann.post("/stops/resume", data={**await form(ann), "why": "x"})
    assert answer.status_code == 303
    assert await db.fetchval(_PAUSED) == 0


@pytest.mark.parametrize("key", ["zz", "0"])
async def test_a_key_that_is_not_in_hex_is_refused(ann: httpx2.AsyncClient, key: str) -> None:
    given = {"csrf": await csrf(ann, "/stops"), "kind": "key", "key": key, "why": "x"}
    assert (await ann.post("/stops/resume", data=given)).status_code == 409


async def test_a_pause_that_is_forgotten_is_an_alarm(
    ann: httpx2.AsyncClient, db: asyncpg.Connection
) -> None:
    await db.execute(
        "INSERT INTO pipeline.throttle (kind, subject, per_second, since, who, why)"
        " VALUES ('topic', 'scans', 0, now() - interval '2 h', 'ada', 'x')"
    )
    tiles = re.findall(
        r'<section class="card tile.*?</section>', (await ann.get("/")).text, re.DOTALL
    )
    (tile,) = [one for one in tiles if ">Paused<" in one]
    assert "alarm" in tile
    assert "oldest 2 h" in tile
