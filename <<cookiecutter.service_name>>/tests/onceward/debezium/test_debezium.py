"""Debezium in place of the relay: the real connector, on Kafka Connect and a real slot.

Trap 36.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import time
from uuid import uuid4

import asyncpg
import psutil
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord
from servers.state import StateDirectory

from onceward import Event, Handlers, Service, Transaction
from onceward.cli.commands import command_line
from onceward.debezium import commands as debezium_commands
from onceward.debezium.connector import slot_of
from onceward.debezium.following import FollowingRelay
from onceward.errors import Refused
from onceward.events.cloudevents import event_headers
from onceward.observe.health import Health
from onceward.operators import stopping
from onceward.operators.stopping import Subject
from onceward.retention.maintenance import run_retention
from onceward.runtime import Part
from onceward.servers.tasks import in_background
from onceward.settings import Settings

from .connect import Connect
from tests.conftest import Running
from tests.contract.bank import Account, Base, Deposit, histories
from tests.onceward.integration.bank import Bank
from tests.onceward.integration.clusters import Cluster, private
from tests.onceward.integration.conftest import Command
from tests.onceward.integration.outgoing import (
    LARGE,
    OLD,
    allow,
    event,
    make_old_day,
    stage,
    stage_long_ago,
    waits,
)
from tests.onceward.integration.processes import starting
from tests.servers.processes import Process, Start
from tests.servers.programs import running as running_server
from tests.servers.topics import create_topic, following, id_of
from tests.servers.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.together]

MANY, FEW, A_TRANSACTION = 30_000, 300, 1_000
PASSWORD = "a secret of the connector"
TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACED = (("traceparent", f"00-{TRACE}-b7ad6b7169203331-01".encode()), ("baggage", b"who=ada"))
KEYS = ("ada", "bob", "eve")
AMOUNT = 900
AMOUNTS = range(1, AMOUNT + 1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Return a database server whose log can be decoded."""
    with private("--wal_level=logical") as one:
        yield one


@pytest.fixture(scope="module")
def worker(kafka: str, used_topics: list[str]) -> Iterator[Connect]:
    """Return a worker of Kafka Connect, with topics of its own."""
    group = f"connect-{uuid4().hex[:8]}"
    used_topics += [f"{group}-{one}" for one in ("configs", "offsets", "status")]
    with TemporaryDirectory() as folder:
        directory = StateDirectory(Path(folder))
        connect = Connect(directory, "connect", directory.state.kafka)
        connect.kafka, connect.group, connect.password = kafka, group, PASSWORD
        with running_server(connect):
            yield connect


@dataclass
class Debezium:
    """The connector of a bank, as the commands configure it."""

    bank: Bank
    worker: Connect
    db: asyncpg.Connection
    config: Mapping[str, str]
    statements: str

    @property
    def slot(self) -> str:
        """Name of its replication slot."""
        return slot_of(self.bank.name)

    async def run_sql(self) -> None:
        """Execute what `service debezium sql` prints, in transactions of their own."""
        for statement in self.statements.removesuffix(";\n").split(";\n"):
            await self.db.execute(statement)
        role = self.config["database.user"]
        await self.db.execute(f"ALTER ROLE \"{role}\" PASSWORD '{PASSWORD}'")

    async def put(self) -> None:
        """Start the connector."""
        await self.worker.put(self.bank.name, self.config)

    async def runs(self) -> bool:
        """Whether a walsender of its task reads the slot."""
        return bool(
            await self.db.fetchval(
                "SELECT active FROM pg_replication_slots WHERE slot_name = $1", self.slot
            )
        )

    async def confirms(self) -> None:
        """Wait until the slot, and so the connector's offset, is past what is committed now."""
        written = await self.db.fetchval("SELECT pg_current_wal_insert_lsn()::text")

        async def is_past() -> bool:
            return bool(
                await self.db.fetchval(
                    "SELECT confirmed_flush_lsn >= $2::text::pg_lsn FROM pg_replication_slots"
                    " WHERE slot_name = $1",
                    self.slot,
                    written,
                )
            )

        await eventually(is_past)

    async def has_failed(self) -> bool:
        """Whether its task has ended with an error."""
        return (await self.worker.state(self.bank.name))[0] == "FAILED"

    async def kill(self) -> None:
        """End the worker by kill -9, and wait until PostgreSQL has noticed."""
        assert self.worker.process
        self.worker.process.kill()
        await asyncio.to_thread(self.worker.process.wait)

        async def is_noticed() -> bool:
            return not await self.runs()

        await eventually(is_noticed)

    async def forget_offsets(self) -> None:
        """Let the connector begin where its slot does."""
        await self.worker.forget_offsets(self.bank.name)

    async def start_again(self, flush_milliseconds: int = Connect.flush_milliseconds) -> None:
        """Start the worker after it was killed; it confirms this often what it has published."""
        self.worker.flush_milliseconds = flush_milliseconds
        await asyncio.to_thread(self.worker.start)
        await asyncio.to_thread(self.worker.wait_until_serving)


@pytest.fixture
async def debezium(
    bank: Bank,
    worker: Connect,
    db: asyncpg.Connection,
    commands: Callable[..., Command],
    kafka: str,
    used_topics: list[str],
) -> AsyncIterator[Debezium]:
    """Return a connector that is not started yet, configured by the commands of the bank."""
    line = command_line(bank.service, debezium=debezium_commands.app)
    command = commands(line, "debezium")
    role = f"debezium {bank.name}"
    config, statements = [await command(name, "--role", role) for name in ("connector", "sql")]
    given = json.loads(config.stdout)
    heartbeats = f"__debezium-heartbeat.{given['topic.prefix']}"
    used_topics.append(heartbeats)
    await create_topic(kafka, heartbeats)
    yield Debezium(bank, worker, db, given, statements.stdout)
    await worker.delete(bank.name)


Follow = Callable[[], AbstractAsyncContextManager[Health]]


@pytest.fixture
def follow(bank: Bank, running: Running) -> Follow:
    """Run what `service debezium follow` runs, as long as the `with` block lasts."""
    relay = partial(FollowingRelay, slot=slot_of(bank.name))
    return partial(running, bank.service, Part.RELAY, make_relay=relay)


def auditor(balances: str) -> Service:
    """Return a second service, which writes down what the bank publishes."""
    handlers = Handlers()

    class BalanceHeard(Event, type="balance.changed"):
        account: str
        amount: int

    @handlers.on(BalanceHeard, topic=balances, consumer="audit")
    async def audit(event: BalanceHeard, tx: Transaction) -> None:
        account = await tx.load_or_create(Account, f"heard of {event.account}")
        account.history += f"{event.amount},"

    return Service(f"auditor-{balances}", handlers=handlers, metadata=Base.metadata)


def comparable(headers: Sequence[tuple[str, bytes | None]]) -> dict[str, object]:
    """Return headers without the empty ones; times and sequences by their values."""
    given = {name: value.decode() for name, value in headers if value is not None}
    assert len(given) == len([name for name, value in headers if value is not None])
    values: dict[str, object] = dict(given)
    if "ce_time" in given:
        values["ce_time"] = datetime.fromisoformat(given["ce_time"])
    if "ce_sequence" in given:
        values["ce_sequence"] = int(given["ce_sequence"])
    return values


def headers_of(record: ConsumerRecord) -> dict[str, str]:
    """Return the headers of a record as texts."""
    return {name: (value or b"").decode() for name, value in record.headers}


async def outbox(db: asyncpg.Connection, topic: str) -> list[asyncpg.Record]:
    """Return the events of a topic, in the order in which they were staged."""
    rows = await db.fetch("SELECT * FROM pipeline.outbox WHERE topic = $1 ORDER BY id", topic)
    return list(rows)


async def heard(db: asyncpg.Connection) -> dict[str, list[int]]:
    """Return the amounts that the auditor has heard of, by account, in that order."""
    found = await histories(db)
    return {key: found.get(f"heard of {key}", []) for key in KEYS}


async def has_heard_all(db: asyncpg.Connection) -> bool:
    """Whether the auditor has heard of as many deposits as were made."""
    return sum(map(len, (await heard(db)).values())) >= AMOUNT


async def deposit_all(producer: AIOKafkaProducer, topic: str) -> None:
    """Send a deposit of each amount, one of them in a trace."""
    for amount in AMOUNTS:
        headers = TRACED if amount == AMOUNT // 2 else ()
        await Deposit(amount, KEYS[amount % 3], headers=headers).send(producer, topic)


def reason(health: Health) -> str:
    """Return why the relay is not ready; empty if it is."""
    return health.reasons.get("relay", "")


async def has_dropped(db: asyncpg.Connection, settings: Settings) -> bool:
    """Run a round of retention; returns whether no old day is left."""
    return not (await run_retention(db, settings)).held


SCHEDULE = """
INSERT INTO pipeline.scheduled (name, due_at, topic, event_id, source, type, content_type)
VALUES ('reminder', clock_timestamp(), $1, 'scheduled', '/bank', 'reminded', 'text/plain')
"""


async def test_the_connector_publishes_in_the_place_of_the_relay(
    bank: Bank,
    debezium: Debezium,
    db: asyncpg.Connection,
    kafka: str,
    producer: AIOKafkaProducer,
    running: Running,
    follow: Follow,
    settings: Callable[..., Settings],
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    others = await new_topic(3)
    await stage(db, [event(others, "before the slot")])
    await debezium.run_sql()
    # It confirms nothing until it is killed.
    await debezium.kill()
    await debezium.start_again(flush_milliseconds=3_600_000)
    await debezium.put()
    await eventually(debezium.runs)
    async with (
        following(kafka, others) as more,
        following(kafka, bank.balances) as tail,
        running(bank.service, Part.CONSUME),
        running(auditor(bank.balances), Part.CONSUME),
        follow() as health,
    ):
        await more.until_ids(["before the slot"])
        await eventually(lambda: health.is_ready)

        # It is killed while it publishes, and repeats with the same ids what it had not confirmed.
        async with in_background(deposit_all(producer, bank.deposits)) as depositing:
            await tail.until(lambda: len(tail.records) > AMOUNT // 3)
            await debezium.kill()
            assert len(set(tail.ids)) < AMOUNT
            await depositing
        await eventually(lambda: "no connector reads" in reason(health))

        # A day of which it has not confirmed everything is kept.
        await make_old_day(db)
        await stage_long_ago(db, "long ago", others, payload=b"{}")
        assert [one.name for one in (await run_retention(db, settings())).held] == [OLD]

        await debezium.start_again()
        await stage(
            db, [event(others, "no key", None), event(others, "null")._replace(payload=None)]
        )
        await db.execute(SCHEDULE, others)
        await more.until_ids(["long ago", "no key", "null", "scheduled"])
        await eventually(lambda: has_heard_all(db))
        await eventually(lambda: has_dropped(db, settings()))
        await eventually(lambda: health.is_ready)

    rows = {row["event_id"]: row for row in await outbox(db, bank.balances)}
    expected: dict[bytes, list[str]] = {}
    for id, row in rows.items():
        expected.setdefault(row["key"], []).append(id)
    assert tail.first_ids() == expected
    assert len(tail.records) > len(rows)
    for record in tail.records + more.records:
        if id_of(record) in rows:
            row = rows[id_of(record)]
            assert comparable(record.headers) == comparable(event_headers(row))
            assert (record.key, record.value) == (row["key"], row["payload"])
    assert {id_of(one): (one.key, one.value) for one in more.records} == {
        "before the slot": (b"ada", b"{}"),
        "long ago": (b"ada", b"{}"),
        "no key": (None, b"{}"),
        "null": (b"ada", None),
        "scheduled": (None, None),
    }
    traces = [headers_of(one).get("traceparent", "") for one in tail.records]
    assert any(TRACE in one for one in traces)
    assert await heard(db) == {
        key: [one for one in AMOUNTS if KEYS[one % 3] == key] for key in KEYS
    }


async def test_a_slot_that_was_made_again_skips_no_event(
    debezium: Debezium,
    db: asyncpg.Connection,
    follow: Follow,
    caplog: pytest.LogCaptureFixture,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic()
    await debezium.run_sql()
    await debezium.put()
    async with following(kafka, topic) as tail, follow() as health:
        await eventually(lambda: health.is_ready)
        await stage(db, [event(topic, "by the connector")])
        await tail.until_ids(["by the connector"])
        await debezium.confirms()
        await debezium.kill()
        await db.execute("SELECT pg_drop_replication_slot($1)", debezium.slot)
        await eventually(lambda: "missing or lost: this relay publishes" in caplog.text)
        await stage(db, [event(topic, "by the relay")])
        await tail.until_ids(["by the relay"])

        # The connector fails without its slot, and refuses one that is newer than its offset.
        await debezium.start_again()
        await eventually(debezium.has_failed)
        await db.execute("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", debezium.slot)
        await eventually(lambda: "its connector publishes" in caplog.text)
        await stage(db, [event(topic, "after")])
        await debezium.forget_offsets()
        await tail.until_ids(["after"])
        await eventually(lambda: health.is_ready)


async def test_events_are_not_paused_once_there_is_a_connector(
    debezium: Debezium,
    db: asyncpg.Connection,
    follow: Follow,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic()

    async def pause() -> None:
        """Pause the events, as a person would."""
        events = [Subject("events", topic)]
        await stopping.ask(db, events, lasts=None, who="ada", why="a test")

    await pause()
    await debezium.run_sql()
    with pytest.raises(Refused, match="a connector publishes the events"):
        await pause()
    # Those after them would be published by the connector, which knows of no pause.
    await stage(db, [event(topic, n) for n in range(5)])
    async with following(kafka, topic) as tail, follow():
        await tail.until_ids(range(5))
    assert tail.first_ids() == {b"ada": [str(n) for n in range(5)]}
    await db.execute("SELECT pg_drop_replication_slot($1)", debezium.slot)
    with pytest.raises(Refused, match=f"DROP PUBLICATION {debezium.slot}"):
        await pause()  # the relay publishes, as long as there is no slot


async def test_events_are_paused_as_long_as_there_is_no_publication(
    debezium: Debezium,
    db: asyncpg.Connection,
    follow: Follow,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic, there = await new_topic(), await new_topic()
    events = [Subject("events", topic)]
    await stopping.ask(db, events, lasts=None, who="ada", why="a test")
    async with following(kafka, topic) as paused, following(kafka, there) as others, follow():
        await stage(db, [event(one, n) for n in range(5) for one in (topic, there)])
        await others.until_ids(range(5))
        await eventually(waits(db, range(5)))
        assert paused.records == []
        await debezium.run_sql()
        await paused.until_ids(range(5))
    assert paused.first_ids() == {b"ada": [str(n) for n in range(5)]}


async def test_an_oversized_event_stops_the_connector_until_its_topic_takes_it(
    debezium: Debezium,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    small, topic = await new_topic(**{"max.message.bytes": "4000"}), await new_topic()
    await debezium.run_sql()
    await debezium.put()
    await eventually(debezium.runs)
    async with following(kafka, topic) as tail, following(kafka, small) as large:
        await stage(db, [event(small, 1, payload=LARGE), event(topic, 2)])
        await eventually(debezium.has_failed)
        assert "RecordTooLargeException" in (await debezium.worker.state(debezium.bank.name))[1]
        await allow(kafka, small, 20_000)
        await debezium.worker.restart(debezium.bank.name)
        await large.until_ids([1])
        await tail.until_ids([2])


@dataclass
class Arrivals:
    """When the records of a topic were read, by the ids of their events."""

    at: dict[str, float] = field(default_factory=dict)

    def has(self, count: int) -> Callable[[], bool]:
        """Return the question whether so many have come."""
        return lambda: len(self.at) >= count


@asynccontextmanager
async def arriving(kafka: str, topic: str) -> AsyncIterator[Arrivals]:
    """Note when records arrive, as long as the `with` block lasts."""
    found = Arrivals()

    async def read(consumer: AIOKafkaConsumer) -> None:
        async for record in consumer:
            found.at.setdefault(id_of(record), time())

    async with (
        AIOKafkaConsumer(
            topic, bootstrap_servers=kafka, auto_offset_reset="earliest", fetch_max_wait_ms=50
        ) as consumer,
        in_background(read(consumer)),
    ):
        yield found


def cpu_seconds(*processes: int) -> float:
    """Return the processor time of processes and of those that they have started."""
    total = 0.0
    for process in map(psutil.Process, processes):
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += sum(one.cpu_times()[:2])
    return total


async def stage_many(db: asyncpg.Connection, topic: str) -> None:
    """Stage a backlog, in transactions of some size and of a thousand keys."""
    for first in range(0, MANY, A_TRANSACTION):
        numbers = range(first, first + A_TRANSACTION)
        payload = b"x" * 250
        await stage(db, [event(topic, n, f"key-{n % 1_000}", payload) for n in numbers])


@dataclass
class Measured:
    """What a publisher achieves, and the processor time that it and PostgreSQL take."""

    rate: float
    median: float
    worst: float
    busy: tuple[float, float]
    idle: tuple[float, float]

    def __str__(self) -> str:
        return (
            f"{self.rate:,.0f} events/s; latency {self.median * 1e3:.0f} ms,"
            f" 99 % {self.worst * 1e3:.0f} ms; seconds of CPU for 100,000 events:"
            f" {self.busy[0]:.1f} and PostgreSQL {self.busy[1]:.1f}; idle:"
            f" {self.idle[0]:.1%} and {self.idle[1]:.1%} of a core"
        )


async def measured(
    db: asyncpg.Connection,
    kafka: str,
    topic: str,
    cluster: Cluster,
    publisher: Callable[[], Awaitable[int]],
) -> Measured:
    """Measure a publisher, whose process is started with a backlog before it."""
    await stage_many(db, topic)
    async with arriving(kafka, topic) as arrivals:

        def used() -> tuple[float, float]:
            return cpu_seconds(process), cpu_seconds(cluster.record.pid)

        def since(before: tuple[float, float], by: float) -> tuple[float, float]:
            now = used()
            return (now[0] - before[0]) / by, (now[1] - before[1]) / by

        process = await publisher()
        await eventually(arrivals.has(MANY // 10))
        before, first = used(), len(arrivals.at)
        await eventually(arrivals.has(MANY))
        busy = since(before, (MANY - first) / 100_000)
        times = sorted(arrivals.at.values())
        rate = (MANY - first) / (times[-1] - times[first])
        committed = {}
        for number in range(MANY, MANY + FEW):
            await stage(db, [event(topic, number)])
            committed[str(number)] = time()
            await asyncio.sleep(0.03)
        await eventually(arrivals.has(MANY + FEW))
        delays = sorted(max(0.0, arrivals.at[id] - at) for id, at in committed.items())
        before, begun = used(), time()
        await asyncio.sleep(10)
        idle = since(before, time() - begun)
    return Measured(rate, delays[FEW // 2], delays[FEW * 99 // 100], busy, idle)


@pytest.fixture
async def start(bank: Bank, database_url: str, kafka: str) -> AsyncIterator[Start]:
    """Start processes of the bank."""
    servers = {"database_url": database_url, "kafka_bootstrap_servers": kafka}
    async with starting(bank, **servers) as start:
        yield start


async def test_both_publish_a_backlog_and_single_events(
    debezium: Debezium,
    db: asyncpg.Connection,
    start: Start,
    kafka: str,
    cluster: Cluster,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    """What it prints is the table in docs/debezium.md."""

    relays: list[Process] = []

    async def start_relay() -> int:
        relays.append(await start("relay"))
        return relays[0].pid

    async def start_connector() -> int:
        await debezium.put()
        return debezium.worker.record.pid

    found = {"relay": await measured(db, kafka, await new_topic(4), cluster, start_relay)}
    await relays[0].kill()
    await debezium.run_sql()
    topic = await new_topic(4)
    found["Debezium"] = await measured(db, kafka, topic, cluster, start_connector)
    for name, one in found.items():
        print(f"{name}: {one}")
