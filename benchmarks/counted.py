"""The process whose instructions `make instructions` counts.

`python -m benchmarks.counted JOBS` runs jobs, each in a fork of this process, and prints JSON: its
build, and round trips and statements of each job. `python -m benchmarks.counted JOBS FOLDER` does
so in valgrind, which writes into FOLDER, and counts instructions. The forks share the imports,
which take most of valgrind's time.
"""

import asyncio
import gc
import hashlib
import json
import logging
import math
import multiprocessing
import os
import platform
import shlex
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy.dialects.postgresql.asyncpg  # noqa: F401  # before the forks
import uvloop

import onceward.cli.commands  # noqa: F401
from onceward.relay import brokers, publisher
from onceward.servers import database, tasks
from onceward.settings import Settings

from benchmarks.wire import EXCHANGES, STATEMENTS, Wire, count_messages

if TYPE_CHECKING:
    from benchmarks.single_task import SingleTask

GROUP = "counted"
VALGRIND = ("valgrind", "--quiet", "--tool=cachegrind", "--cache-sim=no")


def instructions(folder: Path) -> int:
    """Return the instructions executed so far.

    Valgrind writes them when a process ends, so a copy of this one ends.
    """
    if not (copy := os.fork()):
        os._exit(0)
    os.waitpid(copy, 0)
    return int((folder / str(copy)).read_text().rpartition("summary:")[2])


@dataclass(frozen=True)
class Job:
    """Records to handle: some to warm up, then those that count, then a last batch.

    The last batch keeps the consumer from waiting for records while others are counted.
    """

    environment: dict[str, str]
    module: str
    """It has the handlers."""
    source: str
    """Folder of the service's packages. The engine is that of the parcel tracker for all jobs."""
    batch: int
    """Records of a transaction."""
    warm_up: int
    counted: int


class Warnings(logging.Handler):
    """Warnings of clients: what they do about a server's failure costs instructions."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


async def measure(job: Job, folder: Path | None) -> dict[str, Any]:
    """Handle the records of a job; return what the counted ones took, and warnings meanwhile."""
    from benchmarks.single_task import consumer_of, single_task  # it reads the environment

    settings = Settings()
    consumer = consumer_of(settings)
    logging.getLogger().addHandler(warnings := Warnings())
    handlers = import_module(job.module).handlers
    for handler in handlers:
        object.__setattr__(handler, "timeout", 3_600.0)  # valgrind takes forty times as long

    async def handle(task: "SingleTask", number: int) -> None:
        (partition,) = consumer.assignment()
        for _ in range(number // job.batch):
            records: list[Any] = []
            while left := job.batch - len(records):
                await consumer.arrival(partition, asyncio.get_running_loop().time() + 1.0)
                records += await consumer.take(partition, left)
            await task.handle(records)

    async with single_task(GROUP, settings, handlers) as task:
        await consumer.start()
        try:
            await handle(task, job.warm_up)
            Wire.sent.clear()
            warnings.texts.clear()
            gc.collect()  # so that equal work is interrupted by equal collections
            before = instructions(folder) if folder else 0
            await handle(task, job.counted)
            after = instructions(folder) if folder else 0
            sent, said = Wire.sent.copy(), warnings.texts.copy()
            await handle(task, job.batch)
        finally:
            await consumer.stop()
    if folder:
        return {"instructions": (after - before) / job.counted, "warnings": said}
    exchanges, statements = (sum(sent[kind] for kind in kinds) for kinds in (EXCHANGES, STATEMENTS))
    return {
        "round_trips": exchanges / (job.counted // job.batch),
        "statements": statements / job.counted,
        "warnings": said,
    }


def build() -> str:
    """Return the name of this interpreter's build, equal for equal compilers and options."""
    options = " ".join(map(str, sysconfig.get_config_vars("CONFIG_ARGS", "PY_CFLAGS")))
    # Paths differ between machines and make no difference.
    words = " ".join(word for word in shlex.split(options) if "/" not in word)
    name = f"{platform.python_implementation()} {platform.python_version()}"
    mark = hashlib.sha256(words.encode()).hexdigest()[:8]
    return f"{name}, {platform.python_compiler()}, {platform.machine()}, options {mark}"


def start(job: Job, folder: Path | None) -> Connection:
    """Run a job in a fork; return the connection by which it sends what it took."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def run() -> None:
        os.environ |= job.environment
        sys.path.append(job.source)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            sending.send(runner.run(measure(job, folder)))

    context.Process(target=run).start()
    sending.close()  # so that receiving fails if the fork has died
    return receiving


def _producer(make: Callable[..., Any], **options: Any) -> Any:
    """Return a producer that does not look for new partitions."""
    return make(**options | {"metadata_max_age_ms": 3_600_000})


def main(jobs: str, folder: str | None = None) -> None:
    """Run the jobs, and print what they took."""
    if folder and "IN_VALGRIND" not in os.environ:
        os.environ["IN_VALGRIND"] = "yes"
        command = [sys.executable, "-m", "benchmarks.counted", jobs, folder]
        os.execvp(VALGRIND[0], [*VALGRIND, f"--cachegrind-out-file={folder}/%p", *command])
    if not folder:
        count_messages()
    # Nothing may happen by the clock: valgrind takes forty times as long, a busy machine longer.
    tasks.SLICE_SECONDS = math.inf
    vars(publisher)["KafkaProducer"] = partial(_producer, publisher.KafkaProducer)
    brokers._ACKNOWLEDGEMENT_SECONDS = 3_600.0
    database._CONNECT_SECONDS = database._COMMAND_SECONDS = 3_600.0
    counts = Path(folder) if folder else None
    started = [start(Job(**job), counts) for job in json.loads(jobs)]
    print(json.dumps({"build": build(), "jobs": [each.recv() for each in started]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
