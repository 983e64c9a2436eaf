"""Servers that go away, hang, refuse to write and come back, under a service that works.

Nothing is lost or doubled, no record is blamed, the log is short, readiness names the server, and
the service goes on by itself.
"""

import asyncio
import re
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import GroupCoordinatorNotAvailableError
from aiokafka.protocol.group import HeartbeatRequest
from prometheus_client.parser import text_string_to_metric_families
from servers.kafka import Kafka
from servers.network import LOOPBACK
from sqlalchemy import make_url

from .bank import Bank
from .clusters import Cluster, private, private_broker
from .kafka_wire import Api, Wire
from .private_server import server_url, template, used_databases, way_in  # noqa: F401 (fixtures)
from .processes import starting
from .tcp_proxy import TcpProxy
from .test_process import check_the_ledger, send_deposits
from tests.servers.databases import administer
from tests.servers.processes import Process, Start
from tests.servers.waiting import eventually

pytestmark = pytest.mark.full

CreateTopic = Callable[..., Awaitable[str]]

SESSION = 3
"""Seconds after which the group gives up a member that says nothing."""
LINES = 25
"""Log lines that an outage may cost, however long it lasts."""
CONNECTIONS = 40


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Return a database server that may be stopped."""
    with private(f"--max_connections={CONNECTIONS}") as one:
        yield one


@pytest.fixture(scope="module")
def broker() -> Iterator[Kafka]:
    """Return a broker that may be stopped."""
    with private_broker() as one:
        yield one


@pytest.fixture(scope="module")
def kafka(broker: Kafka) -> str:
    """Bootstrap servers of that broker, in the place of the one that all tests share."""
    return f"{LOOPBACK}:{broker.port}"


@pytest.fixture(scope="module")
def used_topics() -> list[str]:
    """Topics of that broker: they go with it."""
    return []


@dataclass
class World:
    """A service at work, the servers that it needs, and the ways that it reaches them by."""

    bank: Bank
    process: Process
    database_url: str
    kafka: str
    cluster: Cluster
    broker: Kafka
    proxy: TcpProxy
    wire: Wire
    producer: AIOKafkaProducer
    later: AsyncExitStack
    """What is left to do when the test has ended."""
    amounts: int = 0
    """How many deposits have been sent."""
    lines: int = 0
    """How many lines the process had written when the outage began."""

    @property
    def postgresql(self) -> str:
        """What the service calls its database server."""
        return f"PostgreSQL at 127.0.0.1:{self.proxy.port}"

    @property
    def brokers(self) -> str:
        """What the service calls its brokers."""
        return f"Kafka at {self.wire.address}"

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[asyncpg.Connection]:
        """Connect to the database, past the proxy."""
        connection = await asyncpg.connect(self.database_url.replace("+asyncpg", ""))
        try:
            yield connection
        finally:
            await connection.close()

    async def execute(self, statement: str) -> None:
        """Execute a statement in the service's database."""
        async with self.connected() as db:
            await db.execute(statement)

    async def send(self, count: int) -> None:
        """Send so many deposits more."""
        amounts = range(self.amounts + 1, self.amounts + count + 1)
        await send_deposits(self.producer, self.bank, amounts, 2)
        self.amounts += count

    async def begins(self) -> None:
        """Wait until the first deposits are applied and published."""
        await self.send(40)
        await self.catches_up()
        self.lines = len(self.process.output.splitlines())

    async def applies_all(self) -> None:
        """Wait until all that was sent is applied."""

        async def is_applied() -> bool:
            count = "SELECT count(*) = $1 FROM pipeline.inbox"
            return bool(await db.fetchval(count, self.amounts))

        async with self.connected() as db:
            await eventually(is_applied)

    async def catches_up(self) -> None:
        """Wait until all that was sent is applied and published, and the service is ready."""
        begun = time.monotonic()
        await self.applies_all()
        applied = time.monotonic() - begun
        async with self.connected() as db:
            await eventually(self.process.is_ready)
            # Told once a second, and so not of an outage that was shorter than that.
            await eventually(lambda: "not ready" not in self.announced())
            ready = time.monotonic() - begun
            await check_the_ledger(db, self.kafka, self.bank, self.amounts)
        print(f"applied {applied:.1f} s and ready {ready:.1f} s after the outage")

    async def tells(self, *servers: str) -> None:
        """Wait until readiness names the servers, each of them in the reason of some part."""

        async def all_are_named() -> bool:
            reasons = (await self.process.reasons()).values()
            return all(any(server in reason for reason in reasons) for server in servers)

        await eventually(all_are_named)

    async def blames_none(self) -> bool:
        """Return whether nothing is counted; events that waited are, for a third of a lease."""
        return await self.blamed() == {}

    async def generation(self) -> int:
        """Return the generation of the group, by which every rebalance is counted."""
        admin = AIOKafkaAdminClient(bootstrap_servers=self.kafka)
        await admin.start()
        try:
            (answer,) = await admin.describe_consumer_groups([self.bank.name])
            ((id, *_),) = answer.groups[0][5]
            broker = await admin.find_coordinator(self.bank.name)
            for number in range(1, 20):
                beat = HeartbeatRequest(self.bank.name, number, id)
                if (await admin._client.send(broker, beat)).error_code == 0:
                    return number
        finally:
            await admin.close()
        raise AssertionError("the group has been in turmoil")

    async def blamed(self) -> dict[str, float]:
        """Return what was counted against records: an outage is the reason of none of it."""
        _, text = await self.process.get("/metrics")
        counted = {
            sample.labels["pipeline_outcome"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if "pipeline_outcome" in sample.labels and sample.value
        }
        assert counted.pop("applied") > 0
        counted.pop("duplicate", None)
        return counted

    def announced(self) -> str:
        """Return what the log said last of readiness."""
        return [
            line for line in self.process.output.splitlines() if "onceward.observe.health" in line
        ][-1]

    def log(self) -> list[str]:
        """Return the lines written since the outage began."""
        return self.process.output.splitlines()[self.lines :]


@pytest.fixture
async def bank(new_topic: CreateTopic) -> Bank:
    """Return a bank whose topics have two partitions."""
    return Bank(
        deposits=await new_topic(2), balances=await new_topic(2), name=f"bank-{uuid4().hex[:8]}"
    )


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[TcpProxy]:
    """Return the proxy that the service reaches its database by."""
    url = make_url(database_url)
    async with TcpProxy("127.0.0.1", url.port or 0).listening() as one:
        yield one


@pytest.fixture
async def wire(kafka: str) -> AsyncIterator[Wire]:
    """Return the wire that the service reaches Kafka by."""
    async with Wire(kafka).listening() as one:
        yield one


@pytest.fixture
async def start(
    bank: Bank,
    database_url: str,
    proxy: TcpProxy,
    wire: Wire,
) -> AsyncIterator[Start]:
    """Start processes of the bank, behind the proxy and the wire."""
    url = make_url(database_url).set(host="127.0.0.1", port=proxy.port)
    async with starting(
        bank,
        database_url=url.render_as_string(hide_password=False),
        database_pooler=False,
        kafka_bootstrap_servers=wire.address,
        kafka_session_timeout=SESSION,
        transaction_timeout=2,
        lock_timeout=1,
        offset_commit_interval=0.5,
        retry_pause=0.5,
        relay_lease=1,
    ) as one:
        yield one


NewWorld = Callable[..., Awaitable[World]]


@pytest.fixture
async def new_world(
    start: Start,
    bank: Bank,
    database_url: str,
    kafka: str,
    cluster: Cluster,
    broker: Kafka,
    proxy: TcpProxy,
    wire: Wire,
    producer: AIOKafkaProducer,
) -> AsyncIterator[NewWorld]:
    """Start a service with these settings."""
    async with AsyncExitStack() as later:

        async def begin(**settings: object) -> World:
            return World(
                bank,
                await start("run", **settings),
                database_url,
                kafka,
                cluster,
                broker,
                proxy,
                wire,
                producer,
                later,
            )

        yield begin


@pytest.fixture
async def world(new_world: NewWorld) -> World:
    """Return a service that has applied and published its first deposits."""
    one = await new_world()
    await one.begins()
    return one


Fault = Callable[[World], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def away(world: World) -> AsyncIterator[None]:
    """Shut the server down, as for maintenance."""
    await asyncio.to_thread(world.cluster.stop)
    yield
    await asyncio.to_thread(world.cluster.start)
    await asyncio.to_thread(world.cluster.wait_until_serving)


@asynccontextmanager
async def crashed_in_a_commit(world: World) -> AsyncIterator[None]:
    """Let the server crash while the service waits for the answer to a COMMIT."""
    async with world.connected() as db:
        # Not of a table that handlers write, whose constraints are checked after each message.
        inbox = await db.fetchval("SELECT 'inbox_g' || current FROM pipeline.inbox_generation")
        await db.execute(f"""
            CREATE FUNCTION wait_for_lock() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                PERFORM pg_advisory_xact_lock_shared(1);
                RETURN NULL;
            END $$;
            CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON pipeline.{inbox}
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait_for_lock();
            SELECT pg_advisory_lock(1);
        """)
        await world.send(10)

        async def commits() -> bool:
            return bool(
                await db.fetchval(
                    "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'COMMIT%'"
                    " AND datname = current_database() AND wait_event_type = 'Lock'"
                )
            )

        await eventually(commits)
        await asyncio.to_thread(world.cluster.crash)
    yield
    await asyncio.to_thread(world.cluster.start)
    await asyncio.to_thread(world.cluster.wait_until_serving)


@asynccontextmanager
async def unheard(world: World) -> AsyncIterator[None]:
    """Lose everything that is sent to the server and by it, and at last the connections."""
    world.proxy.hold()
    yield
    world.proxy.cut()
    world.proxy.restore()


@asynccontextmanager
async def read_only(world: World) -> AsyncIterator[None]:
    """Do as a failover that has left the service on a standby, until that is promoted."""
    name = make_url(world.database_url).database
    await world.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    world.proxy.cut()
    yield
    await administer(
        world.cluster.url("postgres"), f"ALTER DATABASE {name} RESET default_transaction_read_only"
    )


@asynccontextmanager
async def out_of_connections(world: World) -> AsyncIterator[None]:
    """Take every connection that the server has."""
    taken: list[asyncpg.Connection] = []

    async def nothing_is_left() -> bool:
        with suppress(asyncpg.TooManyConnectionsError):
            while True:
                taken.append(await asyncpg.connect(world.database_url.replace("+asyncpg", "")))
        served = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1"
        return bool(await taken[0].fetchval(served, world.bank.name) == 0)

    try:
        world.proxy.shut()
        await eventually(nothing_is_left)
        world.proxy.restore()
        yield
    finally:
        for connection in taken:
            connection.terminate()


@contextmanager
def small_disk() -> Iterator[Path]:
    """Mount a disk of 64 MB, as long as the block lasts."""
    disk = Path(mkdtemp())
    disk.chmod(0o755)
    try:
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(disk)]
        if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("a small disk takes the right to mount one")
        yield disk
        subprocess.run(["umount", str(disk)], check=True)
    finally:
        disk.rmdir()


@asynccontextmanager
async def disk_full(world: World) -> AsyncIterator[None]:
    """Let the database find no room for another page."""
    disk = world.later.enter_context(small_disk())
    tablespace = disk / "tablespace"
    tablespace.mkdir(mode=0o700)
    world.cluster.give_to_user(tablespace)
    administrate = partial(administer, world.cluster.url("postgres"))
    await administrate(f"CREATE TABLESPACE small LOCATION '{tablespace}'")
    world.later.push_async_callback(administrate, "DROP TABLESPACE small")

    async def move(tablespace: str) -> None:
        name = make_url(world.database_url).database
        world.proxy.shut()
        await administrate(
            "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity"
            f" WHERE datname = '{name}'"
        )
        await administrate(f"ALTER DATABASE {name} SET TABLESPACE {tablespace}")
        world.proxy.restore()

    world.later.push_async_callback(move, "pg_default")
    await move("small")
    filling = disk / "filling"
    with filling.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b" " * 4_096):
            pass
    yield
    filling.unlink()


DATABASE_FAULTS: dict[str, Fault] = {
    "away": away,
    "crashed in a commit": crashed_in_a_commit,
    "unheard": unheard,
    "read-only": read_only,
    "out of connections": out_of_connections,
    "disk full": disk_full,
}


@pytest.mark.parametrize("fault", DATABASE_FAULTS)
async def test_the_service_survives_its_database(world: World, fault: str) -> None:
    """Traps 16 and 17."""
    generation = await world.generation()
    begun, knocks = time.monotonic(), world.proxy.attempts
    async with DATABASE_FAULTS[fault](world):
        await world.send(400)
        await world.tells(world.postgresql)
        await eventually(lambda: world.proxy.attempts > knocks + 5)
        await eventually(lambda: time.monotonic() > begun + SESSION + 1)
        await world.send(40)
    await world.catches_up()
    assert await world.generation() == generation
    assert await world.blamed() == {}
    assert len(world.log()) <= LINES
    assert "Traceback" not in "".join(world.log())


async def test_a_slow_database_costs_time_and_nothing_else(new_world: NewWorld) -> None:
    """Trap 17."""
    # So long that no transaction reaches it on a busy machine: its messages would be tried alone.
    world = await new_world(transaction_timeout=20, kafka_session_timeout=30, backlog_lease=25)
    await world.begins()
    generation = await world.generation()
    world.proxy.delay = 0.03
    await world.send(400)
    await world.catches_up()
    assert await world.generation() == generation
    assert await world.blamed() == {}
    # A busy machine's broker may be slow as well, which is told.
    of_broker = (
        r"INFO +\S+health: (not ready: relay: waits for Kafka at \S+ to acknow|ready, after)"
    )
    assert [line for line in world.log() if not re.search(of_broker, line)] == []


async def test_a_database_that_is_too_slow_for_any_record_blames_none(world: World) -> None:
    """Trap 16."""
    generation = await world.generation()
    world.proxy.delay = 0.5
    await world.send(2)
    await world.tells(world.postgresql)
    knocks = world.proxy.attempts
    await eventually(lambda: world.proxy.attempts > knocks + 3)
    world.proxy.restore()
    await world.catches_up()
    assert await world.generation() == generation
    assert await world.blamed() == {}
    assert len(world.log()) <= LINES


@asynccontextmanager
async def shut(world: World) -> AsyncIterator[None]:
    """Let no connection through to the brokers."""
    world.wire.shut()
    yield
    world.wire.go_on()


@asynccontextmanager
async def restarted(world: World) -> AsyncIterator[None]:
    """Shut the broker down, as for maintenance."""
    await asyncio.to_thread(world.broker.stop)
    yield
    await asyncio.to_thread(world.broker.start)
    await asyncio.to_thread(world.broker.wait_until_serving)


@asynccontextmanager
async def mute(world: World) -> AsyncIterator[None]:
    """Let brokers hear what is asked, and say nothing."""
    world.wire.ignore(*Api)
    yield
    world.wire.cut()
    world.wire.go_on()


@asynccontextmanager
async def leaderless(world: World) -> AsyncIterator[None]:
    """Let no partition have a leader."""
    world.wire.take_leaders()
    yield
    world.wire.go_on()


KAFKA_FAULTS: dict[str, tuple[Fault, int]] = {
    "away": (shut, 200),
    "restarted": (restarted, 0),
    "mute": (mute, 0),
    "leaderless": (leaderless, 0),
}
"""Faults, and how often the service knocks at the brokers' proxy before they end."""


@pytest.mark.parametrize("fault", KAFKA_FAULTS)
async def test_the_service_survives_its_brokers(world: World, fault: str) -> None:
    """Traps 16, 17 and 23."""
    at_fault, times = KAFKA_FAULTS[fault]
    enough = world.wire.knocks + times
    async with at_fault(world):
        sending = asyncio.create_task(world.send(40))
        await world.tells(world.brokers)
        await eventually(lambda: world.wire.knocks >= enough)
    await sending
    await world.send(40)
    await world.catches_up()
    await eventually(world.blames_none)
    assert len(world.log()) <= LINES
    assert "Traceback" not in "".join(world.log())


@pytest.fixture
async def second(broker: Kafka, bank: Bank, kafka: str) -> AsyncIterator[Kafka]:
    """Return a second broker, with replicas of all that the bank reads and writes."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)

    async def has_a_coordinator() -> bool:
        with suppress(GroupCoordinatorNotAvailableError):
            await admin.find_coordinator(bank.name)
            return True
        return False

    await admin.start()
    try:
        # The groups' own topic is made now, and stays with the first broker.
        await eventually(has_a_coordinator)
        with private_broker(broker) as one:
            bank.deposits, bank.balances = f"{bank.name}-in", f"{bank.name}-out"
            needs_both = {"min.insync.replicas": "2"}
            await admin.create_topics(
                [
                    NewTopic(bank.deposits, 2, 2),
                    NewTopic(bank.balances, 2, 2, topic_configs=needs_both),
                ]
            )
            yield one
    finally:
        await admin.close()


async def test_the_service_survives_the_loss_of_leaders_and_replicas(
    second: Kafka, world: World
) -> None:
    """Traps 6 and 23: deposits find another leader, and balances wait for their second replica."""
    await asyncio.to_thread(second.send, signal.SIGKILL)
    await asyncio.to_thread(second.stop)
    await world.send(40)
    await world.applies_all()
    await world.tells("no acknowledgement")
    await asyncio.to_thread(second.start)
    await asyncio.to_thread(second.wait_until_serving)
    await world.send(40)
    await world.catches_up()
    await eventually(world.blames_none)
    assert len(world.log()) <= LINES


async def test_the_service_survives_both_at_once(world: World) -> None:
    """Trap 16."""
    knocks = world.wire.knocks
    async with shut(world), away(world):
        await world.send(40)
        await world.tells(world.postgresql, world.brokers)
        await eventually(lambda: world.wire.knocks > knocks + 100)
    await world.send(40)
    await world.catches_up()
    assert await world.blamed() == {}
    assert len(world.log()) <= 2 * LINES
    assert "Traceback" not in "".join(world.log())


GRACE = 20.0
MINUTE = 60.0
"""Time that an idle connection takes to be closed by itself."""


@pytest.mark.parametrize("silent", [[unheard], [unheard, mute]], ids=["the database", "both"])
async def test_shutdown_does_not_wait_for_connections_to_a_silent_database(
    new_world: NewWorld, silent: list[Fault]
) -> None:
    world = await new_world(shutdown_grace=GRACE)
    await world.begins()
    async with AsyncExitStack() as faults:
        for fault in silent:
            await faults.enter_async_context(fault(world))
        await world.send(40)
        await world.tells(world.postgresql)
        begun = time.monotonic()
        world.process.send(signal.SIGTERM)
        await world.process.ended()
        assert time.monotonic() - begun < MINUTE
    assert "closing connection" not in "".join(world.log())


@pytest.mark.parametrize("missing", ["the database", "Kafka", "both"])
async def test_the_service_starts_before_its_servers(
    new_world: NewWorld, proxy: TcpProxy, wire: Wire, missing: str
) -> None:
    if missing != "Kafka":
        proxy.shut()
    if missing != "the database":
        wire.shut()
    world = await new_world()
    await world.send(40)
    if missing != "Kafka":
        await world.tells(world.postgresql)
        await eventually(lambda: proxy.attempts > 5)
        proxy.restore()
    if missing != "the database":
        await world.tells(world.brokers)
        await eventually(lambda: wire.knocks > 5)
        wire.go_on()
    await world.catches_up()
    assert await world.blamed() == {}
    assert len(world.log()) <= LINES
    assert "Traceback" not in "".join(world.log())
