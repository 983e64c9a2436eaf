"""Revisions: which of the code's migrations a database lacks. It may have more than the code knows.

So the order of a release is checked, whichever way it goes: on an older schema the code would fail
at some statement, later; the schema of a newer release is made so that this one can work on it.
"""

from collections.abc import Iterator
from pathlib import Path

import asyncpg
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import to_tuple

ALEMBIC = Path("alembic.ini")
"""What names the migrations, in the folder that a service's processes work in."""

_HAD = "SELECT version_num FROM alembic_version"


class NotMigrated(Exception):
    """The database is older than the code."""

    def __init__(self, missing: set[str] | None = None) -> None:
        lacks = f"lacks {', '.join(sorted(missing))}" if missing else "has no pipeline tables yet"
        super().__init__(f"the database {lacks}: run `service migrate` first")


def here() -> ScriptDirectory | None:
    """Return this folder's migrations, the engine's and the service's; None where it names none.

    Raises `alembic.util.CommandError` for what Alembic can't read.
    """
    return ScriptDirectory.from_config(Config(ALEMBIC)) if ALEMBIC.exists() else None


async def check(connection: asyncpg.Connection, migrations: ScriptDirectory | None) -> None:
    """Raise `NotMigrated` for a database that is older; where none are named nothing is known."""
    if migrations and (lacking := await missing(connection, migrations)):
        raise NotMigrated(lacking)


async def reached(connection: asyncpg.Connection) -> list[str]:
    """Return the revisions that the database tells it has been brought to."""
    return sorted([row["version_num"] for row in await connection.fetch(_HAD)])


async def missing(connection: asyncpg.Connection, migrations: ScriptDirectory) -> set[str]:
    """Return the newest revisions, one of each branch, that the database has not been brought to.

    One that is not among the migrations is of a newer release. It stands for every branch of which
    the database tells no older one: it comes after what this code has of that branch.
    """
    try:
        had = set(await reached(connection))
    except asyncpg.UndefinedTableError:
        had = set()
    known = had & {one.revision for one in migrations.walk_revisions()}
    # Alembic does not tell those that others depend on.
    implied = {one for row in known for one in _up_to(migrations, row)}
    return {
        head
        for head in set(migrations.get_heads()) - implied
        if had == known or not known.isdisjoint(_branch(migrations, head))
    }


def _up_to(migrations: ScriptDirectory, revision: str) -> Iterator[str]:
    return (one.revision for one in migrations.iterate_revisions(revision, "base"))


def _branch(migrations: ScriptDirectory, head: str) -> Iterator[str]:
    """Return a revision and those below it, without what it only depends on."""
    left = [head]
    while left:
        revision = left.pop()
        yield revision
        left += to_tuple(migrations.get_revision(revision).down_revision, default=())
