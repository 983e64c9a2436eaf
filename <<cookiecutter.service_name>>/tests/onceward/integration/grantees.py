"""Roles of the database for tests, each for a part of the service."""

import asyncio
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

import asyncpg
import pytest
from servers.console import StackError
from servers.postgres import installation
from sqlalchemy import make_url

from tests.servers.databases import administer
from tests.servers.pooler import POOLED
from tests.servers.processes import ROOT

DIRECTLY = pytest.mark.skipif(POOLED, reason="the pooler of the tests knows one user")

PASSWORD = "tests-only"

PARTS = ("service", "relay", "operator", "retention")
SQL = ROOT / "deploy" / "postgres" / "roles.sql"


class NotGranted(Exception):
    """psql has failed, and says why."""


async def grant(url: str, names: Mapping[str, str]) -> None:
    """Run the script with the roles of these names, by part. Raises `NotGranted`."""
    variables = [f"--set={part}={name}" for part, name in names.items()]
    command = [_psql(), "--no-psqlrc", "--quiet", *variables, f"--file={SQL}"]
    process = await asyncio.create_subprocess_exec(
        *command, url.replace("+asyncpg", ""), stdout=PIPE, stderr=STDOUT
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise NotGranted(output.decode())


def _psql() -> str:
    """Return the client of the servers' wheel, or that of the system.

    Debian's command of this name may be a wrapper without a client, installed with PgBouncer.
    """
    try:
        return str(installation() / "bin" / "psql")
    except StackError:
        return "psql"


@dataclass(frozen=True)
class Roles:
    """Roles of a test's own, by what they do; each is the user of a URL."""

    names: dict[str, str]
    url: str

    @property
    def parts(self) -> dict[str, str]:
        """Those of the parts: all but the owner."""
        return {one: self.names[one] for one in PARTS}

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
    every = ("owner", *PARTS)
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
    for table in (*(row["name"] for row in tables), "pipeline.backlog_call_seq"):
        await db.execute(f"ALTER TABLE {table} OWNER TO {names['owner']}")
    made = Roles(names, direct_url)
    for _ in range(2):
        await grant(made.of("owner"), made.parts)
    try:
        yield made
    finally:
        for name in reversed(names.values()):  # the owner last: default privileges are
            await db.execute(f"DROP OWNED BY {name} CASCADE")
        await administer(server_url, f"DROP ROLE {', '.join(names.values())}")
