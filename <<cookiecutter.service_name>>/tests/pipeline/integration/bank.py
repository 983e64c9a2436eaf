"""A small service for the engine's tests: accounts that take deposits and tell their balance."""

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiokafka import AIOKafkaProducer, ConsumerRecord
from sqlalchemy import Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pipeline import Aggregate, Event, Handlers, Service, Transaction

ATTEMPTS = 4
"""Attempts that a process of the bank has for a deposit; its handler in a test has the usual."""


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


class Refused(Exception):
    """What the handler raises for an amount that the test has forbidden."""


@dataclass
class Bank:
    """The service with topics of its own, and what the test lets it do."""

    deposits: str
    """Topic that deposits come from."""
    balances: str
    """Topic that balances go to."""
    name: str
    refused: set[int] = field(default_factory=set)
    """Amounts that the handler raises for."""
    calls: list[int] = field(default_factory=list)
    """Amounts that the handler was called with, in that order, rolled back or not."""
    handlers: Handlers = field(default_factory=Handlers)
    options: dict[str, Any] = field(default_factory=dict)
    """Of the handler: its policy, its mode, its time-out."""
    errors: dict[int, Exception] = field(default_factory=dict)
    """What the handler raises for an amount, other than `Refused`."""
    failed: Counter[str] = field(default_factory=Counter)
    """How often a deposit, by its id, was refused because it says so itself."""
    waits: dict[int, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    """What the handler waits for with an amount, before it does anything."""

    def __post_init__(self) -> None:
        class BalanceChanged(Event, type="balance.changed", topic=self.balances):
            account: str
            balance: int
            amount: int

        @self.handlers.on(
            Deposited,
            topic=self.deposits,
            consumer="deposit",
            loads=Account.by("account"),
            **self.options,
        )
        async def deposit(event: Deposited, tx: Transaction) -> None:
            self.calls.append(event.amount)
            if event.amount in self.waits:
                await self.waits[event.amount]()
            if event.amount in self.errors:
                raise self.errors[event.amount]
            if self.failed[tx.message.id] < event.failures:
                self.failed[tx.message.id] += 1
                raise Refused(f"{event.amount} wants to be refused")
            if event.amount in self.refused:
                raise Refused(f"{event.amount} is refused")
            account = await tx.load_or_create(Account, event.account)
            account.balance += event.amount
            account.history += f"{event.amount},"
            tx.publish(
                BalanceChanged(account=account.id, balance=account.balance, amount=event.amount),
                of=account,
            )

    @property
    def service(self) -> Service:
        """The bank as a service."""
        return Service(self.name, handlers=self.handlers, metadata=Base.metadata)


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
        return [
            ("ce_specversion", b"1.0"),
            ("ce_id", (self.id or str(self.amount)).encode()),
            ("ce_source", self.source.encode()),
            ("ce_type", self.type.encode()),
            ("content-type", b"application/json"),
            *self.headers,
        ]
