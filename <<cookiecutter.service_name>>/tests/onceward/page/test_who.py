"""Who gets in, by what name, and whose forms are taken."""

import logging

import asyncpg
import httpx2
import pytest

from onceward.page import sessions

from .conftest import ORIGIN, PAGES, TOKEN, Opened, assert_guarded, buried, csrf, log_in
from tests.contract.bank import Deposit
from tests.onceward.integration.applier import Applier
from tests.onceward.integration.bank import Bank


@pytest.mark.parametrize("path", PAGES)
async def test_nobody_sees_anything_before_he_has_logged_in(
    opened: Opened, bank: Bank, path: str
) -> None:
    async with opened() as client:
        for cookie in ("", "x", "a.b.c.d", "\xff\xfe", '"\\377"', "x" * 5_000):
            header = f"page-{bank.name}={cookie}".encode("latin-1")
            answer = await client.get(path, headers=[(b"cookie", header)])
            assert (answer.status_code, answer.headers["location"]) == (303, "/login")
            assert_guarded(answer)
        await log_in(client)
        answer = await client.get(path)
        assert answer.status_code == 200, answer.text
        assert_guarded(answer)


@pytest.mark.parametrize("token", ["", "x", TOKEN + "x", "\udcff", "é" * 20])
async def test_a_wrong_token_lets_nobody_in(opened: Opened, token: str) -> None:
    async with opened() as client:
        sent = {"name": "ann", "token": token.encode("utf-8", "replace").decode()}
        answer = await client.post("/login", data=sent)
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers
        assert_guarded(answer)


async def test_the_cookie_of_a_login_is_for_this_page_alone(opened: Opened) -> None:
    async with opened() as client:
        answer = await client.post("/login", data={"name": "ann", "token": TOKEN})
        said = answer.headers["set-cookie"].lower()
        assert "httponly" in said
        assert "samesite=strict" in said
        assert "; secure" not in said
    async with opened(token=TOKEN, origin="https://ops.test") as client:
        form = {"name": "ann", "token": TOKEN}
        answer = await client.post("/login", data=form, headers={"origin": "https://ops.test"})
        assert answer.headers["set-cookie"].startswith("__Host-page-")
        assert "; secure" in answer.headers["set-cookie"].lower()


async def test_a_login_creates_a_new_session_id_and_logout_invalidates_its_cookie(
    opened: Opened, bank: Bank
) -> None:
    name = f"page-{bank.name}"
    async with opened() as client:
        client.cookies.set(name, "chosen by somebody else", domain="localhost.local")
        await log_in(client)
        first = client.cookies[name]
        await log_in(client)
        second = client.cookies[name]
        token = await csrf(client)
        client.cookies.clear()
        for cookie, status in (("chosen by somebody else", 303), (first, 303), (second, 200)):
            answer = await client.get("/dead", headers={"cookie": f"{name}={cookie}"})
            assert answer.status_code == status
        had = {"cookie": f"{name}={second}"}
        answer = await client.post("/logout", data={"csrf": token}, headers=had)
        assert answer.headers["location"] == "/login"
        assert (await client.get("/dead", headers=had)).status_code == 303


async def test_who_comes_and_goes_is_logged_also_where_only_warnings_are(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "onceward.page")
    async with opened() as client:
        await client.post("/login", data={"name": "ann", "token": "wrong"})
        await log_in(client)
        await client.post("/logout", data={"csrf": await csrf(client)})
    told = [
        (one.message, vars(one).get("operator"), vars(one)["client"])
        for one in caplog.records
        if one.name == "onceward.page.auth"
    ]
    assert told == [
        ("a login to the page was rejected", None, "127.0.0.1"),
        ("logged in to the page", "ann", "127.0.0.1"),
        ("logged out of the page", "ann", "127.0.0.1"),
    ]


async def test_a_session_ends_after_its_time(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000.0
    monkeypatch.setattr(sessions, "monotonic", lambda: now)
    async with opened(token=TOKEN, session=60) as client:
        await log_in(client)
        now += 59
        assert (await client.get("/dead")).status_code == 200
        now += 1
        assert (await client.get("/dead")).headers["location"] == "/login"


async def test_there_is_no_more_than_so_many_sessions(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_MAX_SESSIONS", 2)
    async with opened() as client:
        had = []
        for _ in range(3):
            client.cookies.clear()
            await log_in(client)
            had.append("; ".join(f"{name}={value}" for name, value in client.cookies.items()))
        client.cookies.clear()
        answers = [await client.get("/dead", headers={"cookie": one}) for one in had]
        assert [one.status_code for one in answers] == [303, 200, 200]


@pytest.mark.parametrize(
    ("address", "names", "status"),
    [
        ("10.0.0.1", ["ann"], 200),
        ("::ffff:10.0.0.1", ["ann"], 200),
        ("10.0.0.2", ["ann"], 403),
        ("no address", ["ann"], 403),
        ("10.0.0.1", [], 403),
        ("10.0.0.1", ["ann", "bob"], 403),
        ("10.0.0.1", ["<b>"], 403),
    ],
)
async def test_a_proxy_is_believed_if_it_is_one_that_is_named(
    opened: Opened, address: str, names: list[str], status: int
) -> None:
    async with opened(address, proxy_header="X-User", proxies=["10.0.0.1"]) as client:
        answer = await client.get("/dead", headers=[("x-user", name) for name in names])
        assert answer.status_code == status
        assert_guarded(answer)


@pytest.mark.parametrize(
    "origin",
    [None, "null", "http://evil.test", f"{ORIGIN}.evil.test", "http://[", "//", ORIGIN[:-1]],
)
async def test_a_form_of_another_page_changes_nothing(
    ann: httpx2.AsyncClient, applier: Applier, db: asyncpg.Connection, origin: str | None
) -> None:
    id = await buried(applier, db, Deposit(1))
    form = {"csrf": await csrf(ann), "why": "no"}
    del ann.headers["origin"]
    headers = {} if origin is None else {"origin": origin}
    for answer in (
        await ann.post(f"/dead/{id}/discard", data=form, headers=headers),
        await ann.post(
            f"/dead/{id}/discard", data={**form, "csrf": "x"}, headers={"origin": ORIGIN}
        ),
        await ann.post(f"/dead/{id}/discard", json=form, headers={"origin": ORIGIN}),
    ):
        assert answer.status_code == 403
    assert await db.fetchval("SELECT count(discarded_at) FROM pipeline.backlog") == 0


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 303),
        ("LOCALHOST:8081", 303),
        ("127.0.0.1:8081", 303),
        ("[::1]:8081", 303),
        ("ops.test", 303),
        ("evil.test", 421),
        ("evil.test:8081", 421),
        ("localhost.evil.test", 421),
        ("localhost@evil.test", 421),
        ("127.0.0.1.evil.test", 421),
        ("[::1", 421),
        ("", 421),
    ],
)
async def test_a_name_that_somebody_else_may_own_leads_nowhere(
    opened: Opened, host: str, status: int
) -> None:
    async with opened(token=TOKEN, origin="https://ops.test") as client:
        answer = await client.get("/dead", headers={"host": host})
        assert answer.status_code == status
        assert_guarded(answer)
        if status == 421:
            assert "PIPELINE_PAGE_ORIGIN" in answer.text
            page = await client.get("/static/page.css", headers={"host": host})
            assert page.status_code == status


@pytest.mark.parametrize(
    "path", ["//evil.test", "//evil.test/", "/dead/", "/login/", "/login?next=//evil.test"]
)
async def test_nobody_is_sent_on_to_where_a_link_says(ann: httpx2.AsyncClient, path: str) -> None:
    answer = await ann.get(httpx2.URL(ORIGIN).copy_with(raw_path=path.encode()))
    assert answer.status_code in (200, 404)
    form = {"name": "ann", "token": TOKEN, "next": "//evil.test"}
    answer = await ann.post("/login?next=//evil.test", data=form)
    assert answer.headers["location"] == "/"


@pytest.mark.parametrize(
    "body",
    [
        b"csrf=" + b"x" * 20_000,
        b"&".join(b"a%d=x" % number for number in range(201)),
        b"csrf=%ff",
        b"csrf=\xff",
        b"csrf=%00",
        b"",
    ],
)
async def test_what_is_no_form_of_the_page_is_refused(ann: httpx2.AsyncClient, body: bytes) -> None:
    kind = {"content-type": "application/x-www-form-urlencoded"}
    for path in ("/scheduled/cancel", "/logout", "/login"):
        answer = await ann.post(path, content=body, headers=kind)
        assert answer.status_code == 403
    assert (await ann.get("/dead")).status_code == 200


async def test_a_browser_that_comes_another_way_is_told_which_setting_says_so(
    ann: httpx2.AsyncClient,
) -> None:
    form = {"csrf": await csrf(ann), "why": "no"}
    answer = await ann.post("/logout", data=form, headers={"origin": "https://<b>.test"})
    assert answer.status_code == 403
    assert "https://&lt;b&gt;.test" in answer.text
    assert "PIPELINE_PAGE_ORIGIN" in answer.text
