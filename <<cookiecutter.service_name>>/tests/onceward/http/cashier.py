"""A bank that also takes deposits by request, and answers with the balance."""

from typing import Any
from uuid import uuid4

import asyncpg

from onceward import Event, Reject, Transaction

from tests.contract.bank import Account, Deposited
from tests.onceward.integration.bank import Bank

CASHIER = "pay in"
"""Consumer of deposits that come by request."""


class Failed(Event, type="failed"):
    """A request whose handler fails in a way of its own."""

    how: str


def with_cashier(bank: Bank, **options: Any) -> Bank:
    """Give the bank a handler of requests, which changes the same accounts as that of its topic."""
    deposit = next(one.function for one in bank.handlers if one.consumer == "deposit")

    @bank.handlers.on(
        Deposited, topic=None, consumer=CASHIER, loads=Account.by("account"), **options
    )
    async def pay_in(event: Deposited, tx: Transaction) -> dict[str, object]:
        if event.amount <= 0:
            raise Reject(f"{event.amount} is no deposit")
        await deposit(event, tx)
        account = await tx.load_or_create(Account, event.account)
        return {"account": account.id, "balance": account.balance}

    return bank


def cashier(**options: Any) -> Bank:
    """Return a bank with a handler of requests, and without topics in Kafka."""
    return with_cashier(Bank(deposits="deposits", balances="balances", name="bank"), **options)


def new_key() -> str:
    """Return an idempotency key."""
    return str(uuid4())


async def stored(db: asyncpg.Connection) -> dict[str, int]:
    """Return how many rows there are of what a request stores."""
    tables = ("pipeline.inbox", "pipeline.outbox", "pipeline.backlog", "account")
    return {one: await db.fetchval(f"SELECT count(*) FROM {one}") for one in tables}


NOTHING = {"pipeline.inbox": 0, "pipeline.outbox": 0, "pipeline.backlog": 0, "account": 0}
ONE = {"pipeline.inbox": 1, "pipeline.outbox": 1, "pipeline.backlog": 0, "account": 1}
