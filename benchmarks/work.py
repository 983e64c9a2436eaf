"""What the contestants share: their surroundings, the names of things, how a command runs."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from zlib import crc32

import uvloop
from aiokafka.partitioner import murmur2  # type: ignore[import-untyped]

SCAN = b"scan.recorded.v1"
MOVED = b"parcel.moved.v1"
DELAYED = b"parcel.delayed.v1"
LATE = 60
"""Minutes from which a parcel counts as delayed."""

Header = tuple[str, bytes]
Headers = Sequence[Header]


@dataclass(frozen=True)
class Place:
    """Where a contestant works."""

    database_url: str
    """As SQLAlchemy wants it."""
    bootstrap_servers: str
    input: str
    """The topic of the scans."""
    output: str
    """The topic of the parcels' events."""
    name: str
    """The consumer group."""

    @classmethod
    def from_environment(cls) -> "Place":
        """Read the variables that say it."""
        return cls(
            os.environ["PIPELINE_DATABASE_URL"],
            os.environ["PIPELINE_KAFKA_BOOTSTRAP_SERVERS"],
            os.environ["BENCH_INPUT"],
            os.environ["BENCH_OUTPUT"],
            os.environ["BENCH_NAME"],
        )

    @property
    def dsn(self) -> str:
        """The database as asyncpg wants it."""
        return self.database_url.replace("+asyncpg", "", 1)


def constant_headers(source: str, type: bytes) -> list[Header]:
    """Return the headers that every event of one type has."""
    return [
        ("ce_specversion", b"1.0"),
        ("ce_source", source.encode()),
        ("ce_type", type),
        ("content-type", b"application/json"),
    ]


@lru_cache(maxsize=65_536)
def partition_of(key: bytes, partitions: int) -> int:
    """Return the partition that every Kafka client's default partitioner chooses for the key."""
    return int(murmur2(key) & 0x7FFFFFFF) % partitions


def is_poison(number: int, share: float) -> bool:
    """Whether a scan is one of those that fail: always the same ones, scattered over the load."""
    return crc32(b"%d" % number) < share * 2**32


def collect_hardly_ever() -> None:
    """Keep the collector from looking for cycles: what a batch makes holds none."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000_000)


def until_terminated() -> asyncio.Event:
    """Return what is set when SIGTERM comes."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    return stopping


def main(
    prepare: Callable[[Place], Awaitable[None]],
    run: Callable[[Place], Awaitable[None]],
) -> None:
    """Do what the command line says."""
    commands = {"prepare": prepare, "run": run}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit(f"say one of: {', '.join(commands)}")

    async def work() -> None:
        await commands[sys.argv[1]](Place.from_environment())

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())
