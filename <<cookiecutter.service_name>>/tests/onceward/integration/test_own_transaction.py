"""Consumers whose records have a transaction each."""

import asyncio
from dataclasses import replace
from datetime import datetime
from uuid import uuid4

import asyncpg
import pytest
import sqlalchemy as sa
from sqlalchemy import Text
from sqlalchemy.orm import Mapped, mapped_column

from onceward import Aggregate, Handlers, Service, Transaction
from onceward.apply.attempt import Findings
from onceward.consume.gathering import Gatherer
from onceward.consume.partition_source import PartitionBatch
from onceward.runtime import Part
from onceward.servers import revisions

from .applier import Applier, NewApplier
from tests.conftest import Running
from tests.contract.bank import Base, Deposit, Deposited
from tests.servers.waiting import eventually

TOPIC = "deposits"
KEYS = ("ada", "ada", "bob", "ada")


class Reading(Base):
    """A row with the time of its transaction in the key."""

    __tablename__ = "own_reading"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    at: Mapped[datetime] = mapped_column(
        sa.DateTime(timezone=True), server_default=sa.func.now(), primary_key=True
    )


class Heard(Base):
    """A row with the id of the transaction that has added it."""

    __tablename__ = "own_heard"

    id: Mapped[int] = mapped_column(sa.BigInteger, sa.Identity(), primary_key=True)
    xid: Mapped[str] = mapped_column(Text, server_default=sa.text("pg_current_xact_id()::text"))


async def add_reading(event: Deposited, tx: Transaction) -> None:
    tx.add(Reading(id=event.account))


async def add_heard(event: Deposited, tx: Transaction) -> None:
    tx.add(Heard())


async def apply(applier: Applier) -> None:
    await applier.apply(*(Deposit(n, account=key) for n, key in enumerate(KEYS)))


async def readings(db: asyncpg.Connection) -> list[str]:
    return [row["id"] for row in await db.fetch("SELECT id FROM own_reading ORDER BY id")]


async def transactions(db: asyncpg.Connection) -> int:
    number: int = await db.fetchval("SELECT count(DISTINCT xid) FROM own_heard")
    return number


async def test_each_record_has_a_transaction(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    handlers = Handlers()
    handlers.on(Deposited, topic=TOPIC, consumer="reading", own_transaction=True)(add_reading)
    handlers.on(Deposited, topic=TOPIC, consumer="heard")(add_heard)
    applier = await new_applier(handlers, topic=TOPIC)
    await apply(applier)
    assert await applier.backlog() == []
    assert await readings(db) == sorted(KEYS)
    assert await transactions(db) == len(KEYS)


async def test_partitions_that_are_ready_at_once_share_none(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    handlers = Handlers()
    handlers.on(Deposited, topic=TOPIC, consumer="reading", own_transaction=True)(add_reading)
    handlers.on(Deposited, topic=TOPIC, consumer="heard")(add_heard)
    applier = await new_applier(handlers, topic=TOPIC)
    gatherer = Gatherer(applier.consume)

    async def take(partition: int) -> None:
        one = replace(applier, slot=replace(applier.slot, partition=partition))
        start = await one.position()
        batch = await one.read(Deposit(2 * partition), Deposit(2 * partition + 1), start=start)
        if not await gatherer.apply(PartitionBatch(one.slot, batch), Findings()):
            await one.apply_batch(batch)

    await asyncio.gather(take(0), take(1))
    assert await transactions(db) == 4


async def test_deferred_records_leave_other_consumers_their_batch(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    handlers = Handlers()
    handlers.on(Deposited, topic=TOPIC, consumer="reading", mode="deferred", own_transaction=True)(
        add_reading
    )
    handlers.on(Deposited, topic=TOPIC, consumer="heard")(add_heard)
    applier = await new_applier(handlers, topic=TOPIC)
    await apply(applier)
    await applier.work_off(4)
    assert await applier.backlog() == []
    assert await readings(db) == sorted(KEYS)
    assert await transactions(db) == 1


async def test_without_it_such_a_message_is_tried_alone_at_once(
    new_applier: NewApplier, db: asyncpg.Connection
) -> None:
    handlers = Handlers()
    handlers.on(Deposited, topic=TOPIC, consumer="reading")(add_reading)
    applier = await new_applier(handlers, topic=TOPIC)
    await apply(applier)
    assert {row["attempts"] for row in await applier.backlog()} <= {0}
    await applier.work_off()
    assert await applier.backlog() == []
    assert await readings(db) == sorted(KEYS)


class Daily(Aggregate, Base):
    """A row with the day of its transaction in a unique index, by SQLAlchemy."""

    __tablename__ = "own_daily"
    __table_args__ = (sa.Index("own_daily_key", "id", sa.text("timezone('UTC', at)"), unique=True),)

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    at: Mapped[datetime] = mapped_column(sa.DateTime(timezone=True), default=sa.func.now())


async def test_keys_with_the_time_of_a_transaction_are_found(db: asyncpg.Connection) -> None:
    found = await revisions.sharing(db, Base.metadata)
    assert [one for one in found if "own_" in one[0]] == [
        ("own_daily", "at of own_daily (default now())"),
        ("own_reading", "at of own_reading (default now())"),
    ]


def test_consumers_are_named_that_share_transactions_over_such_a_table() -> None:
    handlers, daily = Handlers(), Daily.by("account")
    handlers.on(Deposited, topic=TOPIC, consumer="heard")(add_heard)
    assert handlers.sharing("own_reading") == ["heard"]
    handlers.on(Deposited, topic=TOPIC, consumer="reading", own_transaction=True)(add_reading)
    assert handlers.sharing("own_reading") == []
    handlers.on(Deposited, topic=TOPIC, consumer="daily", loads=daily)(add_heard)
    assert handlers.sharing("own_reading") == []
    assert handlers.sharing("own_daily") == ["daily"]


async def test_the_start_names_what_a_batch_would_share(
    running: Running, db: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = Handlers()
    for consumer in ("daily", "rival"):
        handlers.on(Deposited, topic=TOPIC, consumer=consumer, loads=Daily.by("account"))(add_heard)
    service = Service(f"bank-{uuid4().hex[:8]}", handlers=handlers, metadata=Base.metadata)
    with caplog.at_level("WARNING"):
        async with running(service, Part.CONSUME):
            lacking = "which these consumers lack: daily, rival"
            await eventually(lambda: lacking in caplog.text)
    assert "own_daily (default now()) is part of a unique key" in caplog.text
    assert f"the consumers daily, rival of topic {TOPIC} load Daily" in caplog.text
