"""Positions that are moved, and days that are dropped without the archive, on the page."""

import asyncpg
import httpx2
import pytest
from aiokafka import AIOKafkaProducer

from .conftest import Opened, csrf, log_in
from .test_furnished import rows
from .test_many import hidden
from .test_page import HOSTILE, assert_harmless
from tests.contract.bank import Deposit
from tests.onceward.integration.bank import Bank
from tests.onceward.integration.conftest import position_of
from tests.onceward.integration.outgoing import make_old_day
from tests.onceward.integration.test_replay import store_position

_AUDIT = "SELECT who, action, subject, why FROM pipeline.audit ORDER BY id"


@pytest.mark.parametrize(("what", "to", "goes"), [("seek", "earliest", 0), ("replay", "1", 1)])
async def test_positions_are_moved_as_a_preview_has_shown_with_a_reason(
    ann: httpx2.AsyncClient,
    bank: Bank,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    what: str,
    to: str,
    goes: int,
) -> None:
    for amount in (1, 2, 3):
        await Deposit(amount).send(producer, bank.deposits)
    await store_position(db, bank, 3)
    wanted = {"what": what, "topic": bank.deposits, "partition": "", "to": to}
    text = (await ann.get("/positions", params=wanted)).text
    assert f"{bank.deposits}/0 would go from 3 to {goes}" in text
    form = hidden(text)
    assert (await ann.post("/positions/move", data=form)).status_code == 409, "why?"
    assert await position_of(db, bank.deposits) == 3
    answer = await ann.post("/positions/move", data={**form, "why": "a test"})
    assert f"{bank.deposits}/0 goes from 3 to {goes}" in answer.text
    assert await position_of(db, bank.deposits) == goes
    audited = [tuple(row) for row in await db.fetch(_AUDIT)]
    assert audited == [("ann", what, f"{bank.deposits}/0 to {goes}", "a test")]


async def test_a_position_goes_where_the_preview_has_shown_though_more_is_written(
    ann: httpx2.AsyncClient, bank: Bank, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    await Deposit(1).send(producer, bank.deposits)
    await store_position(db, bank, 0)
    wanted = {"what": "seek", "topic": bank.deposits, "to": "latest"}
    form = hidden((await ann.get("/positions", params=wanted)).text) | {"why": "a test"}
    await Deposit(2).send(producer, bank.deposits)
    for wrong in ("", "x", "0:", "0:3", "1:1", "0:1 1:1"):
        answer = await ann.post("/positions/move", data=form | {"shown": wrong})
        assert (answer.status_code, "preview it again" in answer.text) == (409, True), wrong
    assert await position_of(db, bank.deposits) == 0
    answer = await ann.post("/positions/move", data=form)
    assert f"{bank.deposits}/0 goes from 0 to 1 " in answer.text
    assert await position_of(db, bank.deposits) == 1


async def test_what_is_no_position_is_refused_and_shown_as_text(
    ann: httpx2.AsyncClient, bank: Bank, db: asyncpg.Connection
) -> None:
    wanted = {"what": "seek", "topic": bank.deposits, "partition": "", "to": "earliest"}
    form = {**wanted, "shown": "0:0", "why": "a test", "csrf": await csrf(ann)}
    for wrong in (
        {"to": "soon"},
        {"to": "2026-11-01T08:00"},
        {"to": "9"},
        {"to": "9" * 5_000},
        {"partition": "7"},
        {"partition": "x"},
        {"topic": "elsewhere"},
        {"what": "replay"},
    ):
        assert (await ann.get("/positions", params={**wanted, **wrong})).status_code == 409, wrong
        assert (await ann.post("/positions/move", data={**form, **wrong})).status_code == 409, wrong
    assert_harmless((await ann.get("/positions", params={**wanted, "to": HOSTILE})).text)
    assert await db.fetch(_AUDIT) == []


async def test_brokers_that_do_not_answer_are_named(
    opened: Opened, bank: Bank, unused_tcp_port: int
) -> None:
    away = f"127.0.0.1:{unused_tcp_port}"
    async with opened(brokers=away) as client:
        await log_in(client)
        wanted = {"what": "seek", "topic": bank.deposits, "to": "earliest"}
        answer = await client.get("/positions", params=wanted)
    assert (answer.status_code, f"Refused: Kafka at {away}: " in answer.text) == (409, True)


async def test_a_day_that_can_not_be_archived_is_dropped_without(
    ann: httpx2.AsyncClient, db: asyncpg.Connection
) -> None:
    await make_old_day(db)
    await db.execute(
        "INSERT INTO pipeline.outbox_closed (day, xid, not_archived)"
        " VALUES ('2020-01-01', '3', 'it is not archived: no bucket');"
        "UPDATE pipeline.outbox_cursor SET seen = pg_current_snapshot()"
    )
    held = {name: text for name, _, text in await rows(ann, "/retention")}["outbox_p20200101"]
    assert held.startswith("it is not archived: no bucket Drop it")
    form = {"csrf": await csrf(ann), "day": "2020-01-01"}
    for wrong in ({}, {"why": "a test", "day": "x"}, {"why": "a test", "day": "2020-01-02"}):
        answer = await ann.post("/retention/skip-archive", data={**form, **wrong})
        assert answer.status_code == 409, wrong
    answer = await ann.post("/retention/skip-archive", data={**form, "why": "a test"})
    assert answer.status_code == 303
    assert await db.fetchval("SELECT skips_archive FROM pipeline.outbox_closed")
    audited = [tuple(row) for row in await db.fetch(_AUDIT)]
    assert audited == [("ann", "skip-archive", "day 2020-01-01 of the outbox", "a test")]
