"""The rig: servers, topics and databases for contestants, and what they cost and achieve there."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg  # type: ignore[import-untyped]
from aiokafka import AIOKafkaConsumer, TopicPartition  # type: ignore[import-untyped]
from aiokafka.admin import AIOKafkaAdminClient, NewTopic  # type: ignore[import-untyped]

from benchmarks import load
from benchmarks.load import Load
from demo.processes import ProcessFailed, Service, Stack

PARTITIONS = 4
_LOOK_SECONDS = 0.02
_PATIENCE = 60.0
"""Seconds without progress after which a contestant has failed."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Contestant:
    """Somebody who does the work: a module that is run as a process."""

    name: str
    module: str
    handler: str = ""
    settings: Mapping[str, str] | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it is the baked service, which tells when it is ready."""
        return self.module == "benchmarks.ours"


@dataclass(frozen=True)
class Sample:
    """How far a contestant is at a time."""

    at: float
    """On the monotonic clock, in seconds."""
    count: int
    cpu: Mapping[str, float]
    """CPU seconds spent so far, by who spent them."""


class Rig:
    """Everything that contestants run on."""

    def __init__(self, project: Path, folder: Path, stack: Stack) -> None:
        self.project = project
        self.folder = folder
        self.stack = stack
        self._log = folder / "setup.txt"
        self._templates: set[str] = set()
        self._inputs: set[str] = set()
        self._number = 0

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Lend the servers."""
        await self.stack.up(self._log)
        try:
            self._admin = AIOKafkaAdminClient(bootstrap_servers=self.stack.kafka)
            await self._admin.start()
            self._looker = AIOKafkaConsumer(bootstrap_servers=self.stack.kafka)
            await self._looker.start()
            yield
        finally:
            with suppress(AttributeError):
                await self._looker.stop()
                await self._admin.close()
            await self.stack.down(self._log)

    async def topic(self, name: str, partitions: int = PARTITIONS) -> str:
        """Make a topic."""
        await self._admin.create_topics([NewTopic(name, partitions, 1)])
        return name

    async def input(self, load_: Load, partitions: int = PARTITIONS) -> str:
        """Return a topic that holds the load, which is written when it is first asked for."""
        name = f"scans-{load_.name}-{len(load_.scans)}-{partitions}"
        if name not in self._inputs:
            await self.topic(name, partitions)
            producer = load.producer(self.stack.kafka)
            await producer.start()
            try:
                await load.fill(producer, name, load_)
            finally:
                await producer.stop()
            self._inputs.add(name)
        return name

    async def execute(self, *statements: str, database: str | None = None) -> None:
        """Execute statements, each by itself."""
        connection = await asyncpg.connect(database or self.stack.database)
        try:
            for statement in statements:
                await connection.execute(statement, timeout=600)
        finally:
            await connection.close()

    def _url(self, database: str) -> str:
        return urlunsplit(urlsplit(self.stack.database)._replace(path=f"/{database}"))

    async def database(self, contestant: Contestant) -> str:
        """Return the URL of a fresh database with the contestant's tables."""
        template = f"bench_{contestant.module.rpartition('.')[2]}"
        if template not in self._templates:
            await self.execute(f"DROP DATABASE IF EXISTS {template}", f"CREATE DATABASE {template}")
            await self._command(contestant, self._url(template))
            self._templates.add(template)
        self._number += 1
        name = f"bench_{self._number}"
        await self.execute(
            f"DROP DATABASE IF EXISTS {name}",
            f"CREATE DATABASE {name} TEMPLATE {template}",
            "CHECKPOINT",
        )
        return self._url(name)

    async def _command(self, contestant: Contestant, url: str) -> None:
        service = self.process(contestant, url, input_="-", output="-", name="bench")
        await service.command("migrate" if contestant.is_ours else "prepare", log=self._log)

    def process(
        self, contestant: Contestant, url: str, *, input_: str, output: str, name: str
    ) -> Service:
        """Return the contestant's process, which is not started yet."""
        settings = {
            "PIPELINE_DATABASE_URL": url.replace("postgresql://", "postgresql+asyncpg://", 1),
            "PIPELINE_KAFKA_BOOTSTRAP_SERVERS": self.stack.kafka,
            "BENCH_INPUT": input_,
            "BENCH_OUTPUT": output,
            "BENCH_NAME": name,
            "BENCH_HANDLER": contestant.handler,
            **(contestant.settings or {}),
        }
        return Service(
            self.project,
            settings,
            self.folder / f"{contestant.name}.txt",
            self.folder / "contestant.pid",
            module=contestant.module,
        )

    def servers_cpu(self) -> dict[str, float]:
        """Return the CPU seconds that the servers have spent, where they are processes here."""
        state = self.stack.state / "state.json"
        if not state.exists():
            return {}
        told = json.loads(state.read_text())
        pids = {name: told[name].get("pid") for name in ("postgres", "kafka")}
        return {name: family_seconds(pid) for name, pid in pids.items() if pid}

    async def sizes(self, topic: str) -> int:
        """Return how many records are in a topic."""
        partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        return sum((await self._looker.end_offsets(partitions)).values())

    async def watch(self, service: Service, topic: str, expected: int) -> list[Sample]:
        """Look at an output topic until all is there. Raises `ProcessFailed` if it never is."""
        samples: list[Sample] = []
        progressed = time.monotonic()
        while not samples or samples[-1].count < expected:
            count = await self.sizes(topic)
            if samples and count > samples[-1].count:
                progressed = time.monotonic()
            elif time.monotonic() - progressed > _PATIENCE:
                raise ProcessFailed(f"{topic} stands at {count:,} of {expected:,} events")
            cpu = {"python": process_seconds(service.pid or 0), **self.servers_cpu()}
            samples.append(Sample(time.monotonic(), count, cpu))
            await asyncio.sleep(_LOOK_SECONDS)
        return samples


def process_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has spent, and children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS


def family_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of its children, gone or not."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    return process_seconds(pid) + sum(process_seconds(int(child)) for child in children)


def between(samples: Sequence[Sample], first: float, last: float) -> tuple[Sample, Sample]:
    """Return the samples at which these shares of the work were done."""
    whole = samples[-1].count
    begin = next(one for one in samples if one.count >= first * whole)
    end = next(one for one in samples if one.count >= last * whole)
    return begin, end
