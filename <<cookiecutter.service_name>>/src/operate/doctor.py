"""`service doctor`: makes every check, and reports what each has found.

A check that can't be made is a finding, too, and the others are made.
"""

from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from datetime import UTC, datetime

import asyncpg
from aiokafka.errors import KafkaError

from pipeline.errors import describe_error, summarize_error
from pipeline.servers import revisions, topics
from pipeline.service import Misconfigured, Service
from pipeline.settings import CLOCK_MARGIN, Settings

from . import health, server_checks, status, topic_checks
from .health import Finding
from .server_checks import ServerCheck

CLOCKS_APART = 2.0

# The catalogue is read because it needs no privileges. A table without a schema is looked for in
# all of them: the service's role may have another search path than this one.
_LACKING = """
SELECT schema, name, array_agg(field ORDER BY place) AS fields
  FROM unnest($1::text[], $2::text[], $3::text[]) WITH ORDINALITY
       AS declared (schema, name, field, place)
 WHERE NOT EXISTS (
       SELECT FROM pg_namespace AS space
         JOIN pg_class AS relation ON relation.relnamespace = space.oid
         JOIN pg_attribute AS attribute ON attribute.attrelid = relation.oid
        WHERE nspname = COALESCE(schema, nspname) AND relname = name AND attname = field
          AND NOT attisdropped)
 GROUP BY schema, name ORDER BY min(place)
"""

Findings = AsyncIterator[Finding]


async def examine(
    connection: asyncpg.Connection | None, service: Service, settings: Settings
) -> Findings:
    """Make every check in turn; without a connection those that need no PostgreSQL."""
    described = None
    try:
        names = service.topics | ({settings.dead_letter_topic or ""} - {""})
        described = await topics.describe(settings, names)
        yield Finding("ok", f"{settings.kafka} answers", check="kafka")
    except (KafkaError, OSError, TimeoutError) as error:
        found = f"{settings.kafka}: {describe_error(error)}; checks of topics and lag can't be made"
        advice = "start the brokers, or correct PIPELINE_KAFKA_BOOTSTRAP_SERVERS"
        yield Finding("wrong", found, advice, check="kafka")
    for one in _named("settings", _settings(service, settings)):
        yield one
    if described is not None:
        for check in topic_checks.CHECKS:
            made = check(service, settings, described)
            for one in _named(check.__name__.replace("_", " "), made):
                yield one
    if connection is None:
        return
    for name, findings in _of_database(connection, service, settings).items():
        try:
            of_database = [one async for one in findings]
        except (asyncpg.InvalidSchemaNameError, asyncpg.UndefinedTableError) as error:
            found = f"not migrated: {describe_error(error)}"
            of_database = [Finding("wrong", found, "run `service migrate`")]
        except (asyncpg.PostgresError, TimeoutError) as error:
            if connection.is_closed():
                raise  # the server is away, and no check can be made
            found = f"the check can't be made: {describe_error(error)}"
            advice = "correct the cause, and run `service doctor` again"
            of_database = [Finding("warning", found, advice)]
        for one in _named(name, of_database):
            yield one


def _of_database(
    connection: asyncpg.Connection, service: Service, settings: Settings
) -> dict[str, Findings]:
    return {
        "schema": _schema(connection),
        "tables": _tables(connection, service),
        "pooler": _pooler(connection, settings),
        "clock": _clock(connection),
        "status": _status(connection, service, settings),
        **{one.name: _server(connection, one) for one in server_checks.CHECKS},
    }


def _named(name: str, findings: Iterable[Finding]) -> list[Finding]:
    """Return findings that bear the name of their check; none means that all is well."""
    found = [one if one.check else replace(one, check=name) for one in findings]
    return found or [Finding("ok", "as it should be", check=name)]


async def _status(connection: asyncpg.Connection, service: Service, settings: Settings) -> Findings:
    for one in health.judge(await status.look(connection, service, settings)):
        yield one


async def _server(connection: asyncpg.Connection, check: ServerCheck) -> Findings:
    for one in check.findings(await connection.fetch(check.statement, *check.arguments)):
        yield one


def _settings(service: Service, settings: Settings) -> Iterable[Finding]:
    try:
        service.check(settings)
    except Misconfigured as error:
        advice = "change what it names, and start the service again"
        yield Finding("wrong", summarize_error(error), advice)


async def _schema(connection: asyncpg.Connection) -> Findings:
    migrations = revisions.load_migrations()
    if migrations is None:
        found = "no alembic.ini here, so that it is not known which schema is the newest"
        yield Finding("warning", found, "run `service doctor` in the service's folder")
    elif missing := await revisions.missing(connection, migrations):
        found = f"not migrated to {', '.join(sorted(missing))}"
        yield Finding("wrong", found, "run `service migrate`")


async def _tables(connection: asyncpg.Connection, service: Service) -> Findings:
    """Find tables and columns that the service's code has and no migration has made."""
    declared = [
        (table.schema, table.name, column.name)
        for table in service.metadata.sorted_tables
        for column in table.columns
    ]
    columns = [list(names) for names in zip(*declared, strict=True)] or [[], [], []]
    migrations = revisions.load_migrations()
    is_behind = migrations and await revisions.missing(connection, migrations)
    write = "write the migration (`alembic revision --autogenerate --head service@head -m …`), and "
    for row in await connection.fetch(_LACKING, *columns):
        name = ".".join(filter(None, (row["schema"], row["name"])))
        yield Finding(
            "wrong",
            f"the table {name} lacks {', '.join(row['fields'])}, which the code has",
            f"{'' if is_behind else write}run `service migrate`",
        )


async def _pooler(connection: asyncpg.Connection, settings: Settings) -> Findings:
    # A pooler invents the process ids that it gives its clients.
    given = connection.get_server_pid()
    is_there = given != await connection.fetchval("SELECT pg_backend_pid()")
    if is_there and not settings.database_pooler:
        found = "there is a pooler before the database, and the settings name none"
        yield Finding("wrong", found, "set PIPELINE_DATABASE_POOLER=true")
    elif settings.database_pooler and not is_there:
        found = "the settings name a pooler, and there is none: each statement is prepared anew"
        yield Finding("warning", found, "unset PIPELINE_DATABASE_POOLER")


async def _clock(connection: asyncpg.Connection) -> Findings:
    before = datetime.now(UTC)
    theirs = await connection.fetchval("SELECT clock_timestamp()")
    after = datetime.now(UTC)
    apart = max((before - theirs).total_seconds(), (theirs - after).total_seconds())
    if apart > CLOCKS_APART:
        yield Finding(
            "wrong" if apart > CLOCK_MARGIN.total_seconds() else "warning",
            f"the clocks of this host and of the database are {apart:,.0f} s apart",
            "synchronize both by NTP (`timedatectl status`)",
        )
