"""Roles of the database for tests, each for a part of the service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

import asyncpg
import pytest
from sqlalchemy import make_url

from operate import roles

from tests.contract.bank import Base
from tests.servers.databases import administer
from tests.servers.pooler import POOLED

DIRECTLY = pytest.mark.skipif(POOLED, reason="the pooler of the tests knows one user")

PASSWORD = "tests-only"


@dataclass(frozen=True)
class Roles:
    """Roles of a test's own, by what they do; each is the user of a URL."""

    names: dict[str, str]
    url: str

    def of(self, role: str) -> str:
        """Return the URL by which the role comes in."""
        url = make_url(self.url).set(username=self.names[role], password=PASSWORD)
        return url.render_as_string(hide_password=False)

    @asynccontextmanager
    async def connected(self, role: str) -> AsyncIterator[asyncpg.Connection]:
        """Connect as the role."""
        connection = await asyncpg.connect(self.of(role).replace("+asyncpg", ""))
        try:
            yield connection
        finally:
            await connection.close()


@asynccontextmanager
async def splitting(
    server_url: str, direct_url: str, db: asyncpg.Connection
) -> AsyncIterator[Roles]:
    """Make roles as docs/security.md does, with the test's database as the owner's.

    They may do what they may as of after a second migration.
    """
    mark = uuid4().hex[:8]
    every = ("owner", *roles.ROLES)
    names = {one: f"{one}_{mark}" for one in every}
    for name in names.values():
        await administer(server_url, f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'")
    await administer(server_url, f"GRANT {names['retention']} TO {names['owner']}")
    # What else the owner of a new database makes by migrating.
    await db.execute(f"ALTER SCHEMA pipeline OWNER TO {names['owner']}")
    tables = await db.fetch(
        "SELECT oid::regclass::text AS name FROM pg_class"
        " WHERE relnamespace IN ('pipeline'::regnamespace, 'public'::regnamespace)"
        " AND relkind IN ('r', 'p')"
    )
    for table in (*(row["name"] for row in tables), "pipeline.backlog_effect_seq"):
        await db.execute(f"ALTER TABLE {table} OWNER TO {names['owner']}")
    made = Roles(names, direct_url)
    async with made.connected("owner") as connection:
        for _ in range(2):
            granted = {one: names[one] for one in roles.ROLES}
            await roles.grant(connection, granted, Base.metadata)
    try:
        yield made
    finally:
        for name in reversed(names.values()):  # the owner last: default privileges are
            await db.execute(f"DROP OWNED BY {name} CASCADE")
        await administer(server_url, f"DROP ROLE {', '.join(names.values())}")
