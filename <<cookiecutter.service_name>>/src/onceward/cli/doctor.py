"""The checks of `service doctor`.

A check that can't be made is reported as a finding, and the others are still made.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import asyncpg
from aiokafka.errors import KafkaError

from onceward.consume import inbox_coverage, stamps
from onceward.errors import describe_error, summarize_error
from onceward.operators import adopting
from onceward.servers import cluster, revisions, topics
from onceward.servers.topics import MAY_NOT_DESCRIBE, Topics
from onceward.service import Misconfigured, Service
from onceward.settings import CLOCK_MARGIN, Settings

from . import health, status
from .health import Finding, Level, named

CLOCKS_APART = 2.0
LONG = timedelta(minutes=5)
"""How long a transaction may be open."""
BLOATED = 10_000
"""A table is bloated with more dead rows than this, if they are ten times as many as its others."""
OLDEST_POSTGRESQL = 14
_ENVELOPE = 10_000
"""Bytes of a record beside the payload, at most: its headers, and Kafka's own."""
_HOT = ["backlog", "backlog_lane", "outbox_cursor", "outbox_rejected", "position", "scheduled"]
"""Tables whose rows are updated and deleted; the others are dropped as a whole."""

# A row in a table that exists may fit in the space that it has. A new table needs more of the disk.
_WRITE = """
SET LOCAL temp_tablespaces = '';
CREATE TEMPORARY TABLE service_doctor ON COMMIT DROP AS SELECT 1
"""


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
) -> list[Finding]:
    """Make all checks, one after the other; without a connection those without PostgreSQL."""
    described = None
    try:
        described = await topics.describe(settings, used_topics(service, settings))
        found = [Finding("ok", f"{settings.kafka} answers", check="kafka")]
    except (KafkaError, OSError) as error:
        text = f"{settings.kafka}: {describe_error(error)}; checks of topics and lag can't be made"
        advice = "start the brokers, or correct PIPELINE_KAFKA_BOOTSTRAP_SERVERS"
        found = [Finding("wrong", text, advice, check="kafka")]
    found += named("settings", _settings(service, settings))
    found += named("order", (Finding("warning", *one) for one in service.handlers.rivals()))
    if described is not None:
        for name, check in TOPIC_CHECKS.items():
            found += named(name, check(service, settings, described))
    if connection is None:
        return found
    checks: dict[str, Findings] = {
        **({"group": _group(connection, service, settings)} if described is not None else {}),
        "schema": _schema(connection),
        "tables": _tables(connection, service),
        "sequences": _sequences(connection),
        "pooler": _pooler(connection, settings),
        "clock": _clock(connection),
        "writing": _writing(connection),
        "status": _status(connection, service, settings),
        **{one.name: _server(connection, one) for one in SERVER_CHECKS},
    }
    for name, findings in checks.items():
        try:
            of_database = [one async for one in findings]
        except (asyncpg.InvalidSchemaNameError, asyncpg.UndefinedTableError) as error:
            text = f"not migrated: {describe_error(error)}"
            of_database = [Finding("wrong", text, "run `service migrate`")]
        except (asyncpg.PostgresError, KafkaError, OSError) as error:
            if connection.is_closed():
                raise  # without PostgreSQL no further check can be made
            text = f"the check can't be made: {describe_error(error)}"
            advice = "correct the cause, and run `service doctor` again"
            of_database = [Finding("warning", text, advice)]
        found += named(name, of_database)
    return found


async def _writing(connection: asyncpg.Connection) -> Findings:
    """Find what prevents a transaction from writing, by one that is rolled back."""
    trial = connection.transaction()
    await trial.start()
    try:
        await connection.execute(_WRITE)
    except (asyncpg.ReadOnlySQLTransactionError, asyncpg.InsufficientResourcesError) as error:
        advice = "let PIPELINE_DATABASE_URL name the primary; for a full disk see docs/incidents.md"
        yield Finding("wrong", f"nothing can be written: {describe_error(error)}", advice)
    finally:
        await trial.rollback()


async def _status(connection: asyncpg.Connection, service: Service, settings: Settings) -> Findings:
    for one in health.judge(await status.look(connection, service, settings)):
        yield one


async def _server(connection: asyncpg.Connection, check: ServerCheck) -> Findings:
    for row in await connection.fetch(check.statement, *check.arguments):
        level = row.get("level", check.level)
        yield Finding(level, check.found.format(**row), check.advice.format(**row))


def used_topics(service: Service, settings: Settings) -> set[str]:
    """Return the topics that a service reads, declares events for, or sends dead letters to."""
    return {*service.topics, *filter(None, [settings.dead_letter_topic])}


def _topics(service: Service, settings: Settings, described: Topics) -> Iterator[Finding]:
    """Every topic that the service uses exists, and its configuration can be read."""
    for name in sorted(used_topics(service, settings).difference(described, described.hidden)):
        found = f"there is no topic {name}"
        yield Finding("wrong", found, "create it, in development by `service topics create`")
    for name in sorted(described.hidden):
        found, _, advice = MAY_NOT_DESCRIBE.partition(": ")
        yield Finding("wrong", f"topic {name} {found}", advice)
    for topic in described.values():
        if topic.unreadable:
            found = f"the configuration of {topic.name} can't be read: {topic.unreadable}"
            advice = f"allow this user its DescribeConfigs: {topic.name} (docs/security.md)"
            yield Finding("warning", found, advice)


def _topic_retention(service: Service, settings: Settings, described: Topics) -> Iterator[Finding]:
    """The inbox remembers for as long as a topic keeps its records."""
    consumed = {name: described[name] for name in described if name in service.handlers.topics}
    level: Level = "wrong" if settings.inbox_must_cover_topics else "warning"
    for found in inbox_coverage.exceeding(settings, consumed):
        yield Finding(level, *found)


def _compaction(service: Service, settings: Settings, described: Topics) -> Iterator[Finding]:
    """No topic is compacted, which deletes events."""
    for name, topic in described.items():
        if "compact" in topic.configs.get("cleanup.policy", ""):
            yield Finding(
                "warning",
                f"{name} is compacted: it rejects events without a key, and may lose all but the"
                " last event of each key",
                f"set cleanup.policy=delete for {name}, if every event is needed",
            )


def _message_size(service: Service, settings: Settings, described: Topics) -> Iterator[Finding]:
    """Topics that the service publishes to accept its largest event."""
    needed = settings.max_event_bytes + _ENVELOPE
    published = service.declared_topics | {settings.dead_letter_topic}
    for topic in (described[name] for name in sorted(described.keys() & published)):
        largest = int(topic.configs.get("max.message.bytes", needed))
        if largest < needed:
            yield Finding(
                "wrong",
                f"{topic.name} accepts records of {largest:,} bytes, and PIPELINE_MAX_EVENT_BYTES"
                f" allows events of {settings.max_event_bytes:,}",
                f"set max.message.bytes={needed} for {topic.name},"
                " or lower PIPELINE_MAX_EVENT_BYTES",
            )


TOPIC_CHECKS: Mapping[str, Callable[[Service, Settings, Topics], Iterator[Finding]]] = {
    "topics": _topics,
    "topic retention": _topic_retention,
    "compaction": _compaction,
    "message size": _message_size,
}


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
    for name, advances in await adopting.sequences_behind(connection):
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
