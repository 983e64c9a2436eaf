"""From Kafka to Kafka: what is published is plain, and what can't be read holds up nothing."""

import asyncio
import base64
import gzip
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from onceward.archive import Archive
from onceward.cli.commands import command_line
from onceward.personal import PersonalData
from onceward.personal.erasing import forget_now
from onceward.runtime import Part

from .clinic import SECRET, Clinic, visit
from .conftest import Search
from tests.conftest import Records, Running
from tests.onceward.integration.conftest import Command
from tests.servers.waiting import eventually

pytestmark = pytest.mark.integration


@pytest.fixture
async def clinic(new_topic: Callable[..., Awaitable[str]]) -> Clinic:
    """Return a clinic with topics of its own."""
    clinic = Clinic(await new_topic(), await new_topic())
    clinic.does = dict.fromkeys(range(1, 100), clinic.sends)
    return clinic


async def test_what_is_published_is_plain_and_in_order(
    clinic: Clinic,
    running: Running,
    producer: AIOKafkaProducer,
    records: Records,
    personal: PersonalData,
    search: Search,
) -> None:
    async with running(clinic.service(personal)):
        for number in range(1, 20):
            await visit(number, patient=f"p{number % 3}").send(producer, visits(clinic))
        found = await records(clinic.letters, 38)
    letters = [json.loads(one.value) for one in found]
    for patient in ("p0", "p1", "p2"):
        own = [one for one in letters if one["patient"] == patient]
        assert [one["number"] for one in own] == sorted(one["number"] for one in own)
    assert {one.get("email", one.get("text")) for one in letters} == {SECRET}
    assert await search(SECRET) == set()


async def test_events_of_forgotten_subjects_have_null_values_or_are_dead_events(
    clinic: Clinic,
    running: Running,
    producer: AIOKafkaProducer,
    records: Records,
    personal: PersonalData,
    db: asyncpg.Connection,
    commands: Callable[..., Command],
    search: Search,
) -> None:
    service = clinic.service(personal)
    async with running(service, Part.CONSUME):
        for number in range(1, 5):
            await visit(number, patient=f"p{number % 2}").send(producer, visits(clinic))
        await eventually(lambda: len(clinic.handled) == 4)
    await forget_now(db, "p1", by="ada", wait=10)
    async with running(service, Part.RELAY):
        found = await records(clinic.letters, 6)
    letters = [json.loads(one.value) for one in found]
    assert sorted(one["number"] for one in letters) == [1, 2, 2, 3, 4, 4]
    assert [one for one in letters if one["patient"] == "p1"] == [
        {"patient": "p1", "text": None, "number": number} for number in (1, 3)
    ]
    dead = await db.fetch("SELECT reason, type, payload FROM pipeline.outbox_rejected ORDER BY id")
    assert [row[:2] for row in dead] == [("subject forgotten", "letter.sent")] * 2
    assert await search(SECRET) == set()
    command = commands(command_line(service), "dead", "events")
    redriven = await command("redrive", "--all", "--yes", "--json")
    assert json.loads(redriven.stdout)["redriven"] == 0
    done = await command("discard", "--all", "--because", "forgotten", "--yes")
    assert done.exit_code == 0, done.output


async def test_two_processes_with_caches_of_their_own_stop_reading_at_once(
    clinic: Clinic,
    running: Running,
    producer: AIOKafkaProducer,
    records: Records,
    personal: PersonalData,
    db: asyncpg.Connection,
) -> None:
    other = PersonalData()
    async with running(clinic.service(personal)):
        await visit(1).send(producer, visits(clinic))
        await records(clinic.letters, 2)
    async with running(clinic.service(other), Part.CONSUME):
        await visit(2).send(producer, visits(clinic))
        await eventually(lambda: len(clinic.handled) == 2)
    await forget_now(db, "p1", by="ada", wait=10)
    async with running(clinic.service(personal), Part.RELAY):
        found = await records(clinic.letters, 3)
    assert json.loads(found[-1].value) == {"patient": "p1", "text": None, "number": 2}


async def test_the_archive_has_what_the_table_has(
    clinic: Clinic,
    running: Running,
    producer: AIOKafkaProducer,
    records: Records,
    personal: PersonalData,
    db: asyncpg.Connection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(clinic.service(personal)):
        await visit(1).send(producer, visits(clinic))
        await records(clinic.letters, 2)
    monkeypatch.setenv("PIPELINE_ARCHIVE_URL", tmp_path.as_uri())
    table, day = await db.fetchrow(
        "SELECT tableoid::regclass::text, created_at::date FROM pipeline.outbox LIMIT 1"
    )

    async def report(progress: str) -> None:
        return None

    await Archive("clinic").keep(db, table.removeprefix("pipeline."), day, report)
    parts = await asyncio.to_thread(lambda: [p.read_bytes() for p in tmp_path.rglob("*.gz")])
    text = b"".join(map(gzip.decompress, parts)).decode()
    assert text.count("personal-1") == 2
    assert SECRET not in text
    assert base64.b64encode(SECRET.encode()).decode() not in text


def visits(clinic: Clinic) -> str:
    """Return the topic of visits."""
    (topic,) = (one for one in clinic.handlers.topics)
    return topic


async def test_a_service_without_the_answer_stores_what_it_gets(
    clinic: Clinic, running: Running, producer: AIOKafkaProducer, records: Records, search: Search
) -> None:
    async with running(clinic.service(None)):
        await visit(1).send(producer, visits(clinic))
        await records(clinic.letters, 2)
    assert "outbox.payload" in await search(SECRET), "the search finds what is there"
