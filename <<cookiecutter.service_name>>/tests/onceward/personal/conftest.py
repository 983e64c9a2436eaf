"""A database with the package's tables, master keys, and appliers that encrypt."""

import base64
from collections.abc import Awaitable, Callable, Iterator

import asyncpg
import pytest

from onceward.personal import PersonalData
from onceward.servers.database import autocommitting

from .clinic import Clinic
from tests.contract.bank import Base
from tests.onceward.integration.applier import Applier, NewApplier
from tests.onceward.integration.conftest import commands, new_applier  # noqa: F401 (fixtures)
from tests.servers.databases import built, migrations_of_the_engine

KEYS = [base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2)]
"""Two master keys."""

_TEXTS = """
SELECT table_name, column_name FROM information_schema.columns
 WHERE table_schema = 'pipeline'
   AND (data_type IN ('text', 'bytea', 'json', 'jsonb') OR data_type LIKE 'character%')
"""

Search = Callable[[str], Awaitable[set[str]]]


@pytest.fixture(scope="session")
def template(server_url: str) -> Iterator[str]:
    """Name of a database with the tables of this package, too."""
    config = migrations_of_the_engine("onceward.personal:migrations")
    with built(server_url, config, Base.metadata) as name:
        yield name


@pytest.fixture(autouse=True)
def master_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the first master key."""
    monkeypatch.setenv("PIPELINE_PERSONAL_KEYS", KEYS[0])


@pytest.fixture
def personal() -> PersonalData:
    """Return the encryption of one process."""
    return PersonalData()


NewClinic = Callable[..., Awaitable[tuple[Clinic, Applier]]]


@pytest.fixture
def new_clinic(new_applier: NewApplier, personal: PersonalData) -> NewClinic:  # noqa: F811
    """Open clinics whose messages the test applies itself."""

    async def make(**changes: object) -> tuple[Clinic, Applier]:
        clinic = Clinic(visits="visits", letters="letters", name="applier")
        applier = await new_applier(clinic.handlers, topic="visits", **changes)
        applier.consume.encryption = personal
        return clinic, applier

    return make


@pytest.fixture
def search(db: asyncpg.Connection) -> Search:
    """Return the columns of the engine's tables in which a text is."""

    async def find(text: str) -> set[str]:
        found = set()
        columns = await db.fetch(_TEXTS)
        assert len(columns) > 50
        for table, column in columns:
            # The text of bytes is hexadecimal.
            statement = f"""
                SELECT count(*) FROM pipeline."{table}" AS one
                 WHERE position($1 IN "{column}"::text) > 0
                    OR position($2 IN "{column}"::text) > 0"""
            if await db.fetchval(statement, text, text.encode().hex()):
                found.add(f"{table}.{column}")
        return found

    return find


async def rows(applier: Applier, statement: str, *arguments: object) -> list[asyncpg.Record]:
    """Return what a statement reads."""
    async with autocommitting(applier.engine) as driver:
        found: list[asyncpg.Record] = await driver.fetch(statement, *arguments)
    return found
