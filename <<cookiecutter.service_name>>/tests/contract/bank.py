"""A small service for the tests: accounts that take deposits and publish their balance."""

import json
from dataclasses import dataclass

import asyncpg
from aiokafka import AIOKafkaProducer, ConsumerRecord
from sqlalchemy import Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from onceward import Aggregate, Event


class Base(DeclarativeBase):
    """The bank's tables; the tests create them without migrations."""


class Account(Aggregate, Base):
    """How much an account holds, and the deposits in the order in which they came."""

    __tablename__ = "account"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    balance: Mapped[int]
    history: Mapped[str] = mapped_column(Text)

    def __init__(self, id: str) -> None:
        self.id = id
        self.balance = 0
        self.history = ""


class Deposited(Event, type="deposited"):
    """Money came in."""

    account: str
    amount: int
    failures: int = 0
    """How often a process refuses it before it takes it."""


@dataclass(frozen=True)
class Deposit:
    """A record for the topic of deposits. The id is the amount, unless it is given."""

    amount: int
    account: str = "ada"
    id: str | None = None
    source: str = "/tests"
    type: str = "deposited"
    value: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    """More headers; each takes the place of that with its name."""
    partition: int | None = 0
    timestamp: int | None = None
    """The record's, in milliseconds; unless it is given, when the record is sent."""
    key: str | None = "account"
    """None leaves the key out; otherwise it is the account."""
    failures: int = 0
    """How often a process refuses it before it takes it."""

    async def send(self, producer: AIOKafkaProducer, topic: str) -> None:
        """Send it and wait for the acknowledgement."""
        await producer.send_and_wait(
            topic,
            self._payload(),
            key=self._key(),
            partition=self.partition,
            timestamp_ms=self.timestamp,
            headers=self._headers(),
        )

    def record(self, topic: str, offset: int) -> ConsumerRecord[bytes, bytes]:
        """Return it as if Kafka had returned it at this offset."""
        return ConsumerRecord(
            topic=topic,
            partition=self.partition or 0,
            offset=offset,
            timestamp=self.timestamp or 1_700_000_000_000,
            timestamp_type=0,
            key=self._key(),
            value=self._payload(),
            checksum=None,
            serialized_key_size=0,
            serialized_value_size=0,
            headers=tuple(self._headers()),
        )

    def _key(self) -> bytes | None:
        return None if self.key is None else self.account.encode()

    def _payload(self) -> bytes:
        if self.value is not None:
            return self.value
        payload: dict[str, object] = {"account": self.account, "amount": self.amount}
        if self.failures:
            payload["failures"] = self.failures
        return json.dumps(payload).encode()

    def _headers(self) -> list[tuple[str, bytes]]:
        usual = [
            ("ce_specversion", b"1.0"),
            ("ce_id", (self.id or str(self.amount)).encode()),
            ("ce_source", self.source.encode()),
            ("ce_type", self.type.encode()),
            ("content-type", b"application/json"),
        ]
        given = {name.lower() for name, value in self.headers if value}
        return [*(pair for pair in usual if pair[0] not in given), *self.headers]


async def histories(db: asyncpg.Connection) -> dict[str, list[int]]:
    """Return the deposits of every account, in the order in which they were applied."""
    rows = await db.fetch("SELECT id, history FROM account")
    return {row["id"]: [int(part) for part in row["history"].split(",") if part] for row in rows}
