"""`service doctor`: makes every check, and reports what each has found.

A check that can't be made is a finding, too, and the others are made.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
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
        yield Finding(
            "wrong",
            f"{settings.kafka}: {describe_error(error)}; checks of topics and lag can't be made",
            "start the brokers, or correct PIPELINE_KAFKA_BOOTSTRAP_SERVERS",
            check="kafka",
        )
    for one in _named("settings", _settings(service, settings)):
        yield one
    if described is not None:
        for check in topic_checks.CHECKS:
            found = check(service, settings, described)
            for one in _named(check.__name__.replace("_", " "), found):
                yield one
    if connection is not None:
        async for one in _of_database(connection, service, settings):
            yield one


async def _of_database(
    connection: asyncpg.Connection, service: Service, settings: Settings
) -> Findings:
    async def of_status() -> list[Finding]:
        return list(health.judge(await status.look(connection, service, settings)))

    checks: dict[str, Callable[[], Awaitable[list[Finding]]]] = {
        "schema": lambda: _all(_schema(connection)),
        "tables": lambda: _all(_tables(connection, service)),
        "pooler": lambda: _all(_pooler(connection, settings)),
        "clock": lambda: _all(_clock(connection)),
        "status": of_status,
    }
    for one in server_checks.CHECKS:
        checks[one.name] = lambda one=one: _all(one.findings(connection))  # type: ignore[misc]
    for name, check in checks.items():
        try:
            found = await check()
        except (asyncpg.InvalidSchemaNameError, asyncpg.UndefinedTableError) as error:
            missing = f"not migrated: {describe_error(error)}"
            found = [Finding("wrong", missing, "run `service migrate`")]
        except (asyncpg.PostgresError, TimeoutError) as error:
            if connection.is_closed():
                raise  # the server is away, and no check can be made
            why = f"the check can't be made: {describe_error(error)}"
            found = [Finding("warning", why, "correct the cause, and run `service doctor` again")]
        for one_found in _named(name, found):
            yield one_found


async def _all(findings: Findings) -> list[Finding]:
    return [one async for one in findings]


def _named(name: str, findings: Iterable[Finding]) -> list[Finding]:
    """Return findings that bear the name of their check; none means that all is well."""
    found = [one if one.check else replace(one, check=name) for one in findings]
    return found or [Finding("ok", "as it should be", check=name)]


def _settings(service: Service, settings: Settings) -> Iterable[Finding]:
    try:
        service.check(settings)
    except Misconfigured as error:
        advice = "change what it names, and start the service again"
        yield Finding("wrong", summarize_error(error), advice)


async def _schema(connection: asyncpg.Connection) -> Findings:
    migrations = revisions.load_migrations()
    if migrations is None:
        yield Finding(
            "warning",
            "no alembic.ini here, so that it is not known which schema is the newest",
            "run `service doctor` in the service's folder",
        )
    elif missing := await revisions.missing(connection, migrations):
        yield Finding(
            "wrong", f"not migrated to {', '.join(sorted(missing))}", "run `service migrate`"
        )


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
        yield Finding(
            "wrong",
            "there is a pooler before the database, and the settings name none",
            "set PIPELINE_DATABASE_POOLER=true",
        )
    elif settings.database_pooler and not is_there:
        yield Finding(
            "warning",
            "the settings name a pooler, and there is none: statements are prepared anew each time",
            "unset PIPELINE_DATABASE_POOLER",
        )


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
