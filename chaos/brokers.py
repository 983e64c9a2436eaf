"""What brokers may do to one topic while others go on: refuse its events, or lose its last records.

The end that is lost comes back, as from a disk that is found again: what the input holds is what
everything is compared with in the end. Meanwhile other records stand in its place. A service that
does not notice reads these, which nobody has sent, and skips what comes back.
"""

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import asyncpg  # type: ignore[import-untyped]
from aiokafka import AIOKafkaProducer  # type: ignore[import-untyped]
from aiokafka.admin import AIOKafkaAdminClient  # type: ignore[import-untyped]
from aiokafka.admin.config_resource import ConfigResource  # type: ignore[import-untyped]

from chaos.memory import Memory
from chaos.schedule import Fault
from chaos.system import AWAY, STOP, Servers, System
from demo import witness
from demo.feed import TOPIC

FOREVER = 2**63 - 1
OUTAGE = "InvalidTimestampError"
"""What a relay says that takes the refusal for an outage."""
READ = """
SELECT partition, anchor_offset FROM pipeline.position
 WHERE topic = $1 AND anchor_offset IS NOT NULL
"""
"""The last record that was read of each partition, with which the service compares the topic."""
TO_COME = 100
"""Scans that must still come: a partition that was blocked is ready when it has read another."""
OTHERS = 10
"""Records that stand behind the place of those that are lost."""
CATCHES_UP_WITHIN = 120.0
"""Seconds in which a slow service reads what has come, while nothing more comes."""
LOOK_EVERY = 0.2
READS_WITHIN = 5.0
"""Seconds in which a service reads the others, if it does not notice."""
SAID_WITHIN = 30.0
"""Seconds; whoever reads the partition may have been stopped."""


async def refuse(system: System, fault: Fault) -> bool:
    """Let a topic refuse its events for a while; return whether they wait for it by themselves.

    Notes it if a relay takes that for an outage: all events would wait.
    """
    kafka = system.servers.stack.kafka
    # What is a millisecond old when it arrives: nearly all.
    await allow_age(kafka, fault.target, 0)
    try:
        await asyncio.sleep(fault.seconds)
        if await system.is_said(OUTAGE):
            system.misbehaved.append(f"a relay holds all events up: {fault}")
        return await system.is_said(f"events wait: topic {fault.target} ")
    finally:
        await allow_age(kafka, fault.target, FOREVER)


async def allow_age(kafka: str, topic: str, milliseconds: int) -> None:
    """Let a topic take events that are so old when they arrive, and no older ones."""
    settings = {"message.timestamp.before.max.ms": str(milliseconds)}
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        await admin.alter_configs([ConfigResource("topic", topic, settings)])
    finally:
        await admin.close()


async def lose_tail(system: System, memory: Memory, fault: Fault) -> bool:
    """Let a partition of the input lose its last seconds for a while, and others take their place.

    Returns whether a process says so that has read what is lost.
    """
    servers = system.servers
    before = await ends(servers)
    await asyncio.sleep(fault.seconds)
    async with memory.at_rest() as to_come:
        after = await ends(servers)
        if to_come < TO_COME or not any(after[n].offset > before[n].offset for n in after):
            return False
        partition = await read_behind(servers, before)
        if partition is None:
            return False
        end = after[partition].offset
        async with cut(servers, partition, before[partition].size):
            await fill(servers, partition, end + OTHERS)
            await asyncio.sleep(READS_WITHIN)
            return await system.is_said(f"topic changed: {TOPIC}/{partition} ", SAID_WITHIN)


class End(NamedTuple):
    """The end of a partition."""

    size: int
    """Bytes of its log."""
    offset: int
    """Looked at later: in the meantime records may have come."""


async def ends(servers: Servers) -> dict[int, End]:
    """Return the end of each partition of the input."""
    sizes = {_number(one): _log(one).stat().st_size for one in _data(servers).glob(f"{TOPIC}-*")}
    async with witness.reading(servers.stack.kafka, TOPIC) as consumer:
        offsets = await consumer.end_offsets(consumer.assignment())
    return {one.partition: End(sizes[one.partition], end) for one, end in offsets.items()}


async def read_behind(servers: Servers, before: Mapping[int, End]) -> int | None:
    """Wait for a partition of which the service has read a record behind this end; return it."""
    until = time.monotonic() + CATCHES_UP_WITHIN
    while time.monotonic() < until:
        with suppress(*AWAY):
            connection = await asyncpg.connect(servers.url())
            try:
                for partition, offset in await connection.fetch(READ, TOPIC):
                    if offset >= before[partition].offset:
                        return int(partition)
            finally:
                await connection.close()
        await asyncio.sleep(LOOK_EVERY)
    return None


@asynccontextmanager
async def cut(servers: Servers, partition: int, size: int) -> AsyncIterator[None]:
    """Let a partition end after so many bytes in the block, as if no more had reached the disk.

    What is written to it in the block is gone after it.
    """
    folder, whole = _data(servers) / f"{TOPIC}-{partition}", servers.stack.state / "whole"
    await servers.stop("kafka", STOP["kafka"])
    shutil.rmtree(whole, ignore_errors=True)  # of a round that was killed
    shutil.copytree(folder, whole)
    os.truncate(_log(folder), size)
    for index in folder.glob("*index"):  # the broker makes anew what is missing
        index.unlink()
    await servers.start()
    try:
        yield
    finally:
        await servers.stop("kafka", STOP["kafka"])
        shutil.rmtree(folder)
        whole.rename(folder)
        await servers.start()


async def fill(servers: Servers, partition: int, end: int) -> None:
    """Write records that nobody has sent to a partition, until it ends there."""
    begin = (await ends(servers))[partition].offset
    async with AIOKafkaProducer(bootstrap_servers=servers.stack.kafka) as producer:
        for _ in range(begin, end):
            await producer.send_and_wait(TOPIC, b"nobody has sent this", partition=partition)


def _data(servers: Servers) -> Path:
    return servers.stack.state / "kafka" / "data"


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _log(folder: Path) -> Path:
    """Return the log of a partition, of which a round fills no more than one segment."""
    [segment] = folder.glob("*.log")
    return segment
