"""The test kit of a service that encrypts: outcomes have the personal data that tables lack."""

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from onceward import Service
from onceward.personal import PersonalData
from onceward.testing import Harness, Sent
from onceward.testing.databases import ResettableDatabase, resettable_database

from .clinic import SECRET, Clinic, LetterSent, Visited, rejects
from tests.contract.bank import Base
from tests.servers import databases
from tests.servers.databases import migrations_of_the_engine

pytestmark = pytest.mark.integration

CLINIC = Clinic(visits="visits", letters="letters-of-the-kit", name="clinic")


@pytest.fixture(scope="session")
def harness_service() -> Service:
    return CLINIC.service(PersonalData())


@pytest.fixture(scope="module")
def harness_database(harness_server: str, harness_service: Service) -> Iterator[ResettableDatabase]:
    """A database with the package's tables, which that of the session may lack."""
    config = migrations_of_the_engine("onceward.personal:migrations")

    def migrate(url: str) -> None:
        databases.build(url, config, Base.metadata)

    with resettable_database(harness_server, harness_service, migrate) as one:
        yield one


async def test_an_outcome_has_the_personal_data_that_tables_lack(harness: Harness) -> None:
    CLINIC.does = dict(enumerate((CLINIC.sends, CLINIC.schedules, CLINIC.calls, rejects)))
    visits = [Visited(patient="p1", email=SECRET, number=number) for number in CLINIC.does]
    outcome = await harness.handle_batch([Sent(one, key="p1") for one in visits])
    assert outcome.published == [
        CLINIC.letter(patient="p1", email=SECRET, number=0),
        CLINIC.note(patient="p1", text=SECRET, number=0),
    ]
    letter = CLINIC.letter(patient="p1", email=SECRET, number=1)
    assert [one.event for one in outcome.scheduled] == [letter]
    assert outcome.calls == [LetterSent(patient="p1", email=SECRET, number=2)]
    (dead,) = await harness.dead_letters()
    assert SECRET.encode() in (dead.value or b"")
    async with harness.session() as session:
        for table, column in ("outbox", "payload"), ("scheduled", "payload"), ("backlog", "value"):
            found = await session.scalars(sa.text(f"SELECT {column} FROM pipeline.{table}"))
            stored = b"".join(found)
            assert b"p1" in stored
            assert SECRET.encode() not in stored
    CLINIC.does = {}
    assert (await harness.redrive(dead)).applied == ["visit"]
    assert (await harness.advance(hours=1)).published == [letter]
    CLINIC.called.clear()
    await harness.run_calls({"post": lambda event, call: CLINIC.called.append(event)})
    assert CLINIC.called == outcome.calls
