"""The bank with its page and a correction, as a program: `python -m tests.page.app page`."""

from importlib.util import find_spec

from operate.commands import command_line
from page.commands import group
from pipeline import Transaction

from tests.contract.bank import Account, Deposited
from tests.pipeline.integration.app import bank


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
    more = ["history.views"] if find_spec("history") else []
    command_line(bank.service, page=group(bank.service, *more))()
