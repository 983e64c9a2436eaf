"""What is handed to a correction is encrypted, and not handed if its subject is forgotten."""

import asyncpg
import pytest

from onceward import Transaction
from onceward.operators import corrections
from onceward.personal import PersonalData
from onceward.personal.erasing import forget_now
from onceward.servers.database import autocommitting

from .clinic import SECRET, Clinic, Visited, visit
from .conftest import Search
from tests.onceward.integration.applier import NewApplier

pytestmark = pytest.mark.integration


async def test_a_correction_has_its_payload_encrypted_and_fails_for_a_forgotten_subject(
    new_applier: NewApplier, personal: PersonalData, db: asyncpg.Connection, search: Search
) -> None:
    clinic = Clinic(visits="visits", letters="letters", name="applier")
    made: list[tuple[int, str]] = []

    @clinic.handlers.correct(Visited, topic="visits", of="visit", consumer="again")
    async def again(event: Visited, tx: Transaction) -> None:
        made.append((event.number, event.email))

    applier = await new_applier(clinic.handlers, topic="visits")
    applier.consume.encryption = personal
    visits = visit(1), visit(2, patient="p2")
    await applier.apply(*visits)
    records = [one.record("visits", offset) for offset, one in enumerate(visits)]
    found = [corrections.item_of(clinic.handlers, "again", one) for one in records]
    items = [one for one in found if one is not None]
    async with autocommitting(applier.engine) as driver, driver.transaction():
        assert len(await corrections.hand(driver, items, 0.0, personal)) == 2
    assert await search(SECRET) == set()
    await forget_now(db, "p1", by="ada", wait=5)
    await applier.make_due()
    await applier.work_off()
    assert made == [(2, SECRET)]
    assert await applier.park() == {("again", 0): "subject forgotten"}
