"""`service doctor`: each thing that can be wrong is found, with what to do about it."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import RebalanceInProgressError
from servers.network import LOOPBACK

from onceward import Reject, Retry, Transaction
from onceward.cli import doctor, health, status, status_commands
from onceward.cli.health import Finding
from onceward.operators import adopting
from onceward.servers import cluster, peers, topics
from onceward.servers.database import autocommitting, create_engine
from onceward.settings import Settings

from .applier import NewApplier
from .bank import Bank
from .clusters import private, standing_by
from .conftest import Command, build, position_reaches
from .kafka_wire import Wire
from .outgoing import event, set_back, stage
from .processes import starting
from .test_commands import ALEMBIC
from tests.conftest import Running
from tests.contract.bank import Account, Deposit, Deposited
from tests.servers.pooler import pooling
from tests.servers.processes import Process
from tests.servers.waiting import eventually

# What one does to the server is a finding for the others.
pytestmark = pytest.mark.together

NewTopic = Callable[..., Awaitable[str]]


@pytest.fixture
def new_topic(new_topic: NewTopic) -> NewTopic:
    """Create a topic that keeps records for less than the inbox remembers, as it should."""
    return partial(new_topic, **{"retention.ms": str(7 * 86_400_000)})


Examine = Callable[..., Awaitable[dict[str, Finding]]]
NEVER_STARTED = "processes"
"""The check of whether the bank was ever started, as few tests do it."""
OF_DECLARED = ("topics", "compaction", "message size")
"""Checks of every topic for which an event is declared."""
_FILL = {
    "backlog": "INSERT INTO pipeline.backlog (key, lane, order_key, consumer, topic, partition,"
    ' "offset", timestamp, headers, hash_version, reason, attempts, waited, holds)'
    " SELECT sha256(n::text::bytea), 0, '', 'deposit', 't', 0, n, 0, '[]', 1, 'x', 0, 0, false"
    " FROM generate_series(1, 200) AS n",
    "outbox_rejected": "INSERT INTO pipeline.outbox_rejected (id, created_at, topic, event_id,"
    " source, type, content_type)"
    " SELECT nextval('pipeline.outbox_id_seq'), now(), 't', n, '/s', 'x', 'y'"
    " FROM generate_series(1, 200) AS n",
    "scheduled": "INSERT INTO pipeline.scheduled (name, due_at, topic, event_id, source, type,"
    " content_type) SELECT n, now(), 't', n, '/s', 'x', 'y' FROM generate_series(1, 200) AS n",
}
"""How each table gets two hundred rows."""
_READ = """
INSERT INTO pipeline.position (consumer_group, topic, partition, next_offset, moved_at)
VALUES ($1, $2, 0, $3, clock_timestamp() - $4::interval)
"""
Connect = Callable[[], Awaitable[asyncpg.Connection]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in a folder with an `alembic.ini`, as a service has."""
    (tmp_path / "alembic.ini").write_text(ALEMBIC, "utf-8")
    monkeypatch.chdir(tmp_path)


def ago(**span: float) -> int:
    """Return a time in the past as a record has it, in milliseconds."""
    return round((datetime.now(UTC) - timedelta(**span)).timestamp() * 1_000)


def with_argument(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: object) -> None:
    """Let a check of the server have another threshold."""
    checks = [
        replace(one, arguments=arguments) if one.name == name else one
        for one in doctor.SERVER_CHECKS
    ]
    monkeypatch.setattr(doctor, "SERVER_CHECKS", checks)


@asynccontextmanager
async def _connected(chosen: Settings) -> AsyncIterator[asyncpg.Connection]:
    engine = create_engine(chosen, name="bank", check=None)
    try:
        async with autocommitting(engine) as connection:
            yield connection
    finally:
        await engine.dispose()


@pytest.fixture
def examine(bank: Bank, settings: Callable[..., Settings], direct_url: str) -> Examine:
    """Examine the bank as if it was started, past any pooler; return what is not well, by check.

    Other tests' events belong to every service of this process: their topics don't count.
    """

    async def ask(of: Bank = bank, **changes: object) -> dict[str, Finding]:
        chosen = settings(**{"database_url": direct_url, "database_pooler": False, **changes})
        found: list[Finding] = []

        async def are_found() -> bool:
            async with _connected(chosen) as connection:
                found[:] = await doctor.examine(connection, of.service, chosen)
            # Brokers of a busy machine have not elected the group's coordinator yet.
            return not any("NotCoordinatorForGroup" in one.found for one in found)

        await eventually(are_found)
        return {  # the first of each check
            one.check: one
            for one in reversed(found)
            if one.level != "ok"
            and one.check != NEVER_STARTED
            and (
                one.check not in OF_DECLARED or of.balances in one.found or of.deposits in one.found
            )
        }

    return ask


@pytest.fixture
async def run_doctor(
    bank: Bank,
    direct_url: str,
    kafka: str,
    tmp_path: Path,
) -> AsyncIterator[Callable[..., Awaitable[Process]]]:
    """Run the doctor in a process of its own, which declares no other tests' events."""
    async with starting(
        bank,
        database_url=direct_url,
        database_pooler=False,
        kafka_bootstrap_servers=kafka,
    ) as start:

        async def run(*options: str) -> Process:
            process = await start("doctor", *options, cwd=tmp_path)
            await process.ended()
            return process

        yield run


async def test_a_healthy_service_has_nothing(
    bank: Bank, run_doctor: Callable[..., Awaitable[Process]], direct_url: str, kafka: str
) -> None:
    async with starting(bank, database_url=direct_url, kafka_bootstrap_servers=kafka) as start:
        await eventually((await start("run")).is_ready)
        process = await run_doctor("--strict")
    assert await process.ended() == 0, process.output
    names, *lines = process.output.splitlines()
    assert names.split() == ["level", "check", "found"]
    of_status = [check for some in health.CHECKS.values() for check in some]
    checks = (*doctor.TOPIC_CHECKS, *of_status, *doctor.SERVER_CHECKS)
    others = "kafka settings order group schema tables sequences pooler clock writing"
    assert len(lines) == len(checks) + len(others.split())
    assert all(line.startswith("ok ") for line in lines), lines
    assert any(re.match(r"ok +server +PostgreSQL 1\d\.", line) for line in lines), lines


async def test_kinds_of_processes_that_were_never_started_are_told(
    bank: Bank, settings: Callable[..., Settings], direct_url: str, kafka: str
) -> None:
    of_bank = {"database_url": direct_url, "database_pooler": False}
    chosen = settings(**of_bank)

    def are_told(found: str, advice: str) -> Callable[[], Awaitable[bool]]:
        told = Finding("warning", found, advice, check=NEVER_STARTED)

        async def are_found() -> bool:
            async with _connected(chosen) as connection:
                return told in await doctor.examine(connection, bank.service, chosen)

        return are_found

    both = "`service consume` or `service relay`"
    advice = "start `service consume` and `service relay`, or `service run`"
    await eventually(are_told(f"no process of {both} has been seen yet", advice))
    async with starting(bank, kafka_bootstrap_servers=kafka, **of_bank) as start:
        await eventually((await start("relay")).is_ready)
    advice = "start `service consume`, or `service run`"
    await eventually(are_told("no process of `service consume` has been seen yet", advice))


async def test_a_database_that_is_not_migrated_is_told(
    examine: Examine, db: asyncpg.Connection
) -> None:
    await db.execute("DELETE FROM alembic_version")
    (found,) = (await examine()).values()
    assert (found.level, found.advice) == ("wrong", "run `service migrate`")
    await db.execute("DROP SCHEMA pipeline CASCADE")
    all_found = await examine()
    assert all_found["schema"] == found
    whole = all_found["status"]
    assert (whole.level, whole.advice) == ("wrong", "run `service migrate`")


async def test_a_database_that_a_newer_release_has_migrated_is_well(
    examine: Examine, db: asyncpg.Connection
) -> None:
    await db.execute("UPDATE alembic_version SET version_num = 'pipeline_9999'")
    await db.execute("ALTER TABLE account DROP COLUMN balance")
    assert await examine() == {}


async def test_servers_beyond_loopback_are_told_by_what_the_connections_are_made_to(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "unsecured", {})
    monkeypatch.setattr(peers, "is_loopback", lambda address: address != LOOPBACK)
    assert (await examine())["settings"].level == "warning"
    servers = {found.split()[2] for found in peers.unsecured}
    assert servers == {"PostgreSQL", "Kafka"}


async def test_an_address_that_tls_does_not_secure_is_told_with_its_setting(
    examine: Examine,
) -> None:
    (found,) = (await examine(otlp_endpoint="http://collector:4318")).values()
    assert found == Finding(
        "warning",
        "connections to collector (PIPELINE_OTLP_ENDPOINT) are not secured by TLS",
        "use https://",
        check="settings",
    )


async def test_schema_needs_the_folder_of_the_service(examine: Examine, tmp_path: Path) -> None:
    (tmp_path / "alembic.ini").unlink()
    (found,) = (await examine()).values()
    assert found.level == "warning"
    assert "folder" in found.advice


@pytest.mark.parametrize(
    ("another", "check"),
    [
        ("system_identifier = 1", "cluster"),
        ("database_oid = 1", "cluster"),
        ("kafka_cluster = 'another'", "brokers"),
    ],
)
async def test_a_database_that_is_not_adopted_is_told(
    examine: Examine, db: asyncpg.Connection, another: str, check: str
) -> None:
    await db.execute(f"UPDATE pipeline.outbox_cluster SET {another}")
    found = (await examine())[check]
    assert (found.level, found.found) == ("wrong", str(cluster.NotAdopted()))
    assert "service adopt" in found.advice


async def test_the_doctor_stores_no_brokers(examine: Examine, db: asyncpg.Connection) -> None:
    assert (await examine()).keys().isdisjoint({"group", "brokers"})
    assert await db.fetchval("SELECT kafka_cluster FROM pipeline.outbox_cluster") is None


_CALL = """
INSERT INTO pipeline.backlog (key, lane, order_key, consumer, topic, partition, "offset", timestamp,
                              headers, hash_version, reason, attempts, waited, holds)
VALUES ('x', 64, '', 'deposit', 't', 0, 20, 0, '[]', 1, 'deferred', 0, 0, false),
       ('y', 32, '', 'deposit', 't', 0, 2000000, 0, '[]', 1, 'deferred', 0, 0, false)
"""


async def test_sequences_that_are_behind_their_rows_are_told_and_raised_together(
    examine: Examine, db: asyncpg.Connection
) -> None:
    """As after logical replication, which carries rows over and no sequence."""
    await stage(db, [event("t", 1), event("t", 2)])
    assert "sequences" not in await examine()
    await db.execute(_CALL)
    highest = await db.fetchval("SELECT max(id) FROM pipeline.outbox")
    await db.execute("SELECT setval('pipeline.outbox_id_seq', 1, false)")
    found = [name for name, _ in await adopting.sequences_behind(db)]
    assert found == ["pipeline.backlog_call_seq", "pipeline.outbox_id_seq"]
    assert (await examine())["sequences"].level == "wrong"
    await adopting.adopt(db, keep_progress=True)
    assert "sequences" not in await examine()
    assert await db.fetchval("SELECT nextval('pipeline.backlog_call_seq')") == 21
    assert await db.fetchval("SELECT nextval('pipeline.outbox_id_seq')") > highest


async def test_the_advice_about_a_sequence_never_sets_it_back(db: asyncpg.Connection) -> None:
    """Events may be staged between the check and the statement that it advises."""
    await stage(db, [event("t", 1), event("t", 2)])
    await db.execute("SELECT setval('pipeline.outbox_id_seq', 1, false)")
    ((_, advice),) = await adopting.sequences_behind(db)
    await db.execute("SELECT setval('pipeline.outbox_id_seq', 1000)")
    assert await db.fetchval(advice) == 1001


async def test_a_new_event_gets_no_number_of_one_that_was_rejected(db: asyncpg.Connection) -> None:
    """It would be taken for that one, and lost; the day of a rejected one may be dropped."""
    await db.execute(_FILL["outbox_rejected"])
    await db.execute("SELECT setval('pipeline.outbox_id_seq', 1, false)")
    ((_, advice),) = await adopting.sequences_behind(db)
    assert await db.fetchval(advice) == 200
    assert await adopting.sequences_behind(db) == []
    await db.execute("SELECT setval('pipeline.outbox_id_seq', 1, false)")
    await adopting.adopt(db, keep_progress=True)
    assert await db.fetchval("SELECT nextval('pipeline.outbox_id_seq')") > 200


async def test_partitions_that_run_out_are_told(examine: Examine, db: asyncpg.Connection) -> None:
    for name in await db.fetch(
        "SELECT inhrelid::regclass::text AS name FROM pg_inherits"
        " WHERE inhparent = 'pipeline.outbox'::regclass ORDER BY 1 OFFSET 1"
    ):
        await db.execute(f"DROP TABLE {name['name']}")
    found = await examine()
    assert found["partitions ahead"].level == "wrong"
    assert "service retention run" in found["partitions ahead"].advice


async def test_what_holds_a_partition_is_told(examine: Examine, db: asyncpg.Connection) -> None:
    await db.execute(
        "CREATE TABLE pipeline.outbox_p20200101 PARTITION OF pipeline.outbox"
        " FOR VALUES FROM ('2020-01-01 00:00+00') TO ('2020-01-02 00:00+00')"
    )
    found = (await examine())["held partitions"]
    assert found.level == "warning"
    assert found.found.startswith("outbox_p20200101 is overdue: it is not closed yet")


async def test_a_pooler_that_the_settings_do_not_know_is_found(
    bank: Bank, settings: Callable[..., Settings], server_url: str, direct_url: str
) -> None:
    with pooling(server_url) as pooler:
        name = direct_url.rpartition("/")[2]
        way = f"{pooler.url.rpartition('/')[0]}/{name}"
        async with _connected(settings(database_url=way, database_pooler=True)) as connection:
            for knows, level in ((False, "warning"), (True, "ok")):
                chosen = settings(database_url=way, database_pooler=knows)
                found = await doctor.examine(connection, bank.service, chosen)
                (one,) = [one for one in found if one.check == "pooler"]
                assert one.level == level
                assert ("PIPELINE_DATABASE_POOLER=true" in one.advice) is not knows


async def test_a_pooler_that_is_not_there_is_told_and_so_is_jit(
    examine: Examine, db: asyncpg.Connection
) -> None:
    name = await db.fetchval("SELECT current_database()")
    await db.execute(f"ALTER DATABASE {name} SET jit = on")
    found = await examine(database_pooler=True)
    assert found["pooler"].advice == "unset PIPELINE_DATABASE_POOLER"
    assert "SET jit = off" in found["jit"].advice
    assert "jit" not in await examine()


async def test_clocks_that_differ_are_told(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CLOCKS_APART", -10.0)
    found = (await examine())["clock"]
    assert found.level == "warning"
    assert "NTP" in found.advice


async def test_who_holds_a_transaction_open_is_named_and_ended_by_the_advice(
    examine: Examine,
    connect: Connect,
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_argument(monkeypatch, "long transactions", timedelta(0))
    other = await connect()
    await other.execute("BEGIN")
    pid = await other.fetchval("SELECT pg_backend_pid()")
    statement = f"SELECT pg_terminate_backend({pid})"

    async def is_named() -> bool:  # the oldest of the server is, and other tests have theirs
        found = (await examine())["long transactions"]
        assert found.level == "warning"
        return found.advice == f"end it: {statement}"

    await eventually(is_named)
    await db.execute(statement)
    await eventually(other.is_closed)


async def test_events_that_nobody_publishes_are_told(
    examine: Examine, db: asyncpg.Connection, bank: Bank
) -> None:
    await stage(db, [event(bank.balances, 1)])
    assert "outbox" not in await examine(), "they have just come"
    await set_back(db, timedelta(minutes=6))
    found = (await examine())["outbox"]
    assert found.level == "wrong"
    assert "no process has taken events of the outbox" in found.found
    assert "(64 shards have no relay) for 3" in found.found
    await db.execute(
        "UPDATE pipeline.outbox_cursor SET owner = 'a', lease_until = now() + interval '1 hour'"
    )
    found = (await examine())["outbox"]
    assert (found.level, "OutboxLag" in found.advice) == ("warning", True)


async def test_a_topic_that_is_missing_is_told(examine: Examine, unborn: Bank) -> None:
    found = await examine(unborn)
    assert found["topics"].level == "wrong"
    assert "service topics create" in found["topics"].advice
    assert await examine(unborn) == found  # and to ask has not made it


async def test_topics_that_do_not_fit_are_told(
    examine: Examine, new_topic: Callable[..., Awaitable[str]], bank: Bank
) -> None:
    kept = await new_topic(**{"retention.ms": "-1"})
    small = await new_topic(**{"max.message.bytes": "5000"})
    found = await examine(Bank(deposits=kept, balances=small, name=bank.name))
    assert found["topic retention"].level == "warning"
    assert f"{kept} keeps records for ever" in found["topic retention"].found
    assert found["message size"].level == "wrong"
    assert "max.message.bytes=910000" in found["message size"].advice
    strict = await examine(
        Bank(deposits=kept, balances=bank.balances, name=bank.name), inbox_must_cover_topics=True
    )
    assert strict["topic retention"].level == "wrong"
    compacted = await new_topic(**{"cleanup.policy": "compact,delete"})
    lossy = await examine(Bank(deposits=compacted, balances=bank.balances, name=bank.name))
    assert f"{compacted} is compacted" in lossy["compaction"].found
    strict = await examine(Bank(deposits=bank.deposits, balances=compacted, name=bank.name))
    assert strict["compaction"].level == "warning"
    assert f"{compacted} is compacted: it rejects events without a key" in (
        strict["compaction"].found
    )


async def test_consumers_that_change_the_same_rows_without_an_order_are_told(
    examine: Examine, bank: Bank
) -> None:
    async def add(event: Deposited, tx: Transaction) -> None:
        """Add nothing."""

    on, account = partial(bank.handlers.on, Deposited, topic=bank.deposits), Account.by
    on(consumer="counted", loads=account("account", unordered=True))(add)
    assert "order" not in await examine()
    on(consumer="rival", loads=account("account"))(add)
    found = (await examine())["order"]
    assert found.level == "warning"
    assert f"consumers deposit, rival of topic {bank.deposits} load Account" in found.found
    assert "Account.by(…, unordered=True)" in found.advice


async def test_an_unreadable_topic_configuration_is_reported_with_the_missing_permission(
    examine: Examine, new_topic: Callable[..., Awaitable[str]], bank: Bank, kafka: str
) -> None:
    """Nothing is said then of what the brokers would do by default."""
    kept = await new_topic(**{"retention.ms": "-1"})
    small = await new_topic(**{"max.message.bytes": "5000"})
    of_both = Bank(deposits=kept, balances=small, name=bank.name)
    async with Wire(kafka).listening() as wire:
        for topic, check, other in (
            (kept, "topic retention", "message size"),
            (small, "message size", "topic retention"),
        ):
            wire.close_configs(topic)
            found = await examine(of_both, kafka_bootstrap_servers=wire.address)
            assert found["topics"] == Finding(
                "warning",
                f"the configuration of {topic} can't be read: TopicAuthorizationFailedError",
                f"allow this user its DescribeConfigs: {topic} (docs/security.md)",
                check="topics",
            )
            assert check not in found or topic not in found[check].found
            assert other in found


async def test_a_server_that_is_too_old_is_told(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_argument(monkeypatch, "server", 99)
    found = (await examine())["server"]
    assert (found.level, found.advice) == ("wrong", "upgrade the server")
    assert re.match(r"PostgreSQL 1\d\.\d", found.found)


async def test_a_stalled_position_or_one_unknown_to_the_brokers_is_reported(
    examine: Examine, bank: Bank, db: asyncpg.Connection
) -> None:
    await db.execute(
        "INSERT INTO pipeline.position (consumer_group, topic, partition, next_offset, moved_at)"
        " VALUES ($1, $2, 0, 5, now() - interval '1 h')",
        bank.name,
        bank.deposits,
    )
    found = (await examine())["positions"]
    assert found.level == "wrong"
    seek = (
        f"`service topics seek {bank.deposits} --partition 0 --to earliest`, first with --dry-run"
    )
    assert seek in found.advice, "and no other partition"


async def test_a_position_that_stands_still_before_the_end_is_told(
    examine: Examine, bank: Bank, db: asyncpg.Connection, producer: AIOKafkaProducer, kafka: str
) -> None:
    for amount in (1, 2, 3):
        await Deposit(amount, timestamp=ago(hours=2)).send(producer, bank.deposits)
    await db.execute(
        "INSERT INTO pipeline.position (consumer_group, topic, partition, next_offset, moved_at)"
        " VALUES ($1, $2, 0, 1, now() - interval '1 h')",
        bank.name,
        bank.deposits,
    )
    found = (await examine())["reads"]
    place = f"no process has taken records of {bank.deposits} (no reader of partitions 0) for"
    assert found.found.startswith(place)
    assert (found.level, "`service consume`" in found.advice) == ("wrong", True)
    async with AIOKafkaConsumer(
        bank.deposits,
        bootstrap_servers=kafka,
        group_id=bank.name,
        client_id=bank.name,
        enable_auto_commit=False,
    ) as consumer:
        await eventually(lambda: bool(consumer.assignment()))
        found = (await examine())["lag"]
    assert found.found.endswith("2 offsets before the end")
    assert found.level == "warning"
    assert re.match(r"see `/health/ready` of its reader, [\d.:]+ \S{8}; end one", found.advice)
    await db.execute("UPDATE pipeline.position SET moved_at = now()")
    assert await examine() == {}


async def test_a_record_newly_arrived_at_an_idle_partition_is_not_lag(
    examine: Examine, bank: Bank, db: asyncpg.Connection, producer: AIOKafkaProducer, kafka: str
) -> None:
    await Deposit(1, timestamp=ago(hours=80)).send(producer, bank.deposits)
    await Deposit(2).send(producer, bank.deposits)
    await db.execute(_READ, bank.name, bank.deposits, 1, timedelta(days=3))
    async with AIOKafkaConsumer(
        bank.deposits,
        bootstrap_servers=kafka,
        group_id=bank.name,
        client_id=bank.name,
        enable_auto_commit=False,
    ) as consumer:
        await eventually(lambda: bool(consumer.assignment()))
        assert await examine() == {}


async def test_topics_that_nobody_reads_are_told_also_if_no_record_waits(
    examine: Examine, bank: Bank, db: asyncpg.Connection
) -> None:
    await db.execute(_READ, bank.name, bank.deposits, 0, timedelta(0))
    assert await examine() == {}, "a process may be starting again"
    await db.execute("UPDATE pipeline.position SET moved_at = now() - interval '1 h'")
    found = (await examine())["reads"]
    assert found.level == "wrong"
    place = f"no process has taken records of {bank.deposits} (no reader of partitions 0) for 3,6"
    assert found.found.startswith(place)


async def test_each_kind_of_untaken_work_is_wrong_after_a_minute(
    examine: Examine,
    bank: Bank,
    db: asyncpg.Connection,
    producer: AIOKafkaProducer,
    direct_url: str,
    kafka: str,
) -> None:
    async with starting(bank, database_url=direct_url, kafka_bootstrap_servers=kafka) as start:
        process = await start("run")
        await Deposit(1).send(producer, bank.deposits)
        await eventually(position_reaches(db, bank.deposits, 1))
        await process.kill()
    for table in ("backlog", "scheduled"):
        await db.execute(_FILL[table])
    await stage(db, [event(bank.balances, 1)])
    for change in (
        "position SET moved_at = {}",
        'backlog SET due_at = {}, lane = CASE WHEN "offset" % 2 = 0 THEN 64 ELSE 0 END',
        "backlog_lane SET owner = NULL, lease_until = NULL, released_at = {}",
        "outbox_cursor SET owner = NULL, lease_until = NULL",
        "scheduled SET due_at = {}",
    ):
        then = "now() - interval '2 minutes'"
        await db.execute(f"UPDATE pipeline.{change.format(then)}")
    await set_back(db, timedelta(minutes=2))

    async def are_told() -> bool:  # the group misses its member only after a time
        found = await examine()
        wrong = {name for name, one in found.items() if one.level == "wrong"}
        return {"reads", "backlog", "calls", "outbox", "scheduled"} <= wrong

    await eventually(are_told)


async def test_a_record_that_waits_for_over_a_minute_is_lag(
    examine: Examine, bank: Bank, db: asyncpg.Connection, producer: AIOKafkaProducer
) -> None:
    for timestamp in (ago(hours=80), ago(minutes=2), None):
        await Deposit(1, timestamp=timestamp).send(producer, bank.deposits)
    read = (
        "INSERT INTO pipeline.position (consumer_group, topic, partition, next_offset, moved_at)"
        " VALUES ($1, $2, 0, $3, now() - interval '3 days')"
        " ON CONFLICT (consumer_group, topic, partition) DO UPDATE SET next_offset = $3"
    )
    await db.execute(read, bank.name, bank.deposits, 1)
    assert (await examine())["reads"].level == "wrong"
    # A record before the position that is of a later time: its clock was wrong.
    await db.execute(read, bank.name, bank.deposits, 2)
    assert (await examine())["reads"].level == "wrong"


@asynccontextmanager
async def _open_transaction(kafka: str, topic: str) -> AsyncIterator[None]:
    """Hold a transaction open that has sent an event."""
    async with AIOKafkaProducer(bootstrap_servers=kafka, transactional_id=uuid4().hex) as other:
        await other.begin_transaction()
        await Deposit(10).send(other, topic)
        yield
        await other.abort_transaction()


async def test_a_transaction_that_keeps_a_partition_from_being_read_is_told(
    examine: Examine,
    bank: Bank,
    running: Running,
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    producer: AIOKafkaProducer,
    kafka: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await Deposit(1).send(producer, bank.deposits)
    async with running(bank.service) as process, _open_transaction(kafka, bank.deposits):
        await Deposit(2).send(producer, bank.deposits)
        await eventually(position_reaches(db, bank.deposits, 1))
        await db.execute("UPDATE pipeline.position SET moved_at = now() - interval '1 h'")
        monkeypatch.setattr(health, "STALLED", -60.0)
        found = (await examine())["open transactions"]
        assert process.is_ready
        async with _connected(settings()) as connection:
            screen = status_commands.screen(await status.look(connection, bank.service, settings()))
    place = f"{bank.deposits}/0"
    assert found.level == "warning"
    assert f"transaction is open in {place} at offset 1: 2 offsets" in found.found
    assert f"describe-producers --topic {bank.deposits} --partition 0" in found.advice
    assert f"abort --topic {bank.deposits} --partition 0 --start-offset 1`" in found.advice
    (line,) = (line for line in screen if line.startswith("warning    open transactions: "))
    assert line.startswith("warning    open transactions: a producer's transaction is open in")


async def test_who_reads_is_not_known_while_a_group_shares_out_its_partitions(
    examine: Examine,
    bank: Bank,
    settings: Callable[..., Settings],
    db: asyncpg.Connection,
    producer: AIOKafkaProducer,
    kafka: str,
) -> None:
    await Deposit(1, timestamp=ago(hours=2)).send(producer, bank.deposits)
    await db.execute(
        "INSERT INTO pipeline.position (consumer_group, topic, partition, next_offset, moved_at)"
        " VALUES ($1, $2, 0, 0, now() - interval '1 h')",
        bank.name,
        bank.deposits,
    )

    async def is_sharing_out() -> bool:
        try:
            await topics.readers(settings(), bank.name)
        except RebalanceInProgressError:
            return True
        return False

    # It learns of others by a heartbeat, and joins anew then.
    async with AIOKafkaConsumer(
        bank.deposits,
        bootstrap_servers=kafka,
        group_id=bank.name,
        session_timeout_ms=45_000,
        heartbeat_interval_ms=40_000,
    ) as consumer:
        await eventually(lambda: bool(consumer.assignment()))
        other = AIOKafkaConsumer(bank.deposits, bootstrap_servers=kafka, group_id=bank.name)
        joining = asyncio.create_task(other.start())
        try:
            await eventually(is_sharing_out)
            found = (await examine())["lag"]
        finally:
            joining.cancel()
            await asyncio.gather(joining, other.stop(), return_exceptions=True)
    assert found.found.endswith("1 offsets before the end")
    assert found.level == "warning"


async def test_a_migration_that_was_forgotten_is_told(
    examine: Examine, db: asyncpg.Connection
) -> None:
    await db.execute("ALTER TABLE account DROP COLUMN balance, DROP COLUMN version")
    found = (await examine())["tables"]
    assert found.level == "wrong"
    assert found.found == "the table account of the code lacks balance, version"
    assert found.advice.startswith("write the migration")
    await db.execute("DELETE FROM alembic_version")
    assert (await examine())["tables"].advice == "run `service migrate`", "it may be there"
    await db.execute("DROP TABLE account CASCADE")
    found = (await examine())["tables"]
    assert found.found == "the table account of the code is missing"


async def test_tables_are_looked_for_where_the_code_finds_them(
    examine: Examine, db: asyncpg.Connection
) -> None:
    await db.execute("CREATE SCHEMA ours; ALTER TABLE account SET SCHEMA ours")
    await db.execute("ALTER TABLE alembic_version SET SCHEMA ours")
    name = await db.fetchval("SELECT current_database()")
    await db.execute(f"ALTER DATABASE {name} SET search_path = ours")
    assert await examine() == {}


async def test_partitions_that_were_added_are_told_until_they_are_read(
    examine: Examine,
    new_topic: Callable[..., Awaitable[str]],
    producer: AIOKafkaProducer,
    bank: Bank,
    db: asyncpg.Connection,
) -> None:
    wide = await new_topic(partitions=3)
    of_wide = Bank(deposits=wide, balances=bank.balances, name=bank.name)
    assert await examine(of_wide) == {}, "there is nothing to read yet"
    await producer.send_and_wait(wide, b"{}", partition=2)
    found = (await examine(of_wide))["partitions"]
    assert found.found == f"{wide} has partitions that were never read: 2"
    read = (
        "INSERT INTO pipeline.position (consumer_group, topic, partition, next_offset)"
        " VALUES ($1, $2, $3, 0)"
    )
    await db.execute(read, bank.name, wide, 1)
    found = (await examine(of_wide))["partitions"]
    assert found.level == "warning"
    assert found.found == f"{wide} has partitions that were never read: 0, 2"
    await db.executemany(read, [(bank.name, wide, partition) for partition in (0, 2)])
    assert await examine(of_wide) == {}


async def test_dead_letters_are_told_until_a_person_has_decided(
    examine: Examine, new_applier: NewApplier, bank: Bank, db: asyncpg.Connection
) -> None:
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    bank.errors.update({1: Reject("no"), 2: Reject("no")})
    await applier.apply(Deposit(1), Deposit(2, account="bob"))
    await applier.work_off()
    found = (await examine())["dead letters"]
    assert found.level == "warning"
    assert found.found == "dead messages need a decision: 2"
    assert "service dead list" in found.advice
    await db.execute("UPDATE pipeline.backlog SET discarded_at = now()")
    assert await examine() == {}


async def test_dead_events_are_told_until_a_person_has_decided(
    examine: Examine, db: asyncpg.Connection
) -> None:
    await db.execute(_FILL["outbox_rejected"])
    await db.execute("UPDATE pipeline.outbox_rejected SET died_at = now()")
    found = (await examine())["dead events"]
    assert found.level == "warning"
    assert found.found == "dead events need a decision: 200"
    assert "`service dead events list`" in found.advice
    await db.execute("UPDATE pipeline.outbox_rejected SET discarded_at = now()")
    assert await examine() == {}


async def test_events_that_kafka_refuses_for_long_are_told(
    examine: Examine, db: asyncpg.Connection
) -> None:
    await db.execute(_FILL["outbox_rejected"])
    await db.execute(
        "UPDATE pipeline.outbox_rejected SET parked_at = now() - interval '16 minutes'"
    )
    assert await examine() == {}, "none was rejected: people have paused or slowed down its topic"
    await db.execute(
        "UPDATE pipeline.outbox_rejected SET reason = 'topic missing', error = 'x' WHERE id = 1"
    )
    found = (await examine())["rejected"]
    assert found.level == "wrong"
    assert found.found.startswith("events for topic t (topic missing) wait: 200, one for 9")
    assert "`service dead events list --waiting --summary`" in found.advice


async def test_a_backlog_that_does_not_move_is_told(
    examine: Examine, db: asyncpg.Connection
) -> None:
    await db.execute(_FILL["backlog"])
    assert await examine() == {}, "they have just come"
    await db.execute(
        "UPDATE pipeline.backlog SET received_at = now() - interval '61 minutes' WHERE lane = 0"
    )
    found = (await examine())["backlog"]
    assert found.level == "warning"
    assert found.found.startswith("messages of consumer deposit wait: 200, one for 3,6")
    assert "`service dead list --waiting --summary`" in found.advice


async def test_messages_of_a_consumer_that_is_gone_are_told(
    examine: Examine, new_applier: NewApplier, bank: Bank, db: asyncpg.Connection
) -> None:
    applier = await new_applier(bank.handlers, topic=bank.deposits)
    bank.errors[1] = Retry()
    await applier.apply(Deposit(1))
    assert await examine() == {}
    await db.execute("UPDATE pipeline.backlog SET consumer = 'gone'")
    found = (await examine())["consumers"]
    assert found.level == "warning"
    assert found.found == "this service has no consumer gone, for which messages wait: 1"
    assert "deploy it again" in found.advice


async def test_the_largest_tables_are_told(
    run_doctor: Callable[..., Awaitable[Process]], db: asyncpg.Connection
) -> None:
    await db.execute(
        "INSERT INTO pipeline.outbox (topic, event_id, source, type, content_type, payload)"
        " SELECT 'balances', n, '/bank', 'changed', 'text/plain',"
        "        convert_to(repeat(md5(n::text), 40), 'UTF8')"
        " FROM generate_series(1, 5000) AS n"
    )
    process = await run_doctor()
    (line,) = [one for one in process.output.splitlines() if " sizes  " in one]
    assert line.startswith("ok ")
    assert float(line.partition("indexes: outbox ")[2].split()[0]) > 5, line


async def test_dead_rows_of_a_hot_table_are_told_until_they_are_vacuumed(
    examine: Examine, db: asyncpg.Connection
) -> None:
    await db.execute("ALTER TABLE pipeline.backlog_lane SET (autovacuum_enabled = off)")
    await db.execute(
        "DO $$ BEGIN FOR i IN 1..400 LOOP"
        " UPDATE pipeline.backlog_lane SET token = token + 1; END LOOP; END $$"
    )
    await db.execute("SELECT pg_stat_force_next_flush()")
    found = (await examine())["bloat"]
    assert found.level == "warning"
    assert found.advice.endswith("VACUUM pipeline.backlog_lane")
    await db.execute(found.advice.partition("then ")[2])
    await db.execute("SELECT pg_stat_force_next_flush()")
    assert "bloat" not in await examine()


@pytest.mark.parametrize("table", ["backlog", "outbox_rejected", "scheduled"])
async def test_dead_rows_of_a_table_that_has_been_emptied_are_told(
    examine: Examine, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    with_argument(monkeypatch, "bloat", doctor._HOT, 100)
    await db.execute(f"ALTER TABLE pipeline.{table} SET (autovacuum_enabled = off)")
    await db.execute(_FILL[table])
    await db.execute(f"DELETE FROM pipeline.{table}")
    await db.execute("SELECT pg_stat_force_next_flush()")
    found = (await examine())["bloat"]
    assert found.found == f"pipeline.{table} has 200 dead rows for 0"
    assert found.advice.endswith(f"VACUUM pipeline.{table}")


async def test_settings_that_no_service_starts_with_are_told(examine: Examine, bank: Bank) -> None:
    found = (await examine(dead_letter_topic=bank.deposits))["settings"]
    assert found.level == "wrong"
    assert bank.deposits in found.found
    assert found.advice == "change what it names, and start the service again"


async def test_a_standby_is_told(bank: Bank, settings: Callable[..., Settings]) -> None:
    with private() as origin:
        await asyncio.to_thread(build, origin.url())
        with standing_by(origin) as standby:

            async def found_at(url: str) -> dict[str, Finding]:
                chosen = settings(database_url=url, database_pooler=False)
                async with _connected(chosen) as connection:
                    found = await doctor.examine(connection, bank.service, chosen)
                    return {one.check: one for one in found if one.level != "ok"}

            assert "writing" not in await found_at(origin.url())
            server = (await found_at(standby.url()))["writing"]
            assert server.level == "wrong"
            assert server.found.startswith("nothing can be written: ReadOnlySQLTransactionError: ")
            assert server.advice.startswith("let PIPELINE_DATABASE_URL name the primary; ")


async def test_a_full_disk_is_detected_with_a_temporary_table(
    examine: Examine, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = "SELECT count(*) FROM pg_class WHERE relname = 'service_doctor'"
    assert await examine() == {}
    assert await db.fetchval(tables) == 0
    full = "DO $$ BEGIN RAISE SQLSTATE '53100' USING MESSAGE = 'could not extend file'; END $$"
    monkeypatch.setattr(doctor, "_WRITE", f"{doctor._WRITE}; {full}")
    found = await examine()
    assert found.keys() == {"writing"}, "the other checks are made on the same connection"
    assert found["writing"].level == "wrong"
    text = "nothing can be written: DiskFullError: could not extend file"
    assert found["writing"].found == text
    assert await db.fetchval(tables) == 0


async def test_without_kafka_the_other_checks_are_made(
    examine: Examine, db: asyncpg.Connection, unused_tcp_port: int
) -> None:
    await db.execute("UPDATE pipeline.outbox_cluster SET system_identifier = 1")
    found = await examine(kafka_bootstrap_servers=f"127.0.0.1:{unused_tcp_port}")
    assert found.keys() == {"kafka", "cluster"}
    assert "PIPELINE_KAFKA_BOOTSTRAP_SERVERS" in found["kafka"].advice


async def test_the_exit_code_says_whether_something_is_wrong(
    run_doctor: Callable[..., Awaitable[Process]], db: asyncpg.Connection, tmp_path: Path
) -> None:
    (tmp_path / "alembic.ini").unlink()
    process = await run_doctor()
    assert await process.ended() == 0, process.output
    assert re.search("^warning  schema +there is no alembic.ini", process.output, re.MULTILINE)
    assert await (await run_doctor("--strict")).ended() == 1
    await db.execute("UPDATE pipeline.outbox_cluster SET system_identifier = 1")
    process = await run_doctor("--json")
    assert await process.ended() == 1
    # Log lines, of a client that tries again, stand between those of the checks.
    lines = [one for one in process.output.splitlines() if one.startswith("{")]
    levels = {one["check"]: one["level"] for one in map(json.loads, lines)}
    assert levels["cluster"] == "wrong"
    assert levels["kafka"] == "ok"
    assert await (await run_doctor("--dance")).ended() == 2


async def test_a_database_that_is_away_is_told_and_the_rest_is_checked(
    command: Command, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    monkeypatch.setenv("PIPELINE_DATABASE_POOLER", "false")
    monkeypatch.setenv(
        "PIPELINE_DATABASE_URL", f"postgresql+asyncpg://service:x@127.0.0.1:{unused_tcp_port}/x"
    )
    away = f"PostgreSQL at 127.0.0.1:{unused_tcp_port} (PIPELINE_DATABASE_URL)"
    done = await command("status")
    assert done.exit_code == 1
    assert away in done.stderr
    done = await command("doctor", "--json")
    assert done.exit_code == 1
    found = {one["check"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert found["postgresql"]["level"] == "wrong"
    assert away in found["postgresql"]["found"]
    assert found["kafka"]["level"] == found["settings"]["level"] == "ok"
    assert found.keys() >= {"topics", "topic retention", "message size"}
    assert "dead letters" not in found
