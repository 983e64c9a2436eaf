"""The doctor: small checks of settings, servers and tables, and what to do about what they find.

A check that can't be made says so and keeps none of the others from being made.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

import asyncpg
from aiokafka.errors import KafkaError

from pipeline.errors import describe_error, summarize_error
from pipeline.retention import maintenance
from pipeline.servers import cluster, revisions, topics
from pipeline.servers.topics import Topic
from pipeline.service import Misconfigured, Service
from pipeline.settings import CLOCK_MARGIN, Settings

from .status import AT_MOST, OUTBOX, RELAYS, WAITING, ahead_until

Level = Literal["ok", "warning", "wrong"]

_OLDEST_POSTGRESQL = 14
_LONG = timedelta(minutes=5)
_SLOT_BYTES = 1_000_000_000
_BLOATED = 10_000
"""Dead rows of a table that has not a tenth as many living ones."""
_TOLD = 4
"""So many of the largest tables are told."""
_STANDS_STILL = timedelta(minutes=1)
_REFUSED_FOR_LONG = timedelta(minutes=15)
"""As the alert EventsRejected has it."""
_WAITS_FOR_LONG = timedelta(hours=1)
"""As the alert BacklogAge has it."""
_CLOCKS_APART = 2.0
_FOR_EVER = -1
_ENVELOPE = 10_000
"""Bytes that an event's headers and its record take beside the payload, with room."""

# By the catalogue: what others may be seen of depends on no grant there. What names no schema is in
# whichever the service's role looks into, which need not be those of this one.
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

_LONG_TRANSACTIONS = """
SELECT format('process %s of %s, since %s', pid,
              COALESCE(NULLIF(application_name, ''), usename, '?'), xact_start) AS who, pid
  FROM pg_stat_activity
 WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'
   AND xact_start < clock_timestamp() - $1::interval
 ORDER BY xact_start LIMIT 5
"""

_SEES_OTHERS = (
    "SELECT pg_has_role('pg_read_all_stats', 'USAGE') AS sees, quote_ident(current_user) AS who"
)

_PREPARED = """
SELECT gid FROM pg_prepared_xacts WHERE prepared < clock_timestamp() - $1::interval LIMIT 5
"""

_SLOTS = """
SELECT slot_name, pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint AS bytes
  FROM pg_replication_slots WHERE NOT active ORDER BY slot_name
"""

_BLOAT = """
SELECT relname, n_live_tup AS living, n_dead_tup AS dead FROM pg_stat_user_tables
 WHERE schemaname = 'pipeline' AND relname = ANY ($1)
   AND n_dead_tup > $2 AND n_dead_tup > 10 * n_live_tup
 ORDER BY relname
"""
_HOT = ["backlog", "backlog_lane", "outbox_cursor", "outbox_rejected", "position", "scheduled"]
"""Tables whose rows come and go, or change again and again; the others are dropped whole."""

_SIZES = """
SELECT root.relname AS name, sum(pg_total_relation_size(one.oid))::bigint AS bytes
  FROM pg_class AS one
  JOIN pg_class AS root ON root.oid = COALESCE(pg_partition_root(one.oid), one.oid)
 WHERE one.relnamespace = 'pipeline'::regnamespace AND one.relkind IN ('r', 'p')
 GROUP BY root.relname ORDER BY bytes DESC, name
"""

_DEAD = """
SELECT (SELECT count(*) FROM (SELECT FROM pipeline.backlog
                               WHERE died_at IS NOT NULL AND discarded_at IS NULL
                               LIMIT $1) AS few) AS messages,
       (SELECT count(*) FROM (SELECT FROM pipeline.outbox_rejected
                               WHERE died_at IS NOT NULL AND discarded_at IS NULL
                               LIMIT $1) AS few) AS events
"""

_REFUSED = """
SELECT topic, string_agg(DISTINCT reason, ', ') AS reasons, count(*) AS events
  FROM (SELECT topic, reason FROM pipeline.outbox_rejected
         WHERE died_at IS NULL AND parked_at < clock_timestamp() - $1::interval
         LIMIT $2) AS few
 GROUP BY topic ORDER BY topic
"""

_NOBODYS = """
SELECT consumer, count(*) AS messages
  FROM (SELECT consumer FROM pipeline.backlog
         WHERE consumer <> '' AND consumer <> ALL ($1) AND died_at IS NULL
         LIMIT $2) AS few
 GROUP BY consumer ORDER BY consumer
"""

_PARTITIONS = "SELECT topic, partition FROM pipeline.position WHERE consumer_group = $1"

_STANDING = """
SELECT topic, partition, next_offset FROM pipeline.position
 WHERE consumer_group = $1 AND moved_at < clock_timestamp() - $2::interval
"""


@dataclass(frozen=True)
class Finding:
    """What a check has found; `advice` is empty where all is well."""

    check: str
    level: Level
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Patient:
    """What checks ask."""

    service: Service
    settings: Settings
    connection: asyncpg.Connection
    topics: dict[str, Topic] | None
    """Those that exist; None where Kafka does not answer."""


Findings = AsyncIterator[Finding]
Check = Callable[[Patient], Findings]


async def examine(
    connection: asyncpg.Connection | None, service: Service, settings: Settings
) -> AsyncIterator[Finding]:
    """Make every check in turn. One that fails is a warning, and the next one is made.

    Without a connection only those are made that ask nothing of PostgreSQL.
    """
    described = None
    try:
        named_topics = set(service.topics)
        if settings.dead_letter_topic:
            named_topics.add(settings.dead_letter_topic)
        described = await topics.describe(settings, named_topics)
        yield Finding("kafka", "ok", f"{settings.kafka} answers")
    except (KafkaError, OSError, TimeoutError) as error:
        yield Finding(
            "kafka",
            "wrong",
            f"{settings.kafka}: {describe_error(error)}; checks of topics and lag can't be made",
            "start the brokers, or correct PIPELINE_KAFKA_BOOTSTRAP_SERVERS",
        )
    patient = Patient(service, settings, connection, described)
    for check in CHECKS:
        if connection is None and check not in _WITHOUT_POSTGRESQL:
            continue
        name = check.__name__.removeprefix("_").replace("_", " ")
        is_well = True
        try:
            async for one in check(patient):
                is_well = False
                yield Finding(name, one.level, one.found, one.advice)
        except (asyncpg.InvalidSchemaNameError, asyncpg.UndefinedTableError) as error:
            yield Finding(
                name, "wrong", f"not migrated: {describe_error(error)}", "run `service migrate`"
            )
        except (asyncpg.PostgresError, TimeoutError) as error:
            if connection is None or connection.is_closed():
                raise  # it is the server that is away, and no check can be made
            yield Finding(
                name,
                "warning",
                f"the check can't be made: {describe_error(error)}",
                "mend what is said, and run `service doctor` again",
            )
        else:
            if is_well and (described is not None or check not in _OF_KAFKA):
                yield Finding(name, "ok", "as it should be")


def _wrong(found: str, advice: str) -> Finding:
    return Finding("", "wrong", found, advice)


def _warning(found: str, advice: str) -> Finding:
    return Finding("", "warning", found, advice)


async def _settings(patient: Patient) -> Findings:
    try:
        patient.service.check(patient.settings)
    except Misconfigured as error:
        yield _wrong(summarize_error(error), "change what it names, and start the service again")


async def _server(patient: Patient) -> Findings:
    version = await patient.connection.fetchval("SHOW server_version")
    if patient.connection.get_server_version().major < _OLDEST_POSTGRESQL:
        yield _wrong(
            f"PostgreSQL {version} is older than {_OLDEST_POSTGRESQL}", "upgrade the server"
        )
    elif await patient.connection.fetchval("SELECT pg_is_in_recovery()"):
        yield _wrong(
            "this server is a standby, on which nothing can be written",
            "let PIPELINE_DATABASE_URL name the primary",
        )
    else:
        yield Finding("", "ok", f"PostgreSQL {version}")


async def _schema(patient: Patient) -> Findings:
    migrations = revisions.load_migrations()
    if migrations is None:
        yield _warning(
            "no alembic.ini here, so that it is not known which schema is the newest",
            "run `service doctor` in the service's folder",
        )
        return
    if missing := await revisions.missing(patient.connection, migrations):
        yield _wrong(f"not migrated to {', '.join(sorted(missing))}", "run `service migrate`")


async def _tables(patient: Patient) -> Findings:
    """Find what the service's code has and no migration has made."""
    declared = [
        (table.schema, table.name, column.name)
        for table in patient.service.metadata.sorted_tables
        for column in table.columns
    ]
    columns = [list(names) for names in zip(*declared, strict=True)] or [[], [], []]
    migrations = revisions.load_migrations()
    is_behind = migrations and await revisions.missing(patient.connection, migrations)
    write = "write the migration (`alembic revision --autogenerate --head service@head -m …`), and "
    for row in await patient.connection.fetch(_LACKING, *columns):
        name = ".".join(filter(None, (row["schema"], row["name"])))
        yield _wrong(
            f"the table {name} lacks {', '.join(row['fields'])}, which the code has",
            f"{'' if is_behind else write}run `service migrate`",
        )


async def _outbox_cluster(patient: Patient) -> Findings:
    if not await cluster.is_ours(patient.connection):
        yield _wrong(
            "the outbox is another database cluster's, and nothing is published",
            "run `service relay reset`",
        )


async def _partitions_ahead(patient: Patient) -> Findings:
    until = await ahead_until(patient.connection)
    now = await patient.connection.fetchval("SELECT clock_timestamp()")
    left = -1 if until is None else (until - now.astimezone(UTC).date()).days
    advice = "run `service retention run`, and see why no running service does"
    if left < 1:
        yield _wrong(f"the outbox has partitions until {until}", advice)
    elif left < patient.settings.outbox_days_ahead - 1:
        yield _warning(f"the outbox has partitions until {until}", advice)


async def _held_partitions(patient: Patient) -> Findings:
    async for one in maintenance.list_partitions(patient.connection, patient.settings):
        if one.is_due and one.needed_by:
            yield _warning(
                f"{one.name} is due to go: {one.needed_by}", "see `service retention status`"
            )


async def _pooler(patient: Patient) -> Findings:
    # A pooler gives its clients a process id of its own making.
    said = patient.connection.get_server_pid()
    is_there = said != await patient.connection.fetchval("SELECT pg_backend_pid()")
    if is_there and not patient.settings.database_pooler:
        yield _wrong(
            "a pooler stands before the database, and the settings don't know of it",
            "set PIPELINE_DATABASE_POOLER=true",
        )
    elif patient.settings.database_pooler and not is_there:
        yield _warning(
            "the settings name a pooler, and none is there: statements are prepared anew each time",
            "unset PIPELINE_DATABASE_POOLER",
        )


async def _jit(patient: Patient) -> Findings:
    if await patient.connection.fetchval("SELECT current_setting('jit')") != "off":
        user = await patient.connection.fetchval("SELECT quote_ident(current_user)")
        yield _warning(
            "jit is on: to compile a page of the outbox takes longer than to read it",
            f"ALTER ROLE {user} SET jit = off",
        )


async def _clock(patient: Patient) -> Findings:
    before = datetime.now(UTC)
    theirs = await patient.connection.fetchval("SELECT clock_timestamp()")
    after = datetime.now(UTC)
    apart = max((before - theirs).total_seconds(), (theirs - after).total_seconds())
    if apart > _CLOCKS_APART:
        what = f"the clocks of this host and of the database are {apart:,.0f} s apart"
        make = _wrong if apart > CLOCK_MARGIN.total_seconds() else _warning
        yield make(what, "synchronize both by NTP (`timedatectl status`)")


async def _outbox(patient: Patient) -> Findings:
    unsent = await patient.connection.fetchrow(OUTBOX, AT_MOST + 1)
    if unsent["oldest"] <= _STANDS_STILL.total_seconds():
        return
    least = "at least " if unsent["count"] > AT_MOST else ""
    waiting = f"{least}{unsent['count']:,} events wait, one for {unsent['oldest']:,.0f} seconds"
    shards = {row["owner"]: row["shards"] for row in await patient.connection.fetch(RELAYS)}
    if None in shards:
        what = f"{waiting}, and {len(shards[None])} shards have no relay"
        yield _wrong(what, "start `service relay`, or `service run` (NoRelayOwner in the runbook)")
    else:
        yield _warning(waiting, "see `/health/ready` of the relay (OutboxLag in the runbook)")


async def _long_transactions(patient: Patient) -> Findings:
    sees, who = await patient.connection.fetchrow(_SEES_OTHERS)
    if not sees:
        yield _warning(
            f"whether others hold transactions open is not known to role {who}",
            f"GRANT pg_read_all_stats TO {who}",
        )
    for row in await patient.connection.fetch(_LONG_TRANSACTIONS, _LONG):
        yield _warning(
            f"a transaction is open: {row['who']}; nothing is vacuumed meanwhile",
            f"end it: SELECT pg_terminate_backend({row['pid']})",
        )
    for row in await patient.connection.fetch(_PREPARED, _LONG):
        yield _warning(
            f"the prepared transaction {row['gid']} waits; nothing is vacuumed meanwhile",
            f"COMMIT PREPARED or ROLLBACK PREPARED '{row['gid']}'",
        )


async def _replication_slots(patient: Patient) -> Findings:
    for row in await patient.connection.fetch(_SLOTS):
        make = _wrong if (row["bytes"] or 0) > _SLOT_BYTES else _warning
        yield make(
            f"nobody reads replication slot {row['slot_name']}, which keeps"
            f" {(row['bytes'] or 0) / 1_000_000:,.0f} MB of the log, and dead rows",
            f"start its reader, or SELECT pg_drop_replication_slot('{row['slot_name']}')",
        )


async def _bloat(patient: Patient) -> Findings:
    for row in await patient.connection.fetch(_BLOAT, _HOT, _BLOATED):
        yield _warning(
            f"pipeline.{row['relname']} has {row['dead']:,} dead rows for {row['living']:,}",
            f"end what is open for long, then VACUUM pipeline.{row['relname']}",
        )


async def _sizes(patient: Patient) -> Findings:
    rows = await patient.connection.fetch(_SIZES)
    large = [f"{row['name']} {row['bytes'] / 1_000_000:,.0f} MB" for row in rows[:_TOLD]]
    total = f"{sum(row['bytes'] for row in rows) / 1_000_000:,.0f} MB"
    yield Finding("", "ok", f"{total} in all, the largest with their indexes: {', '.join(large)}")


async def _dead_letters(patient: Patient) -> Findings:
    row = await patient.connection.fetchrow(_DEAD, AT_MOST + 1)
    for what, command in (("messages", "dead list"), ("events", "dead events list")):
        if count := row[what]:
            yield _warning(
                f"dead {what}, for a person to decide on: {_many(count)}",
                f"see `service {command}`, mend the cause, and redrive or discard them",
            )


def _many(count: int) -> str:
    return f"more than {AT_MOST:,}" if count > AT_MOST else f"{count:,}"


async def _unsent(patient: Patient) -> Findings:
    """Find events that Kafka refuses."""
    rows = await patient.connection.fetch(_REFUSED, _REFUSED_FOR_LONG, AT_MOST + 1)
    for row in rows:
        yield _wrong(
            f"Kafka refuses events for {row['topic']} ({row['reasons'] or 'follow another'}), and"
            f" these wait for over {_REFUSED_FOR_LONG.total_seconds() / 60:.0f} minutes:"
            f" {_many(row['events'])}",
            "see `service dead events list --waiting --summary`, and mend what it names: then they"
            " go out by themselves (EventsRejected in the runbook)",
        )


async def _backlog(patient: Patient) -> Findings:
    rows = await patient.connection.fetch(WAITING, AT_MOST + 1)
    for row in rows:
        if row["oldest"] > _WAITS_FOR_LONG.total_seconds():
            yield _warning(
                f"messages wait for consumer {row['consumer'] or 'nobody'}:"
                f" {_many(row['count'])}, one for {row['oldest']:,.0f} seconds",
                "see `service dead list --waiting --summary` (BacklogAge in the runbook)",
            )


async def _consumers(patient: Patient) -> Findings:
    known = list(patient.service.handlers.consumers)
    for row in await patient.connection.fetch(_NOBODYS, known, AT_MOST + 1):
        yield _warning(
            f"no handler here is consumer {row['consumer']}, for whom messages wait:"
            f" {_many(row['messages'])}",
            "deploy it again; to give them up, as one that ignores them",
        )


async def _topics(patient: Patient) -> Findings:
    if patient.topics is None:
        return
    wanted = patient.service.topics | {patient.settings.dead_letter_topic or ""}
    for name in sorted(wanted.difference(patient.topics, {""})):
        yield _wrong(
            f"there is no topic {name} that this user may see",
            "create it, in development by `service topics create`; or allow its Describe",
        )


async def _partitions(patient: Patient) -> Findings:
    rows = await patient.connection.fetch(_PARTITIONS, patient.service.name)
    for topic in _read(patient):
        known = {row["partition"] for row in rows if row["topic"] == topic.name}
        others = {
            number
            for number, end in topic.end.items()
            if number not in known and (known or end > topic.first.get(number, 0))
        }
        if others:
            numbers = ", ".join(map(str, sorted(others)))
            yield _warning(
                f"{topic.name} has partitions that were never read: {numbers}",
                "start `service run`; if they were added, keys have moved there, and what is in"
                " their old partitions may be handled after it",
            )


async def _topic_retention(patient: Patient) -> Findings:
    for topic in _read(patient):
        if topic.unreadable:
            yield _not_told(topic)
            continue
        policy = topic.configs.get("cleanup.policy", "delete")
        if "compact" in policy:
            yield _warning(
                f"{topic.name} is compacted: what is overwritten before it is read is never seen",
                f"set cleanup.policy=delete for {topic.name}, if every event counts",
            )
        kept = int(topic.configs.get("retention.ms", "0")) / 1_000
        is_for_ever = "delete" not in policy or kept * 1_000 == _FOR_EVER
        remembered = patient.settings.inbox_age - CLOCK_MARGIN.total_seconds()
        if is_for_ever or kept > remembered:
            how_long = "for ever" if is_for_ever else f"for {kept / 86_400:,.1f} days"
            make = _wrong if patient.settings.inbox_must_cover_topics else _warning
            yield make(
                f"{topic.name} keeps records {how_long}, and the inbox remembers for"
                f" {patient.settings.inbox_age / 86_400:,.1f} days",
                "raise PIPELINE_INBOX_AGE, or lower the topic's retention.ms",
            )


async def _compaction(patient: Patient) -> Findings:
    """Find what a topic refuses that is published to."""
    for topic in _published(patient):
        if "compact" in topic.configs.get("cleanup.policy", ""):
            yield _warning(
                f"{topic.name} is compacted: it refuses events without a key, and keeps the last"
                " event of each key",
                f"see that whatever is published to {topic.name} has a key; or set"
                " cleanup.policy=delete for it",
            )


async def _message_size(patient: Patient) -> Findings:
    for topic in _published(patient):
        if topic.unreadable:
            yield _not_told(topic)
            continue
        largest = int(topic.configs.get("max.message.bytes", 1_048_588))
        if patient.settings.max_event_bytes + _ENVELOPE > largest:
            yield _wrong(
                f"{topic.name} takes records of {largest:,} bytes, and PIPELINE_MAX_EVENT_BYTES"
                f" lets events have {patient.settings.max_event_bytes:,}",
                f"set max.message.bytes={patient.settings.max_event_bytes + _ENVELOPE} for"
                f" {topic.name},"
                " or lower PIPELINE_MAX_EVENT_BYTES",
            )


def _not_told(topic: Topic) -> Finding:
    return _warning(
        f"the configuration of {topic.name} can't be read: {topic.unreadable}",
        f"allow this user DescribeConfigs of the topic {topic.name}",
    )


async def _lag(patient: Patient) -> Findings:
    behind: dict[tuple[str, int], tuple[int, int | None]] = {}
    for row in await patient.connection.fetch(_STANDING, patient.service.name, _STANDS_STILL):
        topic = (patient.topics or {}).get(row["topic"])
        if topic is None or row["topic"] not in patient.service.handlers.topics:
            continue
        place = row["topic"], row["partition"]
        lag = topic.end.get(row["partition"], 0) - row["next_offset"]
        if row["next_offset"] < topic.first.get(row["partition"], 0) or lag < 0:
            yield _wrong(
                f"{row['topic']}/{row['partition']} stands at offset {row['next_offset']}, which"
                " the brokers don't have",
                f"see what was lost, then `service topics seek {row['topic']} --partition"
                f" {row['partition']} --to earliest`, first with --dry-run",
            )
        elif lag > 0:
            behind[place] = lag, topic.blocked_at(row["partition"], row["next_offset"])
    readers = await _readers(patient) if behind else None
    for (name, partition), (lag, open_at) in behind.items():
        what = (
            f"{name}/{partition} has stood still for over a minute, {lag:,} offsets before the end"
        )
        if readers is not None and (name, partition) not in readers:
            advice = "start `service run`, or `service consume` (NoConsumer in the runbook)"
            yield _wrong(f"{what}: nobody reads it", advice)
        elif open_at is not None:
            yield _open_transaction(patient, name, partition, open_at, lag)
        else:
            yield _warning(what, "see `/health/ready` of the service")


def _open_transaction(
    patient: Patient, topic: str, partition: int, open_at: int, lag: int
) -> Finding:
    tool = f"kafka-transactions.sh --bootstrap-server {patient.settings.kafka_bootstrap_servers}"
    where = f"--topic {topic} --partition {partition}"
    return _warning(
        f"a producer's transaction is open in {topic}/{partition} at offset {open_at}: until it"
        f" ends nobody reads on, and {lag:,} offsets wait behind it",
        "its producer ends it, or the brokers do after the producer's transaction.timeout.ms, by"
        f" default a minute. If it stays: `{tool} describe-producers {where}` tells whose it is, by"
        f" CurrentTransactionStartOffset {open_at}, and `{tool} abort {where} --start-offset"
        f" {open_at}` aborts it: its records are never read",
    )


async def _readers(patient: Patient) -> Mapping[tuple[str, int], str] | None:
    """Return who reads which partition; None where the brokers don't tell."""
    try:
        return await topics.readers(patient.settings, patient.service.name)
    except (KafkaError, OSError, TimeoutError):
        return None


def _read(patient: Patient) -> list[Topic]:
    described = patient.topics or {}
    return [described[one] for one in sorted(patient.service.handlers.topics) if one in described]


def _published(patient: Patient) -> list[Topic]:
    described = patient.topics or {}
    published = patient.service.declared_topics | {patient.settings.dead_letter_topic}
    return [described[one] for one in sorted(described.keys() & published)]


CHECKS: tuple[Check, ...] = (
    _settings,
    _server,
    _schema,
    _tables,
    _outbox_cluster,
    _outbox,
    _partitions_ahead,
    _held_partitions,
    _pooler,
    _jit,
    _clock,
    _long_transactions,
    _replication_slots,
    _bloat,
    _sizes,
    _dead_letters,
    _unsent,
    _backlog,
    _consumers,
    _topics,
    _partitions,
    _topic_retention,
    _compaction,
    _message_size,
    _lag,
)
_WITHOUT_POSTGRESQL = {_settings, _topics, _topic_retention, _compaction, _message_size}
_OF_KAFKA = {_topics, _partitions, _topic_retention, _compaction, _message_size, _lag}
