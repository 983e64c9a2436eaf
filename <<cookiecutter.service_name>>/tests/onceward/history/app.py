"""The bank as a program that can take its deposits back: `python -m tests.onceward.history.app`."""

import os

from onceward.cli.commands import command_line
from onceward.history.commands import app

from tests.onceward.integration.bank import Bank, add_undo

bank = Bank(
    deposits=os.environ["BANK_DEPOSITS"],
    balances=os.environ["BANK_BALANCES"],
    name=os.environ["BANK_NAME"],
)
add_undo(bank)

if __name__ == "__main__":
    command_line(bank.service, app)()
