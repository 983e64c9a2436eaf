"""The rig: servers, topics and databases for contestants, and what they cost and achieve there."""

import asyncio
import json
import secrets
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg  # type: ignore[import-untyped]
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition  # type: ignore[import-untyped]
from aiokafka.admin import AIOKafkaAdminClient, NewTopic  # type: ignore[import-untyped]

from benchmarks import load
from benchmarks.check import Check, misplaced, require
from benchmarks.interpreter import Interpreter, environment
from benchmarks.load import Load
from benchmarks.usage import family_seconds, process_seconds
from demo.evidence import Effect, ParcelRow
from demo.processes import NAME, ProcessFailed, Service, Stack, end_holder, last_lines
from demo.witness import PARCELS

T = TypeVar("T")

PARTITIONS = 4
PATIENCE = 60.0
"""Seconds without progress after which a contestant has failed."""
_LOOK_SECONDS = 0.03
_FETCH_BYTES = 4 * 1024 * 1024
_STATEMENT_SECONDS = 1_800.0
_OF_OURS = """
    SELECT count(*) FROM pipeline.inbox
     WHERE generation = (SELECT current FROM pipeline.inbox_generation)
"""
_MARKERS = {
    "benchmarks.ours": _OF_OURS,
    "benchmarks.ours_payments": _OF_OURS,
    "benchmarks.bare": "SELECT count(*) FROM marker",
    "benchmarks.bare_payments": "SELECT count(*) FROM marker",
    "benchmarks.usual": "SELECT count(*) FROM inbox",
    "benchmarks.peers.omni_box": "SELECT count(*) FROM inbox_events WHERE status = 'completed'",
    "benchmarks.peers.faststream_outbox": "SELECT count(*) FROM inbox",
    "benchmarks.peers.pactix": "SELECT count(*) FROM inbox_message WHERE status = 'processed'",
    "benchmarks.peers.txoutbox": "SELECT count(*) FROM inbox",
}
_ADOPT = """
DO $$ BEGIN
    UPDATE pipeline.outbox_cluster SET database_oid = oid, kafka_cluster = NULL
      FROM pg_database WHERE datname = current_database();
EXCEPTION WHEN undefined_table OR undefined_column OR invalid_schema_name THEN
    NULL;  -- another contestant, or release
END $$
"""
"""What makes a copy of a template a database of its own."""
_MIGRATED = "-"
"""Stands for a topic where none is needed."""


@dataclass(frozen=True)
class Contestant:
    """Somebody who does the work: a module that is run as a process."""

    name: str
    module: str
    handler: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    python: Path | None = None
    """What runs the module, if not the Python of all contestants."""
    service: str = NAME
    """The baked service whose packages the module imports, a folder beside the parcel tracker."""

    @property
    def is_ours(self) -> bool:
        """Whether it is a baked service, which tells when it is ready."""
        return self.module in ("benchmarks.ours", "benchmarks.ours_payments")


OURS = Contestant("ours", "benchmarks.ours", "orm")
OURS_SQL = Contestant("ours-sql", "benchmarks.ours", "sql")
BARE = Contestant("bare", "benchmarks.bare", "sql")
BARE_ORM = Contestant("bare-orm", "benchmarks.bare", "orm")
USUAL = Contestant("usual", "benchmarks.usual")
PRODUCER = Contestant("producer", "benchmarks.producer", "plain")
PRODUCER_HEADERS = Contestant("producer-headers", "benchmarks.producer", "headers")


@dataclass(frozen=True)
class Site:
    """Where a contestant works: a database and a topic of its own."""

    contestant: Contestant
    database: str
    """Its URL, as everybody but SQLAlchemy writes it."""
    input: str
    output: str
    group: str


@dataclass(frozen=True)
class Sample:
    """How far a contestant is at a time."""

    at: float
    """On the monotonic clock, in seconds."""
    count: int
    cpu: Mapping[str, float]
    """CPU seconds spent so far, by who spent them."""


Count = Callable[[], Awaitable[int]]
Told = Callable[[Any], tuple[str, int, Effect | None]]


class Rig:
    """Everything that contestants run on."""

    def __init__(self, project: Path, folder: Path, stack: Stack) -> None:
        self.project = project
        self.folder = folder
        self.stack = stack
        self.interpreter: Interpreter | None = None
        self.python = Path(sys.executable)
        """Runs contestants that name no other, in an environment of the interpreter's."""
        self._log = folder / "setup.txt"
        self._templates: set[str] = set()
        self._inputs: set[str] = set()
        self._tag = secrets.token_hex(3)
        """In every name, so that servers may hold what another run has left."""
        self._number = 0
        self._pids = 0
        self._admin: Any = None

    async def environment(self, interpreter: Interpreter) -> Path:
        """Return the Python of an environment with what the baked service requires, by hash.

        Raises `ProcessFailed`.
        """
        requirements = str((self.project / "requirements" / "base.txt").resolve())
        words = "--require-hashes", "-r", requirements
        return await environment(interpreter, self.folder, "python", *words, log=self._log)

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Lend the servers, which are empty, and stop them in the end."""
        await self.clear()
        try:
            await self.stack.up(self._log)
            self._admin = AIOKafkaAdminClient(bootstrap_servers=self.stack.kafka)
            await self._admin.start()
            yield
            await self.remove_inputs()
            await self.execute(*(f"DROP DATABASE {name}" for name in sorted(self._templates)))
        finally:
            if self._admin is not None:
                await self._admin.close()
            await self.clear()

    async def clear(self) -> None:
        """End what a run has left running, and delete its data."""
        for lock in self.folder.glob("*.pid"):
            end_holder(lock)
            lock.unlink()
        if self.project.exists():
            await self.stack.remove(self._log)

    async def topic(self, name: str, partitions: int = PARTITIONS) -> str:
        """Make a topic."""
        await self._admin.create_topics([NewTopic(name, partitions, 1)])
        return name

    async def input(self, load_: Load, partitions: int = PARTITIONS) -> str:
        """Return a topic that holds the load, which is written when it is first asked for."""
        name = f"scans-{self._tag}-{load_.name}-{len(load_.scans)}-{partitions}"
        if name not in self._inputs:
            await self.topic(name, partitions)
            async with self.producer() as producer:
                await load.fill(producer, name, load_.records())
            self._inputs.add(name)
        return name

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[AIOKafkaProducer]:
        """Lend a producer that writes large batches."""
        producer = load.producer(self.stack.kafka)
        await producer.start()
        try:
            yield producer
        finally:
            await producer.stop()

    async def remove_inputs(self) -> None:
        """Delete the topics of the loads written so far."""
        if self._inputs:
            await self._admin.delete_topics(sorted(self._inputs))
        self._inputs.clear()

    async def execute(self, *statements: str, database: str | None = None) -> None:
        """Execute statements, each by itself."""
        async with connected(database or self.stack.database) as connection:
            for statement in statements:
                await connection.execute(statement, timeout=_STATEMENT_SECONDS)

    @asynccontextmanager
    async def site(
        self, contestant: Contestant, input_: str, partitions: int = PARTITIONS
    ) -> AsyncIterator[Site]:
        """Lend a fresh database with the contestant's tables, and an empty topic for its events."""
        template = f"bench_{self._tag}_{contestant.module.rpartition('.')[2]}"
        if template not in self._templates:
            await self.execute(f"CREATE DATABASE {template}")
            await self._prepare(contestant, self._url(template))
            self._templates.add(template)
        self._number += 1
        name = f"bench_{self._tag}_{self._number}"
        await self.execute(f"CREATE DATABASE {name} TEMPLATE {template}", "CHECKPOINT")
        await self.execute(_ADOPT, database=self._url(name))
        try:
            async with self.fresh_topic(partitions) as output:
                yield Site(contestant, self._url(name), input_, output, name)
        finally:
            await self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    @asynccontextmanager
    async def fresh_topic(self, partitions: int = PARTITIONS) -> AsyncIterator[str]:
        """Lend an empty topic."""
        self._number += 1
        name = await self.topic(f"events-{self._tag}-{self._number}", partitions)
        try:
            yield name
        finally:
            await self._admin.delete_topics([name])

    def _url(self, database: str) -> str:
        return urlunsplit(urlsplit(self.stack.database)._replace(path=f"/{database}"))

    async def _prepare(self, contestant: Contestant, url: str) -> None:
        service = self.process(Site(contestant, url, _MIGRATED, _MIGRATED, "bench"))
        await service.command("migrate" if contestant.is_ours else "prepare", log=self._log)
        if contestant.is_ours:  # its copies are of services with other names
            await self.execute("COMMENT ON SCHEMA pipeline IS NULL", database=url)

    def process(
        self, site: Site, *, command: str = "run", settings: Mapping[str, str] | None = None
    ) -> Service:
        """Return a process of the contestant, which is not started yet."""
        contestant = site.contestant
        self._pids += 1
        return Service(
            self.folder / contestant.service,
            {**self.variables(site), **(settings or {})},
            self.folder / f"{contestant.name}.txt",
            self.folder / f"{self._pids}.pid",
            command=command,
            module=contestant.module,
            python=contestant.python or self.python,
            defaults={},  # those of the service itself
        )

    def variables(self, site: Site) -> dict[str, str]:
        """Return the environment variables of a contestant's process."""
        return {
            "PIPELINE_DATABASE_URL": site.database.replace(
                "postgresql://", "postgresql+asyncpg://", 1
            ),
            "PIPELINE_KAFKA_BOOTSTRAP_SERVERS": self.stack.kafka,
            "BENCH_INPUT": site.input,
            "BENCH_OUTPUT": site.output,
            "BENCH_NAME": site.group,
            "BENCH_HANDLER": site.contestant.handler,
            **site.contestant.settings,
        }

    async def seek_to_earliest(self, site: Site) -> None:
        """Let the service read its input again."""
        service = self.process(site)
        await service.command("topics", "seek", site.input, "--to", "earliest", log=self._log)

    def servers_cpu(self) -> dict[str, float]:
        """Return the CPU seconds that the servers have spent, where they are processes here."""
        return {name: family_seconds(pid) for name, pid in self.server_pids().items()}

    def server_pids(self) -> dict[str, int]:
        """Return the processes of the servers, where they are processes here."""
        state = self.stack.state / "state.json"
        told = json.loads(state.read_text()) if state.exists() else {}
        pids = {name: (told.get(name) or {}).get("pid") for name in ("postgres", "kafka")}
        return {name: pid for name, pid in pids.items() if pid}

    async def partitions(self, topic: str) -> list[TopicPartition]:
        """Return the partitions of a topic."""
        told = await self._admin.describe_topics([topic])
        return [TopicPartition(topic, one["partition"]) for one in told[0]["partitions"]]

    @asynccontextmanager
    async def counted(self, topic: str) -> AsyncIterator[Count]:
        """Lend what counts the records of a topic."""
        partitions = await self.partitions(topic)
        # One for each topic: it would go on asking after those that are deleted.
        consumer = AIOKafkaConsumer(bootstrap_servers=self.stack.kafka)

        async def count() -> int:
            ends: dict[TopicPartition, int] = await consumer.end_offsets(partitions)
            return sum(ends.values())

        await consumer.start()
        try:
            yield count
        finally:
            await consumer.stop()

    async def watch(
        self,
        services: Sequence[Service],
        count: Count,
        expected: int,
        *,
        begun: Count | None = None,
    ) -> list[Sample]:
        """Look until all is there, from the last look at which nothing was.

        `begun` says whether the work has begun, where `count` does so later. Raises `ProcessFailed`
        if there never is all, or a process ends.
        """
        return await guarded(self._watch(services, count, expected, begun), services)

    async def _watch(
        self, services: Sequence[Service], count: Count, expected: int, begun: Count | None
    ) -> list[Sample]:
        def sample(count: int) -> Sample:
            python = sum(process_seconds(service.pid or 0) for service in services)
            return Sample(time.monotonic(), count, {"python": python, **self.servers_cpu()})

        samples = [sample(0)]  # all may be there at the first look
        progressed, is_begun = time.monotonic(), False
        while samples[-1].count < expected:
            done = await count()
            is_begun = is_begun or done > 0 or (begun is not None and await begun() > 0)
            if done > samples[-1].count:
                progressed = time.monotonic()
            elif time.monotonic() - progressed > PATIENCE:
                raise ProcessFailed(f"it stands at {done:,} of {expected:,}: {services[0].log}")
            if not is_begun:
                samples.clear()
            samples.append(sample(done))
            await asyncio.sleep(_LOOK_SECONDS)
        return samples

    async def check(self, site: Site, *loads: Load) -> None:
        """Hold what the contestant has left against the loads. Raises `CheckFailed`."""
        check = await self.read(site.output)
        events = sum((one.events_per_parcel for one in loads), Counter[str]())
        scans = sum((one.per_parcel for one in loads), Counter[str]())
        effects = defaultdict[str, list[Effect]](list)
        for one in loads:
            for key, told in one.effects_per_parcel.items():
                effects[key] += told
        rows = await self.rows(site)
        faults = check.faults(events, scans, {row.id: row.scans for row in rows}, effects)
        faults += misplaced(
            {key: seen for one in loads for key, seen in one.last_seen.items()},
            {row.id: (row.place, row.last_scanned_at) for row in rows},
        )
        if (markers := await self.markers(site)) != scans.total():
            faults.append(f"{markers:,} scans are marked, it should be {scans.total():,}")
        require(faults, site.contestant.name)

    async def rows(self, site: Site) -> list[ParcelRow]:
        """Return the parcels' rows."""
        async with connected(site.database) as connection:
            return [ParcelRow(*row) for row in await connection.fetch(PARCELS)]

    async def markers(self, site: Site) -> int:
        """Return how many scans the contestant remembers, without a past written for it."""
        async with connected(site.database) as connection:
            return int(await connection.fetchval(_MARKERS[site.contestant.module]))

    async def read(self, topic: str, told: Told | None = None) -> Check:
        """Read a topic of events from its beginning to its end.

        `told` returns key and sequence of a record, and its effect; by default they are an event's.
        """
        check = Check()
        partitions = await self.partitions(topic)
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.stack.kafka,
            max_partition_fetch_bytes=_FETCH_BYTES,
            enable_auto_commit=False,
        )
        await consumer.start()
        try:
            consumer.assign(partitions)
            await consumer.seek_to_beginning(*partitions)
            left = sum((await consumer.end_offsets(partitions)).values())
            while left > 0:
                fetched = await consumer.getmany(timeout_ms=1_000)
                for record in (record for records in fetched.values() for record in records):
                    check.add(*(told or _told)(record))
                    left -= 1
        finally:
            await consumer.stop()
        return check


def place_of(record: Any) -> tuple[str, int, None]:
    """Return key and sequence of an event, whatever it tells."""
    sequence = next((value for name, value in record.headers if name == "ce_sequence"), b"0")
    return (record.key or b"").decode(), int(sequence), None


def _told(record: Any) -> tuple[str, int, Effect]:
    """Return key and sequence of an event, and what it tells."""
    key, sequence, _ = place_of(record)
    type_ = next((value for name, value in record.headers if name == "ce_type"), b"")
    data = json.loads(record.value)
    return key, sequence, Effect(type_.decode(), data["scanner"], data["number"])


@asynccontextmanager
async def connected(database: str) -> AsyncIterator[asyncpg.Connection]:
    """Lend a connection to a database."""
    connection = await asyncpg.connect(database)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def running(*services: Service) -> AsyncIterator[None]:
    """Start processes, and stop them when the block ends. Raises `ProcessFailed`."""
    try:
        for service in services:
            await service.start()
        yield
    finally:
        properly = await asyncio.gather(*(service.stop() for service in services))
    if not all(properly):
        raise ProcessFailed(f"it did not end properly when it was asked to: {services[0].log}")


async def guarded(work: Coroutine[Any, Any, T], services: Sequence[Service]) -> T:
    """Do the work while the processes run. Raises `ProcessFailed` when one ends by itself."""
    working = asyncio.ensure_future(work)
    guards = [asyncio.ensure_future(service.guard()) for service in services]
    try:
        await asyncio.wait([working, *guards], return_when=asyncio.FIRST_COMPLETED)
        for service, guard in zip(services, guards, strict=True):
            if guard.done() and not working.done() and (ended := guard.exception()):
                raise ProcessFailed(f"{ended}\n{last_lines(service.log)}")
        return await working
    finally:
        for task in (working, *guards):
            task.cancel()
        await asyncio.gather(working, *guards, return_exceptions=True)
