"""Revisions: which of the code's migrations a database lacks, and which of the engine's columns.

On an older schema the code would fail later, at some statement. A newer one is allowed: the schema
of a release works with the code of the previous one.
"""

import json
import os
import traceback
from importlib import resources
from pathlib import Path

import asyncpg
import sqlalchemy as sa
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy.exc import DBAPIError

from onceward.errors import OncewardError, describe_error, sqlstate_of

from . import statements

_LONGEST_STATEMENT = 500
"""Characters of a statement that an error quotes."""
_NO_SCHEMA = "3F000"
"""PostgreSQL's error code if no schema of the search path exists."""
_IS_NULL = "23502"
"""PostgreSQL's error code for a row that has no value in a column that is NOT NULL."""

ALEMBIC = Path("alembic.ini")
"""Alembic's configuration, in the working directory of a service's processes."""

WRITE_MIGRATION = (
    "write the migration (`alembic revision --autogenerate --head service@head -m …`), and run"
    " `service migrate`"
)
"""What to do about `lacking` if all migrations were applied."""


class NotMigrated(OncewardError):
    """The database is older than the code."""

    def __init__(self, missing: set[str] | None = None) -> None:
        lacks = f"lacks {', '.join(sorted(missing))}" if missing else "has no pipeline tables yet"
        super().__init__(f"the database {lacks}: run `service migrate` first")


class WrongDatabase(NotMigrated):
    """The database can't be used by this service, migrated or not."""

    def __init__(self, found: str, advice: str) -> None:
        Exception.__init__(self, f"{found}: {advice}")
        self.found, self.advice = found, advice


class WrongColumns(NotMigrated):
    """The database is at the code's revision, and has other columns."""

    def __init__(self, wrong: list[str]) -> None:
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        text = (
            f"{', '.join(wrong[:5])}{more}: the database was altered, or migrated by a version of"
            " the template whose migrations were different; docs/updating.md says what to do"
        )
        Exception.__init__(self, text)


def load_migrations() -> ScriptDirectory | None:
    """Return the engine's and the service's migrations; None without a configuration of Alembic.

    Raises `alembic.util.CommandError` if Alembic can't read them.
    """
    return ScriptDirectory.from_config(Config(ALEMBIC)) if ALEMBIC.exists() else None


def unreadable() -> Path | None:
    """Return a file or folder of the migrations that Alembic would pass over or find empty."""
    folder = ALEMBIC.with_name("migrations")
    for path in (ALEMBIC, folder, *folder.rglob("*")):
        if path.exists() and not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
            return path
    return None


async def check(connection: asyncpg.Connection, migrations: ScriptDirectory | None) -> None:
    """Raise `NotMigrated` if the database is older than the migrations, if they are known.

    Raises `WrongColumns` if the engine's migrations were applied and did not make its columns.
    """
    if migrations is None:
        return
    if lacking := await missing(connection, migrations):
        raise NotMigrated(lacking)
    if wrong := await wrong_columns(connection, migrations):
        raise WrongColumns(wrong)


async def check_database(connection: asyncpg.Connection, service: str) -> None:
    """Raise `WrongDatabase` as `must_fit` does, or if Citus distributes tables of the engine."""
    *found, has_citus = await connection.fetchrow(statements.READ_DATABASE)
    must_fit(service, *found)
    if has_citus:
        table = await connection.fetchval(statements.FIND_DISTRIBUTED_TABLE)
        if table is not None:
            raise WrongDatabase(
                f"Citus has distributed pipeline.{table}, and the relay finds what was committed by"
                " the transaction ids of one server",
                f"SELECT undistribute_table('pipeline.{table}')",
            )


def refuse_engine(version: str, *, is_dsql: bool = False) -> None:
    """Raise `WrongDatabase` if the text of `version()` is that of an engine that lacks the parts of
    PostgreSQL which the inbox and the outbox need."""
    if "CockroachDB" in version:
        name, lacks = "CockroachDB", "it has no snapshots of transaction ids"
    elif "-YB-" in version:
        name, lacks = "YugabyteDB", "it has no snapshots of transaction ids"
    elif is_dsql:
        name, lacks = "Aurora DSQL", "it has no sequences, partitions, savepoints and triggers"
    else:
        return
    raise WrongDatabase(
        f"the database is {name}, which speaks PostgreSQL's protocol; but {lacks}",
        "let PIPELINE_DATABASE_URL name a PostgreSQL server",
    )


def must_fit(service: str, owner: str | None, encoding: str, version: str, is_dsql: bool) -> None:
    """Raise `WrongDatabase` if the schema is another service's, a character can't be stored, or the
    engine is not PostgreSQL."""
    refuse_engine(version, is_dsql=is_dsql)
    if encoding != "UTF8":
        raise WrongDatabase(
            f"the database's encoding is {encoding}, in which not every id and text can be stored",
            "create one by CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0",
        )
    if owner not in (None, service):
        raise WrongDatabase(
            f"the schema pipeline of this database is that of service {owner}, and this is service"
            f" {service}; both would lose messages",
            "let PIPELINE_DATABASE_URL name a database of its own. If the service was renamed,"
            f" execute COMMENT ON SCHEMA pipeline IS '{service}'",
        )


async def wrong_columns(connection: asyncpg.Connection, migrations: ScriptDirectory) -> list[str]:
    """Return default partitions, and columns that are missing or not as in `columns.json`.

    Nothing is compared if the newest revision of the engine is not known to be applied: a newer
    schema may have dropped what this code no longer uses.
    """
    _, _, implied = await _known(connection, migrations)
    if migrations.get_revision("pipeline@head").revision not in implied:
        return []
    needed = resources.files("onceward.migrations").joinpath("columns.json").read_text("utf-8")
    return [row[0] for row in await connection.fetch(statements.FIND_WRONG_COLUMNS, needed)]


async def lacking(
    connection: asyncpg.Connection, declared: sa.MetaData, migrations: ScriptDirectory | None
) -> list[str]:
    """Return a sentence for each table that is declared and lacks columns in the database.

    Nothing is compared if a revision that is not among the migrations was applied, or if these are
    not known: a newer schema may have dropped what this code no longer uses.
    """
    if migrations is None or await unknown(connection, migrations):
        return []
    tables = {(table.schema, table.name): table for table in declared.tables.values()}
    columns = [(*name, column.name) for name, table in tables.items() for column in table.columns]
    names = [list(each) for each in zip(*columns, strict=True)] or [[], [], []]
    found = []
    for schema, name, fields in await connection.fetch(statements.FIND_MISSING_COLUMNS, *names):
        lacks_all = len(fields) == len(tables[schema, name].columns)
        what = "is missing" if lacks_all else f"lacks {', '.join(fields)}"
        found.append(f"the table {'.'.join(filter(None, (schema, name)))} of the code {what}")
    return found


async def sharing(connection: asyncpg.Connection, declared: sa.MetaData) -> list[tuple[str, str]]:
    """Return the columns of unique keys whose default is the same for all rows of a transaction,
    each after the name of its table."""
    tables = declared.tables.values()
    names = [[table.schema, table.name, table.fullname] for table in tables]
    defaults = {
        table.fullname: {
            column.name: str(column.default.arg)
            for column in table.columns
            if isinstance(column.default, sa.ColumnDefault) and column.default.is_clause_element
        }
        for table in tables
    }
    arrays = [list(each) for each in zip(*names, strict=True)] or [[], [], []]
    return [
        tuple(row)
        for row in await connection.fetch(
            statements.FIND_SHARED_DEFAULTS, *arrays, json.dumps(defaults)
        )
    ]


async def applied_revisions(connection: asyncpg.Connection) -> list[str]:
    """Return the revisions that the database was migrated to."""
    return sorted(
        [row["version_num"] for row in await connection.fetch(statements.LIST_APPLIED_REVISIONS)]
    )


async def unknown(connection: asyncpg.Connection, migrations: ScriptDirectory) -> set[str]:
    """Return the applied revisions that are not among the migrations."""
    return (await _known(connection, migrations))[0]


async def missing(connection: asyncpg.Connection, migrations: ScriptDirectory) -> set[str]:
    """Return the newest revision of each branch that the database was not migrated to.

    A revision of the database that is not among the migrations is of a newer release. It may belong
    to any branch of which the table of Alembic has no known revision: those count as migrated.
    """
    unknown, known, implied = await _known(connection, migrations)
    heads = set(migrations.get_heads()) - implied
    if not unknown:
        return heads
    branches = {label for row in known for label in migrations.get_revision(row).branch_labels}
    return {
        head
        for head in heads
        if not branches.isdisjoint(migrations.get_revision(head).branch_labels)
    }


async def _known(
    connection: asyncpg.Connection, migrations: ScriptDirectory
) -> tuple[set[str], set[str], set[str]]:
    """Return the revisions of Alembic's table that are not among the migrations, those that are,
    and these with all that they imply."""
    try:
        applied = set(await applied_revisions(connection))
    except asyncpg.UndefinedTableError:
        applied = set()
    known = applied & {one.revision for one in migrations.walk_revisions()}
    # The table of Alembic leaves out those that others depend on.
    implied = {one.revision for row in known for one in migrations.iterate_revisions(row, "base")}
    return applied - known, known, implied


def describe_failure(error: Exception) -> str | None:
    """Return why a migration failed, where, and what to do; None if it is the fault of none."""
    if sqlstate_of(error) == _NO_SCHEMA:
        return (
            "no schema of the role's search_path exists, so that tables can't be created: create"
            " one, or ALTER ROLE … SET search_path = public"
        )
    frames = traceback.walk_tb(error.__traceback__)
    of_migrations = [one for one in frames if "down_revision" in one[0].f_globals]
    if not of_migrations:
        return None
    frame, line = of_migrations[-1]
    place = f"{frame.f_code.co_filename}, line {line}"
    if isinstance(error, DBAPIError) and error.statement:
        statement = " ".join(error.statement.split())
        cut = "…" if len(statement) > _LONGEST_STATEMENT else ""
        place += f", in the statement: {statement[:_LONGEST_STATEMENT]}{cut}"
    advice = "correct the migration"
    if sqlstate_of(error) == _IS_NULL:
        advice = "give a new column that is not nullable a server_default"
    return (
        f"the migration {frame.f_globals['revision']} failed, and its transaction was rolled back:"
        f" {describe_error(error)}\n  at {place}\n  {advice}, and run `service migrate` again;"
        " migrations before it, and what it committed itself, stay"
    )
