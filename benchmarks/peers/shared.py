"""What the peers' programs share: the handler, one consumer for each partition, how they end.

A partition is consumed message by message in a task of its own, which keeps the order of each key.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic
from typing import Any
from uuid import uuid4

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition  # type: ignore[import-untyped]
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)

from benchmarks.models import Parcel, ScanRecorded, events_of
from benchmarks.usual import COMMIT_SECONDS, WAIT_MS, Inbox
from benchmarks.work import Place, constant_headers, until_terminated

RELAYS = 4
"""Tasks that relay, where a package keeps the order of each key with several of them."""
BATCH = 200
"""Events that a relay takes at once."""
POLL_SECONDS = 0.05
_CONNECTIONS = 40

Stage = Callable[["Event", AsyncSession], Awaitable[object]]


@dataclass(frozen=True)
class Event:
    """An event of a parcel, to be staged in a package's outbox."""

    type: str
    key: str
    sequence: int
    json: str
    id: str = field(default_factory=lambda: uuid4().hex)

    @property
    def headers(self) -> dict[str, str]:
        """The headers that `usual` sends, too."""
        constant = constant_headers("/benchmarks/peers", self.type.encode())
        return {name: value.decode() for name, value in constant} | {
            "ce_id": self.id,
            "ce_time": datetime.now(UTC).isoformat(),
            "ce_subject": self.key,
            "ce_sequence": f"{self.sequence:020}",
        }


@dataclass(frozen=True)
class Clients:
    """The connections of a program."""

    engine: AsyncEngine
    sessions: async_sessionmaker[AsyncSession]
    producer: AIOKafkaProducer
    consumers: Sequence[AIOKafkaConsumer]
    """One for each partition, not started yet."""


@asynccontextmanager
async def connected(place: Place) -> AsyncIterator[Clients]:
    """Lend the connections."""
    async with AsyncExitStack() as stack:
        engine = create_async_engine(place.database_url, pool_size=_CONNECTIONS)
        stack.push_async_callback(engine.dispose)
        producer = AIOKafkaProducer(
            bootstrap_servers=place.bootstrap_servers, enable_idempotence=True, acks="all"
        )
        await producer.start()
        stack.push_async_callback(producer.stop)
        consumers = []
        for partition in sorted(await producer.partitions_for(place.input)):
            consumer = AIOKafkaConsumer(
                bootstrap_servers=place.bootstrap_servers,
                group_id=place.name,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
            )
            consumer.assign([TopicPartition(place.input, partition)])
            consumers.append(consumer)
        sessions = async_sessionmaker(engine, expire_on_commit=False)
        yield Clients(engine, sessions, producer, consumers)


async def until_stopped(*work: Coroutine[Any, Any, object]) -> None:
    """Do the work in tasks until SIGTERM, then cancel them."""
    stopping = until_terminated()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        await stopping.wait()
        for task in tasks:
            task.cancel()


def identity(record: ConsumerRecord) -> tuple[str, str]:
    """Return source and id of a message."""
    headers = dict(record.headers)
    return headers["ce_source"].decode(), headers["ce_id"].decode()


async def moved(scan: ScanRecorded, session: AsyncSession) -> Sequence[Event]:
    """Store the parcel's place; return the events that tell of it."""
    parcel = await session.get(Parcel, scan.parcel_id, with_for_update=True)
    if parcel is None:
        parcel = Parcel(scan.parcel_id)
        session.add(parcel)
    parcel.move_to(scan.place, scan.scanned_at)
    events = []
    for type, event in events_of(scan, parcel):
        parcel.version += 1
        events.append(Event(type.decode(), parcel.id, parcel.version, event.model_dump_json()))
    return events


async def consume(consumer: AIOKafkaConsumer, clients: Clients, stage: Stage) -> None:
    """Apply message by message, for a package without an inbox: with the table of `usual`."""
    committed_at = monotonic()
    async with consumer:
        while True:
            fetched = await consumer.getmany(timeout_ms=WAIT_MS, max_records=100)
            for record in (record for records in fetched.values() for record in records):
                source, id = identity(record)
                with suppress(IntegrityError):
                    async with clients.sessions.begin() as session:
                        session.add(Inbox(source=source, id=id))
                        await session.flush()
                        scan = ScanRecorded.model_validate_json(record.value)
                        for event in await moved(scan, session):
                            await stage(event, session)
            if monotonic() - committed_at >= COMMIT_SECONDS:
                await consumer.commit()
                committed_at = monotonic()
