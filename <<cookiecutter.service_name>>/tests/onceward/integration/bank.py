"""The bank of the contract suite, and what a test of the engine lets it do."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from onceward import Event, Handlers, Service, Transaction
from onceward.retry.workers import BacklogWorkers

from tests.contract.bank import Account, Base, Deposited

ATTEMPTS = 8
"""More than two processes use up that refuse a deposit twice each, and lose a lane."""
CLAIM = """
INSERT INTO pipeline.claim (name, event_id) SELECT * FROM unnest($1::text[], $2::text[])
"""
"""As the claim check notes which payloads it has stored."""
"""Attempts that a process of the bank has for a deposit; its handler in a test has the usual."""


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

    workers: Sequence[type[BacklogWorkers]] = ()
    """Those of calls, where there are any."""

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
                if event.failures == 2:  # after this it can't be undone in memory
                    await asyncio.sleep(0)
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
        return Service(
            self.name, handlers=self.handlers, metadata=Base.metadata, workers=self.workers
        )


def add_undo(bank: Bank) -> None:
    """Register a correction, `undo`, which takes deposits back."""

    @bank.handlers.correct(
        Deposited,
        topic=bank.deposits,
        of="deposit",
        consumer="undo",
        loads=Account.by("account"),
    )
    async def undo(event: Deposited, tx: Transaction) -> None:
        account = await tx.load_or_create(Account, event.account)
        account.balance -= event.amount
        account.history += f"{-event.amount},"
