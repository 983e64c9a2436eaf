"""Forgetting a subject: what is stored can't be read any more, and nothing is lost silently."""

import asyncio
import json
from collections.abc import Callable
from typing import Annotated

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from onceward import Event, Park, Transaction
from onceward.cli.commands import command_line
from onceward.errors import StoreUnavailable
from onceward.personal import PersonalData, forget
from onceward.personal.commands import group
from onceward.personal.erasing import NoSubject, forget_now
from onceward.personal.marks import Personal, Subject
from onceward.service import Misconfigured

from .clinic import SECRET, Noted, Visited, fails, parks, rejects, visit
from .conftest import KEYS, NewClinic, rows
from tests.contract.bank import Deposit
from tests.onceward.integration.applier import Applier
from tests.onceward.integration.conftest import Command
from tests.servers.waiting import eventually

pytestmark = pytest.mark.integration


async def test_a_message_needing_a_forgotten_value_becomes_dead_and_others_continue(
    new_clinic: NewClinic, db: asyncpg.Connection
) -> None:
    clinic, applier = await new_clinic()
    clinic.does = dict.fromkeys((1, 2), parks)
    await applier.apply(visit(1), visit(2, patient="p2"), visit(3))
    done = await forget_now(db, "p1", by="ada", wait=5)
    assert (done.keys, done.waiting, done.dead_letters, done.are_all_done) == (1, 2, 0, True)
    clinic.does = {}
    await applier.make_due()
    await applier.work_off()
    assert [one.number for one in clinic.handled if isinstance(one, Visited)] == [2]
    assert set((await applier.park()).values()) == {"subject forgotten"}
    (row, _) = await applier.backlog()
    assert "its subject was forgotten" in row["error"]
    await applier.apply(visit(4))
    assert len(clinic.handled) == 2, "its key is not blocked"


async def test_a_message_that_does_not_need_the_value_gets_null(
    new_clinic: NewClinic, db: asyncpg.Connection
) -> None:
    clinic, applier = await new_clinic()
    await applier.apply(visit(1, type="noted", note=SECRET))
    await forget_now(db, "p1", by="ada", wait=5)
    await applier.work_off()
    assert clinic.handled == [Noted(patient="p1", note=None, number=1)]
    assert await applier.park() == {}
    again = await applier.apply(visit(1, type="noted", note=SECRET))
    assert [one.is_new for one in again] == [False], "it is a duplicate of what was received"


async def test_the_keys_of_other_subjects_stay(
    new_clinic: NewClinic, db: asyncpg.Connection
) -> None:
    clinic, applier = await new_clinic()
    clinic.does = dict.fromkeys((1, 2), parks)
    await applier.apply(visit(1), visit(2, patient="p2"))
    await forget_now(db, "p1", by="ada", wait=5)
    left = await rows(applier, "SELECT subject FROM pipeline.personal_key")
    assert [row["subject"] for row in left] == ["p2"]


async def test_no_process_decrypts_after_that_whatever_it_has_in_memory(
    new_clinic: NewClinic, db: asyncpg.Connection, personal: PersonalData
) -> None:
    clinic, applier = await new_clinic()
    clinic.does = {1: parks}
    await applier.apply(visit(1))
    (row,) = await applier.backlog()
    other = PersonalData()
    for process in (personal, other):
        (plain,) = await process.decrypt(db, [row], "value")
        assert SECRET.encode() in plain["value"]
    await forget_now(db, "p1", by="ada", wait=5)
    for process in (personal, other):
        (erased,) = await process.decrypt(db, [row], "value")
        assert erased["value"] is None
        assert "forgotten" in erased["erased"]


async def test_the_key_in_memory_is_gone_after_its_time(
    new_clinic: NewClinic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_PERSONAL_CACHE_AGE", "0.01")
    monkeypatch.setenv("PIPELINE_PERSONAL_CACHE", "3")
    clinic, applier = await new_clinic()
    clinic.does = dict.fromkeys(range(1, 9), parks)
    await applier.apply(*(visit(n, patient=f"p{n}") for n in range(1, 9)))
    encryption = applier.consume.encryption
    assert isinstance(encryption, PersonalData)
    assert len(encryption.keys._kept) <= 3
    await asyncio.sleep(0.02)
    await applier.apply(visit(9, patient="p9"))
    clinic.does = {10: parks}
    await applier.apply(visit(10, patient="p10"))
    assert len(encryption.keys._kept) == 1


async def test_data_that_comes_after_forgetting_has_a_key_of_its_own(
    new_clinic: NewClinic, db: asyncpg.Connection
) -> None:
    clinic, applier = await new_clinic()
    clinic.does = dict.fromkeys((1, 2), parks)
    await applier.apply(visit(1))
    await forget_now(db, "p1", by="ada", wait=5)
    await applier.apply(visit(2))
    clinic.does = {}
    await applier.make_due()
    await applier.work_off()
    assert [one.number for one in clinic.handled if isinstance(one, Visited)] == [2]


async def test_a_transaction_under_way_can_not_keep_a_key(
    db: asyncpg.Connection, connect: Callable[..., object], personal: PersonalData
) -> None:
    other = await connect()  # type: ignore[misc]
    transaction = other.transaction()
    await transaction.start()
    await personal.keys.of_subjects(other, [Subject("p1")])
    forgetting = asyncio.create_task(forget_now(db, "p1", by="ada", wait=60))
    watcher = await connect()  # type: ignore[misc]

    async def has_begun() -> bool:
        return bool(await watcher.fetchval("SELECT count(*) FROM pipeline.personal_forgotten"))

    await eventually(has_begun)
    assert not forgetting.done()
    await transaction.commit()
    done = await forgetting
    assert (done.keys, done.are_all_done) == (1, True)
    assert await db.fetchval("SELECT count(*) FROM pipeline.personal_key") == 0
    listed = await db.fetchrow(
        "SELECT subject, keys, forgotten_by FROM pipeline.personal_forgotten"
    )
    assert tuple(listed) == ("p1", 1, "ada")


async def test_a_handler_forgets_in_its_transaction(
    new_clinic: NewClinic, db: asyncpg.Connection
) -> None:
    clinic, applier = await new_clinic()
    clinic.does = {1: parks}
    await applier.apply(visit(1))

    @clinic.handlers.on(Noted, topic="orders", consumer="eraser")
    async def erase(event: Noted, tx: Transaction) -> None:
        await forget(tx.session, event.patient, by="clerk")

    applier.slot = type(applier.slot)(applier.slot.group, "orders", 0)
    await applier.apply(visit(2, type="noted", note=None))
    assert await db.fetchval("SELECT count(*) FROM pipeline.personal_key") == 0
    assert await db.fetchval("SELECT forgotten_by FROM pipeline.personal_forgotten") == "clerk"


class Driven(Event, type="driven"):
    """A driver has driven a customer; the ids of both are of a register of its own."""

    customer: str
    driver: str
    mail: Annotated[str, Personal(of="customer")]
    plate: Annotated[str, Personal(of="driver", kind="driver")]


async def _driven(
    new_clinic: NewClinic, *, customer: str = "driver:17", driver: str = "17"
) -> tuple[Applier, PersonalData]:
    """Store a message about a customer and a driver."""
    clinic, applier = await new_clinic()

    @clinic.handlers.on(Driven, topic="visits", consumer="bill")
    async def bill(event: Driven, tx: Transaction) -> None:
        raise Park("later", after=3600)

    value = {"customer": customer, "driver": driver, "mail": SECRET, "plate": "B-17"}
    await applier.apply(Deposit(1, type="driven", value=json.dumps(value).encode()))
    assert isinstance(applier.consume.encryption, PersonalData)
    return applier, applier.consume.encryption


async def _kinds(db: asyncpg.Connection) -> set[tuple[str, str | None]]:
    found = await db.fetch("SELECT subject, kind FROM pipeline.personal_key")
    return {(row["subject"], row["kind"]) for row in found}


_BOTH = {("driver:17", ""), ("driver:17", "driver")}


@pytest.mark.parametrize(("subject", "kind"), [("driver:17", ""), ("17", "driver")])
async def test_of_two_subjects_with_one_name_one_is_forgotten(
    new_clinic: NewClinic, db: asyncpg.Connection, subject: str, kind: str
) -> None:
    await _driven(new_clinic)
    assert await _kinds(db) == _BOTH
    done = await forget_now(db, subject, by="ada", wait=5, kind=kind)
    assert (done.keys, await _kinds(db)) == (1, _BOTH - {("driver:17", kind)})
    assert await db.fetchval("SELECT kind FROM pipeline.personal_forgotten") == kind


@pytest.mark.parametrize("customer", ["driver:17", "9"])
async def test_a_name_of_two_subjects_is_refused_without_a_kind(
    new_clinic: NewClinic, service: Callable[..., Command], db: asyncpg.Connection, customer: str
) -> None:
    """Also if the customer has no key, and the driver of this name has."""
    clinic, _ = await new_clinic()
    applier, _ = await _driven(new_clinic, customer=customer)
    before = await _kinds(db)
    async with AsyncSession(applier.consume.engine) as session:
        with pytest.raises(NoSubject, match="by the kind 'driver' and the id '17'"):
            await forget(session, "driver:17", by="ada")
    refused = await service(clinic)("personal", "forget", "driver:17", "--yes")
    assert (refused.exit_code, "nothing is deleted" in refused.stderr) == (1, True)
    assert await _kinds(db) == before

    done = await service(clinic)("personal", "forget", "17", "--kind", "driver", "--yes")
    assert "1 keys of 'driver:17' are deleted." in done.stdout, done.output
    assert await _kinds(db) == before - {("driver:17", "driver")}


async def test_an_id_with_a_colon_needs_no_kind(
    new_clinic: NewClinic, db: asyncpg.Connection
) -> None:
    applier, _ = await _driven(new_clinic, customer="urn:customer:9")
    async with AsyncSession(applier.consume.engine) as session:
        assert await forget(session, "urn:customer:9", by="ada") == 1
        await session.commit()
    assert await _kinds(db) == {("driver:17", "driver")}


async def test_keys_without_a_kind_decrypt_and_are_forgotten_by_either_name(
    new_clinic: NewClinic, db: asyncpg.Connection
) -> None:
    """Version 1.0.0 has stored no kind, and given both subjects one key."""
    applier, personal = await _driven(new_clinic, customer="9")
    await db.execute("UPDATE pipeline.personal_key SET kind = NULL")
    (row,) = await personal.decrypt(db, await applier.backlog(), "value")
    assert b"B-17" in row["value"]
    await personal.keys.of_subjects(db, [Subject.of("17", "driver"), Subject.of("driver:17")])
    assert await _kinds(db) == {("9", None), ("driver:17", None), *_BOTH}
    assert (await forget_now(db, "17", by="ada", wait=5, kind="driver")).keys == 2
    assert await _kinds(db) == {("9", None), ("driver:17", "")}
    assert (await forget_now(db, "9", by="ada", wait=5)).keys == 1


@pytest.fixture
def service(
    commands: Callable[..., Command],
    personal: PersonalData,
    new_clinic: NewClinic,
) -> Callable[..., Command]:
    """Make the command line of a clinic."""

    def of(clinic: object) -> Command:
        one = clinic.service(personal)  # type: ignore[attr-defined]
        return commands(command_line(one, personal=group(personal)))

    return of


async def test_the_command_says_what_is_unreadable_and_what_is_not_erased(
    new_clinic: NewClinic, service: Callable[..., Command], db: asyncpg.Connection
) -> None:
    clinic, applier = await new_clinic()
    clinic.does = {1: rejects, 2: fails, 3: parks, 4: clinic.schedules}
    await applier.apply(*(visit(n) for n in clinic.does))
    await applier.apply(visit(5, type="unknown"))
    command = service(clinic)
    done = await command("personal", "forget", "p1", "--by", "ada", input="y\n")
    assert done.exit_code == 0, done.output
    assert "1 keys of 'p1' are deleted." in done.stdout
    assert "1 dead letters can't be read any more" in done.stdout
    assert "records in Kafka" in done.stdout
    assert "visits" in done.stdout
    assert "1 rows of the backlog whose subject is not known" in done.stdout
    listed = await command("personal", "forgotten", "--json")
    assert json.loads(listed.stdout)["subject"] == "p1"
    refused = await command("personal", "forget", " ", "--yes")
    assert (refused.exit_code, "the subject is empty" in refused.stderr) == (1, True)
    done = await command("personal", "rewrap", "--operator", "bob", "--because", "a leak")
    assert done.exit_code == 0, done.output
    audited = await db.fetch("SELECT who, action, subject, why FROM pipeline.audit ORDER BY id")
    assert [tuple(row) for row in audited] == [
        ("ada", "forget", "subject p1", None),
        ("bob", "rewrap", "keys of personal data", "a leak"),
    ]


async def test_an_unreadable_dead_letter_is_not_redriven_and_can_be_discarded(
    new_clinic: NewClinic, service: Callable[..., Command], db: asyncpg.Connection
) -> None:
    clinic, applier = await new_clinic()
    clinic.does = {1: rejects, 2: rejects}
    await applier.apply(visit(1))
    await applier.apply(visit(2, patient="p2"))
    command = service(clinic)
    shown = json.loads((await command("dead", "list", "--json")).stdout.splitlines()[0])
    plain = await command("personal", "show", shown["id"])
    assert SECRET in plain.stdout
    await forget_now(db, "p1", by="ada", wait=5)
    listed = [
        json.loads(line)
        for line in (await command("dead", "list", "--json")).stdout.split("\n")[:-1]
    ]
    (one,) = [entry for entry in listed if entry["reason"] == "subject forgotten"]
    entry = json.loads((await command("dead", "show", one["id"], "--json")).stdout)
    assert entry["advice"].startswith("discard it")
    erased = await command("personal", "show", one["id"])
    assert (erased.exit_code, "can't be read" in erased.stderr) == (1, True)
    redriven = await command("dead", "redrive", one["id"], "--yes", "--json")
    assert json.loads(redriven.stdout)["redriven"] == 0
    assert "nothing can decrypt them any more" in redriven.stderr
    discarded = await command("dead", "discard", one["id"], "--because", "forgotten", "--yes")
    assert discarded.exit_code == 0, discarded.output
    assert [one["reason"] for one in await applier.backlog() if not one["discarded_at"]] == [
        "rejected"
    ]


async def test_master_keys_are_rotated(
    new_clinic: NewClinic,
    service: Callable[..., Command],
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clinic, applier = await new_clinic()
    clinic.does = {1: parks}
    await applier.apply(visit(1))
    (row,) = await applier.backlog()
    monkeypatch.setenv("PIPELINE_PERSONAL_KEYS", KEYS[1])
    with pytest.raises(StoreUnavailable, match="not in PIPELINE_PERSONAL_KEYS"):
        await PersonalData().decrypt(db, [row], "value")
    monkeypatch.setenv("PIPELINE_PERSONAL_KEYS", f"{KEYS[1]}, {KEYS[0]}")
    both = PersonalData()
    assert await both.keys.rewrap(db) == 1
    assert await both.keys.rewrap(db) == 0
    monkeypatch.setenv("PIPELINE_PERSONAL_KEYS", KEYS[1])
    (plain,) = await PersonalData().decrypt(db, [row], "value")
    assert SECRET.encode() in plain["value"]


async def test_messages_wait_while_a_master_key_is_missing(
    new_clinic: NewClinic, monkeypatch: pytest.MonkeyPatch
) -> None:
    clinic, applier = await new_clinic()
    clinic.does = {1: parks}
    await applier.apply(visit(1))
    clinic.does = {}
    await applier.make_due()
    complete = applier.consume.encryption
    monkeypatch.setenv("PIPELINE_PERSONAL_KEYS", KEYS[1])
    applier.consume.encryption = PersonalData()
    working = asyncio.create_task(applier.work_off())
    await eventually(lambda: "PIPELINE_PERSONAL_KEYS" in str(applier.health.reasons))
    assert clinic.handled == []
    applier.consume.encryption = complete
    working.cancel()
    await asyncio.wait({working})
    assert [row["attempts"] for row in await applier.backlog()] == [0]


@pytest.mark.parametrize("keys", [None, "short", f"{KEYS[0]},not-base64"])
def test_wrong_settings_are_reported(keys: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPELINE_PERSONAL_KEYS")
    if keys is not None:
        monkeypatch.setenv("PIPELINE_PERSONAL_KEYS", keys)
    with pytest.raises(Misconfigured, match="openssl rand -base64 32"):
        PersonalData().check()
