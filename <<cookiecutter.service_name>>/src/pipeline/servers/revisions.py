"""Revisions: which of the code's migrations a database lacks.

On an older schema the code would fail later, at some statement. A newer one is allowed: the schema
of a release works with the code of the previous one.
"""

from pathlib import Path

import asyncpg
from alembic.config import Config
from alembic.script import ScriptDirectory

ALEMBIC = Path("alembic.ini")
"""Alembic's configuration, in the working directory of a service's processes."""

_APPLIED = "SELECT version_num FROM alembic_version"


class NotMigrated(Exception):
    """The database is older than the code."""

    def __init__(self, missing: set[str] | None = None) -> None:
        lacks = f"lacks {', '.join(sorted(missing))}" if missing else "has no pipeline tables yet"
        super().__init__(f"the database {lacks}: run `service migrate` first")


def load_migrations() -> ScriptDirectory | None:
    """Return the engine's and the service's migrations; None without a configuration of Alembic.

    Raises `alembic.util.CommandError` if Alembic can't read them.
    """
    return ScriptDirectory.from_config(Config(ALEMBIC)) if ALEMBIC.exists() else None


async def check(connection: asyncpg.Connection, migrations: ScriptDirectory | None) -> None:
    """Raise `NotMigrated` if the database is older than the migrations, if they are known."""
    if migrations and (lacking := await missing(connection, migrations)):
        raise NotMigrated(lacking)


async def applied_revisions(connection: asyncpg.Connection) -> list[str]:
    """Return the revisions that the database was migrated to."""
    return sorted([row["version_num"] for row in await connection.fetch(_APPLIED)])


async def missing(connection: asyncpg.Connection, migrations: ScriptDirectory) -> set[str]:
    """Return the newest revision of each branch that the database was not migrated to.

    A revision of the database that is not among the migrations is of a newer release. It may belong
    to any branch of which the database has no known revision: those count as migrated.
    """
    try:
        applied = set(await applied_revisions(connection))
    except asyncpg.UndefinedTableError:
        applied = set()
    known = applied & {one.revision for one in migrations.walk_revisions()}
    # The table of Alembic leaves out those that others depend on.
    implied = {one.revision for row in known for one in migrations.iterate_revisions(row, "base")}
    lacking = set(migrations.get_heads()) - implied
    if applied == known:
        return lacking
    branches = {label for row in known for label in migrations.get_revision(row).branch_labels}
    return {
        head
        for head in lacking
        if not branches.isdisjoint(migrations.get_revision(head).branch_labels)
    }
