"""The checks of `service doctor`.

A check that can't be made is reported as a finding, and the others are still made.
"""

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import asyncpg
from aiokafka.errors import KafkaError

from pipeline.consume import stamps
from pipeline.errors import describe_error, summarize_error
from pipeline.servers import cluster, revisions, topics
from pipeline.service import Misconfigured, Service
from pipeline.settings import CLOCK_MARGIN, Settings

from . import health, status, topic_checks
from .health import Finding, Level, named

CLOCKS_APART = 2.0
LONG = timedelta(minutes=5)
"""How long a transaction may be open."""
BLOATED = 10_000
"""A table is bloated with more dead rows than this, if they are ten times as many as its others."""
OLDEST_POSTGRESQL = 14
_HOT = ["backlog", "backlog_lane", "outbox_cursor", "outbox_rejected", "position", "scheduled"]
"""Tables whose rows are updated and deleted; the others are dropped as a whole."""


@dataclass(frozen=True)
class ServerCheck:
    """A statement. Each row is a finding: its columns are placeholders in `found` and `advice`.

    A column `level` replaces the level.
    """

    name: str
    level: Level
    found: str
    advice: str
    statement: str
    arguments: tuple[object, ...] = ()


SERVER_CHECKS = (
    ServerCheck(
        "server",
        "ok",
        "PostgreSQL {version}; {oldest} is the oldest supported version",
        "{advice}",
        """
SELECT current_setting('server_version') AS version, $1 AS oldest,
       CASE WHEN is_old THEN 'wrong' ELSE 'ok' END AS level,
       CASE WHEN is_old THEN 'upgrade the server' ELSE '' END AS advice
  FROM (SELECT current_setting('server_version_num')::int < 10000 * $1::int AS is_old) AS server
""",
        (OLDEST_POSTGRESQL,),
    ),
    ServerCheck(
        "standby",
        "wrong",
        "this server is a standby, on which nothing can be written",
        "let PIPELINE_DATABASE_URL name the primary",
        "SELECT WHERE pg_is_in_recovery()",
    ),
    ServerCheck(
        "jit",
        "warning",
        "jit is on: compiling the statement for a page of the outbox takes longer than running it",
        "ALTER ROLE {role} SET jit = off",
        "SELECT quote_ident(current_user) AS role WHERE current_setting('jit') <> 'off'",
    ),
    ServerCheck(
        "activity",
        "warning",
        "role {role} does not see open transactions of other roles",
        "GRANT pg_read_all_stats TO {role}",
        """
SELECT quote_ident(current_user) AS role WHERE NOT pg_has_role('pg_read_all_stats', 'USAGE')
""",
    ),
    ServerCheck(
        "long transactions",
        "warning",
        "a transaction of process {pid} of {name} is open since {xact_start}: nothing is vacuumed"
        " meanwhile",
        "end it: SELECT pg_terminate_backend({pid})",
        """
SELECT pid, COALESCE(NULLIF(application_name, ''), usename, '?') AS name, xact_start
  FROM pg_stat_activity
 WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'
   AND xact_start < clock_timestamp() - $1::interval
 ORDER BY xact_start LIMIT 5
""",
        (LONG,),
    ),
    ServerCheck(
        "bloat",
        "warning",
        "pipeline.{relname} has {dead:,} dead rows for {living:,}",
        "end what is open for long, then VACUUM pipeline.{relname}",
        """
SELECT relname, n_live_tup AS living, n_dead_tup AS dead FROM pg_stat_user_tables
 WHERE schemaname = 'pipeline' AND relname = ANY ($1)
   AND n_dead_tup > $2 AND n_dead_tup > 10 * n_live_tup
 ORDER BY relname
""",
        (_HOT, BLOATED),
    ),
    ServerCheck(
        "sizes",
        "ok",
        "{total:,} MB in all, the largest with their indexes: {largest}",
        "",
        """
  WITH sizes AS (
       SELECT root.relname AS name,
              (sum(pg_total_relation_size(one.oid)) / 1000000)::bigint AS megabytes
         FROM pg_class AS one
         JOIN pg_class AS root ON root.oid = COALESCE(pg_partition_root(one.oid), one.oid)
        WHERE one.relnamespace = 'pipeline'::regnamespace AND one.relkind IN ('r', 'p')
        GROUP BY root.relname)
SELECT sum(megabytes)::bigint AS total,
       (SELECT string_agg(format('%s %s MB', name, megabytes), ', ' ORDER BY megabytes DESC)
          FROM (SELECT * FROM sizes ORDER BY megabytes DESC LIMIT 4) AS first) AS largest
  FROM sizes
""",
    ),
)

Findings = AsyncIterator[Finding]


async def examine(
    connection: asyncpg.Connection | None, service: Service, settings: Settings
) -> Findings:
    """Make all checks, one after the other; without a connection those without PostgreSQL."""
    described = None
    try:
        described = await topics.describe(settings, topic_checks.used(service, settings))
        yield Finding("ok", f"{settings.kafka} answers", check="kafka")
    except (KafkaError, OSError) as error:
        found = f"{settings.kafka}: {describe_error(error)}; checks of topics and lag can't be made"
        advice = "start the brokers, or correct PIPELINE_KAFKA_BOOTSTRAP_SERVERS"
        yield Finding("wrong", found, advice, check="kafka")
    for one in named("settings", _settings(service, settings)):
        yield one
    if described is not None:
        for check in topic_checks.CHECKS:
            made = check(service, settings, described)
            for one in named(check.__name__.replace("_", " "), made):
                yield one
    if connection is None:
        return
    checks: dict[str, Findings] = {
        **({"group": _group(connection, service, settings)} if described is not None else {}),
        "schema": _schema(connection),
        "tables": _tables(connection, service),
        "sequences": _sequences(connection),
        "pooler": _pooler(connection, settings),
        "clock": _clock(connection),
        "status": _status(connection, service, settings),
        **{one.name: _server(connection, one) for one in SERVER_CHECKS},
    }
    for name, findings in checks.items():
        try:
            of_database = [one async for one in findings]
        except (asyncpg.InvalidSchemaNameError, asyncpg.UndefinedTableError) as error:
            found = f"not migrated: {describe_error(error)}"
            of_database = [Finding("wrong", found, "run `service migrate`")]
        except (asyncpg.PostgresError, KafkaError, OSError) as error:
            if connection.is_closed():
                raise  # without PostgreSQL no further check can be made
            found = f"the check can't be made: {describe_error(error)}"
            advice = "correct the cause, and run `service doctor` again"
            of_database = [Finding("warning", found, advice)]
        for one in named(name, of_database):
            yield one


async def _status(connection: asyncpg.Connection, service: Service, settings: Settings) -> Findings:
    for one in health.judge(await status.look(connection, service, settings)):
        yield one


async def _server(connection: asyncpg.Connection, check: ServerCheck) -> Findings:
    for row in await connection.fetch(check.statement, *check.arguments):
        level = row.get("level", check.level)
        yield Finding(level, check.found.format(**row), check.advice.format(**row))


def _settings(service: Service, settings: Settings) -> Iterable[Finding]:
    yield from (Finding("warning", *one) for one in service.plaintext(settings))
    try:
        service.check(settings)
    except Misconfigured as error:
        advice = "change what it names, and start the service again"
        yield Finding("wrong", summarize_error(error), advice)


async def _group(connection: asyncpg.Connection, service: Service, settings: Settings) -> Findings:
    try:
        await stamps.check(connection, settings, service.name, service.handlers.topics)
    except revisions.WrongDatabase as error:
        yield Finding("wrong", error.found, error.advice)
    except cluster.NotAdopted as error:
        yield Finding("wrong", str(error), "run `service adopt` as that page says", check="brokers")


async def _schema(connection: asyncpg.Connection) -> Findings:
    migrations = revisions.load_migrations()
    if migrations is None:
        found = "there is no alembic.ini in this folder: the newest schema is not known"
        yield Finding("warning", found, "run `service doctor` in the service's folder")
    elif missing := await revisions.missing(connection, migrations):
        found = f"not migrated to {', '.join(sorted(missing))}"
        yield Finding("wrong", found, "run `service migrate`")
    else:
        for wrong in await revisions.wrong_columns(connection, migrations):
            yield Finding("wrong", wrong, "docs/updating.md says how to correct it")


async def _tables(connection: asyncpg.Connection, service: Service) -> Findings:
    """Find tables and columns of the service's code that the database lacks."""
    migrations = revisions.load_migrations()
    is_behind = migrations and await revisions.missing(connection, migrations)
    advice = "run `service migrate`" if is_behind else revisions.WRITE_MIGRATION
    for found in await revisions.lacking(connection, service.metadata, migrations):
        yield Finding("wrong", found, advice)


async def _sequences(connection: asyncpg.Connection) -> Findings:
    for name, advances in await cluster.sequences_behind(connection):
        yield Finding("wrong", f"{name} is behind the numbers of rows", advances)


async def _pooler(connection: asyncpg.Connection, settings: Settings) -> Findings:
    # The process ids that a pooler gives its clients are not the server's.
    given = connection.get_server_pid()
    is_there = given != await connection.fetchval("SELECT pg_backend_pid()")
    if is_there and not settings.database_pooler:
        found = "the database is reached through a pooler, and the settings name none"
        advice = "set PIPELINE_DATABASE_POOLER=true, unless it pools by session"
        yield Finding("warning", found, advice)
    elif settings.database_pooler and not is_there:
        found = "the settings name a pooler, and there is none: no statement stays prepared"
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
