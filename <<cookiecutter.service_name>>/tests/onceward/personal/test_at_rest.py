"""What is in the tables: of personal values nothing, of everything else all."""

import json
from dataclasses import replace

import asyncpg
import pytest

from onceward.events.payload import payload_hash
from onceward.personal import PersonalData
from onceward.plain import Header, Plain

from .clinic import SECRET, Visited, fails, parks, rejects, visit
from .conftest import NewClinic, Search, rows
from tests.contract.bank import Deposit

pytestmark = pytest.mark.integration


async def test_no_table_has_a_personal_value(new_clinic: NewClinic, search: Search) -> None:
    clinic, applier = await new_clinic(dead_letter_topic="dead")
    does = parks, fails, rejects, clinic.sends, clinic.schedules, clinic.calls
    clinic.does = dict(enumerate(does, start=1))
    home = {"street": SECRET, "country": "NL"}
    everything = [visit(n, patient=f"p{n}", note=SECRET, home=home) for n in clinic.does]
    others = [
        visit(10, patient="p1"),  # behind the parked one
        visit(11, type="noted", note=SECRET),  # deferred
        visit(12, email=7, note=SECRET),  # invalid
        visit(13, patient="", note=SECRET),  # of no subject
        visit(18, patient="\0", note=SECRET),
        replace(visit(19, patient="\ud800", note=SECRET), account="p19"),
        visit(14, type="unknown", note=SECRET),
        visit(15, extra={"phone": SECRET}, patient="p1"),
        Deposit(16, type="visited", value=f'{{"email": "{SECRET}"'.encode()),
        Deposit(17, headers=(("ce_time", b"never"),), value=f'"{SECRET}"'.encode()),
    ]
    for one in (*everything, *others):
        await applier.apply(one)
    await applier.make_due()
    await applier.work_off()
    await applier.make_due()
    await applier.work_off()
    reasons = set((await applier.park()).values())
    assert {"parked by its handler", "attempts used up", "rejected", "follows another"} < reasons
    assert {"invalid payload", "unknown type", "invalid attribute", "deferred"} < reasons
    assert len(await rows(applier, "SELECT FROM pipeline.outbox")) >= 6
    assert len(await rows(applier, "SELECT FROM pipeline.scheduled")) == 1
    assert await search(SECRET) == set()
    assert await search("p4") >= {"outbox.payload"}, "ids stay"
    assert await search("p1") >= {"backlog.value"}


async def test_what_is_read_again_is_the_same_to_the_last_byte(new_clinic: NewClinic) -> None:
    clinic, applier = await new_clinic()
    clinic.does = {1: parks}
    value = b'{ "patient":"p1",\n"number":1, "email" : "\\u00e9\\"@x", "more": [1.50, {"a":null}]}'
    await applier.apply(Deposit(1, "p1", type="visited", value=value))
    (row,) = await applier.backlog()
    assert row["hash"] == payload_hash("visited", "application/json", value)
    async with applier.engine.connect() as connection:
        driver = (await connection.get_raw_connection()).driver_connection
        assert applier.consume.encryption is not None
        (plain,) = await applier.consume.encryption.decrypt(driver, [row], "value")
    assert plain["value"] == value
    clinic.does = {}
    await applier.make_due()
    await applier.work_off()
    assert clinic.handled == [Visited(patient="p1", email='é"@x', number=1)]


async def test_identity_and_order_are_those_without_encryption(
    new_clinic: NewClinic, db: asyncpg.Connection
) -> None:
    hashes = []
    for encrypts in (True, False):
        clinic, applier = await new_clinic()
        if not encrypts:
            applier.consume.encryption = None
        await db.execute("TRUNCATE pipeline.backlog, pipeline.inbox, pipeline.position")
        clinic.does = {1: parks, 2: clinic.sends}
        await applier.apply(visit(2, patient="p2"), visit(1), visit(3), visit(4))
        again = await applier.apply(visit(1), visit(3), visit(2, patient="p2"))
        assert [one.is_new for one in again] == [False] * 3
        found = await applier.backlog()
        assert [row["id"] for row in found] == ["visited-1", "visited-3", "visited-4"]
        ids = await rows(applier, "SELECT event_id FROM pipeline.outbox ORDER BY id DESC LIMIT 2")
        hashes.append(([(row["key"], row["hash"]) for row in found], ids))
        clinic.does = {}
        await applier.make_due()
        await applier.work_off()
        visits = [one for one in clinic.handled if isinstance(one, Visited)]
        assert [one.number for one in visits if one.patient == "p1"] == [1, 3, 4]
    assert hashes[0] == hashes[1]


async def test_another_payload_of_an_id_is_an_identity_mismatch(new_clinic: NewClinic) -> None:
    clinic, applier = await new_clinic()
    clinic.does = {1: parks}
    await applier.apply(visit(1, id="one"))
    await applier.apply(visit(1, id="one", note="other"))
    assert list((await applier.park()).values()) == ["identity mismatch", "parked by its handler"]


async def test_what_is_deferred_or_called_is_handled_with_its_values(
    new_clinic: NewClinic, personal: PersonalData
) -> None:
    clinic, applier = await new_clinic()
    await applier.apply(visit(1, type="noted", note=SECRET))
    await applier.work_off()
    assert [getattr(one, "note", None) for one in clinic.handled] == [SECRET]


async def test_an_operator_sees_the_rest_of_a_dead_letter(new_clinic: NewClinic) -> None:
    clinic, applier = await new_clinic()
    clinic.does = {1: rejects}
    await applier.apply(visit(1))
    (row,) = await applier.backlog()
    head, _, rest = row["value"].partition(b"\n")
    assert head.startswith(b"personal-1 ")
    assert json.loads(rest) == {"patient": "p1", "email": None, "number": 1}
    assert row["error"] == "Reject: ********** is not one of ours"
    assert SECRET not in row["traceback"]


async def test_a_subject_has_one_key_and_two_have_two(new_clinic: NewClinic) -> None:
    clinic, applier = await new_clinic()
    clinic.does = dict.fromkeys(range(1, 7), parks)
    await applier.apply(*(visit(n, patient=f"p{n % 2}") for n in range(1, 4)))
    await applier.apply(*(visit(n, patient=f"p{n % 2}") for n in range(4, 7)))
    keys = await rows(applier, "SELECT subject FROM pipeline.personal_key ORDER BY 1")
    assert [row["subject"] for row in keys] == ["p0", "p1"]


async def test_a_record_other_than_its_events_json_is_encrypted_entirely(
    new_clinic: NewClinic, search: Search
) -> None:
    clinic, applier = await new_clinic()
    clinic.does = {1: parks}
    data = {"patient": "p1", "email": SECRET, "number": 1}
    envelope = {"specversion": "1.0", "id": "one", "source": "/tests", "type": "visited"}
    record = Deposit(
        1,
        "p1",
        type="visited",
        value=json.dumps(envelope | {"data": data}).encode(),
        headers=(("content-type", b"application/cloudevents+json"),),
    )
    await applier.apply(record)
    assert await search(SECRET) == set()
    (row,) = await applier.backlog()
    assert b'"whole"' in row["value"]
    keys = await rows(applier, "SELECT subject FROM pipeline.personal_key")
    assert [row["subject"] for row in keys] == ["p1"]
    clinic.does = {}
    await applier.make_due()
    await applier.work_off()
    assert clinic.handled == [Visited(patient="p1", email=SECRET, number=1)]


async def test_what_a_codec_writes_is_encrypted_as_a_whole(
    new_clinic: NewClinic, search: Search, db: asyncpg.Connection, personal: PersonalData
) -> None:
    clinic, applier = await new_clinic()
    codec = Plain(type=Header("kind"), identity=Header("id"), data="body")
    clinic.handlers.topic(clinic.letters, codec=codec)
    clinic.handlers.closed.clear()
    clinic.does = {1: clinic.sends}
    await applier.apply(visit(1))
    assert await search(SECRET) == set()
    stored = await db.fetch("SELECT payload FROM pipeline.outbox ORDER BY id")
    assert all(b'"whole"' in row["payload"] for row in stored)
    letter, _ = await personal.decrypt(db, stored, "payload")
    assert json.loads(letter["payload"])["body"]["email"] == SECRET


class Vault:
    """A key management service."""

    def __init__(self) -> None:
        self.keys: dict[bytes, tuple[bytes, bytes]] = {}

    async def wrap(self, key: bytes, context: bytes) -> bytes:
        """Keep the key, and return its number."""
        number = b"%d" % len(self.keys)
        self.keys[number] = key, context
        return number

    async def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        """Return the key of a number."""
        key, known = self.keys[wrapped]
        assert context == known
        return key

    def is_current(self, wrapped: bytes) -> bool:
        """Whether there is nothing to do."""
        return True


async def test_a_key_management_service_takes_the_place_of_the_master_keys(
    new_clinic: NewClinic, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIPELINE_PERSONAL_KEYS")
    vault = Vault()
    clinic, applier = await new_clinic()
    applier.consume.encryption = PersonalData(vault)
    clinic.does = {1: parks}
    await applier.apply(visit(1))
    assert len(vault.keys) == 1
    (plain,) = await PersonalData(vault).decrypt(db, await applier.backlog(), "value")
    assert json.loads(plain["value"])["email"] == SECRET
