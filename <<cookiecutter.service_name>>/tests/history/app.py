"""The bank as a program that can take its deposits back: `python -m tests.history.app`."""

import os

from history.commands import app
from operate.commands import command_line
from pipeline import Transaction

from tests.contract.bank import Account, Deposited
from tests.pipeline.integration.bank import Bank

bank = Bank(
    deposits=os.environ["BANK_DEPOSITS"],
    balances=os.environ["BANK_BALANCES"],
    name=os.environ["BANK_NAME"],
)


@bank.handlers.correct(
    Deposited,
    topic=bank.deposits,
    of="deposit",
    consumer="undo",
    loads=Account.by("account"),
)
async def undo(event: Deposited, tx: Transaction) -> None:
    """Take a deposit back."""
    account = await tx.load_or_create(Account, event.account)
    account.balance -= event.amount
    account.history += f"{-event.amount},"


if __name__ == "__main__":
    command_line(bank.service, app)()
