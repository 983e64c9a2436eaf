"""Usual: what one writes after reading about the pattern: one message, one transaction, the ORM.

    python -m benchmarks.usual prepare|run

Beside it a task polls the outbox and publishes row by row.
"""

import asyncio
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from time import monotonic
from uuid import UUID, uuid4

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord  # type: ignore[import-untyped]
from pydantic import BaseModel
from sqlalchemy import BigInteger, DateTime, Identity, Index, Text, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Mapped, mapped_column

from benchmarks.models import Base, Parcel, ScanRecorded, events_of
from benchmarks.work import SCAN, Place, constant_headers, main, until_terminated

COMMIT_SECONDS = 1.0
PAGE_EVENTS = 100
POLL_SECONDS = 0.1
WAIT_MS = 100

Sessions = async_sessionmaker[AsyncSession]


class Inbox(Base):
    """The events that have taken effect."""

    __tablename__ = "inbox"

    source: Mapped[str] = mapped_column(Text, primary_key=True)
    id: Mapped[str] = mapped_column(Text, primary_key=True)


class Outbox(Base):
    """The events to publish, and those that are."""

    __tablename__ = "outbox"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    event_id: Mapped[UUID] = mapped_column(default=uuid4)
    created_at: Mapped[datetime] = mapped_column(
        DateTime(timezone=True), default=lambda: datetime.now(UTC)
    )
    type: Mapped[str] = mapped_column(Text)
    key: Mapped[str] = mapped_column(Text)
    sequence: Mapped[int] = mapped_column(BigInteger)
    payload: Mapped[str] = mapped_column(Text)
    published_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))

    __table_args__ = (Index("outbox_unpublished", id, postgresql_where=published_at.is_(None)),)


async def consume(consumer: AIOKafkaConsumer, sessions: Sessions, stopping: asyncio.Event) -> None:
    """Apply message after message; tell Kafka now and then how far it has come."""
    committed_at = monotonic()
    while not stopping.is_set():
        fetched = await consumer.getmany(timeout_ms=WAIT_MS, max_records=100)
        for record in (record for records in fetched.values() for record in records):
            # What was fetched and is not handled must not be committed: the position is past it.
            await apply(record, sessions)
        if monotonic() - committed_at >= COMMIT_SECONDS or stopping.is_set():
            await consumer.commit()
            committed_at = monotonic()


async def apply(record: ConsumerRecord, sessions: Sessions) -> None:
    """Write marker, parcel and events in one transaction; do nothing if the marker is there."""
    headers = {name: value.decode() for name, value in record.headers}
    if headers["ce_type"] != SCAN.decode():
        return
    with suppress(IntegrityError):
        async with sessions.begin() as session:
            session.add(Inbox(source=headers["ce_source"], id=headers["ce_id"]))
            await session.flush()
            await handle(ScanRecorded.model_validate_json(record.value), session)


async def handle(scan: ScanRecorded, session: AsyncSession) -> None:
    """Store the parcel's place, and publish its move and its delay."""
    parcel = await session.get(Parcel, scan.parcel_id, with_for_update=True)
    if parcel is None:
        parcel = Parcel(scan.parcel_id)
        session.add(parcel)
    parcel.move_to(scan.place, scan.scanned_at)
    for type, event in events_of(scan, parcel):
        publish(type, event, of=parcel, session=session)


def publish(type: bytes, event: BaseModel, *, of: Parcel, session: AsyncSession) -> None:
    """Add an event to the outbox."""
    of.version += 1
    session.add(
        Outbox(
            type=type.decode(),
            key=of.id,
            sequence=of.version,
            payload=event.model_dump_json(),
        )
    )


async def relay(
    producer: AIOKafkaProducer, topic: str, sessions: Sessions, stopping: asyncio.Event
) -> None:
    """Publish the outbox page after page."""
    wanted = (
        select(Outbox)
        .where(Outbox.published_at.is_(None))
        .order_by(Outbox.id)
        .limit(PAGE_EVENTS)
        .with_for_update(skip_locked=True)
    )
    while not stopping.is_set():
        async with sessions.begin() as session:
            rows = (await session.scalars(wanted)).all()
            sent = [
                await producer.send(
                    topic, row.payload.encode(), key=row.key.encode(), headers=headers_of(row)
                )
                for row in rows
            ]
            await asyncio.gather(*sent)
            for row in rows:
                row.published_at = datetime.now(UTC)
        if len(rows) < PAGE_EVENTS:
            await asyncio.sleep(POLL_SECONDS)


def headers_of(row: Outbox) -> list[tuple[str, bytes]]:
    """Return the headers of an event."""
    return [
        *constant_headers("/benchmarks/usual", row.type.encode()),
        ("ce_id", row.event_id.hex.encode()),
        ("ce_time", row.created_at.isoformat().encode()),
        ("ce_subject", row.key.encode()),
        ("ce_sequence", f"{row.sequence:020}".encode()),
    ]


async def prepare(place: Place) -> None:
    """Create the tables."""
    engine = create_async_engine(place.database_url)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
    finally:
        await engine.dispose()


async def run(place: Place) -> None:
    """Work until SIGTERM, then finish what was begun."""
    stopping = until_terminated()
    async with AsyncExitStack() as stack:
        engine = create_async_engine(place.database_url)
        stack.push_async_callback(engine.dispose)
        sessions = async_sessionmaker(engine, expire_on_commit=False)
        producer = AIOKafkaProducer(
            bootstrap_servers=place.bootstrap_servers, enable_idempotence=True, acks="all"
        )
        await producer.start()
        stack.push_async_callback(producer.stop)
        consumer = AIOKafkaConsumer(
            place.input,
            bootstrap_servers=place.bootstrap_servers,
            group_id=place.name,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
        )
        await consumer.start()
        stack.push_async_callback(consumer.stop)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(relay(producer, place.output, sessions, stopping))
            await consume(consumer, sessions, stopping)


if __name__ == "__main__":
    main(prepare, run)
