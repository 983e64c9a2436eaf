"""The bank as a program: `python -m tests.contract.app run`. The environment says which one."""

import os
from collections import Counter

from onceward import Event, Handlers, Policy, Service, Transaction
from onceward.cli.commands import command_line

from .bank import Account, Base, Deposited

DEPOSITS = os.environ["BANK_DEPOSITS"]
BALANCES = os.environ["BANK_BALANCES"]
POISON = {int(amount) for amount in os.environ.get("BANK_POISON", "").split()}
"""Amounts that this release of the bank always fails on."""
POLICY = Policy(attempts=5, schedule=(0.05,), after_death="hold")

handlers = Handlers()
failures = Counter[str]()
"""How often this process has failed on a deposit, by its id."""


class BalanceChanged(Event, type="balance.changed", topic=BALANCES):
    """An account has taken a deposit; `balance` is what it holds now."""

    account: str
    balance: int
    amount: int


@handlers.on(
    Deposited, topic=DEPOSITS, consumer="deposit", loads=Account.by("account"), policy=POLICY
)
async def deposit(deposited: Deposited, tx: Transaction) -> None:
    """Add the deposit to its account, and publish the new balance."""
    if deposited.amount in POISON:
        raise ValueError(f"{deposited.amount} is poison")
    if failures[tx.message.id] < deposited.failures:
        failures[tx.message.id] += 1
        raise ValueError(f"{deposited.amount} fails {deposited.failures} times")
    account = await tx.load_or_create(Account, deposited.account)
    account.balance += deposited.amount
    account.history += f"{deposited.amount},"
    tx.publish(
        BalanceChanged(account=account.id, balance=account.balance, amount=deposited.amount),
        of=account,
    )


if __name__ == "__main__":
    service = Service(os.environ["BANK_NAME"], handlers=handlers, metadata=Base.metadata)
    command_line(service)()
